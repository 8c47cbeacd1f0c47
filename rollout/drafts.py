"""Keeps drafts of unfinished answers, so that a retry continues from them.

An engine keeps `Drafts` of the requests that it runs. Rollout workers copy them into a `DraftBook`
from time to time. When an engine is lost, the retry hands those copies to another engine.
"""

import asyncio
import contextlib
import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from core import waits
from policy.allowed_tokens import Allowed
from rollout import engine_choices
from rollout.episode import Request, Turn

if TYPE_CHECKING:
    from ray import ObjectRef
    from ray.actor import ActorHandle

EMPTY_TURN = Turn([], [], [], [], "")
DRAFT_SECONDS = 5.0  # seconds between two copies: a lost engine costs at most this much work


class Drafts:
    """The engine's side: for each running request, the answer or draft of each sample."""

    def __init__(self) -> None:
        self.written: dict[str, list[Turn]] = {}
        self.idle = waits.Idle()  # counts the time without requests

    @contextlib.contextmanager
    def open(self, request: Request) -> Iterator[list[Turn]]:
        """Yields a request's answers so far: the drafts that it contains, or empty ones.

        The block replaces each with the whole answer; meanwhile `since` reports the drafts.
        """
        drafts = request.drafts or [EMPTY_TURN] * request.n
        turns = [dataclasses.replace(draft, prompt_ids=request.prompt_ids) for draft in drafts]
        self.written[request.name] = turns
        self.idle.change(1)
        try:
            yield turns
        finally:
            self.idle.change(-1)
            del self.written[request.name]

    def since(
        self, name: str, known: list[int | None], states: Mapping[Any, Any]
    ) -> list[Turn | None]:
        """Returns the tokens of each answer after its first `known` ones, and copies no others.

        An answer that the caller has in full is None in `known` and in the result. An empty `known`
        asks for all tokens. Returns [] for an unknown request. `states` is vLLM's
        engine.output_processor.request_states.
        """
        running = {state.external_req_id: state for state in states.values()}
        turns = self.written.get(name, [])
        known = known or [0] * len(turns)
        reports: list[Turn | None] = []
        for j, (turn, n) in enumerate(zip(turns, known, strict=False)):
            if n is None:
                reports.append(None)
            else:
                reports.append(unreported(n, turn, running.get(sample_name(name, j))))
        return reports


def sample_name(name: str, j: int) -> str:
    """Returns vLLM's name for sample j of a request."""
    return f"{name}-{j}"


def rest_of(request: Request, j: int, draft: Turn) -> Request:
    """Returns the request for the tokens that sample j still needs after its draft."""
    written = len(draft.token_ids)
    return request._replace(
        name=sample_name(request.name, j),
        prompt_ids=request.prompt_ids + draft.token_ids,
        n=1,
        # A continued answer must not reuse the random numbers of its first part.
        seed=request.seed + j + 1_000_003 * written,
        drafts=[],
        max_tokens=request.max_tokens - written,
    )


class DraftedCall(NamedTuple):
    """The worker's copy of one call to `answers`: the prompt, and each answer in pieces.

    Each engine report brings a piece. `answers` is [] until the first report.
    """

    prompt_ids: list[int]
    answers: list[list[Turn]]

    def turns(self) -> list[Turn]:
        """Returns each answer in one piece."""
        return [whole(self.prompt_ids, pieces) for pieces in self.answers]

    def known(self) -> list[int | None]:
        """Returns how many tokens of each answer are known; None for an answer known in full."""
        counts: list[int | None] = []
        for pieces in self.answers:
            is_whole = bool(pieces[-1].finish_reason)
            counts.append(None if is_whole else sum(len(piece.token_ids) for piece in pieces))
        return counts

    def extended(self, new: list[Turn | None]) -> "DraftedCall":
        """Returns this copy, extended by a later report of `Drafts.since`; copies no token."""
        if not new:
            return self
        answers = self.answers or [[] for _ in new]
        extended = []
        for pieces, piece in zip(answers, new, strict=True):
            extended.append(pieces if piece is None else [*pieces, piece])
        return self._replace(answers=extended)


