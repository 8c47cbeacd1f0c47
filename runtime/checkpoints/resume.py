"""Chooses the checkpoint from which a run resumes, and rewinds the run folder to that moment."""

import asyncio
import contextlib
import dataclasses
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, TypeVar

from core import jsonl
from core.errors import InputError
from core.waits import within
from runtime.checkpoints import lineage
from runtime.checkpoints.folders import (
    BLOCK,
    MARKER,
    damage,
    flush,
    newest_first,
    put_back,
    step_of,
)
from settings.config import TrainingSettings

if TYPE_CHECKING:
    from rollout.rows import Rows
    from runtime.checkpoints.save import Checkpoints

Setting = bool | int | float | str | list | dict | None  # a value in state.json's config
T = TypeVar("T")

LORA = ("policy.lora_rank", "policy.lora_alpha", "policy.lora_targets")  # must match, in any mode
WHOLE = {"top_p": 1.0, "top_k": 0, "min_p": 0.0}  # values of `sampling` that leave no token out
MISSING = object()  # stands for a setting that a checkpoint lacks
EVALUATED = {"validation_reward", "validation_accuracy"}  # one of them ends an evaluation


def candidates(cfg: TrainingSettings) -> list[str]:
    """Returns the checkpoints to try, best first; [] if the run starts from scratch."""
    resume = cfg.command.resume
    if resume == "auto":
        return [str(folder) for folder in newest_first(cfg.run_dir)]
    if resume and not os.path.isfile(os.path.join(resume, MARKER)):
        raise InputError(f"resume = {resume!r}: expected auto or a folder with {MARKER}")
    return [resume] if resume else []


