"""What a run shows: what it waits for at first, then its steps, then what came out of it."""

import re
import shlex
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from tqdm import tqdm

import report
from runtime.checkpoints import newest_first, step_of
from settings.reader import shown

if TYPE_CHECKING:
    from settings.run import TrainingSettings

BEGAN = time.monotonic()
ANSWER = {"prompt": str, "response": [str], "reward": int | float}
# What is shown of a step: those of its metrics that are there.
SHOWN = {
    "reward": "reward {:.3f}",
    "lag_mean": "lag {:.2f}",
    "preference_loss": "preference loss {:.4f}",
    "accuracy": "accuracy {:.3f}",
    "rewards_margin_mean": "margin {:.2f}",
    "wait_for_rollouts": "trainer waited {:.2f} s",
}
TAIL = 1 << 22  # bytes of rollouts.jsonl in which the last answer is looked for


def phase(what: str) -> None:
    """Says what a run waits for before its first step, and the seconds since it began."""
    tqdm.write(f"{time.monotonic() - BEGAN:4.0f} s  {what}")


def shown_metrics(metrics: Mapping[str, float]) -> str:
    """What is shown of a step's metrics."""
    return "  ".join(form.format(metrics[k]) for k, form in SHOWN.items() if k in metrics)


class Bars:
    """For a terminal: the steps that are done, and the groups that wait for the next one."""

    def __init__(self, cfg: "TrainingSettings"):
        self.cfg = cfg
        self.bars: list[tqdm] = []

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Shows a step. The first one starts the bars, so that start-up is not in their time."""
        if not self.bars:
            steps = {"initial": step - 1, "desc": "steps", "unit": "step", "position": 0}
            self.bars = [tqdm(total=self.cfg.steps, **steps)]
        self.bars[0].update()
        self.bars[0].set_postfix_str(shown_metrics(metrics))

    def show_ready(self, groups: int, of: int) -> None:
        """Shows how many finished groups no step has taken yet, of those of a step."""
        if len(self.bars) == 1:
            ready = {"desc": "groups ready", "unit": "group", "position": 1, "leave": False}
            self.bars.append(tqdm(total=of, **ready))
        for bar in self.bars[1:]:
            bar.update(groups - bar.n)

    def close(self) -> None:
        """Ends the bars."""
        for bar in reversed(self.bars):
            bar.close()


class Lines:
    """For a file: one line a step."""

    def __init__(self, cfg: "TrainingSettings"):
        self.cfg = cfg
        self.done = 0  # steps of this process
        self.began = 0.0  # when the first of them ended: before it is start-up

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Shows a step, and how long the rest will take."""
        now = time.monotonic()
        self.began = self.began or now
        seconds = (now - self.began) / max(self.done, 1) * (self.cfg.steps - step)
        self.done += 1
        left = f"  {tqdm.format_interval(seconds)} left" if self.done > 1 else ""
        print(f"step {step}/{self.cfg.steps}  {shown_metrics(metrics)}{left}", flush=True)

    def show_ready(self, groups: int, of: int) -> None:
        """Shows nothing between two steps."""

    def close(self) -> None:
        """Ends nothing."""


def summary(cfg: "TrainingSettings") -> list[str]:
    """What came out of a run, line by line: what it learned, an answer, the model, what is next."""
    folder = Path(cfg.run_dir)
    metrics = list(report.read(folder / "metrics.jsonl", report.METRICS))
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
    if checkpoints := newest_first(cfg.run_dir):
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
    rollouts = list(report.parse(text.splitlines(), ANSWER))
    validation = [rollout for rollout in rollouts if rollout.get("evaluation") is not None]
    return (validation or rollouts or [{}])[-1] or None


def in_a_line(text: str) -> str:
    """The start of a text of the model, without what a terminal would obey."""
    visible = "".join(letter if letter.isprintable() else " " for letter in text)
    return " ".join(visible.split())[:200]


def train_on(cfg: "TrainingSettings", step: int) -> str:
    """The command that goes on with this run; where it is at its end, for as many steps again."""
    words = ["--run_dir", shown(cfg.run_dir), "--resume", "auto"]
    if step == cfg.steps:
        words += ["--steps", str(2 * cfg.steps)]
    given = shlex.join([shown(sys.executable), *sys.argv])
    given = re.sub(r" --(run[_-]dir|resume|steps)[ =]('[^']*'|\S+)", "", given)
    return f"{given} {shlex.join(words)}"
