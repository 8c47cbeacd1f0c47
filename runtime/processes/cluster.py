"""A run's processes: its folder, its Ray cluster and its actors."""

import asyncio
import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tqdm import tqdm

from core.errors import shown
from policy import OWNER
from runtime.processes import placement
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
        from rollout.rows import quarantine
        from runtime.processes.claim import claim
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
            from runtime.processes.actors import last_lines

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
        from runtime.processes import ranks

        options = {"concurrency_groups": {"io": 1, "watch": 2}}  # beside the thread that computes
        made = [actor(cls, gpus, cfg, **options, **placement.on(at)).remote(cfg) for at in homes]
        found = await ranks.meet(made, f"{cls.__name__.lower()} rank", cfg, self.places)
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


def has_gpus() -> bool:
    """Whether the cluster has any."""
    import ray

    return bool(ray.cluster_resources().get("GPU"))


def cpus() -> int:
    """The CPUs of the cluster."""
    import ray

    return int(ray.cluster_resources().get("CPU", 0))


def kill(actor: Any) -> None:
    """Ends the process of an actor."""
    import ray

    ray.kill(actor)


def cancel(call: Any) -> None:
    """Ends a call whose result is no longer awaited."""
    import ray

    ray.cancel(call)


def actor(cls: type, gpus: float, cfg: TrainingSettings, **options: Any) -> Any:
    """A Ray actor of a plain class, which gets what `Process` adds.

    Without GPUs in the cluster it asks for none, and gets the settings of a CPU.
    """
    import ray

    if gpus and not has_gpus():
        from runtime.processes.ray_start import cpu_variables

        options["runtime_env"] = {"env_vars": cpu_variables(cfg)}
        gpus = 0
    groups = {k: options.pop(k) for k in ("concurrency_groups",) if k in options}
    folder = Path(cfg.writes_to) / "logs"

    class Process(cls):
        """What every actor of a run can do beside its own methods."""

        def __init__(self, *args: Any):
            from runtime.processes import actors

            actors.redirect(folder, cls.__name__)
            os.environ[OWNER] = str(os.getpid())
            actors.find_programs()
            actors.check_granted()
            super().__init__(*args)

        def call(self, function: Callable, *args: Any) -> Any:
            """Runs a function here, where its data is, or where the driver need not wait."""
            return function(*args)

        def watch(self) -> None:
            """Never returns, so that its end shows the driver the end of this process."""
            threading.Event().wait()

    Process.__name__ = Process.__qualname__ = cls.__name__
    made = ray.remote(num_cpus=0, **groups)(Process)
    return made.options(num_gpus=gpus, **options)
