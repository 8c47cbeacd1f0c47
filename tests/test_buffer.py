"""RolloutBuffer: who may start, in which order groups are trained, and how old they may be.

test_schedules.py draws the orders in which the driver's two loops may use it.
"""

import asyncio
from types import SimpleNamespace

import pytest

import grpo_async
from grpo_async import Group, RolloutBuffer


def group(slot: int, version: int, samples: int = 2) -> Group:
    return Group(slot, version, 1, [None] * samples, None)


@pytest.mark.parametrize(
    ("max_lag", "version", "first_refused"),
    [(0, 0, 3), (0, 1, 6), (1, 0, 6), (1, 1, 9), (2, 0, 9), (2, 5, 24), (3, 0, 12), (3, 2, 18)],
)
def test_a_slot_may_start_when_the_policy_is_recent_enough(max_lag, version, first_refused):
    buffer = RolloutBuffer(3, max_lag)
    buffer.advance(version)
    assert [buffer.may_start(slot) for slot in range(30)] == [s < first_refused for s in range(30)]
    with pytest.raises(ValueError, match=f"slot {first_refused} cannot start now: version"):
        buffer.start(first_refused)
    assert not buffer.running


def test_a_slot_starts_and_ends_once():
    buffer = RolloutBuffer(2, 1)
    with pytest.raises(ValueError, match="slot 0 was not running"):
        buffer.put(group(0, 0))
    buffer.start(0)
    with pytest.raises(ValueError, match="slot 0 cannot start now"):
        buffer.start(0)
    buffer.put(group(0, 0))
    with pytest.raises(ValueError, match="slot 0 was not running"):
        buffer.put(group(0, 0))
    with pytest.raises(ValueError, match="slot 0 cannot start now"):
        buffer.start(0)
    assert list(buffer.ready) == [0] and not buffer.running


def test_a_step_is_taken_whole_and_in_slot_order():
    buffer = RolloutBuffer(3, 1)
    for slot in range(6):
        buffer.start(slot)
    for slot in (4, 2, 1, 5, 3):
        buffer.put(group(slot, 0))
        assert not buffer.has_part(0)
    assert buffer.has_part(1)
    buffer.put(group(0, 0))
    assert buffer.has_part(0)
    assert [g.slot for g in buffer.take(0)] == [0, 1, 2]
    assert sorted(buffer.ready) == [3, 4, 5]


@pytest.mark.parametrize("max_lag", [0, 1, 2])
def test_a_group_that_is_too_old_is_never_handed_out(max_lag):
    buffer, late = RolloutBuffer(1, max_lag), RolloutBuffer(1, max_lag)
    for each, version in ((buffer, 5 - max_lag), (late, 4 - max_lag)):
        each.restore(5, [], {})
        each.start(5)
        each.put(group(5, version))
    assert [g.slot for g in buffer.take(5)] == [5]
    with pytest.raises(RuntimeError, match=f"slot 5 has version {4 - max_lag}"):
        late.take(5)


def test_steps_are_taken_one_after_the_other():
    """Also where a part was taken of one: the others of it would never be."""
    buffer = RolloutBuffer(2, 1, parts=2)
    for slot in (2, 0):
        buffer.start(slot)
        buffer.put(group(slot, 0))
    assert [g.slot for g in buffer.take(0)] == [0]
    with pytest.raises(RuntimeError, match="step 1 was taken, but step 0 is next"):
        buffer.take(1)


@pytest.fixture
def clock(monkeypatch):
    now = SimpleNamespace(seconds=100.0)
    monkeypatch.setattr(grpo_async, "time", SimpleNamespace(monotonic=lambda: now.seconds))
    return now


def test_census_says_what_is_where(clock):
    buffer = RolloutBuffer(2, 1)
    assert buffer.census() == "version 0, 0 groups ready, 0 running (oldest 0 s), dropped: none"
    buffer.start(0)
    clock.seconds += 7
    for slot in (1, 2):
        buffer.start(slot)
    buffer.put(group(1, 0))
    buffer.dropped["TimeoutError"] += 2
    clock.seconds += 5
    told = "version 0, 1 groups ready, 2 running (oldest 12 s), dropped: {'TimeoutError': 2}"
    assert buffer.census() == told


def test_a_part_of_a_step_is_what_came_first():
    buffer = RolloutBuffer(4, 1, parts=2)
    for slot in range(6):
        buffer.start(slot)
    for slot in (5, 3):
        buffer.put(group(slot, 0))
        assert not buffer.has_part(0)
    buffer.put(group(1, 0))
    assert buffer.has_part(0)
    assert [g.slot for g in buffer.take(0)] == [1, 3] == [g.slot for g in buffer.taken]
    assert not buffer.has_part(0) and buffer.next_step == 0
    for slot in (2, 0):
        buffer.put(group(slot, 0))
    assert [g.slot for g in buffer.take(0)] == [0, 2]
    assert (buffer.next_step, buffer.taken, list(buffer.ready)) == (1, [], [5])


async def test_until_wakes_when_its_condition_holds():
    buffer = RolloutBuffer(2, 0)
    waits = {
        "start": asyncio.create_task(buffer.until(lambda: buffer.may_start(2))),
        "train": asyncio.create_task(buffer.until(lambda: buffer.has_part(0))),
    }

    async def done() -> list[str]:
        for _ in range(5):
            await asyncio.sleep(0)
        return [name for name, task in waits.items() if task.done()]

    buffer.start(0)
    buffer.start(1)
    buffer.put(group(0, 0))
    assert await done() == []
    buffer.put(group(1, 0))
    assert await done() == ["train"]
    buffer.take(0)
    buffer.advance(1)
    assert await done() == ["start", "train"]
    await asyncio.wait_for(buffer.until(lambda: buffer.may_start(0)), 1)  # holds already
