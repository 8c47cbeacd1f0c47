"""Whatever happens, and in whatever order: every prompt is trained once, in order, never too old.

`Driver` does to a RolloutBuffer what the driver does, one event at a time, and checks after each.
hypothesis searches for events that break it and shrinks them, at 10 ms a schedule; most schedules
are drawn from plain seeds instead, at half a millisecond each:

    GRPO_SCHEDULES=100000 python -m pytest tests/test_schedules.py
"""

import inspect
import os
import random
import sys
from collections import Counter
from typing import NamedTuple

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

import grpo_async
from grpo_async import Group, RolloutBuffer

SCHEDULES = int(os.environ.get("GRPO_SCHEDULES", 2000))
EVENTS = 60  # of a schedule
# How often each event is drawn; it does nothing where it is not possible.
WEIGHTS = {"dispatch": 30, "finish": 30, "train": 12, "advance": 10, "drop": 4, "retry": 3}
WEIGHTS |= {"kill": 3, "repair": 4, "finish_again": 4, "start_again": 4, "checkpoint": 3}
WEIGHTS |= {"restore": 1}


class Running(NamedTuple):
    """What a running slot works on; without an engine it waits for one."""

    prompt: int
    version: int
    engine: int | None


def snapshot(buffer: RolloutBuffer, prompts: dict[int, int], cursor: int) -> dict:
    """What a checkpoint holds, outside of a training: `prompts` are the running slots' rows."""
    ready = {group.slot: group for group in buffer.taken} | buffer.ready
    state = {"version": buffer.version, "ready": ready}
    return state | {"running": dict(prompts), "cursor": cursor}


def restored(state: dict, *sizes: int) -> tuple[RolloutBuffer, dict[int, int], int]:
    """(buffer, rows of the running slots, cursor) of a snapshot; those slots run again."""
    buffer = RolloutBuffer(*sizes)
    buffer.restore(state["version"], list(state["ready"].values()), {})
    for slot in state["running"]:
        buffer.start(slot)
    return buffer, dict(state["running"]), state["cursor"]


