"""A run's processes: its folder, its Ray cluster and its actors."""

import asyncio
import fcntl
import gc
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from tqdm import tqdm

from core.errors import InputError, shown
from rollout.rows import quarantine
from runtime.processes import placement
from runtime.processes.actors import actor, has_gpus, last_lines
from runtime.processes.trainer_rank import meet
from runtime.reporting.console import phase
from settings.config import TrainingSettings

ROOT = Path(__file__).parents[2]


class Cluster:
    """The run folder and a Ray cluster, held while `with` lasts, and the actors of a run."""

    def __init__(self, cfg: TrainingSettings, Trainer: type, RolloutWorker: type | None = None):
        self.cfg = cfg
        self.Trainer = Trainer
        self.RolloutWorker: Any = RolloutWorker  # none where there are no rollouts
        self.trainers: list[Any] = []  # by rank
        self.senders: list[Any] = []  # of weights: rank 0, and those that join it
        self.metas: list = []  # what the policy's weights look like

    def __enter__(self) -> "Cluster":
        """Raises InputError where the run folder cannot be had."""
        from runtime.processes.ray_start import connect

        self.lock = claim(self.cfg)
        signal.signal(signal.SIGINT, interrupt)
        quarantine(self.cfg)
        phase("starting Ray")
        self.places = connect(self.cfg)
        search_rarely()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        """An error leaves with the last lines that the actors logged."""
        if isinstance(error, Exception):
            print(last_lines(self.cfg), file=sys.stderr)
        import ray

        signal.signal(signal.SIGINT, signal.SIG_DFL)  # another Ctrl-C does not wait for Ray
        ray.shutdown()
        self.lock.close()

    def shares_gpus(self) -> bool:
        """Whether trainers and engines use the same GPUs."""
        return self.cfg.demand.share < 1 and has_gpus()

    def on_signal(self, leave: Callable[[str], None]) -> None:
        """Calls `leave` with a reason on SIGTERM, SIGUSR1 and Ctrl-C, and before a Slurm job ends.

        A second Ctrl-C ends the program at once.
        """
        loop = asyncio.get_running_loop()

        def leave_or_end() -> None:
            loop.add_signal_handler(signal.SIGINT, interrupt)
            tqdm.write("Ctrl-C: leaves after this step, with a checkpoint; again: at once, without")
            leave("Ctrl-C")

        loop.add_signal_handler(signal.SIGINT, leave_or_end)
        for name in ("SIGTERM", "SIGUSR1"):
            loop.add_signal_handler(getattr(signal, name), leave, name)
        end = os.environ.get("SLURM_JOB_END_TIME")
        if self.cfg.save_before and end:
            seconds = float(end) - time.time() - self.cfg.save_before
            loop.call_later(max(0, seconds), leave, "end of the job")

    async def start_trainers(self) -> None:
        """Starts the trainer ranks, which load the model of the configuration."""
        cfg, homes = self.cfg, self.places.trainers
        phase(f"loading {shown(cfg.model)} (trainer ranks: {cfg.policy.ranks})")
        gpus = placement.shares(cfg).trainer
        self.trainers, nodes, starts = await self.start_ranks(self.Trainer, cfg, gpus, homes)
        self.metas = starts[0]
        mates = placement.node_mates(cfg, nodes)
        self.senders = [self.trainers[rank] for rank in (0, *mates)]

    async def start_ranks(
        self, cls: type, cfg: TrainingSettings, gpus: float, homes: list[str]
    ) -> tuple[list[Any], list[str], list[Any]]:
        """A network's ranks in order, the node of each ("" without GPUs), what `start` returned."""
        options = {"concurrency_groups": {"io": 1, "watch": 2}}  # beside the thread that computes
        made = [actor(cls, gpus, cfg, **options, **placement.on(at)).remote(cfg) for at in homes]
        found = await meet(made, f"{cls.__name__.lower()} rank", cfg, self.places)
        return found.ranks, found.nodes if gpus else [""] * len(made), found.starts

    def start_worker(self) -> Any:
        """Starts a rollout worker."""
        options = {"max_concurrency": 100_000} | placement.of_worker()
        return actor(self.RolloutWorker, 0, self.cfg, **options).remote(self.cfg)

    def task(self, function: Callable, *args: Any, returns: int = 1) -> Any:
        """Runs a function in a process of its own, near its data, and again if that dies."""
        import ray

        options = {"num_cpus": 0, "max_retries": 3, "num_returns": returns}
        return ray.remote(function).options(**options).remote(*args)

    async def watch(self, trainer: Any) -> None:
        """Raises as soon as a trainer rank dies, even while no call of it is awaited."""
        await trainer.watch.options(concurrency_group="watch").remote()


def search_rarely() -> None:
    """Makes Python search for garbage after a million new objects, and not in what libraries made.

    The search took half of the driver's time. Reference cycles, which it is for, appear in the
    driver only after errors.
    """
    gc.freeze()
    gc.set_threshold(1_000_000)


def interrupt(*_: Any) -> None:
    """Ends the program without a traceback."""
    raise SystemExit("interrupted; --resume auto goes on from the last checkpoint")


def claim(cfg: TrainingSettings) -> TextIO:
    """Takes the run folder for this process; keep what it returns as long as the run lives.

    Raises InputError where it cannot be written to, where another run is alive in it, or was and
    is not to be continued.
    """
    command = cfg.command
    folder = Path(cfg.run_dir)
    if command.replayed == cfg.run_dir:
        raise InputError(f"replay = run_dir = {cfg.run_dir!r}: expected another run_dir")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = open(folder / "lock", "a+")  # noqa: SIM115
    except OSError as error:
        expected = f"expected a folder to write to: {error.strerror}"
        raise InputError(f"run_dir = {cfg.run_dir!r}: {expected}") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.seek(0)
        owner = lock.read().strip()
        raise InputError(f"run_dir = {cfg.run_dir!r} is in use by {owner}") from None
    except OSError as error:
        reason = f"cannot be locked: {error.strerror}"
        raise InputError(f"run_dir = {cfg.run_dir!r} {reason}") from None
    metrics = folder / "metrics.jsonl"
    holds_run = (metrics.exists() and metrics.stat().st_size) or any(
        folder.glob("step_*/complete.json")
    )
    here = command.resume == "auto" or (command.resume and Path(command.resume).parent == folder)
    goes_on = here or command.export or (command.resume and command.eval_only)
    if not goes_on and holds_run:
        expected = "expected an empty folder, or --resume auto to go on"
        raise InputError(f"run_dir = {cfg.run_dir!r} holds a run already: {expected}")
    lock.truncate(0)
    lock.write(f"process {os.getpid()} on {os.uname().nodename}")
    lock.flush()
    return lock
