"""The driver's loops without their actors: in which order a run trains, saves and evaluates."""

import asyncio
import dataclasses
import gc
import json
import random
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest

import grpo_async
from core.errors import RunError
from core.jsonl import WriteError
from envs.services import Report
from grpo_async import Config, Group, Progress, Run
from rollout.episode import Sample
from runtime.checkpoints.archive import write_groups
from runtime.engines.fleet import Engine, State
from runtime.reporting.log import Log
from runtime.rollouts import dispatch
from runtime.startup import modes
from support.actors import Actor, Answer
from support.configs import changed

ROW = {"_line": 1, "agent_ref": {"name": "any"}}
EMPTY = Sample.empty().info()
INFO = SimpleNamespace(reward=1.0, score=1.0, continues=False, env="any")


def make_run(val_rows: int = 1, **fields) -> Run:
    """A run of which nothing is started; what it logs is lost."""
    run = Run(changed(Config(), **fields), [ROW], [ROW | {"_line": i} for i in range(val_rows)])
    names = ("step", "note", "drop", "write", "evaluation")
    run.log = SimpleNamespace(**dict.fromkeys(names, lambda *_: None))
    return run


class History:
    """What a run did and at which version, in order; `make` makes one with all groups ready."""

    def __init__(self):
        self.events: list[tuple[str, int]] = []

    def make(self, version: int = 0, **fields) -> Run:
        run = make_run(**fields | {"data": {"val": "val.jsonl"}, "prompts_per_step": 1})
        run.buffer.restore(version, [], {})
        for slot in range(version, run.cfg.steps):
            run.buffer.running[slot] = 0.0
            run.buffer.put(Group(slot, slot, 1, [], None))

        def record(name: str, answer=None):
            async def happens(*_):
                self.events.append((name, run.buffer.version))
                return answer

            return happens

        async def save(state: dict, groups: list, tasks: asyncio.TaskGroup) -> None:
            async def write(version: int):
                for _ in range(50):
                    await asyncio.sleep(0)
                self.events.append(("written", version))

            await run.checkpoints.written()
            self.events.append(("save", state["version"]))
            run.checkpoints.saving = tasks.create_task(write(state["version"]))

        run.train = record("train", {})
        run.engines.sync = record("sync", {})
        run.evaluate = record("evaluate")
        run.checkpoints.save = save
        return run

    def of(self, *names: str) -> str:
        """The events of these names, as `save 2, evaluate 2`."""
        return ", ".join(f"{name} {version}" for name, version in self.events if name in names)


@pytest.fixture
def history():
    return History()


def train(run: Run) -> None:
    """Its loop, among tasks that end when it fails."""

    async def main():
        async with asyncio.TaskGroup() as run.tasks:
            await run.train_forever()

    asyncio.run(main())


def test_a_checkpoint_does_not_wait_for_an_evaluation(history):
    train(history.make(steps=4, val_period=2, save_period=2))
    expected = "evaluate 0, save 2, evaluate 2, save 4, evaluate 4"
    assert history.of("evaluate", "save") == expected
    assert history.of("written") == "written 2, written 4"


def test_an_evaluation_that_fails_costs_no_checkpoint(history):
    run = history.make(steps=2, val_period=2, save_period=0)
    del run.evaluate  # the real one

    async def breaks(*_):
        if run.buffer.version:
            raise ValueError("the judge is down")
        return Group(0, 0, 1, [INFO], None)

    run.dispatcher.roll_out = breaks
    with pytest.raises(ExceptionGroup) as error:
        train(run)
    assert "every validation row failed" in str(error.value.exceptions)
    assert history.of("written") == "written 2"


@pytest.mark.parametrize("version", [2, 4])
def test_a_run_that_goes_on_makes_up_for_a_missing_evaluation(history, tmp_path, version):
    """Also after the last step. `evaluate` itself leaves out what was done."""
    (tmp_path / f"step_{version:06d}").mkdir()
    (tmp_path / f"step_{version:06d}" / "complete.json").touch()
    fields = {"steps": 4, "val_period": 2, "save_period": 0, "run_dir": str(tmp_path)}
    train(history.make(version, **fields))
    assert history.of("save", "evaluate").startswith(f"evaluate {version}")


