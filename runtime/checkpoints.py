"""Checkpoint folders that are whole or not there, and a run folder that goes back to one.

A checkpoint is written aside, flushed to the disk, renamed, and marked last. The marker holds size
and CRC-32 of every file, so a truncated, half-written or bit-flipped one is recognised and the one
before it is used.

    step_000100/policy/         shards of weights and AdamW moments (torch.distributed.checkpoint)
    step_000100/groups.npz      finished groups that no step has taken yet
    step_000100/state.json      the driver's state
    step_000100/hf/             the same policy for transformers and vLLM, with a marker of its own
    step_000100/complete.json   the marker
"""

import asyncio
import contextlib
import dataclasses
import itertools
import json
import math
import os
import re
import shutil
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import report
from core.waits import within
from envs.rollout.rows import fingerprint
from runtime import archive, lineage
from settings.reader import InputError
from settings.run import TrainingSettings

if TYPE_CHECKING:
    from runtime.cluster import Cluster

MARKER = "complete.json"
EXPORT = "hf/"
BLOCK = 1 << 24
EVALUATED = {"validation_reward", "validation_accuracy"}  # one of them ends an evaluation


def crc32(path: Path) -> int:
    """CRC-32 of a file, in O(1) memory."""
    value = 0
    with open(path, "rb") as file:
        while block := file.read(BLOCK):
            value = zlib.crc32(block, value)
    return value


def checksums(folder: str, part: int = 0, parts: int = 1) -> dict[str, tuple[int, int]]:
    """Flushes every `parts`-th file below a folder; its size and CRC-32 by relative name."""
    files = sorted(path for path in Path(folder).rglob("*") if path.is_file())
    found = {}
    for path in files[part::parts]:
        flush(path)
        flush(path.parent)
        found[str(path.relative_to(folder))] = (path.stat().st_size, crc32(path))
    return found


def flush(path: Path) -> None:
    """fsync of a file or a folder."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def commit(aside: str, folder: str, files: dict[str, tuple[int, int]]) -> None:
    """Makes a written folder appear under its name: rename first, marker last, both flushed.

    The export has a marker of its own: it stays when the rest is deleted.
    """
    export = {name.removeprefix(EXPORT): files[name] for name in files if name.startswith(EXPORT)}
    mark(f"{aside}/{EXPORT}", export)
    shutil.rmtree(folder, ignore_errors=True)
    os.rename(aside, folder)
    mark(folder, {name: sums for name, sums in files.items() if not name.startswith(EXPORT)})
    flush(Path(folder).parent)


def mark(folder: str, files: dict[str, tuple[int, int]]) -> None:
    """Says that a folder's files are flushed and whole."""
    marker = Path(folder) / f"{MARKER}.partial"
    marker.write_text(json.dumps(files, indent=1))
    flush(marker)
    marker.rename(marker.with_name(MARKER))
    flush(Path(folder))


def seal(export: str) -> None:
    """Flushes and marks an export that was written into a checkpoint again."""
    mark(export, checksums(export))


def damage(folder: str, part: int = 0, parts: int = 1, largest: float = math.inf) -> str:
    """What is wrong with every `parts`-th file of a checkpoint; empty if nothing is.

    Files of more than `largest` bytes are judged by their size alone.
    """
    try:
        expected = json.loads((Path(folder) / MARKER).read_text())
        files = sorted((name, tuple(sizes)) for name, sizes in expected.items())
        if {len(sizes) for _, sizes in files} != {2}:
            raise ValueError("expected the size and CRC-32 of each file")
    except (OSError, TypeError, ValueError, AttributeError) as error:
        return f"{folder}/{MARKER}: {error}"
    for name, (size, crc) in files[part::parts]:
        path = Path(folder) / name
        actual = path.stat().st_size if path.is_file() else None
        if actual != size:
            return f"{path}: {actual} bytes, expected {size}"
        if size <= largest and crc32(path) != crc:
            return f"{path}: its CRC-32 is not the one in {MARKER}"
    return ""


