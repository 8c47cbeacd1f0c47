"""What is kept of unfinished answers, on the engine and on the worker."""

import asyncio
import contextlib
from types import SimpleNamespace

import pytest

from core import waits
from rollout import drafts
from rollout.drafts import DraftBook, DraftedCall, Drafts, answers, rest_of, sample_name
from rollout.episode import Request, Turn
from support.actors import Actor, Answer


def turn(prompt, tokens, reason="") -> Turn:
    return Turn(list(prompt), list(tokens), [-1.0] * len(tokens), [0] * len(tokens), reason)


def running(name: str, j: int, tokens: list[int]):
    """vLLM's state of a request that has sampled some tokens."""
    logprobs = SimpleNamespace(logprobs=[-1.0] * len(tokens))
    answer = SimpleNamespace(token_ids=tokens, logprobs=logprobs, routed_experts=None)
    spans = [SimpleNamespace(start=0, end=len(tokens), version="0")]
    return SimpleNamespace(
        external_req_id=sample_name(name, j),
        _new_completion_output=lambda ids, reason, stop: answer,
        _weight_version_spans=lambda: spans,
    )


async def complete(drafts: Drafts, request: Request, answer) -> list[Turn]:
    """What Generator.generate does, with another engine."""
    with drafts.open(request) as turns:

        async def finish(j: int) -> None:
            if not turns[j].finish_reason:
                turns[j] = turns[j].extended(await answer(rest_of(request, j, turns[j])))

        await waits.together(finish(j) for j in range(request.n))
    return turns


def test_a_request_goes_on_from_its_drafts_with_its_own_prompt():
    drafts = Drafts()
    asked = []

    async def answer(request: Request) -> Turn:
        asked.append(request)
        return turn([], [9, 1], "stop")

    empty = Request("a", [7, 8], 2, 40, [], 16)
    whole = turn([7, 8], [9, 1], "stop")
    assert asyncio.run(complete(drafts, empty, answer)) == [whole, whole]
    assert asked == [Request(f"a-{j}", [7, 8], 1, 40 + j, [], 16) for j in range(2)]
    asked.clear()
    begun = Request("b", [7, 8], 2, 40, [turn([], [5]), turn([], [5, 1], "stop")], 16)
    found = asyncio.run(complete(drafts, begun, answer))
    assert found == [turn([7, 8], [5, 9, 1], "stop"), turn([7, 8], [5, 1], "stop")]
    assert asked == [Request("b-0", [7, 8, 5], 1, 1_000_043, [], 15)], "other random numbers"
    assert not drafts.written


async def test_an_engine_is_idle_while_it_has_no_request():
    """Also after one that failed."""
    drafts = Drafts()

    async def answer(request: Request) -> Turn:
        await asyncio.sleep(0.05)
        if request.max_tokens == 1:
            raise ConnectionError
        return turn([], [9], "stop")

    for tokens in (1, 9):
        with contextlib.suppress(ConnectionError):
            await complete(drafts, Request(str(tokens), [7], 1, 0, [], tokens), answer)
    assert drafts.idle.take() < 0.05
    await asyncio.sleep(0.05)
    assert drafts.idle.take() >= 0.05 and not drafts.idle.running


def test_what_is_new_beyond_what_is_known():
    drafts = Drafts()
    begun = [turn([], [1]), turn([], []), turn([], [])]
    with drafts.open(Request("a-1", [7], 3, 0, begun, 9)) as turns:
        turns[1] = turn([7], [4, 5], "stop")
        states = {i: running("a-1", j, ids) for i, (j, ids) in enumerate([(0, [2, 3]), (2, [])])}
        states[9] = running("a", 1, [99])
        every = [turn([], [1, 2, 3]), turn([], [4, 5], "stop"), turn([], [])]
        assert drafts.since("a-1", [], states) == every
        assert drafts.since("a-1", [2, None, 0], states) == [turn([], [3]), None, turn([], [])]
    assert drafts.since("a-1", [], states) == [] == drafts.since("unknown", [3], states)


def test_two_calls_at_once_keep_their_own_drafts():
    """The second ends first, the engine of the first is lost: the retry asks for the first only."""
    asked = []

    async def both(calls: list[DraftedCall], first: Exception | None) -> list:
        async def generate(request: Request) -> list[Turn]:
            asked.append(request.prompt_ids)
            await asyncio.sleep(0.02 if request.prompt_ids == [1] else 0)
            if first and request.prompt_ids == [1]:
                raise first
            return [turn([], [*request.prompt_ids, 9], "stop")]

        engine = SimpleNamespace(generate=SimpleNamespace(remote=generate))
        requests = (Request(f"call-{p}", [p], 1, 0, [], 9) for p in (1, 2))
        made = (answers(calls, k, engine, request) for k, request in enumerate(requests))
        return await asyncio.gather(*made, return_exceptions=True)

    calls: list[DraftedCall] = []
    lost = ConnectionError("the engine is lost")
    failed, (second,) = asyncio.run(both(calls, lost))
    assert failed is lost and second.token_ids == [2, 9]
    assert asked == [[1], [2]]
    for _ in range(2):
        (first,), (second,) = asyncio.run(both(calls, None))
        assert (first.token_ids, second.token_ids) == ([1, 9], [2, 9])
        assert asked == [[1], [2], [1]], "what is known is not asked for again"


