"""What it means to be on a node: where each engine and trainer rank runs, and with which GPUs.

runtime/processes/placement.py chooses the nodes.

The workers of an engine are on one node, and so are the ranks of a tensor-parallel group: what they
exchange at every layer must not cross the network. Engines fill whole nodes from the first on,
trainers from the last. Ray by itself would put consecutive ranks on different nodes.
"""

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from core.errors import InputError

if TYPE_CHECKING:
    from settings.config import TrainingSettings

CPU_NODE = "cpu_node"  # a resource of nodes where the rollout workers run, if there are such
LEAST_SHARE = 1e-4  # of a GPU: the least that Ray counts


class Shares(NamedTuple):
    """How many GPUs the actors ask Ray for, and how many engines fit on one."""

    trainer: float
    engine: float
    beside: int  # engines on a GPU that a trainer rank has as well
    alone: int


def shares(cfg: "TrainingSettings") -> Shares:
    """By `gpu_share`. A trainer rank takes more than half: NCCL refuses two of them on a GPU.

    Ray by itself would fill a GPU with trainer ranks before it takes the next.
    """
    engine_gpus, part = cfg.demand.engine_gpus, cfg.demand.share
    if part == 1:
        return Shares(1, engine_gpus, 0, 1)
    trainer = round(max(part, 0.5 + LEAST_SHARE), 4)
    engine = round(max(part - LEAST_SHARE, LEAST_SHARE), 4)
    return Shares(trainer, engine, int((1 - trainer) / engine + LEAST_SHARE), int(1 / part))


def node_mates(cfg: "TrainingSettings", homes: Sequence[str]) -> list[int]:
    """The trainer ranks beside rank 0 on its node; `homes` are the nodes by rank, "" without GPUs.

    They join it in sending weights: NCCL leaves a node by the network cards of the group's GPUs.
    None where GPUs are shared, as gloo sends then.
    """
    if cfg.demand.share < 1 or not homes[0]:
        return []
    return [rank for rank in range(1, len(homes)) if homes[rank] == homes[0]]


def where() -> tuple[str, list]:
    """The node and the GPUs of this actor."""
    import ray

    return ray.get_runtime_context().get_node_id(), ray.get_gpu_ids()


def on(home: str) -> dict[str, Any]:
    """Ray's options of an actor on a node; another node takes it where that one is lost."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    strategy: Any = NodeAffinitySchedulingStrategy(home, soft=True) if home else "SPREAD"
    return {"scheduling_strategy": strategy}


def of_worker() -> dict[str, Any]:
    """Ray's options of a rollout worker: on a CPU node, where there are such nodes."""
    import ray

    resources = {CPU_NODE: 0.001} if ray.cluster_resources().get(CPU_NODE) else {}
    return on("") | {"resources": resources}


# A resource of nodes that are not for engines and trainers: `ray start --resources '{"judge": 1}'`.
JUDGE = "judge"


class Node(NamedTuple):
    """A node of the cluster, and what engines and trainers may use of it."""

    id: str
    gpus: int


class Places(NamedTuple):
    """The nodes in their order, and the node id of each actor; "": wherever Ray likes."""

    nodes: list[Node]
    engines: list[str]
    trainers: list[str]
    beside: Sequence[list[str]] = ()  # of each other network, in the order of `cfg.demand.beside`

    def free_home(self, taken: Iterable[str]) -> str:
        """A node for an engine beside those that are on nodes already."""
        left = Counter(self.engines) - Counter(taken)
        return min(left, key=self.engines.index, default="")

    def in_order(self, found: Sequence[tuple[str, list]]) -> list[int]:
        """Which trainer is rank 0, 1, ...: by node, then GPU; `found` says where each is."""
        place = {node.id: i for i, node in enumerate(self.nodes)}
        return sorted(range(len(found)), key=lambda i: (place.get(found[i][0], -1), found[i][1]))


def gpus(cfg: "TrainingSettings") -> list[dict[str, int]]:
    """The engines, trainer and teacher ranks of each GPU, as `shares` counts them."""
    share = shares(cfg)
    found: list[dict[str, int]] = [{"trainer": 1} for _ in range(cfg.policy.ranks)]
    for _ in range(cfg.demand.engines * cfg.demand.engine_gpus):
        room = {True: share.beside, False: share.alone}
        fits = (gpu for gpu in found if gpu.get("engine", 0) < room["trainer" in gpu])
        gpu = next(fits, None)
        if gpu is None:
            gpu = {}
            found.append(gpu)
        gpu["engine"] = gpu.get("engine", 0) + 1
    return found + [{"teacher": 1} for ranks, _ in others(cfg) for _ in range(ranks)]


def started_engines(cfg: "TrainingSettings") -> int:
    """Engines that the command starts."""
    return 0 if cfg.command.replayed or cfg.command.export else cfg.demand.engines


