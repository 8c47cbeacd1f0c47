"""Rows, turns, and samples with random contents."""

import json

import numpy as np

from rollout.episode import Sample, Turn
from rollout.rows import Rows


def asking(text: str, agent: str = "any", **fields) -> dict:
    """A row of an agent that asks the policy this."""
    params = {"input": [{"role": "user", "content": text}]}
    return {"responses_create_params": params, "agent_ref": {"name": agent}} | fields


def stream(rows: list[dict]) -> Rows:
    """Where rows lie in a file that holds nothing else."""
    found, start = Rows("rows.jsonl"), 0
    for number, row in enumerate(rows, 1):
        line = json.dumps(row).encode() + b"\n"
        found.add(start, number, line)
        start += len(line)
    return found


def turn(prompt, tokens, version: int = 0, text: str = "fine", reason: str = "stop") -> Turn:
    """A turn whose logprobs tell its tokens apart."""
    logps = [-0.25 * t for t in tokens]
    return Turn(list(prompt), list(tokens), logps, [version] * len(tokens), reason, text)


def routed(prompt, tokens, first: int) -> Turn:
    """A turn whose tokens, but the last, were read by experts that are counted up."""
    made = turn(prompt, tokens)
    n = len(prompt) + len(tokens) - 1
    made.routes = [np.arange(first, first + 6 * n, dtype=np.int16).reshape(n, 3, 2)]
    return made


def make_sample(random: np.random.Generator, tokens: int, env: str = "", **fields) -> Sample:
    """A sample of some tokens; `fields` are fields of Sample."""
    reward = float(random.normal())
    return Sample(
        tokens_T=random.integers(0, 1000, tokens).astype(np.int32),
        mask_T=random.random(tokens) < 0.5,
        engine_logp_T=-random.random(tokens).astype(np.float32),
        version_T=random.integers(-1, 9, tokens).astype(np.int32),
        flaw_T=random.integers(0, 3, tokens).astype(np.int8),
        **{"truncated": False, "reward": reward, "score": reward, "env": env} | fields,
    )
