"""What the process of each actor does first, and what is left of it where a run fails."""

import faulthandler
import os
import sys
from pathlib import Path

import torch

from core.errors import brief
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
