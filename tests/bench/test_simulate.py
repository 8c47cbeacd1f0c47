"""The simulated run against what can be said of it without one: closed forms, in seconds."""

import asyncio
import dataclasses
import gc
import json
import random
import re
import shutil
import statistics
import sys
import time

import pytest
import ray

from bench import simulate as simulate_py
from bench.simulation import clock, findings, page, validation, world
from bench.simulation.faults import Faults
from bench.simulation.hardware import Hardware, Modelled, Room, interpolated, read_table
from bench.simulation.simulated_actors import Stage
from bench.simulation.simulated_engine import Engine, Sequence
from bench.simulation.workload import Latency, Lengths, Workload
from core.errors import InputError
from dry_run import pace
from grpo_async import Config
from policy.gpus import B200
from policy.model_shape import read_model
from runtime.engines import repair
from support import shapes
from support.configs import changed
from support.program import ROOT, ran

P, G = 4, 2


@pytest.fixture(autouse=True)
def no_limit_of_restarts(monkeypatch):
    """All faults of a test come within one simulated hour."""
    monkeypatch.setattr(repair, "MAX_RESTARTS", 99)


def simulate(lag: int, hardware: Hardware, work: Workload, steps=12, faults="", **fields):
    """The trace of a run."""
    fields = {"count": 2, "rollout_workers": 2} | fields
    cfg = changed(Config(), steps=steps, prompts_per_step=P, group_size=G, max_lag=lag, **fields)
    return world.run(cfg, hardware, work, Faults.read(faults))


def constant(tokens: int) -> Workload:
    """Every answer has so many tokens."""
    return Workload(Lengths(0.0, 0.0, tokens, (tokens,)), prompt=0)


def varied(seed: int = 1) -> Workload:
    return Workload(Lengths.with_mean(50, 400), prompt=0, seed=seed)


def step_seconds(trace: world.Trace) -> list[float]:
    ends = [trace.began, *(step.ended for step in trace.steps)]
    return [b - a for a, b in zip(ends, ends[1:], strict=False)]


# --- closed forms ---------------------------------------------------------------------------------

TRAINED = Hardware(per_token=2.0, per_trained_token=0.125, sync=3.0)
ALONE = Hardware(per_token=1.0)


@pytest.mark.parametrize(
    ("hardware", "waits", "seconds"),
    [
        (TRAINED, {}, 2 * 100 + 0.125 * P * G * 100 + 3),
        (ALONE, {"judge": Latency(30, 0), "judged_at_once": 2}, 100 + 4 * 30),
        (ALONE, {"turns": 5, "tool": Latency(7, 0)}, 100 + 4 * 7),
        (ALONE, {"turns": 5, "tool": Latency(7, 0), "judge": Latency(30, 0)}, 100 + 4 * 7 + 30),
    ],
    ids=[
        "training and update",
        "8 answers at once for 2 judges",
        "tools between 5 turns",
        "commands of an agent, then its judge",
    ],
)
def test_without_lag_a_step_is_the_sum_of_its_parts(hardware, waits, seconds):
    work = dataclasses.replace(constant(100), **waits)
    trace = simulate(0, hardware, work, save_period=0)
    assert step_seconds(trace) == pytest.approx([seconds] * 12, abs=0.01)


@pytest.mark.parametrize("lag", [0, 1, 2, 3])
def test_the_longest_rollout_its_training_and_update_take_lag_and_one_steps(lag):
    hardware = Hardware(per_token=1.0, per_trained_token=0.0125, sync=1.0)
    trace = simulate(lag, hardware, constant(1000), steps=6 * (lag + 1))
    chain = 1000 + lag * 1 + 0.0125 * P * G * 1000 + 1  # updates of other steps pause it
    cycles = step_seconds(trace)[2 * (lag + 1) :]
    assert statistics.fmean(cycles) == pytest.approx(chain / (lag + 1), rel=1e-6)


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("lag", [0, 1, 2, 4])
def test_no_step_is_trained_before_its_longest_rollout_allows(lag, seed):
    """T >= t_longest / (max_lag + 1), for any lengths: of each step, from the version it needs."""
    hardware = Hardware(per_token=1.0, per_trained_token=0.01, sync=2.0)
    assert validation.too_early(simulate(lag, hardware, varied(seed), steps=20)) == 0


