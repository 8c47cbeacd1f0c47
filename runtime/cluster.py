"""A run's processes: its folder, its Ray cluster, its actors, and the trainer ranks' group."""

import asyncio
import copyreg
import faulthandler
import fcntl
import gc
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, TextIO

import ray
import torch
import torch.distributed as dist
from tqdm import tqdm

from core.waits import within
from envs.rollout.rows import quarantine
from policy.weight_sync import OWNER
from runtime import placement
from runtime.console import phase
from runtime.preflight import OLDEST_DRIVER, brief, check_address, short_of_files
from settings.reader import InputError, shown
from settings.run import TrainingSettings

ROOT = Path(__file__).parent.parent
# Variables of the driver that its actors get, but for those that are of one process or node.
FORWARDED = ("NCCL_", "TORCH_NCCL_", "GLOO_", "VLLM_", "CUDA_")
OF_ONE = re.compile(
    r"CUDA_VISIBLE_DEVICES|NCCL_(HOSTID|COMM_ID)|VLLM_(\w+_)?(RANK(_LOCAL)?|HOST|PORT|IPS?)"
)
# A killed actor takes its children along. Not by Ray's subreaper: with that, every program that an
# actor starts seems to exit with status 0.
CLEANING = {
    "process_group_cleanup_enabled": True,
    "kill_child_processes_on_worker_exit_with_raylet_subreaper": False,
}


class Ranks:
    """How a trainer rank meets others: the ranks of its policy, and the engines' workers."""

    def __init__(self, cfg: TrainingSettings):
        self.cfg = cfg
        self.host = ray.util.get_node_ip_address() if ray.is_initialized() else "127.0.0.1"
        self.store: Any = None  # the TCPStore that this rank opened last

    def open_store(self, world: int) -> tuple[str, int]:
        """Listens for `world` processes; the port is bound before anyone hears of it.

        Choosing a free port first and binding it later collides (vLLM issue 28498). Raises
        RuntimeError where this process may not open enough files to meet them all.
        """
        if said := short_of_files(world):
            raise RuntimeError(f"{os.uname().nodename}: {said}")
        limit = timedelta(seconds=self.cfg.timeouts.start)
        self.store = dist.TCPStore(self.host, 0, world, True, limit, wait_for_workers=False)
        return self.host, self.store.port

    def join(self, rank: int, address: tuple[str, int]) -> None:
        """Makes torch's default process group of all ranks, who meet at rank 0's store."""
        world = self.cfg.policy.ranks
        dist.init_process_group(
            "nccl" if torch.cuda.is_available() else "gloo",
            store=self.store if rank == 0 else dist.TCPStore(*address, world, False),
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=self.cfg.timeouts.train),
        )


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
        self.lock = claim(self.cfg)
        signal.signal(signal.SIGINT, interrupt)
        if not (self.cfg.command.eval_only or self.cfg.command.export):
            quarantine(self.cfg.run_dir)
        phase("starting Ray")
        self.places = connect(self.cfg)
        search_rarely()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        """An error leaves with the last lines that the actors logged."""
        if isinstance(error, Exception):
            print(last_lines(self.cfg), file=sys.stderr)
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # another Ctrl-C does not wait for Ray
        ray.shutdown()
        self.lock.close()

    def shares_gpus(self) -> bool:
        """Whether trainers and engines use the same GPUs."""
        return self.cfg.demand.share < 1 and bool(ray.cluster_resources().get("GPU"))

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
        cfg = self.cfg
        phase(f"loading {shown(cfg.model)} (trainer ranks: {cfg.policy.ranks})")
        threads = {"io": 1, "watch": 2}  # beside the one that trains
        options = {"concurrency_groups": threads}
        gpus = placement.shares(cfg).trainer
        made = [
            actor(self.Trainer, gpus, cfg, **options, **placement.on(home)).remote(cfg)
            for home in self.places.trainers
        ]
        asked = asyncio.gather(*(trainer.call.remote(placement.where) for trainer in made))
        found = await within(cfg.timeouts.start, "the trainers to start", asked)
        order = self.places.in_order(found)
        self.trainers = [made[i] for i in order]
        homes = [node if gpus else "" for node, gpus in (found[i] for i in order)]
        self.senders = [self.trainers[rank] for rank in (0, *placement.node_mates(cfg, homes))]
        store = self.trainers[0].open_store.remote(cfg.policy.ranks)
        address = await within(cfg.timeouts.start, "trainer rank 0 to start", store)
        calls = (t.start.remote(rank, address) for rank, t in enumerate(self.trainers))
        starts = asyncio.gather(*calls)
        self.metas = (await within(cfg.timeouts.start, "the trainers to load", starts))[0]

    def start_worker(self) -> Any:
        """Starts a rollout worker."""
        options = {"max_concurrency": 100_000} | placement.of_worker()
        worker = actor(self.RolloutWorker, 0, self.cfg, **options)
        return worker.remote(self.cfg)

    def task(self, function: Callable, *args: Any, returns: int = 1) -> Any:
        """Runs a function in a process of its own, near its data, and again if that dies."""
        options = {"num_cpus": 0, "max_retries": 3, "num_returns": returns}
        return ray.remote(function).options(**options).remote(*args)

    async def watch(self, trainer: Any) -> None:
        """Raises as soon as a trainer rank dies, whether or not anybody waits for it."""
        await trainer.watch.options(concurrency_group="watch").remote()

    @staticmethod
    def pass_on_as_text(error: type[Exception]) -> None:
        """Lets errors of a class reach other processes as a RuntimeError with the same text.

        Whoever hears of one would import its library: vLLM takes seconds, while all else waits.
        """
        copyreg.pickle(error, lambda raised: (RuntimeError, (str(raised),)))


