"""Where a run writes: JSON lines, TensorBoard, W&B, the console, and its report at the end."""

import asyncio
import dataclasses
import hashlib
import json
import math
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

import report
from envs.rollout.episode import SampleInfo
from runtime import lineage
from runtime.checkpoints import EXPORT, MARKER
from runtime.console import Bars, Lines, summary
from runtime.dispatch import Slot
from runtime.health import LIMIT, gap
from runtime.metrics import mismatch_rows, rollout_metrics, validation_metrics
from runtime.provenance import provenance
from settings.reader import shown
from settings.run import RunSettings, TrainingSettings

if TYPE_CHECKING:
    from grpo_async import Group


GOLDEN = (5**0.5 - 1) / 2  # whose multiples, modulo 1, are spread evenly


class WriteError(Exception):
    """The run folder does not take what is written to it, so no prompt is at fault."""


class LineFile:
    """A JSONL file to append to, which holds whole lines only."""

    def __init__(self, path: Path):
        """Half a line that a killed writer left is cut off."""
        self.path = path
        self.file = open(path, "ab+", buffering=0)  # noqa: SIM115
        size = self.file.seek(0, os.SEEK_END)
        start = self.file.seek(max(0, size - (1 << 26)))  # no line is longer
        self.file.truncate(start + self.file.read().rfind(b"\n") + 1)

    def append(self, content: bytes) -> None:
        """Writes lines, all or none. Raises WriteError with the file, the reason and the bytes."""
        before = self.file.seek(0, os.SEEK_END)
        done = 0
        try:
            while done < len(content):  # a full disk takes a part, and refuses the rest
                done += self.file.write(content[done:])
        except OSError as error:
            self.file.truncate(before)
            told = f"{self.path}: {done} of {len(content)} bytes could be written: {error}"
            raise WriteError(told) from error

    def close(self) -> None:
        """Closes the file, in which nothing is buffered."""
        self.file.close()


def rollout_lines(slot: Slot, lines: list[dict], cfg: RunSettings) -> bytes:
    """A slot's group for rollouts.jsonl; nothing where it is not of the share to be written."""
    if slot.number * GOLDEN % 1 >= cfg.rollout_log_share:
        return b""
    place = slot.record(cfg.prompts_per_step)
    return "".join(json.dumps(place | line, default=str) + "\n" for line in lines).encode()


def artifact(name: str, kind: str, path: Path) -> Any:
    """What W&B keeps of a file or folder: where it is and, of a model, its lineage."""
    import wandb

    made = wandb.Artifact(name, type=kind, metadata=lineage.read(path))
    made.add_reference(f"file://{path.resolve()}", checksum=False)
    return made


