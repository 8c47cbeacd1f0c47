"""What is kept of unfinished answers, on the engine and on the worker."""

from types import SimpleNamespace

import pytest

from envs.episode import Turn
from envs.sampler import Request
from runtime.drafts import DraftBook, DraftedCall, Drafts


def turn(prompt, tokens, reason="") -> Turn:
    return Turn(list(prompt), list(tokens), [-1.0] * len(tokens), [0] * len(tokens), reason)


def running(name: str, j: int, tokens: list[int]):
    """vLLM's state of a request that has sampled some tokens."""
    answer = SimpleNamespace(
        token_ids=tokens,
        logprobs=SimpleNamespace(logprobs=[-1.0] * len(tokens)),
        routed_experts=None,
    )
    spans = [SimpleNamespace(start=0, end=len(tokens), version="0")]
    return SimpleNamespace(
        external_req_id=Drafts().request_id(name, j),
        _new_completion_output=lambda ids, reason, stop: answer,
        _weight_version_spans=lambda: spans,
    )


def test_a_request_goes_on_from_its_drafts_with_its_own_prompt():
    drafts = Drafts()
    drafts.open(Request("a", [7, 8], 2, 0, []))
    assert drafts.turns("a") == [turn([7, 8], []), turn([7, 8], [])]
    drafts.open(Request("b", [7, 8], 2, 0, [turn([], [5]), turn([], [5, 1], "stop")]))
    assert drafts.turns("b") == [turn([7, 8], [5]), turn([7, 8], [5, 1], "stop")]


def test_what_is_new_beyond_what_is_known():
    drafts = Drafts()
    drafts.open(Request("a-1", [7], 3, 0, [turn([], [1]), turn([], []), turn([], [])]))
    drafts.finish("a-1", 1, turn([7], [4, 5], "stop"))
    states = {i: running("a-1", j, ids) for i, (j, ids) in enumerate([(0, [2, 3]), (2, [])])}
    states[9] = running("a", 1, [99])
    assert drafts.since("a-1", [], states) == [
        turn([], [1, 2, 3]),
        turn([], [4, 5], "stop"),
        turn([], []),
    ]
    later = drafts.since("a-1", [2, None, 0], states)
    assert later == [turn([], [3]), None, turn([], [])]
    drafts.close("a-1")
    assert drafts.since("a-1", [], states) == [] == drafts.since("unknown", [3], states)


def test_a_copy_follows_the_engine():
    copy = DraftedCall([7], [])
    assert copy.known() == [] and copy.extended([]) == copy
    copy = copy.extended([turn([], [1]), turn([], [], "")])
    assert copy.known() == [1, 0]
    copy = copy.extended([turn([], [2], "stop"), turn([], [5])])
    assert copy == DraftedCall([7], [turn([7], [1, 2], "stop"), turn([7], [5])])
    assert copy.known() == [None, 1]
    assert copy.extended([None, turn([], [6])]).turns[1].token_ids == [5, 6]


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


def test_drafts_of_a_group_that_is_given_up_are_forgotten():
    book = DraftBook()
    with pytest.raises(ConnectionError), book.of(0, 3, 1) as drafts:
        drafts[0].append(DraftedCall([7], []))
        raise ConnectionError
    book.forget(0, 3)
    book.forget(0, 3)
    with book.of(0, 3, 1) as drafts:
        assert drafts == [[]]
