"""Checkpoint folders: whole or not there, and a run folder that goes back to one."""

import asyncio
import builtins
import contextlib
import dataclasses
import errno
import io
import itertools
import json
import os
import random
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ray.exceptions import RayTaskError
from torch.distributed.checkpoint.api import CheckpointException

from core import write_errors
from core.errors import InputError
from core.jsonl import WriteError
from grpo_async import Config, Run
from runtime.checkpoints import folders, resume, save
from runtime.checkpoints.archive import write_groups
from runtime.processes.trainer_rank import Rank
from runtime.rollouts.dispatch import Slot
from runtime.startup import modes
from support.actors import Actor
from support.configs import changed
from support.samples import make_sample, stream
from support.tables import table

CASES = table(Path(__file__).parents[1] / "cases.txt")


def write_checkpoint(run_dir: Path, step: int, state: dict | None = None) -> Path:
    aside = run_dir / f"step_{step:06d}.partial"
    (aside / "policy").mkdir(parents=True)
    (aside / "hf").mkdir()
    (aside / "policy" / "__0_0.distcp").write_bytes(os.urandom(5000))
    (aside / "hf" / "model.safetensors").write_bytes(b"weights")
    (aside / "state.json").write_text(json.dumps(state or {"version": step}))
    folder = run_dir / f"step_{step:06d}"
    files = folders.checksums(str(aside), folders.listing(str(aside)))
    folders.commit(str(aside), str(folder), files)
    return folder


def damaged(folder: Path) -> list[str]:
    """What two ranks find together."""
    return [d for r in range(2) if (d := folders.damage(str(folder), r, 2))]


def test_whole_checkpoints_are_seen_the_newest_by_number_first(tmp_path):
    assert not any(damaged(write_checkpoint(tmp_path, step)) for step in (9, 1_000_001, 999_999))
    assert not list(tmp_path.glob("*.partial"))
    (tmp_path / "step_000011.partial").mkdir()
    (tmp_path / "step_000012").mkdir()  # renamed, not yet marked
    found = [folders.step_of(f) for f in folders.newest_first(str(tmp_path))]
    assert found == [1_000_001, 999_999, 9]


@pytest.mark.parametrize("seed", range(20))
def test_each_file_is_flushed_once_by_a_rank_that_sees_it(seed):
    """Some ranks see the folder of a moment ago."""
    draw = random.Random(seed)
    ranks = draw.randint(1, 5)
    seen = [{f"policy/__{rank}_0.distcp"} for rank in range(ranks)]  # what it wrote itself
    for name in (f"hf/{i}" for i in range(draw.randint(0, 9))):
        for rank in draw.sample(range(ranks), draw.randint(1, ranks)):
            seen[rank].add(name)
    parts = folders.split([sorted(names) for names in seen])
    assert all(set(part) <= names for part, names in zip(parts, seen, strict=True))
    assert sorted(itertools.chain(*parts)) == sorted(set().union(*seen))


def test_files_are_shared_out_evenly():
    names = [str(i) for i in range(12)]
    assert [len(part) for part in folders.split([names] * 4)] == [3, 3, 3, 3]


@pytest.mark.parametrize("name", ["policy/__0_0.distcp", "state.json", "complete.json"])
def test_a_file_that_cannot_be_read_is_damage(tmp_path, monkeypatch, name):
    """So that an older checkpoint is tried."""
    folder = write_checkpoint(tmp_path, 3)
    open_file = io.open

    def refuse(path, *mode, **options):
        if str(path) == str(folder / name):
            raise OSError(5, "Input/output error")
        return open_file(path, *mode, **options)

    for module in (builtins, io):
        monkeypatch.setattr(module, "open", refuse)
    problem = folders.damage(str(folder))
    assert name in problem and "Input/output error" in problem


