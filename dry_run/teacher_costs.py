"""What teachers take of GPUs and of time: each scores its share of a batch in one forward pass."""

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

ROWS = 2000  # of the training file, from its start, by whose agents the shares are estimated


@functools.cache
def agents(path: str) -> list[tuple[str, str]]:
    """(agent, dataset) of the first rows of a file; none where there is no such file."""
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
    """The share of rows that each host scores: by the file's first rows, or else equal ones."""
    names = [cfg.teacher_of(*row) for row in agents(cfg.data.train)]
    hosts = Counter(cfg.host_of(name) for name in names if name)
    if not hosts:
        return dict.fromkeys(cfg.hosts, 1 / max(1, len(cfg.hosts)))
    return {host: hosts[host] / hosts.total() for host in cfg.hosts}


def seconds(cfg: TeacherSettings, tokens: float, keys: float, flops: float) -> dict[str, float]:
    """Seconds in which each host scores its share of a batch of `tokens`, each meeting `keys`.

    `flops` are those that a rank reaches in a second.
    """
    found = {}
    for host, share in shares(cfg).items():
        own = cfg.of_host(host)
        work = read_model(own.model).flops(share * tokens, share * tokens * keys, 1, False)
        found[host] = work / (own.policy.ranks * flops)
    return found


def rank_bytes(cfg: TeacherSettings, host: str) -> float:
    """Bytes of a rank: bf16 weights of all that it holds, a layer at work, the head, the reserve.

    FSDP2 has two gathered layers and the root whole beside its shard.
    """
    own = cfg.of_host(host)
    total = float(gpu_memory.RESERVE)
    fullest = 0.0
    for path in cfg.models_beside(own.model):
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
    """Bytes of a forward pass over the longest row: a layer's tensors, and a chunk of logits."""
    T = max(cfg.policy.row_tokens, cfg.sampling.max_model_len)
    alone = dataclasses.replace(cfg, policy=dataclasses.replace(cfg.policy, lora_rank=0))
    return max(gpu_memory.layer_bytes(model, alone), 8 * logprobs.CHUNK * model.vocab) + 4 * T


def problems(cfg: TeacherSettings, gpu: Gpu, node_gpus: int) -> list[str]:
    """What does not fit, with the fields to change."""
    found = []
    for host in cfg.hosts:
        taken, tp = rank_bytes(cfg, host), cfg.layout_of(host).tp
        if taken > gpu.memory:
            needs = f"a rank of the teacher {host!r} takes {taken / 2**30:,.2f} of"
            remedy = f"raise ranks in teacher_layouts[{host!r}], or lower row_tokens there"
            found.append(f"{needs} {gpu.memory / 2**30:,.2f} GiB: {remedy}")
        if tp > node_gpus:
            found.append(f"teacher_layouts[{host!r}]: tp = {tp}: a node has {node_gpus} GPUs")
    return found
