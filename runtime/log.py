"""Where a run writes: JSON lines, TensorBoard, W&B, progress bars, and its report at the end."""

import dataclasses
import hashlib
import json
import os
import sys
import time
from collections.abc import Mapping
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

import report
from envs.episode import SampleInfo
from runtime.dispatch import Slot
from runtime.metrics import mismatch_rows, rollout_metrics, validation_metrics

if TYPE_CHECKING:
    from grpo_async import Config, Group

ALARM = 1.05  # of token_mult_prob_error: NeMo-RL's rule of thumb


def append_to(path: Path) -> FileIO:
    """An unbuffered file to append lines to; half a line that a killed writer left is cut off."""
    file = open(path, "ab+", buffering=0)  # noqa: SIM115
    size = file.seek(0, os.SEEK_END)
    start = file.seek(max(0, size - (1 << 26)))  # no line is longer
    file.truncate(start + file.read().rfind(b"\n") + 1)
    return file


class RolloutLog:
    """rollouts.jsonl, or one such file for each of several rollout workers."""

    def __init__(self, cfg: "Config", rank: int):
        self.cfg = cfg
        suffix = f".{rank}" if cfg.rollout_workers > 1 else ""
        self.file = append_to(Path(cfg.run_dir) / f"rollouts{suffix}.jsonl")

    def append(self, slot: Slot, lines: list[dict]) -> None:
        """Writes the lines of a slot's group at once: who is killed leaves no half line."""
        place = slot.record(self.cfg.prompts_per_step)
        text = "".join(json.dumps(place | line, default=str) + "\n" for line in lines)
        self.file.write(text.encode())


def in_one_line(error: BaseException) -> str:
    """The last line of an error, after the place in a file that a remote traceback names last."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [repr(error)]
    places = [line for line in lines if line.startswith('File "')]
    return ": ".join([*places[-1:], lines[-1]])


class Log:
    """metrics.jsonl, TensorBoard, W&B if asked for, and two progress bars."""

    FILES = ("metrics", "mismatch", "dropped")

    def __init__(self) -> None:
        self.is_open = False

    def open(self, cfg: "Config", version: int) -> None:
        """Opens the files behind policy version `version`."""
        self.is_open = True
        self.cfg = cfg
        folder = Path(cfg.run_dir)
        folder.mkdir(parents=True, exist_ok=True)
        settings = {"program": Path(sys.argv[0]).name, **dataclasses.asdict(cfg)}
        (folder / "config.json").write_text(json.dumps(settings, indent=1))
        self.files = {
            name: open(folder / f"{name}.jsonl", "a", buffering=1)  # noqa: SIM115
            for name in self.FILES
        }
        from torch.utils.tensorboard import SummaryWriter  # a second of imports, after all checks

        self.board = SummaryWriter(str(folder), purge_step=version + 1)
        self.wandb: Any = None
        if cfg.wandb:
            import wandb

            unique = hashlib.sha256(str(folder).encode()).hexdigest()[:16]
            name = {"dir": folder, "name": folder.name, "id": unique, "resume": "allow"}
            self.wandb = wandb.init(config=settings, **name)
            # Its own step never goes back, as that of a run does which is resumed.
            self.wandb.define_metric("*", step_metric="step")
        self.began = time.time()
        bar = {"initial": version, "desc": "steps", "unit": "step", "position": 0}
        self.steps = tqdm(total=cfg.steps, **bar)
        ready = {"total": cfg.prompts_per_step, "desc": "groups ready", "unit": "group"}
        self.ready = tqdm(**ready, position=1, leave=False)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Appends the metrics of the step that led to policy version `step`."""
        self.line("metrics", {"step": step, "seconds": time.time() - self.began, **metrics})
        for name, value in metrics.items():
            self.board.add_scalar(name, value, step)
        if self.wandb:
            self.wandb.log({"step": step, **metrics})
        if "validation_reward" in metrics:
            self.note(f"step {step}: validation reward {metrics['validation_reward']:.3f}")

    def line(self, name: str, content: dict) -> None:
        """Appends a line to one of the files."""
        self.files[name].write(json.dumps(content) + "\n")

    def mismatch(self, step: int, tables: list[dict]) -> None:
        """Writes a step's mismatch table."""
        self.line("mismatch", {"step": step, "rows": mismatch_rows(tables)})

    def drop(self, slot: Slot, prompt: int, row: str, error: BaseException) -> None:
        """Writes down a prompt that was given up, its place in the stream, and why."""
        place = {"slot": slot.number, "evaluation": slot.evaluation, "prompt": prompt, "row": row}
        self.line("dropped", place | {"reason": type(error).__name__, "error": str(error)})
        self.note(f"{row} dropped: {in_one_line(error)}")

    def evaluation(self, version: int, answered: list[list[SampleInfo]]) -> None:
        """Writes the validation metrics of a policy version, from the answers to each prompt."""
        self.write(version, validation_metrics(answered, self.cfg.data.val_samples))

    def step(self, step: int, groups: list["Group"], stats: dict[str, float]) -> None:
        """Writes the training step that led to version `step`, and moves its bar on."""
        trained = step - 1 if not self.cfg.command.rollout_only else 0
        metrics = stats | rollout_metrics(groups, trained)
        self.write(step, metrics)
        self.steps.update()
        if metrics.get("token_mult_prob_error", 1.0) > ALARM:
            error = f"token_mult_prob_error {metrics['token_mult_prob_error']:.3f} > {ALARM}"
            self.note(f"step {step}: {error}: trainer and engine disagree, see docs/debugging.md")
        self.steps.set_postfix(
            reward=f"{metrics['reward']:.3f}",
            lag=f"{metrics['lag_mean']:.2f}",
            trainer_waited=f"{metrics['wait_for_rollouts']:.2f}s",
            engines_waited=f"{metrics['wait_for_training']:.2f}s",
        )

    def show_ready(self, groups: int) -> None:
        """Shows how many finished groups no step has taken yet."""
        self.ready.update(groups - self.ready.n)

    def note(self, message: str) -> None:
        """A line above the bars."""
        tqdm.write(message)

    def close(self) -> None:
        """Ends the bars, flushes what is buffered, and draws the report."""
        if not self.is_open:
            return
        for part in (self.ready, self.steps, *self.files.values(), self.board):
            part.close()
        if self.wandb:
            self.wandb.finish()
        report.draw(self.cfg.run_dir)
        print(f"report: {report.write(self.cfg.run_dir)}")