def test_a_step_is_saved_although_no_engine_is_left_to_be_synced(history):
    """The run is to leave: the checkpoint holds the step, and no engine is waited for."""
    run = history.make(steps=3, val_period=3, save_period=0)

    async def sync(version):
        run.leave("SIGTERM")
        await asyncio.Event().wait()

    run.engines.sync = sync
    train(run)
    assert history.of("train", "save", "written") == "train 0, save 1, written 1"


def in_parts(parts: int, trained: list[int], **fields) -> Run:
    """A run of steps of 4 prompts, whose trainer notes which slots each of its calls has."""
    run = make_run(0, prompts_per_step=4, train_parts=parts, save_period=0, **fields)

    async def train(step: int, groups: list[Group]) -> dict[str, float]:
        trained.append([group.slot for group in groups])
        run.current_step.groups.extend(groups)
        return {"train_seconds": 0.0}

    run.train = train
    run.engines.sync = lambda version: asyncio.sleep(0, {})
    return run


def finish(run: Run, slot: int, tokens: int = 100, agrees: bool = False) -> None:
    run.buffer.start(slot)
    info = dataclasses.replace(EMPTY, tokens=tokens, trained_tokens=1, has_gradient=not agrees)
    run.buffer.put(Group(slot, run.buffer.version, 1, [info], None))


def test_parts_are_trained_as_they_come_and_small_ones_together():
    trained, logged = [], []
    run = in_parts(4, trained, steps=1, row_tokens=100)
    run.log.step = lambda step, groups, stats: logged.append([group.slot for group in groups])
    run.checkpoints.save = lambda *_: asyncio.sleep(0)
    for slot, tokens in ((2, 100), (0, 60), (3, 40), (1, 1)):
        finish(run, slot, tokens)
    train(run)
    assert trained == [[2], [0, 3], [1]] and logged == [[2, 0, 3, 1]]
    assert run.buffer.version == run.buffer.next_step == 1


@pytest.mark.parametrize(("skips", "expected"), [(True, [[0, 1, 2, 3]]), (False, [[0, 1], [2, 3]])])
def test_a_part_is_filled_by_what_is_computed(skips, expected):
    """Groups that agree are computed where nothing is skipped, as with a KL."""
    trained = []
    run = in_parts(4, trained, steps=1, row_tokens=200, skip_zero_advantage=skips)
    run.checkpoints.save = lambda *_: asyncio.sleep(0)
    for slot in range(4):
        finish(run, slot, agrees=True)
    train(run)
    assert trained == expected


def test_the_trainers_wait_is_for_groups_alone():
    """Not for slower ranks, or the driver, between two parts."""
    logged = []
    run = in_parts(2, [], steps=1, row_tokens=1)
    run.log.step = lambda step, groups, stats: logged.append(stats)
    run.checkpoints.save = lambda *_: asyncio.sleep(0)
    quick = run.train

    async def slow(step: int, groups: list[Group]) -> dict[str, float]:
        await asyncio.sleep(0.2)
        return await quick(step, groups) | run.current_step.seconds

    run.train = slow
    for slot in range(4):
        finish(run, slot)
    train(run)
    assert 0 < logged[0]["wait_for_rollouts"] < 0.1 < 0.4 <= logged[0]["step_seconds"]


async def test_only_rollouts_are_written_step_by_step_with_parts_as_well():
    written, logged = [], []
    run = in_parts(2, [], steps=2, row_tokens=1)
    run.log.step = lambda step, groups, stats: logged.append(step)

    async def write(step: int, groups: list[Group]) -> None:
        written.append((step, sorted(group.slot for group in groups)))

    run.checkpoints.write_samples = write
    for slot in (3, 6, 1, 0, 5, 2, 7, 4):
        finish(run, slot)
    await modes.collect(run)
    assert written == [(1, [0, 1, 2, 3]), (2, [4, 5, 6, 7])] and logged == [1, 2]


