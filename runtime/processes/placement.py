"""What it means to be on a node: where each engine and trainer rank runs, and with which GPUs.

runtime/processes/layout.py chooses the nodes.

The workers of an engine are on one node, and so are the ranks of a tensor-parallel group: what they
exchange at every layer must not cross the network. Engines fill whole nodes from the first on,
trainers from the last. Ray by itself would put consecutive ranks on different nodes.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

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
