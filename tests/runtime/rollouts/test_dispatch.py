"""Rollouts of one prompt: attempts, the deaths of engines, deadlines, and who is chosen."""

import asyncio
import contextlib
from collections import Counter
from types import SimpleNamespace

import pytest

from core import waits
from core.errors import RunError
from core.jsonl import WriteError
from envs import registry
from envs.services import Away, Need, Report
from grpo_async import Config
from rollout.episode import Group
from runtime.engines.fleet import CHECK_SECONDS
from runtime.rollouts import dispatch
from runtime.rollouts.dispatch import Dispatcher, Slot
from support.actors import Actor, Answer
from support.configs import changed

ROW = {"_line": 5}
WELL = Report({}, Counter())


def worker(rollout) -> Actor:
    """One that lives and asks no judge."""
    return Actor(rollout_group=rollout, call=WELL)


def silent() -> tuple:
    """What a call gives of which nothing comes."""
    return Answer(...), "samples", b""


class Engines:
    """A fleet whose health checks answer as `alive` says, True once it is empty."""

    def __init__(self, alive: list[bool]):
        self.alive = alive
        self.leased = []
        self.given_back = []

    @contextlib.asynccontextmanager
    async def lease(self):
        engine = f"engine {len(self.leased)}"
        self.leased.append(engine)
        try:
            yield engine
        finally:
            self.given_back.append(engine)

    async def is_alive(self, engine) -> bool:
        assert engine in self.leased
        return self.alive.pop(0) if self.alive else True


class Setting:
    """A dispatcher of workers that answer with `answers` one after the other, then with "infos"."""

    def __init__(
        self, monkeypatch, answers=(), alive=(), workers=1, attempts=3, answer=25.0, **fields
    ):
        monkeypatch.setattr(waits, "ANSWER_SECONDS", answer)
        self.answers = list(answers)
        self.cancelled = []
        self.killed = []
        self.waits = []
        self.fleet = Engines(list(alive))
        self.workers = [worker(self.answer) for _ in range(workers)]
        cfg = changed(Config(), rollout_workers=workers, **fields)
        self.started = []  # ranks, one for each worker that was started
        cluster = SimpleNamespace(start_worker=self.start_worker)
        shared = (cfg, cluster, self.fleet, lambda: "2 groups ready")
        self.written = []
        self.dispatcher = Dispatcher(*shared, self.write)
        self.dispatcher.attempts = attempts
        crew = self.dispatcher.crew
        crew.seats.put_nowait(workers)
        self.launch = crew.launch
        monkeypatch.setattr(crew, "launch", self.note_launch)
        monkeypatch.setattr(dispatch, "cancel", self.cancelled.append)
        monkeypatch.setattr(dispatch, "kill", self.killed.append)
        sleep = asyncio.sleep

        async def nap(seconds: float):
            if seconds != CHECK_SECONDS:
                self.waits.append(seconds)
            await sleep(seconds if seconds == CHECK_SECONDS else 0)

        monkeypatch.setattr(dispatch.asyncio, "sleep", nap)

    async def write(self, lines: bytes) -> None:
        self.written.append(lines)

    def note_launch(self, rank: int) -> Actor:
        self.started.append(rank)
        return self.launch(rank)

    def start_worker(self) -> Actor:
        """The worker of a rank; another one where it was lost, or has a rank of its own."""
        rank = self.started[-1]
        if rank < len(self.workers) and self.workers[rank] not in self.killed:
            return self.workers[rank]
        self.workers.append(worker(self.answer))
        return self.workers[-1]

    def lose(self, worker: Actor) -> RuntimeError:
        """A worker dies: it answers nothing any more."""
        worker.answers["call"] = RuntimeError("it died")
        return RuntimeError("it died")

    def answer(self, *_):
        found = self.answers.pop(0) if self.answers else "infos"
        return (found, "samples", b"lines") if isinstance(found, str) else found

    def roll_out(self, slot: int = 9, n: int = 2) -> Group:
        return asyncio.run(self.dispatcher.roll_out(ROW, Slot(slot), n, 5))


