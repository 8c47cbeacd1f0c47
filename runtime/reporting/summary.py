"""Sums up a run when it ends: its validation, an answer, the model, the next command."""

import os
import re
import shlex
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from tqdm import tqdm

from core import jsonl
from core.errors import shown
from runtime.checkpoints.folders import newest_first, step_of
from runtime.reporting.console import BEGAN

if TYPE_CHECKING:
    from settings.config import TrainingSettings


ANSWER = {"prompt": str, "response": [str], "reward": int | float}
# Variables that the previous command may have set for itself alone; never an API key.
WANDB = (
    "WANDB_MODE",
    "WANDB_PROJECT",
    "WANDB_ENTITY",
    "WANDB_RUN_GROUP",
    "WANDB_NAME",
    "WANDB_TAGS",
)
TAIL = 1 << 22  # bytes of rollouts.jsonl that are searched for the last answer


def summary(cfg: "TrainingSettings") -> list[str]:
    """Returns the result of a run in lines: validation, an answer, the model, the next command."""
    folder = Path(cfg.writes_to)
    metrics = list(jsonl.read(folder / "metrics.jsonl", jsonl.METRICS))
    lines = [f"done in {tqdm.format_interval(time.monotonic() - BEGAN)}"]
    alone = "eval_only" in cfg.command.modes  # earlier lines in the folder belong to other policies
    for name in ("validation_reward", "validation_exact", "validation_accuracy"):
        values = [line[name] for line in metrics if isinstance(line.get(name), int | float)]
        if values and alone:
            lines.append(f"{name}: {values[-1]:.3f}")
        elif values:
            lines.append(f"{name}: {values[0]:.3f} -> {values[-1]:.3f} ({max(values):.3f} at best)")
    answer = last_answer(folder)
    if answer:
        lines.append(f"prompt: {in_a_line(answer['prompt'])}")
        lines.append(f"answer: {in_a_line(' '.join(answer['response']))}")
        lines.append(f"reward of this answer: {answer['reward']:.3g}")
    dropped = metrics[-1].get("dropped_prompts") if metrics else None
    if dropped:
        reasons = shown(folder / "dropped.jsonl")
        lines.append(f"dropped prompts: {dropped:.0f}, with reasons in {reasons}")
    checkpoints = newest_first(cfg.writes_to)
    if checkpoints:
        newest = checkpoints[0]
        lines.append(f"model: {shown(newest / 'hf')}, which transformers and vLLM load")
        if not cfg.command.modes:
            lines.append(f"next: {train_on(cfg, step_of(newest))}")
    return lines


def last_answer(folder: Path) -> dict | None:
    """Returns a run's last validation rollout, else its last training rollout, else None."""
    path = folder / "rollouts.jsonl"
    if not path.exists():
        return None
    with open(path, "rb") as file:
        file.seek(max(0, path.stat().st_size - TAIL))
        text = file.read().decode(errors="replace")
    rollouts = list(jsonl.parse(text.splitlines(), ANSWER))
    validation = [rollout for rollout in rollouts if rollout.get("evaluation") is not None]
    return (validation or rollouts or [{}])[-1] or None


def in_a_line(text: str) -> str:
    """Returns the start of a model's text, without control characters."""
    visible = "".join(letter if letter.isprintable() else " " for letter in text)
    return " ".join(visible.split())[:200]


def train_on(cfg: "TrainingSettings", step: int) -> str:
    """Returns the command that continues this run, with twice the steps if it has ended."""
    words = ["--run_dir", shown(cfg.run_dir), "--resume", "auto"]
    replaced = "run[_-]dir|resume"
    if step == cfg.steps:
        words += ["--steps", str(2 * cfg.steps)]
        replaced += "|steps"
    board = {name: os.environ[name] for name in WANDB if cfg.wandb and name in os.environ}
    given = shlex.join([shown(sys.executable), *sys.argv])
    given = re.sub(rf" --({replaced})[ =]('[^']*'|\S+)", "", given)
    variables = "".join(f"{name}={shlex.quote(value)} " for name, value in board.items())
    return f"{variables}{given} {shlex.join(words)}"
