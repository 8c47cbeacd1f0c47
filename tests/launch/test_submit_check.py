"""What launch/submit_check.py says of a run before it starts."""

import os
import resource
import subprocess
import sys

import pytest
from conftest import spelling_rows, write_rows

import grpo_async
from core import errors
from envs import services
from launch import submit_check
from runtime.processes.cluster import claim
from settings import reader
from support.configs import changed
from support.program import ran

LEAN = {"header": "import Mathlib", "formal_statement": "theorem t : True := by"}
LEAN |= {"agent_ref": {"name": "math_formal_lean_simple_agent"}}
LEAN |= {"responses_create_params": {"input": [{"role": "user", "content": "Prove it."}]}}


@pytest.fixture(autouse=True)
def on_the_submit_host(monkeypatch):
    """Where there is no job, and no variable of one."""
    for name in ("SLURM_JOB_ID", "GRPO_EXECUTOR", "PERSISTENT_CACHE", "SANDBOX_CONTAINER"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def in_a_job(monkeypatch):
    """A function that begins a job."""

    def begin() -> None:
        monkeypatch.setenv("SLURM_JOB_ID", "1")
        monkeypatch.setenv("SLURM_JOB_END_TIME", "1")

    return begin


@pytest.fixture
def argv(tiny_model, tmp_path):
    """The arguments of a run that may start."""
    rows = write_rows(tmp_path / "rows.jsonl", spelling_rows(4))
    flags = ["--config", "configs/tiny.py", "--model", tiny_model, "--data.train", rows]
    flags += ["--data.val", rows, "--prompts_per_step", "2", "--resume", "auto"]
    return [*flags, "--run_dir", str(tmp_path / "run")]


def test_a_line_for_each_check_and_its_problems_are_counted(
    argv, tmp_path, monkeypatch, capsys, in_a_job
):
    assert submit_check.main(argv) == 0
    told = capsys.readouterr().out
    assert told.count("ok: ") == 3 and "4 rows" in told and "ulimit" not in told
    assert "everything fits" in told and "reasoning_gym_simple_agent" in told
    in_a_job()
    assert submit_check.main(argv) == 0
    told = capsys.readouterr().out
    assert told.count("ok: ") == 9 and "everything fits" in told
    assert "reasoning_gym_simple_agent" not in told, "rows are read once"
    monkeypatch.setenv("PERSISTENT_CACHE", str(tmp_path / "none"))
    assert submit_check.main(argv) == 1
    assert f"PROBLEM: PERSISTENT_CACHE = '{tmp_path}/none'" in capsys.readouterr().out


def test_pairs_are_looked_at_by_their_own_program(chat_model, tmp_path, monkeypatch, capsys):
    pair = {"prompt": "ab", "chosen": "ba", "rejected": "ab"}
    rows = write_rows(tmp_path / "pairs.jsonl", [pair] * 3)
    argv = ["--config", "configs/tiny_dpo.py", "--model", chat_model, "--data.train", rows]
    argv += ["--data.val", rows, "--pairs_per_step", "2", "--run_dir", str(tmp_path / "run")]
    monkeypatch.setenv("GRPO_PROGRAM", "dpo.py")
    assert submit_check.main(argv) == 0
    assert "3 rows, 3 for evaluation" in capsys.readouterr().out
    write_rows(tmp_path / "pairs.jsonl", [{"prompt": "ab", "chosen": "ba"}])
    with pytest.raises(errors.InputError, match="the dry run found these problems"):
        submit_check.main(argv)
    assert "pairs.jsonl:1: rejected is missing" in capsys.readouterr().out
    for name in ("ppo.py", "launch/submit_check.py"):
        monkeypatch.setenv("GRPO_PROGRAM", name)
        with pytest.raises(errors.InputError, match=f"'{name}': expected a file next to grpo"):
            submit_check.main(argv)


def test_a_limit_of_open_files_that_is_too_low_for_the_world_is_named(monkeypatch):
    """Super has 256 trainer ranks and 144 engines of 4; rank 0 meets all of them."""
    large = changed(grpo_async.Config(), ranks=256, count=144, tensor_parallel=4)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 8192))
    (said,) = submit_check.files(large)
    assert said.startswith("ulimit -n is at most 8192 (ulimit -Hn), but a process that meets 832 ")
    assert " ranks and engine workers needs 57344 open files: raise nofile in" in said
    assert not list(submit_check.files(grpo_async.Config()))
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, -1))
    assert not list(submit_check.files(large))


