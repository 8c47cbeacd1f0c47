"""The engine's experts over the turns of a rollout: each is sent once, and none is lost."""

import asyncio
import contextlib
import dataclasses

import numpy as np
import pytest

from rollout.drafts import DraftedCall, answers
from rollout.episode import Request, Turn, stitch
from support.actors import Actor
from support.samples import routed, turn

FIRST, SECOND, THIRD = [7, 8], [7, 8, 1, 2, 9], [7, 8, 1, 2, 9, 1, 2, 4, 4]


class Engine(Actor):
    """Answers 1, 2 to every prompt, by other experts each time; `sends_all` as without the field.

    Where `dies` holds the number of a call, it is lost before that answer has come.
    """

    def __init__(self, sends_all: bool = False, dies: tuple[int, ...] = ()):
        super().__init__(generate=self.answer)
        self.sends_all, self.dies = sends_all, dies
        self.rows = []  # that each answer had

    def answer(self, request: Request):
        if len(self.called("generate")) - 1 in self.dies:
            return ConnectionError("lost")
        made = routed(request.prompt_ids, [1, 2], 100 * len(self.calls))
        if not self.sends_all:
            made.routes = [made.routes[0][request.known_routes :]]
        self.rows.append(len(made.routes[0]))
        return [dataclasses.replace(made) for _ in range(request.n)]


def played(engine: Engine, prompts: list[list[int]], calls: list | None = None) -> list[Turn]:
    """The turns of one rollout, which asks for these prompts."""
    calls = [] if calls is None else calls

    async def play() -> list[Turn]:
        turns = []
        for k, prompt in enumerate(prompts):
            request = Request(str(k), prompt, 1, 0, [], 9)
            turns += await answers(calls, k, engine, request)
        return turns

    return asyncio.run(play())


def test_each_token_has_the_experts_that_a_full_answer_would_give_it():
    engine, full = Engine(), Engine(sends_all=True)
    ours, theirs = (played(e, [FIRST, SECOND, THIRD]) for e in (engine, full))
    (sample,), (expected,) = stitch(ours), stitch(theirs)
    assert len(expected.routes_T) == 11 and (expected.routes_T[:-1] >= 0).all()
    assert np.array_equal(sample.routes_T, expected.routes_T)
    asked = [request.known_routes for (request,) in engine.called("generate")]
    assert asked == [0, 3, 6] and engine.rows == [3, 3, 4] and full.rows == [3, 6, 10]
    for made in ours:
        (alone,) = stitch([made])
        assert (alone.routes_T[:-1] >= 0).all(), "a sample without the turns before is whole, too"
    assert ours[2].routes[0] is ours[0].routes[0], "a copy of what all turns share"


@pytest.mark.parametrize("other", [[7, 8, 1, 3, 9], [7, 8, 1], [5]])
def test_another_conversation_is_sent_whole(other):
    engine = Engine()
    _, second = played(engine, [FIRST, other])
    assert engine.rows[1] == len(other) + 1
    assert np.array_equal(np.concatenate(second.routes), routed(other, [1, 2], 200).routes[0])


def test_turns_without_experts_ask_for_none():
    engine = Actor(generate=lambda request: [turn(request.prompt_ids, [1, 2])])
    played(engine, [FIRST, SECOND])
    assert [request.known_routes for (request,) in engine.called("generate")] == [0, 0]


def test_a_rollout_that_is_played_again_has_them_once():
    """Of its second call the engine has reported all, without what was held."""
    calls: list[DraftedCall] = []
    with contextlib.suppress(ConnectionError):
        played(Engine(dies=(1,)), [FIRST, SECOND], calls)
    report = routed(SECOND, [1, 2], 700)
    report.routes = [report.routes[0][3:]]
    calls[1:] = [DraftedCall(SECOND, [[report]])]
    for _ in range(2):
        engine = Engine()
        first, second, third = played(engine, [FIRST, SECOND, THIRD], calls)
        assert engine.rows in ([4], [])
        assert len(np.concatenate(second.routes)) == 6 and len(np.concatenate(third.routes)) == 10
        (sample,) = stitch([first, second, third])
        assert np.array_equal(sample.routes_T[3:6], report.routes[0])
        assert (sample.routes_T[:-1] >= 0).all()


def test_an_unfinished_call_before_is_no_source():
    """Its turn has no experts yet, or only those after what it held itself."""
    begun = [DraftedCall(FIRST, []), DraftedCall(FIRST, [[turn(FIRST, [1, 2], reason="")]])]
    part = routed(FIRST, [1, 2], 0)
    part.routes = [part.routes[0][1:]]
    for call in (*begun, DraftedCall(FIRST, [[part]])):
        engine, calls = Engine(), [call]

        async def second(engine=engine, calls=calls) -> list[Turn]:
            return await answers(calls, 1, engine, Request("b", SECOND, 1, 0, [], 9))

        (made,) = asyncio.run(second())
        assert engine.rows == [6] and len(made.routes) == 1