def test_a_slow_trainer_hides_all_generation():
    """1 s of training a token: 400 s a step, and 5 of the update; 50 s of generation are hidden."""
    hardware = Hardware(per_token=1.0, per_trained_token=1.0, sync=5.0)
    trace = simulate(1, hardware, constant(50))
    assert step_seconds(trace)[2:] == pytest.approx([P * G * 50 + 5] * 10, abs=0.01)
    assert findings.find(trace).binds == "training"


def test_full_engines_write_their_tokens_and_no_more():
    """Two slots an engine, two engines, 8 answers of 100 tokens a step at 1 s: 200 s."""
    hardware = Hardware(per_token=1.0, room=Room(2, 1e9, 1.0, 0.0))
    found = findings.find(simulate(2, hardware, constant(100), steps=18))
    assert found.seconds == pytest.approx(200, rel=0.01)
    assert found.binds == "generation" and found.engines_busy == pytest.approx(1, abs=0.01)


@pytest.mark.parametrize("faults", ["", "engine=20", "engine=10,worker=20,hang=3"])
@pytest.mark.parametrize("lag", [0, 1, 3])
def test_every_group_is_trained_once_and_none_is_too_old(lag, faults):
    hardware = Hardware(per_token=1.0, per_trained_token=0.01, sync=2.0, start=30.0, connect=1.0)
    trace = simulate(lag, hardware, varied(), steps=40, faults=faults)
    assert findings.conserved(trace) == []
    assert bool(trace.replaced) == bool(faults)


def test_a_group_that_is_trained_twice_or_too_late_is_noticed():
    trace = simulate(1, Hardware(per_token=1.0), constant(10))
    trace.steps[3] = trace.steps[3]._replace(slots=trace.steps[2].slots)
    trace.steps[5] = trace.steps[5]._replace(versions=[0] * P)
    assert len(findings.conserved(trace)) == 3


def test_an_outage_of_the_judges_costs_as_long_as_it_lasts():
    hardware = Hardware(per_token=1.0)
    judged = dataclasses.replace(constant(100), judge=Latency(1, 0))
    calm, hurt = (simulate(0, hardware, judged, 40, f) for f in ("", "judge=6x500"))
    assert findings.conserved(hurt) == []
    longer = hurt.steps[-1].ended - calm.steps[-1].ended
    assert 0 < longer <= 500 * hurt.faults["judge"]


def test_an_engine_that_dies_costs_a_few_seconds_of_its_answers():
    """What the workers have copied is not written again."""
    hardware = Hardware(per_token=1.0, start=1.0)
    trace = simulate(1, hardware, constant(1000), steps=40, faults="engine=8")
    died = trace.faults["engine"]
    assert died > 20 and trace.replaced == died
    assert 0 < trace.lost_tokens <= 5 * died * 2 * P * G


# --- an engine ------------------------------------------------------------------------------------


class Half(Hardware):
    """A step takes 1 s, and as much again for every two sequences and 1,000 tokens."""

    def decode(self, batch, context):
        return 1 + batch / 2 + context / 1000


def write(hardware: Hardware, *sequences: tuple[float, int, int]) -> list[float]:
    """When sequences of (added at, context, tokens) end."""
    ends = [0.0] * len(sequences)

    async def main():
        loop = asyncio.get_running_loop()
        engine = Engine(hardware, loop)

        def add(i: int, context: int, tokens: int) -> None:
            def done() -> None:
                ends[i] = loop.time()

            engine.add(Sequence(context, tokens, context, done))

        for i, (at, context, tokens) in enumerate(sequences):
            loop.call_at(at, add, i, context, tokens)
        await asyncio.sleep(1e6)
        assert not engine.batch and engine.context == pytest.approx(0)
        assert engine.tokens == pytest.approx(sum(tokens for *_, tokens in sequences))

    clock.run(main, world.grpo_async)
    return ends