async def test_a_step_writes_one_table_and_the_scores_of_all_its_parts():
    tables, written = [], []
    fields = {"prompts_per_step": 2, "train_parts": 2, "row_tokens": 1, "sample_period": 2}
    run = make_run(0, **fields)

    def train_step(step: int, updates: list, *groups) -> tuple:
        return {"train_seconds": 1.0}, {"groups": len(groups), "step": step}, np.zeros(0)

    async def write(step: int, groups: list[Group], scores: list) -> None:
        places = [score.places for score in scores]
        written.append((step, [group.slot for group in groups], places))

    run.cluster = SimpleNamespace(trainers=[Actor(train_step=train_step)])
    run.engines.sync = lambda version: asyncio.sleep(0, {})
    run.log.mismatch = lambda *line: tables.append(line)
    run.checkpoints.write_samples = write
    for slot in (1, 0, 3, 2):
        finish(run, slot)
    async with asyncio.TaskGroup() as run.tasks:
        for step in range(2):
            stats = await run.train_and_sync(step)
            assert stats["train_seconds"] == 2.0
    assert tables == [(step + 1, [{"groups": 1, "step": step}] * 2) for step in range(2)]
    assert written == [(2, [3, 2], [[(0, 0)], [(1, 0)]])], "every second step"


def test_a_run_that_leaves_within_a_step_gives_the_groups_back():
    """Their gradients are lost, so a resumed run must train them again, in the same order."""
    trained, saved = [], []

    async def save(state: dict, groups: list, tasks: asyncio.TaskGroup) -> None:
        saved.append((state["version"], [group.slot for group in groups]))

    run = in_parts(2, trained, steps=3, row_tokens=1)
    run.checkpoints.save = save
    for slot in (6, 3, 1, 2):
        finish(run, slot)

    async def main() -> None:
        async with asyncio.TaskGroup() as run.tasks:
            training = run.tasks.create_task(run.train_forever())
            while not trained:
                await asyncio.sleep(0)
            run.leave("SIGTERM")
            await training

    asyncio.run(main())
    assert trained == [[1, 3]] and saved == [(0, [1, 3, 6, 2])]
    again = in_parts(2, trained, steps=3, row_tokens=1)
    groups = [*run.buffer.taken, *run.buffer.ready.values()]
    again.buffer.restore(0, groups, {})
    assert [group.slot for group in again.buffer.take(0)] == [1, 3]


class Lives:
    """A run that is told to leave again and again, and the one checkpoint that its lives share."""

    def __init__(self, seed: int):
        self.dice = dice = random.Random(seed)
        self.sizes = {"steps": 4, "prompts_per_step": 4, "row_tokens": 1}
        self.sizes |= {"max_lag": dice.randrange(3), "train_parts": dice.choice([1, 2, 4])}
        self.sizes |= {"save_period": dice.randrange(3)}
        self.disk: tuple[dict, list[Group]] | None = None
        self.finished: Counter[int] = Counter()  # groups by slot
        self.trained: list[list[int]] = []  # slots of each step

    async def turns(self, most: int) -> None:
        """Lets the others run for a random while."""
        for _ in range(self.dice.randrange(most)):
            await asyncio.sleep(0)

    def make(self) -> Run:
        run = make_run(0, **self.sizes)
        left = asyncio.Event()  # set by its last note
        nothing = dict.fromkeys(("step", "show_ready", "close"), lambda *_: None)
        run.log = SimpleNamespace(**nothing, note=lambda text: left.set())

        async def save(state: dict, groups: list[Group], tasks: asyncio.TaskGroup) -> None:
            self.disk = through_json(state), list(groups)

        async def roll_out(row: dict, slot: dispatch.Slot, n: int, version: int) -> Group:
            await self.turns(12)
            if left.is_set():  # it is cancelled a moment later
                await asyncio.Event().wait()
            self.finished[slot.number] += 1
            return Group(slot.number, version, 1, [EMPTY], None)

        async def train(step: int, groups: list[Group]) -> dict[str, float]:
            await self.turns(6)
            run.current_step.groups.extend(groups)
            if run.buffer.has_taken_all(step):
                self.trained.append([group.slot for group in run.current_step.groups])
            return {}

        run.checkpoints.save = save
        run.dispatcher.roll_out = roll_out
        run.train = train
        run.engines.repair_forever = lambda run: asyncio.Event().wait()
        run.sync_or_leave = lambda version: asyncio.sleep(0, {})
        run.cluster.on_signal = lambda leave: None
        return run

    async def live(self, turns: int) -> None:
        """One life, which is told to leave after so many turns of the event loop."""
        run = self.make()

        async def start() -> None:
            if self.disk:
                state, groups = self.disk
                run.restore(state | {"evaluated": -1}, groups)

        async def leave() -> None:
            for _ in range(turns):
                await asyncio.sleep(0)
            run.leave("SIGTERM")

        leaving = asyncio.create_task(leave())
        await run.run(modes.Loops(start, run.generate_forever, run.train_forever))
        leaving.cancel()


