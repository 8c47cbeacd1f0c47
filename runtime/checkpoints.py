"""Checkpoint folders that are whole or not there, and run folders that one run at a time may use.

A checkpoint is written aside, flushed to the disk, renamed, and marked last. The marker holds size
and CRC-32 of every file, so a truncated, half-written or bit-flipped one is recognised and the one
before it is used.

    step_000100/policy/         shards of weights and AdamW moments (torch.distributed.checkpoint)
    step_000100/groups.npz      finished groups that no step has taken yet
    step_000100/state.json      the driver's state
    step_000100/hf/             the same policy for transformers and vLLM
    step_000100/complete.json   the marker
"""

import asyncio
import contextlib
import dataclasses
import fcntl
import itertools
import json
import os
import re
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path

from runtime import archive
from runtime.config import InputError
from runtime.waits import within

MARKER = "complete.json"
BLOCK = 1 << 24


def crc32(path: Path) -> int:
    """CRC-32 of a file, in O(1) memory."""
    value = 0
    with open(path, "rb") as file:
        while block := file.read(BLOCK):
            value = zlib.crc32(block, value)
    return value


def sums(folder: str, part: int = 0, parts: int = 1) -> dict[str, tuple[int, int]]:
    """Flushes every `parts`-th file below a folder; its size and CRC-32 by relative name."""
    files = sorted(path for path in Path(folder).rglob("*") if path.is_file())
    files = [path for path in files if path.parent.name != "hf"]  # can be made again
    found = {}
    for path in files[part::parts]:
        flush(path)
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
    """Makes a written folder appear under its name: rename first, marker last, both flushed."""
    shutil.rmtree(folder, ignore_errors=True)
    os.rename(aside, folder)
    marker = Path(folder) / f"{MARKER}.partial"
    marker.write_text(json.dumps(files, indent=1))
    flush(marker)
    marker.rename(marker.with_name(MARKER))
    flush(Path(folder))
    flush(Path(folder).parent)


def damage(folder: str, part: int = 0, parts: int = 1) -> str:
    """What is wrong with every `parts`-th file of a checkpoint; empty if nothing is."""
    try:
        expected = json.loads((Path(folder) / MARKER).read_text())
        files = sorted((name, tuple(told)) for name, told in expected.items())
        if {len(told) for _, told in files} != {2}:
            raise ValueError("expected the size and CRC-32 of each file")
    except (OSError, TypeError, ValueError, AttributeError) as error:
        return f"{folder}/{MARKER}: {error}"
    for name, (size, crc) in files[part::parts]:
        path = Path(folder) / name
        actual = path.stat().st_size if path.is_file() else None
        if actual != size:
            return f"{path}: {actual} bytes, expected {size}"
        if crc32(path) != crc:
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


def prune(run_dir: str, keep: int) -> None:
    """Deletes what resuming needs from all but the newest `keep` checkpoints; hf/ stays.

    Also what is left of those that were given up, or were half deleted when their run died.
    """
    kept = newest_first(run_dir)[:keep]
    for folder in Path(run_dir).glob("step_*"):
        if step_of(folder) < 0 or folder in kept:
            continue
        (folder / MARKER).unlink(missing_ok=True)  # first: half of it must not look complete
        for path in folder.iterdir():
            if path.name == "hf":
                continue
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        if not any(folder.iterdir()):
            folder.rmdir()


def claim(cfg):
    """Takes the run folder for this process; keep what it returns as long as the run lives.

    Raises InputError where another run is alive in it, or was and is not to be continued.
    """
    run_dir, folder = cfg.run_dir, Path(cfg.run_dir)
    if cfg.replay == run_dir:
        raise InputError(f"replay = run_dir = {run_dir!r}: expected another run_dir")
    folder.mkdir(parents=True, exist_ok=True)
    lock = open(folder / "lock", "a+")  # noqa: SIM115
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.seek(0)
        owner = lock.read().strip()
        raise InputError(f"run_dir = {run_dir!r} is in use by {owner}") from None
    except OSError as error:
        raise InputError(f"run_dir = {run_dir!r} cannot be locked: {error.strerror}") from None
    metrics = folder / "metrics.jsonl"
    holds = metrics.exists() and metrics.stat().st_size or newest_first(run_dir)
    here = cfg.resume == "auto" or (cfg.resume and Path(cfg.resume).parent == folder)
    goes_on = here or cfg.export or (cfg.resume and cfg.eval_only)
    if not goes_on and holds:
        told = "expected an empty folder, or --resume auto to go on"
        raise InputError(f"run_dir = {run_dir!r} holds a run already: {told}")
    lock.truncate(0)
    lock.write(f"process {os.getpid()} on {os.uname().nodename}")
    lock.flush()
    return lock


