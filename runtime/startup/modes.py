"""Runs the modes other than training from the start: resume, evaluate, roll out, replay, export.

A mode hands three coroutines to a run: one starts it, one generates groups, and one takes them. A
run without rollouts (`TrainingRun`) has only some of the modes, and generates nothing.

    python grpo_async.py --config X --resume auto            continue in the same folder
    python grpo_async.py --config X --resume auto --eval_only
    python grpo_async.py --config X --rollout_only           samples/ of the initial policy
    python grpo_async.py --config X --replay runs/NAME       train on another run's samples/
    python grpo_async.py --config X --run_dir D --export 100
    python grpo_async.py --config X --dry_run
"""

import asyncio
import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

from core import jsonl
from core.errors import InputError
from core.outputs import output_folder
from core.waits import within
from rollout.episode import Group
from runtime.checkpoints import archive, resume
from runtime.checkpoints.folders import BLOCK, checksums, listing, mark, newest_first, step_of
from runtime.checkpoints.resume import EVALUATED
from runtime.checkpoints.save import Checkpoints
from runtime.processes.cluster import Cluster
from runtime.reporting import summary
from runtime.reporting.log import Log
from settings.config import RunSettings, TrainingSettings
from settings.reader import C, with_command

R = TypeVar("R", bound=RunSettings)
Step = Callable[[], Coroutine[None, None, None]]


class Loops(NamedTuple):
    """The parts of `Run.run`: `start`, then `generate` alongside `train`, which ends the run."""

    start: Step
    generate: Step
    train: Step


class TrainingRun(Protocol):
    """The part of a run that the modes use, whatever its algorithm."""

    cluster: Cluster
    checkpoints: Checkpoints
    log: Log
    evaluated: int  # last policy version that was evaluated
    leaving: str  # why the run is to leave; "" if it is not

    @property
    def MUST_MATCH(self) -> Sequence[str]:
        """The settings in which a checkpoint may not differ."""

    @property
    def cfg(self) -> TrainingSettings:
        """The configuration."""

    @property
    def val_rows(self) -> Sequence[dict] | None:
        """The rows of an evaluation."""

    async def start(self) -> None:
        """Starts all actors, and resumes from the checkpoint that the command names."""

    async def train_forever(self) -> None:
        """Trains all steps."""

    def state(self) -> dict:
        """Returns what a checkpoint of the run contains in addition to the policy."""

    async def evaluate(self) -> None:
        """Evaluates the current version."""


class GroupBuffer(Protocol):
    """The part of the rollout buffer that the modes use."""

    max_lag: int
    next_step: int
    dropped: Counter[str]

    def start(self, slot: int) -> None:
        """Marks a slot as being generated."""

    def put(self, group: Group) -> None:
        """Adds a finished group."""

    async def until(self, holds: Callable[[], bool]) -> None:
        """Waits until a condition holds."""

    def wake(self) -> None:
        """Makes all waits check their conditions again."""


class StreamPlace(Protocol):
    """The part of a run's progress through its prompts that the modes use."""

    next_slot: int
    next_prompt: int


class RolloutRun(TrainingRun, Protocol[R]):
    """A run with rollouts, as the modes use it."""

    cfg: R
    val_rows: Sequence[dict]
    engines: Any  # its `Engines`, or the NoEngines of a replay

    @property
    def buffer(self) -> GroupBuffer:
        """The finished groups that no step has taken yet."""

    @property
    def progress(self) -> StreamPlace:
        """The place in the stream of prompts."""

    async def generate_forever(self) -> None:
        """Rolls out all prompts."""

    async def take(self, step: int) -> list[Group]:
        """Returns a step's groups, all or some; [] if the run is to leave."""


