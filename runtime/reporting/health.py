"""What the metrics of a run say of its health, in sentences; docs/debugging.md lists the limits."""

import statistics
from typing import Any, Literal, NamedTuple

from runtime.reporting.rollout_metrics import LIMIT, RECENT, gap

FAIR = 50  # steps of training after which validation should have risen
Series = dict[str, list]  # of each metric, and of `step`, a value for each step or None


class Finding(NamedTuple):
    """A sentence about a run."""

    level: Literal["wrong", "slow", "fine"]  # wrong: it does not learn, or its figures are false
    text: str


def health(series: Series, mismatch: list[dict], config: dict) -> list[Finding]:
    """The findings about a run, from its metrics, the lines of mismatch.jsonl and config.json.

    A quantity that was not measured has no finding, nor has a count of 0.
    """
    known = {name: [v for v in column if v is not None] for name, column in series.items()}
    mean = {name: statistics.fmean(values[-RECENT:]) for name, values in known.items() if values}
    masked = mean.get("num_masked_seqs")
    sequences = (masked or 0) + mean.get("num_valid_samples", 0) or 1
    prompts = len(known.get("reward", [])) * (config.get("prompts_per_step") or 0)
    dropped = known.get("dropped_prompts", [0])[-1]
    left_out = sum(known.get("validation_dropped", []))
    lost = sum(known.get("nonfinite_engine_logprobs", []))
    norms = zip(series.get("reward", []), series.get("grad_norm", []), strict=False)
    broken = sum(reward is not None and norm is None for reward, norm in norms)
    every: list[tuple[Any, float, str]] = [  # a value, the highest without alarm, and the sentence
        (gap(mismatch), LIMIT, "At lag 0 trainer and engine differ by {:.2g} nats."),
        (mean.get("truncated_samples"), 0.25, "{:.0%} of the answers were cut off."),
        (mean.get("zero_variance_groups"), 0.9, "{:.0%} of the groups had equal rewards."),
        (masked and masked / sequences, 0.02, "{:.1%} of the sequences were masked."),
        (dropped or None, prompts / 100, "Dropped prompts: {}."),
        (left_out or None, 0, "Validation prompts that were dropped: {}."),
        (lost or None, 0, "Logprobs of engines that are not finite: {:.0f}."),
        (broken or None, 0, "Steps whose gradient norm is not finite: {}."),
    ]
    known_ones = [rule for rule in every if rule[0] is not None]
    found = [  # written so that NaN is wrong
        Finding("fine" if value <= most else "wrong", text.format(value))
        for value, most, text in known_ones
    ]
    return progress(series) + found + speed(series, config)


def speed(series: Series, config: dict) -> list[Finding]:
    """How long each side waited for the other, and what helps where that was most of the time."""
    waiting = 0.75 if config.get("max_lag") else 1  # at lag 0 the two sides take turns
    sides = {
        "trainer": ("wait_for_rollouts", "generation", "engine.count or max_lag"),
        "engines": ("wait_for_training", "training", "policy.ranks"),
    }
    found: list[Finding] = []
    for name, (wait, slower, remedy) in sides.items():
        waited = share(series, wait)
        text = f"The {name} waited {waited or 0:.0%} of the time"
        if waited is not None and waited > waiting:
            text += f": {slower} is the slower side, so raise {remedy}"
            found.append(Finding("slow", f"{text}."))
        elif waited is not None:
            found.append(Finding("fine", f"{text}."))
    return found


def progress(series: Series) -> list[Finding]:
    """Whether the last validation is above the first; it is wrong only after FAIR steps."""
    # An environment that never scores 1 has no right answers to count.
    exact = any(series.get("validation_exact", []))
    names = {"validation_exact": "Right validation answers"} if exact else {}
    names |= {"validation_reward": "Validation reward"}
    names |= {"validation_accuracy": "Accuracy on validation pairs"}
    name = next((name for name in names if name in series), "validation_reward")
    column = series.get(name, [])
    every = zip(series.get("step", []), column, strict=False)
    points = [(step, value) for step, value in every if value is not None]
    if len(points) < 2:
        return []
    (start, first), (end, last) = points[0], points[-1]
    best = max(value for _, value in points)
    # More than the noise of a run that has reached its level.
    fell = best - last > max((best - first) / 2, abs(best) / 4)
    form = "{:.3g}" if name == "validation_reward" else "{:.0%}"
    text = names[name]
    text += " rose" if last > first else " did not rise"
    text += f" from {form.format(first)} (step {start}) to {form.format(last)} (step {end})"
    text += f", after {form.format(best)} at best." if fell else "."
    right = last == 1 and name != "validation_reward"  # it cannot rise
    wrong = end - start >= FAIR and ((last <= first and not right) or fell)
    return [Finding("wrong" if wrong else "fine", text)]


def share(series: Series, wait: str) -> float | None:
    """The share of the steps' time that a wait took, without step 1, which contains the start."""
    every = zip(series.get("step_seconds", []), series.get(wait, []), strict=False)
    steps = [times for times in every if None not in times][1:]
    # The engines' wait may contain an evaluation, which is no part of a step.
    seconds = sum(times[0] for times in steps)
    return sum(map(min, steps)) / seconds if seconds else None
