"""What it means to be on a node: where each engine and trainer rank runs, and with which GPUs.

runtime/layout.py chooses the nodes.

The workers of an engine are on one node, and so are the ranks of a tensor-parallel group: what they
exchange at every layer must not cross the network. Engines fill whole nodes from the first on,
trainers from the last. Ray by itself would put consecutive ranks on different nodes.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from settings.run import TrainingSettings

# Resources of nodes that are not for engines and trainers: `ray start --resources '{"judge": 1}'`.
JUDGE = "judge"
CPU_NODE = "cpu_node"  # where the rollout workers run, if there are such nodes
LEAST_SHARE = 1e-4  # of a GPU: the least that Ray counts


class Node(NamedTuple):
    """A node of the cluster, and what engines and trainers may use of it."""

    id: str
    gpus: int


class Shares(NamedTuple):
    """How many GPUs the actors ask Ray for, and how many engines fit on one."""

    trainer: float
    engine: float
    beside: int  # engines on a GPU that a trainer rank has as well
    alone: int


class Places(NamedTuple):
    """The nodes in their order, and the node id of each actor; "": wherever Ray likes."""

    nodes: list[Node]
    engines: list[str]
    trainers: list[str]

    def free_home(self, taken: Iterable[str]) -> str:
        """A node for an engine beside those that are on nodes already."""
        left = Counter(self.engines) - Counter(taken)
        return min(left, key=self.engines.index, default="")

    def in_order(self, found: Sequence[tuple[str, list]]) -> list[int]:
        """Which trainer is rank 0, 1, ...: by node, then GPU; `found` says where each is."""
        place = {node.id: i for i, node in enumerate(self.nodes)}
        return sorted(range(len(found)), key=lambda i: (place.get(found[i][0], -1), found[i][1]))


def shares(cfg: "TrainingSettings") -> Shares:
    """By `gpu_share`. A trainer rank takes more than half: NCCL refuses two of them on a GPU.

    Ray by itself would fill a GPU with trainer ranks before it takes the next.
    """
    _, engine_gpus, part = cfg.demand
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
