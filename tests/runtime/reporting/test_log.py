"""Where a run writes."""

import asyncio
import contextlib
import dataclasses
import json
import math
import re
import resource
import shutil
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

import report
from core.errors import InputError, in_one_line
from core.jsonl import LineFile, WriteError
from grpo_async import Config
from rollout.episode import Sample
from runtime.reporting.log import Log
from runtime.rollouts.dispatch import Slot
from support.configs import changed


@pytest.mark.parametrize(
    ("before", "after"),
    [("", ""), ("a\n", "a\n"), ("a\nb", "a\n"), ("b", ""), ("a\nb\n", "a\nb\n")],
)
def test_half_a_line_of_a_killed_writer_is_cut_off(before, after, tmp_path):
    path = tmp_path / "rollouts.jsonl"
    path.write_text(before)
    with contextlib.closing(LineFile(path)) as file:
        file.append(b"c\n")
    assert path.read_text() == after + "c\n"


def deleted(path: Path) -> str:
    path.unlink()
    return ""


def deleted_with_its_folder(path: Path) -> str:
    shutil.rmtree(path.parent)
    return ""


def edited(path: Path) -> str:
    """As an editor saves it."""
    path.with_suffix(".new").write_text("a\n")
    path.with_suffix(".new").replace(path)
    return "a\n"


@pytest.mark.parametrize("change", [deleted, deleted_with_its_folder, edited])
def test_a_file_that_loses_its_path_is_followed_with_one_note(change, tmp_path, capsys):
    """Lines would go to a file that nobody can open."""
    path = tmp_path / "run" / "metrics.jsonl"
    path.parent.mkdir()
    with contextlib.closing(LineFile(path)) as file:
        file.append(b"a\n")
        file.append(b"b\n")
        left = change(path)
        file.append(b"c\n")
        file.append(b"d\n")
    assert path.read_text() == left + "c\nd\n"
    told = f"{path} was deleted or replaced: its lines so far may be lost\n"
    assert capsys.readouterr().out == told


