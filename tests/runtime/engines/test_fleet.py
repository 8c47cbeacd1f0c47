"""Engines that are lost, late or broken, against actors that a test controls."""

import asyncio
import contextlib
import math
import re
from types import SimpleNamespace

import pytest
import torch

from core import waits
from core.errors import RunError
from grpo_async import Config, Engines, RolloutBuffer
from policy import WeightMeta
from policy.sync.weight_sync import CutOff, Sender
from runtime.engines import fleet, repair
from runtime.engines.fleet import Engine, Received, State
from runtime.engines.probe import EVERY, PROMPTS
from runtime.processes.placement import Places
from support.actors import Actor, Answer
from support.configs import changed

MEETING = (b"wire", "host", 1)
PHASES = {"sync_pause": 0.0, "sync_transfer": 0.0, "sync_resume": 0.0}
HASTY = {"answer": 0.05, "timeouts": {"sync": 60}}


def hangs(*_) -> Answer:
    """A call that nothing comes of."""
    return Answer(...)


class House:
    """A fleet of `count` engines; `made` are those that were started, `killed` those that were."""

    def __init__(
        self, monkeypatch, count: int, dtype="float32", answer=25.0, max_restarts=3, **fields
    ):
        monkeypatch.setattr(waits, "ANSWER_SECONDS", answer)
        monkeypatch.setattr(repair, "MAX_RESTARTS", max_restarts)
        self.made = []
        self.given = []
        self.killed = []
        self.slow = False
        self.joined = [0]
        self.broken = None
        handle = Actor()
        handle.remote = self.make
        monkeypatch.setattr(fleet, "actor", lambda *args, **options: handle)
        monkeypatch.setattr(fleet, "kill", self.killed.append)
        self.gap = 0.0  # of every answer to a probe but those of `liars`
        self.liars = []
        self.trainer = Actor(open_sync_group=MEETING, send_weights=0, probe_gaps=self.gaps)
        self.cfg = changed(Config(), count=count, **fields)
        parts = {"trainers": [self.trainer], "senders": [self.trainer]}
        parts |= {"metas": [WeightMeta("w", (1,), dtype)], "places": Places([], [""] * count, [""])}
        shares = self.cfg.gpu_share < 1
        self.engines = Engines(self.cfg, SimpleNamespace(shares_gpus=lambda: shares, **parts))
        self.fleet = self.engines.fleet

    def make(self, cfg):
        """A new engine; while the house is `slow` it does not get ready by itself."""
        start = Answer(... if self.slow else self.broken)
        engine = Actor(start=start, update_weights=Received(PHASES, [0], {}), generate=["turn"])
        engine.answers["join_sync_group"] = self.joined
        self.made.append(engine)
        self.given.append(cfg)
        return engine

    async def open(self) -> "House":
        """Itself, with all engines at version 0."""
        await self.fleet.launch_and_wait()
        await self.engines.sync(0)
        return self

    async def leased(self):
        """The engine that the next group would get."""
        async with self.fleet.lease() as engine:
            return engine

    def run(self) -> SimpleNamespace:
        """What a repair needs of a run."""
        parts = {"training": asyncio.Lock(), "buffer": RolloutBuffer(1, 1), "leaving": ""}
        return SimpleNamespace(sync_or_leave=self.engines.sync, **parts)

    def updates(self, engine) -> list[int]:
        return [version for version, _ in engine.called("update_weights")]

    def worlds(self) -> list[int]:
        """The sizes of the process groups that were made."""
        return [world for *_, world in self.trainer.called("join_sync_group")]

    def gaps(self, answers) -> list[float]:
        """What the trainer finds: the turns of a liar name it."""
        return [0.5 if turns[0] in self.liars else self.gap for turns in answers]

    def lie(self, engine) -> None:
        """From now on an engine's scores are wrong."""
        engine.answers["generate"] = [engine]
        self.liars.append(engine)

    def lose(self, engine) -> None:
        """An engine dies: nothing of it answers any more."""
        calls = ("check_health", "update_weights", "generate")
        engine.answers = dict.fromkeys(calls, RuntimeError("it died"))
        self.fleet.discard([engine], RuntimeError("it died"))

    def hang(self, sender) -> None:
        """As NCCL does: the sender's call returns only once its group is aborted."""
        hanging = Answer(...)
        sender.answers["send_weights"] = lambda _: hanging

        def call(function, *_):
            if function == Sender.abort:
                assert self.killed == self.made[:1], "the engine is ended before"
                sender.answers["send_weights"] = 0
                hanging.give(RuntimeError("the broadcast of weights was ended"))

        sender.answers["call"] = call


@pytest.fixture
def house(monkeypatch):
    return lambda count, **fields: House(monkeypatch, count, **fields)


