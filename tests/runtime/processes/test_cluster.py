"""A run's folder, which one run owns; where its processes meet; and what ends it."""

import asyncio
import json
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray
import torch.distributed as dist
from conftest import spelling_rows

from core.errors import InputError
from envs import check_rows
from grpo_async import Config, RolloutWorker, Trainer
from rollout import rows
from runtime.processes import actors, ray_start
from runtime.processes.cluster import ROOT, Cluster, claim
from runtime.processes.trainer_rank import Rank
from runtime.reporting import console
from support.configs import changed
from support.program import ran
from support.tables import table

CASES = table(Path(__file__).parents[1] / "cases.txt")


def ask(run_dir: Path, **fields) -> Config:
    return changed(Config(run_dir=str(run_dir)), **fields)


def nodes(*cpus: int) -> list[dict]:
    return [{"Alive": True, "Resources": {"CPU": float(count)}} for count in cpus]


def write_marker(run_dir: Path, step: int) -> Path:
    folder = run_dir / f"step_{step:06d}"
    folder.mkdir(parents=True)
    (folder / "complete.json").write_text("{}")
    return folder


@pytest.mark.slow
def test_two_runs_never_share_a_folder(tmp_path):
    program = (
        "import sys, time; sys.path.insert(0, '.')\n"
        "from grpo_async import Config; from runtime.processes.cluster import claim\n"
        f"lock = claim(Config(run_dir={str(tmp_path)!r}))\n"
        "print('mine', flush=True); time.sleep(60)"
    )
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as first:
        try:
            assert first.stdout.readline() == "mine\n"
            with pytest.raises(InputError, match=f"in use by process {first.pid} on "):
                claim(ask(tmp_path))
            with pytest.raises(InputError, match="in use"):
                claim(ask(tmp_path, resume="auto"))
        finally:
            first.kill()
    claim(ask(tmp_path)).close()  # a dead owner holds nothing


def test_a_start_that_is_refused_changes_nothing_in_the_folder(
    tmp_path, monkeypatch, handlers, tiny_model
):
    """Of a living run. The start that is let in writes its own bad rows."""
    monkeypatch.setattr(rows, "BAD", {})
    monkeypatch.setattr(ray_start, "connect", lambda cfg: None)
    data = tmp_path / "rows.jsonl"
    data.write_text(json.dumps(spelling_rows(1)[0]) + "\n{\n")
    cfg = changed(ask(tmp_path / "run", max_bad_rows=1), model=str(tiny_model))
    quarantine = tmp_path / "run/quarantine.jsonl"
    with Cluster(cfg, Trainer, RolloutWorker):
        quarantine.write_text("of the living run\n")
        check_rows.load_rows(str(data), cfg)
        with pytest.raises(InputError, match="in use"):
            Cluster(cfg, Trainer, RolloutWorker).__enter__()
        assert quarantine.read_text() == "of the living run\n"
    with Cluster(cfg, Trainer, RolloutWorker):
        assert json.loads(quarantine.read_text())["line"] == 2


def test_a_run_outlives_whoever_reads_what_it_prints(tmp_path, monkeypatch, handlers):
    """`| head`, or a tee that is killed. What follows goes nowhere, and a log says so, once."""
    monkeypatch.setattr(ray_start, "connect", lambda cfg: None)
    reader, writer = os.pipe()
    pipe = open(writer, "w", buffering=1)  # noqa: SIM115
    monkeypatch.setattr(sys, "stdout", pipe)
    with Cluster(ask(tmp_path), Trainer, RolloutWorker):
        os.close(reader)
        for line in ("a phase", "a step"):
            print(line, flush=True)
            console.phase(line)
    assert os.readlink(f"/proc/self/fd/{writer}") == os.devnull
    pipe.close()
    (log,) = tmp_path.glob("logs/driver-*.log")
    told = "stdout: [Errno 32] Broken pipe: what the run prints from now on is lost\n"
    assert log.read_text() == told


def write_metrics(run_dir: Path) -> None:
    (run_dir / "metrics.jsonl").write_text('{"step": 1}\n')


@pytest.mark.parametrize("leave", [write_metrics, lambda run_dir: write_marker(run_dir, 3)])
def test_a_folder_with_a_run_or_with_a_checkpoint_alone_is_not_empty(tmp_path, leave):
    leave(tmp_path)
    with pytest.raises(InputError, match="--resume auto"):
        claim(ask(tmp_path))
    claim(ask(tmp_path, resume="auto")).close()


