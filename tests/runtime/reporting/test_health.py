"""What is said of a run's health, from metrics that are healthy except one."""

from pathlib import Path

import pytest

import report
from core import jsonl
from runtime.reporting.health import health
from support import data
from support.tables import gives, table

CASES = table(Path(__file__).parents[1] / "cases.txt")
CONFIG = {"prompts_per_step": 8, "max_lag": 1}
NAMES = ("reward", "grad_norm", "step_seconds", "wait_for_rollouts", "wait_for_training")


def series(validation: dict[int, float], **changed) -> dict[str, list]:
    """101 steps' metrics; step 0 is a validation alone, step 1 waited for the start."""
    trained = dict.fromkeys(NAMES, 1.0) | {"wait_for_rollouts": 0.5, "wait_for_training": 0.2}
    trained |= {"truncated_samples": 0.05, "zero_variance_groups": 0.3, "dropped_prompts": 3}
    trained |= {"num_masked_seqs": 1, "num_valid_samples": 99, "nonfinite_engine_logprobs": 0}
    columns = {name: [None, *[value] * 100] for name, value in trained.items()}
    columns["wait_for_training"][1] = 900.0
    columns["step"] = list(range(101))
    columns["validation_reward"] = [validation.get(step) for step in range(101)]
    return columns | changed


def mismatch(mean: float | None, steps: int = 20) -> list[dict]:
    row = {"by": "lag", "key": "0", "tokens": 100, "mean": mean}
    return [{"step": step, "rows": [row, row | {"key": "1", "mean": 9.0}]} for step in range(steps)]


RISES = {0: 0.1, 50: 0.6, 100: 0.5}
RARE = [0] * 50 + [2] + [0] * 50


def alarms(
    columns: dict, tables: list[dict] = (), config: dict = CONFIG, level: str = "wrong"
) -> list[str]:
    every = health(columns, list(tables), config)
    return [finding.text for finding in every if finding.level == level]


def test_a_healthy_run_is_described_by_its_figures():
    found = health(series(RISES), mismatch(0.02), CONFIG)
    assert {finding.level for finding in found} == {"fine"}
    assert [finding.text for finding in found] == [
        "Validation reward rose from 0.1 (step 0) to 0.5 (step 100).",
        "At lag 0, trainer and engine differ by 0.02 nats.",
        "5% of the answers were cut off.",
        "30% of the groups had equal rewards.",
        "1.0% of the sequences were masked.",
        "Dropped prompts: 3.",
        "The trainer waited 50% of the time.",
        "The engines waited 20% of the time.",
    ]


def test_nothing_is_said_of_what_was_not_measured():
    assert health({}, [], {}) == []
    assert health({"step": [0], "validation_reward": [0.5]}, [], {}) == []


test_each_fault_is_an_alarm = gives(
    lambda name, values: " ".join(alarms(series(RISES, **{name: values}))),
    ("validation_dropped", [None] * 99 + [2, 1], "Validation prompts that were dropped: 3."),
    ("truncated_samples", [0.0] * 91 + [0.3] * 10, "30% of the answers were cut off."),
    ("zero_variance_groups", [0.0] * 91 + [1.0] * 10, "100% of the groups had equal rewards."),
    ("num_masked_seqs", [0.0] * 91 + [11.0] * 10, "10.0% of the sequences were masked."),
    ("dropped_prompts", [0] * 100 + [9], "Dropped prompts: 9."),
    ("grad_norm", [None, None] + [1.0] * 99, "Steps whose gradient norm is not finite: 1."),
    ("nonfinite_engine_logprobs", RARE, "Engine logprobs that are not finite: 2."),
)


@pytest.mark.parametrize("mean", [0.051, None])
def test_a_mismatch_at_lag_0_is_an_alarm(mean):
    """The newest ten tables are judged; a mean that is not a number is none that is small."""
    shown = "nan" if mean is None else "0.051"
    text = f"At lag 0, trainer and engine differ by {shown} nats."
    assert alarms(series(RISES), mismatch(0.0) + mismatch(mean, 10)) == [text]
    assert alarms(series(RISES), mismatch(mean) + mismatch(0.049, 10)) == []


test_a_reward_that_does_not_rise_is_an_alarm = gives(
    lambda validation: " ".join(alarms(series(validation))) or None,
    *CASES["a reward that does not rise"],
)


