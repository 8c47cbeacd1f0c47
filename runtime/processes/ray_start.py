"""Joins or starts Ray, once, before the run: what its processes find, and where they will be."""

import os
import re
import resource
import socket
from pathlib import Path
from typing import Any

import ray

from core.errors import InputError, brief
from runtime.processes import placement
from settings.config import TrainingSettings

ROOT = Path(__file__).parents[2]
# Variables of the driver that its actors get, except those that are of one process or node.
FORWARDED = ("NCCL_", "TORCH_NCCL_", "GLOO_", "VLLM_", "CUDA_", "PYTORCH_")
OF_ONE_PROCESS = re.compile(
    r"CUDA_VISIBLE_DEVICES|NCCL_(HOSTID|COMM_ID)|VLLM_(\w+_)?(RANK(_LOCAL)?|HOST|PORT|IPS?)"
)
OLDEST_DRIVER = 580  # of NVIDIA, which CUDA 13 needs
FILES = 64  # assumed: that a process has open for each trainer rank and engine worker it meets
CONNECT_SECONDS = 3.0  # that the head of a cluster may take to be reached
# A killed actor takes its children along. Not by Ray's subreaper: with that, every program that an
# actor starts seems to exit with status 0. Each actor has a process of its own, so Ray need not
# start an idle one for each processor.
SYSTEM = {
    "process_group_cleanup_enabled": True,
    "kill_child_processes_on_worker_exit_with_raylet_subreaper": False,
    "prestart_worker_first_driver": False,
}


def of_driver() -> dict[str, str]:
    """The driver's variables that its actors get as well."""
    every = os.environ.items()
    found = {k: v for k, v in every if k.startswith(FORWARDED) and not OF_ONE_PROCESS.fullmatch(k)}
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


def connect(cfg: TrainingSettings) -> placement.Places:
    """Joins the cluster that RAY_ADDRESS names, or starts one on this machine; where all will run.

    Raises InputError where there is no such cluster, where Ray does not start, or where the actors
    do not fit.
    """
    # Ray prints a traceback for each of a failed call's results that is not fetched. The first one
    # fetched has raised the error already.
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")
    # Never a cluster that another user has left running here.
    local: dict[str, Any] = {"address": "local", "include_dashboard": False}
    local |= {"_node_ip_address": "127.0.0.1", "_system_config": SYSTEM}
    address = os.environ.get("RAY_ADDRESS")
    check_address(address or "")
    try:
        ray.init(
            runtime_env={"env_vars": variables()},
            log_to_driver=False,
            logging_level="ERROR",
            **({} if address else local),
        )
    except Exception as error:  # Ray raises whatever it stumbles over
        if address:
            raise InputError(f"RAY_ADDRESS = {address!r}: {brief(error)}") from None
        logs = Path(os.environ.get("RAY_TMPDIR", "/tmp"), "ray/session_latest/logs")
        where = f"its logs are in {logs}, elsewhere with RAY_TMPDIR=FOLDER"
        raise InputError(f"Ray did not start on this machine: {brief(error)}; {where}") from None
    return placement.plan(cfg, placement.nodes())


def short_of_files(met: int, beside: int = 0) -> str:
    """Why a process that meets `met` others may open too few files; "" if it may open enough.

    `beside` are files whatever their number. Ray raises the soft limit of its own processes to the
    hard one.
    """
    _, limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = beside + FILES * met
    if limit == resource.RLIM_INFINITY or limit >= needed:
        return ""
    told = f"ulimit -Hn is {limit}, {met} ranks and engine workers need {needed}"
    return f"{told}: raise nofile in /etc/security/limits.conf, or LimitNOFILE of slurmd"


def check_address(address: str) -> None:
    """Raises InputError where no process listens at the HOST:PORT of a cluster.

    Ray would try for a minute. Other forms of address are left to it.
    """
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isdigit():
        return
    try:
        socket.create_connection((host, int(port)), timeout=CONNECT_SECONDS).close()
    except (OSError, OverflowError) as error:
        expected = "expected a Ray cluster (ray start --head), or no RAY_ADDRESS"
        raise InputError(f"RAY_ADDRESS = {address!r}: {brief(error)}: {expected}") from None


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


def address_of_node() -> str:
    """The address at which other nodes of the cluster reach this one."""
    return ray.util.get_node_ip_address() if ray.is_initialized() else "127.0.0.1"