def first_whole(cfg: TrainingSettings) -> str:
    """Returns the best candidate whose marker, sizes and small files' CRC-32 are right; or "".

    Raises InputError if there are candidates but all are damaged, or if one is needed and missing.
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
    """Raises InputError if all checkpoints are damaged, or if one to be evaluated is missing.

    `notes` describe the damage to each.
    """
    if notes:
        raise InputError("no checkpoint is whole: " + "; ".join(notes))
    if cfg.command.resume and cfg.command.eval_only:
        raise InputError(f"run_dir = {cfg.run_dir!r} holds no checkpoint, expected one")


def refuse_other_stream(
    state: dict, cfg: TrainingSettings, rows: "Rows", must_match: Sequence[str]
) -> None:
    """Raises InputError if a run counts or reads prompts differently from the saved run."""
    saved = state["config"]
    folder = state["folder"]
    replay = cfg.command.replayed
    if replay and leaf_of(saved, "command.replay", replay) != replay:
        raise InputError(f"{folder} was not saved by a replay of {replay}")
    lag = getattr(cfg, "max_lag", 0)
    saved_lag = saved.get("max_lag", 0)
    if saved_lag > lag:  # the saved groups may be as old as that
        raise InputError(f"max_lag = {lag}: expected {saved_lag} or more, as in {folder}")
    refuse_other_truncation(state, cfg)
    refuse_other_settings(state, cfg, (*must_match, *LORA))
    count, checksum = state["rows"]
    if rows.checksum(count) != checksum or len(rows) < count:
        raise InputError(
            f"data.train = {cfg.data.train!r}: its first {count} rows are not those that {folder} "
            "was saved with: were rows changed, added or removed, or are others quarantined now?"
        )
    prompt = state["progress"]["next_prompt"]
    if len(rows) > count and prompt > count:
        raise InputError(
            f"data.train = {cfg.data.train!r}: {folder} was saved in a later pass over "
            f"{count} rows, and now there are {len(rows)}"
        )


def refuse_other_settings(state: dict, cfg: TrainingSettings, names: Sequence[str]) -> None:
    """Raises InputError if a checkpoint lacks one of these settings or has another value for it."""
    now = json.loads(json.dumps(dataclasses.asdict(cfg)))  # as it was written: tuples are lists
    for name in names:
        before = leaf_of(state["config"], name, MISSING)
        after = leaf_of(now, name, None)
        if before is MISSING:
            raise another_layout(state["folder"], f"lacks config.{name}")
        if before != after:
            raise InputError(f"{state['folder']} was saved with {name} = {before!r}, not {after!r}")


def refuse_other_truncation(state: dict, cfg: TrainingSettings) -> None:
    """Raises InputError if either the checkpoint or the run truncates its sampling, but not both.

    Finished groups and later ones must either all have sets of tokens or all lack them. If both
    truncate, each group is trained with its own sets.
    """
    before = truncation(state["config"])
    now = truncation(dataclasses.asdict(cfg))
    folder = state["folder"]
    if before and not now:
        raise InputError(f"{folder} was saved with {before}: expected what it was saved with")
    if now and not before:
        raise InputError(f"{folder} was not saved with {now}: expected what it was saved with")


def truncation(config: dict) -> str:
    """Lists the settings of a run that leave tokens out, with their values; "" if all are off."""
    chosen = WHOLE | config.get("sampling", {})
    return ", ".join(f"sampling.{n} = {chosen[n]}" for n in WHOLE if chosen[n] != WHOLE[n])


def leaf_of(config: dict, name: str, default: T) -> Setting | T:
    """Returns the value of `group.leaf` in nested dictionaries; `default` if it is missing."""
    value: Setting = config
    for part in name.split("."):
        if not isinstance(value, dict) or part not in value:
            return default
        value = value[part]
    return value


def rewind(run_dir: str, state: dict) -> int:
    """Removes from a run folder's files everything that happened after a checkpoint.

    Returns the last version, up to the checkpoint's, whose evaluation ended; -1 if none did. An
    evaluation counts even if it ended after the checkpoint was taken.
    """
    version = state.get("version", -1)
    evaluated = -1

    def is_past(line: dict) -> bool:
        nonlocal evaluated
        if line["step"] <= version and EVALUATED & line.keys():
            evaluated = line["step"]
        return line["step"] <= version

    for kept in Path(run_dir).glob("*.kept"):  # an earlier rewind was killed here
        finish(kept)
    for folder in newest_first(run_dir):
        if step_of(folder) > version:  # this run will train that step again
            (folder / MARKER).unlink()
    for aside in Path(run_dir).glob("step_*.partial"):
        shutil.rmtree(aside)
    for path in Path(run_dir).glob("samples/step_*.npz"):
        if state and step_of(path.with_suffix("")) > version:
            path.unlink()
    for name in ("metrics", "mismatch"):
        for path in Path(run_dir).glob(f"{name}.jsonl"):
            keep(path, is_past)
    if problem := lost_metrics(run_dir, state):
        print(problem)
    rewind_rollouts(run_dir, state, evaluated)
    return evaluated


def lost_metrics(run_dir: str, state: dict) -> str:
    """Describes the steps before a checkpoint that the run folder has no metrics of; "" if none.

    A checkpoint in another folder has its metrics there.
    """
    if Path(state.get("folder", "")).parent != Path(run_dir):
        return ""
    path = Path(run_dir) / "metrics.jsonl"
    last = max((line["step"] for line in jsonl.read(path, jsonl.METRICS)), default=0)
    if last >= state["version"]:
        return ""
    return f"{path} ends at step {last}, before the checkpoint of step {state['version']}"


def rewind_rollouts(run_dir: str, state: dict, evaluated: int) -> None:
    """Removes the rollouts and dropped prompts that came after a checkpoint.

    Evaluations stay up to version `evaluated`.
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
        # A line for step s was written before version s, when no step above s + max_lag had begun.
        whole = settled(path, state["version"] - config["max_lag"]) if state else 0
        keep(path, is_trained, jsonl.place, whole)


def settled(path: Path, step: int) -> int:
    """Returns the offset of a line for a step up to `step`, near the last such line.

    Bisects the file, so reading even a large rollouts file takes only a moment; 0 if there is no
    such line.
    """
    low, high = 0, path.stat().st_size
    with open(path, "rb") as file:
        while high - low > BLOCK:
            middle = (low + high) // 2
            file.seek(middle)
            file.readline()  # the rest of a line
            at, found = next(steps_of(file, high), (middle, math.inf))
            if found <= step:
                low = at
            else:
                high = middle
    return low


def steps_of(file: BinaryIO, end: int) -> Iterator[tuple[int, int]]:
    """Yields the offset and the step of each training line in a rollouts file, up to `end`."""
    while (at := file.tell()) < end:
        place = jsonl.place(file.readline())
        if place and place["step"]:
            yield at, place["step"]


def keep(
    path: Path,
    rule: Callable[[dict], bool],
    parse: Callable[[bytes], dict | None] = json.loads,
    start: int = 0,
) -> None:
    """Removes the lines that do not obey a rule from a JSONL file, from byte `start` on.

    Lines that are cut off or cannot be parsed are removed too. The other lines are written aside
    before the file is truncated, so the removal can be repeated if the process is killed here.
    """
    aside = path.with_suffix(".partial")
    with open(path, "rb") as old, open(aside, "wb") as new:
        old.seek(start)
        for line in old:
            # A line may be cut off, or written by a program that uses different fields.
            with contextlib.suppress(ValueError, KeyError, TypeError):
                parsed = parse(line)
                if parsed is not None and line.endswith(b"\n") and rule(parsed):
                    new.write(line)
    flush(aside)
    finish(aside.rename(path.with_suffix(f".{start}.kept")))


