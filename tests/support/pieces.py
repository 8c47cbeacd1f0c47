"""Whether an episode in several sequences is trained as it was sampled, token by token."""

import numpy as np

from rollout.episode import Sample, Turn, stitch


def check(turns: list[Turn], made: list[Turn], limit: int) -> list[Sample]:
    """The samples of an episode, whose every trained token is as the engine sampled it, and once.

    `made` is what the engine has sampled: each answer must stand in one sample alone, behind just
    the tokens that the engine was given, trained, with its logprobs and versions. No sample is
    longer than `limit`.
    """
    samples = stitch(turns)
    total = 0
    for answer in made:
        ids, start = answer.prompt_ids + answer.token_ids, len(answer.prompt_ids)
        assert len(ids) <= limit
        holds = [s for s in samples if s.tokens_T[: len(ids)].tolist() == ids]
        (sample,) = [s for s in holds if s.engine_logp_T[start] == np.float32(answer.logps[0])]
        own = slice(start, len(ids))
        assert sample.mask_T[own].all()
        assert sample.engine_logp_T[own].tolist() == np.float32(answer.logps).tolist()
        assert sample.version_T[own].tolist() == answer.versions
        total += len(answer.token_ids)
    assert sum(int(s.mask_T.sum()) for s in samples) == total
    for sample in samples:
        assert (sample.version_T >= 0).tolist() == sample.mask_T.tolist()
        assert len(sample.tokens_T) <= limit
    return samples