@pytest.mark.parametrize("seed", range(60))
def test_no_life_of_a_run_loses_a_group_that_has_finished(seed):
    """However often it saves, in how many parts it trains, and whenever it is told to leave."""
    lives = Lives(seed)
    for _ in range(6):
        asyncio.run(lives.live(lives.dice.randrange(40)))
    asyncio.run(lives.live(10_000))
    assert lives.finished == Counter(range(16)), "a group was lost, and was generated again"
    assert [sorted(slots) for slots in lives.trained] == [[*range(i, i + 4)] for i in (0, 4, 8, 12)]


@pytest.mark.parametrize(("finishes", "saves"), [(False, "save 1"), (True, "save 1, save 1")])
def test_a_run_that_leaves_saves_again_only_what_is_new(finishes, saves, history):
    """It is told to after a checkpoint of its step, and perhaps after another group."""
    run = history.make(steps=3, save_period=1, val_period=1)
    late = run.buffer.ready.pop(2)

    async def evaluate() -> None:
        if run.buffer.version == 1:
            run.leave("SIGTERM")
            if finishes:
                run.buffer.ready[2] = late

    run.evaluate = evaluate
    train(run)
    assert history.of("save") == saves


def test_a_run_from_another_folder_saves_before_all_else(history, tmp_path):
    fields = {"steps": 4, "val_period": 1, "save_period": 0, "run_dir": str(tmp_path)}
    train(history.make(2, **fields))
    expected = "save 2, written 2, evaluate 2, evaluate 3, save 4, evaluate 4, written 4"
    assert history.of("save", "written", "evaluate") == expected


async def test_each_version_is_evaluated_once_and_none_by_a_run_that_leaves():
    run = make_run()
    evaluated = []
    run.log.evaluation = lambda version, *_: evaluated.append(version)
    run.dispatcher.roll_out = lambda *_: asyncio.sleep(0, Group(0, 0, 1, [INFO], None))
    await run.evaluate()
    await run.evaluate()
    run.buffer.version = 3
    run.leaving = "SIGTERM"
    await run.evaluate()
    run.leaving = ""
    await run.evaluate()
    assert evaluated == [0, 3]


async def test_an_evaluation_leaves_out_rows_that_fail_and_names_them():
    run = make_run(val_rows=3, data={"val": "val.jsonl", "val_samples": 2}, val_period=1)
    run.buffer.version = 4
    logged = []
    dropped = []
    run.log.evaluation = lambda *line: logged.append(line)
    run.log.drop = lambda *line: dropped.append(line)

    async def roll_out(row, slot, n, version):
        assert n == 2 and slot == (row["_line"], 4)
        if slot.number == 1:
            raise ValueError("the judge is down")
        return Group(slot.number, version, row["_line"], [INFO] * n, None)

    run.dispatcher.roll_out = roll_out
    await run.evaluate()
    assert logged == [(4, [[INFO] * 2] * 2, 1)]
    ((slot, prompt, row, error),) = dropped
    assert (slot, prompt, row, str(error)) == ((1, 4), 1, "val.jsonl:1", "the judge is down")


async def test_an_evaluation_is_given_up_when_the_run_is_to_leave(monkeypatch):
    run = make_run(val_rows=3)
    cancelled = []
    complaints = []
    asyncio.get_running_loop().set_exception_handler(lambda _, what: complaints.append(what))
    monkeypatch.setattr(dispatch, "cancel", cancelled.append)
    fleet = run.engines.fleet
    fleet.engines["engine"] = engine = Engine("engine", 0, "", None, State.FRESH)
    fleet.all_synced()
    well = Report({}, Counter())
    worker = Actor(rollout_group=lambda *_: (Answer(...), None, b""), call=well)
    run.cluster.start_worker = lambda: worker
    evaluation = asyncio.create_task(run.evaluate())
    await asyncio.sleep(0.01)
    assert engine.groups == 3
    run.leave("SIGTERM")
    await asyncio.wait_for(evaluation, 5)
    assert len(cancelled) == 3, "nothing may go on for nobody"
    assert engine.groups == 0
    del evaluation
    gc.collect()
    assert not complaints