@contextlib.contextmanager
def room_for(size: int):
    """No file of this process may grow beyond so many bytes."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def slots(folder: Path) -> list[int]:
    lines = (folder / "rollouts.jsonl").read_text().splitlines()
    return [json.loads(line)["slot"] for line in lines]


def fill(folder: Path) -> int:
    """Writes groups until one is refused; returns how many were written."""
    group = [{"response": ["x" * 3000]}, {"response": ["y" * 3000]}]
    path = re.escape(str(folder / "rollouts.jsonl"))
    with contextlib.closing(LineFile(folder / "rollouts.jsonl")) as file:
        for slot in range(1000):
            try:
                file.append(Slot(slot).lines(group, Config()))
            except WriteError as error:
                told = rf"{path}: \d+ of 61\d\d bytes could be written: \[Errno \d+\] .*"
                assert re.fullmatch(told, str(error))
                return slot
    raise AssertionError("the disk was never full")


def test_every_group_is_written_with_its_place():
    cfg = Config(prompts_per_step=50)
    slots = [Slot(i) for i in range(500)] + [Slot(i, e) for e in (0, 9) for i in range(30)]
    written = b"".join(slot.lines([{}] * 2, cfg) for slot in slots)
    lines = list(map(json.loads, written.splitlines()))
    for step in range(1, 11):
        assert sum(line["step"] == step for line in lines) == 100
    of = [[line["slot"] for line in lines if line["evaluation"] == e] for e in (0, 9)]
    assert of[0] == of[1] == [slot for slot in range(30) for _ in range(2)]


def test_a_group_that_does_not_fit_leaves_nothing_and_is_named(tmp_path):
    with room_for(50_000):
        count = fill(tmp_path)
    assert slots(tmp_path) == sorted(2 * list(range(count))) and count == 8


def test_a_full_disk_leaves_whole_groups(small_disk):
    count = fill(small_disk)
    assert slots(small_disk) == sorted(2 * list(range(count))) and count > 50


async def test_a_folder_that_takes_no_lines_ends_the_run_by_name(tmp_path):
    """A file system that hangs; the event loop goes on."""
    hangs = threading.Event()
    log = Log()
    log.cfg = changed(Config(), timeouts={"train": 0.05})
    log.files = {"rollouts": SimpleNamespace(path=tmp_path / "x", append=lambda _: hangs.wait())}
    with pytest.raises(WriteError, match=f"waited 0 s for {tmp_path}/x to take lines"):
        await log.rollouts(b"a line")
    await log.rollouts(b"")  # of a group that is not written: no thread starts for it
    hangs.set()


async def test_groups_that_come_together_are_written_at_once_or_fail_together(tmp_path):
    written: list[bytes] = []
    takes = threading.Event()

    def append(lines: bytes) -> None:
        takes.wait()
        if len(written) == 2:
            raise WriteError("the disk is full")
        written.append(lines)

    log = Log()
    log.cfg = Config()
    log.files = {"rollouts": SimpleNamespace(path=tmp_path / "x", append=append)}
    first = [asyncio.ensure_future(log.rollouts(b"%d\n" % i)) for i in range(4)]
    await asyncio.sleep(0.05)
    assert not any(task.done() for task in first)
    takes.set()
    await asyncio.gather(*first)
    assert b"".join(written) == b"0\n1\n2\n3\n" and len(written) == 2
    failed = await asyncio.gather(*map(log.rollouts, [b"4\n", b"5\n"]), return_exceptions=True)
    assert [type(error) for error in failed] == [WriteError] * 2


def test_each_start_is_written_down_in_any_parsers_json(tmp_path):
    """config.json has the last one. A clip of infinity, which is allowed, is a text."""
    limits = {"advantage": {"clip": (-math.inf, math.inf)}, "sequence_error_limit": math.inf}

    def strict(text: str) -> dict:
        return json.loads(text, parse_constant=pytest.fail)

    for version, lr in ((0, 1e-3), (7, 2e-3)):
        log = Log()
        log.open(changed(Config(run_dir=str(tmp_path)), lr=lr, **limits), version)
        log.close()
    config = strict((tmp_path / "config.json").read_text())
    assert config["advantage"]["clip"] == ["-inf", "inf"] and config["policy"]["lr"] == 2e-3
    first, second = map(strict, (tmp_path / "starts.jsonl").read_text().splitlines())
    assert second == config | {"time": second["time"], "version": 7}
    assert (first["version"], first["policy"]["lr"]) == (0, 1e-3) and first["command_line"]
    clip = Config(advantage={"clip": first["advantage"]["clip"]}).advantage.clip
    assert clip == (-math.inf, math.inf), "it can be read back"


def test_the_seconds_of_a_resumed_run_continue(tmp_path):
    """Those of an evaluation do not: earlier lines there belong to other policies."""
    evaluates = {"eval_only": True}
    for version, mode in ((0, {}), (25, {}), (25, evaluates), (25, evaluates)):
        cfg = Config(run_dir=str(tmp_path), data={"val": "x.jsonl"}, val_period=1, command=mode)
        log = Log()
        log.open(cfg, version)
        log.began -= 546
        log.write(version + 1, {"loss": 1.0})
        log.close()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 26]
    assert [line["seconds"] // 546 for line in lines] == [1, 2]
    again = (tmp_path / "evaluation/metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["seconds"] // 546 for line in again] == [1, 1]


def test_a_full_disk_of_tensorboard_alone_costs_its_file(small_disk, tmp_path, monkeypatch, capfd):
    """One note names the file, and its thread prints no traceback."""
    monkeypatch.setattr(threading, "excepthook", threading.__excepthook__)  # without pytest's
    log = Log()
    log.open(Config(run_dir=str(tmp_path)), 0)
    (events,) = tmp_path.glob("events.*")
    events.symlink_to(shutil.move(events, small_disk))
    with pytest.raises(OSError, match="No space left"):
        (small_disk / "filler").write_bytes(bytes(1 << 20))
    for step in range(300):  # the last page of the file has room for a hundred
        log.write(step, {"loss": 1.0})
    log.close()
    told = f"TensorBoard's {tmp_path}/events.out.tfevents.* gets no more metrics; "
    told += "metrics.jsonl has them all: OSError: [Errno 28] No space left on device\n"
    assert capfd.readouterr() == (told, "")
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 300


@pytest.mark.parametrize("fails", ["init", "log", "finish"])
def test_a_failure_of_wandb_ends_wandb_alone(fails, tmp_path, monkeypatch, capsys):
    """It is not installed here."""
    calls = []

    def called(name: str):
        calls.append(name)
        if name == fails:
            raise ConnectionError("no network")

    run = SimpleNamespace(
        offline=True,
        define_metric=lambda *_, **__: None,
        log=lambda _: called("log"),
        finish=lambda: called("finish"),
    )
    stub = SimpleNamespace(init=lambda **_: called("init") or run)
    monkeypatch.setitem(sys.modules, "wandb", stub)
    monkeypatch.setattr("runtime.reporting.wandb_board.wandb", stub)
    log = Log()
    log.open(Config(run_dir=str(tmp_path), wandb=True), 0)
    for step in (1, 2):
        log.write(step, {"loss": 1.0})
    log.close()
    told = capsys.readouterr().out
    assert told.count("W&B gets no more metrics") == 1 and "no network" in told
    assert calls.count(fails) == 1, "it is not called again"
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2


@pytest.mark.parametrize("error", [ZeroDivisionError("no step"), InputError("a pipe is there")])
def test_a_good_run_does_not_fail_for_its_report(error, tmp_path, monkeypatch, capsys):
    def draw(folder: str) -> None:
        raise error

    monkeypatch.setattr(report, "draw", draw)
    cfg = Config(run_dir=str(tmp_path))
    log = Log()
    log.open(cfg, 0)
    log.close()
    report.finish(cfg)
    assert f"no report: {error}" in capsys.readouterr().out


@pytest.mark.parametrize("dropped", [0, 2])
def test_an_evaluation_says_what_it_left_out(dropped, capsys):
    log = Log()
    log.cfg = Config()
    written = []
    log.write = lambda *line: written.append(line)
    info = dataclasses.replace(Sample.empty().info(), reward=0.5, score=1.0, env="any")
    log.evaluation(7, [[info]], dropped)
    told = " (dropped prompts: 2)" * bool(dropped)
    expected = f"version 7: validation reward 0.500, exact 1/1 [0.21, 1.00]{told}\n"
    assert capsys.readouterr().out == expected
    assert written[0][1].get("validation_dropped", 0) == dropped


def test_an_error_of_another_process_is_one_line_that_names_its_place():
    remote = (
        "\x1b[36mray::RolloutWorker.rollout_group()\x1b[39m (pid=7)\n"
        '  File "/repo/envs/__init__.py", line 128, in verify\n'
        "    verdict = environment(name).verify(row, response)\n"
        '  File "/repo/envs/vowels.py", line 10, in verify\n'
        "    return row['word']\n"
        "KeyError: 'word'\n"
    )
    place = 'File "/repo/envs/vowels.py", line 10, in verify'
    assert in_one_line(RuntimeError(remote)) == f"{place}: KeyError: 'word'"
    assert in_one_line(TimeoutError("waited 5 s")) == "waited 5 s"
    assert in_one_line(TimeoutError()) == "TimeoutError()"


@pytest.mark.parametrize(
    ("lag", "gap", "others", "alarms"),
    [("0", 0.06, 50, True), ("0", 0.04, 50, False), ("1", 0.5, 50, False)]
    + [("0", 0.06, 500, False), ("0", math.nan, 50, True)],
)
def test_the_alarm_is_of_tokens_of_the_policy_that_is_trained(lag, gap, others, alarms):
    """Ten tokens on one rank and thirty, twice as far apart, on another.

    Where there are few of that policy, they end answers of an older one, and read its KV.
    """
    log = Log()
    lines, notes = [], []
    log.line = lambda name, content: lines.append(content)
    log.note = notes.append
    near, far = gap / 1.75, gap / 1.75 * 2
    tables = [{("lag", lag): [n, n, n * x, 0.0, x]} for n, x in ((10, near), (30, far))]
    tables[0]["lag", "2"] = [others, 1, 9.0 * others, 0.0, 9.0]
    tables[0]["all", ""] = [others + 40, 1, 9.0 * others, 0.0, 9.0]
    log.mismatch(7, tables)
    (line,) = lines
    assert line["step"] == 7
    told = f"step 7: trainer and engine are {gap:.3f} nats a token apart at lag 0, more than 0.05;"
    assert notes == [f"{told} see docs/debugging.md"] * alarms
