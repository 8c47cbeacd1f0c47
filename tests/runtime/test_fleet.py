"""Engines that are lost, late or broken, against actors that a test controls."""

import asyncio
import contextlib
import math
from types import SimpleNamespace

import pytest
import torch

from grpo_async import Config, Engines, RolloutBuffer
from policy import WeightMeta
from policy.weight_sync import Sender
from runtime import fleet
from runtime.fleet import Fleet, Received
from runtime.placement import Places
from runtime.probe import PROMPTS
from support.actors import Actor, Answer
from support.configs import changed

PHASES = {"sync_pause": 0.0, "sync_transfer": 0.0, "sync_resume": 0.0}


class House:
    """A fleet of `count` engines; `made` are those that were started, `killed` those that were."""

    def __init__(self, monkeypatch, count: int, dtype: str = "float32", **fields):
        self.made = []
        self.given = []
        self.killed = []
        self.slow = False
        self.joined = [0]
        self.broken = None
        handle = Actor()
        handle.remote = self.make
        monkeypatch.setattr(fleet, "actor", lambda *args, **options: handle)
        monkeypatch.setattr(fleet.ray, "kill", self.killed.append)
        self.trainer = Actor(open_store=("host", 1), send_weights=0, probe_gaps=[0.0])
        self.cfg = changed(Config(), count=count, **fields)
        metas = [WeightMeta("w", (1,), dtype)]
        places = Places([], [""] * count, [""])
        self.engines = Engines(
            self.cfg,
            SimpleNamespace(
                trainers=[self.trainer],
                senders=[self.trainer],
                metas=metas,
                places=places,
                shares_gpus=lambda: self.cfg.gpu_share < 1,
            ),
        )
        self.fleet = self.engines.fleet

    def make(self, cfg):
        """A new engine; while the house is `slow` it does not get ready by itself."""
        start = Answer(... if self.slow else self.broken)
        engine = Actor(start=start, update_weights=Received(PHASES, [0]), generate=["turn"])
        engine.answers["join_sync_group"] = self.joined
        self.made.append(engine)
        self.given.append(cfg)
        return engine

    async def open(self) -> Fleet:
        """All engines, at version 0."""
        await self.fleet.start()
        await self.engines.sync(0)
        return self.fleet

    def updates(self, engine) -> list[int]:
        """The versions that an engine was sent."""
        return [version for version, _ in engine.called("update_weights")]

    def worlds(self) -> list[int]:
        """The sizes of the process groups that were made."""
        return [world for *_, world in self.trainer.called("join_sync_group")]

    def lose(self, engine) -> None:
        """An engine dies: nothing of it answers any more."""
        calls = ("check_health", "update_weights", "generate")
        engine.answers = dict.fromkeys(calls, RuntimeError("it died"))
        self.fleet.discard([engine], RuntimeError("it died"))


@pytest.fixture
def house(monkeypatch):
    """A function that builds a fleet."""
    return lambda count, **fields: House(monkeypatch, count, **fields)


async def leased(engines: Fleet):
    """The engine that the next group would get."""
    async with engines.lease() as engine:
        return engine


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_an_engine_that_is_replaced_beside_a_trainer_is_told_its_memory(house, share):
    """What the first ones found; and the trainer frees what it only keeps."""

    async def main():
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

    asyncio.run(main())


def test_the_others_are_synced_while_a_lost_engine_is_replaced(house):
    async def main():
        home = house(2)
        engines = await home.open()
        first, second = home.made
        home.slow = True
        home.lose(first)
        assert engines.missing.is_set() and engines.serving() == [second]
        await asyncio.wait_for(home.engines.sync(1), 5)  # does not wait for the third
        third = home.made[2]
        assert home.updates(second) == [0, 1] and not home.updates(third)
        assert engines.missing.is_set() and await leased(engines) is second
        third.answers["start"].give(None)
        await asyncio.sleep(0.01)
        assert engines.serving() == [second], "it holds no policy yet"
        await home.engines.sync(1)
        assert home.updates(third) == [1] and not engines.missing.is_set()
        async with engines.lease() as busy:
            assert await leased(engines) is not busy
        assert len(engines.repairs) == 1
        assert third.called("generate"), "what is new must answer a probe"
        assert third.called("update_weights")[-1][1] is True, "what is new must be verified"

    asyncio.run(main())


