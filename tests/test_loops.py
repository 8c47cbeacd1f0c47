"""The driver's loops without their actors: in which order a run trains, saves and evaluates."""

import asyncio
import itertools
from types import SimpleNamespace

import pytest

from grpo_async import Config, Group, Run
from runtime import checkpoints, metrics, modes
from runtime.archive import write_groups

ROW = {"_line": 1, "agent_ref": {"name": "any"}}


@pytest.fixture
def told(monkeypatch):
    """What a run did and at which version, in order; `made` makes one with all groups ready."""
    events = []

    def made(version: int = 0, **fields) -> Run:
        fields |= {"val_data": "val.jsonl", "prompts_per_step": 1}
        run = Run(Config(**fields), [ROW], [ROW])
        run.buffer.version = version
        for slot in range(version, run.cfg.steps):
            run.buffer.ready[slot] = Group(slot, slot, 1, [], None)

        def tell(name: str, answer=None):
            async def happens(*_):
                events.append((name, run.buffer.version))
                return answer

            return happens

        async def saved(run):
            async def write(version: int):
                for _ in range(50):
                    await asyncio.sleep(0)
                events.append(("written", version))

            await checkpoints.written(run)
            events.append(("save", run.buffer.version))
            run.saving = run.tasks.create_task(write(run.buffer.version))

        nothing = dict.fromkeys(("step", "note", "drop", "write"), lambda *_: None)
        run.log = SimpleNamespace(**nothing)
        run.train, run.engines.sync = tell("train", {}), tell("sync", {})
        run.evaluate = tell("evaluate")
        monkeypatch.setattr(checkpoints, "save", saved)
        monkeypatch.setattr(metrics, "rollout_metrics", lambda *_: {})
        return run

    return SimpleNamespace(events=events, made=made)


def order(told, *names: str) -> str:
    """The events of these names, as `save 2, evaluate 2`."""
    return ", ".join(f"{name} {version}" for name, version in told.events if name in names)


def train(run: Run) -> None:
    """Its loop, among tasks that end when it fails."""

    async def main():
        async with asyncio.TaskGroup() as run.tasks:
            await run.train_forever()

    asyncio.run(main())


def test_a_checkpoint_does_not_wait_for_an_evaluation(told):
    train(told.made(steps=4, val_period=2, save_period=2))
    expected = "evaluate 0, save 2, evaluate 2, save 4, evaluate 4"
    assert order(told, "evaluate", "save") == expected
    assert order(told, "written") == "written 2, written 4"


def test_an_evaluation_that_fails_costs_no_checkpoint(told):
    run = told.made(steps=2, val_period=2, save_period=0)
    del run.evaluate  # the real one
    info = SimpleNamespace(reward=1.0, continues=False)

    async def breaks(*_):
        if run.buffer.version:
            raise ValueError("the judge is down")
        return 0, [info], None

    run.roll_out = breaks
    with pytest.raises(ExceptionGroup) as error:
        train(run)
    assert "every validation row failed" in str(error.value.exceptions)
    assert order(told, "written") == "written 2"


@pytest.mark.parametrize("version", [2, 4])
def test_a_run_that_goes_on_makes_up_for_the_evaluation_it_owes(told, tmp_path, version):
    """Also after the last step. `evaluate` itself leaves out what was done."""
    (tmp_path / f"step_{version:06d}").mkdir()
    (tmp_path / f"step_{version:06d}" / "complete.json").touch()
    fields = {"steps": 4, "val_period": 2, "save_period": 0, "run_dir": str(tmp_path)}
    train(told.made(version, **fields))
    assert order(told, "save", "evaluate").startswith(f"evaluate {version}")


def test_a_run_from_another_folder_saves_before_all_else(told, tmp_path):
    fields = {"steps": 4, "val_period": 1, "save_period": 0, "run_dir": str(tmp_path)}
    train(told.made(2, **fields))
    expected = "save 2, written 2, evaluate 2, evaluate 3, save 4, evaluate 4, written 4"
    assert order(told, "save", "written", "evaluate") == expected


def test_each_version_is_evaluated_once_and_none_by_a_run_that_leaves():
    async def main():
        run, asked = Run(Config(), [ROW], [ROW]), []
        run.log = SimpleNamespace(write=lambda version, _: asked.append(version))
        info = SimpleNamespace(reward=1.0, continues=False)

        async def rolled(*_):
            return 0, [info], None

        run.roll_out = rolled
        await run.evaluate()
        await run.evaluate()
        run.buffer.version = 3
        run.leaving = "SIGTERM"
        await run.evaluate()
        run.leaving = ""
        await run.evaluate()
        assert asked == [0, 3]

    asyncio.run(main())


def test_an_evaluation_that_is_cut_short_does_not_end_well():
    async def main():
        run = modes.of(Config(eval_only=True, val_data="v", val_period=1), Run)(
            Config(), [ROW], [ROW]
        )
        run.roll_out = lambda *_: asyncio.sleep(60)
        asyncio.get_running_loop().call_later(0.01, run.leave, "SIGTERM")
        with pytest.raises(RuntimeError, match="before the evaluation was done .SIGTERM."):
            await run.train_forever()
        assert run.evaluated == -1

    asyncio.run(main())


def test_a_replay_goes_on_with_the_files_that_were_not_trained(tmp_path):
    """Step 1 is trained and step 2 in the checkpoint: 3 and 4 are read, each at its place."""

    async def main():
        for step in range(1, 5):
            write_groups(str(tmp_path / f"samples/step_{step:06d}.npz"), [(0, 0, step)], [], [])
        cfg = Config(replay=str(tmp_path), resume="auto", run_dir="x", prompts_per_step=1)
        run, read = modes.of(cfg, Run)(cfg, [ROW], []), []

        def remote(_, path):
            read.append(path[-10:-4])
            return asyncio.sleep(0, [(0, 0, int(path[-5]), [])]), None

        call = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=remote))
        run.workers = itertools.cycle([SimpleNamespace(call=call)])
        run.buffer.restore(1, [Group(1, 0, 2, [], None)], {})
        run.next_slot = 2
        reading = asyncio.create_task(run.generate_forever())
        lines = []
        for step in (1, 2, 3):
            await run.buffer.until(run.buffer.is_complete, step)
            lines += [group.line for group in run.buffer.take(step)]
            run.buffer.wake()
        await reading
        assert read == ["000003", "000004"] and lines == [2, 3, 4]

    asyncio.run(main())