async def answers(
    calls: list[DraftedCall], k: int, engine: "ActorHandle", request: Request
) -> list[Turn]:
    """Returns the answers to call k of a rollout, for which the engine completes the drafts.

    `calls` are the rollout's calls, from this try and an earlier one. If call k had a different
    prompt in the earlier try, the conversation took a different course, and that try's calls from
    k on are dropped.
    """
    call = calls[k] if k < len(calls) else None
    if not call or call.prompt_ids != request.prompt_ids or len(call.answers) not in (0, request.n):
        call = DraftedCall(request.prompt_ids, [])
        calls[k:] = [call]
    turns = call.turns()
    held = engine_choices.held(calls[:k], request.prompt_ids)
    if call.known() != [None] * request.n:
        request = request._replace(drafts=turns, known_routes=sum(map(len, held)))
        answer = engine.generate.remote(request)
        turns = await followed(calls, k, engine, request.name, answer)
    engine_choices.complete(turns, held)
    calls[k] = DraftedCall(request.prompt_ids, [[turn] for turn in turns])
    return turns


async def followed(
    calls: list[DraftedCall],
    k: int,
    engine: "ActorHandle",
    name: str,
    answer: "ObjectRef[list[Turn]]",
) -> list[Turn]:
    """Awaits the engine's `answer` to request `name`; copies its drafts to `calls[k]` meanwhile.

    Cancels the request if the rollout is abandoned.
    """
    pending = asyncio.ensure_future(answer)
    try:
        while True:
            done, _ = await asyncio.wait([pending], timeout=DRAFT_SECONDS)
            if done:
                return await pending
            with contextlib.suppress(Exception):  # `pending` raises when an engine is lost
                reported = engine.drafts.remote(name, calls[k].known())
                report = waits.answer(reported, waits.ANSWER_SECONDS, "an engine")
                answered = asyncio.wait([pending])  # a report that hangs must not delay the answer
                new = await waits.unless_stopped(answered, asyncio.ensure_future(report))
                calls[k] = calls[k].extended(new or [])
    finally:
        if not pending.done():
            import ray

            ray.cancel(answer)


class DraftBook:
    """The worker's side: for each group, its rollouts' calls when they last failed."""

    def __init__(self) -> None:
        self.groups: dict[tuple[Any, int], list[list[DraftedCall]]] = {}

    @contextlib.contextmanager
    def of(self, slot: Any, line: int, n: int) -> Iterator[list[list[DraftedCall]]]:
        """Yields the drafts of a group's n rollouts, and keeps them only if the block raises.

        Each attempt gets its own lists, because tasks of an earlier attempt may still write.
        """
        old = self.groups.get((slot, line)) or [[] for _ in range(n)]
        drafts = [list(calls) for calls in old]
        self.groups[slot, line] = drafts
        yield drafts
        if self.groups.get((slot, line)) is drafts:  # False for an attempt that ends late
            self.forget(slot, line)

    def forget(self, slot: Any, line: int) -> None:
        """Drops the drafts of a group that is done or was abandoned."""
        self.groups.pop((slot, line), None)


def unreported(n: int, turn: Turn, state: Any) -> Turn:
    """Returns the tokens of an answer after its first n: from `turn`, and then from `state`.

    `state` is vLLM's RequestState of the request that continues `turn`, None if there is no such
    request.
    """
    rest = turn.after(n)
    if state is None:
        return rest
    answer = state._new_completion_output([], None, None)
    answer.finish_reason = ""
    # vLLM adds versions and token sets to finished answers only.
    answer.weight_versions = state._weight_version_spans()
    new = Turn.from_vllm([], answer, max(0, n - len(turn.token_ids)))
    if chunks := getattr(state, "sampling_mask_chunks", None):
        new.allowed = last_sets(chunks, len(new.token_ids))
    return rest.extended(new)


def last_sets(chunks: list[Any], tokens: int) -> Allowed:
    """Returns the sets of the last `tokens` tokens from vLLM's SamplingMaskLists.

    A list has the sets for one or more tokens. Older lists are not read, so that the cost of a
    report does not grow with the answer.
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
    if not counts:
        return Allowed(np.zeros(0, np.int32), np.zeros(0, np.int32))
    newest = Allowed(
        np.concatenate(counts[::-1], dtype=np.int32), np.concatenate(ids[::-1], dtype=np.int32)
    )
    return newest.after(max(0, found - tokens))


def whole(prompt_ids: list[int], pieces: list[Turn]) -> Turn:
    """Joins the pieces of an answer; each token is copied once."""
    chain = itertools.chain.from_iterable
    sets = [piece.allowed for piece in pieces if piece.allowed]
    return dataclasses.replace(
        pieces[-1],
        prompt_ids=prompt_ids,
        token_ids=list(chain(piece.token_ids for piece in pieces)),
        logps=list(chain(piece.logps for piece in pieces)),
        versions=list(chain(piece.versions for piece in pieces)),
        allowed=Allowed.joined(sets) if sets else None,
    )
