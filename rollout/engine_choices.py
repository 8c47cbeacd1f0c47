"""Carries expert routes and token sets from the engine to the trainer.

Routes are the experts that saw each token (R3, policy.replay_routing). An engine sends those of a
turn's new tokens alone; the earlier ones are in arrays that all turns of the conversation share.
A set holds the tokens among which one was chosen, if sampling is truncated
(policy/allowed_tokens.py).
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from policy.allowed_tokens import Allowed

if TYPE_CHECKING:
    from rollout.drafts import DraftedCall
    from rollout.episode import Sample, Turn


def held(calls: "Sequence[DraftedCall]", prompt_ids: list[int]) -> list[np.ndarray]:
    """The routes of the first tokens of a prompt that goes on from the last of the calls.

    They are of every token of that turn but its last, which no engine has read. [] where the prompt
    is another conversation's, or where that turn has no routes.
    """
    for turn in calls[-1].turns() if calls else ():
        seen = turn.prompt_ids + turn.token_ids
        if turn.routes is not None and prompt_ids[: len(seen)] == seen and not lacking(turn):
            return turn.routes
    return []


def lacking(turn: "Turn") -> int:
    """The tokens in front whose routes the engine was asked to leave out."""
    read = len(turn.prompt_ids) + len(turn.token_ids) - 1
    return read - sum(map(len, turn.routes or ()))


def complete(turns: "list[Turn]", held: list[np.ndarray]) -> None:
    """Puts the routes that were held in front of those that the engine sent after them.

    A turn of an earlier try may have them already.
    """
    for turn in turns:
        if turn.routes is not None and lacking(turn):
            turn.routes = [*held, *turn.routes]


def join(turns: "list[Turn]", tokens: int) -> np.ndarray | None:
    """The experts of each token when the engine first read it [tokens, expert layers, experts].

    -1 for the last token, which it never read. None where a turn has none.
    """
    of_turns = [turn.routes for turn in turns if turn.routes is not None]
    if len(of_turns) < len(turns):
        return None
    first = of_turns[0][0]
    routes_T = np.full((tokens, *first.shape[1:]), -1, first.dtype)
    done = 0
    for pieces in of_turns:  # the earlier ones are those that were sampled with
        at = 0
        for piece in pieces:
            new = piece[max(0, done - at) :]
            routes_T[done : done + len(new)] = new
            done += len(new)
            at += len(piece)
    return routes_T


# TC
NONE = np.zeros(0, np.int32)


def of_turns(turns: "list[Turn]", tokens: int) -> dict[str, Any]:
    """Fields of the `Sample` of that length which turns become. Raises as `sets` does."""
    count_T, ids_M = sets(turns, tokens) or (None, None)
    return {
        "routes_T": join(turns, tokens),
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