def loops(run: RolloutRun[R]) -> Loops:
    """Chooses the loops of the command. Raises InputError if it cannot work.

    Raises SystemExit if nothing is left to do.
    """
    command = run.cfg.command
    if command.eval_only or command.export:
        return training_loops(run)
    check_checkpoint(run)
    if command.rollout_only:
        return Loops(run.start, run.generate_forever, partial(collect, run))
    if command.replay:
        files = replayed_files(run)
        return Loops(run.start, partial(read_forever, run, files), run.train_forever)
    return Loops(run.start, run.generate_forever, run.train_forever)


def training_loops(run: TrainingRun) -> Loops:
    """Chooses the loops of a run without rollouts. Raises as `loops` does."""
    command = run.cfg.command
    check_checkpoint(run)
    if command.eval_only:
        return Loops(run.start, nothing, partial(evaluate, run))
    if command.export:
        return Loops(partial(start_export, run), nothing, partial(export, run))
    return Loops(run.start, nothing, run.train_forever)


async def nothing() -> None:
    """Generates no groups."""


def check_checkpoint(run: TrainingRun) -> None:
    """Checks the checkpoint from which the command continues, before anything starts.

    Raises InputError if it is needed and cannot be used, SystemExit if the run is complete.
    """
    cfg = run.cfg
    command = cfg.command
    if command.export:
        run.checkpoints.cfg = of_export(cfg)
    trains = not (command.export or command.eval_only)
    must_match = run.MUST_MATCH if trains else None
    state = resume.look(run.checkpoints, must_match, run.state())
    step = state.get("version", 0)
    if command.resume != "auto" or command.modes or step < cfg.steps:
        return
    metrics = jsonl.read(Path(cfg.run_dir) / "metrics.jsonl", jsonl.METRICS)
    evaluated = any(EVALUATED & line.keys() for line in metrics if line.get("step") == step)
    if evaluated or not run.val_rows or step > cfg.steps:
        print(
            f"nothing to do: step {step} of steps = {cfg.steps} is trained; "
            "raise steps to train further"
        )
        raise SystemExit


# --- eval_only


async def evaluate(run: TrainingRun) -> None:
    """Evaluates once. Raises RuntimeError if the run was asked to leave before the end."""
    await run.evaluate()
    if run.evaluated < 0:
        raise RuntimeError(f"left before the evaluation was done ({run.leaving})")


# --- rollout_only


async def collect(run: RolloutRun[R]) -> None:
    """Takes and writes each step's groups.

    The next ones may then start as if the step had been trained.
    """
    for step in range(run.cfg.steps):
        began = time.perf_counter()
        groups: list[Group] = []
        while run.buffer.next_step <= step:  # several times with train_parts
            part = await run.take(step)
            if not part:
                run.log.note(f"left after {step} steps ({run.leaving})")
                return
            groups += part
        await run.checkpoints.write_samples(step + 1, groups)
        stats = {
            "wait_for_rollouts": time.perf_counter() - began,
            "dropped_prompts": run.buffer.dropped.total(),
        }
        run.log.step(step + 1, groups, stats)
        run.buffer.max_lag += 1  # the next groups may start, on the same version
        run.buffer.wake()


# --- replay


class NoEngines:
    """Stands in for a run's engines if it has none: nothing is started or synchronised."""

    def __init__(self) -> None:
        self.fleet = self
        self.alive: tuple[()] = ()

    def launch_missing(self) -> None:
        """Starts nothing."""

    async def launch_and_wait(self) -> None:
        """Waits for nothing."""

    async def repair_forever(self, run: RolloutRun) -> None:
        """Repairs nothing."""

    async def sync(self, version: int) -> dict[str, float]:
        """Sends nothing, and measures nothing."""
        return {}


