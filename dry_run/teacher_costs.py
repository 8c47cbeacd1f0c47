"""Estimates teachers' memory and time: each scores its share of a batch in one forward pass."""

import dataclasses
import functools
import itertools
import json
from collections import Counter

from dry_run import megatron_sizes
from policy import gpu_memory, logprobs
from policy.gpus import Gpu
from policy.model_shape import Model, read_model
from settings.distillation import TeacherSettings

ROWS = 2000  # number of the training file's first rows from which the shares are estimated


@functools.cache
def agents(path: str) -> list[tuple[str, str]]:
    """Returns (agent, dataset) for each of the first rows of a file; empty if it is unreadable."""
    found = []
    try:
        with open(path, encoding="utf-8") as file:
            for line in itertools.islice(file, ROWS):
                row = json.loads(line)
                found.append((str(row["agent_ref"]["name"]), str(row.get("dataset") or "")))
    except (OSError, ValueError, LookupError, TypeError):
        return []
    return found


def shares(cfg: TeacherSettings) -> dict[str, float]:
    """Returns the share of rows that each host scores, from the first rows if they are readable."""
    names = [cfg.teacher_of(*row) for row in agents(cfg.data.train)]
    hosts = Counter(cfg.host_of(name) for name in names if name)
    if not hosts:
        return dict.fromkeys(cfg.hosts, 1 / max(1, len(cfg.hosts)))
    return {host: hosts[host] / hosts.total() for host in cfg.hosts}


def seconds(cfg: TeacherSettings, tokens: float, keys: float, flops: float) -> dict[str, float]:
    """Returns the seconds that each host takes to score its share of a batch of `tokens` tokens.

    Each token attends to `keys` keys. A rank computes `flops` FLOPs per second.
    """
    found = {}
    for host, share in shares(cfg).items():
        own = cfg.of_host(host)
        work = read_model(own.model).flops(share * tokens, share * tokens * keys, 1, False)
        found[host] = work / (own.policy.ranks * flops)
    return found


def rank_bytes(cfg: TeacherSettings, host: str) -> float:
    """Returns a rank's bytes: bf16 weights of its models, a layer in use, the head, the reserve.

    FSDP2 holds two gathered layers and the whole root in addition to its shard.
    """
    own = cfg.of_host(host)
    total = float(gpu_memory.RESERVE)
    fullest = 0.0
    for path in cfg.models_of_host(own.model):
        model = read_model(path)
        if own.policy.kind == "megatron":
            shape = megatron_sizes.read_shape(path, own.policy)
            stages = range(own.policy.pp)
            params = max(sum(megatron_sizes.rank_params(shape, own.policy, s)) for s in stages)
            total += 2 * params
            fullest = max(fullest, working_bytes(model, own) / (own.policy.tp * own.policy.cp))
        else:
            total += 2 * model.params / own.policy.ranks
            gathered = 2 * (2 * model.layer + model.root)
            fullest = max(fullest, gathered + working_bytes(model, own))
    return total + fullest


def working_bytes(model: Model, cfg: TeacherSettings) -> float:
    """Returns the bytes of a forward pass over the longest row: a layer or a chunk of logits."""
    T = max(cfg.policy.row_tokens, cfg.sampling.max_model_len)
    alone = dataclasses.replace(cfg, policy=dataclasses.replace(cfg.policy, lora_rank=0))
    return max(gpu_memory.layer_bytes(model, alone), 8 * logprobs.CHUNK * model.vocab) + 4 * T


def problems(cfg: TeacherSettings, gpu: Gpu, node_gpus: int) -> list[str]:
    """Returns the problems with teachers' memory and layouts, with the fields to change."""
    found = []
    for host in cfg.hosts:
        taken = rank_bytes(cfg, host)
        tp = cfg.layout_of(host).tp
        if taken > gpu.memory:
            found.append(
                f"a rank of the teacher {host!r} takes {taken / 2**30:,.2f} of "
                f"{gpu.memory / 2**30:,.2f} GiB: raise ranks in teacher_layouts[{host!r}], or "
                "lower row_tokens there"
            )
        if tp > node_gpus:
            found.append(f"teacher_layouts[{host!r}]: tp = {tp}: a node has {node_gpus} GPUs")
    return found