def test_an_engine_alone_takes_the_sum_of_its_steps():
    """10 steps at 1.5 s, and the mean of 100 to 110 tokens."""
    assert write(Half(), (0, 100, 10)) == pytest.approx([10 * (1.5 + 0.105)])


def test_sequences_that_come_and_go_change_the_pace():
    """Alone 4 s at 1.5; both 2.0 a step until the first is done; the other goes on alone."""
    flat = Hardware(per_token=1.0)
    assert write(flat, (0, 0, 10), (4, 0, 10)) == pytest.approx([10, 14])
    flat.room = Room(1, 1e9, 1.0, 0.0)
    assert write(flat, (0, 0, 10), (4, 0, 10)) == pytest.approx([10, 20])


def test_without_room_the_latest_gives_way_and_reads_its_tokens_again():
    """30 tokens of room: at 15 each the second gives way, and goes on when the first is done."""
    tight = Hardware(per_token=1.0, per_prompt_token=0.1, room=Room(9, 30, 1.0, 0.0))
    first, second = write(tight, (0, 0, 20), (0, 0, 20))
    assert first == pytest.approx(20, abs=1.1)
    assert second == pytest.approx(20 + 1.5 + 5, abs=2.2)


def test_many_sequences_in_one_engine_are_all_written():
    dice = random.Random(0)
    tight = Hardware(per_token=1.0, per_prompt_token=0.01, room=Room(7, 500, 1.0, 3.0))
    draw = lambda: (dice.uniform(0, 99), dice.randint(0, 40), dice.randint(1, 90))  # noqa: E731
    every = [draw() for _ in range(201)]
    assert all(end > at for end, (at, *_) in zip(write(tight, *every), every, strict=True))


def test_the_pace_is_the_dry_runs(tmp_path):
    super_ = read_model(shapes.write("models/super_sft", tmp_path))
    cfg = changed(Config(), tensor_parallel=4, count=144)
    modelled = Modelled(super_, cfg, B200)
    for batch, context in ((1, 0), (1, 60000), (16, 8000), (17, 8000), (57, 4000)):
        expected = pace.decode_seconds(super_, 4, batch, context, B200)
        assert modelled.decode(batch, batch * context) == pytest.approx(expected)
    drafted = Modelled(super_, cfg, B200, drafts=2.0)
    assert drafted.decode(16, 0) == modelled.decode(16, 0) / 2
    assert drafted.decode(17, 0) == modelled.decode(17, 0)
    mean = int(pace.MEAN_SHARE * 65536)
    seconds = modelled.train([[mean]] * P * G)
    cfg = changed(cfg, prompts_per_step=P, group_size=G)
    assert seconds == pytest.approx(pace.train_seconds(super_, cfg, B200), rel=1e-6)


# --- lengths, tables, faults, the clock -----------------------------------------------------------


@pytest.mark.parametrize(("mean", "limit", "spread"), [(16000, 65536, 1.0), (900, 1000, 0.5)])
def test_drawn_lengths_have_the_mean_that_was_asked_for(mean, limit, spread):
    lengths = Lengths.with_mean(mean, limit, spread)
    numbers = random.Random(0)
    drawn = [lengths.draw(numbers) for _ in range(20000)]
    assert statistics.fmean(drawn) == pytest.approx(mean, rel=0.03)
    assert min(drawn) >= 1 and max(drawn) == limit