def plan(cfg: "TrainingSettings", nodes: list[Node]) -> Places:
    """Where all actors fit. Raises InputError naming settings and nodes where they do not.

    A cluster without GPUs runs everything on CPUs. Of actors that share GPUs the node alone is
    chosen, and Ray chooses the GPU.
    """
    engines = started_engines(cfg)
    check_gpus(cfg, [node.gpus for node in nodes])
    if not any(node.gpus for node in nodes):
        beside = tuple([""] * ranks for ranks, _ in others(cfg))
        return Places(nodes, [""] * engines, [""] * cfg.policy.ranks, beside)
    share = shares(cfg)
    tp, size = cfg.policy.tp, cfg.demand.engine_gpus
    for order in (nodes, nodes[::-1]):  # nodes may differ in their GPUs
        free = {node.id: node.gpus for node in reversed(order)}
        trainers = ranks_on(free, cfg.policy.ranks, tp)
        beside = tuple(ranks_on(free, *network) for network in others(cfg))
        held = Counter(trainers)
        room = {n.id: free[n.id] * share.alone + held[n.id] * share.beside for n in order}
        homes = fill(room, engines, size)
        whole = all(len(on) == ranks for on, (ranks, _) in zip(beside, others(cfg), strict=True))
        if len(homes) == engines and len(trainers) == cfg.policy.ranks and whole:
            return Places(nodes, homes, trainers, beside)
    have = ", ".join(f"{count} x {gpus}" for gpus, count in Counter(n.gpus for n in nodes).items())
    teachers = "".join(f", a teacher of {n} ranks with tp = {by}" for n, by in others(cfg))
    raise InputError(
        f"engine.count = {engines} with engine.tensor_parallel = {size}, and policy.ranks = "
        f"{cfg.policy.ranks} with policy.tp = {tp}{teachers}: expected each engine, and each group "
        f"of tp ranks, on one node; the nodes have {have} GPUs"
    )


def others(cfg: "TrainingSettings") -> tuple[tuple[int, int], ...]:
    """(ranks, tp) of each network beside the trained one that the command starts."""
    command = cfg.command
    idle = command.replayed or command.export or command.eval_only
    return () if idle else cfg.demand.beside


def ranks_on(free: dict[str, int], ranks: int, tp: int) -> list[str]:
    """The nodes of a network's ranks, tp side by side; fewer where there is no room."""
    return [home for home in fill(free, ranks // tp, tp) for _ in range(tp)]


def fill(free: dict[str, int], count: int, size: int) -> list[str]:
    """The nodes of up to `count` actors that take `size` GPUs each, from the first node on."""
    homes: list[str] = []
    for node in free:
        here = min(count - len(homes), free[node] // size)
        free[node] -= here * size
        homes += [node] * here
    return homes


def check_gpus(cfg: "TrainingSettings", gpus: Sequence[float]) -> None:
    """Raises InputError where the nodes have too few GPUs, or none for what needs one."""
    engines = started_engines(cfg)
    size, ranks, attention = cfg.demand.engine_gpus, cfg.policy.ranks, cfg.policy.attention
    there = int(sum(gpus))
    if not there:
        if attention.startswith(("flash", "varlen")) and cfg.policy.kind == "fsdp":
            needs = f"policy.attention = {attention!r} needs a GPU, the cluster has none"
            raise InputError(f"{needs}: expected auto, or RAY_ADDRESS of another cluster")
        return
    share = shares(cfg)
    teachers = sum(count for count, _ in others(cfg))
    needed = (
        ranks + teachers + max(0, math.ceil((engines * size - ranks * share.beside) / share.alone))
    )
    if needed > there:
        asked = f"policy.ranks = {ranks}, engine.count = {engines}, engine.tensor_parallel = {size}"
        asked += f", teachers' ranks = {teachers}" if teachers else ""
        has = f"gpu_share = {cfg.demand.share:g} need {needed} GPUs, the cluster has {there}"
        alone = " (no two trainer ranks share one)" if cfg.demand.share < 1 else ""
        raise InputError(f"{asked} and {has}{alone}: lower one of them")


def nodes() -> list[Node]:
    """The nodes of the Ray cluster, by name: node-9 comes before node-10."""
    import ray

    alive = [node for node in ray.nodes() if node["Alive"]]
    found = []
    for node in sorted(alive, key=lambda n: (by_number(n["NodeManagerHostname"]), n["NodeID"])):
        kept = node["Resources"].keys() & {JUDGE, CPU_NODE}
        found.append(Node(node["NodeID"], 0 if kept else int(node["Resources"].get("GPU", 0))))
    return found


def by_number(name: str) -> list[tuple[int, str]]:
    """A name as a key that sorts its numbers by value."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]
