"""The engine's choices of experts (R3) over the turns of a rollout.

An engine sends those of a turn's new tokens alone. What it had sent before stands in front of them,
in arrays that all turns of the conversation share.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from rollout.drafts import DraftedCall
    from rollout.episode import Turn


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
