"""Joins or starts Ray, once, before a run, with the environment of the run's processes."""

import math
import os
import re
import resource
import secrets
import signal
import socket
from pathlib import Path

import ray

from core import secret_variables
from core.errors import InputError, brief
from runtime.processes import placement
from settings.config import TrainingSettings

ROOT = Path(__file__).parents[2]
# Driver variables that its actors get, except variables that belong to one process or node.
FORWARDED = ("NCCL_", "TORCH_NCCL_", "GLOO_", "VLLM_", "CUDA_", "PYTORCH_")
OF_ONE_PROCESS = re.compile(
    r"CUDA_VISIBLE_DEVICES|NCCL_(HOSTID|COMM_ID)|VLLM_(\w+_)?(RANK(_LOCAL)?|HOST|PORT|IPS?)"
)
OLDEST_DRIVER = 580  # NVIDIA's driver version for CUDA 13
FILES = 64  # assumed: files that a process opens for each trainer rank or engine worker it meets
OTHER_FILES = 256  # assumed: files that it opens besides; a process of the tiny job opens up to 79
CONNECT_SECONDS = 3.0  # limit for reaching the head of a cluster
# The children of a killed actor are killed too, but not by Ray's subreaper: with it, every program
# that an actor starts seems to exit with status 0. Each actor has its own process, so Ray need not
# start an idle one per processor.
SYSTEM = {
    "process_group_cleanup_enabled": True,
    "kill_child_processes_on_worker_exit_with_raylet_subreaper": False,
    "prestart_worker_first_driver": False,
}


def of_driver() -> dict[str, str]:
    """Returns the driver's environment variables that its actors get too."""
    found = {}
    for name, value in secret_variables.public().items():
        if name.startswith(FORWARDED) and not OF_ONE_PROCESS.fullmatch(name):
            found[name] = value
    judges = os.environ.get("JUDGES_FILE")
    if judges:
        found["JUDGES_FILE"] = os.path.abspath(judges)
    return found


def variables() -> dict[str, str]:
    """Returns the environment variables of every actor; the driver's own override the defaults."""
    return {
        "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}",
        "PYTHONDONTWRITEBYTECODE": "",  # without .pyc files each process recompiles 5,000 modules
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        # The driver enforces the deadlines. Torch's watchdog would end a trainer that waits for a
        # lost engine.
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    } | of_driver()


def connect(cfg: TrainingSettings) -> placement.Places:
    """Joins the cluster at RAY_ADDRESS, or starts one on this machine; returns the actors' places.

    A cluster that it starts has a token of its own, listens at 127.0.0.1, and its processes see no
    secret of the driver's environment. Raises InputError if there is no such cluster, if Ray does
    not start, if this machine's limit of open files is too low for a run of its own, or if the
    actors do not fit.
    """
    # Ray prints a traceback for each result of a failed call that is not fetched. The first one
    # fetched has raised the error already.
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")
    address = os.environ.get("RAY_ADDRESS")
    check_address(address or "")
    options: dict[str, str | bool | dict[str, bool]] = {}
    if not address:
        problem = short_of_files(cfg.policy.ranks + cfg.demand.engines * cfg.demand.engine_gpus)
        if problem:
            raise InputError(problem)
        use_new_token()
        # Ray would replace 127.0.0.1 by the machine's address in the network.
        ray._private.ray_constants.ENABLE_RAY_CLUSTER = False
        options = {
            "address": "local",  # never a cluster that another user has left running here
            "include_dashboard": False,
            "_node_ip_address": "127.0.0.1",
            "_system_config": SYSTEM,
        }
    # A terminal that is lost sends SIGHUP to Ray's processes as well, and the driver needs them to
    # save. They inherit that it is blocked, and Ray itself blocks SIGINT for them.
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
    try:
        with secret_variables.hidden():
            ray.init(
                runtime_env={"env_vars": variables()},
                log_to_driver=False,
                logging_level="ERROR",
                **options,
            )
    except Exception as error:  # Ray raises errors of many kinds
        if address:
            raise InputError(f"RAY_ADDRESS = {address!r}: {brief(error)}") from None
        logs = Path(os.environ.get("RAY_TMPDIR", "/tmp"), "ray/session_latest/logs")
        raise InputError(
            f"Ray did not start on this machine: {brief(error)}; its logs are in {logs}, "
            "or elsewhere if RAY_TMPDIR=FOLDER is set"
        ) from None
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    return placement.plan(cfg, placement.nodes())


def use_new_token() -> None:
    """Gives the cluster that is about to start a token that no other process knows.

    Ray's own token is one for all clusters of a user, in a file that others may read.
    """
    os.environ.pop("RAY_AUTH_MODE", None)  # then Ray asks for a token, whatever it was told
    os.environ[secret_variables.OF_RAY] = secrets.token_hex(32)
    ray._raylet.AuthenticationTokenLoader.instance().reset_cache()


def short_of_files(met: int, beside: int = OTHER_FILES) -> str:
    """Explains why a process that meets `met` others may open too few files; "" if not.

    `beside` is the number of files that do not depend on `met`. The hard limit counts, because
    Ray raises its own processes' soft limit to it.
    """
    _, limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = beside + FILES * met
    if limit == resource.RLIM_INFINITY or limit >= needed:
        return ""
    return (
        f"ulimit -n is at most {limit} (ulimit -Hn), but a process that meets {met} ranks and "
        f"engine workers needs {needed} open files: "
        "raise nofile in /etc/security/limits.conf, or LimitNOFILE of slurmd"
    )


def check_address(address: str) -> None:
    """Raises InputError if no process listens at the HOST:PORT of a cluster.

    Ray would try for a minute. Other forms of address are left to Ray.
    """
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isdigit():
        return
    try:
        socket.create_connection((host, int(port)), timeout=CONNECT_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise InputError(
            f"RAY_ADDRESS = {address!r}: {brief(error)}: "
            "expected a Ray cluster (ray start --head), or no RAY_ADDRESS"
        ) from None


def cpu_variables(cfg: TrainingSettings) -> dict[str, str]:
    """Returns the environment variables of a trainer or an engine on a CPU."""
    # Two busy processes with two threads each are 5 times slower on two cores: threads spin.
    alive = [node["Resources"].get("CPU", 0) for node in ray.nodes() if node["Alive"]]
    cpus = [count for count in alive if count] or [1]
    busy = math.ceil((cfg.policy.ranks + cfg.demand.engines) / len(cpus))  # processes on each node
    threads = max(1, int(min(cpus)) // busy)
    return {
        "OMP_NUM_THREADS": str(threads),
        # Threads that spin while they wait keep others from their work on a full machine: with
        # three trainers on two cores, a step took 6 s; it takes 0.2 s if they sleep.
        "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "PASSIVE"),
        "TORCH_COMPILE_DISABLE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    } | of_driver()


def address_of_node() -> str:
    """Returns the address at which other nodes of the cluster reach this one."""
    return ray.util.get_node_ip_address() if ray.is_initialized() else "127.0.0.1"