@pytest.mark.parametrize("name", ["policy/__0_0.distcp", "state.json", "complete.json"])
@pytest.mark.parametrize("kind", ["truncated", "flipped", "absent", "empty"])
def test_damage_is_found_and_names_the_file(tmp_path, name, kind):
    folder = write_checkpoint(tmp_path, 3)
    path = folder / name
    content = path.read_bytes()
    if kind == "absent":
        path.unlink()
    elif kind == "flipped":
        middle = len(content) // 2
        path.write_bytes(content[:middle] + bytes([content[middle] ^ 4]) + content[middle + 1 :])
    else:
        path.write_bytes(content[: len(content) // 2] if kind == "truncated" else b"")
    found = " ".join(damaged(folder))
    assert found and (Path(name).name in found or name == "complete.json")


def test_pruning_keeps_the_newest_and_all_exports(tmp_path):
    for step in range(1, 5):
        write_checkpoint(tmp_path, step)
    folders.prune(str(tmp_path), 2)
    assert [folders.step_of(f) for f in folders.newest_first(str(tmp_path))] == [4, 3]
    assert [p.name for p in (tmp_path / "step_000001").iterdir()] == ["hf"]
    assert (tmp_path / "step_000001" / "hf" / "model.safetensors").read_bytes() == b"weights"


def test_only_so_many_exports_are_kept_as_are_asked_for(tmp_path):
    """The newest up to this step: later ones are of a run that was gone back from."""
    for step in range(1, 7):
        write_checkpoint(tmp_path, step)
    (tmp_path / "step_000006" / "complete.json").unlink()
    folders.prune(str(tmp_path), 1, exports=3)
    left = {path.name: sorted(p.name for p in path.iterdir()) for path in tmp_path.iterdir()}
    assert left.pop("step_000005") == ["complete.json", "hf", "policy", "state.json"]
    assert left == {f"step_00000{step}": ["hf"] for step in (3, 4, 6)}
    assert not folders.damage(str(tmp_path / "step_000003/hf"))


async def test_a_run_keeps_the_exports_of_its_setting(tmp_path):
    for step in (1, 2):
        write_checkpoint(tmp_path, step)
    await Disk(tmp_path, None, keep_last=1, keep_exports=2).save()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_000002", "step_000003"]


def ask(run_dir: Path, **fields) -> Config:
    return changed(Config(run_dir=str(run_dir)), **fields)


def test_the_checkpoint_that_is_asked_for_must_be_one(tmp_path):
    with pytest.raises(InputError, match="complete.json"):
        resume.candidates(ask(tmp_path, resume=str(tmp_path)))
    folder = write_checkpoint(tmp_path, 7)
    assert resume.candidates(ask(tmp_path, resume=str(folder))) == [str(folder)]
    assert resume.candidates(ask(tmp_path, resume="auto")) == [str(folder)]
    assert resume.candidates(ask(tmp_path)) == []


ROWS = [{"_line": i + 1, "question": i} for i in range(10)]
BASE = {"prompts_per_step": 8, "group_size": 16, "max_lag": 1, "data": {"train": "a.jsonl"}}


def resumable(prompt: int = 4) -> dict:
    """The state of a run that had given out so many of ROWS."""
    saved = json.loads(json.dumps(dataclasses.asdict(changed(Config(), **BASE))))
    rows = [len(ROWS), stream(ROWS).checksum(len(ROWS))]
    state = {"config": saved, "folder": "x", "rows": rows}
    return state | {"progress": {"next_prompt": prompt}}


def refuse(state: dict, rows: list = ROWS, **fields) -> None:
    """The check of a run with these settings that is to go on from `state`."""
    cfg = changed(Config(), **BASE | fields)
    resume.refuse_other_stream(state, cfg, stream(rows), Run.MUST_MATCH)


@pytest.mark.parametrize(("fields", "message"), CASES["another schedule"])
def test_another_schedule_is_refused(fields, message):
    with pytest.raises(InputError, match=message):
        refuse(resumable(), **fields)


def test_the_same_schedule_goes_on_with_other_settings():
    refuse(resumable())
    refuse(resumable(), max_lag=2, steps=7, lr=1e-3, run_dir="elsewhere")


@pytest.mark.parametrize(("rows", "position", "says"), [
    (ROWS, 23, ""),
    (ROWS + ROWS[:1], 10, ""),  # behind what was used
    (ROWS + ROWS[:1], 11, "x was saved in a later pass over 10 rows, and now there are 11$"),
    (ROWS[:2] + ROWS[3:], 4, "its first 10 rows are not those"),
    (ROWS[:9], 4, "its first 10 rows are not those"),
    (ROWS[:1] * 2 + ROWS[1:], 4, "its first 10 rows are not those"),
    (ROWS[:4] + ROWS[:1] * 6, 4, "its first 10 rows are not those"),  # none of them was used
    (ROWS[::-1], 4, "its first 10 rows are not those"),
])  # fmt: skip
def test_a_data_file_that_has_changed_is_refused(rows, position, says):
    state = resumable(position)
    if not says:
        refuse(state, rows)
        return
    with pytest.raises(InputError, match=f"data.train = 'a.jsonl': {says}"):
        refuse(state, rows)


FRESH = {"version": 0, "dropped": {}, "progress": {"next_prompt": 0}}
MOVED = {"progress": {"next_prompt": 4, "cursor": 4}}


def looked(run_dir: Path, state: dict, must_match: tuple | None = ("group_size",)) -> dict:
    """What a run finds in a checkpoint with this state, from which it is to resume."""
    write_checkpoint(run_dir, 4, state)
    cfg = changed(Config(run_dir=str(run_dir)), **BASE, resume="auto")
    return resume.look(save.Checkpoints(cfg, None, stream(ROWS)), must_match, FRESH)


@pytest.mark.parametrize(("lost", "more", "message"), [
    (["config"], {}, "lacks config"),
    (["rows", "progress"], {}, "lacks progress, rows"),
    (["dropped"], {}, "lacks dropped"),
    ([], {"progress": {}}, "lacks progress.next_prompt"),
    ([], MOVED, "has progress.cursor, which is unknown here"),
])  # fmt: skip
def test_a_checkpoint_of_another_program_is_refused_by_what_differs(tmp_path, lost, more, message):
    state = resumable() | {"version": 4, "dropped": {}} | more
    state = {name: value for name, value in state.items() if name not in lost}
    with pytest.raises(InputError, match=f"step_000004: its state.json {message}: it was saved"):
        looked(tmp_path, state)


def test_a_checkpoint_is_looked_at_before_anything_is_started(tmp_path):
    state = resumable() | {"version": 4, "dropped": {}}
    folder = {"folder": str(tmp_path / "step_000004")}
    assert looked(tmp_path, state) == state | folder
    (tmp_path / "evaluated").mkdir()
    only = {name: state[name] for name in ("config", "version")}
    found = looked(tmp_path / "evaluated", only, None)
    assert found == only | {"folder": str(tmp_path / "evaluated" / "step_000004")}


def text(*lines: dict) -> str:
    return "".join(json.dumps(line) + "\n" for line in lines)


def test_rewinding_takes_back_what_came_after(tmp_path):
    """Of each file what the checkpoint's time has left, and evaluations that ended, whole."""

    def read(name: str) -> str:
        return (tmp_path / f"{name}.jsonl").read_text()

    def steps(*numbers: int) -> str:
        return text(*({"step": number} for number in numbers))

    def rollouts(*slots: Slot) -> str:
        return text(*(slot.record(2) for slot in slots))

    evaluated = text({"step": 2, "validation_reward": 0.5})
    for name, line in (("metrics", evaluated), ("mismatch", "")):
        content = steps(1, 2) + line + steps(3, 4) + '{"step": 5, "cu'
        (tmp_path / f"{name}.jsonl").write_text(content)
    trained = [Slot(0), Slot(1), Slot(3), Slot(2)]
    first = [Slot(1, 0), *trained]
    order = [*first, Slot(5), Slot(0, 2), Slot(4), Slot(6), Slot(0, 3)]
    (tmp_path / "rollouts.jsonl").write_text(rollouts(*order) + '{"slot": 7, "cut')
    drops = [(Slot(5), 3), (Slot(5), 5), (Slot(6), 7), (Slot(5), 6), (Slot(7), 8)]
    drops += [(Slot(1, 2), 1), (Slot(1, 3), 1)]
    drops = [text(slot.record(2) | {"prompt": prompt}) for slot, prompt in drops]
    (tmp_path / "dropped.jsonl").write_text("".join(drops))
    (tmp_path / "samples").mkdir()
    for step in (2, 3):
        (tmp_path / f"samples/step_{step:06d}.npz").touch()
    progress = {"next_slot": 7, "next_prompt": 8, "in_flight": {"5": 6, "6": 7}}
    state = {"version": 2, "ready": [4], "progress": progress}
    state["config"] = {"prompts_per_step": 2, "max_lag": 1}
    for _ in range(2):  # it may be killed and do it again
        assert resume.rewind(str(tmp_path), state) == 2
        assert read("metrics") == read("mismatch") + evaluated == steps(1, 2) + evaluated
        assert read("rollouts") == rollouts(*first, Slot(0, 2), Slot(4))
        assert read("dropped") == drops[0] + drops[1] + drops[5]
        assert [path.name for path in tmp_path.glob("samples/*")] == ["step_000002.npz"]
    (tmp_path / "metrics.jsonl").write_text(steps(1, 2))  # killed as it evaluated 2
    assert resume.rewind(str(tmp_path), state) == -1
    assert read("rollouts") == rollouts(*trained, Slot(4))
    assert resume.rewind(str(tmp_path), {}) == -1  # from the start again
    assert read("rollouts") == read("dropped") == read("metrics") == ""


@pytest.mark.parametrize(("lines", "told"), [
    ([1, 2], ""), ([1, 2, 3], ""), ([1], "metrics.jsonl ends at step 1, before the checkpoint of"),
    ([], "metrics.jsonl ends at step 0, before"), (None, "metrics.jsonl ends at step 0, before"),
])  # fmt: skip
def test_a_run_says_that_metrics_before_its_checkpoint_are_lost(tmp_path, capsys, lines, told):
    """Not one that continues from another folder, where they are."""
    if lines is not None:
        (tmp_path / "metrics.jsonl").write_text(text(*({"step": step} for step in lines)))
    resume.rewind(str(tmp_path), STATE | {"folder": str(tmp_path / "step_000002")})
    said = capsys.readouterr().out
    assert told in said and bool(said) == bool(told)
    resume.rewind(str(tmp_path), STATE | {"folder": "other/step_000002"})
    assert not capsys.readouterr().out


async def test_a_folder_of_samples_that_is_deleted_is_noticed(tmp_path, capsys):
    saver = save.Checkpoints(ask(tmp_path), None, ROWS)

    async def write(path: str, *_) -> None:
        Path(path).parent.mkdir(exist_ok=True)

    saver.write_groups = write
    await saver.write_samples(1, [])
    await saver.write_samples(2, [])
    (tmp_path / "samples").rmdir()
    await saver.write_samples(3, [])
    await saver.write_samples(4, [])
    told = f"{tmp_path}/samples was deleted: the samples of earlier steps are lost\n"
    assert capsys.readouterr().out == told


async def test_samples_that_are_still_being_written_were_not_deleted(tmp_path, capsys):
    """A busy machine may need several steps for the first file."""
    saver = save.Checkpoints(ask(tmp_path), None, ROWS)
    may_write = asyncio.Event()

    async def write(path: str, *_) -> None:
        await may_write.wait()
        Path(path).parent.mkdir(exist_ok=True)

    saver.write_groups = write
    async with asyncio.TaskGroup() as tasks:
        for step in (1, 2, 3):
            tasks.create_task(saver.write_samples(step, []))
            await asyncio.sleep(0)
        may_write.set()
    await saver.write_samples(4, [])
    assert capsys.readouterr().out == ""


STATE = {"version": 2, "ready": [], "config": {"prompts_per_step": 1, "max_lag": 1}}
STATE |= {"progress": {"next_slot": 2, "next_prompt": 2, "in_flight": {}}}


def history(dice: random.Random, steps: int, lag: int) -> list[Slot]:
    """The slots of a run with two prompts a step, in the order in which their groups finished."""
    order, running = [], set()
    for version in range(steps):
        allowed = set(range(2 * min(version + lag + 1, steps)))
        running |= allowed - running - {slot.number for slot in order}
        order += [Slot(row, version) for row in range(3)] if version % 5 == 0 else []
        while running & {2 * version, 2 * version + 1}:
            slot = dice.choice(sorted(running))
            running.remove(slot)
            order.append(Slot(slot))
    return order


@pytest.mark.parametrize("seed", range(20))
def test_a_long_file_is_cut_where_its_end_begins(tmp_path, monkeypatch, seed):
    """As if each line had been read, and however the groups of a run finished."""
    monkeypatch.setattr(resume, "BLOCK", 2000)
    dice = random.Random(seed)
    lag, version = dice.randrange(4), dice.randrange(100, 150)
    order = history(dice, 200, lag)
    lines = {slot: text(slot.record(2) | {"text": "x" * dice.randrange(99)}) for slot in order}
    path = tmp_path / "rollouts.jsonl"
    path.write_text("".join(lines[slot] for slot in order))
    evaluated = version // 5 * 5
    evaluated -= 5 * (evaluated == version and dice.random() < 0.5)  # it was killed as it did that
    ended = {"step": evaluated, "validation_reward": 1.0}
    (tmp_path / "metrics.jsonl").write_text(text(ended))
    ready = [slot for slot in (2 * version, 2 * version + 1) if dice.random() < 0.5]
    state = STATE | {"version": version, "ready": ready}
    state["config"] = {"prompts_per_step": 2, "max_lag": lag}
    before = path.read_bytes()
    resume.rewind(str(tmp_path), state)
    expected = [
        slot
        for slot in order
        if (slot.evaluation or 0) <= evaluated
        and (slot.evaluation is not None or slot.number < 2 * version or slot.number in ready)
    ]
    assert path.read_text() == "".join(lines[slot] for slot in expected)
    start = resume.settled(path, version - lag)
    assert start > 0.4 * len(before) and before.startswith(path.read_bytes()[:start])


def test_a_run_that_is_killed_while_it_cuts_a_file_loses_no_line(tmp_path, monkeypatch):
    path = tmp_path / "rollouts.jsonl"
    lines = [text(Slot(slot).record(1)) for slot in (0, 1, 3, 2)]
    path.write_text("".join(lines))
    monkeypatch.setattr(save.shutil, "copyfileobj", lambda *_: 1 / 0)
    state = STATE | {"ready": [2]}
    with pytest.raises(ZeroDivisionError):
        resume.rewind(str(tmp_path), state)
    assert path.read_text() == ""
    monkeypatch.undo()
    resume.rewind(str(tmp_path), state)
    assert path.read_text() == lines[0] + lines[1] + lines[3]
    assert [path.name for path in tmp_path.iterdir()] == ["rollouts.jsonl"]


def test_a_full_disk_is_reported_and_leaves_the_last_checkpoint(small_disk):
    folder = write_checkpoint(small_disk, 1)
    sample = make_sample(np.random.default_rng(0), 20_000)
    with pytest.raises(OSError, match="No space left"):
        write_groups(str(small_disk / "groups.npz"), [(0, 0, 1)], [], [sample] * 4)
    assert not (small_disk / "groups.npz").exists() and not damaged(folder)


@pytest.mark.parametrize("resume", ["", "auto"])
def test_what_a_run_left_that_died_in_its_first_step_is_removed(tmp_path, resume):
    """A run that starts anew must not append to it."""
    (tmp_path / "rollouts.jsonl").write_text('{"step": 1, "slot": 0, "evaluation": null}\n')
    (tmp_path / "step_000001.partial").mkdir()
    (tmp_path / "metrics.jsonl").write_text("")
    cfg = changed(Config(run_dir=str(tmp_path)), command={"resume": resume})
    cluster = SimpleNamespace(trainers=[])
    assert asyncio.run(save.Checkpoints(cfg, cluster, ROWS).load(())) == {}
    assert not (tmp_path / "step_000001.partial").exists()
    assert (tmp_path / "rollouts.jsonl").read_text() == ""


class Disk:
    """A trainer rank whose attempts to write a checkpoint end as it is told; it notes them."""

    def __init__(self, run_dir: Path, *ends: Exception | None, **fields):
        self.run_dir = run_dir
        self.ends = list(ends)
        self.trainer = Actor(saved=self.write, call=lambda function, *words: function(*words))
        self.saver = save.Checkpoints(
            ask(run_dir, **fields), SimpleNamespace(trainers=[self.trainer]), stream(ROWS)
        )

    def write(self) -> Exception | None:
        folder = self.run_dir / "step_000003.partial"
        assert not folder.exists(), "nothing of the attempt before is there"
        (folder / "hf").mkdir(parents=True)
        return self.ends.pop(0)

    async def save(self) -> None:
        state = {"version": 3, "progress": {"next_prompt": 1}}
        async with asyncio.TaskGroup() as tasks:
            await self.saver.save(state, None, tasks)


@pytest.fixture
def waits(monkeypatch) -> list[float]:
    """The seconds for which a checkpoint waits until it is tried again; none of them pass."""
    waited: list[float] = []
    real = asyncio.sleep

    async def sleep(seconds: float) -> None:
        waited.append(seconds)
        await real(0)

    monkeypatch.setattr(save.asyncio, "sleep", sleep)
    return waited


IO = OSError(errno.EIO, "Input/output error", "a/__0_0.distcp")


async def test_a_checkpoint_is_tried_once_more_after_an_error_of_the_disk(tmp_path, waits, capsys):
    await Disk(tmp_path, IO, None).save()
    assert whole(tmp_path) == ["step_000003"] and waits == [60.0]
    told = f"{tmp_path}/step_000003 was not saved: a/__0_0.distcp: Input/output error; it is tried"
    assert capsys.readouterr().out == f"{told} again in 60 s\n"


@pytest.mark.parametrize(("number", "more"), [
    (errno.EIO, ""), (errno.ENOSPC, r"; \d+ MiB are free there"),
    (errno.EDQUOT, r"; \d+ MiB are free there"),
])  # fmt: skip
async def test_a_disk_that_fails_twice_ends_the_run_in_one_sentence(number, more, tmp_path, waits):
    error = OSError(number, os.strerror(number), "a/__0_0.distcp")
    with pytest.raises(ExceptionGroup) as raised:
        await Disk(tmp_path, error, error).save()
    (error,) = raised.value.exceptions
    assert isinstance(error, WriteError) and waits == [60.0]
    told = f"{tmp_path}/step_000003 was not saved: a/__0_0.distcp: {os.strerror(number)}"
    assert re.fullmatch(told + more, str(error))


async def test_another_error_of_a_checkpoint_ends_the_run_at_once(tmp_path, waits):
    with pytest.raises(ExceptionGroup) as raised:
        await Disk(tmp_path, TimeoutError("waited 60 s")).save()
    (error,) = raised.value.exceptions
    assert error.__notes__ == [f"{tmp_path}/step_000003 was not saved"] and not waits


def test_the_file_that_a_rank_cannot_write_is_named(small_disk, tmp_path):
    """Torch says of a full disk "unexpected pos 704 vs 598", safetensors nothing of the file."""
    rank = Rank(ask(small_disk))
    rank.saves_to = f"{small_disk}/step_000003.partial"

    def write() -> None:
        file = Path(rank.saves_to, "policy", "__0_0.distcp")
        file.parent.mkdir(parents=True, exist_ok=True)
        torch.save(torch.zeros(1_000_000), file)

    rank.writes = [write]
    with pytest.raises(OSError, match="No space left on device: .*__0_0.distcp") as raised:
        rank.saved()
    assert raised.value.errno == errno.ENOSPC and len(rank.writes) == 1, "it can be tried again"
    rank.saves_to = str(tmp_path)
    rank.saved()
    assert not rank.writes


def test_the_systems_error_is_found_behind_those_of_libraries():
    """Torch's of all ranks, Ray's of another process, safetensors' own."""
    torchs = CheckpointException("of ranks", {1: (RuntimeError("?"), None), 2: (IO, None)})
    rays = RayTaskError("saved", "a traceback", torchs)
    for error in (IO, torchs, rays, RayTaskError("saved", "a traceback", IO).as_instanceof_cause()):
        found = write_errors.system_error(error)
        assert (found.errno, found.filename) == (errno.EIO, "a/__0_0.distcp")
    for text in ('IoError(Os { code: 28, kind: StorageFull, message: "full" })', "x (os error 28)"):
        assert write_errors.system_error(RuntimeError(text)).errno == errno.ENOSPC
    others = (RuntimeError("exit code: 28"), TimeoutError("waited"), ConnectionResetError(104, "x"))
    assert not any(map(write_errors.system_error, others))


def test_going_back_gives_up_the_checkpoints_after(tmp_path):
    for step in (1, 2, 3):
        write_checkpoint(tmp_path, step)
    resume.rewind(str(tmp_path), STATE)
    assert [folders.step_of(f) for f in folders.newest_first(str(tmp_path))] == [2, 1]
    write_checkpoint(tmp_path, 4)
    folders.prune(str(tmp_path), 2)
    left = {path.parent.name for path in tmp_path.glob("step_*/policy")}
    assert left == {"step_000002", "step_000004"}, "the third must not fill the disk for ever"


def test_a_damaged_export_does_not_spoil_its_checkpoint(tmp_path):
    """Which is kept, because nothing else holds this policy, until the export is made again."""
    folder = write_checkpoint(tmp_path, 1)
    write_checkpoint(tmp_path, 2)
    model = folder / "hf" / "model.safetensors"
    model.write_bytes(b"weighs!")
    assert not damaged(folder) and "CRC-32" in folders.damage(f"{folder}/hf")
    assert folders.prune(str(tmp_path), 1) == [folders.damage(f"{folder}/hf")]
    assert not damaged(folder)
    (folder / "hf" / "complete.json").unlink()
    model.write_bytes(b"weights")
    modes.seal(f"{folder}/hf")
    assert folders.prune(str(tmp_path), 1) == [] and not (folder / "policy").exists()
    assert not folders.damage(f"{folder}/hf"), "what stays can still be checked"


def test_an_export_is_flushed_before_it_is_marked(tmp_path, monkeypatch):
    flushed = []
    monkeypatch.setattr(folders, "flush", lambda path: flushed.append(Path(path).name))
    write_checkpoint(tmp_path, 1)
    model, marker, rest = map(flushed.index, ("model.safetensors", "complete.json.partial", "hf"))
    assert model < marker and rest < marker


@pytest.fixture
def disk(monkeypatch) -> list[tuple[str, str]]:
    """What reaches the disk, in order: names that are flushed, or given by a rename, or removed."""
    done: list[tuple[str, str]] = []
    rename = os.rename
    unlink = os.unlink

    def fsync(handle: int) -> None:
        done.append(("flushed", Path(os.readlink(f"/proc/self/fd/{handle}")).name))

    def renamed(old: str | Path, new: str | Path) -> None:
        done.append(("renamed", Path(new).name))
        rename(old, new)

    def removed(path: str | Path) -> None:
        done.append(("removed", Path(path).name))
        unlink(path)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", renamed)
    monkeypatch.setattr(os, "unlink", removed)
    return done


def test_a_checkpoint_is_on_the_disk_before_it_is_marked(tmp_path, disk):
    """Power may be cut between any two of these: a marker vouches for all that it names."""
    write_checkpoint(tmp_path, 1)
    flushes = list(itertools.takewhile(lambda event: event[1] != "complete.json.partial", disk))
    names = {"__0_0.distcp", "policy", "model.safetensors", "hf", "state.json"}
    assert set(flushes) == {("flushed", name) for name in names | {"step_000001.partial"}}
    assert disk[len(flushes) :] == [
        ("flushed", "complete.json.partial"),  # the export's
        ("renamed", "complete.json"),
        ("flushed", "hf"),
        ("renamed", "step_000001"),
        ("flushed", "complete.json.partial"),
        ("renamed", "complete.json"),
        ("flushed", "step_000001"),
        ("flushed", tmp_path.name),
    ]


def whole(run_dir: Path) -> list[str]:
    """The checkpoints of a run that are not damaged, the best first."""
    return [folder.name for folder in folders.newest_first(str(run_dir)) if not damaged(folder)]


class Killed(BaseException):
    """Stands in for a SIGKILL."""


def killed_at(moment: int, run_dir: Path, monkeypatch) -> int:
    """Replaces step 3's checkpoint, up to this change of names on the disk; returns their count.

    Before each of them a checkpoint of step 3 must be whole.
    """
    write_checkpoint(run_dir, 3, {"version": 3, "ready": []})
    done = 0

    def may_die(change):
        def changes(*words, **options):
            nonlocal done
            assert whole(run_dir)
            if done == moment:
                raise Killed
            done += 1
            return change(*words, **options)

        return changes

    with monkeypatch.context() as patched, contextlib.suppress(Killed):
        for name in ("rename", "unlink", "rmdir"):
            patched.setattr(os, name, may_die(getattr(os, name)))
        write_checkpoint(run_dir, 3, {"version": 3, "ready": [9]})
    return done


def test_a_checkpoint_is_whole_at_every_moment_of_its_replacement(tmp_path, monkeypatch):
    """By another of the same step. The next start finds it, and gives it its name back."""
    found = []
    for moment in itertools.count():
        run_dir = tmp_path / str(moment)
        done = killed_at(moment, run_dir, monkeypatch)
        folder = str(run_dir / "step_000003")
        assert resume.first_whole(ask(run_dir, resume="auto")).removesuffix(".replaced") == folder
        folders.put_back(str(run_dir))
        assert whole(run_dir) == ["step_000003"]
        found.append(json.loads(Path(folder, "state.json").read_text())["ready"])
        if done < moment:
            break
    assert found == sorted(found) and found[0] == [] and found[-1] == [9], "the old, then the new"
    assert not list(run_dir.glob("*.replaced"))


def test_lines_that_stay_are_on_the_disk_before_their_file_is_cut(tmp_path, disk):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n')
    resume.keep(path, lambda line: line["step"] < 2)
    assert path.read_text() == '{"step": 1}\n'
    assert disk == [
        ("flushed", "metrics.partial"),
        ("renamed", "metrics.0.kept"),
        ("flushed", "metrics.jsonl"),
        ("removed", "metrics.0.kept"),
    ]


@pytest.mark.parametrize("marker", ["{}", "[]", "5", '{"a": 1}', '{"a": [1]}'])
def test_a_marker_that_is_none_is_damage(tmp_path, marker):
    (tmp_path / "complete.json").write_text(marker)
    assert "complete.json" in folders.damage(str(tmp_path))


def test_ranks_share_the_files_of_an_exported_model(tmp_path, monkeypatch):
    """One of two finds the flipped bit; a model without a marker has none to compare with."""
    for name in ("a.safetensors", "b.safetensors"):
        (tmp_path / name).write_bytes(bytes(100))
    modes.seal(str(tmp_path))
    (tmp_path / "b.safetensors").write_bytes(bytes(99) + b"\1")
    found = [folders.flaw(str(tmp_path), rank, 2) for rank in range(2)]
    assert found[0] == "" and re.search(r"b\.safetensors: its CRC-32 is not the one", found[1])
    assert folders.flaw(str(tmp_path), largest=50) == ""  # what is left to the trainers
    rank = Rank(ask(tmp_path, model=str(tmp_path), ranks=2))
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    with pytest.raises(RuntimeError, match=r"^model = .*b\.safetensors: its CRC-32 is not"):
        rank.open_policy(1.0)
    (tmp_path / "complete.json").unlink()
    assert folders.flaw(str(tmp_path)) == ""