def test_libraries_are_looked_for_in_the_job_alone(argv, monkeypatch, in_a_job):
    """W&B is not installed here, as Transformer Engine may be in the image of the job alone."""
    monkeypatch.setenv("WANDB_API_KEY", "x")
    assert submit_check.main([*argv, "--wandb"]) == 0
    monkeypatch.setenv("GRPO_EXECUTOR", "local")
    with pytest.raises(errors.InputError, match="wandb = True: it is not installed"):
        submit_check.main([*argv, "--wandb"])
    monkeypatch.delenv("GRPO_EXECUTOR")
    in_a_job()
    with pytest.raises(errors.InputError, match="wandb = True: it is not installed"):
        submit_check.main([*argv, "--wandb"])


def test_a_key_of_wandb_is_asked_for_where_it_is_used(argv, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    assert submit_check.main([*argv, "--wandb"]) == 1
    assert "neither WANDB_API_KEY nor ~/.netrc exists" in capsys.readouterr().out
    for mode in ("offline", "disabled"):
        monkeypatch.setenv("WANDB_MODE", mode)
        assert submit_check.main([*argv, "--wandb"]) == 0


def test_services_are_looked_for_in_the_job_alone_and_empty_settings_everywhere(
    argv, tmp_path, monkeypatch, capsys, in_a_job
):
    """A container of the job brings Lean, which the run's settings need not name."""
    write_rows(tmp_path / "rows.jsonl", [LEAN] * 4)
    with pytest.raises(errors.InputError, match="the dry run found these problems"):
        submit_check.main(argv)
    assert "lacks lean: services.lean = ''" in capsys.readouterr().out
    monkeypatch.setenv("SANDBOX_CONTAINER", "any")
    assert submit_check.main(argv) == 0
    monkeypatch.delenv("SANDBOX_CONTAINER")
    named = [*argv, "--services.lean", "/of/the/job/lean"]
    assert submit_check.main(named) == 0
    in_a_job()
    with pytest.raises(errors.InputError, match=r"lacks lean: services\.lean = '/of/the/job/lean'"):
        submit_check.main(named)


def test_a_run_that_is_alive_is_waited_for_and_in_a_job_refused(argv, capsys, in_a_job):
    with claim(reader.load(grpo_async.Config, argv, default="")):
        with pytest.raises(SystemExit) as stop:
            submit_check.main(argv)
        assert stop.value.code is None
        assert "in use by process" in capsys.readouterr().out
        in_a_job()
        with pytest.raises(errors.InputError, match="is in use by"):
            submit_check.main(argv)


def test_what_compiles_kernels_is_missed_where_gpus_are(monkeypatch, tmp_path, capsys):
    cfg = grpo_async.Config()
    assert not list(submit_check.compilers(cfg)), "no GPU was granted"
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "8")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(submit_check.sysconfig, "get_path", lambda _: str(tmp_path))
    compiler, header = submit_check.compilers(cfg)
    assert "Triton's first kernel would fail: apt-get install gcc" in compiler
    assert header.startswith(f"{tmp_path}/Python.h is missing")
    assert "vLLM runs without FlashInfer's kernels" in capsys.readouterr().out
    (tmp_path / "bin").mkdir()
    for name in ("gcc", "Python.h", "bin/nvcc"):
        (tmp_path / name).touch()
        (tmp_path / name).chmod(0o755)
    assert not list(submit_check.compilers(cfg)), "ninja lies beside this Python"
    assert not capsys.readouterr().out