def test_a_group_without_a_lost_engine_is_made_before_the_next_update(house):
    async def main():
        home = house(3)
        await home.open()
        home.slow = True
        home.lose(home.made[1])
        await home.engines.sync(1)
        assert home.worlds() == [4, 3]
        await home.engines.sync(2)
        assert home.worlds() == [4, 3]

    asyncio.run(main())


def test_engines_join_with_all_ranks_of_theirs(house):
    """Rank 0 is the trainer's; each engine of two GPUs has two."""

    async def main():
        home = house(2, tensor_parallel=2)
        await home.open()
        assert home.worlds() == [5] and home.trainer.called("open_store") == [[5]]
        joins = [engine.called("join_sync_group")[0] for engine in home.made]
        assert [join[1:] for join in joins] == [["host", 1, 1, 5], ["host", 1, 3, 5]]

    asyncio.run(main())


def test_an_engine_that_died_unnoticed_is_not_waited_for_in_a_new_group(house):
    async def main():
        home = house(3)
        engines = await home.open()
        home.slow = True
        home.lose(home.made[0])
        home.made[1].answers["check_health"] = RuntimeError("its process is gone")
        await home.engines.sync(1)
        assert home.worlds() == [4, 2] and engines.serving() == [home.made[2]]

    asyncio.run(main())


def test_an_engine_that_hangs_is_replaced_by_name(house):
    """It answers nothing, not even whether it lives."""

    async def main():
        home = house(2, timeouts={"answer": 0.05})
        engines = await home.open()
        hung, well = home.made
        home.slow = True
        hung.answers["check_health"] = Answer(...)
        assert not await engines.is_alive(hung) and await engines.is_alive(well)
        assert home.killed == [hung] and engines.serving() == [well]
        assert str(engines.error) == "an engine did not answer for 0 s"

    asyncio.run(main())


def test_an_engine_that_has_yet_to_answer_is_leased_last(house):
    """It has given back all its groups: by their number it would come first."""

    async def main():
        home = house(2)
        engines = await home.open()
        silent, well = home.made
        silent.answers["check_health"] = Answer(...)
        asked = asyncio.create_task(engines.is_alive(silent))
        await asyncio.sleep(0)
        async with engines.lease() as first, engines.lease() as second:
            assert first is second is well
        asked.cancel()

    asyncio.run(main())


@pytest.mark.parametrize("when", ["update", "joining"])
def test_an_engine_need_not_answer_while_it_joins_or_is_updated(house, when):
    async def main():
        home = house(1, timeouts={"answer": 0.2})
        engines = await home.open()
        (engine,) = home.made
        busy = Answer(...)
        if when == "joining":
            engines.grouped = set()
        engine.answers["update_weights" if when == "update" else "join_sync_group"] = busy
        update = asyncio.create_task(home.engines.sync(1))
        await asyncio.sleep(0.01)
        engine.answers["check_health"] = lambda: Answer(...)
        asked = asyncio.create_task(engines.is_alive(engine))
        await asyncio.sleep(0.3)
        assert not asked.done() and not home.killed
        engine.answers["check_health"] = None
        busy.give(Received(PHASES, [0]) if when == "update" else [0])
        await update
        assert await asked and not home.killed

    asyncio.run(main())


def test_an_engine_that_hangs_is_found_before_an_update_waits_for_it(house):
    async def main():
        home = house(2, timeouts={"answer": 0.05, "sync": 60})
        engines = await home.open()
        hung, well = home.made
        home.slow = True
        hung.answers |= {"check_health": Answer(...), "update_weights": Answer(...)}
        await asyncio.wait_for(home.engines.sync(1), 5)
        assert home.killed == [hung] and engines.serving() == [well]
        assert home.updates(hung) == [0] and home.updates(well) == [0, 1]

    asyncio.run(main())


def test_an_engine_that_does_not_join_has_a_deadline_of_its_own(house):
    async def main():
        home = house(2, timeouts={"sync": 60, "start": 60, "answer": 0.05})
        engines = await home.open()
        first, second = home.made
        home.lose(first)
        await asyncio.sleep(0.01)
        await asyncio.wait_for(engines.replaced(), 5)
        third = home.made[2]
        third.answers |= {"join_sync_group": Answer(...)}

        def hang(*_):
            third.answers["check_health"] = lambda: Answer(...)
            return Answer(...)

        third.answers["join_sync_group"] = hang
        home.slow = True
        await asyncio.wait_for(home.engines.sync(1), 5)
        assert home.killed == [first, third] and home.updates(second)[-1] == 1

    asyncio.run(main())


