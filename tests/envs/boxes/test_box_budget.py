"""How many boxes a node holds: places that all its processes share, and what waits for one."""

import asyncio
import contextlib
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from envs import services
from envs.boxes import box_budget
from envs.sandbox import outcome
from envs.services import CheckerError, Limits
from settings.environment_services import Services
from support.program import ROOT, ran

DISK = 4096 + os.getpid()  # places of its own for this process

HOLDS = """
import asyncio, sys
from envs.boxes import box_budget as budget
async def main():
    async with budget.admitted(int(sys.argv[1])):
        print("in", flush=True)
        await asyncio.sleep(60)
asyncio.run(main())
"""


@pytest.fixture(autouse=True)
def two(monkeypatch):
    """A node of two boxes, where one waits for a second."""
    monkeypatch.setenv(box_budget.VARIABLE, "2")
    services.configure(Services(), Limits(4.0))


@contextlib.contextmanager
def other_process(disk: int):
    """Another process that has a place."""
    command = [sys.executable, "-c", HOLDS, str(disk)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "in\n"
        yield process
        process.kill()


async def enters(stack: contextlib.AsyncExitStack) -> None:
    await stack.enter_async_context(box_budget.admitted(DISK))


async def test_one_more_waits_until_a_place_is_free_and_then_fails_by_name():
    async with contextlib.AsyncExitStack() as first, contextlib.AsyncExitStack() as rest:
        await enters(first)
        await enters(rest)
        began = time.monotonic()
        with pytest.raises(CheckerError, match="waited 1 s for a place for a box.*2 are open"):
            await enters(rest)
        assert time.monotonic() - began < 30
        waits = asyncio.create_task(enters(rest))
        await asyncio.sleep(0.3)
        assert not waits.done()
        await first.aclose()
        await asyncio.wait_for(waits, 1)


async def test_those_that_wait_enter_in_turn():
    services.configure(Services(), Limits(60.0))
    order = []

    async def box(i: int) -> None:
        async with box_budget.admitted(DISK):
            order.append(i)
            await asyncio.sleep(0.05)

    await asyncio.gather(*map(box, range(12)))
    assert order == list(range(12))


async def test_one_that_comes_as_a_place_gets_free_is_behind_those_that_wait():
    async with contextlib.AsyncExitStack() as first, contextlib.AsyncExitStack() as rest:
        await enters(first)
        await enters(rest)
        waits = asyncio.create_task(enters(rest))
        await asyncio.sleep(box_budget.LOOK / 2)
        await first.aclose()
        late = asyncio.create_task(enters(first))
        await asyncio.wait({waits, late}, return_when="FIRST_COMPLETED")
        assert waits.done() and not late.done()
        await rest.aclose()
        await late


async def test_one_that_is_cancelled_holds_up_no_other():
    async with contextlib.AsyncExitStack() as stack:
        await enters(stack)
        await enters(stack)
        given_up = asyncio.create_task(enters(stack))
        waits = asyncio.create_task(enters(stack))
        await asyncio.sleep(0.1)
        given_up.cancel()
        await stack.aclose()
        await asyncio.wait_for(waits, 1)
        await stack.aclose()


async def test_processes_share_the_places_and_one_that_is_killed_gives_its_own_back():
    services.configure(Services(), Limits(40.0))
    async with contextlib.AsyncExitStack() as stack:
        with other_process(DISK) as other:
            await enters(stack)
            waits = asyncio.create_task(enters(stack))
            await asyncio.sleep(0.5)
            assert not waits.done()
            other.kill()
            await asyncio.wait_for(waits, 5)


def test_boxes_of_another_size_have_places_of_their_own(monkeypatch):
    monkeypatch.setenv(box_budget.VARIABLE, "1")

    async def both() -> None:
        async with box_budget.admitted(DISK), box_budget.admitted(DISK + 1):
            pass

    asyncio.run(both())


def test_a_number_follows_from_the_memory(monkeypatch, tmp_path):
    """Half of the machine's, or of the least that a cgroup above this process has."""
    monkeypatch.delenv(box_budget.VARIABLE)
    total = int(re.search(r"MemTotal: *(\d+)", Path("/proc/meminfo").read_text())[1]) << 10
    monkeypatch.setattr(outcome, "CGROUPS", tmp_path)
    assert box_budget.memory() == total
    assert box_budget.boxes(1 << 20) == total // 2 >> 20 and box_budget.boxes(1 << 60) == 1
    assert "this node has" in box_budget.problem(1 << 60) and box_budget.problem(1 << 20) == ""
    folder = outcome_folder(tmp_path)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text("max\n")
    assert box_budget.memory() == total
    (folder / "memory.max").write_text(f"{64 << 20}\n")
    assert box_budget.memory() == 64 << 20 and box_budget.boxes(1 << 20) == 32


def outcome_folder(root: Path) -> Path:
    """The cgroup of this process that counts memory, below a folder."""
    found = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    return next(
        root / kinds / path.lstrip("/") for _, kinds, path in found if kinds in ("", "memory")
    )


@pytest.mark.parametrize(("given", "gib"), [("64", 64), ("", 32), ("much", 32)])
def test_a_box_has_the_memory_that_the_node_sets(monkeypatch, given, gib):
    """Ultra's published boxes have 64 GiB, Super's 32."""
    monkeypatch.setenv("GRPO_BOX_GIB", given)
    assert box_budget.box_memory() == gib << 30
    told = f"GRPO_BOX_GIB = {given!r}: expected the GiB of memory that a box may use"
    assert (box_budget.problem(1) == told) == (given == "much")
    code = "from envs.boxes.box import Size; print(Size().memory)"
    assert ran(sys.executable, "-c", code).stdout == f"{gib << 30}\n"


@pytest.mark.parametrize("given", ["0", "-1", "many", "1.5", "9999999"])
def test_a_number_that_is_none_is_named(monkeypatch, given):
    monkeypatch.setenv(box_budget.VARIABLE, given)
    assert f"GRPO_BOXES = {given!r}: expected the maximum number of boxes" in box_budget.problem(1)
