"""Weight updates of several processes over gloo: node-mates of rank 0 pass on what it sends."""

import os
import signal
import time

import pytest

from grpo_async import Config
from runtime.processes.placement import node_mates
from support.sync_ranks import MIDDLE, TENSORS, Engine, Process, Trainer

SOON = 30.0  # seconds in which what is told to end has ended, on a busy machine
pytestmark = pytest.mark.slow


class Group:
    """Trainer ranks on the nodes `homes`, and engine workers, joined as Fleet.connect does."""

    def __init__(self, homes: list[str], workers: int, seconds: float = 60.0, whole: bool = False):
        self.trainers = [Process(Trainer, seconds, whole) for _ in homes]
        self.senders = [self.trainers[rank] for rank in (0, *node_mates(Config(), homes))]
        port = self.trainers[0]("listen")
        for rank, trainer in enumerate(self.trainers):
            trainer.ask("start", port, rank, len(homes))
        self.wire, *_ = [trainer.answer() for trainer in self.trainers]
        self.engines = []
        self.connect(workers)

    def connect(self, workers: int) -> None:
        """New engine workers, and a process group with them and those that live."""
        self.engines += [Process(Engine) for _ in range(workers)]
        port, world = self.senders[0]("listen"), len(self.senders) + len(self.engines)
        for rank, sender in enumerate(self.senders):
            sender.ask("join", port, rank, world)
        for rank, engine in enumerate(self.engines, len(self.senders)):
            engine.ask("join", self.wire, port, rank, world)
        assert {process.answer() for process in self.senders + self.engines} == {None}

    def update(self, version: int, stalls: int | None = None, dies: int | None = None) -> None:
        """Begins one; in its middle a trainer rank stalls, or an engine worker is killed."""
        for rank, trainer in enumerate(self.trainers):
            trainer.ask("send", version, rank == stalls)
        for number, engine in enumerate(self.engines):
            engine.ask("receive", version, number == dies)

    def check(self, version: int) -> None:
        """An update reaches all engines to the bit."""
        self.update(version)
        (sent, _), *others = of_trainers = [trainer.answer() for trainer in self.trainers]
        assert {gathered for _, gathered in of_trainers} == {TENSORS}
        assert sent and not any(checksum for checksum, _ in others)
        assert [e.answer() for e in self.engines] == [(sent, TENSORS)] * len(self.engines)

    def end(self) -> None:
        for process in self.trainers + self.engines:
            process.kill()


@pytest.fixture
def group():
    made = []
    yield lambda *args, **named: made.append(Group(*args, **named)) or made[-1]
    for one in made:
        one.end()


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize(
    ("homes", "workers", "senders"),
    [("a", 2, 1), ("aa", 2, 2), ("aab", 2, 2), ("aaaa", 1, 4)],
)
def test_engines_get_the_weights_to_the_bit_on_any_layout_of_nodes(
    group, homes, workers, senders, whole
):
    made = group(list(homes), workers, whole=whole)
    assert len(made.senders) == senders
    for version in (0, 1):
        made.check(version)


def lose(made: Group, number: int) -> None:
    """That engine worker is killed in an update, and ended as Fleet.exchange ends it."""
    made.update(1, dies=number)
    assert isinstance(made.engines[number].answer(), EOFError)
    for sender in made.senders:
        sender.ask("abort")


@pytest.mark.parametrize("lost", range(5))
def test_an_engine_that_is_killed_in_an_update_costs_that_engine(group, lost):
    """Whatever its place in gloo's tree is, the others are cut off and get the next update."""
    made = group(["a"], 5)
    made.check(0)
    began = time.monotonic()
    lose(made, lost)
    made.engines.pop(lost)
    received = [engine.answer() for engine in made.engines]
    assert time.monotonic() - began < SOON
    assert all(found is None or found[1] == TENSORS for found in received)
    assert [e("restored") for e in made.engines] == [int(r is None) for r in received]
    made.trainers[0].answer()
    made.connect(1)
    made.check(2)


def test_an_engine_that_is_killed_in_an_update_holds_neither_rank_0_nor_its_mates(group):
    made = group(["a", "a", "a", "b"], 2)
    made.check(0)
    began = time.monotonic()
    lose(made, 1)
    assert made.engines[0].answer() is None
    *of_senders, of_other = [trainer.answer() for trainer in made.trainers]
    assert time.monotonic() - began < SOON
    assert all(f"gathered {TENSORS}: " in str(error) for error in of_senders)
    assert of_other == (0, TENSORS), "it gathers with the others to the end"
    made.engines.pop()
    made.connect(1)
    made.check(2)


def test_an_engine_that_is_stopped_in_an_update_costs_that_engine(group):
    """Its sockets stay open: only what the senders write down ends the waiting of the others."""
    made = group(["a"], 3)
    made.check(0)
    os.kill(made.engines[1].process.pid, signal.SIGSTOP)
    made.update(1)
    assert not made.engines[0].pipe.poll(1) or not made.engines[2].pipe.poll(1)
    made.trainers[0].ask("abort")
    received = [made.engines[i].answer() for i in (0, 2)]
    assert None in received
    made.trainers[0].answer()
    made.engines.pop(1).kill()
    made.connect(1)
    made.check(2)


def test_an_engine_that_is_killed_leaves_all_to_their_deadline_where_none_is_told(group):
    made = group(["a", "a"], 2, seconds=3)
    made.update(0, dies=0)
    assert isinstance(made.engines[0].answer(), EOFError)
    began = time.monotonic()
    errors = [process.answer() for process in made.senders]
    assert made.engines[1].answer() is None
    assert time.monotonic() - began < 3 + SOON
    assert all(isinstance(error, RuntimeError) for error in errors)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_sender_that_stalls_leaves_the_others_to_their_deadline(group, rank):
    """Rank 0 or a node-mate, which the others' gathers miss as well."""
    made = group(["a", "a", "a"], 1, seconds=3)
    began = time.monotonic()
    made.update(0, stalls=rank)
    others = [trainer for number, trainer in enumerate(made.trainers) if number != rank]
    errors = [process.answer() for process in others]
    assert made.engines[0].answer() is None
    assert time.monotonic() - began < 3 + SOON
    assert all(isinstance(error, RuntimeError) for error in errors)
    assert all(f"gathered {MIDDLE}: " in str(error) for error in errors)
    assert not made.trainers[rank].pipe.poll(), "it still stalls"
