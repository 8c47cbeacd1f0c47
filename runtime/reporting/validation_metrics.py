"""Computes the metrics of an evaluation: rewards, share of right answers, pass@k, failed rows."""

import itertools
import math
import statistics
from typing import TYPE_CHECKING

from runtime.reporting.rollout_metrics import by_origin, component_metrics

if TYPE_CHECKING:
    from rollout.episode import SampleInfo


def validation_metrics(
    answered: "list[list[SampleInfo]]", k: int, dropped: int = 0
) -> dict[str, float]:
    """Computes mean reward, share of right answers (score 1), info and, if k > 1, pass@k.

    `answered` holds the answers to each prompt that was not dropped. Rewards are shaped, scores are
    not.
    """
    # An episode that spans several sequences counts once.
    last = [[info for info in infos if not info.continues] for infos in answered]
    found: dict[str, float] = {"validation_dropped": dropped} if dropped else {}
    for suffix, prompts in by_origin(last).items():
        answers = list(itertools.chain(*prompts))
        found[f"validation_answers{suffix}"] = len(answers)
        found[f"validation_reward{suffix}"] = statistics.fmean(i.reward for i in answers)
        found[f"validation_exact{suffix}"] = statistics.fmean(i.score >= 1 for i in answers)
        if k > 1:
            right = statistics.fmean(any(i.score >= 1 for i in infos) for infos in prompts)
            found[f"validation_pass@{k}{suffix}"] = right
    components = component_metrics(list(itertools.chain(*last)))
    return found | {f"validation_{name}": value for name, value in components.items()}


def validation_line(found: dict[str, float]) -> str:
    """Formats the evaluation metrics that are shown."""
    dropped = found.get("validation_dropped", 0)
    of_dropped = f" (dropped prompts: {dropped})" if dropped else ""
    right = counted(found["validation_exact"], int(found["validation_answers"]))
    return f"validation reward {found['validation_reward']:.3f}, exact {right}{of_dropped}"


def counted(share: float, answers: int) -> str:
    """Formats a share of answers as their number, and an interval for the share."""
    low, high = interval(share, answers)
    return f"{round(share * answers)}/{answers} [{low:.2f}, {high:.2f}]"


def interval(share: float, answers: int) -> tuple[float, float]:
    """Returns Wilson's 95 % interval for a share of independent answers.

    Answers to the same prompt resemble each other: with several, the true interval is wider.
    """
    z = 1.96
    middle = share + z * z / (2 * answers)
    half = z * math.sqrt(share * (1 - share) / answers + (z / (2 * answers)) ** 2)
    scale = 1 + z * z / answers
    return max(0.0, (middle - half) / scale), min(1.0, (middle + half) / scale)
