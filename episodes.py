"""What the policy and an environment did together, and the token sequences trained on it.

Tokens in, tokens out: what is trained are the ids that were sampled, never a re-tokenisation.
"""

import dataclasses
import math
from collections.abc import Callable

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
    flagged_T: np.ndarray  # bool, tokens of messages that get the penalty advantage
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


def stitch(turns: list[Turn], is_flagged: Callable[[str], bool]) -> list[Sample]:
    """Turns to sequences: each prompt must start with the exact ids before it, or a new one starts.

    What the environment added is masked out; answers that `is_flagged` are marked. NeMo-RL
    (environments/nemo_gym.py:280) asserts the same contiguity.
    """
    runs: list[list[Turn]] = []
    seen: list[int] = []
    for turn in turns:
        if not runs or turn.prompt_ids[: len(seen)] != seen:
            runs.append([])
        runs[-1].append(turn)
        seen = turn.prompt_ids + turn.token_ids
    return [join(run, is_flagged) for run in runs]


def join(turns: list[Turn], is_flagged: Callable[[str], bool]) -> Sample:
    """One sequence: in turn, what the environment added and what the policy answered."""
    tokens, mask, logps, versions, flags = [], [], [], [], []
    for turn in turns:
        added = turn.prompt_ids[len(tokens) :]
        answered = len(turn.token_ids)
        tokens += added + turn.token_ids
        mask += [False] * len(added) + [True] * answered
        logps += [0.0] * len(added) + turn.logps
        versions += [-1] * len(added) + turn.versions
        flags += [False] * len(added) + [is_flagged(turn.text)] * answered
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
        has_gradient=bool(sample.advantage or sample.flagged_T.any()),
        response_tokens=len(versions),
        oldest_version=int(versions.min(initial=2**31 - 1)),
        newest_version=int(versions.max(initial=-1)),
        truncated=sample.truncated,
    )
