"""What a configuration is good for beside training from the start.

A mode is three things handed to a run: how it starts, what generates groups, what takes them.
A run without rollouts (`TrainingRun`) has some of them, and generates nothing.

    python grpo_async.py --config X --resume auto            go on in the same folder
    python grpo_async.py --config X --resume auto --eval_only
    python grpo_async.py --config X --rollout_only           samples/ of the initial policy
    python grpo_async.py --config X --replay runs/NAME       train on another run's samples/
    python grpo_async.py --config X --run_dir D --export 100
    python grpo_async.py --config X --dry_run
"""

import asyncio
import dataclasses
import time
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from core import jsonl
from core.errors import InputError
from core.waits import within
from runtime.checkpoints import archive, resume
from runtime.checkpoints.folders import BLOCK, checksums, listing, mark, newest_first, step_of
from runtime.checkpoints.resume import EVALUATED
from runtime.checkpoints.save import Checkpoints
from runtime.processes.cluster import Cluster
from runtime.reporting.log import Log
from settings.reader import C, with_command

Step = Callable[[], Coroutine[Any, Any, None]]


class Loops(NamedTuple):
    """What `Run.run` does: `start`, then `generate` beside `train`, whose end is the run's."""

    start: Step
    generate: Step
    train: Step


class TrainingRun(Protocol):
    """What every algorithm's run has."""

    MUST_MATCH: Any  # settings in which a checkpoint may not differ
    cfg: Any
    val_rows: Any
    cluster: Cluster
    checkpoints: Checkpoints
    log: Log
    evaluated: int  # last version that was
    leaving: str

    async def start(self) -> None:
        """Starts all actors, and goes on from the checkpoint that is asked for."""

    async def train_forever(self) -> None:
        """Trains all steps."""

    def state(self) -> dict:
        """What a checkpoint holds of the run beside its policy."""

    async def evaluate(self) -> None:
        """Evaluates the present version."""


class RolloutRun(TrainingRun, Protocol):
    """What a run with rollouts has beside it."""

    buffer: Any
    progress: Any
    engines: Any

    async def generate_forever(self) -> None:
        """Rolls out all prompts."""

    async def take(self, step: int) -> list:
        """Groups of a step, all or parts; none where the run is to leave."""


def loops(run: RolloutRun) -> Loops:
    """The loops that the command asks for. Raises InputError where they cannot work.

    Raises SystemExit where there is nothing left to do.
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
    """Those of a run without rollouts. Raises as `loops` does."""
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
    """Looks at the checkpoint that the command goes on from, before anything starts.

    Raises InputError where there is none that can be used, and SystemExit where the run is over.
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
        print(f"nothing to do: step {step} of steps = {cfg.steps} is trained; raise steps to go on")
        raise SystemExit


# --- eval_only


async def evaluate(run: TrainingRun) -> None:
    """One evaluation. Raises RuntimeError where it was asked to leave before its end."""
    await run.evaluate()
    if run.evaluated < 0:
        raise RuntimeError(f"left before the evaluation was done ({run.leaving})")


# --- rollout_only


async def collect(run: RolloutRun) -> None:
    """Takes each step's groups and writes them; the next may start as if they were trained."""
    for step in range(run.cfg.steps):
        began = time.perf_counter()
        groups: list = []
        while run.buffer.next_step <= step:  # a part of them, with train_parts
            if not (part := await run.take(step)):
                run.log.note(f"left after {step} steps ({run.leaving})")
                return
            groups += part
        await run.checkpoints.write_samples(step + 1, groups)
        stats = {"wait_for_rollouts": time.perf_counter() - began}
        stats["dropped_prompts"] = run.buffer.dropped.total()
        run.log.step(step + 1, groups, stats)
        run.buffer.max_lag += 1  # the next groups may start, on the same version
        run.buffer.wake()


# --- replay


class NoEngines:
    """Stands where the engines would be: none is started, nothing is brought to a version."""

    def __init__(self) -> None:
        self.fleet = self
        self.alive: tuple = ()

    def launch(self) -> None:
        """Starts nothing."""

    async def start(self) -> None:
        """Waits for nothing."""

    async def repair_forever(self, run: RolloutRun) -> None:
        """Repairs nothing."""

    async def sync(self, version: int) -> dict[str, float]:
        """Sends nothing, and measures nothing."""
        return {}


