"""Where a run writes: JSON lines, TensorBoard, W&B and the console."""

import asyncio
import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from core.errors import RunError
from core.jsonl import LineFile, WriteError
from core.waits import in_thread, within
from runtime.reporting import config_json
from runtime.reporting.console import Bars, Lines
from runtime.reporting.rollout_metrics import (
    disagreement,
    mismatch_rows,
    rollout_metrics,
)
from runtime.reporting.validation_metrics import validation_line, validation_metrics
from settings.config import TrainingSettings

if TYPE_CHECKING:
    from rollout.episode import Group, SampleInfo
    from runtime.rollouts.dispatch import Slot


def in_one_line(error: BaseException) -> str:
    """The last line of an error, after the place in a file that a remote traceback names last."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [repr(error)]
    places = [line for line in lines if line.startswith('File "')]
    return ": ".join([*places[-1:], lines[-1]])


class Log:
    """metrics.jsonl, TensorBoard, W&B if asked for, and the console."""

    FILES = ("starts", "metrics", "mismatch", "dropped", "rollouts")

    def __init__(self, files: Sequence[str] = FILES) -> None:
        self.names = files
        self.cfg: Any = None  # of a run with rollouts or without
        self.is_open = False
        self.writing = asyncio.Lock()
        self.unwritten = b""  # lines of groups that came while others were written

    def open(self, cfg: TrainingSettings, version: int) -> None:
        """Opens the files behind policy version `version`."""
        self.is_open = True
        self.cfg = cfg
        folder = Path(cfg.writes_to)
        folder.mkdir(parents=True, exist_ok=True)
        self.files = {name: LineFile(folder / f"{name}.jsonl") for name in self.names}
        self.line("starts", config_json.write(cfg, folder, version))
        from torch.utils.tensorboard import SummaryWriter  # a second of imports, after all checks

        from runtime.reporting.speed import Speed, of_cluster

        self.speed = Speed(cfg, of_cluster())
        self.board = SummaryWriter(str(folder), purge_step=version + 1)
        self.wandb: Any = None
        if cfg.wandb:
            from runtime.reporting.wandb_board import Board

            self.wandb = Board(cfg, folder)
        self.began = time.time()
        self.console: Any = Lines(cfg)
        if sys.stderr.isatty():
            self.console = Bars(cfg)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Appends the metrics of the step that led to policy version `step`."""
        self.line("metrics", {"step": step, "seconds": time.time() - self.began, **metrics})
        for name, value in metrics.items():
            self.board.add_scalar(name, value, step)
        if self.wandb:
            self.wandb.write({"step": step, **metrics})

    def line(self, name: str, content: dict) -> None:
        """Appends a line to one of the files. Raises WriteError."""
        self.files[name].append(json.dumps(content).encode() + b"\n")

    async def rollouts(self, lines: bytes) -> None:
        """Appends a group's lines while the event loop goes on. Raises WriteError."""
        if not lines:  # of a group that is not of the share to be written
            return
        file, limit = self.files["rollouts"], self.cfg.timeouts.train
        self.unwritten += lines
        async with self.writing:
            lines, self.unwritten = self.unwritten, b""
            if not lines:
                return
            try:
                done = in_thread(file.append, lines)
                await within(limit, f"{file.path} to take lines", done, late=WriteError)
            except WriteError:  # the groups that wait must fail as well
                self.unwritten = lines + self.unwritten
                raise

    def mismatch(self, step: int, tables: list[dict]) -> None:
        """Writes a step's mismatch table; warns where trainer and engine disagree at lag 0."""
        table = {"step": step, "rows": mismatch_rows(tables)}
        self.line("mismatch", table)
        if apart := disagreement(table):
            self.note(f"step {step}: {apart}; see docs/debugging.md")

    def drop(self, slot: "Slot", prompt: int, row: str, error: BaseException) -> None:
        """Writes down a prompt that was given up, its place in the stream, and why.

        Raises the error where it is a RunError: the run must end, and the prompt is good.
        """
        if isinstance(error, RunError):
            raise error
        place = {"slot": slot.number, "evaluation": slot.evaluation, "prompt": prompt, "row": row}
        self.line("dropped", place | {"reason": type(error).__name__, "error": str(error)})
        self.note(f"{row} dropped: {in_one_line(error)}")

    def evaluation(self, version: int, answered: "list[list[SampleInfo]]", dropped: int) -> None:
        """Writes the validation metrics of a version, from the answers to each prompt but some."""
        found = validation_metrics(answered, self.cfg.data.val_samples, dropped)
        self.write(version, found)
        self.note(f"version {version}: {validation_line(found)}")

    def step(self, step: int, groups: "list[Group]", stats: dict[str, float]) -> None:
        """Writes the step on these groups that led to version `step`, and shows it."""
        named = {group.slot // self.cfg.prompts_per_step + 1 for group in groups}
        if named != {step}:  # a fork fills its batches otherwise
            wrong = f"step {step} trains slots that Slot.record gives to {sorted(named)}"
            raise RuntimeError(f"{wrong}: rollouts.jsonl names that. Change Slot.record as well")
        trained = step - 1 if not self.cfg.command.rollout_only else 0
        infos = [group.infos for group in groups]
        tokens = sum(info.tokens for of_group in infos for info in of_group)
        self.trained(step, stats | rollout_metrics(infos, trained) | {"batch_tokens": tokens})

    def trained(self, step: int, metrics: dict[str, float]) -> None:
        """Writes the training step that led to version `step`, and shows it."""
        metrics = self.speed.of(metrics)
        self.write(step, metrics)
        self.console.step(step, metrics)
        if fallen := self.speed.drafts.fallen(metrics):
            self.note(f"step {step}: {fallen}")

    def show_ready(self, groups: int) -> None:
        """Shows how many finished groups no step has taken yet."""
        self.console.show_ready(groups, self.cfg.prompts_per_step)

    def note(self, message: str) -> None:
        """A line above the bars."""
        tqdm.write(message)

    def close(self) -> None:
        """Flushes what is buffered."""
        if not self.is_open:
            return
        for part in (self.console, *self.files.values(), self.board):
            part.close()
        if self.wandb:
            self.wandb.close()