def test_right_answers_count_where_there_are_any():
    exact = [0.0, *[None] * 99, 0.25]
    found = health(series({0: 0.5, 100: 0.4}, validation_exact=exact), [], CONFIG)
    text = "Right validation answers rose from 0% (step 0) to 25% (step 100)."
    assert found[0].text == text and found[0].level == "fine"
    counted = [80, *[None] * 99, 80]
    columns = series({0: 0.5, 100: 0.4}, validation_exact=exact, validation_answers=counted)
    with_intervals = f"{text[:-1]}, with 95% intervals of 0% to 5% and 17% to 35%."
    assert health(columns, [], CONFIG)[0].text == with_intervals
    exact[0] = exact[100] = 1.0
    found = health(series({0: 0.5, 100: 0.5}, validation_exact=exact), [], CONFIG)
    assert found[0].level == "fine", "more than all cannot be right"
    exact[0] = exact[100] = 0.0
    found = health(series(RISES, validation_exact=exact), [], CONFIG)
    assert found[0].text.startswith("Validation reward rose from 0.1")


test_a_side_that_waits_is_no_fault_and_is_named_with_what_helps = gives(
    lambda name, values: (
        alarms(series(RISES, **{name: values})),
        alarms(series(RISES, **{name: values}), level="slow"),
    ),
    ("wait_for_rollouts", [None] + [0.8] * 100, ([], [
        "The trainer waited 80% of the time: generation is the slower side, "
        "so raise engine.count or max_lag.",
    ])),
    ("wait_for_training", [None] + [3.0] * 100, ([], [
        "The engines waited 100% of the time: training is the slower side, so raise policy.ranks.",
    ])),
    ("wait_for_rollouts", [None] + [0.7] * 100, ([], [])),
)  # fmt: skip


def test_a_synchronous_run_may_wait():
    columns = series(RISES, wait_for_training=[None] + [0.9] * 100)
    assert alarms(columns, config=CONFIG | {"max_lag": 0}, level="slow") == []


def measured(name: str, steps: int = 1000) -> dict[str, list]:
    """The first steps of a run that was kept."""
    lines = jsonl.read(data.HERE / f"runs/{name}.jsonl", jsonl.METRICS)
    return report.columns(line for line in lines if line["step"] <= steps)


def test_a_policy_that_answers_with_a_word_is_an_alarm():
    """A real model's, from the first step that ten others precede, and to its end."""
    said = " instead of 24 tokens, while the reward rose: read some"
    (text,) = alarms(measured("one_word", 20))
    assert text == f"Answers are 42% as long as at the start, 10{said}."
    found = health(measured("one_word"), [], CONFIG, ["Well", "Paris"])
    (text,) = (finding.text for finding in found if finding.level == "wrong")
    assert text == f"Answers are 18% as long as at the start, 4{said}, such as 'Well', 'Paris'."


def test_answers_that_stay_sentences_are_no_alarm():
    assert alarms(measured("sentences", 38)) == []
    found = [finding.text for finding in health(measured("sentences"), [], CONFIG)]
    assert "Answers are 91% as long as at the start." in found


def test_answers_that_become_right_are_healthy():
    """The tiny job, whose entropy falls while its answers keep their length."""
    found = health(measured("puzzles"), [], CONFIG)
    assert {finding.level for finding in found} == {"fine"}
    assert "Answers are 103% as long as at the start." in [finding.text for finding in found]


def half(first: float, last: float) -> list[float | None]:
    """A metric that changes at the middle of 100 steps."""
    return [None, *[first] * 50, *[last] * 50]


def lengths(first: float, last: float, **changed) -> dict[str, list]:
    """Metrics of 100 steps in which answers change their length, and the reward rises."""
    return series(
        RISES,
        response_tokens=half(first, last),
        **{"reward": half(0.2, 0.8)} | changed,
    )


test_short_answers_are_an_alarm_if_the_reward_rose = gives(
    lambda last, changed: len(alarms(lengths(60.0, last, **changed))),
    (19.0, {}, 1),
    (19.0, {"reward": half(0.8, 0.2)}, 0),
    (29.0, {}, 0),
    (29.0, {"entropy": half(1.0, 0.4)}, 1),
    (29.0, {"zero_variance_groups": half(0.2, 0.5)}, 1),
    (60.0, {"entropy": half(1.0, 0.1)}, 0),
)
