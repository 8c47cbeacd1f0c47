"""Engines that are lost, late or broken, against actors that a test controls."""

import asyncio
import concurrent.futures
import gc
import itertools

import pytest

from grpo_async import Config, Engines, Run
from runtime import fleet

PHASES = {"sync_pause": 0.0, "sync_transfer": 0.0, "sync_resume": 0.0}


class Ref:
    """What a call returns: awaited, or turned into a future."""

    def __init__(self, value=None):
        self.told = concurrent.futures.Future()
        if isinstance(value, Exception):
            self.told.set_exception(value)
        elif value is not ...:
            self.told.set_result(value)

    def future(self):
        return self.told

    def __await__(self):
        return asyncio.wrap_future(self.told).__await__()


class Actor:
    """Writes down its calls; `answers` are by method, `...` never comes."""

    def __init__(self, **answers):
        self.answers, self.calls = answers, []

    def __getattr__(self, name):
        if name.startswith("_"):
            raise AttributeError(name)

        class Method:
            @staticmethod
            def remote(*args):
                self.calls.append((name, *args))
                found = self.answers.get(name)
                return found if isinstance(found, Ref) else Ref(found)

        return Method


class House:
    """A fleet of `count` engines; `made` are those that were started, `killed` those that were."""

    def __init__(self, monkeypatch, count: int, **fields):
        self.made, self.killed, self.slow, self.broken = [], [], False, None
        handle = Actor()
        handle.remote = self.make
        monkeypatch.setattr(fleet, "actor", lambda *args, **options: handle)
        monkeypatch.setattr(fleet.ray, "kill", self.killed.append)
        trainer = Actor(open_store=("host", 1), send_weights={}, score=[0.0])
        self.cfg = Config(generators=count, **fields)
        self.engines, self.trainer = Engines(object, self.cfg), trainer

    def make(self, cfg):
        """A new engine; while the house is `slow` it does not get ready by itself."""
        start = Ref(... if self.slow else self.broken)
        engine = Actor(start=start, update_weights=(PHASES, [{}]))
        self.made.append(engine)
        return engine

    async def open(self) -> Engines:
        """All engines, at version 0."""
        await self.engines.start([self.trainer], [("w", (1,), "float32")])
        await self.engines.sync(0)
        return self.engines

    def updates(self, engine) -> list[int]:
        """The versions that an engine was sent."""
        return [call[1] for call in engine.calls if call[0] == "update_weights"]


@pytest.fixture
def house(monkeypatch):
    """A function that builds a fleet."""
    return lambda count, **fields: House(monkeypatch, count, **fields)


def lose(house, engine) -> None:
    """An engine dies: nothing of it answers any more."""
    calls = "check_health", "update_weights", "probe"
    engine.answers = dict.fromkeys(calls, RuntimeError("it died"))
    house.engines.discard([engine], RuntimeError("it died"))


def test_the_others_are_synced_while_a_lost_engine_is_replaced(house):
    async def main():
        home = house(2)
        engines = await home.open()
        first, second = home.made
        home.slow = True
        lose(home, first)
        assert engines.missing.is_set() and engines.serving() == [second]
        await asyncio.wait_for(engines.sync(1), 5)  # does not wait for the third
        third = home.made[2]
        assert home.updates(second) == [0, 1] and not home.updates(third)
        assert engines.missing.is_set() and await engines.pick() is second
        third.answers["start"].told.set_result(None)
        await asyncio.sleep(0.01)
        assert engines.serving() == [second], "it holds no policy yet"
        await engines.sync(1)
        assert home.updates(third) == [1] and not engines.missing.is_set()
        assert await engines.pick() is third and engines.repairs == 1
        proven = [call for call in third.calls if call[0] == "probe"]
        assert proven and third.calls[-2][2] is True, "what is new must be verified"

    asyncio.run(main())


def test_a_group_without_a_lost_engine_is_made_before_the_next_update(house):
    async def main():
        home = house(3)
        engines = await home.open()
        home.slow = True
        lose(home, home.made[1])
        await engines.sync(1)
        worlds = [call[1] for call in home.trainer.calls if call[0] == "join_sync_group"]
        assert worlds == [4, 3]
        await engines.sync(2)
        assert len([c for c in home.trainer.calls if c[0] == "join_sync_group"]) == 2

    asyncio.run(main())