def step_of(folder: Path) -> int:
    """The step of a folder named step_000100; -1 for another name."""
    match = re.fullmatch(r"step_(\d+)", folder.name)
    return int(match[1]) if match else -1


def newest_first(run_dir: str) -> list[Path]:
    """The checkpoint folders of a run that once were complete."""
    folders = [path.parent for path in Path(run_dir).glob(f"step_*/{MARKER}")]
    return sorted(folders, key=step_of, reverse=True)


def prune(run_dir: str, keep: int) -> list[str]:
    """Deletes what resuming needs from all but the newest `keep` checkpoints; hf/ stays.

    Also what is left of those that were given up, or were half deleted when their run died. One
    whose export is damaged is kept, as the only copy of its policy; returns what is wrong there.
    """
    kept = newest_first(run_dir)[:keep]
    problems = []
    for folder in Path(run_dir).glob("step_*"):
        if step_of(folder) < 0 or folder in kept:
            continue
        export = folder / EXPORT
        marked = (folder / MARKER).exists() and (export / MARKER).exists()
        if marked and (problem := damage(str(export))):
            problems.append(problem)
            continue
        (folder / MARKER).unlink(missing_ok=True)  # first: half of it must not look complete
        for path in folder.iterdir():
            if path.name == "hf":
                continue
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        if not any(folder.iterdir()):
            folder.rmdir()
    return problems