@pytest.mark.parametrize("share", [0.5, 1.0])
async def test_an_engine_that_is_replaced_beside_a_trainer_is_told_its_memory(house, share):
    """What the first ones found; and the trainer frees what it only keeps."""
    home = house(2, gpu_share=share, args={"max_num_seqs": 8})
    home.joined = [9 << 30, 7 << 30]
    await home.open()
    assert home.given == [home.cfg] * 2 and not home.trainer.called("call")
    home.joined = [0]  # a worker that was told does not profile
    for _ in range(2):
        home.lose(home.made[-1])
        await asyncio.sleep(0)
        await home.engines.sync(1)
        told = {"max_num_seqs": 8} | ({"kv_cache_memory_bytes": 7 << 30} if share < 1 else {})
        assert home.given[-1].engine.args == told and home.given[-1].engine.count == 2
    emptied = [torch.cuda.empty_cache] if share < 1 else []
    assert home.trainer.called("call") == [[function] for function in emptied * 2]


async def test_the_others_are_synced_while_a_lost_engine_is_replaced(house):
    home = await house(2).open()
    first, second = home.made
    home.slow = True
    home.lose(first)
    assert home.fleet.missing.is_set() and home.fleet.of(State.SERVING) == [second]
    await asyncio.wait_for(home.engines.sync(1), 5)  # does not wait for the third
    third = home.made[2]
    assert home.updates(second) == [0, 1] and not home.updates(third)
    assert home.fleet.missing.is_set() and await home.leased() is second
    third.answers["start"].give(None)
    await asyncio.sleep(0.01)
    assert home.fleet.of(State.SERVING) == [second], "it holds no policy yet"
    await home.engines.sync(1)
    assert home.updates(third) == [1] and not home.fleet.missing.is_set()
    async with home.fleet.lease() as busy:
        assert await home.leased() is not busy
    assert len(home.fleet.repairs) == 1
    assert third.called("generate"), "what is new must answer a probe"
    assert third.called("update_weights")[-1][1] is True, "what is new must be verified"


async def test_a_group_without_a_lost_engine_is_made_before_the_next_update(house):
    home = await house(3).open()
    home.slow = True
    home.lose(home.made[1])
    await home.engines.sync(1)
    assert home.worlds() == [4, 3]
    await home.engines.sync(2)
    assert home.worlds() == [4, 3]


async def test_engines_join_with_all_ranks_of_theirs(house):
    """Rank 0 is the trainer's; each engine of two GPUs has two."""
    home = await house(2, tensor_parallel=2).open()
    assert home.worlds() == [5] and home.trainer.called("open_sync_group") == [[5]]
    joins = [engine.called("join_sync_group")[0] for engine in home.made]
    assert joins == [[b"wire", "host", 1, 1, 5], [b"wire", "host", 1, 3, 5]]


async def test_an_engine_that_died_unnoticed_is_not_waited_for_in_a_new_group(house):
    home = await house(3).open()
    home.slow = True
    home.lose(home.made[0])
    home.made[1].answers["check_health"] = RuntimeError("its process is gone")
    await home.engines.sync(1)
    assert home.worlds() == [4, 2] and home.fleet.of(State.SERVING) == [home.made[2]]


async def test_an_engine_that_hangs_is_replaced_by_name(house):
    """It answers nothing, not even whether it lives."""
    home = await house(2, answer=0.05).open()
    hung, well = home.made
    home.slow = True
    hung.answers["check_health"] = Answer(...)
    assert not await home.fleet.is_alive(hung) and await home.fleet.is_alive(well)
    assert home.killed == [hung] and home.fleet.of(State.SERVING) == [well]
    assert str(home.fleet.error) == "an engine did not answer for 0 s"


async def test_an_engine_that_has_yet_to_answer_is_leased_last(house):
    """It has given back all its groups: by their number it would come first."""
    home = await house(2).open()
    silent, well = home.made
    silent.answers["check_health"] = Answer(...)
    asked = asyncio.create_task(home.fleet.is_alive(silent))
    await asyncio.sleep(0)
    async with home.fleet.lease() as first, home.fleet.lease() as second:
        assert first is second is well
    asked.cancel()


@pytest.mark.parametrize("when", ["update", "joining"])
async def test_an_engine_need_not_answer_while_it_joins_or_is_updated(house, when):
    home = await house(1, answer=0.2).open()
    (engine,) = home.made
    busy = Answer(...)
    if when == "joining":
        home.fleet.grouped = set()
    engine.answers["update_weights" if when == "update" else "join_sync_group"] = busy
    update = asyncio.create_task(home.engines.sync(1))
    await asyncio.sleep(0.01)
    engine.answers["check_health"] = hangs
    asked = asyncio.create_task(home.fleet.is_alive(engine))
    await asyncio.sleep(0.3)
    assert not asked.done() and not home.killed
    engine.answers["check_health"] = None
    busy.give(Received(PHASES, [0], {}) if when == "update" else [0])
    await update
    assert await asked and not home.killed


