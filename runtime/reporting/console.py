"""Shows a run on the terminal: first what it is waiting for, then its steps."""

import os
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, cast

from tqdm import tqdm

if TYPE_CHECKING:
    from settings.config import TrainingSettings

BEGAN = time.monotonic()
# The step metrics that are shown, if the step has them.
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


class Outlet:
    """Standard output or error, for as long as somebody reads it; then /dev/null.

    The reader may be `head`, a `tee` that was killed, or a terminal whose connection was lost. The
    run does not end with it.
    """

    def __init__(self, stream: TextIO, name: str, log: Path):
        self.stream = stream
        self.name = name
        self.log = log

    def write(self, text: str) -> int:
        """Writes a text."""
        try:
            return self.stream.write(text)
        except OSError as error:
            self.close_for_good(error)
            return len(text)

    def flush(self) -> None:
        """Hands on what was written."""
        try:
            self.stream.flush()
        except OSError as error:
            self.close_for_good(error)

    def close_for_good(self, error: OSError) -> None:
        """Sends all that follows to /dev/null, and adds a line to the log."""
        with open(os.devnull, "w") as nothing:
            os.dup2(nothing.fileno(), self.stream.fileno())
        with suppress(OSError):  # a full disk
            self.log.parent.mkdir(parents=True, exist_ok=True)
            with open(self.log, "a") as file:
                file.write(f"{self.name}: {error}: what the run prints from now on is lost\n")

    def __getattr__(self, name: str) -> Any:
        """Returns any other attribute of the stream."""
        return getattr(self.stream, name)


def outlive_readers(folder: Path) -> None:
    """Keeps this program from ending if nobody reads its output any more; logs that in a folder."""
    log = folder / f"driver-{os.uname().nodename}-{os.getpid()}.log"
    sys.stdout = cast(TextIO, Outlet(sys.stdout, "stdout", log))
    sys.stderr = cast(TextIO, Outlet(sys.stderr, "stderr", log))


def phase(what: str) -> None:
    """Prints the seconds since a run began, and what it waits for before its first step."""
    tqdm.write(f"{time.monotonic() - BEGAN:4.0f} s  {what}")


def close_bars() -> None:
    """Ends all bars of this process, so that what follows is printed below them."""
    for bar in sorted(tqdm._instances, key=lambda bar: bar.pos):  # the lowest one first
        bar.close()


def shown_metrics(metrics: Mapping[str, float]) -> str:
    """Formats the step metrics that are shown."""
    return "  ".join(form.format(metrics[k]) for k, form in SHOWN.items() if k in metrics)


class Lines:
    """The display for a file: one line for each step."""

    def __init__(self, cfg: "TrainingSettings"):
        self.cfg = cfg
        self.done = 0  # steps done by this process
        self.began = 0.0  # when its first step ended: the time before that is start-up

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Shows a step, and the time that the remaining steps will take."""
        now = time.monotonic()
        self.began = self.began or now
        seconds = (now - self.began) / max(self.done, 1) * (self.cfg.steps - step)
        self.done += 1
        left = f"  {tqdm.format_interval(seconds)} left" if self.done > 1 else ""
        print(f"step {step}/{self.cfg.steps}  {shown_metrics(metrics)}{left}", flush=True)

    def show_ready(self, groups: int, of: int) -> None:
        """Does nothing: a file shows nothing between two steps."""

    def close(self) -> None:
        """Does nothing: a file display has nothing to close."""


class Bars:
    """The display for a terminal: bars of trained steps, and of groups ready for the next step."""

    def __init__(self, cfg: "TrainingSettings"):
        self.cfg = cfg
        self.bars: list[tqdm] = []

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Shows a step. The first step creates the bars, so they do not include start-up time."""
        if not self.bars:
            bar = tqdm(
                total=self.cfg.steps, initial=step - 1, desc="steps", unit="step", position=0
            )
            self.bars = [bar]
        self.bars[0].update()
        self.bars[0].set_postfix_str(shown_metrics(metrics))

    def show_ready(self, groups: int, of: int) -> None:
        """Shows how many finished groups no step has taken yet; `of` groups fill a step."""
        if len(self.bars) == 1:
            bar = tqdm(total=of, desc="groups ready", unit="group", position=1, leave=False)
            self.bars.append(bar)
        for bar in self.bars[1:]:
            bar.update(groups - bar.n)

    def close(self) -> None:
        """Closes the bars."""
        for bar in reversed(self.bars):
            bar.close()