def search_rarely() -> None:
    """Makes Python search for garbage after a million new objects, and not in what libraries made.

    The search took half of the driver's time, and what it is for, objects that hold themselves, the
    driver makes only where something fails.
    """
    gc.freeze()
    gc.set_threshold(1_000_000)


def interrupt(*_: Any) -> None:
    """Ends the program without a traceback."""
    raise SystemExit("interrupted; --resume auto goes on from the last checkpoint")


def actor(cls: type, gpus: float, cfg: TrainingSettings, **options: Any) -> Any:
    """A Ray actor of a plain class, which gets what `Process` adds.

    Without GPUs in the cluster it asks for none, and gets the settings of a CPU.
    """
    if gpus and not ray.cluster_resources().get("GPU"):
        options["runtime_env"] = {"env_vars": cpu_variables(cfg)}
        gpus = 0
    groups = {k: options.pop(k) for k in ("concurrency_groups",) if k in options}
    folder = Path(cfg.run_dir) / "logs"

    class Process(cls):
        """What every actor of a run can do beside its own methods."""

        def __init__(self, *args: Any):
            redirect(folder, cls.__name__)
            os.environ[OWNER] = str(os.getpid())
            check_granted()
            super().__init__(*args)

        def call(self, function: Callable, *args: Any) -> Any:
            """Runs a function here, where its data is, or where the driver need not wait."""
            return function(*args)

        def watch(self) -> None:
            """Never returns, so that its end shows the driver the end of this process."""
            threading.Event().wait()

    Process.__name__ = cls.__name__
    Process.__qualname__ = cls.__name__
    made = ray.remote(num_cpus=0, **groups)(Process)
    return made.options(num_gpus=gpus, **options)


def check_granted() -> None:
    """Raises RuntimeError where Ray granted this process a GPU that torch cannot use."""
    granted = ray.get_gpu_ids()
    if not granted or torch.cuda.is_available():
        return
    try:
        torch.cuda.init()
        why = "it finds none"
    except (AssertionError, RuntimeError) as error:
        why = brief(error)
    raise RuntimeError(
        f"Ray granted GPU {granted} of {os.uname().nodename}, which torch {torch.__version__} "
        f"cannot use: {why}: expected NVIDIA's driver {OLDEST_DRIVER} or newer, and in .venv what "
        "DEVICE=gpu bash launch/setup.sh installs"
    )


def redirect(folder: Path, name: str) -> None:
    """Sends this process's output, and that of its children, to a file of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    host = os.uname().nodename
    with open(folder / f"{name}-{host}-{os.getpid()}.log", "a", buffering=1) as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    faulthandler.enable()


def last_lines(cfg: TrainingSettings, lines: int = 8) -> str:
    """The last lines of each actor's log, the latest first, for an error message."""
    paths = sorted(Path(cfg.run_dir).glob("**/logs/*.log"), key=os.path.getmtime, reverse=True)
    texts = [(path.name, path.read_text(errors="replace").splitlines()) for path in paths[:6]]
    return "\n".join(f"--- {name}\n" + "\n".join(t[-lines:]) for name, t in texts if t)


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


def of_driver() -> dict[str, str]:
    """The driver's variables that its actors get as well."""
    every = os.environ.items()
    found = {k: v for k, v in every if k.startswith(FORWARDED) and not OF_ONE.fullmatch(k)}
    judges = os.environ.get("JUDGES_FILE")
    return found | ({"JUDGES_FILE": os.path.abspath(judges)} if judges else {})


def variables() -> dict[str, str]:
    """What every actor finds in its environment; what the user has set wins."""
    return {
        "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}",
        "PYTHONDONTWRITEBYTECODE": "",  # without .pyc files each process recompiles 5,000 modules
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        # The driver has the deadlines. Torch's watchdog would end a trainer that waits for an
        # engine which is lost.
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    } | of_driver()


def cpu_variables(cfg: TrainingSettings) -> dict[str, str]:
    """The same for a trainer or an engine on a CPU."""
    # Two busy processes with two threads each spin on two cores: 5 times slower.
    alive = [node["Resources"].get("CPU", 0) for node in ray.nodes() if node["Alive"]]
    cpus = [count for count in alive if count] or [1]
    # On a node: Ray spreads them.
    busy = -(-(cfg.policy.ranks + cfg.demand.engines) // len(cpus))
    threads = max(1, int(min(cpus)) // busy)
    return {
        "OMP_NUM_THREADS": str(threads),
        # Threads that spin while they wait for each other keep a full machine from their work: with
        # three trainers on two cores a step took 6 s, and takes 0.2 s where they sleep.
        "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "PASSIVE"),
        "TORCH_COMPILE_DISABLE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    } | of_driver()


def connect(cfg: TrainingSettings) -> placement.Places:
    """Joins the cluster that RAY_ADDRESS names, or starts one on this machine; where all will run.

    Raises InputError where there is no such cluster, or where the actors do not fit.
    """
    # Ray prints a traceback for each of a failed call's results that nobody fetches. The first one
    # fetched has raised the error already.
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")
    # Never a cluster that somebody else has left running here.
    local: dict[str, Any] = {"address": "local", "include_dashboard": False}
    local |= {"_node_ip_address": "127.0.0.1", "_system_config": CLEANING}
    address = os.environ.get("RAY_ADDRESS")
    check_address(address or "")
    try:
        ray.init(
            runtime_env={"env_vars": variables()},
            log_to_driver=False,
            logging_level="ERROR",
            **({} if address else local),
        )
    except (ConnectionError, ValueError) as error:
        if not address:
            raise
        raise InputError(f"RAY_ADDRESS = {address!r}: {brief(error)}") from None
    return placement.plan(cfg, placement.nodes())