async def test_an_engine_that_does_not_join_has_a_deadline_of_its_own(house):
    home = await house(2, answer=0.05, timeouts={"sync": 60, "start": 60}).open()
    first, second = home.made
    home.lose(first)
    await asyncio.sleep(0.01)
    await asyncio.wait_for(repair.replace(home.fleet), 5)
    third = home.made[2]

    def joins(*_):
        third.answers["check_health"] = hangs
        return Answer(...)

    third.answers["join_sync_group"] = joins
    home.slow = True
    await asyncio.wait_for(home.engines.sync(1), 5)
    assert home.killed == [first, third] and home.updates(second)[-1] == 1


async def test_a_group_that_failed_is_made_anew_by_those_that_had_one_before(house):
    home = await house(2, answer=0.05, timeouts={"sync": 60, "start": 60}).open()
    first, second = home.made
    home.slow = True
    home.lose(first)
    await asyncio.wait_for(home.engines.sync(1), 5)
    third = home.made[2]
    third.answers["start"].give(None)
    await asyncio.wait_for(repair.replace(home.fleet), 5)

    def joins(*_):
        third.answers["check_health"] = RuntimeError("it died")
        return RuntimeError("it died")

    third.answers["join_sync_group"] = joins
    await asyncio.wait_for(home.engines.sync(2), 5)
    assert home.worlds() == [3, 2, 3, 2] and home.updates(second)[-1] == 2


async def test_an_engine_that_dies_once_it_has_joined_is_left_out(house):
    """The trainer joins late, so the update has not begun when the engine is found dead."""
    home = await house(2, answer=1.0, timeouts={"sync": 60, "start": 60}).open()
    home.lose(home.made[0])
    await asyncio.wait_for(repair.replace(home.fleet), 5)
    late = Answer(...)
    joins = [late]
    home.trainer.answers["join_sync_group"] = lambda *_: joins.pop() if joins else None
    update = asyncio.create_task(home.engines.sync(1))
    await asyncio.sleep(0.1)
    successor = home.made[2]
    successor.answers["check_health"] = RuntimeError("it died")
    assert not await home.fleet.is_alive(successor)
    late.give(None)
    await asyncio.wait_for(update, 5)
    assert home.killed == [home.made[0], successor] and home.worlds() == [3, 3, 2]


async def test_an_update_waits_where_nobody_is_left(house):
    home = await house(1).open()
    home.slow = True
    home.lose(home.made[0])
    update = asyncio.create_task(home.engines.sync(1))
    await asyncio.sleep(0.05)
    assert not update.done() and not home.fleet.of(State.SERVING)
    waiting = asyncio.create_task(home.leased())
    home.made[1].answers["start"].give(None)
    expected = PHASES | {"probe_gap": 0.0, "engines": 1}
    assert await asyncio.wait_for(update, 5) == expected
    assert await asyncio.wait_for(waiting, 5) is home.made[1]


@pytest.mark.parametrize(
    ("fields", "answers", "sent", "error"),
    [
        ({}, {"update_weights": RuntimeError("out of memory")}, [0, 1], r"out of memory"),
        (
            {},
            {"update_weights": Received(PHASES, [0, 1], {})},
            [0, 1],
            r"weights that differ",
        ),  # at one worker
        ({"timeouts": {"sync": 0.1}}, {"update_weights": hangs}, [0, 1], r"^TimeoutE.*no answer"),
        (HASTY, {"check_health": hangs, "update_weights": hangs}, [0], r"did not answer for 0 s"),
    ],
)
async def test_an_engine_that_spoils_an_update_is_replaced(house, fields, answers, sent, error):
    """And it alone: the others get the update. One that hangs is found before it is waited for."""
    home = await house(2, **fields).open()
    broken, well = home.made
    broken.answers |= answers
    well.answers["update_weights"] = Received(PHASES, [0, 0], {})  # of two workers
    home.slow = True
    await asyncio.wait_for(home.engines.sync(1), 5)
    assert home.killed == [broken] and broken not in home.fleet.alive
    assert home.fleet.of(State.SERVING) == [well]
    assert home.updates(broken) == sent and home.updates(well)[-1] == 1
    assert len(home.fleet.repairs) == sent.count(1), "who failed in the update has a successor"
    assert re.search(error, repr(home.fleet.error))