def test_an_update_waits_where_nobody_is_left(house):
    async def main():
        home = house(1)
        engines = await home.open()
        home.slow = True
        home.lose(home.made[0])
        update = asyncio.create_task(home.engines.sync(1))
        await asyncio.sleep(0.05)
        assert not update.done() and not engines.serving()
        waiting = asyncio.create_task(leased(engines))
        home.made[1].answers["start"].give(None)
        assert await asyncio.wait_for(update, 5) == PHASES | {"engines": 1}
        assert await asyncio.wait_for(waiting, 5) is home.made[1]

    asyncio.run(main())


def test_an_engine_that_fails_an_update_is_replaced_and_the_others_get_it(house):
    async def main():
        home = house(2)
        engines = await home.open()
        broken, well = home.made
        broken.answers["update_weights"] = RuntimeError("out of memory")
        await home.engines.sync(1)
        assert home.killed == [broken] and home.updates(well)[-1] == 1
        assert broken not in engines.alive and len(engines.repairs) == 1

    asyncio.run(main())


def test_an_engine_that_is_nearly_done_when_another_fails_is_kept(house):
    async def main():
        home = house(3)
        engines = await home.open()
        first, *others = home.made
        first.answers["update_weights"] = RuntimeError("out of memory")
        slow = [Answer(...), Answer(...)]
        for engine, answer in zip(others, slow, strict=True):
            engine.answers["update_weights"] = answer
        update = asyncio.create_task(home.engines.sync(1))
        await asyncio.sleep(0.05)
        for engine, answer in zip(others, slow, strict=True):
            engine.answers["update_weights"] = Received(PHASES, [0])
            answer.give(Received(PHASES, [0]))
        await asyncio.wait_for(update, 5)
        assert home.killed == [first] and engines.serving() == others

    asyncio.run(main())


def test_an_engine_that_does_not_answer_an_update_is_replaced(house):
    async def main():
        home = house(2, timeouts={"sync": 0.1})
        engines = await home.open()
        silent, well = home.made
        silent.answers["update_weights"] = Answer(...)
        home.slow = True
        await asyncio.wait_for(home.engines.sync(1), 5)
        assert home.killed == [silent] and engines.serving() == [well]
        assert isinstance(engines.error, TimeoutError) and "no answer" in str(engines.error)

    asyncio.run(main())


def test_a_send_that_a_lost_engine_leaves_hanging_is_ended(house):
    """As NCCL does: the trainer's call returns only once its group is aborted."""

    async def main():
        home = house(2, timeouts={"sync": 60})
        await home.open()
        lost, well = home.made
        hanging = Answer(...)
        lost.answers["update_weights"] = RuntimeError("it died")
        home.trainer.answers["send_weights"] = lambda _: hanging

        def call(function, *_):
            if function == Sender.abort:
                assert home.killed == [lost]
                home.trainer.answers["send_weights"] = 0
                hanging.give(RuntimeError("the broadcast of weights was ended"))

        home.trainer.answers["call"] = call
        await asyncio.wait_for(home.engines.sync(1), 5)
        assert home.updates(well) == [0, 1, 1]

    asyncio.run(main())


def test_node_mates_join_between_rank_0_and_the_engines_and_are_told_as_well(house):
    async def main():
        home = house(2, timeouts={"sync": 60})
        mate, other = (Actor(send_weights=0) for _ in range(2))
        home.engines.cluster.trainers += [mate, other]
        home.engines.cluster.senders += [mate]
        await home.open()
        lost, well = home.made
        of_senders = [sender.called("join_sync_group") for sender in (home.trainer, mate)]
        assert of_senders == [[["host", 1, 0, 4]], [["host", 1, 1, 4]]]
        of_engines = [engine.called("join_sync_group")[0][1:] for engine in (lost, well)]
        assert of_engines == [["host", 1, 2, 4], ["host", 1, 3, 4]]
        assert not other.called("join_sync_group") and other.called("send_weights")
        hanging = Answer(...)
        lost.answers["update_weights"] = RuntimeError("it died")
        mate.answers["send_weights"] = lambda _: hanging

        def call(function, *_):
            if function == Sender.abort:
                mate.answers["send_weights"] = 0
                hanging.give(RuntimeError("the broadcast of weights was ended"))

        mate.answers["call"] = call
        await asyncio.wait_for(home.engines.sync(1), 5)
        assert home.killed == [lost] and home.updates(well) == [0, 1, 1]
        assert [Sender.abort] in home.trainer.called("call")
        assert [Sender.abort] not in other.called("call")

    asyncio.run(main())


