"""Progress bars of a run, for a terminal."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from tqdm import tqdm

from runtime.reporting.console import shown_metrics

if TYPE_CHECKING:
    from settings.config import TrainingSettings


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