def portable(value: Any) -> Any:
    """Settings as any JSON parser reads them: infinity, which JSON lacks, is the text "inf"."""
    if isinstance(value, dict):
        return {name: portable(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [portable(inner) for inner in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


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

    def open(self, cfg: TrainingSettings, version: int) -> None:
        """Opens the files behind policy version `version`."""
        self.is_open = True
        self.cfg = cfg
        folder = Path(cfg.run_dir)
        folder.mkdir(parents=True, exist_ok=True)
        settings = portable(dataclasses.asdict(cfg))
        start = provenance() | settings
        aside = folder / "config.partial"
        aside.write_text(json.dumps(start, indent=1))
        aside.replace(folder / "config.json")
        lineage.begin(cfg, start)
        self.files = {name: LineFile(folder / f"{name}.jsonl") for name in self.names}
        self.line(
            "starts", {"time": time.strftime("%Y-%m-%d %H:%M:%S"), "version": version} | start
        )
        from torch.utils.tensorboard import SummaryWriter  # a second of imports, after all checks

        self.board = SummaryWriter(str(folder), purge_step=version + 1)
        self.wandb: Any = None
        self.published: set[Path] = set()  # markers of the exports that W&B knows
        if cfg.wandb:
            import wandb

            unique = hashlib.sha256(str(folder).encode()).hexdigest()[:16]
            name = {"dir": folder, "name": folder.name, "id": unique, "resume": "allow"}
            self.wandb = wandb.init(config=settings, **name)
            # Its own step never goes back, as that of a run does which is resumed.
            self.wandb.define_metric("*", step_metric="step")
            if not self.wandb.offline:
                rows = artifact("DataBlendsArtifact-rl", "dataset", Path(cfg.data.train))
                self.wandb.use_artifact(rows)
        self.began = time.time()
        self.console = (Bars if sys.stderr.isatty() else Lines)(cfg)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Appends the metrics of the step that led to policy version `step`."""
        self.line("metrics", {"step": step, "seconds": time.time() - self.began, **metrics})
        for name, value in metrics.items():
            self.board.add_scalar(name, value, step)
        if self.wandb:
            self.wandb.log({"step": step, **metrics})
            self.publish()

    def publish(self) -> None:
        """Tells W&B of the exported models that are whole and that it does not know."""
        for marker in sorted(Path(self.cfg.run_dir).glob(f"step_*/{EXPORT}{MARKER}")):
            if marker not in self.published:
                model = artifact("ModelArtifact-rl", "model", marker.parent)
                self.wandb.log_artifact(model, aliases=[marker.parents[1].name, "latest"])
                self.published.add(marker)

    def line(self, name: str, content: dict) -> None:
        """Appends a line to one of the files. Raises WriteError."""
        self.files[name].append(json.dumps(content).encode() + b"\n")

    async def rollouts(self, lines: bytes) -> None:
        """Appends a group's lines while the event loop goes on. Raises WriteError."""
        if not lines:  # of a group that is not to be written
            return
        async with self.writing:
            await asyncio.to_thread(self.files["rollouts"].append, lines)

    def mismatch(self, step: int, tables: list[dict]) -> None:
        """Writes a step's mismatch table; warns where trainer and engine disagree at lag 0.

        Under an older policy they differ because the policy has moved, which is no error.
        """
        table = {"step": step, "rows": mismatch_rows(tables)}
        self.line("mismatch", table)
        nats = gap([table])
        if nats is not None and not nats <= LIMIT:
            apart = f"trainer and engine are {nats:.3f} nats a token apart at lag 0"
            self.note(f"step {step}: {apart}, more than {LIMIT}; see docs/debugging.md")

    def drop(self, slot: Slot, prompt: int, row: str, error: BaseException) -> None:
        """Writes down a prompt that was given up, its place in the stream, and why.

        Raises the error where it is a WriteError: the run must end, and the prompt is good.
        """
        if isinstance(error, WriteError):
            raise error
        place = {"slot": slot.number, "evaluation": slot.evaluation, "prompt": prompt, "row": row}
        self.line("dropped", place | {"reason": type(error).__name__, "error": str(error)})
        self.note(f"{row} dropped: {in_one_line(error)}")

    def evaluation(self, version: int, answered: list[list[SampleInfo]], dropped: int) -> None:
        """Writes the validation metrics of a version, from the answers to each prompt but some."""
        found = validation_metrics(answered, self.cfg.data.val_samples, dropped)
        self.write(version, found)
        exact = f"exact {found['validation_exact']:.3f}"
        exact += f" (dropped prompts: {dropped})" if dropped else ""
        self.note(f"version {version}: validation reward {found['validation_reward']:.3f}, {exact}")

    def step(self, step: int, groups: list["Group"], stats: dict[str, float]) -> None:
        """Writes the step on these groups that led to version `step`, and shows it."""
        trained = step - 1 if not self.cfg.command.rollout_only else 0
        self.trained(step, stats | rollout_metrics(groups, trained))

    def trained(self, step: int, metrics: Mapping[str, float]) -> None:
        """Writes the training step that led to version `step`, and shows it."""
        self.write(step, metrics)
        self.console.step(step, metrics)

    def show_ready(self, groups: int) -> None:
        """Shows how many finished groups no step has taken yet."""
        self.console.show_ready(groups, self.cfg.prompts_per_step)

    def note(self, message: str) -> None:
        """A line above the bars."""
        tqdm.write(message)

    def close(self) -> None:
        """Flushes what is buffered, draws the report, and says what came out of the run."""
        if not self.is_open:
            return
        for part in (self.console, *self.files.values(), self.board):
            part.close()
        if self.wandb:
            self.publish()
            self.wandb.finish()
        try:
            report.draw(self.cfg.run_dir)
            page = f"report: {shown(report.write(self.cfg.run_dir))}"
        except Exception as error:  # the run was good, and report.py can be called again
            page = f"no report: {in_one_line(error)}"
        print("\n".join([*summary(self.cfg), page]), flush=True)