def test_an_engine_that_died_unnoticed_is_not_waited_for_in_a_new_group(house):
    async def main():
        home = house(3)
        engines = await home.open()
        home.slow = True
        lose(home, home.made[0])
        home.made[1].answers["check_health"] = RuntimeError("its process is gone")
        await engines.sync(1)
        worlds = [call[1] for call in home.trainer.calls if call[0] == "join_sync_group"]
        assert worlds == [4, 2] and engines.serving() == [home.made[2]]

    asyncio.run(main())


def test_an_update_waits_where_nobody_is_left(house):
    async def main():
        home = house(1)
        engines = await home.open()
        home.slow = True
        lose(home, home.made[0])
        update = asyncio.create_task(engines.sync(1))
        await asyncio.sleep(0.05)
        assert not update.done() and not engines.serving()
        waiting = asyncio.create_task(engines.pick())
        home.made[1].answers["start"].told.set_result(None)
        assert await asyncio.wait_for(update, 5) == PHASES
        assert await asyncio.wait_for(waiting, 5) is home.made[1]

    asyncio.run(main())


def test_an_engine_that_fails_an_update_is_replaced_and_the_others_get_it(house):
    async def main():
        home = house(2)
        engines = await home.open()
        broken, well = home.made
        broken.answers["update_weights"] = RuntimeError("out of memory")
        await engines.sync(1)
        assert home.killed == [broken] and home.updates(well)[-1] == 1
        assert broken not in engines.load and engines.repairs == 1

    asyncio.run(main())


def test_an_engine_that_is_nearly_done_when_another_fails_is_kept(house):
    async def main():
        home = house(3)
        engines = await home.open()
        first, *others = home.made
        first.answers["update_weights"] = RuntimeError("out of memory")
        slow = [Ref(...), Ref(...)]
        for engine, ref in zip(others, slow, strict=True):
            engine.answers["update_weights"] = ref
        update = asyncio.create_task(engines.sync(1))
        await asyncio.sleep(0.05)
        for engine, ref in zip(others, slow, strict=True):
            engine.answers["update_weights"] = (PHASES, [{}])
            ref.told.set_result((PHASES, [{}]))
        await asyncio.wait_for(update, 5)
        assert home.killed == [first] and engines.serving() == others

    asyncio.run(main())


def test_a_replacement_that_is_lost_before_it_was_synced_harms_nobody(house):
    async def main():
        home = house(2)
        engines = await home.open()
        well = home.made[1]
        lose(home, home.made[0])
        engines.launch()
        await engines.started()
        engines.welcome()
        lose(home, home.made[2])
        home.slow = True
        await asyncio.wait_for(engines.sync(1), 5)
        assert engines.serving() == [well] and well not in home.killed

    asyncio.run(main())


def test_the_first_update_of_all_must_work(house):
    async def main():
        home = house(2)
        home.trainer.answers["send_weights"] = {"w": 1}  # nothing that came has this checksum
        with pytest.raises(RuntimeError, match="w arrived at an engine other than it was sent"):
            await home.open()
        assert len(home.made) == 2, "what never worked is not mended by another start"

    asyncio.run(main())


def test_an_engine_that_got_other_weights_is_replaced_alone(house):
    """With several workers in an engine each must have got them."""

    async def main():
        home = house(2)
        engines = await home.open()
        home.trainer.answers["send_weights"] = {"w": 1}
        home.made[0].answers["update_weights"] = (PHASES, [{"w": 1}, {"w": 2}])
        home.made[1].answers["update_weights"] = (PHASES, [{"w": 1}, {"w": 1}])
        home.slow = True
        await asyncio.wait_for(engines.sync(1), 5)
        assert home.killed == home.made[:1] and "w arrived" in str(engines.error)

    asyncio.run(main())


