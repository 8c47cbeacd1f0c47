"""Settings of a training on pairs of answers."""

import dataclasses
from typing import Any

from pydantic import PositiveInt
from pydantic.dataclasses import dataclass as checked_dataclass

from settings.config import CHECKED, DataFiles, TrainingSettings


@checked_dataclass(frozen=True, config=CHECKED)
class PairData(DataFiles):
    """Rows of two answers, of which one is better."""

    train: str = "data/tiny_tools/train_pairs.jsonl"
    """Preference rows, used in file order, again from the top when they end."""
    chat_template_kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Variables of the chat template: {"enable_thinking": False}."""


@checked_dataclass(frozen=True, config=CHECKED)
class PairSettings(TrainingSettings):
    """A training on pairs of answers."""

    pairs_per_step: PositiveInt = 128
    """Pairs in a batch."""
    data: PairData = dataclasses.field(default_factory=PairData)
    """Training and validation rows."""

    @property
    def template_variables(self) -> tuple[str, dict[str, Any]]:
        """The setting that has the variables of the chat template, and those."""
        return "data.chat_template_kwargs", self.data.chat_template_kwargs