def test_a_node_mate_that_hangs_is_named(house):
    async def main():
        home = house(2, timeouts={"answer": 0.05})
        mate = Actor(send_weights=0)
        home.engines.cluster.trainers.append(mate)
        home.engines.cluster.senders.append(mate)
        await home.open()
        home.made[0].answers["update_weights"] = RuntimeError("it died")
        mate.answers["call"] = lambda *_: Answer(...)
        with pytest.raises(TimeoutError, match="trainer rank 1 did not answer for 0 s"):
            await asyncio.wait_for(home.engines.sync(1), 5)

    asyncio.run(main())


def test_a_send_that_never_ends_ends_the_run_by_name(house):
    """Not even aborted: a trainer rank would not take part in another update."""

    async def main():
        home = house(2, timeouts={"sync": 0.2})
        await home.open()
        home.made[0].answers["update_weights"] = RuntimeError("it died")
        home.trainer.answers["send_weights"] = lambda _: Answer(...)
        with pytest.raises(TimeoutError, match="waited 0 s for the trainers' sends to end"):
            await asyncio.wait_for(home.engines.sync(1), 5)

    asyncio.run(main())


def test_an_update_that_nobody_is_guilty_of_makes_all_suspects(house):
    """The send fails, and every engine reports good health."""

    async def main():
        home = house(2)
        engines = await home.open()
        failed = [RuntimeError("connection closed")]
        home.trainer.answers["send_weights"] = lambda _: failed.pop() if failed else 0
        await asyncio.wait_for(home.engines.sync(1), 5)
        assert home.killed == home.made[:2] and engines.serving() == home.made[2:]
        assert len(engines.repairs) == 1

    asyncio.run(main())


def test_a_trainer_that_hangs_is_named_and_no_engine_blamed(house):
    async def main():
        home = house(2, timeouts={"answer": 0.05})
        await home.open()
        home.trainer.answers["send_weights"] = lambda _: RuntimeError("connection closed")
        home.trainer.answers["call"] = lambda *_: Answer(...)
        with pytest.raises(TimeoutError, match="trainer rank 0 did not answer for 0 s"):
            await asyncio.wait_for(home.engines.sync(1), 5)
        assert not home.killed

    asyncio.run(main())


def test_a_replacement_that_is_lost_before_it_was_synced_harms_nobody(house):
    async def main():
        home = house(2)
        engines = await home.open()
        well = home.made[1]
        home.lose(home.made[0])
        engines.launch()
        await engines.started()
        engines.welcome()
        home.lose(home.made[2])
        home.slow = True
        await asyncio.wait_for(home.engines.sync(1), 5)
        assert engines.serving() == [well] and well not in home.killed

    asyncio.run(main())


def test_the_first_update_of_all_must_work(house):
    async def main():
        home = house(2)
        home.trainer.answers["send_weights"] = 1  # nothing that came has this checksum
        with pytest.raises(RuntimeError, match="weights arrived at an engine other than they were"):
            await home.open()
        assert len(home.made) == 2, "what never worked is not mended by another start"

    asyncio.run(main())


def test_an_engine_that_got_other_weights_is_replaced_alone(house):
    """With several workers in an engine each must have got them."""

    async def main():
        home = house(2)
        engines = await home.open()
        home.trainer.answers["send_weights"] = 1
        home.made[0].answers["update_weights"] = Received(PHASES, [1, 2])
        home.made[1].answers["update_weights"] = Received(PHASES, [1, 1])
        home.slow = True
        await asyncio.wait_for(home.engines.sync(1), 5)
        assert home.killed == home.made[:1] and "weights arrived" in str(engines.error)

    asyncio.run(main())