@pytest.fixture
def setting(monkeypatch):
    return lambda **fields: Setting(monkeypatch, **fields)


def test_a_worker_gets_engine_row_slot_and_count(setting):
    made = setting()
    rollouts = made.roll_out()
    assert rollouts.infos == "infos" and rollouts.samples.result.result() == "samples"
    assert made.workers[0].called("rollout_group") == [["engine 0", ROW, Slot(9), 2]]
    assert made.fleet.given_back == ["engine 0"] and not made.cancelled and not made.waits


def test_the_lines_of_a_group_are_written_once_and_held_by_nobody(setting):
    """The first attempt is given up between its infos and its lines."""
    tries = [("infos", "samples", lines) for lines in (Answer(...), b"second")]
    made = setting(answers=tries, timeouts={"rollout": 0.05})
    made.roll_out()
    assert made.written == [b"second"] and len(made.cancelled) == 1


def test_lines_that_cannot_be_written_are_no_failure_of_the_prompt(setting):
    made = setting()

    async def refuse(lines):
        raise WriteError("full")

    made.dispatcher.write = refuse
    with pytest.raises(WriteError):
        made.roll_out()
    assert len(made.fleet.leased) == 1


async def test_an_error_of_the_run_ends_an_evaluation_at_once(setting):
    """The rows that are not answered yet would each wait for the same; other errors are results."""
    made = setting(answers=[ValueError("bad row"), "infos"], attempts=1)

    async def all_rows():
        slots = [Slot(i, 4) for i in range(3)]
        return await made.dispatcher.roll_out_all([ROW] * 3, slots, 1)

    failed, *groups = await all_rows()
    assert str(failed) == "bad row" and [group.infos for group in groups] == ["infos"] * 2

    async def hang(lines):
        if len(made.written) == 3:
            await asyncio.Event().wait()
        made.written.append(lines)
        raise WriteError("hangs")

    made.dispatcher.write = hang
    with pytest.raises(WriteError, match="hangs"):
        await asyncio.wait_for(all_rows(), 5)
    assert len(made.fleet.given_back) == 6


def test_a_prompt_that_fails_is_tried_again_by_the_same_worker(setting):
    """The worker keeps what had been written of the answers; the engine may be another one."""
    made = setting(answers=[ValueError(), ValueError()], workers=3)
    assert made.roll_out().infos == "infos"
    assert [len(w.called("rollout_group")) for w in made.workers] == [3, 0, 0]
    assert made.fleet.given_back == made.fleet.leased == ["engine 0", "engine 1", "engine 2"]
    assert made.waits == [2, 4], "each wait is twice the last"
    assert len(made.cancelled) == 2 and not made.workers[0].called("forget")


def test_the_last_error_is_raised_after_the_last_attempt(setting):
    made = setting(answers=map(ValueError, ["first", "second", "third"]), attempts=3)
    with pytest.raises(ValueError, match="third"):
        made.roll_out()
    assert len(made.workers[0].called("rollout_group")) == 3
    assert made.workers[0].called("forget") == [[Slot(9), 5]], "its drafts are of no use any more"
    assert len(made.cancelled) == len(made.fleet.given_back) == 3


def test_attempts_that_an_engine_s_death_ended_do_not_count(setting):
    made = setting(answers=[ValueError()] * 5, alive=[False] * 4 + [True], attempts=2)
    assert made.roll_out().infos == "infos"
    assert len(made.fleet.leased) == 6 and made.waits == [1, 1, 1, 1, 2]


def test_a_try_that_an_engine_s_death_ended_is_not_the_last_one(setting):
    """The worker died in the try that counted last, so the prompt has one more, alone."""
    made = setting(alive=[True, False], attempts=1)
    first = made.workers[0]
    first.answers["rollout_group"] = lambda *_: made.lose(first)
    made.answers = [ValueError("the engine died")]
    assert made.roll_out().infos == "infos"
    assert len(made.fleet.leased) == 3