class Checkpoints:
    """Saves, finds and loads a run's checkpoints; trainers and workers of the cluster do the work.

    A checkpoint's state is a dictionary of JSON values. The run chooses what is in it, and finds it
    again with `folder` and `evaluated` added. `rows` is the stream of prompts. Where there are
    rollouts, `Group` makes a group of slot, version, line, infos, and the reference to its samples.
    """

    def __init__(
        self, cfg: TrainingSettings, cluster: "Cluster", rows: Sequence[dict], Group: Any = None
    ):
        self.cfg = cfg
        self.cluster = cluster
        self.rows = rows
        self.Group = Group
        self.saving: asyncio.Task | None = None  # the checkpoint that is being written

    def exist(self) -> bool:
        """Whether the run folder holds a checkpoint."""
        return bool(newest_first(self.cfg.run_dir))

    async def save(self, state: dict, groups: list, tasks: asyncio.TaskGroup) -> None:
        """Copies this moment, while the caller waits, and writes it as one of `tasks`.

        Raises what the previous checkpoint's writing raised.
        """
        await self.written()
        folder = f"{self.cfg.run_dir}/step_{state['version']:06d}"
        state = state | {"config": dataclasses.asdict(self.cfg)}
        state["prompt"] = fingerprint(self.rows, state["progress"]["next_prompt"])
        state["ready"] = [group.slot for group in groups]
        copies = (t.save.remote(f"{folder}.partial") for t in self.cluster.trainers)
        limit = self.cfg.timeouts.train
        await within(limit, "the trainers to copy their state", asyncio.gather(*copies))
        self.saving = tasks.create_task(self.write_or_tell(folder, state, groups))

    async def written(self) -> None:
        """Returns when no checkpoint is being written. Raises what the writing of one raised."""
        if self.saving:
            await self.saving

    async def write_or_tell(self, folder: str, state: dict, groups: list) -> None:
        """Makes a checkpoint; torch's error for a full disk names neither file nor reason."""
        try:
            await self.write(folder, state, groups)
        except Exception as error:
            free = shutil.disk_usage(self.cfg.run_dir).free >> 20
            error.add_note(f"{folder} was not saved; {free} MiB are free there")
            raise

    async def write(self, folder: str, state: dict, groups: list) -> None:
        """Makes a checkpoint of what was copied."""
        aside = f"{folder}.partial"
        limit = self.cfg.timeouts.train
        trainers = self.cluster.trainers
        parts = (t.saved.options(concurrency_group="io").remote() for t in trainers)
        await within(limit, f"{aside} to be written", asyncio.gather(*parts))
        if self.Group:
            await self.write_groups(f"{aside}/groups.npz", groups)
        Path(aside, "state.json").write_text(json.dumps(state, indent=1))
        lineage.mark(self.cfg, aside, state["version"])
        # Not in the driver: a thread that hangs in a file system would not let it end.
        calls = [t.call.options(concurrency_group="io").remote for t in trainers]
        parts = (call(checksums, aside, part, len(calls)) for part, call in enumerate(calls))
        files = await within(limit, f"{aside} to be flushed", asyncio.gather(*parts))
        merged = dict(itertools.chain(*(part.items() for part in files)))
        await within(limit, f"{folder} to be committed", calls[0](commit, aside, folder, merged))
        deleted = calls[0](prune, self.cfg.run_dir, self.cfg.keep_last)
        for problem in await within(limit, "old checkpoints to be deleted", deleted):
            print(f"kept the checkpoint around a damaged export: {problem}")

    async def write_groups(self, path: str, groups: list, scores: Sequence[tuple] = ()) -> None:
        """Writes groups; `scores` are (places, logprobs) of what trainers computed."""
        heads = [(group.slot, group.version, group.line) for group in groups]
        places = [at for at, _ in scores]
        refs = *(logps for _, logps in scores), *(group.samples for group in groups)
        writing = self.cluster.task(archive.write_groups, path, heads, places, *refs)
        await within(self.cfg.timeouts.train, f"{path} to be written", writing)

    async def write_samples(self, step: int, groups: list, scores: Sequence[tuple] = ()) -> None:
        """Writes a step's groups below samples/, for report and --replay."""
        await self.write_groups(f"{self.cfg.run_dir}/samples/step_{step:06d}.npz", groups, scores)

    async def read_groups(self, path: str, count: int) -> list:
        """Reads what `write_groups` wrote: `count` groups, their samples by reference."""
        heads, *samples = self.cluster.task(archive.read_groups, path, returns=1 + count)
        heads = await within(self.cfg.timeouts.start, f"{path} to be read", heads)
        return [self.Group(*head, ref) for head, ref in zip(heads, samples, strict=True)]

    async def read_ready(self, state: dict) -> list:
        """The finished groups of the checkpoint that `state` is from."""
        count = len(state["ready"])
        path = f"{state['folder']}/groups.npz"
        return await self.read_groups(path, count) if count else []

    async def load(self, must_match: Sequence[str] | None = None) -> dict:
        """Puts trainers and run folder where the checkpoint that is asked for left them.

        Returns its state, {} for none. With `must_match` None it is not gone on from: the run
        folder stays as it is, and any stream of prompts will do. Raises InputError where there are
        checkpoints and all are damaged, where one is of another stream of prompts or differs in a
        setting that `must_match` names, and where one is to be evaluated and there is none.
        """
        state = await self.newest(must_match)
        if must_match is not None:
            state = state | {"evaluated": rewind(self.cfg.run_dir, state)}
        return state if state.get("folder") else {}

    def look(self, must_match: Sequence[str] | None) -> dict:
        """The state of the checkpoint that `load` would take, {} for none; nothing is started.

        Raises InputError as `load` does, but for damage inside of large files.
        """
        folder = first_whole(self.cfg)
        return self.state_of(folder, must_match) if folder else {}

    def state_of(self, folder: str, must_match: Sequence[str] | None) -> dict:
        """The state of a whole checkpoint. Raises InputError where it cannot be gone on from."""
        state = json.loads(Path(folder, "state.json").read_text()) | {"folder": folder}
        if missing := {"config", "progress", "prompt", "version"} - state.keys():
            expected = f"expected {', '.join(sorted(missing))} in its state.json"
            raise InputError(f"{folder} was saved by another version of this program: {expected}")
        if must_match is not None:
            refuse_other_stream(state, self.cfg, self.rows, must_match)
        return state

    async def newest(self, must_match: Sequence[str] | None) -> dict:
        """Loads the newest checkpoint that is whole into the trainers; its state, {} for none."""
        limit = self.cfg.timeouts.start
        ranks = list(enumerate(self.cluster.trainers))
        notes = []
        for folder in candidates(self.cfg):
            checks = (t.call.remote(damage, folder, part, len(ranks)) for part, t in ranks)
            found = await within(limit, f"{folder} to be read", asyncio.gather(*checks))
            problems = [text for text in found if text]
            if problems:
                notes.append(problems[0])
                print(f"not resumed from {folder}: {problems[0]}")
                continue
            state = self.state_of(folder, must_match)
            loads = asyncio.gather(*(t.load.remote(folder) for _, t in ranks))
            await within(limit, f"{folder} to be loaded", loads)
            print(f"resumed from {folder}")
            return state
        refuse_none(self.cfg, notes)
        if self.cfg.command.resume:
            print(f"run_dir = {self.cfg.run_dir!r} holds no checkpoint: this is {self.cfg.model}")
        return {}


