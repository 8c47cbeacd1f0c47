"""Chooses the node of each engine, trainer rank and teacher rank, and its share of GPUs.

An engine's workers are on one node, and so are the ranks of a tensor-parallel group: what they
exchange at every layer must not cross the network. Engines fill whole nodes from the first on,
trainers from the last. Ray by itself would put consecutive ranks on different nodes.
"""

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypedDict

from core.errors import InputError

if TYPE_CHECKING:
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    from settings.config import TrainingSettings

CPU_NODE = "cpu_node"  # a resource of the nodes for rollout workers, if the cluster has such nodes
LEAST_SHARE = 1e-4  # the smallest share of a GPU that Ray counts


class Shares(NamedTuple):
    """The GPUs that each actor asks Ray for, and the number of engines that fit on one GPU."""

    trainer: float
    engine: float
    beside: int  # engines on a GPU that also has a trainer rank
    alone: int  # engines on a GPU without one


def shares(cfg: "TrainingSettings") -> Shares:
    """Computes the GPU shares from `gpu_share`.

    A trainer rank takes more than half of a GPU because NCCL refuses two ranks on one, and Ray by
    itself would fill a GPU with trainer ranks before it moved to the next.
    """
    engine_gpus = cfg.demand.engine_gpus
    part = cfg.demand.share
    if part == 1:
        return Shares(1, engine_gpus, 0, 1)
    trainer = round(max(part, 0.5 + LEAST_SHARE), 4)
    engine = round(max(part - LEAST_SHARE, LEAST_SHARE), 4)
    return Shares(trainer, engine, int((1 - trainer) / engine + LEAST_SHARE), int(1 / part))


def node_mates(cfg: "TrainingSettings", homes: Sequence[str]) -> list[int]:
    """Returns the other trainer ranks on rank 0's node; `homes` are the nodes by rank.

    They help rank 0 to send weights: NCCL leaves a node through the network cards of the GPUs in
    the group. Returns [] if GPUs are shared, because gloo then sends the weights, or without GPUs
    (`homes` are "").
    """
    if cfg.demand.share < 1 or not homes[0]:
        return []
    return [rank for rank in range(1, len(homes)) if homes[rank] == homes[0]]


def where() -> tuple[str, list]:
    """Returns the node and the GPUs of this actor."""
    import ray

    return ray.get_runtime_context().get_node_id(), ray.get_gpu_ids()


class ActorOptions(TypedDict, total=False):
    """Options with which Ray chooses the node of an actor."""

    scheduling_strategy: "NodeAffinitySchedulingStrategy | str"
    resources: dict[str, float]
    runtime_env: dict[str, dict[str, str]]


def on(home: str) -> ActorOptions:
    """Returns Ray's options for an actor on a node, or on another one if that node is lost."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    if not home:
        return {"scheduling_strategy": "SPREAD"}
    return {"scheduling_strategy": NodeAffinitySchedulingStrategy(home, soft=True)}


def of_worker() -> ActorOptions:
    """Returns Ray's options for a rollout worker: on a CPU node, if the cluster has such nodes."""
    import ray

    options = on("")
    has_cpu_nodes = ray.cluster_resources().get(CPU_NODE)
    options["resources"] = {CPU_NODE: 0.001} if has_cpu_nodes else {}
    return options


# A resource of nodes that are not for engines and trainers: `ray start --resources '{"judge": 1}'`.
JUDGE = "judge"


class Node(NamedTuple):
    """A node of the cluster, and the number of its GPUs for engines and trainers."""

    id: str
    gpus: int


class Places(NamedTuple):
    """The nodes in order, and the node id of each actor; "" leaves the choice to Ray."""

    nodes: list[Node]
    engines: list[str]
    trainers: list[str]
    beside: Sequence[list[str]] = ()  # the nodes for each network in `cfg.demand.beside`

    def free_home(self, taken: Iterable[str]) -> str:
        """Returns a node for one more engine, if the others are on the nodes `taken`."""
        left = Counter(self.engines) - Counter(taken)
        return min(left, key=self.engines.index, default="")

    def in_order(self, found: Sequence[tuple[str, list]]) -> list[int]:
        """Chooses the trainers for ranks 0, 1, ... by node, then GPU, from each one's place."""
        place = {node.id: i for i, node in enumerate(self.nodes)}

        def node_and_gpus(trainer: int) -> tuple[int, list]:
            node, gpus = found[trainer]
            return place.get(node, -1), gpus

        return sorted(range(len(found)), key=node_and_gpus)