def test_deaths_and_failures_are_counted_apart(setting):
    alive = [False, True, False, True]
    made = setting(answers=[ValueError(str(i)) for i in range(4)], alive=alive, attempts=2)
    with pytest.raises(ValueError, match="3"):
        made.roll_out()


def test_a_group_that_takes_too_long_is_named_with_the_state_of_the_run(setting):
    made = setting(answers=[silent()], attempts=1, timeouts={"rollout": 0.05})
    with pytest.raises(TimeoutError, match=r"the rollouts of slot 9, line 5\. 2 groups ready"):
        made.roll_out()
    assert len(made.cancelled) == 1


async def test_rollouts_that_nobody_waits_for_any_more_are_cancelled_and_not_tried_again(setting):
    call, *_ = answer = silent()
    made = setting(answers=[answer])
    task = asyncio.create_task(made.dispatcher.roll_out(ROW, Slot(9), 2, 5))
    while not made.workers[0].called("rollout_group"):
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert made.cancelled == [call] and made.fleet.given_back == ["engine 0"]
    assert len(made.workers[0].called("rollout_group")) == 1


def test_prompts_go_to_the_workers_in_turn(setting):
    made = setting(workers=3)
    for slot in range(7):
        made.roll_out(slot)
    slots = [[call[2].number for call in w.called("rollout_group")] for w in made.workers]
    assert slots == [[0, 3, 6], [1, 4], [2, 5]]


# --- workers that die or hang ---------------------------------------------------------------------


def test_a_group_whose_worker_died_is_tried_alone_and_the_attempt_counts(setting):
    made = setting(workers=2)
    first = made.workers[0]
    first.answers["rollout_group"] = lambda *_: made.lose(first)
    assert made.roll_out().infos == "infos"
    assert made.started == [0, 2], "the suspect gets a worker of its own"
    assert made.killed == [first] and made.waits == [2]
    made.roll_out(1)
    made.roll_out(2)
    assert made.started == [0, 2, 1, 0], "the lost one is replaced when its turn comes"


async def test_only_the_row_that_kills_its_workers_is_given_up(setting):
    """Three groups are on the worker that slot 1 kills; each is alone when it is tried again."""
    made = setting(attempts=3)
    running = []
    together = []
    died = asyncio.Event()

    def rollout(worker):
        async def group(engine, row, slot, n):
            running.append(slot.number)
            together.append(len(running))
            if len(running) == 3:
                died.set()  # with all three on it
            await (died.wait() if len(together) <= 3 else asyncio.sleep(0))
            running.remove(slot.number)
            if len(together) <= 3 or slot.number == 1:
                raise made.lose(worker)
            return f"infos of {slot.number}"

        def call(*given):
            answer = Answer(...)
            done = asyncio.ensure_future(group(*given)).add_done_callback
            done(lambda task: answer.give(task.exception() or task.result()))
            return answer, "samples", b""

        return call

    def start():
        made = worker(None)
        made.answers["rollout_group"] = rollout(made)
        return made

    made.dispatcher.crew.cluster.start_worker = start
    every = (made.dispatcher.roll_out(ROW, Slot(slot), 2, 5) for slot in range(3))
    first, guilty, last = await asyncio.gather(*every, return_exceptions=True)
    assert (first.infos, last.infos) == ("infos of 0", "infos of 2")
    alone = "crashed its worker while running alone: the row or its environment is at fault"
    assert str(guilty) == f"the rollouts of slot 1, line 5 {alone}"
    assert together == [1, 2, 3, 1, 1, 1, 1]