def test_a_replacement_that_fails_to_start_disturbs_nobody(house, monkeypatch):
    async def main():
        home = house(2)
        engines = await home.open()
        run = Run(Config(generators=2), [], [])
        run.engines = engines
        naps = asyncio.sleep
        monkeypatch.setattr(asyncio, "sleep", lambda seconds: naps(seconds / 100))
        home.broken = RuntimeError("no memory left")
        lose(home, home.made[0])
        repair = asyncio.create_task(run.repair_forever())
        await naps(0.2)
        repair.cancel()
        assert home.updates(home.made[1]) == [0] and engines.repairs == 3

    asyncio.run(main())


def test_the_run_goes_on_with_those_that_are_left(house):
    async def main():
        home = house(2, max_engine_restarts=0)
        engines = await home.open()
        lose(home, home.made[0])
        await engines.sync(1)
        assert engines.serving() == home.made[1:] and len(home.made) == 2
        lose(home, home.made[1])
        with pytest.raises(RuntimeError, match="max_engine_restarts = 0: it died"):
            await engines.sync(2)

    asyncio.run(main())


@pytest.mark.parametrize("starts", [True, False])
def test_too_many_losses_end_the_run_with_the_last_error(house, starts):
    """Those of engines that served, and those of replacements that do not start."""

    async def main():
        home = house(1, max_engine_restarts=2)
        engines = await home.open()
        home.broken = None if starts else RuntimeError("no memory left")
        for version in (1, 2) if starts else ():
            lose(home, home.made[-1])
            await engines.sync(version)
        lose(home, home.made[-1])
        told = "it died" if starts else "no memory left"
        with pytest.raises(RuntimeError, match=f"max_engine_restarts = 2: {told}"):
            await engines.sync(3)
        assert len(home.made) == 3

    asyncio.run(main())


def test_an_engine_that_cannot_start_at_first_ends_the_run_at_once(house):
    async def main():
        home = house(2)
        home.broken = RuntimeError("dtype is not supported")
        with pytest.raises(RuntimeError, match="dtype is not supported"):
            await home.engines.start([home.trainer], [])
        assert home.killed == home.made and len(home.made) == 2

    asyncio.run(main())


def test_an_engine_that_starts_too_slowly_is_named(house):
    async def main():
        home = house(1, timeouts={"start": 0.05})
        home.slow = True
        with pytest.raises(TimeoutError, match="waited 0 s for 1 engines to start"):
            await home.engines.start([home.trainer], [])

    asyncio.run(main())


def test_engines_that_score_unlike_the_trainer_end_the_run(house):
    async def main():
        home = house(2)
        home.trainer.answers["score"] = [0.0, 0.5]
        with pytest.raises(RuntimeError, match="engines score unlike the trainer at 0"):
            await home.open()

    asyncio.run(main())


def test_the_least_busy_engine_is_picked(house):
    async def main():
        home = house(2)
        engines = await home.open()
        picked = [await engines.pick() for _ in range(4)]
        assert sorted(map(id, picked)) == sorted(map(id, home.made * 2))
        engines.release(picked[0])
        assert await engines.pick() is picked[0]
        lose(home, picked[0])
        engines.release(picked[0])  # it is gone: nothing to give back
        assert engines.serving() == [e for e in home.made if e is not picked[0]]

    asyncio.run(main())


def test_an_evaluation_is_given_up_when_the_run_is_to_leave(monkeypatch):
    async def main():
        rows = [{"_line": i, "agent_ref": {"name": "any"}} for i in range(3)]
        run, cancelled, complaints = Run(Config(), [], rows), [], []
        asyncio.get_running_loop().set_exception_handler(lambda _, told: complaints.append(told))
        monkeypatch.setattr(fleet.ray, "cancel", cancelled.append)

        class Worker(Actor):
            class rollout_group:
                options = staticmethod(lambda **_: Worker.rollout_group)
                remote = staticmethod(lambda *args: (Ref(...), None))

        async def picked():
            return "engine"

        run.workers = itertools.cycle([Worker()])
        monkeypatch.setattr(run.engines, "pick", picked)
        evaluation = asyncio.create_task(run.evaluate())
        await asyncio.sleep(0.01)
        run.leave("SIGTERM")
        await asyncio.wait_for(evaluation, 5)
        assert len(cancelled) == 3, "nothing may go on for nobody"
        del evaluation
        gc.collect()
        assert not complaints

    asyncio.run(main())
