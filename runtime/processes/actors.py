"""Ray actors of plain classes: how their processes begin and end, and the logs they leave."""

import faulthandler
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from core.errors import brief
from policy import OWNER
from settings.config import TrainingSettings


def check_granted() -> None:
    """Raises RuntimeError where Ray granted this process a GPU that torch cannot use."""
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
        f"cannot use: {why}: expected NVIDIA's driver {OLDEST_DRIVER} or newer, and in .venv what "
        "DEVICE=gpu bash launch/setup.sh installs"
    )


def find_programs() -> None:
    """Puts the programs of this Python's environment first on PATH, as its activation would.

    Without ninja there vLLM takes none of FlashInfer's kernels (vllm/utils/flashinfer.py).
    """
    own = str(Path(sys.executable).parent)
    os.environ["PATH"] = os.pathsep.join([own, os.environ.get("PATH", os.defpath)])


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
            redirect(folder, cls.__name__)
            os.environ[OWNER] = str(os.getpid())
            find_programs()
            check_granted()
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
