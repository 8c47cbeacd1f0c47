"""Starts a cluster on this machine, and prints what others reach of it and what its actors see.

python closed_cluster.py RUN_DIR      with HF_TOKEN=private and MY_API_KEY in the environment
"""

import itertools
import os
import sys
import types
import urllib.error
import urllib.request
from collections import defaultdict
from pathlib import Path

import grpc
import ray

from envs.sandbox.sandbox import family
from grpo_async import Config
from runtime.processes import actors, cluster, ray_start
from support.listening_sockets import listening

# What a port answers that has no such method, or whose process has left since it was seen.
OTHER = {"UNIMPLEMENTED", "UNAVAILABLE"}
# By which a client would read the cluster, run code in it, or ask for a process of it.
METHODS = ("NodeInfoGcsService/GetAllNodeInfo", "InternalKVGcsService/InternalKVPut")
METHODS += ("ActorInfoGcsService/RegisterActor", "NodeManagerService/RequestWorkerLease")
METHODS += ("CoreWorkerService/PushTask",)


class Worker:
    """An actor of a run, with calls in one thread, as Ray has those of rollout workers."""

    def __init__(self, cfg: Config):
        pass

    async def roll_out(self) -> None:
        pass


def seen() -> list[str]:
    """The secrets that a process has."""
    return [name for name in ("HF_TOKEN", "MY_API_KEY") if name in os.environ]


def files(name: str) -> list[bytes]:
    """A file in /proc of each process that came from this one."""
    found = [Path(f"/proc/{pid}/{name}") for pid in family(os.getpid())[1:]]
    return [path.read_bytes() for path in found if path.exists()]


def answers(ports: set[int], metadata: tuple) -> dict[str, set[str]]:
    """How the processes behind these ports answer each of METHODS, by the status of gRPC."""
    found = defaultdict(set)
    for port, method in itertools.product(ports, METHODS):
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            try:
                channel.unary_unary(f"/ray.rpc.{method}")(b"", timeout=60, metadata=metadata)
                found[method].add("OK")
            except grpc.RpcError as error:
                found[method].add(error.code().name)
    return found


def status_of_agent(port: int) -> int:
    """What the agent of Ray's environments answers to a request without the token."""
    try:
        url = f"http://127.0.0.1:{port}/get_or_create_runtime_env"
        return urllib.request.urlopen(url, b"", timeout=60).status
    except urllib.error.HTTPError as error:
        return error.code


if __name__ == "__main__":
    sys.modules["envs.mine"] = types.SimpleNamespace(SECRETS=("MY_API_KEY", "NOT_SET"))
    cfg = Config(run_dir=sys.argv[1])
    ray_start.connect(cfg)
    worker = cluster.Cluster(cfg, Worker, Worker).start_worker()
    trainer = actors.actor(Worker, 0, cfg).remote(cfg)
    print("driver:", *seen())
    print("worker:", *ray.get(worker.call.remote(seen)))
    print("trainer:", *ray.get(trainer.call.remote(seen)))
    print("processes with the driver's token:", sum(b"private" in f for f in files("environ")))
    print("files with a token:", *Path.home().glob(".ray/*"))
    found = set(listening(os.getpid()))
    print("sockets:", *sorted({socket.place for _, socket in found}))
    (agent,) = {socket.port for name, socket in found if name == "RuntimeEnvAgent"}
    print("agent:", status_of_agent(agent))
    ports = {socket.port for _, socket in found} - {agent}
    for method, codes in answers(ports, ()).items():
        print(f"{method}:", *sorted(codes - OTHER))
    own = (("authorization", f"Bearer {os.environ['RAY_AUTH_TOKEN']}"),)
    print("with the token:", *sorted(answers(ports, own)[METHODS[0]] - OTHER))
    ray.shutdown()
