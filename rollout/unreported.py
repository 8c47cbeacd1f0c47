"""What an engine has written of an answer that it has not finished."""

import dataclasses
import itertools
from typing import Any

import numpy as np

from policy.allowed_tokens import Allowed
from rollout.episode import Turn


def unreported(n: int, turn: Turn, state: Any) -> Turn:
    """What an answer has after its first n tokens: those of `turn`, then those of `state`.

    `state` is vLLM's RequestState of the request that goes on from `turn`, None where none does.
    """
    rest = turn.after(n)
    if state is None:
        return rest
    answer = state._new_completion_output([], None, None)
    answer.finish_reason = ""
    # vLLM adds the next one, and sets of tokens, to finished answers only.
    answer.weight_versions = state._weight_version_spans()
    new = Turn.from_vllm([], answer, max(0, n - len(turn.token_ids)))
    if chunks := getattr(state, "sampling_mask_chunks", None):
        new.allowed = last_sets(chunks, len(new.token_ids))
    return rest.extended(new)


def last_sets(chunks: list[Any], tokens: int) -> Allowed:
    """The sets of the last `tokens` tokens, of vLLM's SamplingMaskLists of one token or more.

    Older ones are not looked at: a report must not cost what the whole answer is long.
    """
    found = 0
    counts: list[np.ndarray] = []
    ids: list[np.ndarray] = []
    for chunk in reversed(chunks):
        if found >= tokens:
            break
        one = [0, len(chunk.token_ids)]
        counts.append(np.diff(one if chunk.offsets is None else chunk.offsets))
        ids.append(chunk.token_ids)
        found += len(counts[-1])
    none = np.zeros(0, np.int32)
    newest = (np.concatenate([none, *parts[::-1]], dtype=np.int32) for parts in (counts, ids))
    return Allowed(*newest).after(max(0, found - tokens))


def whole(prompt_ids: list[int], pieces: list[Turn]) -> Turn:
    """The answer that was reported in pieces; each token is copied once, however many there are."""
    chain = itertools.chain.from_iterable
    sets = [piece.allowed for piece in pieces if piece.allowed]
    return dataclasses.replace(
        pieces[-1],
        prompt_ids=prompt_ids,
        token_ids=list(chain(piece.token_ids for piece in pieces)),
        logps=list(chain(piece.logps for piece in pieces)),
        versions=list(chain(piece.versions for piece in pieces)),
        allowed=Allowed(*map(np.concatenate, zip(*sets, strict=True))) if sets else None,
    )
