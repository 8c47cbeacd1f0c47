"""What a configuration is good for beside training from the start.

Each class changes a few methods of Run, whichever file that comes from: `of` puts both together.

    python grpo_async.py --config X --resume auto            go on in the same folder
    python grpo_async.py --config X --resume auto --eval_only
    python grpo_async.py --config X --rollout_only           samples/ of the initial policy
    python grpo_async.py --config X --replay runs/NAME       train on another run's samples/
    python grpo_async.py --config X --run_dir D --export 100
    python grpo_async.py --config X --dry_run
"""

import asyncio
import dataclasses
import time
from pathlib import Path

from runtime import archive, checkpoints, metrics
from runtime.config import InputError
from runtime.waits import within


class Evaluation:
    """Evaluates one policy; what it finds is written below run_dir/evaluation."""

    async def start(self) -> None:
        """Starts everything, on the policy of the checkpoint."""
        await self.start_trainers()
        state = await checkpoints.resume(self)
        self.buffer.version = state.get("version", 0)
        self.cfg = dataclasses.replace(self.cfg, run_dir=f"{self.cfg.run_dir}/evaluation")
        self.engines.cfg = self.cfg
        self.start_workers()
        await self.start_engines()

    async def generate_forever(self) -> None:
        """Only validation rows are rolled out."""

    async def train_forever(self) -> None:
        """One evaluation. Raises RuntimeError where it was told to leave before its end."""
        await self.evaluate()
        if self.evaluated < 0:
            raise RuntimeError(f"left before the evaluation was done ({self.leaving})")


class Collection:
    """Generates and scores with the initial policy; each step's groups become a file."""

    async def train_forever(self) -> None:
        """Takes each step's groups and writes them; the next may start as if they were trained."""
        cfg, buffer = self.cfg, self.buffer
        for step in range(cfg.steps):
            began = time.perf_counter()
            ready = buffer.until(lambda step: self.leaving or buffer.is_complete(step), step)
            await within(cfg.timeouts.batch, f"the groups of step {step + 1}", ready, buffer.census)
            if self.leaving:
                self.log.note(f"left after {step} steps ({self.leaving})")
                return
            groups = buffer.take(step)
            path = f"{cfg.run_dir}/samples/step_{step + 1:06d}.npz"
            await checkpoints.write_groups(self, path, groups)
            stats = {"wait_for_rollouts": time.perf_counter() - began} | buffer.meters()
            self.log.step(step + 1, metrics.rollout_metrics(groups, 0) | stats)
            buffer.max_lag += 1  # the next groups may start, on the same version
            buffer.wake()


class NoEngines:
    """Stands where the engines would: nothing has to be brought to a version."""

    def meters(self) -> dict[str, int]:
        """There is nobody to count."""
        return {}

    def launch(self) -> None:
        """There is nobody to start."""

    async def start(self, trainers: list, metas: list) -> None:
        """There is nobody to connect."""

    async def sync(self, version: int) -> dict[str, float]:
        """There is nobody to sync."""
        return {}


class Replay:
    """Trains on saved samples, in the order of their steps; can be resumed with the same folder."""

    def __init__(self, cfg, rows: list[dict], val_rows: list[dict]):
        found = Path(cfg.replay).glob("samples/step_*.npz")
        self.files = sorted(path for path in found if path.stem.removeprefix("step_").isdigit())
        if not self.files:
            raise InputError(f"replay = {cfg.replay!r}: expected a folder with samples/step_*.npz")
        steps, P = min(cfg.steps, len(self.files)), cfg.prompts_per_step
        try:
            counts = [archive.count_groups(str(path)) for path in self.files[:steps]]
        except ValueError as error:
            raise InputError(str(error)) from None
        for path, count in zip(self.files, counts, strict=False):
            if count != P:
                raise InputError(f"{path} holds {count} groups, not prompts_per_step = {P}")
        super().__init__(dataclasses.replace(cfg, steps=steps), rows, [])
        self.buffer.max_lag = steps  # its samples are as old as they are
        self.engines = NoEngines()

    async def repair_forever(self) -> None:
        """Nothing can break."""

    async def generate_forever(self) -> None:
        """Hands in each file's groups, two steps ahead of the trainer."""
        P, cfg, buffer = self.cfg.prompts_per_step, self.cfg, self.buffer
        for step in range(self.next_slot // P, cfg.steps):
            await buffer.until(lambda step: buffer.next_step >= step - 1, step)
            path = self.files[step]
            read = next(self.workers).call.options(num_returns=1 + P)
            heads, *samples = read.remote(archive.read_groups, str(path))
            heads = await within(cfg.timeouts.rollout, f"{path} to be read", heads)
            for p, ((_, _, line, infos), ref) in enumerate(zip(heads, samples, strict=True)):
                self.next_slot = self.position = step * P + p + 1
                buffer.start(step * P + p)
                buffer.put(self.Group(step * P + p, step, line, infos, ref))


class Export:
    """Writes a checkpoint of run_dir as a model."""

    async def run(self) -> None:
        """Starts the trainers, loads the checkpoint and exports it."""
        cfg = self.cfg
        folder = Path(cfg.run_dir) / f"step_{cfg.export:06d}"
        self.cfg = dataclasses.replace(cfg, resume=str(folder), export=0)
        await self.start_trainers()
        await checkpoints.resume(self)
        calls = asyncio.gather(*(t.export.remote(f"{folder}/hf") for t in self.trainers))
        await within(cfg.timeouts.train, "the export of the policy", calls)
        print(f"exported: {folder}/hf")


def of(cfg, Run: type) -> type:
    """The kind of Run that a configuration asks for."""
    asked = zip(
        (cfg.eval_only, cfg.rollout_only, cfg.replay, cfg.export),
        (Evaluation, Collection, Replay, Export),
        strict=True,
    )
    kinds = tuple(kind for wanted, kind in asked if wanted)
    return type("Run", (*kinds, Run), {}) if kinds else Run
