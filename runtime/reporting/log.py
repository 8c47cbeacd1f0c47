"""Writes what a run measures: JSON lines, TensorBoard, W&B and the console."""

import asyncio
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from tqdm import tqdm

from core import jsonl
from core.errors import RunError, brief, in_one_line
from core.jsonl import LineFile, WriteError
from core.waits import in_thread, within
from runtime.reporting import config_json
from runtime.reporting.console import Bars, Lines
from runtime.reporting.rollout_metrics import disagreement, mismatch_rows, rollout_metrics
from runtime.reporting.validation_metrics import validation_line, validation_metrics
from settings.config import TrainingSettings

if TYPE_CHECKING:
    from rollout.episode import Group, SampleInfo
    from runtime.rollouts.dispatch import Slot

T = TypeVar("T")


class Board(Protocol):
    """A view of a run's metrics: TensorBoard or W&B."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Shows the metrics of a step."""

    def close(self) -> None:
        """Shows what is left, and ends."""


def last_seconds(path: Path) -> float:
    """Returns the largest `seconds` in a metrics.jsonl; 0 if it has none."""
    found = (line.get("seconds") for line in jsonl.read(path, jsonl.METRICS))
    return max((value for value in found if isinstance(value, int | float)), default=0.0)


class Log:
    """The log of a run: its .jsonl files, TensorBoard, W&B if `wandb` is set, and the console.

    An error of a .jsonl file ends the run. An error of TensorBoard or W&B does not.
    """

    FILES = ("starts", "metrics", "mismatch", "dropped", "rollouts")

    def __init__(self, files: Sequence[str] = FILES) -> None:
        self.names = files
        self.cfg: Any = None  # the run's configuration, of any algorithm
        self.is_open = False
        self.boards: dict[str, Board] = {}  # by the name in messages
        self.writing = asyncio.Lock()
        self.unwritten = b""  # lines of groups that finished while others were being written

    def open(self, cfg: TrainingSettings, version: int) -> None:
        """Opens the files of a run that continues from policy version `version`."""
        self.is_open = True
        self.cfg = cfg
        folder = Path(cfg.writes_to)
        folder.mkdir(parents=True, exist_ok=True)
        self.files = {name: LineFile(folder / f"{name}.jsonl") for name in self.names}
        self.line("starts", config_json.write(cfg, folder, version))
        from runtime.reporting.speed import Speed, of_cluster
        from runtime.reporting.tensorboard_board import TensorBoard  # takes a second: after checks

        self.speed = Speed(cfg, of_cluster())
        made: dict[str, Callable[[], Board]] = {
            f"TensorBoard's {folder}/events.out.tfevents.*": partial(TensorBoard, folder, version)
        }
        if cfg.wandb:
            from runtime.reporting import wandb_board

            made["W&B"] = partial(wandb_board.Board, cfg, folder)
        for name, make in made.items():
            board = self.attempt(name, make)
            if board:
                self.boards[name] = board
        earlier = 0.0
        if version and not cfg.command.eval_only:  # the folder has the steps before this version
            earlier = last_seconds(folder / "metrics.jsonl")
        self.began = time.time() - earlier
        self.console: Lines | Bars = Bars(cfg) if sys.stderr.isatty() else Lines(cfg)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Appends the metrics of the step that led to policy version `step`."""
        self.line("metrics", {"step": step, "seconds": time.time() - self.began, **metrics})
        for name, board in list(self.boards.items()):
            self.attempt(name, partial(board.write, step, metrics))

    def attempt(self, name: str, call: Callable[[], T]) -> T | None:
        """Calls a board; if that fails, prints a note, and never calls the board again."""
        try:
            return call()
        except Exception as error:
            self.boards.pop(name, None)
            self.note(f"{name} gets no more metrics; metrics.jsonl has them all: {brief(error)}")
            return None

    def line(self, name: str, content: dict) -> None:
        """Appends a line to one of the files. Raises WriteError."""
        self.files[name].append(json.dumps(content).encode() + b"\n")

    async def rollouts(self, lines: bytes) -> None:
        """Appends a group's lines without blocking the event loop. Raises WriteError."""
        if not lines:  # the group is not in the share that is written
            return
        file = self.files["rollouts"]
        limit = self.cfg.timeouts.train
        self.unwritten += lines
        async with self.writing:
            lines = self.unwritten
            self.unwritten = b""
            if not lines:  # another call has written them
                return
            try:
                done = in_thread(file.append, lines)
                await within(limit, f"{file.path} to take lines", done, late=WriteError)
            except WriteError:  # the groups that wait for the lock must fail too
                self.unwritten = lines + self.unwritten
                raise

    def mismatch(self, step: int, tables: list[dict]) -> None:
        """Writes a step's mismatch table; warns if trainer and engine disagree at lag 0."""
        table = {"step": step, "rows": mismatch_rows(tables)}
        self.line("mismatch", table)
        problem = disagreement(table)
        if problem:
            self.note(f"step {step}: {problem}; see docs/debugging.md")

    def drop(self, slot: "Slot", prompt: int, row: str, error: BaseException) -> None:
        """Writes a line for a prompt that was abandoned: its place in the stream, and the error.

        Raises the error if it is a RunError: the run must end, and the prompt is not at fault.
        """
        if isinstance(error, RunError):
            raise error
        place = {"slot": slot.number, "evaluation": slot.evaluation, "prompt": prompt, "row": row}
        self.line("dropped", place | {"reason": type(error).__name__, "error": str(error)})
        self.note(f"{row} dropped: {in_one_line(error)}")

    def evaluation(self, version: int, answered: "list[list[SampleInfo]]", dropped: int) -> None:
        """Writes a version's validation metrics, from the answers to the validation prompts.

        `dropped` is the number of prompts without answers.
        """
        metrics = validation_metrics(answered, self.cfg.data.val_samples, dropped)
        self.write(version, metrics)
        self.note(f"version {version}: {validation_line(metrics)}")

    def step(self, step: int, groups: "list[Group]", stats: dict[str, float]) -> None:
        """Writes and shows the step that trained on these groups and led to version `step`.

        Raises RuntimeError if `Slot.record` assigns the groups to another step.
        """
        recorded = {group.slot // self.cfg.prompts_per_step + 1 for group in groups}
        if recorded != {step}:  # a fork fills its batches differently
            raise RuntimeError(
                f"step {step} trains slots that Slot.record assigns to {sorted(recorded)}: "
                "rollouts.jsonl would have the wrong step. Change Slot.record as well"
            )
        version = 0 if self.cfg.command.rollout_only else step - 1  # the version that was trained
        infos = [group.infos for group in groups]
        tokens = sum(info.tokens for of_group in infos for info in of_group)
        self.trained(step, stats | rollout_metrics(infos, version) | {"batch_tokens": tokens})

    def trained(self, step: int, metrics: dict[str, float]) -> None:
        """Writes and shows the training step that led to version `step`."""
        metrics = self.speed.of(metrics)
        self.write(step, metrics)
        self.console.step(step, metrics)
        warning = self.speed.drafts.fallen(metrics)
        if warning:
            self.note(f"step {step}: {warning}")

    def show_ready(self, groups: int) -> None:
        """Shows the number of finished groups that no step has taken yet."""
        self.console.show_ready(groups, self.cfg.prompts_per_step)

    def note(self, message: str) -> None:
        """Prints a line above the bars."""
        tqdm.write(message)

    def close(self) -> None:
        """Flushes and closes all files."""
        if not self.is_open:
            return
        for part in (self.console, *self.files.values()):
            part.close()
        for name, board in list(self.boards.items()):
            self.attempt(name, board.close)