class Saver:
    """What a trainer rank does for checkpoints; its `policy` does the work."""

    def save(self, folder: str) -> None:
        """Copies this rank's state to memory and starts writing it; collective."""
        self.writes = [self.policy.save(f"{folder}/policy"), self.policy.export_hf(f"{folder}/hf")]

    def saved(self) -> None:
        """Returns when what `save` began is written; runs beside the training."""
        for write in self.writes:
            write()

    def export(self, folder: str) -> None:
        """Writes the policy as a model that transformers and vLLM load; collective."""
        self.policy.export_hf(folder)()

    def load(self, folder: str) -> None:
        """Goes on from a checkpoint, bitwise; collective."""
        self.policy.load(f"{folder}/policy")

    def call(self, function: Callable, *args):
        """Runs a function here, where the driver would have to wait for it."""
        return function(*args)


async def save(run) -> None:
    """Copies this moment of a Run, while it waits, and writes it while it goes on.

    Raises what the previous checkpoint's writing raised.
    """
    await written(run)
    folder, limit = f"{run.cfg.run_dir}/step_{run.buffer.version:06d}", run.cfg.timeouts.train
    state, ready = state_of(run), list(run.buffer.ready.values())
    async with run.training:  # an engine's repair must not queue behind it and call it a fault
        copies = asyncio.gather(*(t.save.remote(f"{folder}.partial") for t in run.trainers))
        await within(limit, "the trainers to copy their state", copies)
    run.saving = run.tasks.create_task(write(run, folder, state, ready))


async def settle(run) -> None:
    """Saves a run that came from another folder: from now on it goes on from its own."""
    if run.buffer.version and not newest_first(run.cfg.run_dir):
        await save(run)
        await written(run)


async def written(run) -> None:
    """Returns when no checkpoint is being written. Raises what the writing of one raised."""
    if run.saving:
        await run.saving


def state_of(run) -> dict:
    """What a checkpoint holds beside the policy and the finished groups."""
    return {
        "version": run.buffer.version,
        "next_slot": run.next_slot,
        "position": run.position,
        "prompt": fingerprint(run, run.position),
        "in_flight": list(run.in_flight.items()),
        "ready": list(run.buffer.ready),
        "dropped": dict(run.buffer.dropped),
        "config": dataclasses.asdict(run.cfg),
    }


def fingerprint(run, position: int) -> int:
    """CRC-32 of the prompt that was taken last: another one if the stream has shifted since."""
    row = run.rows[(position - 1) % len(run.rows)]
    return zlib.crc32(json.dumps(row | {"_line": 0}).encode())


async def write(run, folder: str, state: dict, ready: list) -> None:
    """Makes a checkpoint of what was copied."""
    aside, limit = f"{folder}.partial", run.cfg.timeouts.train
    parts = (t.saved.options(concurrency_group="io").remote() for t in run.trainers)
    await within(limit, f"{aside} to be written", asyncio.gather(*parts))
    await write_groups(run, f"{aside}/groups.npz", ready)
    Path(aside, "state.json").write_text(json.dumps(state, indent=1))
    # Not in the driver: a thread that hangs in a file system would not let it end.
    calls = [t.call.options(concurrency_group="io").remote for t in run.trainers]
    parts = (call(sums, aside, part, len(calls)) for part, call in enumerate(calls))
    files = await within(limit, f"{aside} to be flushed", asyncio.gather(*parts))
    merged = dict(itertools.chain(*(part.items() for part in files)))
    await within(limit, f"{folder} to be committed", calls[0](commit, aside, folder, merged))
    deleted = calls[0](prune, run.cfg.run_dir, run.cfg.keep_last)
    await within(limit, "old checkpoints to be deleted", deleted)


async def write_groups(run, path: str, groups: list, places=(), scores=()) -> None:
    """A worker writes groups, with the trainers' logprobs at their places where there are any."""
    heads = [(group.slot, group.version, group.line) for group in groups]
    call = next(run.workers).call.options(max_task_retries=3)
    refs = *scores, *(group.samples for group in groups)
    written = call.remote(archive.write_groups, path, heads, list(places), *refs)
    await within(run.cfg.timeouts.train, f"{path} to be written", written)


async def go_on(run) -> dict:
    """Puts trainers and run folder where a checkpoint left them; `restore` does the rest.

    Returns its state, {} for none. Raises InputError where it is of another stream of prompts.
    """
    state = await resume(run, compare)
    run.buffer.version, run.evaluated = state.get("version", 0), rewind(run.cfg.run_dir, state)
    return state


async def resume(run, check=lambda state, run: None) -> dict:
    """Loads the checkpoint that is asked for into the trainers; its state, {} for none.

    Raises InputError where there are checkpoints and all are damaged, what `check` raises of the
    state, and where one is to be evaluated and there is none.
    """
    folders, notes, limit = candidates(run.cfg), [], run.cfg.timeouts.start
    ranks = list(enumerate(run.trainers))
    for folder in folders:
        checks = (t.call.remote(damage, folder, part, len(ranks)) for part, t in ranks)
        found = await within(limit, f"{folder} to be read", asyncio.gather(*checks))
        damages = [text for text in found if text]
        if damages:
            notes += damages[:1]
            print(f"not resumed from {folder}: {damages[0]}")
            continue
        state = json.loads(Path(folder, "state.json").read_text()) | {"folder": folder}
        check(state, run)
        loads = asyncio.gather(*(t.load.remote(folder) for t in run.trainers))
        await within(limit, f"{folder} to be loaded", loads)
        print(f"resumed from {folder}")
        return state
    if folders:
        raise InputError("no checkpoint is whole: " + "; ".join(notes))
    if run.cfg.resume:
        told = f"run_dir = {run.cfg.run_dir!r} holds no checkpoint"
        if run.cfg.eval_only:
            raise InputError(told)
        print(f"{told}: this is {run.cfg.model}")
    return {}


