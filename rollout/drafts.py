"""What engines have written of unfinished answers, so that a retry goes on from there.

An engine keeps `Drafts` of the requests that it runs. Rollout workers copy them into a `DraftBook`
from time to time. When an engine is lost, the retry hands its copies to another one.
"""

import asyncio
import contextlib
import dataclasses
import itertools
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from core import waits
from policy.allowed_tokens import Allowed
from rollout import engine_choices
from rollout.episode import Request, Turn

EMPTY_TURN = Turn([], [], [], [], "")
DRAFT_SECONDS = 5.0  # what a lost engine may cost of an answer that it was writing


class Drafts:
    """The engine's side: what each running request has, an answer or a draft for each sample."""

    def __init__(self) -> None:
        self.written: dict[str, list[Turn]] = {}
        self.idle = waits.Idle()  # of requests

    def open(self, request: Request) -> list[Turn]:
        """What a request has so far: the drafts that it brings, or nothing."""
        drafts = request.drafts or [EMPTY_TURN] * request.n
        self.written[request.name] = [
            dataclasses.replace(draft, prompt_ids=request.prompt_ids) for draft in drafts
        ]
        return self.written[request.name]

    async def complete(
        self, request: Request, answer: Callable[[Request], Awaitable[Turn]]
    ) -> list[Turn]:
        """The request's answers: from each draft on that it brings, or from nothing.

        `answer` makes the answer to a request of one sample, or the rest of one.
        """
        turns = self.open(request)
        self.idle.change(1)

        async def finish(j: int) -> None:
            if not turns[j].finish_reason:
                new = await answer(rest_of(request, j, turns[j]))
                turns[j] = turns[j].extended(new)

        try:
            await waits.together(finish(j) for j in range(request.n))
            return turns
        finally:
            self.idle.change(-1)
            del self.written[request.name]

    def since(
        self, name: str, known: list[int | None], states: Mapping[Any, Any]
    ) -> list[Turn | None]:
        """For each answer, the tokens after the first `known` ones; [] for an unknown request.

        None stands for an answer that the caller has whole. With `known` empty all is new.
        `states` is vLLM's engine.output_processor.request_states. Only what is new is copied.
        """

        running = {state.external_req_id: state for state in states.values()}
        turns = self.written.get(name, [])
        pairs = zip(turns, known or [0] * len(turns), strict=False)
        return [
            None if n is None else unreported(n, turn, running.get(sample_name(name, j)))
            for j, (turn, n) in enumerate(pairs)
        ]


def sample_name(name: str, j: int) -> str:
    """vLLM's name of sample j of a request."""
    return f"{name}-{j}"


def rest_of(request: Request, j: int, draft: Turn) -> Request:
    """The request for sample j of another, without the tokens that its draft has."""
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
    """The worker's copy of one call of `answers`: its prompt, and each answer in pieces.

    A piece is what one report brought. `answers` is [] until the engine has reported.
    """

    prompt_ids: list[int]
    answers: list[list[Turn]]

    def turns(self) -> list[Turn]:
        """Each answer in one piece."""

        return [whole(self.prompt_ids, pieces) for pieces in self.answers]

    def known(self) -> list[int | None]:
        """Tokens that are known of each answer; None for one that is known whole."""
        return [
            None if pieces[-1].finish_reason else sum(len(piece.token_ids) for piece in pieces)
            for pieces in self.answers
        ]

    def extended(self, new: list[Turn | None]) -> "DraftedCall":
        """This copy and what `Drafts.since` reported beyond it; no token is copied."""
        if not new:
            return self
        pairs = zip(self.answers or [[] for _ in new], new, strict=True)
        return self._replace(answers=[old if n is None else [*old, n] for old, n in pairs])


async def answers(calls: list[DraftedCall], k: int, engine: Any, request: Request) -> list[Turn]:
    """The answers to call k of a rollout: its drafts have some, and the engine writes the rest.

    `calls` are the rollout's, of this try and of an earlier one. Those of the earlier one from k on
    are dropped where call k had another prompt: then the conversation went another way.
    """
    call = calls[k] if k < len(calls) else None
    if not call or call.prompt_ids != request.prompt_ids or len(call.answers) not in (0, request.n):
        call = DraftedCall(request.prompt_ids, [])
        calls[k:] = [call]
    turns = call.turns()
    held = engine_choices.held(calls[:k], request.prompt_ids)
    if call.known() != [None] * request.n:
        request = request._replace(drafts=turns, known_routes=sum(map(len, held)))
        turns = await followed(calls, k, engine, request)
    engine_choices.complete(turns, held)
    calls[k] = DraftedCall(request.prompt_ids, [[turn] for turn in turns])
    return turns


async def followed(calls: list[DraftedCall], k: int, engine: Any, request: Request) -> list[Turn]:
    """The engine's answers; `calls[k]` follows what it writes, in steps of DRAFT_SECONDS."""
    answer = engine.generate.remote(request)
    pending = asyncio.ensure_future(answer)
    try:
        while not (await asyncio.wait([pending], timeout=DRAFT_SECONDS))[0]:
            with contextlib.suppress(Exception):  # `pending` raises when an engine is lost
                reported = engine.drafts.remote(request.name, calls[k].known())
                report = waits.answer(reported, waits.ANSWER_SECONDS, "an engine")
                answered = asyncio.wait([pending])  # a report that hangs must not delay the answer
                new = await waits.unless_stopped(answered, asyncio.ensure_future(report))
                calls[k] = calls[k].extended(new or [])
    finally:
        if not pending.done():  # this rollout was given up: the engine must not go on for it
            import ray

            ray.cancel(answer)
    return await pending


class DraftBook:
    """The worker's side: for each group, what its rollouts' calls had when they last failed."""

    def __init__(self) -> None:
        self.groups: dict[tuple[Any, int], list[list[DraftedCall]]] = {}

    @contextlib.contextmanager
    def of(self, slot: Any, line: int, n: int) -> Iterator[list[list[DraftedCall]]]:
        """The drafts of a group's n rollouts; they are kept only if the block raises.

        Each attempt gets lists of its own: what is left of an earlier attempt may still write.
        """
        old = self.groups.get((slot, line)) or [[] for _ in range(n)]
        drafts = [list(calls) for calls in old]
        self.groups[slot, line] = drafts
        yield drafts
        if self.groups.get((slot, line)) is drafts:  # else an earlier attempt has ended late
            self.forget(slot, line)

    def forget(self, slot: Any, line: int) -> None:
        """Drops the drafts of a group that is done or given up."""
        self.groups.pop((slot, line), None)


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