@pytest.mark.slow
def test_kernels_are_looked_for_in_the_job_alone(argv, warm_python):
    """In processes without tests/cpu, which has a Transformer Engine."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [warm_python, "launch/submit_check.py", *argv, "--policy.kind", "megatron"]
    done = ran(*command, env=env)
    assert done.returncode == 0 and "memory of a trainer rank, GiB: stage 1" in done.stdout
    done = ran(*command, env=env | {"SLURM_JOB_ID": "1"})
    assert done.returncode == 1 and "needs transformer_engine" in done.stderr


def test_an_old_driver_is_refused_only_if_torch_cannot_use_a_gpu(tmp_path, monkeypatch):
    for name in ("nvidia-smi", "torch_works"):
        (tmp_path / name).write_text(f"#!/bin/sh\n[ {name} = torch_works ] || echo 570.86\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "1")
    (problem,) = submit_check.gpus()
    assert problem.startswith("NVIDIA's driver is 570.86, but CUDA 13 needs 580, or its")
    assert "torch: AssertionError: Torch not compiled with CUDA enabled" in problem
    monkeypatch.setattr(sys, "executable", str(tmp_path / "torch_works"))
    assert not list(submit_check.gpus())


def test_a_node_that_cannot_serve_ends_the_job_by_name(tmp_path):
    """Slurm granted two GPUs and nvidia-smi shows one; a CPU node is not asked for any."""
    smi = tmp_path / "bin/nvidia-smi"
    smi.parent.mkdir()
    smi.write_text("#!/bin/sh\necho 590.1\n")
    smi.chmod(0o755)
    env = os.environ | {"PATH": f"{smi.parent}:{os.environ['PATH']}", "SLURM_GPUS_ON_NODE": "2"}
    env |= {"GRPO_PYTHON": sys.executable, "SLURMD_NODENAME": "n7", "SLURM_STEP_NUM_NODES": "2"}
    env |= {"SLURM_PROCID": "1", "SLURM_JOB_ID": "1", "CLUSTER_SECONDS": "1"}
    node = ("bash", "launch/ray_cluster.sh", "node", tmp_path)
    assert ran(*node, env=env).returncode == 1
    log = (tmp_path / "node.n7.log").read_text()
    assert "PROBLEM: Slurm granted 2 GPUs, but nvidia-smi shows 1" in log and "try 1" not in log
    waits = ran("bash", "launch/ray_cluster.sh", "wait", tmp_path, "2", env=env)
    assert waits.returncode == 1 and "error: n7 is not part of the Ray cluster" in waits.stderr
    assert "nvidia-smi shows 1" in waits.stderr
    (tmp_path / "node.n7.log").unlink()
    with pytest.raises(subprocess.TimeoutExpired):  # it waits for the head
        ran(*node, env=env | {"CPU_NODES": "1", "CLUSTER_SECONDS": "5"}, seconds=3)
    assert "try 1" in (tmp_path / "node.n7.log").read_text()


def test_images_that_rows_name_are_missed_by_name_before_anything_starts(tmp_path):
    """As folders or as files; those of repairs in one turn are named in metadata."""
    names = ("there.sif", "unpacked.sif", "me/other:1", "gone.sif", "gone.sif")
    rows = [{"image": name} for name in names] + [{"metadata": {"image": "gone_too"}}]
    rows += [{"metadata": None, "image": 5}, {"prompt": '"image"'}]
    train = write_rows(tmp_path / "rows.jsonl", rows)
    with open(train, "a") as file:
        file.write('{"image"')
    for name in ("images/unpacked", "images/me_other_1"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "images/there.sif").touch()
    folder = str(tmp_path / "images")
    cfg = changed(
        grpo_async.Config(), data={"train": train, "val": ""}, services={"images": folder}
    )
    services.configure(cfg.services)
    (problem,) = submit_check.images(cfg)
    assert problem.startswith("2 of 5 images are missing, such as gone.sif: ")
    assert problem.endswith(f"bash launch/images.sh {train} {folder}")
    for name in ("gone", "gone_too"):
        (tmp_path / "images" / name).mkdir()
    assert not list(submit_check.images(cfg))