def candidates(cfg) -> list[str]:
    """The checkpoints to try, best first; none where the run is to start anew."""
    if cfg.resume == "auto":
        return [str(folder) for folder in newest_first(cfg.run_dir)]
    if cfg.resume and not (Path(cfg.resume) / MARKER).is_file():
        raise InputError(f"resume = {cfg.resume!r}: expected auto or a folder with {MARKER}")
    return [cfg.resume] if cfg.resume else []


def compare(state: dict, run) -> None:
    """Raises InputError where a Run counts or reads prompts unlike the one that was saved."""
    saved, folder, cfg = state["config"], state["folder"], run.cfg
    if cfg.replay and saved["replay"] != cfg.replay:
        raise InputError(f"{folder} is of no replay of {cfg.replay}")
    if saved["max_lag"] > cfg.max_lag:  # what is ready may be as old as that
        raise InputError(f"{folder} was saved with max_lag = {saved['max_lag']}: not less")
    for name in ("prompts_per_step", "group_size", "train_data", "replay_routing"):
        if saved.get(name, getattr(cfg, name)) != getattr(cfg, name):
            told = f"{folder} was saved with {name} = {saved[name]!r}"
            raise InputError(f"{told}, not {getattr(cfg, name)!r}")
    if state["prompt"] != fingerprint(run, state["position"]):
        told = f"prompt {state['position']} is another one than {folder} was saved with"
        why = "were rows added or removed, or are others quarantined now"
        raise InputError(f"train_data = {cfg.train_data!r}: {told}: {why}?")


async def restore(run, state: dict) -> None:
    """Puts a Run where `state` was taken: its stream, its finished groups and those under way."""
    run.next_slot, run.position = state["next_slot"], state["position"]
    run.in_flight = dict(state["in_flight"])
    path, count, groups = f"{state['folder']}/groups.npz", len(state["ready"]), []
    if count:
        read = next(run.workers).call.options(num_returns=1 + count)
        heads, *refs = read.remote(archive.read_groups, path)
        heads = await within(run.cfg.timeouts.start, f"{path} to be read", heads)
        groups = [run.Group(*head, ref) for head, ref in zip(heads, refs, strict=True)]
    run.buffer.restore(state["version"], groups, state["dropped"])


def rewind(run_dir: str, state: dict) -> int:
    """Takes back what a run folder's files tell of the time after a checkpoint.

    Returns the last version up to the checkpoint's whose evaluation ended, -1 for none: also one
    that ended after the checkpoint was taken stays.
    """
    version, evaluated = state.get("version", -1), -1
    trained = version * state["config"]["prompts_per_step"] if state else 0
    in_flight = dict(state.get("in_flight", ())).values()

    def is_past(line: dict) -> bool:
        nonlocal evaluated
        if line["step"] <= version and "validation_reward" in line:
            evaluated = line["step"]
        return line["step"] <= version

    def is_trained(line: dict) -> bool:
        if isinstance(line["slot"], str):
            return int(line["slot"].split("-")[1]) <= evaluated
        return line["slot"] < trained or line["slot"] in state.get("ready", ())

    def was_dropped(line: dict) -> bool:
        if isinstance(line["slot"], str):
            return is_trained(line)
        return line["prompt"] < state.get("position", 0) and line["prompt"] not in in_flight

    for folder in newest_first(run_dir):
        if step_of(folder) > version:
            (folder / MARKER).unlink()  # of a future that is given up
    for aside in Path(run_dir).glob("step_*.partial"):
        shutil.rmtree(aside)
    for path in Path(run_dir).glob("samples/step_*.npz"):
        if state and step_of(path.with_suffix("")) > version:
            path.unlink()
    rules = {"metrics": is_past, "mismatch": is_past, "dropped": was_dropped}
    for name, rule in (rules | {"rollouts*": is_trained}).items():
        for path in Path(run_dir).glob(f"{name}.jsonl"):
            keep(path, rule)
    return evaluated


def keep(path: Path, rule: Callable[[dict], bool]) -> None:
    """Leaves those whole lines of a JSONL file that obey a rule."""
    aside = path.with_suffix(".partial")
    with open(path, "rb") as old, open(aside, "wb") as new:
        for line in old:
            with contextlib.suppress(ValueError):  # cut off in the middle
                if rule(json.loads(line)):
                    new.write(line)
    aside.replace(path)
