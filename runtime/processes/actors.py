"""Creates Ray actors from plain classes: how their processes begin and end, and their logs."""

import faulthandler
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, TypeVarTuple, Unpack

import torch

from core import logs
from core.errors import brief
from policy import OWNER
from settings.config import TrainingSettings

if TYPE_CHECKING:
    from ray import ObjectRef
    from ray.actor import ActorClass, ActorHandle

T = TypeVar("T")
Args = TypeVarTuple("Args")


def check_granted() -> None:
    """Raises RuntimeError if Ray granted this process a GPU that torch cannot use."""
    import ray

    granted = ray.get_gpu_ids()
    if not granted or torch.cuda.is_available():
        return
    from runtime.processes.ray_start import OLDEST_DRIVER

    try:
        torch.cuda.init()
        why = "it finds none"
    except (AssertionError, RuntimeError) as error:
        why = brief(error)
    raise RuntimeError(
        f"Ray granted GPU {granted} of {os.uname().nodename}, which torch {torch.__version__} "
        f"cannot use: {why}: expected NVIDIA's driver {OLDEST_DRIVER} or newer, and in .venv the "
        "packages that DEVICE=gpu bash launch/setup.sh installs"
    )


def find_programs() -> None:
    """Puts the programs of this Python's environment first on PATH, as its activation would.

    Without ninja on PATH, vLLM uses no FlashInfer kernels (vllm/utils/flashinfer.py).
    """
    own = str(Path(sys.executable).parent)
    os.environ["PATH"] = os.pathsep.join([own, os.environ.get("PATH", os.defpath)])


def begin_log(folder: Path, name: str) -> None:
    """Sends the output of this process and of its children to a log file of its own."""
    logs.begin(folder / f"{name}-{os.uname().nodename}-{os.getpid()}.log")
    faulthandler.enable()


def has_gpus() -> bool:
    """Returns whether the cluster has GPUs."""
    import ray

    return bool(ray.cluster_resources().get("GPU"))


def cpus() -> int:
    """Returns the number of CPUs in the cluster."""
    import ray

    return int(ray.cluster_resources().get("CPU", 0))


def kill(actor: "ActorHandle") -> None:
    """Ends an actor's process."""
    import ray

    ray.kill(actor)


def cancel(call: "ObjectRef") -> None:
    """Cancels a call whose result is no longer awaited."""
    import ray

    ray.cancel(call)


def actor(cls: type, gpus: float, cfg: TrainingSettings, **options: Any) -> "ActorClass":
    """Creates a Ray actor class from a plain class, extended by `Process`.

    If the cluster has no GPUs, the actor asks for none and gets a CPU's environment. `options` are
    Ray's options.
    """
    import ray

    if gpus and not has_gpus():
        from runtime.processes.ray_start import cpu_variables

        options["runtime_env"] = {"env_vars": cpu_variables(cfg)}
        gpus = 0
    of_class: dict[str, Any] = {"num_cpus": 0}
    if "concurrency_groups" in options:  # Ray needs them when the class is created
        of_class["concurrency_groups"] = options.pop("concurrency_groups")
    folder = Path(cfg.writes_to) / "logs"

    class Process(cls):
        """The plain class, with what every actor of a run can do."""

        def __init__(self, *args: Any):
            begin_log(folder, cls.__name__)
            # Programs that this process starts must not inherit what `connect` has blocked. An
            # actor has a process group of its own, which no terminal sends a signal.
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})
            os.environ[OWNER] = str(os.getpid())
            find_programs()
            check_granted()
            super().__init__(*args)

        def call(self, function: "Callable[[Unpack[Args]], T]", *args: "Unpack[Args]") -> "T":
            """Runs a function in this process, next to its data, or to spare the driver a wait."""
            return function(*args)

        def watch(self) -> None:
            """Never returns: the driver sees the end of this process as the end of this call."""
            threading.Event().wait()

    Process.__name__ = Process.__qualname__ = cls.__name__
    made = ray.remote(**of_class)(Process)
    return made.options(num_gpus=gpus, **options)
