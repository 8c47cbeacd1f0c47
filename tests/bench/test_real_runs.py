"""How real runs are measured and compared, on runs that are made up; none is started here."""

import dataclasses
import time
from types import SimpleNamespace

import pytest

from bench.simulation import findings, real
from bench.simulation.real import Beat, G, P, Run

LENGTHS = (20, 30, 25, 40, 35, 20, 30, 25, 40, 35)  # tokens of all answers of a step
SEATED = P * G // 2  # sequences in each of two engines, all seats
STEP, TOKEN, CALL, LATENCY = 0.05, 1e-3, 0.01, 0.02  # seconds
UPDATE = {"sync_pause": 0.01, "sync_transfer": 0.04, "sync_resume": 0.01}


def made_up(tmp_path, lag: int = 0) -> Run:
    """A run in which everything takes just as long as it should, one thing after the other."""
    cfg = real.configured(tmp_path, f"lag-{lag}", real.Job(lag), 1)
    cfg = dataclasses.replace(cfg, steps=len(LENGTHS))
    steps, rollouts, beats = [], [], []
    now = 0.0
    for number, tokens in enumerate(LENGTHS, 1):
        began = now + LATENCY / 2
        ends = [began + STEP * (i + 1) for i in range(tokens)]
        beats += [Beat(end - STEP, end, SEATED, SEATED if i else 0) for i, end in enumerate(ends)]
        waited = STEP * tokens + LATENCY
        trained = TOKEN * P * G * (tokens + real.prompt_tokens())
        took = waited + trained + CALL + sum(UPDATE.values())
        now += took
        parts = {"wait_for_rollouts": waited, "train_seconds": trained, "step_seconds": took}
        parts |= {"wait_for_training": took - waited}
        steps.append({"step": number, "seconds": now} | parts | UPDATE)
        for slot in range((number - 1) * P, number * P):
            rollouts += [{"slot": slot, "versions": [[number - 1, tokens]]}] * G
    return Run(cfg, 1000.0, steps, rollouts, [shifted(beats), shifted(beats)])


def shifted(beats: list[Beat]) -> list[Beat]:
    return [b._replace(began=1000 + b.began, slept=1000 + b.slept) for b in beats]


def test_what_a_run_costs_is_read_from_its_parts(tmp_path):
    found = real.costs(made_up(tmp_path))
    assert found.per_trained_token == pytest.approx(TOKEN)
    assert found.sync == pytest.approx(sum(UPDATE.values()))
    assert found.call == pytest.approx(CALL)
    assert found.latency == pytest.approx(LATENCY)
    assert found.decode(SEATED, 0) == pytest.approx(STEP)


def test_a_run_that_takes_what_it_should_is_simulated_to_the_hundredth(tmp_path):
    run = made_up(tmp_path)
    trace = real.simulated(run, real.costs(run))
    assert findings.conserved(trace) == []
    pairs = real.compared(run, trace)
    names = ["a step", "trainer waits", "an engine has no answer", "an engine has no group"]
    assert [pair.name for pair in pairs] == names
    assert max(pair.error for pair in (*pairs, *real.each_step(run, trace))) < 0.01


def test_a_run_that_stands_still_meanwhile_is_not(tmp_path):
    """A second more in each step."""
    run = made_up(tmp_path)
    told = real.costs(run)
    steps = [s | {"seconds": s["seconds"] + i} for i, s in enumerate(run.steps)]
    late = dataclasses.replace(run, steps=steps)
    step, *_ = real.compared(late, real.simulated(late, told))
    assert step.measured == pytest.approx(step.simulated + 1, rel=0.01)
    assert step.error > 0.2


def test_a_machine_that_does_not_keep_the_pace_is_noticed(tmp_path):
    """One of the 30 steps of the second batch stands for a tenth of all steps' seconds."""
    run = made_up(tmp_path)
    told = real.costs(run)
    assert real.behind(run, told) == pytest.approx(0)
    stood = 0.1 * STEP * sum(n - 1 for n in LENGTHS)
    late = [b._replace(slept=b.slept + (i > 25) * stood) for i, b in enumerate(run.engines[0])]
    assert real.behind(dataclasses.replace(run, engines=[late]), told) == pytest.approx(0.1)


def test_an_engine_works_from_its_first_step_to_its_last(tmp_path):
    """Two answers end, and half a second later another one comes, while none was kept."""
    log = tmp_path / "engine-7.log"
    log.write_text("1.0 1.5 2 0\n1.6 2.0 2 2\n2.5 3.0 1 0\n")
    beats = real.beats(log)
    assert beats == [Beat(1.0, 1.5, 2, 0), Beat(1.6, 2.0, 2, 2), Beat(2.5, 3.0, 1, 0)]
    spans = real.busy_spans(beats)
    assert spans == [(1.0, 2.0), (2.5, 3.0)]
    assert real.step_seconds([beats]) == {2: [(0.0, 0.5)]}
    both = [*spans, (1.5, 2.25)]
    assert real.covered(both, 0, 9) == 1.75 and real.covered(both, 1.25, 2.75) == 1.25


def test_a_killed_engine_is_known_by_the_groups_that_began_again(tmp_path):
    """Those of the next step that have no token of the version that they were begun under."""
    run = made_up(tmp_path, lag=1)
    versions = {8: 1, 9: 2, 10: 1, 11: 2}
    rollouts = [line | {"versions": [[versions.get(line["slot"], 0), 20]]} for line in run.rollouts]
    engines = [*run.engines, [Beat(1060.0, 1060.1, 1, 0)]]
    killed = dataclasses.replace(run, rollouts=rollouts, engines=engines, killed=run.ends[1] + 0.5)
    found = real.strike(killed)
    assert (found.version, found.lost, found.kept) == (2, {9, 11}, {8, 10})
    assert found.seconds == pytest.approx(0.5)
    assert real.start_seconds(killed, 0.5) == pytest.approx(1060 - killed.killed - 1.5)
    trace = real.simulated(killed, real.costs(run))
    assert trace.faults == {"engine": 1} and trace.replaced == 1
    assert findings.conserved(trace) == []


@pytest.mark.slow
def test_an_engine_step_takes_as_long_as_it_is_told(tmp_path):
    """Of three sequences one goes; what a step needs of its processor is part of its time."""
    from vllm.v1.sample.logits_processor.interface import BatchUpdate

    from bench.simulation.paced import Paced

    given = {"base": 0.1, "each": 0.02, "folder": str(tmp_path)}
    paced = Paced(SimpleNamespace(additional_config=given), "cpu", False)
    added = [(i, None, None, []) for i in range(3)]
    paced.update_state(BatchUpdate(3, [], added, []))
    time.sleep(0.01)
    paced.update_state(None)
    paced.update_state(BatchUpdate(2, [2], [], []))
    (path,) = tmp_path.glob("engine-*.log")
    beats = real.beats(path)
    assert [(beat.batch, beat.kept) for beat in beats] == [(3, 0), (3, 3), (2, 2)]
    seconds = [b.slept - a.slept for a, b in zip(beats, beats[1:], strict=False)]
    assert seconds == pytest.approx([0.16, 0.14], abs=2e-3)