@pytest.mark.parametrize("attempts", [1, 2])
def test_a_group_is_tried_alone_once_at_least(setting, attempts):
    made = setting(attempts=attempts)
    (first,) = made.workers
    first.answers["rollout_group"] = lambda *_: made.lose(first)
    assert made.roll_out().infos == "infos" and made.started == [0, 1]


@pytest.mark.parametrize(("cpus", "seats"), [(1, [3]), (3, [3]), (9, [3, 4, 5, 6])])
async def test_suspects_may_take_half_of_the_cpus(setting, monkeypatch, cpus, seats):
    made = setting(workers=3)
    crew = made.dispatcher.crew
    crew.seats.get_nowait()  # the setting's own
    monkeypatch.setattr(dispatch, "cpus", lambda: cpus)
    crew.start()
    assert made.started == [0, 1, 2]
    assert sorted(crew.seats.get_nowait() for _ in range(crew.seats.qsize())) == seats


async def test_a_worker_that_hangs_is_killed_and_its_groups_go_on(setting):
    """Its event loop is blocked: nothing of it returns, nor the question whether it lives."""
    call, *_ = answer = silent()
    made = setting(answers=[answer], answer=0.05, timeouts={"start": 0.05})
    (first,) = made.workers
    replies = [WELL]  # at its start
    first.answers["call"] = lambda *_: replies.pop() if replies else Answer(...)

    def kill(worker):
        made.killed.append(worker)
        call.give(RuntimeError("killed"))

    dispatch.kill = kill  # the fixture takes it back
    assert (await made.dispatcher.roll_out(ROW, Slot(9), 2, 5)).infos == "infos"
    assert made.killed == [first] and made.started == [0, 1]


async def test_a_worker_that_does_not_start_costs_no_try_of_the_prompt(setting):
    made = setting(attempts=1)
    made.workers[0].answers["call"] = RuntimeError("no memory left")
    assert (await made.dispatcher.roll_out(ROW, Slot(9), 2, 5)).infos == "infos"
    assert made.started == [0, 0] and made.killed == made.workers[:1]


async def test_workers_that_never_start_end_the_run_and_no_row_is_blamed(setting):
    made = setting(attempts=1)
    answers = {"call": RuntimeError("no memory left")}
    made.dispatcher.crew.cluster.start_worker = lambda: Actor(**answers)
    with pytest.raises(RunError, match="3 rollout workers did not start"):
        await made.dispatcher.roll_out(ROW, Slot(9), 2, 5)
    assert made.started == [0, 0, 0] and not made.fleet.leased


async def test_a_worker_gets_more_time_for_its_first_answer(setting):
    made = setting(answer=0.01, timeouts={"start": 60})
    (first,) = made.workers
    first.answers["call"] = late = Answer(...)
    crew = made.dispatcher.crew
    asked = asyncio.create_task(crew.of_rank(0))
    await asyncio.wait([asked], timeout=0.05)
    assert not asked.done(), "it is starting"
    late.give(WELL)
    assert await asked is first
    first.answers["call"] = lambda *_: Answer(...)
    assert not await crew.is_alive(first) and made.killed == [first]


# --- judges that are down -------------------------------------------------------------------------

AWAY = Report({"judges.general": "http://h:1/v1, for 70 s: status 503"}, Counter())


def test_an_attempt_that_a_judge_s_absence_ended_does_not_count(setting):
    answers = [ValueError("first"), *(Away("general") for _ in range(9)), ValueError("last")]
    made = setting(answers=answers, attempts=2)
    with pytest.raises(ValueError, match="last"):
        made.roll_out()
    assert len(made.workers[0].called("rollout_group")) == 11
    assert made.workers[0].called("forget") == [[Slot(9), 5]], "the answers are kept up to then"


