"""What the trainer takes over from the engine, in the few runs that have it: experts and sets.

Experts are those that saw each token (policy.replay_routing). A set is what a token was chosen
among, where sampling is truncated (policy/allowed_tokens.py).
"""

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from policy.allowed_tokens import Allowed
from rollout import routing_replay

if TYPE_CHECKING:
    from rollout.episode import Sample, Turn

NONE = np.zeros(0, np.int32)


def of_turns(turns: "list[Turn]", tokens: int) -> dict[str, Any]:
    """Fields of the `Sample` of that length which turns become. Raises as `sets` does."""
    count_T, ids_M = sets(turns, tokens) or (None, None)
    return {
        "routes_T": routing_replay.join(turns, tokens),
        "allowed_T": count_T,
        "allowed_M": ids_M,
    }


def sets(turns: "list[Turn]", tokens: int) -> Allowed | None:
    """What each token of a sequence was chosen among; None where no turn has sets.

    Raises RuntimeError where a sampled token lacks its set or is not in it.
    """
    if not any(turn.allowed for turn in turns):
        return None
    count_T = np.zeros(tokens, np.int32)
    known = [turn.allowed or Allowed(NONE, NONE) for turn in turns]
    for turn, of_turn in zip(turns, known, strict=True):
        ids = np.array(turn.token_ids, np.int32)
        if len(of_turn.count_T) != len(ids) or not of_turn.count_T.all():
            have = f"{len(ids)} sampled tokens have {np.count_nonzero(of_turn.count_T)}"
            raise RuntimeError(f"{have} sets of tokens that the engine chose among")
        of_each = np.repeat(np.arange(len(ids)), of_turn.count_T)
        hits = np.bincount(of_each[of_turn.ids_M == ids[of_each]], minlength=len(ids))
        if not hits.all():
            odd = int(ids[hits == 0][0])
            raise RuntimeError(f"token {odd} was sampled, but is none that the engine chose among")
        start = len(turn.prompt_ids)
        count_T[start : start + len(ids)] = of_turn.count_T
    return Allowed(count_T, np.concatenate([of_turn.ids_M for of_turn in known]))


def of_row(samples: "list[Sample]", truncates: bool) -> dict[str, Any]:
    """Fields of the `Batch` that samples become, None where they have none.

    Raises ValueError where a trained sample lacks its sets and others have them, or the run
    `truncates`; and where a sample has other ids than its sets count.
    """
    experts = [sample.routes_T for sample in samples if sample.routes_T is not None]
    fields: dict[str, Any] = {"routes_N": experts if len(experts) == len(samples) else None}
    found = [sets_of(sample) for sample in samples]
    if not any(found) and not truncates:
        return fields
    pairs = list(zip(samples, found, strict=True))
    if any(sample.mask_T.any() for sample, known in pairs if not known):
        missing = "a sample has no sets of tokens that the engine chose among"
        raise ValueError(f"{missing}, expected them with sampling.top_p, top_k or min_p")
    known = [sets or Allowed(np.zeros(len(s.tokens_T), np.int32), NONE) for s, sets in pairs]
    for count_T, ids_M in known:
        if (total := count_T.sum()) != len(ids_M):
            raise ValueError(f"the sets of a sample have {len(ids_M)} ids, expected {total}")
    count, ids = (torch.from_numpy(np.concatenate(parts)) for parts in zip(*known, strict=True))
    return fields | {"allowed": Allowed(count, ids)}


def sets_of(sample: "Sample") -> Allowed | None:
    """A sample's sets; None where it lacks them, for which a file of samples has -1 everywhere."""
    count_T, ids_M = sample.allowed_T, sample.allowed_M
    if count_T is None or ids_M is None or (count_T < 0).all():
        return None
    return Allowed(count_T, ids_M)