async def test_an_engine_that_is_nearly_done_when_another_fails_is_kept(house):
    home = await house(3).open()
    first, *others = home.made
    first.answers["update_weights"] = RuntimeError("out of memory")
    slow = [Answer(...), Answer(...)]
    for engine, answer in zip(others, slow, strict=True):
        engine.answers["update_weights"] = answer
    update = asyncio.create_task(home.engines.sync(1))
    await asyncio.sleep(0.05)
    for engine, answer in zip(others, slow, strict=True):
        engine.answers["update_weights"] = Received(PHASES, [0], {})
        answer.give(Received(PHASES, [0], {}))
    await asyncio.wait_for(update, 5)
    assert home.killed == [first] and home.fleet.of(State.SERVING) == others


async def test_engines_from_which_an_update_was_cut_off_get_it_again_and_are_not_replaced(house):
    """Meanwhile no group is leased to them, and those that they have go on afterwards."""
    home = await house(3).open()
    lost, waits, well = home.made
    lost.answers["update_weights"] = RuntimeError("it died")
    answers = [CutOff("an update was cut off")]

    def cut_off(*_):
        return answers.pop() if answers else Received(PHASES, [0], {})

    waits.answers["update_weights"] = cut_off
    async with home.fleet.lease() as first, home.fleet.lease(), home.fleet.lease():
        assert first is lost
        home.slow = True
        seen = []
        home.trainer.answers["join_sync_group"] = lambda *_: seen.append(
            home.fleet.of(State.SERVING)
        )
        await asyncio.wait_for(home.engines.sync(1), 5)
        assert seen == [[well]], "while they meet again"
    assert home.killed == [lost] and home.fleet.of(State.SERVING) == [waits, well]
    assert [call for _, call in waits.called("update_weights")] == [True, False, True]
    assert [home.fleet.engines[e].groups for e in (waits, well)] == [0, 0]
    assert len(home.made) == 4 and len(home.fleet.repairs) == 1


async def test_what_cost_an_engine_is_named_and_not_that_another_was_cut_off(house):
    """It may come after what it has caused."""
    home = await house(2).open()
    cut, lost = home.made
    cut.answers["update_weights"] = CutOff("an update was cut off")
    late = Answer(...)
    lost.answers["update_weights"] = late
    update = asyncio.create_task(home.engines.sync(1))
    await asyncio.sleep(0.05)
    cut.answers["update_weights"] = Received(PHASES, [0], {})
    late.give(RuntimeError("CUDA out of memory"))
    await asyncio.wait_for(update, 5)
    assert home.killed == [lost] and str(home.fleet.error) == "CUDA out of memory"


async def test_engines_that_load_many_tensors_have_time_to_end_an_update(house, monkeypatch):
    monkeypatch.setattr(repair, "CUT_SECONDS", 0.05)
    monkeypatch.setattr(repair, "LOAD_SECONDS", 1.0)
    home = await house(2).open()
    lost, loads = home.made
    lost.answers["update_weights"] = RuntimeError("it died")
    slow = Answer(...)
    loads.answers["update_weights"] = slow
    update = asyncio.create_task(home.engines.sync(1))
    await asyncio.sleep(0.3)
    loads.answers["update_weights"] = Received(PHASES, [0], {})
    slow.give(Received(PHASES, [0], {}))
    await asyncio.wait_for(update, 5)
    assert home.killed == [lost]


async def test_a_group_that_ends_while_its_engine_waits_for_an_update_is_counted(house):
    home = await house(1).open()
    async with home.fleet.lease() as made:
        home.fleet.retire(home.fleet.engines[made])
        assert not home.fleet.serving
    home.fleet.all_synced()
    assert [engine.groups for engine in home.fleet.serving] == [0]


async def test_a_send_that_a_lost_engine_leaves_hanging_is_ended(house):
    home = await house(2, timeouts={"sync": 60}).open()
    lost, well = home.made
    lost.answers["update_weights"] = RuntimeError("it died")
    home.hang(home.trainer)
    await asyncio.wait_for(home.engines.sync(1), 5)
    assert home.updates(well) == [0, 1, 1]


async def test_node_mates_join_between_rank_0_and_the_engines_and_are_told_as_well(house):
    home = house(2, timeouts={"sync": 60})
    mate, other = (Actor(send_weights=0) for _ in range(2))
    home.engines.cluster.trainers += [mate, other]
    home.engines.cluster.senders += [mate]
    await home.open()
    lost, well = home.made
    of_senders = [sender.called("join_sync_group") for sender in (home.trainer, mate)]
    assert of_senders == [[[MEETING, 0, 4]], [[MEETING, 1, 4]]]
    of_engines = [engine.called("join_sync_group")[0][1:] for engine in (lost, well)]
    assert of_engines == [["host", 1, 2, 4], ["host", 1, 3, 4]]
    assert not other.called("join_sync_group") and other.called("send_weights")
    lost.answers["update_weights"] = RuntimeError("it died")
    home.hang(mate)
    await asyncio.wait_for(home.engines.sync(1), 5)
    assert home.killed == [lost] and home.updates(well) == [0, 1, 1]
    assert [Sender.abort] in home.trainer.called("call")
    assert [Sender.abort] not in other.called("call")


