"""What a run says of its drafter: when it starts, and when drafts are accepted less often."""

import pytest

from grpo_async import Config
from runtime.engines.speculation import STEPS, ageing
from runtime.reporting.log import Log
from support.configs import changed

STEP = {"step_seconds": 1.0, "train_seconds": 1.0, "batch_tokens": 9, "train_tokens": 9}


@pytest.fixture
def written(tiny_model, tmp_path, capsys):
    """Writes steps with these shares of accepted drafts as a run does, from `step` on.

    Returns the warnings that its console shows, by step.
    """

    def write(shares: list[float], step: int = 1) -> dict[int, str]:
        log = Log()
        log.open(changed(Config(), model=tiny_model, run_dir=str(tmp_path)), step - 1)
        for share in shares:
            counts = {"drafts": 100, "draft_tokens": 300, "accepted_draft_tokens": 300 * share}
            log.trained(step, STEP | counts)
            step += 1
        log.close()
        lines = capsys.readouterr().out.splitlines()
        said = [line.removeprefix("step ") for line in lines if "draft_acceptance" in line]
        return {int(line.partition(":")[0]): line for line in said}

    return write


def test_a_fall_by_a_quarter_is_said_once_and_then_the_next_one(written):
    shares = [0.8] * STEPS + [0.7] * STEPS + [0.5] * 3 * STEPS + [0.35] * 3 * STEPS
    said = written(shares)
    assert len(said) == 2
    first, second = said
    assert 2 * STEPS < first <= 3 * STEPS and 5 * STEPS < second <= 6 * STEPS
    assert "draft_acceptance fell from 0.80 in the first 5 steps to 0.5" in said[first]
    assert "accepted_length is 2.50: train the drafter" in said[first]
    assert "from 0.80" in said[second] and "speculative_config" in said[second]


@pytest.mark.parametrize(
    "shares", [[0.8] * 6 + [0.62] * 9, [0.2] * 5 + [0.9] * 9, [0.95] + [0.65] * 12]
)
def test_less_than_a_quarter_is_not_worth_a_line(shares, written):
    assert not written(shares)


def test_one_bad_step_is_none_of_the_drafter(written):
    assert not written([0.8] * 6 + [0.1] + [0.8] * 6)


def test_a_run_that_goes_on_remembers_its_first_steps(written):
    """A chain of jobs would compare each job with itself otherwise."""
    assert not written([0.8] * 2 * STEPS)
    said = written([0.5] * STEPS, step=2 * STEPS + 1)
    assert len(said) == 1 and "from 0.80" in next(iter(said.values()))
    assert not written([0.5] * STEPS, step=3 * STEPS + 1), "that was said"


def test_steps_without_drafts_and_programs_without_engines_say_nothing(
    tiny_model, tmp_path, capsys
):
    log = Log()
    log.open(changed(Config(), model=tiny_model, run_dir=str(tmp_path)), 0)
    for step in range(1, 4 * STEPS):
        log.trained(step, STEP)
    log.close()
    assert "draft" not in capsys.readouterr().out


@pytest.mark.parametrize("drafts, ages", [
    ({"method": "mtp"}, True),
    ({"method": "eagle3", "model": "m"}, True),
    ({"model": "models/small"}, True),
    ({"method": "ngram"}, False),
    ({"method": "suffix"}, False),
    ({}, False),
])  # fmt: skip
def test_a_run_says_at_its_start_that_its_drafter_ages(drafts, ages):
    import dpo

    said = ageing(Config(engine={"args": {"speculative_config": drafts}}))
    assert bool(said) == ages and ("watch draft_acceptance" in said) == ages
    assert ageing(dpo.Config()) == ageing(Config()) == ""
