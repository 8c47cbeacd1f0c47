"""Sums up a run when it ends: its validation, an answer, the model, the next command."""

import os
import re
import shlex
import sys
import time
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError, safe_open
from tqdm import tqdm

from core import jsonl
from core.errors import shown
from runtime.checkpoints.folders import newest_first, step_of
from runtime.reporting.console import BEGAN
from runtime.reporting.validation_metrics import counted

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
TAIL = 1 << 22  # bytes of rollouts.jsonl that are searched for an answer


def summary(cfg: "TrainingSettings") -> list[str]:
    """Returns the result of a run in lines: validation, an answer, the model, the next command."""
    folder = Path(cfg.writes_to)
    metrics = list(jsonl.read(folder / "metrics.jsonl", jsonl.METRICS))
    lines = [f"done in {tqdm.format_interval(time.monotonic() - BEGAN)}"]
    alone = "eval_only" in cfg.command.modes  # earlier lines in the folder belong to other policies
    for name in ("validation_reward", "validation_exact", "validation_accuracy"):
        measured = [line for line in metrics if isinstance(line.get(name), int | float)]
        if not measured:
            continue
        last = shown_value(measured[-1], name)
        if alone:
            lines.append(f"{name}: {last}")
            continue
        first = shown_value(measured[0], name)
        best = shown_value(max(measured, key=itemgetter(name)), name)
        lines.append(f"{name}: {first} -> {last} ({best} at best)")
    answer = typical_answer(folder)
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
        lines += model_lines(newest / "hf", metrics)
        if not cfg.command.modes:
            lines.append(f"next: {train_on(cfg, step_of(newest))}")
    return lines


def shown_value(line: dict, name: str) -> str:
    """Formats a validation metric of a line; right answers as their number, if it is known."""
    answers = line.get("validation_answers")
    if name == "validation_exact" and isinstance(answers, int) and answers > 0:
        return counted(line[name], answers)
    return f"{line[name]:.3f}"


def model_lines(export: Path, metrics: list[dict]) -> list[str]:
    """Returns an exported model with its type, what bf16 loses of training, and how to serve it.

    vLLM reads float32 as bf16 unless told otherwise. Only runs on CPUs export float32; on a CPU,
    vLLM would take 92 % of the memory for its cache. The loss is the one of the last step that
    measured it.
    """
    folder = shown(export)
    dtype = stored_type(export)
    losses = [line.get("bf16_lost_update") for line in metrics]
    known = [loss for loss in losses if isinstance(loss, int | float)]
    if not dtype:
        text = f"model: {folder}"
    elif not known:
        text = f"model: {folder}, in {dtype}"
    elif dtype == "bfloat16":
        text = (
            f"model: {folder}, in bfloat16 as engines read it; "
            f"rounding has lost {known[-1]:.0%} of the update"
        )
    else:
        text = (
            f"model: {folder}, in {dtype} as it was trained; read as bfloat16, it loses "
            f"{known[-1]:.0%} of the update"
        )
    server = [shown(sys.executable), "-m", "vllm.entrypoints.openai.api_server"]
    server += ["--host", "127.0.0.1", "--model", folder]
    if dtype:
        server += ["--dtype", dtype]
    memory = "VLLM_CPU_KVCACHE_SPACE=1 " if dtype == "float32" else ""  # GiB
    return [text, f"serve: {memory}{shlex.join(server)}"]


def stored_type(model: Path) -> str:
    """Returns the type of a model's tensors, as torch names it; "" if it has no readable file."""
    names = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
    for path in sorted(model.glob("*.safetensors")):
        try:
            with safe_open(path, "np") as file:
                for name in sorted(file.keys()):
                    return names.get(file.get_slice(name).get_dtype(), "")
        except (OSError, SafetensorError):
            return ""
    return ""


def typical_answer(folder: Path) -> dict | None:
    """Returns a rollout of a run's last evaluation, else of its last training step, else None.

    Of those with the highest reward, it is the one whose answer has the median length.
    """
    path = folder / "rollouts.jsonl"
    if not path.exists():
        return None
    with open(path, "rb") as file:
        file.seek(max(0, path.stat().st_size - TAIL))
        text = file.read().decode(errors="replace")
    rollouts = list(jsonl.parse(text.splitlines(), ANSWER))
    validation = [rollout for rollout in rollouts if rollout.get("evaluation") is not None]
    if not rollouts:
        return None
    if validation:
        found = [one for one in validation if one["evaluation"] == validation[-1]["evaluation"]]
    else:
        found = [one for one in rollouts if one.get("step") == rollouts[-1].get("step")]
    best = max(one["reward"] for one in found)
    found = [one for one in found if one["reward"] == best]
    found.sort(key=lambda one: len("".join(one["response"])))
    return found[len(found) // 2]


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