async def test_a_node_mate_that_hangs_is_named(house):
    home = house(2, answer=0.05)
    mate = Actor(send_weights=0)
    home.engines.cluster.trainers.append(mate)
    home.engines.cluster.senders.append(mate)
    await home.open()
    home.made[0].answers["update_weights"] = RuntimeError("it died")
    mate.answers["call"] = hangs
    with pytest.raises(TimeoutError, match="trainer rank 1 did not answer for 0 s"):
        await asyncio.wait_for(home.engines.sync(1), 5)


async def test_a_send_that_never_ends_ends_the_run_by_name(house):
    """Not even aborted: a trainer rank would not take part in another update."""
    home = await house(2, timeouts={"sync": 0.2}).open()
    home.made[0].answers["update_weights"] = RuntimeError("it died")
    home.trainer.answers["send_weights"] = hangs
    with pytest.raises(TimeoutError, match="waited 0 s for the trainers' sends to end"):
        await asyncio.wait_for(home.engines.sync(1), 5)


async def test_an_update_that_nobody_is_guilty_of_makes_all_suspects(house):
    """The send fails, and every engine reports good health."""
    home = await house(2).open()
    failed = [RuntimeError("connection closed")]
    home.trainer.answers["send_weights"] = lambda _: failed.pop() if failed else 0
    await asyncio.wait_for(home.engines.sync(1), 5)
    assert home.killed == home.made[:2] and home.fleet.of(State.SERVING) == home.made[2:]
    assert len(home.fleet.repairs) == 1


@pytest.mark.parametrize(
    ("call", "reply"),
    [
        ("join_sync_group", RuntimeError("no memory left")),
        ("generate", RuntimeError("no memory left")),
        ("generate", hangs),
    ],
)
async def test_an_engine_that_fails_to_join_or_to_answer_a_probe_is_the_only_one_replaced(
    house, call, reply
):
    """All engines report good health."""
    home = await house(3, verify_sync_every=1, timeouts={"sync": 0.2}).open()
    home.lose(home.made[0])  # so all must join again
    await repair.replace(home.fleet)
    home.made[3].answers[call] = reply
    await asyncio.wait_for(home.engines.sync(1), 5)
    assert home.killed == [home.made[0], home.made[3]]
    assert home.fleet.of(State.SERVING)[:2] == home.made[1:3]


async def test_a_member_that_waited_too_long_for_another_is_not_blamed(house):
    home = await house(2, answer=0.05).open()
    home.lose(home.made[0])
    await repair.replace(home.fleet)
    late = Answer(...)
    home.made[1].answers["join_sync_group"] = late
    asyncio.get_running_loop().call_later(0.06, late.give, RuntimeError("the store timed out"))
    with pytest.raises(RuntimeError, match="the store timed out") as error:
        await home.fleet.connect()
    assert not isinstance(error.value, repair.EnginesError)


async def test_a_run_that_leaves_waits_for_no_engine(house):
    """The update waits for a successor; it is given up once the run is to leave."""
    home = await house(1).open()
    home.slow = True
    home.lose(home.made[0])
    leaving = []
    sync = repair.unless_left(home.fleet, home.engines.sync(1), lambda: leaving)
    task = asyncio.create_task(sync)
    await asyncio.sleep(0.05)
    assert not task.done() and len(home.made) == 2
    leaving.append("SIGTERM")
    assert await asyncio.wait_for(task, 5) == {}


async def test_a_run_that_leaves_is_not_ended_for_a_lack_of_restarts(house, monkeypatch):
    """Neither by the update of its last step nor by the repair beside it."""
    home = await house(1, max_restarts=0).open()
    home.lose(home.made[0])
    sleep = asyncio.sleep
    monkeypatch.setattr(asyncio, "sleep", lambda seconds: sleep(seconds / 100))
    run = home.run()
    run.leaving = "SIGTERM"
    assert await repair.unless_left(home.fleet, home.engines.sync(1), lambda: run.leaving) == {}
    await asyncio.wait_for(home.engines.repair_forever(run), 5)
    replaced = repair.unless_left(home.fleet, repair.replace(home.fleet), lambda: run.leaving)
    assert await asyncio.wait_for(replaced, 5) == {}
    with pytest.raises(RuntimeError, match="MAX_RESTARTS = 0"):
        await repair.unless_left(home.fleet, home.engines.sync(1), lambda: "")


async def test_a_named_engine_is_replaced_in_the_round_in_which_another_is_lost(house):
    home = await house(3).open()
    lost, well, named = home.made
    home.lose(lost)
    error = repair.EnginesError([named], RuntimeError("no memory left"))
    await repair.discard_dead(home.fleet, error, 0)
    assert home.killed == [lost, named] and home.fleet.of(State.SERVING) == [well]