def test_lengths_of_a_run_are_those_of_its_rollouts(tmp_path):
    path = tmp_path / "rollouts.jsonl"
    lines = [{"versions": [[0, 3], [1, 4]]}, {"versions": [[2, 90]]}, {"versions": []}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert Lengths.of_run(str(path), 50).known == (7, 90)
    assert {Lengths.of_run(str(path), 50).draw(random.Random(i)) for i in range(9)} == {7, 50}
    path.write_text('{"versions": [[0, 3]]}\n{"response": 1}\n')
    with pytest.raises(InputError, match=r"rollouts.jsonl:2: expected lines of a rollouts.jsonl"):
        Lengths.of_run(str(path), 50)


def test_a_measured_table_is_followed_and_interpolated(tmp_path):
    path = tmp_path / "table.json"
    path.write_text("[[1, 0, 0.01], [1, 1000, 0.02], [9, 0, 0.05]]")
    points = read_table(str(path))
    places = [(1, 0), (1, 500), (1, 9999), (5, 0), (18, 0)]
    expected = [0.01, 0.015, 0.02, 0.03, 0.1]
    assert [interpolated(points, *at) for at in places] == pytest.approx(expected)
    path.write_text("[[1, 0, -1]]")
    with pytest.raises(InputError, match="all above 0"):
        read_table(str(path))


@pytest.mark.parametrize(
    "text", ["engin=1", "engine", "engine=x", "engine=-1", "engine=1x5", "engine=inf"]
)
def test_a_fault_that_is_not_known_is_refused(text):
    with pytest.raises(InputError, match="expected KIND=TIMES AN HOUR"):
        Faults.read(text)


def test_everybody_who_waits_for_ever_is_noticed():
    async def main():
        await asyncio.Event().wait()

    with pytest.raises(clock.Stuck):
        clock.run(main, world.grpo_async)


def test_what_the_simulation_replaces_is_put_back():
    before = (ray.kill, world.fleet.actor, world.cluster.actor)
    simulate(1, Hardware(per_token=1.0), constant(10))
    assert (ray.kill, world.fleet.actor, world.cluster.actor) == before
    assert world.grpo_async.time is time and world.fleet.time is time


def test_runs_that_share_gpus_are_refused():
    with pytest.raises(InputError, match="gpu_share"):
        simulate(1, Hardware(), constant(10), gpu_share=0.5)


def test_a_stage_has_all_its_actors():
    async def main():
        stage = Stage(Config(), Hardware(), constant(1))
        assert (stage.engines, stage.workers, stage.trainers) == ([], [], [])
        engine = stage.make(type("Generator", (), {})).remote(None)
        assert stage.engines == [engine] and engine.place == 0

    clock.run(main, world.grpo_async)


# --- the program ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("words", "expected"), [
    (["configs/rlvr1.py"], (1, 0, 0)),
    (["configs/swe1.py", "--judge", "3"], (1, 0, 3)),
    (["configs/swe2.py"], (50, 5, 120)),
    (["configs/h100/swe2_20_nodes.py", "--tool", "0", "--turns", "9"], (9, 0, 120)),
])  # fmt: skip
def test_episodes_of_agents_have_commands_and_a_judge(words, expected):
    given, _ = simulate_py.options(words)
    assert (given.turns, given.tool, given.judge) == expected