def replayed_files(run: RolloutRun[R]) -> list[Path]:
    """Returns the files to train on, in step order; prepares the run for them.

    Raises InputError if there are no files, if one does not hold a step's groups, or if one lacks
    the sets of tokens that training with truncated sampling needs.
    """
    cfg = run.cfg
    files = sample_files(cfg.command.replay)[: cfg.steps]
    truncated = resume.truncation(dataclasses.asdict(cfg))
    for path in files:
        try:
            if path.stat().st_size <= BLOCK:  # damage in larger files is found when they are read
                archive.read_groups(str(path))
            count = archive.count_groups(str(path))
            has_sets = "allowed_T" in archive.columns(str(path))
        except ValueError as error:
            raise InputError(str(error)) from None
        if count != cfg.prompts_per_step:
            raise InputError(
                f"{path} holds {count} groups, expected prompts_per_step = {cfg.prompts_per_step}"
            )
        if truncated and not has_sets:
            raise InputError(
                f"{path} lacks the sets of tokens from which its tokens were chosen, "
                f"but {truncated} needs them"
            )
    run.cfg = dataclasses.replace(cfg, steps=len(files))
    run.val_rows = []
    run.buffer.max_lag = len(files)  # samples of any age are accepted
    run.engines = NoEngines()
    return files


def sample_files(source: str) -> list[Path]:
    """Returns a run folder's sample files, in step order.

    Raises InputError if the folder has none.
    """
    found = Path(source).glob("samples/step_*.npz")
    files = sorted(path for path in found if path.stem.removeprefix("step_").isdigit())
    if not files:
        raise InputError(f"replay = {source!r}: expected a folder with samples/step_*.npz")
    return files


async def read_forever(run: RolloutRun[R], files: list[Path]) -> None:
    """Puts each file's groups into the buffer, at most two steps ahead of the trainer."""
    P = run.cfg.prompts_per_step
    for step in range(run.progress.next_slot // P, run.cfg.steps):
        await run.buffer.until(partial(is_near, run, step))
        groups = await run.checkpoints.read_groups(str(files[step]), P)
        for place, group in enumerate(groups):
            slot = step * P + place
            run.progress.next_slot = slot + 1
            run.progress.next_prompt = slot + 1
            run.buffer.start(slot)
            run.buffer.put(dataclasses.replace(group, slot=slot, version=step))


def is_near(run: RolloutRun[R], step: int) -> bool:
    """Returns True if the trainer is less than two steps behind `step`."""
    return run.buffer.next_step >= step - 1


# --- export


def of_export(cfg: C) -> C:
    """Returns the configuration that loads the checkpoint to export.

    Raises InputError if it does not exist, or if its hf is not a folder.
    """
    step = cfg.command.export
    folder = Path(cfg.run_dir) / f"step_{step:06d}"
    steps = sorted(map(step_of, newest_first(cfg.run_dir)))
    if step not in steps:
        model = f"; its model is in {folder / 'hf'}" if (folder / "hf").is_dir() else ""
        raise InputError(
            f"export = {step}: run_dir = {cfg.run_dir!r} has checkpoints of "
            f"{steps or 'no steps'}, expected one of them{model}"
        )
    output_folder(folder / "hf")
    return with_command(cfg, resume=str(folder), export=0)


async def start_export(run: TrainingRun) -> None:
    """Starts the trainers on the checkpoint."""
    await run.cluster.start_trainers()
    await run.checkpoints.load()


async def export(run: TrainingRun) -> None:
    """Writes the policy as a model that transformers and vLLM load."""
    named = f"{run.cfg.run_dir}/step_{run.cfg.command.export:06d}/hf"
    folder = str(output_folder(named))
    trainers = run.cluster.trainers
    calls = asyncio.gather(*(trainer.export.remote(folder) for trainer in trainers))
    await within(run.cfg.timeouts.train, "the export of the policy", calls)
    sealed = trainers[0].call.remote(seal, folder)
    await within(run.cfg.timeouts.train, f"{folder} to be flushed", sealed)
    metrics = jsonl.read(Path(run.cfg.run_dir) / "metrics.jsonl", jsonl.METRICS)
    known = [line for line in metrics if line["step"] == run.cfg.command.export]
    for line in summary.model_lines(Path(named), known):
        print(line)


def seal(export: str) -> None:
    """Flushes and marks an export that was written into a checkpoint again."""
    mark(export, checksums(export, listing(export)))
