"""Waits: a deadline with a name, one task that ends another, and tasks that end together."""

import asyncio
import gc
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from core import waits
from core.waits import answer, in_thread, together, unless_stopped, within

BROKEN = ValueError("broken")


async def stop_after(seconds: float) -> None:
    await asyncio.sleep(seconds)


async def fail(error: Exception) -> None:
    raise error


async def test_a_wait_warns_halfway_and_ends_with_its_name_and_the_state(capsys):
    began = time.monotonic()
    with pytest.raises(TimeoutError, match=r"for the groups of step 7\. 3 groups ready"):
        await within(0.2, "the groups of step 7", asyncio.sleep(100), lambda: "3 groups ready")
    assert time.monotonic() - began < 50
    assert "waiting for the groups of step 7" in capsys.readouterr().out


async def test_a_wait_that_ends_in_time_prints_nothing(capsys):
    assert await within(5, "nothing", asyncio.sleep(0, "done")) == "done"
    assert capsys.readouterr().out == ""


async def test_the_clock_of_a_wait_may_stand_still(capsys):
    """As long as it does the wait neither warns nor ends."""
    began = time.monotonic()

    def stopped():
        return min(time.monotonic() - began, 1.0)

    with pytest.raises(TimeoutError, match="waited 0 s for the groups of step 7"):
        await within(0.4, "the groups of step 7", asyncio.sleep(100), stopped=stopped)
    assert 1.4 <= time.monotonic() - began < 50
    assert capsys.readouterr().out.count("waiting for the groups of step 7") == 1


def test_a_timeout_inside_of_a_wait_keeps_its_own_name():
    with pytest.raises(TimeoutError, match="^the socket$"):
        asyncio.run(within(5, "something else", fail(TimeoutError("the socket"))))


async def test_work_that_ends_first_gives_its_result():
    work = asyncio.ensure_future(asyncio.sleep(0, "done"))
    assert await unless_stopped(stop_after(60), work) == "done"
    await asyncio.sleep(0)
    assert len(asyncio.all_tasks()) == 1, "nobody waits for the stop any more"


async def test_work_is_cancelled_when_the_stop_comes_first():
    work = asyncio.ensure_future(asyncio.sleep(60, "done"))
    assert await unless_stopped(stop_after(0.01), work) is None
    assert work.cancelled()


async def test_work_that_fails_raises_its_error():
    with pytest.raises(ValueError, match="broken"):
        await unless_stopped(stop_after(60), asyncio.ensure_future(fail(BROKEN)))


async def test_work_that_fails_as_it_is_cancelled_causes_no_complaint():
    complaints = []
    asyncio.get_running_loop().set_exception_handler(lambda _, what: complaints.append(what))

    async def fails_late():
        try:
            await asyncio.sleep(60)
        finally:
            raise ValueError("too late")

    assert await unless_stopped(stop_after(0.01), asyncio.ensure_future(fails_late())) is None
    gc.collect()
    assert not complaints


async def test_a_cancelled_wait_ends_though_a_member_of_a_gather_fails_at_that_moment():
    """The trainer dies: this ends the run, and fails a wait that would be tried again."""
    loop = asyncio.get_running_loop()
    dead = loop.create_future()
    living = loop.create_future()

    async def retry():
        while True:
            try:
                await within(5, "both", asyncio.gather(dead, living))
            except ValueError:
                await asyncio.sleep(5)

    task = asyncio.create_task(retry())
    await asyncio.sleep(0)
    dead.set_exception(ValueError("dead"))
    task.cancel()
    await asyncio.wait([task], timeout=1)
    assert task.cancelled()


async def test_a_wait_leaves_nothing_that_python_must_search_for():
    """Each group is waited for, and searching for what waits left took half of the driver."""
    gc.collect()
    gc.disable()
    try:
        for _ in range(10):
            await within(5, "a nap", asyncio.sleep(0))
        assert gc.collect() == 0
    finally:
        gc.enable()


async def test_results_come_in_order():
    naps = [asyncio.sleep(seconds, seconds) for seconds in (0.02, 0.0, 0.01)]
    assert await together(naps) == [0.02, 0.0, 0.01]