@pytest.fixture
def program(monkeypatch, capsys):
    """A function that does what bench/simulate.py does; returns what that prints."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # which main() sets
    monkeypatch.setattr(pace, "MFU", pace.MFU)
    threshold = gc.get_threshold()

    def run(*words: str) -> str:
        monkeypatch.setattr(sys, "argv", ["bench/simulate.py", *words])
        simulate_py.main()
        return capsys.readouterr().out

    yield run
    gc.unfreeze()
    gc.set_threshold(*threshold)


@pytest.mark.slow
def test_the_last_line_says_what_binds_and_what_to_change(tmp_path, warm_python):
    small = ("--prompts_per_step", "16", "--group_size", "4", "--steps", "8", "--splits", "2")
    words = ("configs/rlvr1.py", *small, "--page", tmp_path / "page.html")
    done = ran(warm_python, "bench/simulate.py", *words, seconds=300)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert "s a step, bound by the longest rollout" in lines[-1]
    assert "change max_lag = 2" in lines[-1] or "change engine.tensor_parallel" in lines[-1]
    assert "(B200)" in lines[0] and "simulated" in lines[1]
    said = [line for line in lines if "tried: engine.count" in line]
    splits = [list(map(int, re.findall(r"= (\d+)", line))) for line in said]
    assert len(splits) == 3 and {4 * engines + ranks for engines, ranks in splits} == {832}


@pytest.mark.slow
def test_changes_of_a_large_lag_are_tried_for_long_enough(program):
    small = ("--prompts_per_step", "4", "--group_size", "2", "--steps", "31", "--max_lag", "14")
    small += ("--train_parts", "1")
    told = program("configs/rlvr1.py", *small)
    assert "tried: max_lag = 15" in told and "tried: drafts" in told, told


@pytest.mark.slow
def test_trainers_compute_as_long_as_their_share_of_the_peak_says(program):
    small = ("--prompts_per_step", "16", "--group_size", "4", "--steps", "5", "--alone")
    training = []
    for share in (0.3, 0.15, 0.1):
        told = program("configs/h100/rlvr_27_nodes.py", *small, "--mfu", str(share))
        training.append(float(re.search(r"training and update ([\d.]+) s", told)[1]))
    assert training[1] > 1.3 * training[0]  # what is sent takes as long as before
    assert training[2] - training[1] == pytest.approx(training[1] - training[0], abs=0.2)


@pytest.mark.slow
def test_engines_are_merged_by_two_only_where_they_are_even(program):
    """Three engines would become one, and one none, which no run can have."""
    small = ("--prompts_per_step", "16", "--group_size", "4", "--steps", "5")
    told = program("configs/rlvr1.py", *small, "--engine.count", "3")
    assert "bound by the longest rollout" in told, told
    assert "tried: max_lag" in told
    assert "engine.tensor_parallel" not in told


WRONG = {
    "--faults engines=1": "--faults 'engines=1'",
    "--mfu 30": "--mfu 30.0: expected a share above 0, at most 1",
    "--judge -5": "--judge -5.0: expected at least 0",
    "--steps 4 --alone": "--steps 4: 4 steps at max_lag 1: expected at least 5",
    "--page no/x.html": "--page no/x.html: no is not a folder",
    "--engine.count 1 --faults engine=90": "the run ended: engines were lost more",
}


@pytest.mark.slow
@pytest.mark.parametrize(("words", "told"), WRONG.items())
def test_a_wrong_option_is_refused_in_one_line(words, told, program, capsys):
    with pytest.raises(SystemExit) as ended:
        program("configs/rlvr1.py", *words.split())
    assert str(ended.value).startswith(f"error: {told}") and "\n" not in str(ended.value)
    assert capsys.readouterr().err == ""


CHROMIUM = shutil.which("chromium")


@pytest.mark.slow
@pytest.mark.skipif(not CHROMIUM, reason="chromium is absent: the page was not opened")
def test_the_page_draws_its_picture(tmp_path):
    hardware = Hardware(per_token=1.0, per_trained_token=0.01, sync=2.0)
    cfg = changed(Config(), steps=12, prompts_per_step=P, group_size=G, count=2)
    trace = world.run(cfg, hardware, varied(), picture=range(4, 8))
    page.write(trace, findings.find(trace), str(tmp_path / "page.html"))
    flags = ("--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--dump-dom")
    done = ran(CHROMIUM, *flags, (tmp_path / "page.html").as_uri())
    assert "INFO:CONSOLE" not in done.stderr
    assert done.stdout.count("step 6:") == 0 and done.stdout.count("<rect") > 20