class Driver:
    """The two loops as events. Prompts are numbers; a group's `samples` is its prompt."""

    def begin(self, P: int, max_lag: int, engines: int, in_parts: bool) -> None:
        self.P = P
        self.max_lag = max_lag
        self.parts = P if in_parts else 1
        self.all_engines = engines
        self.buffer = RolloutBuffer(P, max_lag, self.parts)
        self.finished: list[int] = []  # slots that no step has taken, in the order of their ends
        self.taken: list[Group] = []  # of the step, of which others are not there yet
        self.engines = list(range(engines))
        self.cursor = self.next_slot = self.step = self.version = 0
        self.running: dict[int, Running] = {}
        self.trained: list[int] = []  # prompts, in the order of their slots
        self.dropped: dict[int, str] = {}  # prompt -> reason
        self.training = False
        self.saved = None
        self.seen: Counter[str] = Counter()  # events that were possible

    # --- generation

    def assign(self, slot: int, prompt: int, pick: int) -> None:
        engine = self.engines[pick % len(self.engines)] if self.engines else None
        self.running[slot] = Running(prompt, self.buffer.version, engine)

    def next_prompt(self) -> int:
        self.cursor += 1
        return self.cursor - 1

    def some_served(self, pick: int) -> int | None:
        served = [slot for slot, work in self.running.items() if work.engine is not None]
        return served[pick % len(served)] if served else None

    def dispatch(self, pick: int = 0) -> None:
        if self.version < self.next_slot // self.P - self.max_lag:
            refused(self.buffer.start, self.next_slot)
            return
        self.buffer.start(self.next_slot)
        self.assign(self.next_slot, self.next_prompt(), pick)
        self.next_slot += 1
        self.seen["dispatch"] += 1

    def finish(self, pick: int = 0) -> None:
        slot = self.some_served(pick)
        if slot is not None:
            work = self.running.pop(slot)
            self.buffer.put(Group(slot, work.version, 1, [None], work.prompt))
            self.finished.append(slot)
            self.seen["finish"] += 1

    def finish_again(self, pick: int) -> None:
        slot = pick % (self.next_slot + 1)
        if slot not in self.running:
            refused(self.buffer.put, Group(slot, self.version, 1, [None], -1))
            self.seen["finish_again"] += 1

    def start_again(self, pick: int) -> None:
        if held := [*self.finished, *self.running]:
            refused(self.buffer.start, held[pick % len(held)])
            self.seen["start_again"] += 1

    def drop(self, pick: int) -> None:
        slot = self.some_served(pick)
        if slot is not None:
            self.dropped[self.running[slot].prompt] = "TimeoutError"
            self.assign(slot, self.next_prompt(), pick)
            self.seen["drop"] += 1

    def retry(self, pick: int) -> None:
        slot = self.some_served(pick)  # its worker died, or it failed for the first time
        if slot is not None:
            self.assign(slot, self.running[slot].prompt, pick)
            self.seen["retry"] += 1

    def kill(self, pick: int) -> None:
        if self.engines:
            engine = self.engines.pop(pick % len(self.engines))
            for slot, work in self.running.items():
                if work.engine == engine:
                    self.assign(slot, work.prompt, pick)
            self.seen["kill"] += 1

    def repair(self, pick: int = 0) -> None:
        if len(self.engines) < self.all_engines:
            self.engines = list(range(self.all_engines))
            for slot, work in self.running.items():
                if work.engine is None:
                    self.assign(slot, work.prompt, pick)
            self.seen["repair"] += 1

    # --- training

    def train(self, pick: int = 0) -> None:
        part = self.P // self.parts
        first = [slot for slot in self.finished if slot // self.P == self.step][:part]
        assert self.buffer.has_part(self.step) == (len(first) == part)
        if self.training or len(first) < part:
            return
        groups = self.buffer.take(self.step)
        assert [group.slot for group in groups] == sorted(first)
        assert all(0 <= self.step - group.version <= self.max_lag for group in groups)
        self.finished = [slot for slot in self.finished if slot not in first]
        self.taken += groups
        self.seen["train"] += 1
        if len(self.taken) == self.P:
            self.taken.sort(key=lambda group: group.slot)
            self.trained += [group.samples for group in self.taken]
            self.taken = []
            self.step += 1
            self.training = True

    def advance(self, pick: int = 0) -> None:
        if self.training:
            self.version += 1
            self.training = False
            self.repair(pick)  # a sync starts what is missing
            self.buffer.advance(self.version)
            self.seen["advance"] += 1

    # --- crashes

    def checkpoint(self, pick: int = 0) -> None:
        if not self.training:
            prompts = {slot: work.prompt for slot, work in self.running.items()}
            state = snapshot(self.buffer, prompts, self.cursor)
            self.saved = state, list(self.trained), dict(self.dropped)
            self.seen["checkpoint"] += 1

    def restore(self, pick: int = 0) -> None:
        if self.saved:
            state, trained, dropped = self.saved
            self.trained = list(trained)
            self.dropped = dict(dropped)
            self.step = self.version = len(trained) // self.P
            self.training = False
            self.engines = list(range(self.all_engines))
            sizes = self.P, self.max_lag, self.parts
            self.buffer, prompts, self.cursor = restored(state, *sizes)
            self.finished = list(state["ready"])
            self.taken = []
            self.next_slot = len(trained) + len(prompts) + len(self.buffer.ready)
            self.running = {}
            for slot, prompt in prompts.items():
                self.assign(slot, prompt, pick)
            self.seen["restore"] += 1

    # --- what must hold

    def check(self) -> None:
        buffer, begin = self.buffer, self.step * self.P
        assert (buffer.version, buffer.next_step) == (self.version, self.step)
        assert buffer.running.keys() == self.running.keys()
        assert list(buffer.ready) == self.finished
        held = [*buffer.ready, *buffer.running, *(group.slot for group in buffer.taken)]
        assert sorted(held) == list(range(begin, self.next_slot))  # none twice, none forgotten
        assert len(held) <= self.P * (self.max_lag + 1)
        first_refused = (self.version + self.max_lag + 1) * self.P
        assert buffer.may_start(first_refused - 1) and not buffer.may_start(first_refused)
        assert len(self.trained) == begin
        prompts = [group.samples for group in [*buffer.ready.values(), *self.taken]]
        prompts += [work.prompt for work in self.running.values()]
        assert sorted([*self.trained, *self.dropped, *prompts]) == list(range(self.cursor))

    def drain(self) -> None:
        """Trains all that was started, and no more than the steps that were begun."""
        self.repair()
        while self.buffer.running or self.buffer.ready or self.taken or self.training:
            if self.next_slot % self.P:
                self.dispatch()
            self.finish()
            self.train()
            self.advance()
            self.check()
        assert sorted([*self.trained, *self.dropped]) == list(range(self.cursor))


def refused(call, argument) -> None:
    """Raises AssertionError unless the call raises ValueError."""
    try:
        call(argument)
    except ValueError:
        return
    raise AssertionError(f"{call.__name__} accepted {argument}")


# --- searched by hypothesis -----------------------------------------------------------------------

PICK = st.integers(0, 15)
FEW = st.integers(1, 3)


class Schedules(RuleBasedStateMachine, Driver):
    """The same events, as rules."""

    sizes = {"P": FEW, "max_lag": st.integers(0, 3), "engines": FEW, "in_parts": st.booleans()}
    begin = initialize(**sizes)(Driver.begin)
    check = invariant()(Driver.check)

    def teardown(self):
        if hasattr(self, "buffer"):
            self.drain()


for event in WEIGHTS:
    setattr(Schedules, event, rule(pick=PICK)(getattr(Driver, event)))
TestSchedules = Schedules.TestCase
TestSchedules.settings = settings(deadline=None, max_examples=120, stateful_step_count=EVENTS)


# --- drawn from seeds -----------------------------------------------------------------------------


def run_schedule(seed: int) -> Counter[str]:
    """One schedule, checked after every event; returns how often each event was possible."""
    numbers = random.Random(seed)
    driver = Driver()
    sizes = numbers.randint(1, 3), numbers.randint(0, 3), numbers.randint(1, 3)
    driver.begin(*sizes, in_parts=numbers.random() < 0.5)
    for event in numbers.choices(list(WEIGHTS), list(WEIGHTS.values()), k=EVENTS):
        getattr(driver, event)(int(numbers.random() * 64))
        driver.check()
    driver.drain()
    return driver.seen


def test_schedules_drawn_from_seeds():
    seen: Counter[str] = Counter()
    for seed in range(SCHEDULES):
        try:
            seen += run_schedule(seed)
        except Exception as error:
            error.add_note(f"run_schedule({seed})")
            raise
    assert seen.keys() == WEIGHTS.keys()
    assert min(seen.values()) > SCHEDULES / 10, seen


# --- the tests can fail ---------------------------------------------------------------------------

LAG = "prompts_per_step - self.max_lag"
FIRST = "ours[: self.part_size]"
ADVANCE = "self.version = version\n        self.wake()"
RESTORE = "self.version = version\n        self.next_step"
MUTANTS = {
    "starts a step too early": (LAG, f"{LAG} - 1"),
    "starts a step too late": (LAG, f"{LAG} + 1"),
    "starts a slot too late": (">= slot // self", ">= (slot + 1) // self"),
    "starts what may not start": ("not self.may_start(slot) or ", ""),
    "starts a running slot": ("slot in self.running or ", ""),
    "starts a ready slot": (" or slot in self.ready:", ":"),
    "forgets to run": ("self.running[slot] = time.monotonic()", "pass"),
    "runs on when it is ready": ("running.pop(group.slot, None)", "running.get(group.slot)"),
    "accepts it twice": ("running.pop(group.slot, None) is None", "running.pop(group.slot, 1) < 0"),
    "puts it elsewhere": ("self.ready[group.slot] =", "self.ready[group.slot ^ 1] ="),
    "advances too far": (ADVANCE, ADVANCE.replace("= version", "= version + 1")),
    "never advances": (ADVANCE, "self.wake()"),
    "goes on at another version": (RESTORE, RESTORE.replace("version\n", "version + 1\n")),
    "goes on at another step": ("next_step = version", "next_step = version + 1"),
    "forgets what was ready": ("for group in ready}", "for group in ready[1:]}"),
    "counts no group that was restored": ("Counter(slot //", "Counter(-1 - slot //"),
    "calls a begun part complete": (">= self.part_size", ">= self.part_size - 1"),
    "waits for what it took": ("self.waiting[step] -= self.part_size", "pass"),
    "takes groups of any step": (" if slot // self.prompts_per_step == step", ""),
    "takes what came last": (FIRST, "ours[-self.part_size :]"),
    "takes them as they came": ("sorted(came_first)", "list(came_first)"),
    "keeps what it takes": ("self.ready.pop(slot)", "self.ready[slot]"),
    "forgets the parts before": ("self.taken += groups", "self.taken = groups"),
    "stays at its step": ("self.next_step = step + 1", "self.next_step = step"),
    "refuses what is old enough": ("> self.max_lag", ">= self.max_lag"),
}
WRONG_STATES = {
    "version": lambda state: state["version"] + 1,
    "ready": lambda state: {},
    "running": lambda state: dict(list(state["running"].items())[1:]),
    "cursor": lambda state: state["cursor"] + 1,
}
HERE = sys.modules[__name__]


def first_error() -> Exception | None:
    """What ends the first of a few schedules that fails."""
    for seed in range(300):
        try:
            run_schedule(seed)
        except (AssertionError, ValueError, RuntimeError, KeyError) as error:
            return error
    return None


@pytest.mark.parametrize("name", MUTANTS)
def test_a_broken_buffer_is_caught(name, monkeypatch):
    source = inspect.getsource(RolloutBuffer)
    old, new = MUTANTS[name]
    assert source.count(old) == 1, f"{old!r} is not in RolloutBuffer any more"
    scope = dict(vars(grpo_async))
    exec(source.replace(old, new), scope)
    monkeypatch.setattr(HERE, "RolloutBuffer", scope["RolloutBuffer"])
    assert first_error()


@pytest.mark.parametrize("field", WRONG_STATES)
def test_a_wrong_checkpoint_is_caught(field, monkeypatch):
    def wrong(*args, snapshot=snapshot) -> dict:
        state = snapshot(*args)
        return state | {field: WRONG_STATES[field](state)}

    monkeypatch.setattr(HERE, "snapshot", wrong)
    assert first_error()


def test_a_sound_buffer_is_not():
    assert first_error() is None
