"""Judges a run by its metrics, in sentences; docs/debugging.md lists the limits."""

import statistics
from collections.abc import Sequence
from typing import Literal, NamedTuple

from runtime.reporting.rollout_metrics import LIMIT, RECENT, gap
from runtime.reporting.validation_metrics import interval

FAIR = 50  # training steps after which validation should have risen
Series = dict[str, list]  # for each metric, and for `step`: its value at each step, or None


Level = Literal["wrong", "slow", "fine"]  # wrong: the run does not learn, or its figures are false


class Finding(NamedTuple):
    """A sentence about a run."""

    level: Level
    text: str


def health(
    series: Series, mismatch: list[dict], config: dict, answers: Sequence[str] = ()
) -> list[Finding]:
    """Judges a run by its metrics, the lines of mismatch.jsonl and config.json.

    Some of the newest `answers` are quoted if they seem to have collapsed.

    There is no finding for a quantity that was not measured, nor for a count of 0.
    """
    known = {name: [v for v in column if v is not None] for name, column in series.items()}
    mean = {name: statistics.fmean(values[-RECENT:]) for name, values in known.items() if values}
    masked = mean.get("num_masked_seqs")
    masked_share = None
    if masked is not None:
        masked_share = masked / (masked + mean.get("num_valid_samples", 0) or 1)
    prompts = len(known.get("reward", [])) * (config.get("prompts_per_step") or 0)
    dropped = known.get("dropped_prompts", [0])[-1]
    dropped_in_validation = sum(known.get("validation_dropped", []))
    nonfinite = sum(known.get("nonfinite_engine_logprobs", []))
    steps = zip(series.get("reward", []), series.get("grad_norm", []), strict=False)
    without_norm = sum(reward is not None and norm is None for reward, norm in steps)
    rules: list[tuple[float | None, float, str]] = [  # value, highest good value, sentence
        (gap(mismatch), LIMIT, "At lag 0, trainer and engine differ by {:.2g} nats."),
        (mean.get("truncated_samples"), 0.25, "{:.0%} of the answers were cut off."),
        (mean.get("zero_variance_groups"), 0.9, "{:.0%} of the groups had equal rewards."),
        (masked_share, 0.02, "{:.1%} of the sequences were masked."),
        (dropped or None, prompts / 100, "Dropped prompts: {}."),
        (dropped_in_validation or None, 0, "Validation prompts that were dropped: {}."),
        (nonfinite or None, 0, "Engine logprobs that are not finite: {:.0f}."),
        (without_norm or None, 0, "Steps whose gradient norm is not finite: {}."),
    ]
    found = []
    for value, limit, text in rules:
        if value is None:
            continue
        level: Level = "fine" if value <= limit else "wrong"  # NaN is wrong
        found.append(Finding(level, text.format(value)))
    return progress(series) + collapse(known, answers) + found + speed(series, config)


def collapse(known: Series, answers: Sequence[str]) -> list[Finding]:
    """Compares the last answers with the first ones, while the reward rises.

    Rewards for form are often earned most easily by a word: answers then shrink, agree with each
    other, and teach nothing more. Where there is one right answer, a good policy loses its entropy
    as well, and its groups agree: so neither is a sign by itself, but with half the length it is.
    """
    means: dict[str, tuple[float, float]] = {}
    for name in ("reward", "response_tokens", "entropy", "zero_variance_groups"):
        values = known.get(name, [])
        if len(values) >= 2 * RECENT:
            means[name] = statistics.fmean(values[:RECENT]), statistics.fmean(values[-RECENT:])
    if "reward" not in means or "response_tokens" not in means:
        return []
    first_reward, last_reward = means["reward"]
    first, last = means["response_tokens"]
    if last_reward <= first_reward or not first:
        return []
    first_entropy, last_entropy = means.get("entropy", (0.0, 0.0))
    first_equal, last_equal = means.get("zero_variance_groups", (0.0, 0.0))
    is_certain = last_entropy < first_entropy / 2 or last_equal > 2 * first_equal
    if last >= first / (2 if is_certain else 3):
        return [Finding("fine", f"Answers are {last / first:.0%} as long as at the start.")]
    text = (
        f"Answers are {last / first:.0%} as long as at the start, {last:.0f} instead of "
        f"{first:.0f} tokens, while the reward rose: read some"
    )
    if answers:
        text += f", such as {', '.join(repr(answer) for answer in answers)}"
    return [Finding("wrong", f"{text}.")]