def gpus(cfg: "TrainingSettings") -> list[dict[str, int]]:
    """Counts the engines, trainer ranks and teacher ranks on each GPU, by `shares`."""
    share = shares(cfg)
    found: list[dict[str, int]] = [{"trainer": 1} for _ in range(cfg.policy.ranks)]
    for _ in range(cfg.demand.engines * cfg.demand.engine_gpus):
        for gpu in found:
            room = share.beside if "trainer" in gpu else share.alone
            if gpu.get("engine", 0) < room:
                break
        else:
            gpu = {}
            found.append(gpu)
        gpu["engine"] = gpu.get("engine", 0) + 1
    return found + [{"teacher": 1} for ranks, _ in others(cfg) for _ in range(ranks)]


def started_engines(cfg: "TrainingSettings") -> int:
    """Returns the number of engines that the command starts."""
    return 0 if cfg.command.replayed or cfg.command.export else cfg.demand.engines


def plan(cfg: "TrainingSettings", nodes: list[Node]) -> Places:
    """Chooses a node for each actor. Raises InputError, with settings and nodes, if one cannot fit.

    A cluster without GPUs runs everything on CPUs. For actors that share GPUs only the node is
    chosen; Ray chooses the GPU.
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
        teachers_fit = [len(on) for on in beside] == [ranks for ranks, _ in others(cfg)]
        if len(homes) == engines and len(trainers) == cfg.policy.ranks and teachers_fit:
            return Places(nodes, homes, trainers, beside)
    counts = Counter(node.gpus for node in nodes)
    have = ", ".join(f"{count} x {gpus}" for gpus, count in counts.items())
    teachers = "".join(f", a teacher of {n} ranks with tp = {by}" for n, by in others(cfg))
    raise InputError(
        f"engine.count = {engines} with engine.tensor_parallel = {size}, and policy.ranks = "
        f"{cfg.policy.ranks} with policy.tp = {tp}{teachers}: expected each engine, and each group "
        f"of tp ranks, on one node; the nodes have {have} GPUs"
    )


def others(cfg: "TrainingSettings") -> tuple[tuple[int, int], ...]:
    """Returns (ranks, tp) of each network that the command starts besides the trained one."""
    command = cfg.command
    if command.replayed or command.export or command.eval_only:
        return ()
    return cfg.demand.beside


def ranks_on(free: dict[str, int], ranks: int, tp: int) -> list[str]:
    """Chooses the nodes of a network's ranks, tp ranks together; fewer if there is no room."""
    return [home for home in fill(free, ranks // tp, tp) for _ in range(tp)]


def fill(free: dict[str, int], count: int, size: int) -> list[str]:
    """Chooses nodes for up to `count` actors with `size` GPUs each, from the first node on.

    Subtracts their GPUs from `free`.
    """
    homes: list[str] = []
    for node in free:
        here = min(count - len(homes), free[node] // size)
        free[node] -= here * size
        homes += [node] * here
    return homes


def check_gpus(cfg: "TrainingSettings", gpus: Sequence[float]) -> None:
    """Raises InputError if the nodes have too few GPUs, or none and the attention needs one."""
    engines = started_engines(cfg)
    size = cfg.demand.engine_gpus
    ranks = cfg.policy.ranks
    attention = cfg.policy.attention
    available = int(sum(gpus))
    if not available:
        if attention.startswith(("flash", "varlen")) and cfg.policy.kind == "fsdp":
            raise InputError(
                f"policy.attention = {attention!r} needs a GPU, but the cluster has none: "
                "expected auto, or RAY_ADDRESS of another cluster"
            )
        return
    share = shares(cfg)
    teachers = sum(count for count, _ in others(cfg))
    alone = max(0, engines * size - ranks * share.beside)  # engine workers apart from trainers
    needed = ranks + teachers + math.ceil(alone / share.alone)
    if needed > available:
        of_teachers = f", teachers' ranks = {teachers}" if teachers else ""
        unshared = " (no two trainer ranks share one)" if cfg.demand.share < 1 else ""
        raise InputError(
            f"policy.ranks = {ranks}, engine.count = {engines}, engine.tensor_parallel = {size}"
            f"{of_teachers} and gpu_share = {cfg.demand.share:g} need {needed} GPUs, "
            f"but the cluster has {available}{unshared}: lower one of these settings"
        )


def nodes() -> list[Node]:
    """Returns the living nodes of the Ray cluster, by name: node-9 comes before node-10."""
    import ray

    alive = [node for node in ray.nodes() if node["Alive"]]
    found = []
    for node in sorted(alive, key=lambda n: (by_number(n["NodeManagerHostname"]), n["NodeID"])):
        gpus = int(node["Resources"].get("GPU", 0))
        if node["Resources"].keys() & {JUDGE, CPU_NODE}:
            gpus = 0
        found.append(Node(node["NodeID"], gpus))
    return found


def by_number(name: str) -> list[tuple[int, str]]:
    """Returns a key for sorting names in which numbers compare by value."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]