async def test_a_run_that_leaves_ends_an_update_of_engines_that_live(house):
    home = await house(1).open()
    synced = await repair.unless_left(home.fleet, home.engines.sync(1), lambda: "SIGTERM")
    assert synced["engines"] == 1 and home.updates(home.made[0]) == [0, 1]


async def test_a_run_that_leaves_hears_what_is_wrong_while_an_engine_lives(house):
    home = await house(1).open()

    async def sync(version: int) -> dict[str, float]:
        raise RuntimeError("weights arrived other than they were sent")

    with pytest.raises(RuntimeError, match="weights arrived"):
        await repair.unless_left(home.fleet, sync(1), lambda: "SIGTERM")


async def test_a_trainer_that_hangs_is_named_and_no_engine_blamed(house):
    home = await house(2, answer=0.05).open()
    home.trainer.answers["send_weights"] = lambda _: RuntimeError("connection closed")
    home.trainer.answers["call"] = hangs
    with pytest.raises(TimeoutError, match="trainer rank 0 did not answer for 0 s"):
        await asyncio.wait_for(home.engines.sync(1), 5)
    assert not home.killed


async def test_a_replacement_that_is_lost_before_it_was_synced_harms_nobody(house):
    home = await house(2).open()
    well = home.made[1]
    home.lose(home.made[0])
    home.fleet.launch_missing()
    await repair.started(home.fleet)
    home.fleet.take_in_started()
    home.lose(home.made[2])
    home.slow = True
    await asyncio.wait_for(home.engines.sync(1), 5)
    assert home.fleet.of(State.SERVING) == [well] and well not in home.killed


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        ({"send_weights": 1}, "an engine received weights that differ from those sent"),
        ({"probe_gaps": [0.0, 0.5]}, "the scores of 1 of 2 engines differ from the trainer's at"),
        ({"probe_gaps": [0.5, math.nan]}, "the scores of 2 of 2 engines differ from the trainer's"),
    ],
)
async def test_the_first_update_of_all_must_work(house, answers, message):
    home = house(2)
    home.trainer.answers |= answers
    with pytest.raises(RuntimeError, match=message):
        await home.open()
    assert len(home.made) == 2, "what never worked is not mended by another start"


async def test_a_replacement_that_fails_to_start_disturbs_nobody(house, monkeypatch):
    home = await house(2).open()
    run = home.run()
    sleep = asyncio.sleep
    monkeypatch.setattr(asyncio, "sleep", lambda seconds: sleep(seconds / 100))
    home.broken = RuntimeError("no memory left")
    home.lose(home.made[0])
    repair = asyncio.create_task(home.engines.repair_forever(run))
    await sleep(0.2)
    repair.cancel()
    assert home.updates(home.made[1]) == [0] and len(home.fleet.repairs) == 3


async def test_a_lost_engine_is_repaired_with_the_version_that_the_others_hold(house, monkeypatch):
    """Not while the trainer is in a step: its weights would have no version."""
    home = await house(2).open()
    await home.engines.sync(3)
    run = home.run()
    run.buffer.version = 3
    sleep = asyncio.sleep
    monkeypatch.setattr(asyncio, "sleep", lambda seconds: sleep(seconds / 100))
    repair = asyncio.create_task(home.engines.repair_forever(run))
    async with run.training:
        home.lose(home.made[0])
        await sleep(0.1)
        assert home.made[2].called("start") and not home.updates(home.made[2])
    await sleep(0.1)
    assert home.updates(home.made[2]) == [3] and not home.fleet.missing.is_set()
    repair.cancel()


async def test_the_run_goes_on_with_those_that_are_left(house):
    home = await house(2, max_restarts=0).open()
    home.lose(home.made[0])
    assert (await home.engines.sync(1))["engines"] == 1
    assert home.fleet.of(State.SERVING) == home.made[1:] and len(home.made) == 2
    home.lose(home.made[1])
    with pytest.raises(RuntimeError, match=r"MAX_RESTARTS = 0 times in an hour \(.*\): it died"):
        await home.engines.sync(2)


@pytest.mark.parametrize("starts", [True, False])
async def test_too_many_losses_end_the_run_with_the_last_error(house, starts):
    """Those of engines that served, and those of replacements that do not start."""
    home = await house(1, max_restarts=2).open()
    home.broken = None if starts else RuntimeError("no memory left")
    for version in (1, 2) if starts else ():
        home.lose(home.made[-1])
        await home.engines.sync(version)
    home.lose(home.made[-1])
    reason = "it died" if starts else "no memory left"
    with pytest.raises(RuntimeError, match=rf"MAX_RESTARTS = 2 times in an hour \(.*\): {reason}"):
        await home.engines.sync(3)
    assert len(home.made) == 3