def test_a_checkpoint_of_another_folder_does_not_overwrite_a_run(tmp_path):
    other, folder = tmp_path / "a", tmp_path / "b"
    folder.mkdir()
    write_metrics(folder)
    saved = write_marker(other, 100)
    with pytest.raises(InputError, match="holds a run already"):
        claim(ask(folder, resume=str(saved)))
    write_metrics(other)
    claim(ask(other, resume=str(saved))).close()


@pytest.mark.slow
def test_a_port_is_bound_before_anybody_knows_of_it(tiny_config):
    """Many ranks that start at once on one machine never take each other's port."""
    trainers = [Rank(tiny_config()) for _ in range(30)]
    with ThreadPoolExecutor(20) as pool:
        addresses = list(pool.map(lambda trainer: trainer.open_store(2), trainers))
    assert len({port for _, port in addresses}) == 30
    for host, port in addresses:
        socket.create_connection((host, port), timeout=5).close()


def test_a_store_listens_at_one_address_until_its_ranks_have_met(tiny_config):
    """They stay connected, its thread does not spin, and its descriptor is closed with it."""
    rank = Rank(tiny_config())
    host, port = rank.open_store(2)
    assert f"{socket.inet_aton(host)[::-1].hex().upper()}:{port:04X}" in listening()
    other = dist.TCPStore(host, port, 2, False)
    other.set("before", "1")
    rank.close_store()
    used = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - used < 0.2
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, port), timeout=5)
    other.set("after", "2")
    assert (rank.store.get("before"), rank.store.get("after")) == (b"1", b"2")
    del other
    rank.store = None
    with pytest.raises(OSError):
        os.fstat(rank.door)


def listening() -> set[str]:
    """Address and port, in hexadecimal, at which this machine's sockets listen."""
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()]
    return {line[1] for line in lines if line[3] == "0A"}


@pytest.mark.parametrize(("fields", "allowed"), CASES["claim"])
def test_which_modes_work_in_the_folder_of_a_run(tmp_path, fields, allowed):
    write_marker(tmp_path, 3)
    if allowed:
        claim(ask(tmp_path, **fields)).close()
        return
    with pytest.raises(InputError, match="holds a run already"):
        claim(ask(tmp_path, **fields))


@pytest.fixture
def handlers():
    """Signal handlers that a test may change."""
    names = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT)
    old = {name: signal.getsignal(name) for name in names}
    yield
    for name, handler in old.items():
        signal.signal(name, handler)


REASONS = {"SIGTERM": "SIGTERM", "SIGUSR1": "SIGUSR1", "SIGHUP": "SIGHUP", "SIGINT": "Ctrl-C"}
REASONS[""] = "end of the job"


@pytest.mark.parametrize("name", REASONS)
async def test_signals_and_the_end_of_the_job_make_a_run_leave(name, monkeypatch, handlers):
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # as in a terminal
    reasons = []
    cluster = Cluster(Config(save_before=60), Trainer, RolloutWorker)
    seconds = 600 if name else 0
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(time.time() + 60.05 + seconds))
    cluster.on_signal(reasons.append)
    if name:
        os.kill(os.getpid(), getattr(signal, name))
    await asyncio.sleep(0.2)
    assert reasons == [REASONS[name]]


async def test_a_run_that_nohup_has_started_outlives_its_terminal(handlers):
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    reasons = []
    Cluster(Config(), Trainer, RolloutWorker).on_signal(reasons.append)
    os.kill(os.getpid(), signal.SIGHUP)
    await asyncio.sleep(0.1)
    assert reasons == []


def test_a_second_ctrl_c_ends_the_program_at_once(handlers):
    async def main():
        reasons = []
        Cluster(Config(), Trainer, RolloutWorker).on_signal(reasons.append)
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.sleep(0.05)
            assert reasons == ["Ctrl-C"]
        await asyncio.sleep(60)

    with pytest.raises(SystemExit, match="interrupted; --resume auto continues from the last"):
        asyncio.run(main())