def finish(kept: Path) -> None:
    """Replaces a JSONL file's end, from the byte in the name of `kept`, with `kept`'s lines."""
    path = kept.with_suffix("").with_suffix(".jsonl")
    start = int(kept.suffixes[-2].removeprefix("."))
    with open(path, "r+b") as file, open(kept, "rb") as lines:
        file.truncate(start)
        file.seek(start)
        shutil.copyfileobj(lines, file)
    flush(path)
    kept.unlink()


async def load(
    checkpoints: "Checkpoints", must_match: Sequence[str] | None, fresh: dict | None
) -> dict:
    """Does the work of `Checkpoints.load` for a run that resumes, or died in its first step."""
    put_back(checkpoints.cfg.run_dir)
    state = await newest(checkpoints, must_match, fresh)
    if must_match is not None:
        state = state | {"evaluated": rewind(checkpoints.cfg.run_dir, state)}
    return state if state.get("folder") else {}


def look(checkpoints: "Checkpoints", must_match: Sequence[str] | None, fresh: dict) -> dict:
    """Returns the state of the checkpoint that `load` would choose, or {}; nothing is started.

    `fresh` is what the run would save now. Raises InputError as `load` does, except for damage
    inside large files; also if a checkpoint to resume from has fields other than `fresh`.
    """
    folder = first_whole(checkpoints.cfg)
    return state_of(checkpoints, folder, must_match, fresh) if folder else {}


def state_of(
    checkpoints: "Checkpoints", folder: str, must_match: Sequence[str] | None, fresh: dict | None
) -> dict:
    """Reads the state of a whole checkpoint. Raises InputError if the run cannot continue it."""
    state = json.loads(Path(folder, "state.json").read_text()) | {"folder": folder}
    needed = {"config", "version"} | ({"progress", "rows"} if must_match is not None else set())
    if missing := needed - state.keys():
        raise another_layout(folder, f"lacks {', '.join(sorted(missing))}")
    if must_match is None:
        refuse_other_settings(state, checkpoints.cfg, LORA)
        return state
    if fresh:
        refuse_other_layout(state, fresh)
    refuse_other_stream(state, checkpoints.cfg, checkpoints.rows, must_match)
    return state


def another_layout(folder: str, what: str) -> InputError:
    """Makes the error for a checkpoint whose state.json has fields other than this program's."""
    commit = lineage.read(Path(folder)).get("commit") or "unknown"
    return InputError(
        f"{folder}: its state.json {what}: it was saved by commit {commit}: "
        "continue with that commit, or start anew with model set to its folder hf"
    )


def refuse_other_layout(state: dict, fresh: dict) -> None:
    """Raises InputError if a checkpoint has fields other than `fresh`, which the run saves now."""
    saved = state["progress"].keys()
    known = fresh["progress"].keys()
    problems = [f"lacks {name}" for name in fresh.keys() - state.keys()]
    problems += [f"lacks progress.{name}" for name in known - saved]
    problems += [f"has progress.{name}, which is unknown here" for name in saved - known]
    if problems:
        raise another_layout(state["folder"], min(problems))


async def newest(
    checkpoints: "Checkpoints", must_match: Sequence[str] | None, fresh: dict | None
) -> dict:
    """Loads the newest whole checkpoint into the trainers; returns its state, {} if none exists."""
    cfg = checkpoints.cfg
    limit = cfg.timeouts.start
    ranks = list(enumerate(checkpoints.cluster.trainers))
    notes = []
    for folder in candidates(cfg):
        checks = (t.call.remote(damage, folder, part, len(ranks)) for part, t in ranks)
        damages = await within(limit, f"{folder} to be read", asyncio.gather(*checks))
        problems = [text for text in damages if text]
        if problems:
            notes.append(problems[0])
            print(f"not resumed from {folder}: {problems[0]}")
            continue
        state = state_of(checkpoints, folder, must_match, fresh)
        loads = asyncio.gather(*(t.load.remote(folder) for _, t in ranks))
        await within(limit, f"{folder} to be loaded", loads)
        print(f"resumed from {folder}")
        return state
    refuse_none(cfg, notes)
    if cfg.command.resume:
        print(f"run_dir = {cfg.run_dir!r} holds no checkpoint: this is {cfg.model}")
    return {}
