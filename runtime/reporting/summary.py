"""What a run prints when it ends: what it learned, an answer, the model, what is next."""

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
# What the call before may have set for itself alone; never a key.
WANDB = [f"WANDB_{name}" for name in ["MODE", "PROJECT", "ENTITY", "RUN_GROUP", "NAME", "TAGS"]]
TAIL = 1 << 22  # bytes of rollouts.jsonl in which the last answer is looked for


def summary(cfg: "TrainingSettings") -> list[str]:
    """What came out of a run, line by line: what it learned, an answer, the model, what is next."""
    folder = Path(cfg.writes_to)
    metrics = list(jsonl.read(folder / "metrics.jsonl", jsonl.METRICS))
    lines = [f"done in {tqdm.format_interval(time.monotonic() - BEGAN)}"]
    alone = "eval_only" in cfg.command.modes  # earlier ones in its folder were of other policies
    for name in ("validation_reward", "validation_exact", "validation_accuracy"):
        values = [line[name] for line in metrics if isinstance(line.get(name), int | float)]
        if values and alone:
            lines.append(f"{name}: {values[-1]:.3f}")
        elif values:
            best = f"{max(values):.3f} at best"
            lines.append(f"{name}: {values[0]:.3f} -> {values[-1]:.3f} ({best})")
    if answer := last_answer(folder):
        told = {"prompt": answer["prompt"], "answer": " ".join(answer["response"])}
        lines += [f"{name}: {in_a_line(text)}" for name, text in told.items()]
        lines.append(f"reward of this answer: {answer['reward']:.3g}")
    if dropped := metrics and metrics[-1].get("dropped_prompts"):
        reasons = shown(folder / "dropped.jsonl")
        lines.append(f"dropped prompts: {dropped:.0f}, with reasons in {reasons}")
    if checkpoints := newest_first(cfg.writes_to):
        newest = checkpoints[0]
        lines.append(f"model: {shown(newest / 'hf')}, which transformers and vLLM load")
        if not cfg.command.modes:
            lines.append(f"next: {train_on(cfg, step_of(newest))}")
    return lines


def last_answer(folder: Path) -> dict | None:
    """The last validation rollout of a run, or its last one of training; None without any."""
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
    """The start of a text of the model, without what a terminal would obey."""
    visible = "".join(letter if letter.isprintable() else " " for letter in text)
    return " ".join(visible.split())[:200]


def train_on(cfg: "TrainingSettings", step: int) -> str:
    """The command that goes on with this run; where it is at its end, for as many steps again."""
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