def candidates(cfg: TrainingSettings) -> list[str]:
    """The checkpoints to try, best first; none where the run is to start anew."""
    resume = cfg.command.resume
    if resume == "auto":
        return [str(folder) for folder in newest_first(cfg.run_dir)]
    if resume and not os.path.isfile(os.path.join(resume, MARKER)):
        raise InputError(f"resume = {resume!r}: expected auto or a folder with {MARKER}")
    return [resume] if resume else []


def first_whole(cfg: TrainingSettings) -> str:
    """The best candidate by its marker, by sizes and by the CRC-32 of small files; "" for none.

    Raises InputError where there are candidates and none is whole, or one is needed.
    """
    notes = []
    for folder in candidates(cfg):
        problem = damage(folder, largest=BLOCK)
        if not problem:
            return folder
        notes.append(problem)
    refuse_none(cfg, notes)
    return ""


def refuse_none(cfg: TrainingSettings, notes: list[str]) -> None:
    """Raises InputError where no checkpoint is whole, or none is there to be evaluated."""
    if notes:
        raise InputError("no checkpoint is whole: " + "; ".join(notes))
    if cfg.command.resume and cfg.command.eval_only:
        raise InputError(f"run_dir = {cfg.run_dir!r} holds no checkpoint, expected one")


def refuse_other_stream(
    state: dict, cfg: TrainingSettings, rows: Sequence[dict], must_match: Sequence[str]
) -> None:
    """Raises InputError where a run counts or reads prompts unlike the one that was saved."""
    saved = state["config"]
    now = dataclasses.asdict(cfg)
    folder = state["folder"]
    replay = cfg.command.replayed
    if replay and leaf_of(saved, "command.replay", replay) != replay:
        raise InputError(f"{folder} is of no replay of {replay}")
    if saved.get("max_lag", 0) > now.get("max_lag", 0):  # what is ready may be as old as that
        raise InputError(f"{folder} was saved with max_lag = {saved['max_lag']}: not less")
    for name in must_match:
        after = leaf_of(now, name, None)
        before = leaf_of(saved, name, after)  # what did not exist then cannot differ
        if before != after:
            raise InputError(f"{folder} was saved with {name} = {before!r}, not {after!r}")
    prompt = state["progress"]["next_prompt"]
    if state["prompt"] != fingerprint(rows, prompt):
        message = f"prompt {prompt} is another one than {folder} was saved with"
        why = "were rows added or removed, or are others quarantined now?"
        raise InputError(f"data.train = {cfg.data.train!r}: {message}: {why}")


def leaf_of(config: dict, name: str, default: Any) -> Any:
    """The value of `group.leaf` in nested dictionaries; `default` where there is none."""
    value: Any = config
    for part in name.split("."):
        if not isinstance(value, dict) or part not in value:
            return default
        value = value[part]
    return value


