"""Warns about a drafter (speculative decoding) that ages as the policy moves."""

import json
import math
import statistics
from collections import deque
from collections.abc import Mapping
from pathlib import Path

from settings.config import RunSettings, TrainingSettings

WEIGHTLESS = {"ngram", "[ngram]", "ngram_gpu", "suffix"}  # methods that look tokens up
STEPS = 5  # number of steps whose mean is compared
FALL = 0.75  # a mean below this fraction of the one reported last is reported
MARK = b'"draft_acceptance"'


def ageing(cfg: TrainingSettings) -> str:
    """Returns the note on its drafter that a run prints first; "" if no drafter has weights."""
    if not isinstance(cfg, RunSettings):
        return ""
    drafts = cfg.engine.args.get("speculative_config")
    if not drafts or drafts.get("method") in WEIGHTLESS:
        return ""
    return (
        "note: no update trains the drafter of speculative_config: "
        "it will be accepted less often as the policy moves: watch draft_acceptance"
    )


class Acceptance:
    """The share of accepted drafts, compared with the share in a run's first steps."""

    def __init__(self, metrics: Path):
        """Reads the steps that the run wrote before it was stopped, from its metrics.jsonl."""
        self.latest: deque[float] = deque(maxlen=STEPS)
        self.first = math.nan
        self.named = math.nan  # the mean that was reported last; no mean is below NaN
        if metrics.exists():
            with open(metrics, "rb") as lines:
                for line in lines:
                    if MARK in line:
                        self.fallen(json.loads(line))

    def fallen(self, step: Mapping[str, float]) -> str:
        """Returns a warning if the mean of the last steps fell by another quarter; else ""."""
        if "draft_acceptance" not in step:
            return ""
        self.latest.append(step["draft_acceptance"])
        if len(self.latest) < STEPS:
            return ""
        mean = statistics.fmean(self.latest)
        if math.isnan(self.first):
            self.first = self.named = mean
        if mean >= FALL * self.named:
            return ""
        self.named = mean
        return (
            f"draft_acceptance fell from {self.first:.2f} in the first {STEPS} steps to "
            f"{mean:.2f}, accepted_length is {step['accepted_length']:.2f}: "
            "train the drafter on this policy's answers, or leave speculative_config out"
        )