async def test_only_the_replacements_of_the_last_hour_count(house, monkeypatch, capsys):
    """An engine that dies now and then is replaced for days."""
    clock = SimpleNamespace(now=0.0)
    for room in (fleet, repair):
        monkeypatch.setattr(room, "time", SimpleNamespace(monotonic=lambda: clock.now))
    home = await house(2, max_restarts=1).open()
    for version in (1, 2, 3):
        clock.now += 3601.0
        home.lose(home.made[-1])
        await home.engines.sync(version)  # which does not wait for the successor
        await repair.started(home.fleet)
        assert (await home.engines.sync(version))["engines"] == 2
    clock.now += 3598.0
    home.lose(home.made[-1])
    assert (await home.engines.sync(4))["engines"] == 1 and len(home.made) == 5
    home.fleet.launch_missing()
    told = capsys.readouterr()
    assert (told.out + told.err).count("not replaced yet: MAX_RESTARTS = 1 ") == 1
    clock.now += 3.0
    home.fleet.launch_missing()
    assert len(home.made) == 6


async def test_an_engine_that_cannot_start_at_first_ends_the_run_at_once(house):
    home = house(2)
    home.broken = RuntimeError("dtype is not supported")
    with pytest.raises(RuntimeError, match="dtype is not supported"):
        await home.fleet.launch_and_wait()
    assert home.killed == home.made and len(home.made) == 2


async def test_an_engine_that_starts_too_slowly_is_named(house):
    home = house(1, timeouts={"start": 0.05})
    home.slow = True
    with pytest.raises(TimeoutError, match="waited 0 s for 1 engines to start"):
        await home.fleet.launch_and_wait()


# --- the probe of new engines ---------------------------------------------------------------------


async def test_new_engines_answer_a_probe_and_so_do_the_others_then(house):
    home = await house(2, seed=7).open()
    asked = [engine.called("generate") for engine in home.made]
    assert [len(calls) for calls in asked] == [PROMPTS, PROMPTS]
    assert home.trainer.called("probe_gaps") == [[[["turn"] * PROMPTS] * 2]]
    assert "probe_gap" not in await home.engines.sync(1)
    home.lose(home.made[0])
    await repair.replace(home.fleet)
    home.gap = 1e-6
    assert (await home.engines.sync(2))["probe_gap"] == 1e-6
    assert [len(e.called("generate")) for e in home.made] == [PROMPTS, 2 * PROMPTS, PROMPTS]


async def test_engines_answer_a_probe_every_so_many_updates_that_are_not_verified(house):
    """What an engine does in verified updates alone would tell nothing of the others."""
    home = await house(1).open()
    probed = [v for v in range(1, 2 * EVERY + 2) if "probe_gap" in await home.engines.sync(v)]
    assert probed == [EVERY, 2 * EVERY]
    sent = home.made[0].called("update_weights")
    assert [version for version, verify in sent if verify] == [0]


async def test_an_engine_that_lies_is_replaced_and_the_run_goes_on(house):
    home = await house(2).open()
    liar, well = home.made
    home.lie(liar)
    for version in range(1, EVERY + 1):
        await home.engines.sync(version)
    assert home.fleet.of(State.SERVING) == [liar, well]
    await home.engines.sync(EVERY + 1)
    assert home.killed == [liar] and home.updates(well)[-2:] == [EVERY + 1, EVERY + 1]
    assert "the scores of 1 of 2 engines differ" in str(home.fleet.error)
    await repair.started(home.fleet)
    assert (await home.engines.sync(EVERY + 2))["engines"] == 2


@pytest.mark.parametrize(("gap", "guilty"), [(0.5, "trainer is"), (0.0, "engines are")])
async def test_all_engines_are_replaced_once_to_learn_who_is_wrong(house, gap, guilty):
    home = await house(2).open()
    home.lie(home.made[0])
    home.lie(home.made[1])
    home.gap = gap
    await home.engines.sync(EVERY)
    with pytest.raises(RunError, match=f"the {guilty} at fault: the scores of 2 of 2 engines"):
        await home.engines.sync(EVERY + 1)
    assert home.killed == home.made[:2] and len(home.made) == 4
    assert len(home.fleet.repairs) == 1


async def test_a_hung_engine_is_found_while_it_is_probed(house):
    """Its health is asked for as ever, long before the deadline of a probe."""
    home = await house(2, answer=0.05, timeouts={"sync": 60}).open()
    hung, well = home.made
    asked = Answer(...)
    hung.answers |= {"generate": lambda _: asked, "check_health": hangs}
    home.slow = True
    update = asyncio.create_task(home.engines.sync(EVERY))
    await asyncio.sleep(0.01)
    assert not await home.fleet.is_alive(hung)
    asked.give(RuntimeError("it was killed"))
    await asyncio.wait_for(update, 5)
    assert home.killed == [hung] and home.fleet.of(State.SERVING) == [well]