def rewind(run_dir: str, state: dict) -> int:
    """Takes back what a run folder's files hold of the time after a checkpoint.

    Returns the last version up to the checkpoint's whose evaluation ended, -1 for none: also one
    that ended after the checkpoint was taken stays.
    """
    version = state.get("version", -1)
    evaluated = -1

    def is_past(line: dict) -> bool:
        nonlocal evaluated
        if line["step"] <= version and EVALUATED & line.keys():
            evaluated = line["step"]
        return line["step"] <= version

    for kept in Path(run_dir).glob("*.kept"):  # it was killed here
        finish(kept)
    for folder in newest_first(run_dir):
        if step_of(folder) > version:
            (folder / MARKER).unlink()  # of a future that is given up
    for aside in Path(run_dir).glob("step_*.partial"):
        shutil.rmtree(aside)
    for path in Path(run_dir).glob("samples/step_*.npz"):
        if state and step_of(path.with_suffix("")) > version:
            path.unlink()
    for name in ("metrics", "mismatch"):
        for path in Path(run_dir).glob(f"{name}.jsonl"):
            keep(path, is_past)
    rewind_rollouts(run_dir, state, evaluated)
    return evaluated


def rewind_rollouts(run_dir: str, state: dict, evaluated: int) -> None:
    """Takes back rollouts and dropped prompts of the time after a checkpoint.

    `evaluated` is the last version whose evaluation stays.
    """
    config = state.get("config", {})
    trained = state.get("version", 0) * config.get("prompts_per_step", 0)
    progress = {"next_prompt": 0, "in_flight": {}} | state.get("progress", {})
    in_flight = progress["in_flight"].values()

    def is_trained(line: dict) -> bool:
        if line["evaluation"] is not None:
            return line["evaluation"] <= evaluated
        return line["slot"] < trained or line["slot"] in state.get("ready", ())

    def was_dropped(line: dict) -> bool:
        if line["evaluation"] is not None:
            return is_trained(line)
        return line["prompt"] < progress["next_prompt"] and line["prompt"] not in in_flight

    for path in Path(run_dir).glob("dropped.jsonl"):
        keep(path, was_dropped)
    for path in Path(run_dir).glob("rollouts.jsonl"):
        # A line of step s was written before version s, when none of a step above s + max_lag was.
        whole = settled(path, state["version"] - config["max_lag"]) if state else 0
        keep(path, is_trained, report.place, whole)


def settled(path: Path, step: int) -> int:
    """Where a line of a step up to `step` begins in a rollouts file, near the last such line.

    Found by halving, so that a file of any size is read for a moment only; 0 where there is none.
    """
    low, high = 0, path.stat().st_size
    with open(path, "rb") as file:
        while high - low > BLOCK:
            middle = (low + high) // 2
            file.seek(middle)
            file.readline()  # the rest of a line
            at, found = next(steps_of(file, high), (middle, math.inf))
            low, high = (at, high) if found <= step else (low, middle)
    return low


def steps_of(file: BinaryIO, end: int) -> Iterator[tuple[int, int]]:
    """Where each line that is trained begins in a rollouts file, up to byte `end`, and its step."""
    while (at := file.tell()) < end:
        place = report.place(file.readline())
        if place and place["step"]:
            yield at, place["step"]


def keep(path: Path, rule: Callable, parse: Callable = json.loads, start: int = 0) -> None:
    """Leaves those whole lines of a JSONL file behind byte `start` that obey a rule.

    They are written aside before the file is cut: who is killed can do it again.
    """
    aside = path.with_suffix(".partial")
    with open(path, "rb") as old, open(aside, "wb") as new:
        old.seek(start)
        for line in old:
            # Cut off in the middle, or of a program that wrote other lines.
            with contextlib.suppress(ValueError, KeyError, TypeError):
                if line.endswith(b"\n") and rule(parse(line)):
                    new.write(line)
    flush(aside)
    finish(aside.rename(path.with_suffix(f".{start}.kept")))


def finish(kept: Path) -> None:
    """Puts the lines that were kept in the place of all that are behind the byte in their name."""
    path = kept.with_suffix("").with_suffix(".jsonl")
    start = int(kept.suffixes[-2].removeprefix("."))
    with open(path, "r+b") as file, open(kept, "rb") as lines:
        file.truncate(start)
        file.seek(start)
        shutil.copyfileobj(lines, file)
    flush(path)
    kept.unlink()
