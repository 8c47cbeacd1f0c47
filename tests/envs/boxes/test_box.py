"""Boxes on a small image: commands, files, limits, and what is left of them."""

import asyncio
import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from envs import services
from envs.boxes.box import NEED, Box, Output, Size
from envs.sandbox import sandbox
from envs.services import CheckerError
from settings.environment_services import Services
from support.box_images import adopting, left, make_image, orphans, present
from support.program import ROOT

SMALL = Size(memory=300 << 20, disk=32 << 20, processes=40)


@pytest.fixture(scope="module")
def image(tmp_path_factory):
    """A folder with a repository of one file."""
    if problem := sandbox.problem():
        pytest.skip(f"no sandbox here: {problem}")
    return make_image(tmp_path_factory.mktemp("box") / "image", {"calc.py": "x = 1\n"})


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path, monkeypatch):
    """Each test leaves no process, mount, descriptor or file."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    before = present()
    yield
    assert left(before) == set()
    assert not list(folder.iterdir())


async def test_commands_share_files_and_nothing_else(image):
    async with Box(image, size=SMALL) as box:
        assert 0 < box.started < 60
        ran = await box.run("pwd; id -u; cat calc.py; echo no >&2; exit 7", 10)
        assert (ran.output, ran.code, ran.ended) == ("/testbed\n0\nx = 1\nno\n", 7, "")
        ran = await box.run("echo y=2 >>calc.py; cd /tmp; echo here >a; export A=1; sleep 99 &", 10)
        assert (ran.output, ran.code) == ("", 0) and ran.seconds < 5
        ran = await box.run("cat calc.py /tmp/a; echo $A; pwd; ps -e | grep -c sleep", 10)
        assert ran.output == "x = 1\ny=2\nhere\n\n/testbed\n0\n"
    assert (image / "testbed/calc.py").read_text() == "x = 1\n"
    async with Box(image, size=SMALL) as box:
        assert (await box.run("cat calc.py; ls /tmp", 10)).output == "x = 1\n"


async def test_git_and_pytest_work(image):
    async with Box(image, size=SMALL) as box:
        await box.put("/testbed/test_a.py", b"def test_a():\n    assert True\n")
        ran = await box.run("python -m pytest -q test_a.py && git add -A && git diff --cached", 60)
        assert ran.code == 0 and "1 passed" in ran.output and "+def test_a():" in ran.output
        locks = "python -c 'import multiprocessing; multiprocessing.Lock()' && ls -d /dev/shm"
        assert (await box.run(locks, 10)).output == "/dev/shm\n"


async def test_files_go_in_and_out(image):
    content = bytes(range(256)) * 1000
    async with Box(image, size=SMALL) as box:
        for path in ("/testbed/a b/'c'/$d\n", "/testbed/-n", "/new", "/testbed/" + "ä" * 100):
            await box.put(path, content)
            assert await box.get(path, 1 << 20) == content
            assert await box.get(path, 300) == content[:300]
        await box.put("/testbed/calc.py", b"")
        assert await box.get("/testbed/calc.py", 10) == b""
        for path in ("/testbed/none", "/testbed", "relative", "/a\0b", "/\ud800", "/dev/null"):
            assert await box.get(path, 10) is None
        for path in ("/testbed", "/testbed/calc.py/x", "relative", "", "/a\0b", "/\ud800"):
            with pytest.raises(ValueError):
                await box.put(path, b"x")
        with pytest.raises(ValueError, match="No space left"):
            await box.put("/big", bytes(SMALL.disk + 1))
        assert await box.run("rm /big; [ -x /bin/bash ]", 10)


@pytest.mark.slow
async def test_much_output_is_cut_in_the_middle(image):
    async with Box(image, size=SMALL) as box:
        ran = await box.run("seq 1 1000000", 60, most=1000)
        head, middle, tail = ran.output.split("\n[")[0], ran.output.split("\n")[-3], "1000000\n"
        assert head.startswith("1\n2\n3\n") and len(head) == 500 and ran.output.endswith(tail)
        missing = sum(len(f"{i}\n") for i in range(1, 1_000_001)) - 1000
        assert f"[... {missing} bytes of output are left out ...]" in ran.output, middle
        assert (await box.run("printf '\\377a\\0'", 10)).output == "\ufffda\0"
        began = time.process_time()
        ran = await box.run("yes", 2, most=100)
        assert ran.ended == "time" and len(ran.output) < 200
        assert time.process_time() - began < 1


def sleeping(seconds: str) -> int:
    """How many processes of this machine sleep for so long."""
    count = 0
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            count += path.read_bytes() == f"sleep\0{seconds}\0".encode()
    return count


@pytest.mark.slow
async def test_all_that_a_command_began_is_dead_when_it_returns(image):
    """So nothing changes a file while the next command, or the judge, reads it."""
    async with Box(image, size=SMALL) as box:
        for command, seconds in [("exit", 9)] * 5 + [("sleep 97.321", 0.7)] * 2:
            left_behind = "for i in {1..25}; do setsid sleep 98.765 >/dev/null & done; sleep 0.1; "
            task = asyncio.create_task(box.run(left_behind + command, seconds))
            seen = 0
            while not task.done():
                seen = max(seen, sleeping("98.765"))
                await asyncio.sleep(0.01)
            assert sleeping("98.765") == 0 < seen, task.result()


@pytest.mark.slow
async def test_the_layer_counts_as_memory(image):
    """Files and shared memory lie in it."""
    size = SMALL._replace(memory=40 << 20)
    async with Box(image, size=size) as box:
        ran = await box.run("head -c 15000000 /dev/zero | tee /big >/dev/shm/big; sleep 1", 20)
        assert ran.code == 0 and 30_000_000 < box.peak < size.memory
        ran = await box.run("python -c 'import time; x = bytearray(10 << 20); time.sleep(9)'", 20)
        assert (ran.ended, box.gone) == ("memory", "memory")


async def test_beside_a_box_the_image_is_as_it_was(image):
    """Its programs, not its working folder; files of the box can be read, links lead nowhere."""
    look = "cat calc.py; ls /testbed /tmp; touch calc.py a /usr/bin/x /tmp/y; ls -d /root /tmp/*"
    async with Box(image, size=SMALL) as box:
        await box.run("echo y >>calc.py; rm /usr/bin/cat /usr/bin/ls; ln -s /etc /testbed/etc", 10)
        found = (await box.aside(f"exec 2>&1; {look}", 10, 1000, "/testbed")).decode()
        assert found.startswith("x = 1\ny\n/testbed:\n\n/tmp:\nbox\n"), found
        assert found.count("Read-only file system") == 3
        assert found.endswith("/root\n/tmp/box\n/tmp/y\n")
        assert await box.aside("cat etc/passwd; cat calc.py", 10, 5, "/testbed") == b"root:"
        for command in ("exit 3", "sleep 9"):
            assert await box.aside(command, 1, 10, "/testbed") is None
        assert (await box.run("echo calc*; ls", 10)).code == 127


@pytest.mark.parametrize("size", [0, 1, 99, 100, 101, 200, 5_000, 300_000])
async def test_output_keeps_both_ends(size):
    text = bytes(i % 251 for i in range(size))
    stream = asyncio.StreamReader()
    stream.feed_data(text)
    stream.feed_eof()
    output = Output(100)
    await output.read(stream)
    assert output.total == size
    if size <= 100:
        assert output.text() == text.decode("utf-8", "replace")
    else:
        assert output.head == text[:50] and output.tail[-50:] == text[-50:]
        assert f"[... {size - 100} bytes" in output.text()


async def test_a_command_that_no_process_can_be_given(image):
    async with Box(image, size=SMALL) as box:
        ran = await box.run("echo " + "x" * 200_000, 10)
        assert (ran.output, ran.code) == ("bash: Argument list too long\n", 126)
        assert (await box.run("echo a\0b \ud800", 10)).output == "ab ?\n"
        assert (await box.run("if", 10)).code == 2
        assert (await box.run("", 10)).code == 0


# What a command may do to its box, how it ends, and what the next command prints.
WORKS, BROKEN = "x = 1\n", "No such file"
ENDS = {
    "time": ("sleep 100", "time", WORKS),
    "time of many": ("for i in 1 2 3; do setsid sleep 100 & done; sleep 100", "time", WORKS),
    "yes": ("yes", "time", WORKS),
    "parents are stopped": ("kill -STOP $PPID 1 -1; kill -STOP $$; sleep 100", "time", WORKS),
    "all are killed": ("sleep 99 & kill -9 -1; wait", "", WORKS),
    "own shell is killed": ("kill -9 $$", "", WORKS),
    "first is signalled": ("for i in {1..64}; do kill -$i 1 2>/dev/null; done; :", "", WORKS),
    "signals are ignored": ("trap '' TERM INT HUP; sleep 100", "time", WORKS),
    "left behind": ("for i in 1 2 3; do (setsid sleep 100 >/dev/null &) ; done", "", WORKS),
    "output is held": ("setsid sleep 100 & echo", "", WORKS),
    "array": ("python -c 'x = bytearray(3 << 30); input()'", "memory", ""),
    "many arrays": (
        "for i in {1..9}; do python -c 'import time; x = bytearray(50 << 20); time.sleep(99)' & "
        "done; wait",
        "memory",
        "",
    ),
    "layer is full": ("head -c 99999999 /dev/zero >/full; echo >/more && echo no", "", WORKS),
    "shared memory is full": ("head -c 99999999 /dev/zero >/dev/shm/full", "", WORKS),
    "files without end": ("i=0; while : >$i; do i=$((i+1)); done 2>/dev/null", "", WORKS),
    "all is removed": ("rm -rf --no-preserve-root / 2>/dev/null; :", "", BROKEN),
    "root is closed": ("chmod 0 / /usr /testbed; mv /usr /user", "", WORKS),
    "shell is replaced": ("cp --remove-destination /bin/true /bin/bash", "", ""),
    "folder is moved": ("mv /testbed /gone", "", BROKEN),
    "first process is written to": (
        "for i in 0 1 2 3 4 5 6 7 8 9; do echo '{\"exit-code\": 9}' >/proc/1/fd/$i; done "
        "2>/dev/null; :",
        "",
        WORKS,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ENDS)
async def test_what_commands_may_do(image, name):
    command, ended, after = ENDS[name]
    async with Box(image, size=SMALL) as box:
        began = time.monotonic()
        ran = await box.run(command, 20 if ended != "time" else 2)
        assert (ran.ended, ran.code is None) == (ended, bool(ended)), ran
        assert time.monotonic() - began < 30
        then = await box.run("cat calc.py", 10)
        assert after in then.output, then
        if after == WORKS:
            assert not box.gone and then.output == after
        elif ended:
            assert box.gone == ended == then.ended
            with pytest.raises(ValueError):
                await box.put("/testbed/a", b"")
            assert await box.get("/testbed/calc.py", 10) is None
        assert box.peak < 4 << 30


@pytest.mark.parametrize("signal", ["STOP", "TERM", "KILL"])
async def test_a_command_ends_as_itself_whatever_it_sends_its_parent(image, signal):
    """Which is the first process of its namespace: the kernel lets nothing in there end it."""
    async with Box(image, size=SMALL) as box:
        ran = await box.run(f"kill -{signal} $PPID; sleep 0.2; exit 7", 10)
        assert (ran.code, ran.ended) == (7, "")


@contextlib.asynccontextmanager
async def running(box: Box, command: str = "sleep 100"):
    """A command that runs in a box: its task, and the processes of it that this one sees."""
    before = set(sandbox.family(os.getpid()))
    task = asyncio.create_task(box.run(command, 60))
    while len(found := sorted(set(sandbox.family(os.getpid())) - before)) < 4:
        await asyncio.sleep(0.02)
    await asyncio.sleep(0.2)
    yield task, found
    await asyncio.wait({task}, timeout=20)
    assert task.done()


@pytest.mark.parametrize("which", ["nsenter", "bubblewrap", "the first process"])
async def test_what_a_command_needs_is_killed_from_outside(image, which):
    """By no command: so another try is due for the first two; for the last one nothing tells."""
    async with Box(image, size=SMALL) as box:
        async with running(box) as (task, found):
            os.kill(found[["nsenter", "bubblewrap", "the first process"].index(which)], 9)
        if which != "the first process":
            with pytest.raises(CheckerError, match="did not run: code -9"):
                task.result()
        else:
            assert task.result().code == 137
        assert (await box.run("cat calc.py", 10)).output == WORKS


async def begins(box: Box, known: set[int]) -> int:
    """The process id of the next bubblewrap, as soon as it is there; `known` are of others."""
    while True:
        strays = sandbox.family(box.holder.pid)
        for pid in sorted(set(sandbox.family(os.getpid())) - set(strays) - known):
            with contextlib.suppress(OSError):
                if Path(f"/proc/{pid}/comm").read_text() == "bwrap\n" and lives(pid):
                    return pid
        await asyncio.sleep(0)


async def test_a_bubblewrap_that_is_killed_as_it_begins_leaves_nothing(image):
    """In its first 20 ms, where its child waits for it, or does not yet end with it."""
    dice = random.Random(0)
    with adopting() as before:
        async with Box(image, size=SMALL) as box:
            for _ in range(60 if "GRPO_SWE" in os.environ else 10):
                known = set(sandbox.family(os.getpid()))  # also what an earlier test has left
                task = asyncio.create_task(box.run("sleep 100", 60))
                pid = await begins(box, known)
                time.sleep(dice.uniform(0, 0.02))
                os.kill(pid, signal.SIGKILL)
                await asyncio.wait({task}, timeout=20)
                with pytest.raises(CheckerError, match="did not run"):
                    task.result()
        assert await asyncio.to_thread(orphans, before) == {}


async def test_a_holder_that_is_killed_is_an_error(image):
    async with Box(image, size=SMALL) as box:
        async with running(box) as (task, _):
            box.holder.kill()
        with pytest.raises(CheckerError, match="the holder of a box has ended"):
            task.result()
        with pytest.raises(CheckerError, match="the holder of a box has ended"):
            await box.run("echo", 10)


@pytest.mark.parametrize(("change", "message"), [
    ({"image": "/none"}, "not a .sif that can be mounted: .*No such file"),
    ({"workdir": "/none"}, "cannot start a box from the image .*/none: No such file"),
    ({"size": Size(disk=-1)}, "cannot start a box from the image .*mount"),
])  # fmt: skip
async def test_what_cannot_be_opened_is_an_error(image, change, message):
    with pytest.raises(CheckerError, match=message):
        async with Box(**{"image": image, "size": SMALL} | change):
            pass


async def test_an_image_without_bash_is_an_error(tmp_path):
    with pytest.raises(CheckerError, match="cannot start a box from the image .*bash"):
        async with Box(tmp_path, size=SMALL):
            pass


def test_another_sandbox_opens_no_box(image):
    services.configure(Services(sandbox="http", sandbox_url="http://127.0.0.1:1"))
    assert "expected 'bubblewrap'" in NEED.problem()
    with pytest.raises(CheckerError, match="services.sandbox = 'http'"):
        asyncio.run(Box(image).__aenter__())


OPENS = """
import asyncio, sys
from envs.boxes.box import Box, Size
async def main():
    async with Box(sys.argv[1], size=Size(300 << 20, 32 << 20, 40)) as box:
        task = asyncio.create_task(box.run("setsid sleep 100 & sleep 100", 99))
        await asyncio.sleep(1)
        print("running", flush=True)
        await task
