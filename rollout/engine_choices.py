"""Carries expert routes and token sets from the engine to the trainer.

Routes are the experts that processed each token (R3, policy.replay_routing). An engine sends only
the routes of a turn's new tokens; the earlier ones are in arrays that all turns of the conversation
share. If sampling is truncated, a token's set contains the tokens from which it was chosen
(policy/allowed_tokens.py).
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from policy.allowed_tokens import Allowed

if TYPE_CHECKING:
    from rollout.drafts import DraftedCall
    from rollout.episode import Sample, Turn


def held(calls: "Sequence[DraftedCall]", prompt_ids: list[int]) -> list[np.ndarray]:
    """Returns the routes of a prompt's first tokens, if the prompt continues the last of the calls.

    They cover every token of that turn but the last one, which no engine has read. Returns [] if
    the prompt belongs to another conversation, or if that turn has no routes.
    """
    for turn in calls[-1].turns() if calls else ():
        seen = turn.prompt_ids + turn.token_ids
        if turn.routes is not None and prompt_ids[: len(seen)] == seen and not lacking(turn):
            return turn.routes
    return []


def lacking(turn: "Turn") -> int:
    """Returns how many tokens at a turn's start lack routes, which were not requested."""
    read = len(turn.prompt_ids) + len(turn.token_ids) - 1
    return read - sum(map(len, turn.routes or ()))


def complete(turns: "list[Turn]", held: list[np.ndarray]) -> None:
    """Prepends the routes that the worker has to the ones that the engine sent.

    A turn from an earlier try may already be complete.
    """
    for turn in turns:
        if turn.routes is not None and lacking(turn):
            turn.routes = [*held, *turn.routes]


def join(turns: "list[Turn]", tokens: int) -> np.ndarray | None:
    """Returns the experts of each token when it was first read [tokens, expert layers, experts].

    The last token has -1, because the engine never read it. Returns None if a turn lacks experts.
    """
    of_turns = [turn.routes for turn in turns if turn.routes is not None]
    if len(of_turns) < len(turns):
        return None
    first = of_turns[0][0]
    routes_T = np.full((tokens, *first.shape[1:]), -1, first.dtype)
    done = 0
    for pieces in of_turns:  # a token keeps the experts that were used when it was sampled
        at = 0
        for piece in pieces:
            new = piece[max(0, done - at) :]
            routes_T[done : done + len(new)] = new
            done += len(new)
            at += len(piece)
    return routes_T


# The ids in the sets of a sequence without sets.
NONE = np.zeros(0, np.int32)


def of_turns(turns: "list[Turn]", tokens: int) -> tuple[np.ndarray | None, Allowed | None]:
    """Returns the routes and the sets for the sequence of `tokens` tokens that the turns form.

    Raises RuntimeError as `sets` does.
    """
    return join(turns, tokens), sets(turns, tokens)


def sets(turns: "list[Turn]", tokens: int) -> Allowed | None:
    """Returns the set from which each token of a sequence was chosen; None if no turn has sets.

    Raises RuntimeError if a sampled token lacks its set or is not in it.
    """
    if not any(turn.allowed for turn in turns):
        return None
    count_T = np.zeros(tokens, np.int32)
    ids_of_turns = []
    for turn in turns:
        of_turn = turn.allowed or Allowed(NONE, NONE)
        ids = np.array(turn.token_ids, np.int32)
        if len(of_turn.count_T) != len(ids) or not of_turn.count_T.all():
            raise RuntimeError(
                f"the engine returned {np.count_nonzero(of_turn.count_T)} token sets "
                f"for {len(ids)} sampled tokens"
            )
        of_each = np.repeat(np.arange(len(ids)), of_turn.count_T)
        hits = np.bincount(of_each[of_turn.ids_M == ids[of_each]], minlength=len(ids))
        if not hits.all():
            odd = int(ids[hits == 0][0])
            raise RuntimeError(f"token {odd} was sampled, but is not in the set that it came from")
        start = len(turn.prompt_ids)
        count_T[start : start + len(ids)] = of_turn.count_T
        ids_of_turns.append(of_turn.ids_M)
    return Allowed(count_T, np.concatenate(ids_of_turns))


def routes_of_row(samples: "list[Sample]") -> list[np.ndarray] | None:
    """Returns the routes of each sample of a packed row; None if a sample lacks them."""
    routes_N = []
    for sample in samples:
        if sample.routes_T is None:
            return None
        routes_N.append(sample.routes_T)
    return routes_N


def sets_of_row(samples: "list[Sample]", truncates: bool) -> tuple[Tensor, Tensor] | None:
    """Returns the sets of a packed row's tokens; None if no sample has sets.

    Raises ValueError if a trained sample lacks its sets although others have them or the run
    `truncates`, or if a sample's number of ids is not the sum of its sets' sizes.
    """
    found = [sets_of(sample) for sample in samples]
    if not any(found) and not truncates:
        return None
    counts = []
    ids = []
    for sample, known in zip(samples, found, strict=True):
        if known is None and sample.mask_T.any():
            raise ValueError(
                "a sample has no token sets, expected them with sampling.top_p, top_k or min_p"
            )
        count_T, ids_M = known or Allowed(np.zeros(len(sample.tokens_T), np.int32), NONE)
        total = int(count_T.sum())
        if total != len(ids_M):
            raise ValueError(f"the sets of a sample have {len(ids_M)} ids, expected {total}")
        counts.append(count_T)
        ids.append(ids_M)
    return Allowed(torch.from_numpy(np.concatenate(counts)), torch.from_numpy(np.concatenate(ids)))


def sets_of(sample: "Sample") -> Allowed | None:
    """Returns a sample's sets; None if it lacks them, which a samples file marks with -1."""
    count_T, ids_M = sample.allowed_T, sample.allowed_M
    if count_T is None or ids_M is None or (count_T < 0).all():
        return None
    return Allowed(count_T, ids_M)
