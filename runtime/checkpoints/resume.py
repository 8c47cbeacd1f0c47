"""Which checkpoint a run goes on from, and how its folder goes back to that moment."""

import asyncio
import contextlib
import dataclasses
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from core import jsonl
from core.errors import InputError
from core.waits import within
from runtime.checkpoints import lineage
from runtime.checkpoints.folders import BLOCK, MARKER, damage, flush, newest_first, step_of
from settings.config import TrainingSettings

if TYPE_CHECKING:
    from rollout.rows import Rows
    from runtime.checkpoints.save import Checkpoints

LORA = ("policy.lora_rank", "policy.lora_alpha", "policy.lora_targets")  # of each checkpoint
WHOLE = {"top_p": 1.0, "top_k": 0, "min_p": 0.0}  # of `sampling`: no token is left out
MISSING = object()  # no value of a setting
EVALUATED = {"validation_reward", "validation_accuracy"}  # one of them ends an evaluation


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
    state: dict, cfg: TrainingSettings, rows: "Rows", must_match: Sequence[str]
) -> None:
    """Raises InputError where a run counts or reads prompts unlike the one that was saved."""
    saved = state["config"]
    folder = state["folder"]
    replay, lag = cfg.command.replayed, getattr(cfg, "max_lag", 0)
    if replay and leaf_of(saved, "command.replay", replay) != replay:
        raise InputError(f"{folder} is of no replay of {replay}")
    if saved.get("max_lag", 0) > lag:  # what is ready may be as old as that
        raise InputError(f"{folder} was saved with max_lag = {saved['max_lag']}: not less")
    refuse_other_truncation(state, cfg)
    refuse_other_settings(state, cfg, (*must_match, *LORA))
    count, checksum = state["rows"]
    if rows.checksum(count) != checksum or len(rows) < count:
        message = f"its first {count} rows are not those that {folder} was saved with"
        why = "were rows changed, added or removed, or are others quarantined now?"
        raise InputError(f"data.train = {cfg.data.train!r}: {message}: {why}")
    prompt = state["progress"]["next_prompt"]
    if len(rows) > count and prompt > count:
        message = f"{folder} was saved in a later pass over {count} rows, and now there are"
        raise InputError(f"data.train = {cfg.data.train!r}: {message} {len(rows)}")


def refuse_other_settings(state: dict, cfg: TrainingSettings, names: Sequence[str]) -> None:
    """Raises InputError where a checkpoint was saved with another value of one, or with none."""
    now = json.loads(json.dumps(dataclasses.asdict(cfg)))  # as it was written: tuples are lists
    for name in names:
        before, after = leaf_of(state["config"], name, MISSING), leaf_of(now, name, None)
        if before is MISSING:
            raise another_layout(state["folder"], f"lacks config.{name}")
        if before != after:
            raise InputError(f"{state['folder']} was saved with {name} = {before!r}, not {after!r}")


def refuse_other_truncation(state: dict, cfg: TrainingSettings) -> None:
    """Raises InputError where finished groups would have sets of tokens and later ones none.

    Or the other way round; where both truncate, each group is trained by the sets that it has.
    """
    before, now = truncation(state["config"]), truncation(dataclasses.asdict(cfg))
    if bool(before) != bool(now):
        said = f"was saved with {before}" if before else f"was not saved with {now}"
        raise InputError(f"{state['folder']} {said}: expected what it was saved with")


def truncation(config: dict) -> str:
    """The settings of a run that leave tokens out, with their values; "" for none."""
    chosen = WHOLE | config.get("sampling", {})
    return ", ".join(f"sampling.{n} = {chosen[n]}" for n in WHOLE if chosen[n] != WHOLE[n])


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
        keep(path, is_trained, jsonl.place, whole)


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
        place = jsonl.place(file.readline())
        if place and place["step"]:
            yield at, place["step"]


def keep(path: Path, rule: Callable, parse: Callable = json.loads, start: int = 0) -> None:
    """Leaves those whole lines of a JSONL file behind byte `start` that obey a rule.

    They are written aside before the file is cut, so a process that is killed here can repeat it.
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


async def load(
    checkpoints: "Checkpoints", must_match: Sequence[str] | None, fresh: dict | None
) -> dict:
    """`Checkpoints.load`, where a checkpoint is asked for."""
    state = await newest(checkpoints, must_match, fresh)
    if must_match is not None:
        state = state | {"evaluated": rewind(checkpoints.cfg.run_dir, state)}
    return state if state.get("folder") else {}


def look(checkpoints: "Checkpoints", must_match: Sequence[str] | None, fresh: dict) -> dict:
    """The state of the checkpoint that `load` would take, {} for none; nothing is started.

    `fresh` is what the run would save now. Raises InputError as `load` does, except for damage
    inside of large files, and where a checkpoint to go on from has other fields than `fresh`.
    """
    folder = first_whole(checkpoints.cfg)
    return state_of(checkpoints, folder, must_match, fresh) if folder else {}


def state_of(
    checkpoints: "Checkpoints", folder: str, must_match: Sequence[str] | None, fresh: dict | None
) -> dict:
    """The state of a whole checkpoint. Raises InputError where it cannot be gone on from."""
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
    """The error of a checkpoint whose state.json has other fields than this program writes."""
    commit = lineage.read(Path(folder)).get("commit") or "unknown"
    found = f"{folder}: its state.json {what}: it was saved by commit {commit}"
    return InputError(f"{found}: go on with that, or start anew with model set to its folder hf")


def refuse_other_layout(state: dict, fresh: dict) -> None:
    """Raises InputError where a checkpoint has not the fields of `fresh`, which a run saves now."""
    saved, known = state["progress"].keys(), fresh["progress"].keys()
    problems = [f"lacks {name}" for name in fresh.keys() - state.keys()]
    problems += [f"lacks progress.{name}" for name in known - saved]
    problems += [f"has progress.{name}, which is unknown here" for name in saved - known]
    if problems:
        raise another_layout(state["folder"], min(problems))


async def newest(
    checkpoints: "Checkpoints", must_match: Sequence[str] | None, fresh: dict | None
) -> dict:
    """Loads the newest checkpoint that is whole into the trainers; its state, {} for none."""
    cfg = checkpoints.cfg
    limit = cfg.timeouts.start
    ranks = list(enumerate(checkpoints.cluster.trainers))
    notes = []
    for folder in candidates(cfg):
        checks = (t.call.remote(damage, folder, part, len(ranks)) for part, t in ranks)
        found = await within(limit, f"{folder} to be read", asyncio.gather(*checks))
        problems = [text for text in found if text]
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