async def test_an_error_ends_the_others_before_it_is_raised():
    ended = []

    async def works():
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0)
            ended.append(True)

    with pytest.raises(ValueError, match="broken"):
        await together([works(), fail(BROKEN), works()])
    assert ended == [True, True]


async def test_cancelling_ends_all():
    tasks = [asyncio.ensure_future(asyncio.sleep(60)) for _ in range(2)]
    waiting = asyncio.create_task(together(tasks))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert all(task.cancelled() for task in tasks)


def test_nothing_together_is_nothing():
    assert asyncio.run(together([])) == []


def test_who_does_not_answer_is_named():
    with pytest.raises(TimeoutError, match="an engine did not answer for 0 s"):
        asyncio.run(answer(asyncio.sleep(5), 0.01, "an engine"))


@pytest.mark.parametrize("after", [0.1, 0.25])
async def test_an_answer_counts_that_came_while_this_process_stood_still(after):
    """Or soon after: on the way it waits for threads that stood still as well."""
    came = asyncio.get_running_loop().create_future()
    asked = asyncio.create_task(answer(came, 0.12, "an engine"))
    await asyncio.sleep(0)
    threading.Timer(after, came.get_loop().call_soon_threadsafe, (came.set_result, 7)).start()
    time.sleep(0.2)
    assert await asked == 7


async def test_a_function_that_blocks_holds_up_nobody():
    began = time.monotonic()
    blocked = [asyncio.create_task(in_thread(time.sleep, 60)) for _ in range(100)]
    assert await in_thread(max, 1, 2) == 2
    for task in blocked:
        task.cancel()
    await asyncio.gather(*blocked, return_exceptions=True)
    assert time.monotonic() - began < 50


@pytest.mark.parametrize(
    ("raised", "seen", "message"),
    [(ValueError, ValueError, "bad row"), (StopIteration, RuntimeError, "StopIteration")],
)
def test_what_a_function_raises_arrives(raised, seen, message):
    def fail():
        raise raised("bad row")

    with pytest.raises(seen, match=message):
        asyncio.run(in_thread(fail))


def test_a_function_that_would_end_the_process_does_not():
    with pytest.raises(RuntimeError, match=r"exit raised SystemExit\(3\)"):
        asyncio.run(in_thread(sys.exit, 3))


async def test_a_function_waits_for_a_thread_where_there_are_none(monkeypatch):
    start = threading.Thread.start
    refused = [1, 2]

    def scarce(thread):
        if refused:
            raise RuntimeError(f"can't start new thread {refused.pop()}")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", scarce)
    assert await in_thread(max, 1, 2) == 2 and not refused


def test_idle_seconds_are_those_in_which_nothing_runs(monkeypatch):
    now = SimpleNamespace(seconds=0.0)
    monkeypatch.setattr(waits, "time", SimpleNamespace(monotonic=lambda: now.seconds))
    idle = waits.Idle()

    def after(seconds: float, act, *by: int) -> float | None:
        now.seconds += seconds
        return act(*by)

    assert after(50, idle.take) == 0, "counted before anything has run"
    after(3, idle.change, 1)  # 3 s idle
    after(10, idle.change, 1)
    after(10, idle.change, -1)
    after(10, idle.change, -1)
    after(4, idle.change, 1)  # 4 s idle
    assert after(1, idle.take) == 7
    after(20, idle.change, -1)
    assert after(5, idle.take) == 5
    assert after(6, idle.take) == 6 and after(0, idle.take) == 0


async def test_work_is_cancelled_with_the_one_that_waits_for_it():
    work = asyncio.ensure_future(asyncio.Event().wait())
    waiting = asyncio.create_task(unless_stopped(asyncio.Event().wait(), work))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await asyncio.wait([work], timeout=1)
    assert work.cancelled()


async def test_an_error_of_what_stops_the_work_is_raised():
    async def fails():
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        await unless_stopped(fails(), asyncio.ensure_future(asyncio.Event().wait()))


@pytest.mark.parametrize("error", [TimeoutError, ValueError])
async def test_a_cancelled_wait_is_cancelled_whatever_its_members_raise_then(error):
    async def member():
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise error("late") from None

    waiting = asyncio.create_task(within(60, "a member", member()))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