def test_a_replacement_that_fails_to_start_disturbs_nobody(house, monkeypatch):
    async def main():
        home = house(2)
        engines = await home.open()
        run = SimpleNamespace(training=asyncio.Lock(), buffer=RolloutBuffer(1, 1))
        sleep = asyncio.sleep
        monkeypatch.setattr(asyncio, "sleep", lambda seconds: sleep(seconds / 100))
        home.broken = RuntimeError("no memory left")
        home.lose(home.made[0])
        repair = asyncio.create_task(home.engines.repair_forever(run))
        await sleep(0.2)
        repair.cancel()
        assert home.updates(home.made[1]) == [0] and len(engines.repairs) == 3

    asyncio.run(main())


def test_a_lost_engine_is_repaired_with_the_version_that_the_others_hold(house, monkeypatch):
    """Not while the trainer is in a step: its weights would have no version."""

    async def main():
        home = house(2)
        engines = await home.open()
        await home.engines.sync(3)
        run = SimpleNamespace(training=asyncio.Lock(), buffer=RolloutBuffer(1, 1))
        run.buffer.version = 3
        sleep = asyncio.sleep
        monkeypatch.setattr(asyncio, "sleep", lambda seconds: sleep(seconds / 100))
        repair = asyncio.create_task(home.engines.repair_forever(run))
        async with run.training:
            home.lose(home.made[0])
            await sleep(0.1)
            assert home.made[2].called("start") and not home.updates(home.made[2])
        await sleep(0.1)
        assert home.updates(home.made[2]) == [3] and not engines.missing.is_set()
        repair.cancel()

    asyncio.run(main())


def test_the_run_goes_on_with_those_that_are_left(house):
    async def main():
        home = house(2, max_restarts=0)
        engines = await home.open()
        home.lose(home.made[0])
        assert (await home.engines.sync(1))["engines"] == 1
        assert engines.serving() == home.made[1:] and len(home.made) == 2
        home.lose(home.made[1])
        with pytest.raises(RuntimeError, match="engine.max_restarts = 0: it died"):
            await home.engines.sync(2)

    asyncio.run(main())


@pytest.mark.parametrize("starts", [True, False])
def test_too_many_losses_end_the_run_with_the_last_error(house, starts):
    """Those of engines that served, and those of replacements that do not start."""

    async def main():
        home = house(1, max_restarts=2)
        await home.open()
        home.broken = None if starts else RuntimeError("no memory left")
        for version in (1, 2) if starts else ():
            home.lose(home.made[-1])
            await home.engines.sync(version)
        home.lose(home.made[-1])
        reason = "it died" if starts else "no memory left"
        with pytest.raises(RuntimeError, match=f"engine.max_restarts = 2: {reason}"):
            await home.engines.sync(3)
        assert len(home.made) == 3

    asyncio.run(main())


def test_only_the_replacements_of_the_last_hour_count(house, monkeypatch, capsys):
    """An engine that dies now and then is replaced for days."""

    async def main():
        clock = SimpleNamespace(now=0.0)
        monkeypatch.setattr(fleet, "time", SimpleNamespace(monotonic=lambda: clock.now))
        home = house(2, max_restarts=1)
        engines = await home.open()
        for version in (1, 2, 3):
            clock.now += 3601.0
            home.lose(home.made[-1])
            await home.engines.sync(version)  # which does not wait for the successor
            await engines.started()
            assert (await home.engines.sync(version))["engines"] == 2
        clock.now += 3598.0
        home.lose(home.made[-1])
        assert (await home.engines.sync(4))["engines"] == 1 and len(home.made) == 5
        engines.launch()
        told = capsys.readouterr()
        assert (told.out + told.err).count("not replaced yet: engine.max_restarts = 1 in") == 1
        clock.now += 3.0
        engines.launch()
        assert len(home.made) == 6

    asyncio.run(main())


def test_an_engine_that_cannot_start_at_first_ends_the_run_at_once(house):
    async def main():
        home = house(2)
        home.broken = RuntimeError("dtype is not supported")
        with pytest.raises(RuntimeError, match="dtype is not supported"):
            await home.fleet.start()
        assert home.killed == home.made and len(home.made) == 2

    asyncio.run(main())


def test_an_engine_that_starts_too_slowly_is_named(house):
    async def main():
        home = house(1, timeouts={"start": 0.05})
        home.slow = True
        with pytest.raises(TimeoutError, match="waited 0 s for 1 engines to start"):
            await home.fleet.start()

    asyncio.run(main())


# --- the probe of new engines ---------------------------------------------------------------------