class Watched(list):
    """A list that counts the elements that are read of it."""

    read = 0

    def __getitem__(self, index):
        found = super().__getitem__(index)
        self.read += len(found) if isinstance(index, slice) else 1
        return found

    def __iter__(self):
        self.read += len(self)
        return super().__iter__()


def test_a_poll_copies_only_what_is_new():
    """Of 60,000 tokens that the engine has and 59,990 that the worker knows."""
    state, known = running("a", 0, list(range(40_000))), 59_990
    answer = state._new_completion_output([], None, None)
    answer.token_ids = Watched(answer.token_ids)
    answer.logprobs.logprobs = Watched(answer.logprobs.logprobs)
    drafts = Drafts()
    opened = drafts.open(Request("a", [7], 1, 0, [turn([], range(20_000))], 60_000))
    (written,) = opened.__enter__()
    written.token_ids = Watched(written.token_ids)
    assert drafts.since("a", [known], {0: state}) == [turn([], range(39_990, 40_000))]
    assert [answer.token_ids.read, answer.logprobs.logprobs.read] == [10, 10]
    assert written.token_ids.read == 0
    assert drafts.since("a", [20_000 - 2], {0: state})[0].token_ids[:3] == [19_998, 19_999, 0]


def test_a_copy_keeps_what_a_report_brought_as_it_came():
    first, second = turn([], range(60_000)), turn([], [5])
    copy = DraftedCall([7], []).extended([first]).extended([second])
    kept = copy.answers[0]
    assert len(kept) == 2 and kept[0] is first and kept[1] is second
    assert copy.known() == [60_001] and copy.turns() == [turn([7], [*range(60_000), 5])]


def test_a_copy_follows_the_engine():
    copy = DraftedCall([7], [])
    assert copy.known() == [] and copy.extended([]) == copy
    copy = copy.extended([turn([], [1]), turn([], [], "")])
    assert copy.known() == [1, 0]
    copy = copy.extended([turn([], [2], "stop"), turn([], [5])])
    assert copy.turns() == [turn([7], [1, 2], "stop"), turn([7], [5])]
    assert copy.known() == [None, 1]
    assert copy.extended([None, turn([], [6])]).turns()[1].token_ids == [5, 6]


def test_drafts_are_kept_where_an_attempt_fails_and_each_attempt_has_lists_of_its_own():
    book, call = DraftBook(), DraftedCall([7], [])
    with pytest.raises(ConnectionError), book.of("slot", 3, 2) as first:
        first[0].append(call)
        raise ConnectionError
    with pytest.raises(ConnectionError), book.of("slot", 3, 2) as second:
        assert second == [[call], []]
        first[1].append(call)  # what is left of the first attempt still writes
        assert second == [[call], []]
        raise ConnectionError
    with book.of("slot", 4, 2) as other:
        assert other == [[], []] and other[0] is not other[1]
    with book.of("slot", 3, 2) as third:
        assert third == [[call], []]
    with book.of("slot", 3, 2) as after_success:
        assert after_success == [[], []]
    assert not book.groups


def test_an_earlier_attempt_that_ends_late_takes_no_drafts_from_the_next_one():
    book = DraftBook()
    call = DraftedCall([7], [])
    with book.of("slot", 3, 1), pytest.raises(ConnectionError), book.of("slot", 3, 1) as second:
        second[0].append(call)
        raise ConnectionError
    with book.of("slot", 3, 1) as third:
        assert third == [[call]]


@pytest.mark.parametrize("limit", [0.05, 60])
async def test_an_engine_that_does_not_report_delays_no_answer(monkeypatch, limit):
    """Its report never comes; the answer does, after the report's deadline or before it."""
    monkeypatch.setattr(drafts, "DRAFT_SECONDS", 0.01)
    monkeypatch.setattr(waits, "ANSWER_SECONDS", limit)
    whole = Answer(...)
    engine = Actor(generate=whole, drafts=lambda *_: Answer(...))
    calls: list[DraftedCall] = []
    asked = asyncio.create_task(answers(calls, 0, engine, Request("a", [7], 1, 0, [], 9)))
    await asyncio.sleep(0.1)
    whole.give([turn([], [9], "stop")])
    assert await asyncio.wait_for(asked, 1) == [turn([], [9], "stop")]
    assert (len(engine.called("drafts")) > 1) == (limit < 1)


def test_drafts_of_a_group_that_is_given_up_are_forgotten():
    book = DraftBook()
    with pytest.raises(ConnectionError), book.of(0, 3, 1) as drafts:
        drafts[0].append(DraftedCall([7], []))
        raise ConnectionError
    book.forget(0, 3)
    book.forget(0, 3)
    with book.of(0, 3, 1) as drafts:
        assert drafts == [[]]