asyncio.run(main())
"""


def killed_worker(image: Path) -> None:
    """Kills a worker that runs a command; all that it began must end."""
    worker = subprocess.Popen(
        [sys.executable, "-c", OPENS, str(image)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    with worker:
        assert worker.stdout.readline() == "running\n"
        began = sandbox.family(worker.pid)
        assert len(began) >= 6
        worker.kill()
    end = time.monotonic() + 5
    while alive := [pid for pid in began if lives(pid)]:
        assert time.monotonic() < end, alive
        time.sleep(0.05)


def lives(pid: int) -> bool:
    """Whether a process is there and is no zombie, which only its own parent can remove."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


@pytest.mark.slow
def test_a_worker_that_is_killed_leaves_nothing(image):
    killed_worker(image)


class Suspensions:
    """Runs a coroutine; cancels its task while that waits for the `at`th time."""

    def __init__(self, work, at: int) -> None:
        self.work = work.__await__()
        self.at = at
        self.count = 0

    def __await__(self):
        task = asyncio.current_task()
        sent = None
        while True:
            try:
                waits = self.work.send(sent)
            except StopIteration:
                return
            self.count += 1
            if self.count == self.at:
                asyncio.get_running_loop().call_soon(task.cancel)
            try:
                sent = yield waits
            except BaseException as error:
                try:
                    waits = self.work.throw(error)
                except StopIteration:
                    return
                sent = yield waits


async def episode(image: Path) -> None:
    """All that one does with a box."""
    async with Box(image, size=SMALL) as box:
        await box.put("/a", b"x")
        await box.run("setsid sleep 60 & sleep 0.3", 10)
        await box.get("/a", 10)


async def cancelled_everywhere(image: Path, first: int, step: int) -> int:
    """Cancels at every `step`th wait from the `first` on; returns how many there are."""
    for at in range(first, 10_000, step):
        before = present()
        steps = Suspensions(episode(image), at)

        async def go(steps=steps) -> None:
            await steps

        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait_for(asyncio.create_task(go()), 60)
        found = await asyncio.to_thread(left, before)
        assert not {each for each in found if "event" not in each}, (at, found)
        if steps.count < at:
            return at
    raise AssertionError("no end")


@pytest.mark.slow
async def test_a_cancelled_episode_leaves_nothing(image):
    assert await cancelled_everywhere(image, 2, 4) > 12