async def test_rows_that_need_an_absent_judge_wait_and_others_do_not(setting, monkeypatch):
    needs = {1: ("judges.general", "sandbox"), 2: ("judges.safety",), 3: ()}

    def of_row(row: dict) -> list[Need]:
        return [Need(name, str) for name in needs[row["_line"]]]

    monkeypatch.setattr(registry, "declared_needs", of_row)
    made = setting()
    crew = made.dispatcher.crew
    made.workers[0].answers["call"] = AWAY
    first = await crew.of_rank(0)
    roll_out = made.dispatcher.roll_out
    calls = [asyncio.create_task(roll_out({"_line": i}, Slot(i), 2, 0)) for i in needs]
    await asyncio.wait(calls, timeout=0.1)
    assert [call.done() for call in calls] == [False, True, True]
    assert len(made.fleet.leased) == 2
    first.answers["call"] = WELL
    crew.receive(first, WELL)
    assert (await calls[0]).infos == "infos"


async def test_no_deadline_runs_while_a_judge_is_away(setting):
    """Neither that of a group, which is under way, nor that of a step."""
    made = setting(answers=[silent()], attempts=1, timeouts={"rollout": 0.3})
    crew = made.dispatcher.crew
    group = asyncio.create_task(made.dispatcher.roll_out(ROW, Slot(9), 2, 5))
    forever = made.dispatcher.wait(0.3, "the groups of step 1", asyncio.Event().wait())
    step = asyncio.create_task(forever)
    while not made.workers[0].called("rollout_group"):
        await asyncio.sleep(0)
    crew.receive("another worker", AWAY)
    told = "2 groups ready; judges.general is down: http://h:1/v1, for 70 s: status 503"
    assert made.dispatcher.state() == told
    nothing = asyncio.Event().wait()
    with pytest.raises(TimeoutError, match="a training step"):  # which needs no judge
        await made.dispatcher.wait(0.3, "a training step", nothing, needs_judges=False)
    done, _ = await asyncio.wait([group, step], timeout=1.0)
    assert not done
    crew.receive("another worker", WELL)
    with pytest.raises(TimeoutError, match="the groups of step 1. 2 groups ready$"):
        await step
    with pytest.raises(TimeoutError, match="the rollouts of slot 9"):
        await group


# --- slots ----------------------------------------------------------------------------------------


def test_a_slot_is_named_by_its_index_and_a_validation_row_by_its_version_too():
    assert f"{Slot(7)}" == "7" and f"{Slot(7, 20)}" == "val-20-7" and f"{Slot(7, 0)}" == "val-0-7"


def test_a_record_names_the_step_or_the_evaluation():
    assert Slot(7).record(4) == {"step": 2, "slot": 7, "evaluation": None}
    assert Slot(8).record(4) == {"step": 3, "slot": 8, "evaluation": None}
    assert Slot(7, 0).record(4) == {"step": None, "slot": 7, "evaluation": 0}


async def test_starved_checks_reach_the_metrics(monkeypatch):
    setting = Setting(monkeypatch)
    setting.dispatcher.crew.receive("worker", WELL._replace(starved=Counter({"math/error": 2})))
    assert setting.dispatcher.meters() == {"starved_checks/math/error": 2.0}


async def test_a_late_report_of_a_worker_that_was_given_up_begins_no_outage(monkeypatch):
    """Two health checks of one worker: the first one times out, then the second is answered."""
    setting = Setting(monkeypatch, answer=0.2)
    crew = setting.dispatcher.crew
    crew.receive(setting.workers[0], Report({}, Counter(failed=1)))  # outages are watched now
    crew.ranks[setting.workers[0]] = 0
    crew.started.add(setting.workers[0])
    late = Answer(...)
    answers = [Answer(...), late]
    setting.workers[0].answers["call"] = lambda *_: answers.pop(0)
    first = asyncio.create_task(crew.is_alive(setting.workers[0]))
    await asyncio.wait([first], timeout=0.1)
    second = asyncio.create_task(crew.is_alive(setting.workers[0]))
    assert not await first and setting.killed == setting.workers
    late.give(AWAY)
    assert not await second and not crew.outages.away()
