"""What a run shows: what it waits for at first, then its steps, then what came out of it."""

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from tqdm import tqdm

if TYPE_CHECKING:
    from settings.config import TrainingSettings

BEGAN = time.monotonic()
# What is shown of a step: those of its metrics that are there.
SHOWN = {
    "reward": "reward {:.3f}",
    "lag_mean": "lag {:.2f}",
    "preference_loss": "preference loss {:.4f}",
    "accuracy": "accuracy {:.3f}",
    "rewards_margin_mean": "margin {:.2f}",
    "wait_for_rollouts": "trainer waited {:.2f} s",
    "tokens_per_second": "{:,.0f} tokens/s",
    "mfu": "MFU {:.1%}",
}


def phase(what: str) -> None:
    """Says what a run waits for before its first step, and the seconds since it began."""
    tqdm.write(f"{time.monotonic() - BEGAN:4.0f} s  {what}")


def shown_metrics(metrics: Mapping[str, float]) -> str:
    """What is shown of a step's metrics."""
    return "  ".join(form.format(metrics[k]) for k, form in SHOWN.items() if k in metrics)


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


# TC


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
