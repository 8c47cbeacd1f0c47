"""What the policy and an environment did together, and the token sequences trained on it.

Tokens in, tokens out: what is trained are the ids that were sampled, never a re-tokenisation.
"""

import dataclasses
import itertools
import math

import numpy as np

from envs import Reward


@dataclasses.dataclass
class Turn:
    """What the policy answered to one prompt: ids [T], engine logprobs [T], versions [T]."""

    prompt_ids: list[int]
    token_ids: list[int]
    logps: list[float]
    versions: list[int]
    finish_reason: str  # "stop", or "length" where the answer was cut off
    text: str = ""

    @classmethod
    def from_vllm(cls, prompt_ids: list[int], answer) -> "Turn":
        """A CompletionOutput, whose version spans become one version for each token.

        Raises RuntimeError unless the policy or the length limit ended it.
        """
        if answer.finish_reason not in ("stop", "length"):
            raise RuntimeError(f"vLLM ended a request with {answer.finish_reason!r}")
        spans = answer.weight_versions
        versions = [int(span.version) for span in spans for _ in range(span.start, span.end)]
        logps = list(answer.logprobs.logprobs)
        return cls(prompt_ids, list(answer.token_ids), logps, versions, answer.finish_reason)


class Policy:
    """What an environment sees of the policy: token ids in, a Turn out, always the same engine.

    `cfg` tells it max_model_len and how prompts are rendered.
    """

    def __init__(self, generator, tokenizer, cfg, seed: int):
        self.generator, self.tokenizer, self.cfg = generator, tokenizer, cfg
        self.seeds = itertools.count(seed, 1000)

    async def generate(self, prompt_ids: list[int], n: int = 1) -> list[Turn]:
        """n answers to one prompt, with their text."""
        turns = await self.generator.generate.remote(prompt_ids, n, next(self.seeds))
        for turn in turns:
            turn.text = self.tokenizer.decode(turn.token_ids, skip_special_tokens=True)
        return turns


@dataclasses.dataclass
class Episode:
    """One rollout: the policy's turns in order, and their reward."""

    turns: list[Turn]
    reward: Reward


@dataclasses.dataclass
class Sample:
    """One token sequence to train on: prompts and the environment's words, masked out, and ours."""

    tokens_T: np.ndarray  # int32
    mask_T: np.ndarray  # bool, True where the policy sampled the token
    engine_logp_T: np.ndarray  # float32, 0 where not sampled
    version_T: np.ndarray  # int32, -1 where not sampled
    malformed_T: np.ndarray  # bool, tokens of messages with stray markup
    truncated: bool
    reward: float = math.nan
    advantage: float = 0.0


@dataclasses.dataclass
class SampleInfo:
    """What the driver knows of a sample: numbers to plan and to log with, no tokens."""

    tokens: int
    trained_tokens: int
    reward: float
    has_gradient: bool
    response_tokens: int
    oldest_version: int
    newest_version: int
    truncated: bool


def is_malformed(text: str) -> bool:
    """Whether a message carries markup that a well-formed one would not (NeMo-RL nemo_gym.py)."""
    *thoughts, answer = text.split("</think>", 1)
    calls = ("<tool_call>", "</tool_call>", "<function_call>", "</function_call>")
    stray = "<think>" in answer or "</think>" in answer
    repeated = any(thought.count("<think>") > 1 for thought in thoughts)
    return stray or repeated or any(tag in text for tag in calls)


def stitch(turns: list[Turn]) -> list[Sample]:
    """Turns to sequences: each prompt must start with the exact ids before it, or a new one starts.

    What the environment added is masked out; malformed answers are marked. NeMo-RL
    (environments/nemo_gym.py:280) asserts the same contiguity.
    """
    runs: list[list[Turn]] = []
    seen: list[int] = []
    for turn in turns:
        if not runs or turn.prompt_ids[: len(seen)] != seen:
            runs.append([])
        runs[-1].append(turn)
        seen = turn.prompt_ids + turn.token_ids
    return [join(run) for run in runs]


def join(turns: list[Turn]) -> Sample:
    """One sequence: in turn, what the environment added and what the policy answered."""
    tokens, mask, logps, versions, flags = [], [], [], [], []
    for turn in turns:
        added = turn.prompt_ids[len(tokens) :]
        answered = len(turn.token_ids)
        tokens += added + turn.token_ids
        mask += [False] * len(added) + [True] * answered
        logps += [0.0] * len(added) + turn.logps
        versions += [-1] * len(added) + turn.versions
        flags += [False] * len(added) + [is_malformed(turn.text)] * answered
    return Sample(
        np.array(tokens, np.int32),
        np.array(mask, bool),
        np.array(logps, np.float32),
        np.array(versions, np.int32),
        np.array(flags, bool),
        truncated=turns[-1].finish_reason == "length",
    )


def describe(sample: Sample) -> SampleInfo:
    """What the driver needs to know of a sample."""
    versions = sample.version_T[sample.version_T >= 0]
    return SampleInfo(
        tokens=len(sample.tokens_T),
        trained_tokens=int(sample.mask_T.sum()),
        reward=sample.reward,
        has_gradient=bool(sample.advantage or sample.malformed_T.any()),
        response_tokens=len(versions),
        oldest_version=int(versions.min(initial=2**31 - 1)),
        newest_version=int(versions.max(initial=-1)),
        truncated=sample.truncated,
    )


def record(tokenizer, row: dict, episode: Episode, sample: Sample) -> dict:
    """What rollouts.jsonl tells of an episode; versions as [version, tokens] runs."""
    versions = itertools.chain.from_iterable(turn.versions for turn in episode.turns)
    return {
        "row": row["_line"],
        "env": row["agent_ref"]["name"],
        "prompt": tokenizer.decode(episode.turns[0].prompt_ids),
        "response": [turn.text for turn in episode.turns],
        "reward": sample.reward,
        "advantage": sample.advantage,
        "versions": [[version, len(list(run))] for version, run in itertools.groupby(versions)],
        "finish_reason": episode.turns[-1].finish_reason,
        "info": episode.reward.info,
    }


# What a packed row without samples holds: one token that trains nothing.
EMPTY = Sample(*(np.zeros(1, kind) for kind in ("i4", "?", "f4", "i4", "?")), False, reward=0.0)