def test_actors_get_the_driver_s_variables_for_the_libraries_and_what_it_sets_wins(monkeypatch):
    given = {"NCCL_DEBUG": "INFO", "NCCL_CUMEM_HOST_ENABLE": "0", "GLOO_SOCKET_IFNAME": "eth0"}
    given |= {
        "PYTORCH_ALLOC_CONF": "x:1",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "VLLM_LOGGING_LEVEL": "DEBUG",
    }
    given |= {"VLLM_CPU_KVCACHE_SPACE": "7", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}
    of_one = dict.fromkeys(("CUDA_VISIBLE_DEVICES", "VLLM_HOST_IP", "VLLM_DP_RANK_LOCAL"), "1")
    of_one |= dict.fromkeys(("VLLM_PORT", "NCCL_HOSTID", "WANDB_API_KEY", "VLLM_API_KEY"), "1")
    for name, value in (given | of_one).items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("JUDGES_FILE", raising=False)
    monkeypatch.setattr(ray, "nodes", lambda: nodes(64))
    found = ray_start.variables()
    assert given.items() <= found.items() and not of_one.keys() & found.keys()
    assert ray_start.cpu_variables(Config())["VLLM_CPU_KVCACHE_SPACE"] == "7"
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    assert ray_start.cpu_variables(Config())["OMP_WAIT_POLICY"] == "PASSIVE"
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    assert ray_start.cpu_variables(Config())["OMP_WAIT_POLICY"] == "ACTIVE"
    assert "JUDGES_FILE" not in found
    monkeypatch.setenv("JUDGES_FILE", "logs/judges")  # their working folders are others
    assert ray_start.variables()["JUDGES_FILE"] == os.path.abspath("logs/judges")


def test_without_a_word_of_the_user_vllm_is_quiet_and_no_watchdog_ends_a_trainer(monkeypatch):
    for name in ("VLLM_LOGGING_LEVEL", "TORCH_NCCL_ASYNC_ERROR_HANDLING"):
        monkeypatch.delenv(name, raising=False)
    found = ray_start.variables()
    assert found["VLLM_LOGGING_LEVEL"] == "WARNING"
    assert found["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"


@pytest.mark.parametrize("gpus", [0, 8])
@pytest.mark.parametrize("wanted", [0, 0.5])
def test_settings_of_a_cpu_follow_the_cluster_and_not_the_driver(gpus, wanted, monkeypatch):
    """64 CPUs for three trainer ranks and an engine, wherever the driver runs."""
    asked = {}
    handle = SimpleNamespace(options=lambda **options: asked.update(options))
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"GPU": gpus})
    monkeypatch.setattr(ray, "nodes", lambda: nodes(64))
    monkeypatch.setattr(ray, "remote", lambda **options: lambda cls: handle)
    actors.actor(Trainer, wanted, ask(Path("run"), ranks=3))
    env = asked.get("runtime_env", {}).get("env_vars", {})
    assert asked["num_gpus"] == (wanted if gpus else 0)
    assert env.get("OMP_NUM_THREADS") == ("16" if wanted and not gpus else None)
    assert ("TORCH_COMPILE_DISABLE" in env) == bool(wanted and not gpus)


@pytest.mark.parametrize(
    ("cpus", "threads"), [([8], 2), ([8, 8], 4), ([8, 6], 3), ([2] * 9, 2), ([0, 8], 2)]
)
def test_threads_are_those_of_the_node_that_a_process_is_on(cpus, threads, monkeypatch):
    """Three trainer ranks and an engine, spread over the nodes that are alive."""
    monkeypatch.setattr(ray, "nodes", lambda: [*nodes(*cpus), {"Alive": False}])
    found = ray_start.cpu_variables(ask(Path("run"), ranks=3))
    assert found["OMP_NUM_THREADS"] == str(threads)


def test_a_rank_that_may_not_open_enough_files_says_so_before_anybody_waits_for_it(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 4096))
    expected = f"{os.uname().nodename}: ulimit -n is at most 4096 .* needs 37184 open files: raise"
    with pytest.raises(RuntimeError, match=expected):
        Rank(Config()).open_store(577)


LOOK = "from grpo_async import Config; from runtime.processes.ray_start import connect; "
LOOK += "connect(Config())"


@pytest.mark.slow
def test_a_limit_of_open_files_below_that_of_the_smallest_run_is_named_before_ray_starts():
    env = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    done = ran("prlimit", "--nofile=64", sys.executable, "-c", LOOK, env=env)
    assert done.returncode == 1
    told = r"error: ulimit -n is at most 64 \(ulimit -Hn\), but a process that meets 2 ranks and "
    told += r"engine workers needs 384 open files: raise nofile in .*\n"
    assert re.fullmatch(told, done.stderr)


def test_a_driver_that_is_too_old_is_named(monkeypatch):
    """As torch says it; where it can use the GPU, or none was granted, nothing is said."""

    def refuse():
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 12040)")

    monkeypatch.setattr(actors.torch.cuda, "init", refuse)
    said = r"GPU \[3\] of .* is too old .*: expected .* 580 or"
    for gpus, usable in ([3], False), ([3], True), ([], False):
        monkeypatch.setattr(ray, "get_gpu_ids", lambda gpus=gpus: gpus)
        monkeypatch.setattr(actors.torch.cuda, "is_available", lambda usable=usable: usable)
        if usable or not gpus:
            actors.check_granted()
            continue
        with pytest.raises(RuntimeError, match=said):
            actors.check_granted()