def replayed_files(run: RolloutRun) -> list[Path]:
    """The files to train on, in the order of their steps; prepares the run for them.

    Raises InputError where there is none, or one that does not hold a step's groups, or lacks the
    sets of tokens that truncated sampling is trained by.
    """
    cfg = run.cfg
    files = sample_files(cfg.command.replay)[: cfg.steps]
    truncated = resume.truncation(dataclasses.asdict(cfg))
    for path in files:
        try:
            if path.stat().st_size <= BLOCK:  # damage in others is found when they are read
                archive.read_groups(str(path))
            count = archive.count_groups(str(path))
            has_sets = "allowed_T" in archive.columns(str(path))
        except ValueError as error:
            raise InputError(str(error)) from None
        if count != cfg.prompts_per_step:
            expected = f"prompts_per_step = {cfg.prompts_per_step}"
            raise InputError(f"{path} holds {count} groups, expected {expected}")
        if truncated and not has_sets:
            missing = "has no sets of tokens that its own were chosen among"
            raise InputError(f"{path} {missing}, expected them with {truncated}")
    run.cfg = dataclasses.replace(cfg, steps=len(files))
    run.val_rows = []
    run.buffer.max_lag = len(files)  # its samples are as old as they are
    run.engines = NoEngines()
    return files


def sample_files(source: str) -> list[Path]:
    """The files of samples in a run folder, by their steps. Raises InputError where it has none."""
    found = Path(source).glob("samples/step_*.npz")
    files = sorted(path for path in found if path.stem.removeprefix("step_").isdigit())
    if not files:
        raise InputError(f"replay = {source!r}: expected a folder with samples/step_*.npz")
    return files


async def read_forever(run: RolloutRun, files: list[Path]) -> None:
    """Hands in each file's groups, two steps ahead of the trainer."""
    P = run.cfg.prompts_per_step
    for step in range(run.progress.next_slot // P, run.cfg.steps):
        await run.buffer.until(partial(is_near, run, step))
        for place, group in enumerate(await run.checkpoints.read_groups(str(files[step]), P)):
            slot = step * P + place
            run.progress.next_slot = slot + 1
            run.progress.next_prompt = slot + 1
            run.buffer.start(slot)
            run.buffer.put(dataclasses.replace(group, slot=slot, version=step))


def is_near(run: RolloutRun, step: int) -> bool:
    """Whether the trainer is at most two steps behind."""
    return run.buffer.next_step >= step - 1


# --- export


def of_export(cfg: C) -> C:
    """The configuration that loads the checkpoint. Raises InputError where there is none."""
    step = cfg.command.export
    folder = Path(cfg.run_dir) / f"step_{step:06d}"
    steps = sorted(map(step_of, newest_first(cfg.run_dir)))
    if step not in steps:
        known = f"run_dir = {cfg.run_dir!r} has checkpoints of {steps or 'no steps'}"
        model = f"; its model is in {folder / 'hf'}" if (folder / "hf").is_dir() else ""
        raise InputError(f"export = {step}: {known}, expected one of them{model}")
    return with_command(cfg, resume=str(folder), export=0)


async def start_export(run: TrainingRun) -> None:
    """Starts the trainers on the checkpoint."""
    await run.cluster.start_trainers()
    await run.checkpoints.load()


async def export(run: TrainingRun) -> None:
    """Writes the policy as a model."""
    folder = f"{run.cfg.run_dir}/step_{run.cfg.command.export:06d}/hf"
    trainers = run.cluster.trainers
    calls = asyncio.gather(*(trainer.export.remote(folder) for trainer in trainers))
    await within(run.cfg.timeouts.train, "the export of the policy", calls)
    sealed = trainers[0].call.remote(seal, folder)
    await within(run.cfg.timeouts.train, f"{folder} to be flushed", sealed)
    print(f"exported: {folder}")


def seal(export: str) -> None:
    """Flushes and marks an export that was written into a checkpoint again."""
    mark(export, checksums(export, listing(export)))