async def test_an_update_reports_how_long_the_engines_had_no_request(house):
    """The mean of all engines; of the phases the slowest one's."""
    home = await house(2).open()
    for seconds, engine in zip((1.0, 4.0), home.made, strict=True):
        engine.answers["update_weights"] = Received(
            PHASES | {"sync_pause": seconds},
            [0],
            {"wait_for_training": seconds, "engine_tokens": 10, "kv_use": seconds / 10},
        )
    found = await home.engines.sync(1)
    assert (found["wait_for_training"], found["sync_pause"]) == (2.5, 4.0)
    assert (found["engine_tokens"], found["kv_use"]) == (20, 0.4)


async def test_engines_are_verified_every_so_many_updates(house):
    home = await house(1, verify_sync_every=2).open()
    for version in (1, 2, 3):
        await home.engines.sync(version)
    sent = [[0, True], [1, False], [2, True], [3, False]]
    assert home.made[0].called("update_weights") == sent
    assert len(home.made[0].called("generate")) == 2 * PROMPTS


# --- leases ---------------------------------------------------------------------------------------


async def test_the_least_busy_engine_is_leased(house):
    home = await house(2).open()
    async with contextlib.AsyncExitStack() as stack:
        first = contextlib.AsyncExitStack()
        chosen = [await first.enter_async_context(home.fleet.lease())]
        chosen += [await stack.enter_async_context(home.fleet.lease()) for _ in range(3)]
        assert sorted(map(id, chosen)) == sorted(map(id, home.made * 2))
        await first.aclose()
        assert await home.leased() is chosen[0]
    assert {engine.groups for engine in home.fleet.serving} == {0}
    assert home.fleet.serving == sorted(home.fleet.engines.values(), key=lambda e: e.number)


async def test_a_lease_of_an_engine_that_is_lost_ends_well(house):
    home = await house(2).open()
    async with home.fleet.lease() as engine:
        home.lose(engine)
    assert home.fleet.of(State.SERVING) == [e for e in home.made if e is not engine]
    assert home.fleet.serving == list(home.fleet.engines.values())


async def test_a_lease_ends_with_what_it_waited_for(house):
    home = house(1, timeouts={"start": 0.02, "train": 0.02, "sync": 0.02})
    with pytest.raises(RunError, match="an engine that holds the policy"):
        await home.leased()


async def test_a_lease_waits_as_long_as_three_repairs_may_take(house, monkeypatch):
    home = house(1, timeouts={"start": 100, "train": 10, "sync": 1})
    waited = []

    async def within(seconds: float, what: str, call, late: type) -> None:
        waited.append(seconds)
        call.close()
        raise late(what)

    monkeypatch.setattr(fleet, "within", within)
    with pytest.raises(RunError):
        await home.leased()
    assert waited == [4 * 100 + 2 * 10 + 3 * 1]


def test_the_least_busy_engine_that_answers_and_holds_a_policy_is_leased(monkeypatch):
    """Against all combinations of engines that hold a policy and that have yet to answer."""
    fleet = House(monkeypatch, 4).fleet
    for case in range(4**4):
        kinds = [case // 4**i % 4 for i in range(4)]  # without policy, unanswered, both, neither
        made = [Engine(f"e{i}", i, "", None) for i in range(4)]
        fleet.engines = {engine.actor: engine for engine in made}
        fleet.serving = []
        for engine, kind in zip(made, kinds, strict=True):
            engine.state = State.STARTING if kind in (0, 2) else State.FRESH
            engine.unanswered = kind in (1, 2)
        fleet.all_synced()
        serving = [engine for engine, kind in zip(made, kinds, strict=True) if kind in (1, 3)]
        for i, engine in enumerate(serving):
            fleet.occupy(engine, (7 * case + 5 * i) % 4)
        assert sorted(fleet.serving, key=lambda e: e.number) == serving
        if serving:
            expected = min(serving, key=lambda e: (e.unanswered, e.groups, e.number))
            assert fleet.least_busy() is expected


def test_many_engines_are_asked_less_often(monkeypatch):
    """At most CHECKS_PER_SECOND of them."""
    slept = []

    async def sleep(seconds):
        slept.append(seconds)
        house.fleet.engines.clear()

    house = House(monkeypatch, 1)
    monkeypatch.setattr(fleet.asyncio, "sleep", sleep)
    for count in (1, 100, 1440):
        made = [Engine(Actor(), i, "", None, State.SERVING) for i in range(count)]
        house.fleet.engines = {engine.actor: engine for engine in made}
        asyncio.run(house.fleet.watch(made[0].actor))
    assert slept == [5.0, 5.0, 72.0]
