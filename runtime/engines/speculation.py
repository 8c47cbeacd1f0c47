"""Drafts of tokens (speculative decoding): whether a drafter ages, and when it has aged."""

import json
import math
import statistics
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

WEIGHTLESS = {"ngram", "[ngram]", "ngram_gpu", "suffix"}  # methods that look tokens up
STEPS = 5  # whose mean is taken
FALL = 0.75  # of the mean that was named last, from where on the next one is
MARK = b'"draft_acceptance"'


def ageing(cfg: Any) -> str:
    """What a run says of its drafter when it starts; "" where no drafter has weights."""
    drafts = cfg.engine.args.get("speculative_config") if hasattr(cfg, "engine") else None
    if not drafts or drafts.get("method") in WEIGHTLESS:
        return ""
    rest = "it will be accepted less often as the policy moves: watch draft_acceptance"
    return f"note: no update trains the drafter of speculative_config: {rest}"


class Acceptance:
    """Warns of a run whose drafts are accepted less often than in its first steps."""

    def __init__(self, metrics: Path):
        """Takes in the lines that a run has written before it was stopped."""
        self.latest: deque[float] = deque(maxlen=STEPS)
        self.first = math.nan
        self.named = math.nan  # as `first`, which no mean is below
        if metrics.exists():
            with open(metrics, "rb") as lines:
                for line in lines:
                    if MARK in line:
                        self.fallen(json.loads(line))

    def fallen(self, step: Mapping[str, float]) -> str:
        """A line where the mean of the last steps has fallen by a quarter, or another; else ""."""
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
        fell = (
            f"draft_acceptance fell from {self.first:.2f} in the first {STEPS} steps to {mean:.2f}"
        )
        length = f"accepted_length is {step['accepted_length']:.2f}"
        remedy = "train the drafter on this policy's answers, or leave speculative_config out"
        return f"{fell}, {length}: {remedy}"