# --- prompts that fail ----------------------------------------------------------------------------


async def test_a_prompt_that_fails_gives_way_to_the_next():
    run = make_run(prompts_per_step=1)
    run.MAX_DROPPED = 2
    run.rows = [ROW | {"_line": line} for line in (1, 2, 3, 4)]
    dropped = []
    run.log.drop = lambda *line: dropped.append(line[:3])
    run.log.show_ready = lambda count: None

    async def roll_out(row, slot, n, version):
        if row["_line"] in (1, 2):
            raise ValueError("unanswerable")
        return Group(slot.number, version, row["_line"], [INFO], "samples")

    run.dispatcher.roll_out = roll_out
    run.progress.next_slot = 1
    run.buffer.start(0)
    run.assign(0)
    await run.fill(0)
    assert run.buffer.ready[0].line == 3 and run.buffer.ready[0].samples == "samples"
    assert dropped == [((0, None), i, f"data/tiny/train.jsonl:{i + 1}") for i in (0, 1)]
    assert run.buffer.dropped == {"ValueError": 2} and run.dropped_in_a_row == 0
    assert run.progress == Progress(1, 3, {})


@pytest.mark.parametrize(("error", "dropped", "in_flight"), [
    (ValueError("the judge is down"), {"ValueError": 3}, {0: 2}),
    (WriteError("rollouts.jsonl: full"), {"WriteError": 1}, {0: 0}),  # it is tried again
    (RunError("no worker starts"), {"RunError": 1}, {0: 0}),
])  # fmt: skip
async def test_what_fails_on_and_on_ends_the_run(error, dropped, in_flight):
    run = make_run()
    run.MAX_DROPPED = 2
    run.log = Log()
    run.log.line = lambda *_: None

    async def fails(*_):
        raise error

    run.dispatcher.roll_out = fails
    run.buffer.start(0)
    run.assign(0)
    with pytest.raises(type(error), match=str(error)):
        await run.fill(0)
    assert run.buffer.dropped == dropped and run.progress.in_flight == in_flight


# --- modes ----------------------------------------------------------------------------------------


async def test_an_evaluation_that_is_cut_short_does_not_end_well():
    run = make_run(eval_only=True, data={"val": "v"}, val_period=1)
    run.dispatcher.roll_out = lambda *_: asyncio.sleep(60)
    asyncio.get_running_loop().call_later(0.01, run.leave, "SIGTERM")
    with pytest.raises(RuntimeError, match="before the evaluation was done .SIGTERM."):
        await modes.loops(run).train()
    assert run.evaluated == -1


async def test_a_replay_goes_on_with_the_files_that_were_not_trained(tmp_path):
    """Step 1 is trained and step 2 in the checkpoint: 3 and 4 are read, each at its place."""
    for step in range(1, 5):
        write_groups(str(tmp_path / f"samples/step_{step:06d}.npz"), [(0, 0, step)], [], [])
    fields = {"replay": str(tmp_path), "resume": "auto", "run_dir": "x"}
    run = make_run(prompts_per_step=1, **fields)
    loops = modes.loops(run)
    read = []

    def task(_, path, returns):
        read.append(path[-10:-4])
        return [Answer([(0, 0, int(path[-5]), [])]), "samples"]

    run.cluster.task = task
    state = {"version": 1, "dropped": {}, "evaluated": -1}
    state["progress"] = {"next_slot": 2, "next_prompt": 2, "in_flight": {}}
    run.restore(state, [Group(1, 0, 2, [], None)])
    reading = asyncio.create_task(loops.generate())
    lines = []
    for step in (1, 2, 3):
        await run.buffer.until(lambda step=step: run.buffer.has_part(step))
        lines += [group.line for group in run.buffer.take(step)]
        run.buffer.wake()
    await reading
    assert read == ["000003", "000004"] and lines == [2, 3, 4]
    assert run.progress == Progress(4, 4, {})
    assert await run.sync_or_leave(4) == {}, "no engine is there to take an update"