def test_an_actor_finds_the_programs_of_its_python(monkeypatch):
    """FlashInfer's compiler runs ninja, which lies there; a user's shell may not have it."""
    monkeypatch.setenv("PATH", "/usr/bin")
    assert not shutil.which("ruff")
    actors.find_programs()
    assert shutil.which("ruff") and os.environ["PATH"].endswith(":/usr/bin")


CHILDREN = """
import os, signal, subprocess, sys, time
from pathlib import Path
import ray
from grpo_async import Config
from runtime.processes.actors import actor
from runtime.processes.ray_start import connect

cfg = Config(run_dir=sys.argv[1])
signal.signal(signal.SIGHUP, signal.SIG_DFL)
connect(cfg)
hung_up = []
signal.signal(signal.SIGHUP, lambda *_: hung_up.append(True))
os.killpg(0, signal.SIGHUP)

class Parent:
    def start(self):
        self.child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        status = Path(f"/proc/{self.child.pid}/status").read_text()
        blocked = int(status.split("SigBlk:")[1].split()[0], 16) >> signal.SIGHUP - 1 & 1
        return os.getpid(), self.child.pid, subprocess.run(["false"]).returncode, blocked

pid, child, status, blocked = ray.get(actor(Parent, 0, cfg).remote().start.remote())
os.kill(pid, signal.SIGKILL)
time.sleep(5)
print(hung_up, blocked, status, os.path.exists(f"/proc/{child}"), flush=True)
"""


@pytest.mark.slow
def test_what_ends_or_hangs_up_reaches_the_processes_that_it_should(tmp_path):
    """A killed actor takes its children along; a lost terminal ends nothing of Ray.

    Programs keep their status and their signals. Whatever Ray was told outside: by its subreaper
    `false` would seem to succeed.
    """
    told = {"RAY_kill_child_processes_on_worker_exit_with_raylet_subreaper": "true"}
    told |= {"RAY_process_group_cleanup_enabled": "false"}
    env = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"} | told
    command = [sys.executable, "-c", CHILDREN, str(tmp_path)]
    how = {"cwd": ROOT, "env": env, "capture_output": True, "text": True, "timeout": 120}
    done = subprocess.run(command, start_new_session=True, **how)
    assert done.stdout.splitlines()[-1] == "[True] 0 1 False", done.stdout + done.stderr


def test_each_cluster_of_its_own_has_a_new_token(monkeypatch):
    """Whatever the user's environment says."""
    given = []
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "known")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray, "init", lambda **options: given.append(dict(os.environ)))
    monkeypatch.setattr(ray, "nodes", list)
    for _ in range(2):
        ray_start.connect(Config())
    tokens = {environment["RAY_AUTH_TOKEN"] for environment in given}
    assert len(tokens) == 2 and all(len(token) == 64 for token in tokens)
    assert not any("RAY_AUTH_MODE" in environment for environment in given)
    monkeypatch.setenv("RAY_ADDRESS", "auto")  # another's cluster has a token already
    ray_start.connect(Config())
    assert given[2]["RAY_AUTH_TOKEN"] == given[1]["RAY_AUTH_TOKEN"]


@pytest.mark.slow
def test_a_cluster_of_one_machine_is_closed_to_others_and_keeps_the_driver_s_secrets(tmp_path):
    """It listens at loopback, refuses who lacks its token, and writes that token to no file."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    env |= {"HF_TOKEN": "private", "MY_API_KEY": "own", "HOME": str(tmp_path)}
    env["PYTHONPATH"] = f"{ROOT}:{ROOT}/tests"
    command = [sys.executable, "tests/support/closed_cluster.py", str(tmp_path / "run")]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=600)
    assert done.stdout.splitlines() == [
        "driver: HF_TOKEN MY_API_KEY",
        "worker: MY_API_KEY",
        "trainer:",
        "processes with the driver's token: 0",
        "files with a token:",
        "sockets: loopback",
        "agent: 401",
        "NodeInfoGcsService/GetAllNodeInfo: UNAUTHENTICATED",
        "InternalKVGcsService/InternalKVPut: UNAUTHENTICATED",
        "ActorInfoGcsService/RegisterActor: UNAUTHENTICATED",
        "NodeManagerService/RequestWorkerLease: UNAUTHENTICATED",
        "CoreWorkerService/PushTask: UNAUTHENTICATED",
        "with the token: OK",
    ], done.stdout + done.stderr