def speed(series: Series, config: dict) -> list[Finding]:
    """Reports how long each side waited for the other; if most of the time, names a remedy."""
    limit = 0.75 if config.get("max_lag") else 1  # at lag 0 the two sides take turns
    sides = {
        "trainer": ("wait_for_rollouts", "generation", "engine.count or max_lag"),
        "engines": ("wait_for_training", "training", "policy.ranks"),
    }
    found: list[Finding] = []
    for name, (wait, slower, remedy) in sides.items():
        waited = share(series, wait)
        if waited is None:
            continue
        text = f"The {name} waited {waited:.0%} of the time"
        if waited > limit:
            text += f": {slower} is the slower side, so raise {remedy}"
            found.append(Finding("slow", f"{text}."))
        else:
            found.append(Finding("fine", f"{text}."))
    return found


def progress(series: Series) -> list[Finding]:
    """Compares the last validation with the first; calls it wrong only after FAIR steps."""
    names = {
        "validation_exact": "Right validation answers",
        "validation_reward": "Validation reward",
        "validation_accuracy": "Accuracy on validation pairs",
    }
    if not any(series.get("validation_exact", [])):
        del names["validation_exact"]  # an environment that never scores 1 has no right answers
    name = next((name for name in names if name in series), "validation_reward")
    column = series.get(name, [])
    every = zip(series.get("step", []), column, strict=False)
    points = [(step, value) for step, value in every if value is not None]
    if len(points) < 2:
        return []
    start, first = points[0]
    end, last = points[-1]
    best = max(value for _, value in points)
    # The drop must exceed the noise of a run that has levelled off.
    fell = best - last > max((best - first) / 2, abs(best) / 4)
    form = "{:.3g}" if name == "validation_reward" else "{:.0%}"
    text = names[name]
    text += " rose" if last > first else " did not rise"
    text += f" from {form.format(first)} (step {start}) to {form.format(last)} (step {end})"
    if name == "validation_exact":
        text += intervals(series, (start, first), (end, last))
    text += f", after {form.format(best)} at best." if fell else "."
    is_perfect = last == 1 and name != "validation_reward"  # it cannot rise further
    did_not_rise = last <= first and not is_perfect
    wrong = end - start >= FAIR and (did_not_rise or fell)
    return [Finding("wrong" if wrong else "fine", text)]


def intervals(series: Series, *points: tuple[int, float]) -> str:
    """Formats the 95 % intervals of shares at some steps; "" if the answers were not counted."""
    counts = dict(zip(series["step"], series.get("validation_answers", []), strict=False))
    found = []
    for step, right in points:
        if not counts.get(step):
            return ""
        low, high = interval(right, counts[step])
        found.append(f"{low:.0%} to {high:.0%}")
    return f", with 95% intervals of {' and '.join(found)}"


def share(series: Series, wait: str) -> float | None:
    """Computes the share of the steps' time that a wait took; None if it was not measured.

    Step 1 is left out, because it contains the start-up.
    """
    every = zip(series.get("step_seconds", []), series.get(wait, []), strict=False)
    steps = [times for times in every if None not in times][1:]
    seconds = sum(step_seconds for step_seconds, _ in steps)
    # The engines' wait may contain an evaluation, which is not part of a step.
    waited = sum(min(times) for times in steps)
    return waited / seconds if seconds else None