@pytest.mark.parametrize("gap", [0.5, math.nan])
def test_engines_that_score_unlike_the_trainer_end_the_run(house, gap):
    async def main():
        home = house(2)
        home.trainer.answers["probe_gaps"] = [0.0, gap]
        with pytest.raises(RuntimeError, match="engines score unlike the trainer at version 0"):
            await home.open()

    asyncio.run(main())


def test_new_engines_answer_a_probe(house):
    async def main():
        home = house(2, seed=7)
        await home.open()
        asked = [engine.called("generate") for engine in home.made]
        assert [len(calls) for calls in asked] == [PROMPTS, PROMPTS]
        assert home.trainer.called("probe_gaps") == [[[["turn"] * PROMPTS] * 2]]
        home.lose(home.made[0])
        await home.fleet.replaced()
        await home.engines.sync(1)
        assert [len(e.called("generate")) for e in home.made] == [PROMPTS] * 3

    asyncio.run(main())


def test_engines_are_verified_every_so_many_updates(house):
    async def main():
        home = house(1, verify_sync_every=2)
        await home.open()
        for version in (1, 2, 3):
            await home.engines.sync(version)
        assert home.made[0].called("update_weights") == [
            [0, True],
            [1, False],
            [2, True],
            [3, False],
        ]
        assert len(home.made[0].called("generate")) == 2 * PROMPTS

    asyncio.run(main())


# --- leases ---------------------------------------------------------------------------------------


def test_the_least_busy_engine_is_leased(house):
    async def main():
        home = house(2)
        engines = await home.open()
        async with contextlib.AsyncExitStack() as stack:
            first = contextlib.AsyncExitStack()
            chosen = [await first.enter_async_context(engines.lease())]
            chosen += [await stack.enter_async_context(engines.lease()) for _ in range(3)]
            assert sorted(map(id, chosen)) == sorted(map(id, home.made * 2))
            await first.aclose()
            assert await leased(engines) is chosen[0]
        assert {place.groups for place in engines.alive.values()} == {0}
        assert engines.queue == sorted(engines.alive.values())

    asyncio.run(main())


def test_a_lease_of_an_engine_that_is_lost_ends_well(house):
    async def main():
        home = house(2)
        engines = await home.open()
        async with engines.lease() as engine:
            home.lose(engine)
        assert engines.serving() == [e for e in home.made if e is not engine]
        assert engines.queue == list(engines.alive.values())

    asyncio.run(main())


def test_a_lease_ends_with_what_it_waited_for(house):
    async def main():
        home = house(1, timeouts={"start": 0.02, "train": 0.02, "sync": 0.02})
        with pytest.raises(TimeoutError, match="an engine that holds the policy"):
            await leased(home.fleet)

    asyncio.run(main())


def test_the_least_busy_engine_that_answers_and_holds_a_policy_is_leased(monkeypatch):
    """However it is looked up: against all combinations of who is fresh and who was asked."""
    fleet = House(monkeypatch, 4).fleet
    for i in range(4):
        fleet.admit(f"e{i}")
    for case in range(4**4):
        kinds = [case // 4**i % 4 for i in range(4)]  # per engine: fresh, asked, both, neither
        for i in range(4):
            engine = f"e{i}"
            fleet.occupy(engine, (7 * case + 5 * i) % 4 - fleet.alive[engine].groups)
        fleet.fresh = {f"e{i}" for i, kind in enumerate(kinds) if kind in (0, 2)}
        fleet.asked = {f"e{i}" for i, kind in enumerate(kinds) if kind in (1, 2)}
        assert fleet.some_serve() == bool(fleet.serving())
        if fleet.some_serve():
            busy = {e: (e in fleet.asked, fleet.alive[e].groups) for e in fleet.serving()}
            expected = min(busy, key=busy.__getitem__)
            assert fleet.least_busy() == expected


def test_many_engines_are_asked_less_often(monkeypatch):
    """At most ASKED of them a second."""
    slept = []

    async def sleep(seconds):
        slept.append(seconds)
        house.fleet.alive.clear()

    house = House(monkeypatch, 1)
    monkeypatch.setattr(fleet.asyncio, "sleep", sleep)
    for count in (1, 100, 1440):
        for _ in range(count):
            house.fleet.admit(Actor())
        asyncio.run(house.fleet.watch(next(iter(house.fleet.alive))))
    assert slept == [5.0, 5.0, 72.0]