def test_a_file_that_is_being_written_is_not_replayed(tmp_path):
    write_groups(str(tmp_path / "samples/step_000001.npz"), [(0, 0, 1)], [], [])
    (tmp_path / "samples/step_000002.npz.partial.npz").write_bytes(b"half")
    run = make_run(replay=str(tmp_path), prompts_per_step=1)
    assert [path.name for path in modes.replayed_files(run)] == ["step_000001.npz"]


COMMANDS = {
    "eval_only": {"eval_only": True, "data": {"val": "v"}},
    "rollout_only": {"rollout_only": True},
    "export": {"export": 3, "run_dir": "x"},
    "replay": {"replay": "elsewhere"},
    "train": {},
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_fork_that_renames_the_training_loop_never_trains_by_mistake(name, monkeypatch):
    """What needs the loop fails by its name before anything is started; the rest works."""
    loop = Run.train_forever
    monkeypatch.delattr(Run, "train_forever")
    monkeypatch.setattr(Run, "learn_forever", loop, raising=False)
    for name_of_check in ("replayed_files", "check_checkpoint"):
        monkeypatch.setattr(modes, name_of_check, lambda run: [])
    run = make_run(**COMMANDS[name])
    if name in ("train", "replay"):
        with pytest.raises(AttributeError, match="no attribute 'train_forever'"):
            modes.loops(run)
        return
    assert modes.loops(run).train.func in (modes.evaluate, modes.collect, modes.export)


# --- what a checkpoint holds ----------------------------------------------------------------------


def through_json(state: dict) -> dict:
    return json.loads(json.dumps(state))


def test_the_state_of_a_run_comes_back():
    run = make_run()
    run.progress = Progress(next_slot=9, next_prompt=11, in_flight={7: 8, 8: 10})
    run.buffer.version = 3
    run.buffer.dropped["ValueError"] += 2
    state = through_json(run.state()) | {"evaluated": 2}
    other = make_run()
    other.restore(state, [Group(6, 2, 1, [], None)])
    assert other.progress == run.progress and other.evaluated == 2
    assert (other.buffer.version, other.buffer.next_step) == (3, 3)
    assert other.buffer.dropped == {"ValueError": 2} and list(other.buffer.ready) == [6]


@grpo_async.checked_dataclass
class ForkedProgress(Progress):
    difficulty: float = 0.5
    solved: dict[int, int] = dataclasses.field(default_factory=dict)


def test_a_field_that_a_fork_adds_to_progress_is_saved_and_restored(monkeypatch):
    """A checkpoint from before that field gives its default."""
    monkeypatch.setattr(grpo_async, "Progress", ForkedProgress)
    run = make_run()
    run.progress.difficulty = 0.75
    run.progress.solved = {4: 1}
    state = through_json(run.state()) | {"evaluated": -1}
    other = make_run()
    other.restore(state, [])
    assert (other.progress.difficulty, other.progress.solved) == (0.75, {4: 1})
    del state["progress"]["difficulty"]
    other.restore(state, [])
    assert other.progress.difficulty == 0.5


async def test_a_checkpoint_holds_a_group_that_finished_while_it_waited_for_a_repair():
    """Its slot must be in flight or ready: a slot in neither would never be generated again."""
    run = Run(changed(Config(), prompts_per_step=1, steps=4), [ROW], [])
    saved = {}

    async def save(state, groups, tasks):
        saved.update(state, ready=[group.slot for group in groups])

    run.checkpoints = SimpleNamespace(save=save, written=lambda: asyncio.sleep(0))
    run.tasks = None
    run.buffer.start(0)
    run.progress.in_flight[0] = 0
    async with run.training:  # a repair
        saving = asyncio.create_task(run.save())
        await asyncio.sleep(0.01)
        del run.progress.in_flight[0]
        run.buffer.put(Group(0, 0, 1, [], None))
    await saving
    assert set(saved["progress"]["in_flight"]) | set(saved["ready"]) == {0}
