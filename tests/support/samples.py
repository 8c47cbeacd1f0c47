"""Samples with random contents."""

import numpy as np

from envs.rollout.episode import Sample


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
