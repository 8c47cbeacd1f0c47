"""Holds a run's folder and its Ray cluster, and starts its actors."""

import asyncio
import fcntl
import gc
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, TextIO

from tqdm import tqdm

from core.errors import InputError, shown
from envs import registry
from rollout.rows import quarantine
from runtime.processes import placement
from runtime.processes.actors import actor, has_gpus
from runtime.processes.trainer_rank import meet
from runtime.reporting import failure
from runtime.reporting.console import close_bars, outlive_readers, phase
from settings.config import TrainingSettings

if TYPE_CHECKING:
    from ray.actor import ActorHandle

    from policy import WeightMeta

ROOT = Path(__file__).parents[2]


class Cluster:
    """The run folder and a Ray cluster, held while `with` lasts, and the run's actors."""

    def __init__(self, cfg: TrainingSettings, Trainer: type, RolloutWorker: type | None = None):
        self.cfg = cfg
        self.Trainer = Trainer
        self.RolloutWorker = RolloutWorker  # None without rollouts
        self.trainers: list[ActorHandle] = []  # by rank
        self.senders: list[ActorHandle] = []  # the ranks on rank 0's node: they send the weights
        self.metas: list[WeightMeta] = []  # describe the policy's weights

    def __enter__(self) -> "Cluster":
        """Claims the run folder and connects to Ray. Raises InputError if either fails."""
        from runtime.processes.ray_start import connect

        self.lock = claim(self.cfg)
        outlive_readers(Path(self.cfg.writes_to, "logs"))
        signal.signal(signal.SIGINT, interrupt)
        quarantine(self.cfg)
        phase("starting Ray")
        self.places = connect(self.cfg)
        search_rarely()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Leaves Ray and frees the run folder.

        After an error, prints the last lines of logs, and raises SystemExit with one sentence about
        the error instead of it.
        """
        if isinstance(error, Exception):
            close_bars()
            print(failure.last_lines(self.cfg), file=sys.stderr)
        import ray

        signal.signal(signal.SIGINT, signal.SIG_DFL)  # another Ctrl-C does not wait for Ray
        ray.shutdown()
        sentence = ""
        if isinstance(error, Exception):  # after Ray: it may hold the last files that may be open
            sentence = failure.ending(self.cfg, error)
        self.lock.close()
        if sentence:
            raise SystemExit(sentence) from None

    def shares_gpus(self) -> bool:
        """Returns whether trainers and engines use the same GPUs."""
        return self.cfg.demand.share < 1 and has_gpus()

    def on_signal(self, leave: Callable[[str], None]) -> None:
        """Calls `leave` with a reason on a signal that asks to end, and before a Slurm job ends.

        These are SIGTERM, SIGUSR1, SIGHUP of a lost terminal, unless nohup ignores it, and Ctrl-C.
        A second Ctrl-C ends the program at once.
        """
        loop = asyncio.get_running_loop()

        def leave_or_end() -> None:
            loop.add_signal_handler(signal.SIGINT, interrupt)
            tqdm.write(
                "Ctrl-C: ends after this step, with a checkpoint; "
                "a second Ctrl-C ends at once, without one"
            )
            leave("Ctrl-C")

        loop.add_signal_handler(signal.SIGINT, leave_or_end)
        for name in ("SIGTERM", "SIGUSR1", "SIGHUP"):
            number = getattr(signal, name)
            if signal.getsignal(number) != signal.SIG_IGN:
                loop.add_signal_handler(number, leave, name)
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
    ) -> tuple["list[ActorHandle]", list[str], list]:
        """Starts the ranks of a network, one on each of the nodes `homes`.

        Returns the ranks in order, each rank's node ("" without GPUs), and what each rank's `start`
        returned.
        """
        groups = {"io": 1, "watch": 2}  # threads in addition to the one that computes
        made = []
        for home in homes:
            Actor = actor(cls, gpus, cfg, concurrency_groups=groups, **placement.on(home))
            made.append(Actor.remote(cfg))
        met = await meet(made, f"{cls.__name__.lower()} rank", cfg, self.places)
        nodes = met.nodes if gpus else [""] * len(made)
        return met.ranks, nodes, met.starts

    def start_worker(self) -> "ActorHandle":
        """Starts a rollout worker."""
        assert self.RolloutWorker
        options = placement.of_worker()
        keys = registry.secrets()
        if keys:
            options["runtime_env"] = {"env_vars": keys}
        Actor = actor(self.RolloutWorker, 0, self.cfg, max_concurrency=100_000, **options)
        return Actor.remote(self.cfg)

    def task(self, function: Callable, *args: Any, returns: int = 1) -> Any:
        """Runs a function in its own process, near its data; retries if the process dies.

        Returns Ray's reference to the result, or a list of `returns` references.
        """
        import ray

        remote = ray.remote(function)
        return remote.options(num_cpus=0, max_retries=3, num_returns=returns).remote(*args)

    async def watch(self, trainer: "ActorHandle") -> None:
        """Raises as soon as a trainer rank dies, even while none of its calls is awaited."""
        await trainer.watch.options(concurrency_group="watch").remote()


def search_rarely() -> None:
    """Runs the garbage collector rarely, and skips all objects that exist now.

    It took half of the driver's time. Reference cycles, which it exists to collect, appear in the
    driver only after errors.
    """
    gc.freeze()
    gc.set_threshold(1_000_000)


def interrupt(*_: int | FrameType | None) -> None:
    """Ends the program without a traceback."""
    raise SystemExit("interrupted; --resume auto continues from the last checkpoint")


def claim(cfg: TrainingSettings) -> TextIO:
    """Locks the run folder for this process, until the returned file is closed.

    Raises InputError if the folder cannot be written to, if another run is alive in it, or if it
    holds a run that the command does not continue.
    """
    command = cfg.command
    folder = Path(cfg.run_dir)
    if command.replayed == cfg.run_dir:
        raise InputError(f"replay = run_dir = {cfg.run_dir!r}: expected another run_dir")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = open(folder / "lock", "a+")  # noqa: SIM115
    except OSError as error:
        raise InputError(
            f"run_dir = {cfg.run_dir!r}: expected a folder to write to: {error.strerror}"
        ) from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.seek(0)
        owner = lock.read().strip()
        raise InputError(f"run_dir = {cfg.run_dir!r} is in use by {owner}") from None
    except OSError as error:
        raise InputError(f"run_dir = {cfg.run_dir!r} cannot be locked: {error.strerror}") from None
    metrics = folder / "metrics.jsonl"
    has_metrics = metrics.exists() and metrics.stat().st_size > 0
    holds_run = has_metrics or any(folder.glob("step_*/complete.json"))
    resumes_here = command.resume == "auto"
    if command.resume and Path(command.resume).parent == folder:
        resumes_here = True
    evaluates_checkpoint = bool(command.resume and command.eval_only)
    continues = resumes_here or command.export or evaluates_checkpoint
    if holds_run and not continues:
        raise InputError(
            f"run_dir = {cfg.run_dir!r} holds a run already: "
            "expected an empty folder, or --resume auto to continue that run"
        )
    lock.truncate(0)
    lock.write(f"process {os.getpid()} on {os.uname().nodename}")
    lock.flush()
    return lock
