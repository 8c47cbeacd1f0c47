"""Estimates GPUs and seconds per step on the hardware assumed below, to compare settings.

Only responses are counted; prompts take additional time.
"""

import dataclasses
import math
from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from core.errors import InputError
from dry_run import megatron_sizes, teacher_costs
from policy import gpu_memory
from policy.gpus import Gpu
from policy.model_shape import Model
from policy.sync.weight_sync import BUCKET_BYTES
from runtime.engines.probe import ANSWER, LENGTH, PROMPTS
from runtime.processes.placement import Node, gpus, node_mates, plan
from settings.config import PairSettings, RunSettings
from settings.distillation import TeacherSettings

if TYPE_CHECKING:
    from settings.config import TrainingSettings

MFU = 0.3  # assumed; prime-rl measured 0.15 (rows of 16k tokens) to 0.36 (65k) for a 4B model
LAUNCH_S = 3e-3  # assumed: per engine step, in addition to its arithmetic and memory traffic
NETWORK_BYTES_S = 50e9  # InfiniBand NDR: 400 Gb/s, one card per GPU
DISK_BYTES_S = 1e9  # assumed: a node writing to shared storage, or reading from it
HOST_BYTES_S = 25e9  # assumed: from a mapped file to a GPU
TENSOR_SECONDS = 27e-6  # engine CPU time per copied tensor: bench/reload.py, two cores
MEAN_SHARE = 0.25  # assumed: mean response over longest response
NODE_GPUS = 8


def ranks_per_node(cfg: "TrainingSettings") -> int:
    """Returns the number of trainer ranks on the fullest node."""
    return min(cfg.policy.ranks, NODE_GPUS)


class Load(NamedTuple):
    """The largest load of a batch."""

    sequences: int
    tokens: int  # trained tokens in the longest sequence


def load_of(cfg: "TrainingSettings") -> Load:
    """Returns the load of a batch of rollouts, or of pairs, each of which is in one row."""
    if isinstance(cfg, RunSettings):
        longest = min(cfg.sampling.max_response_tokens, cfg.sampling.max_model_len)
        return Load(cfg.prompts_per_step * cfg.group_size, longest)
    if isinstance(cfg, PairSettings):
        return Load(2 * cfg.pairs_per_step, cfg.policy.row_tokens // 2)
    return Load(1, cfg.policy.row_tokens)


def response_limit(cfg: "TrainingSettings") -> int:
    """Returns the number of tokens in the longest response."""
    return load_of(cfg).tokens


def step_tokens(cfg: "TrainingSettings") -> int:
    """Returns the largest number of response tokens that a batch may have."""
    return load_of(cfg).sequences * response_limit(cfg)


def batch_size(model: Model, cfg: RunSettings, gpu: Gpu) -> float:
    """Returns how many sequences an engine decodes at once: max_num_seqs if KV and rollouts allow.

    (max_lag + 1) P G rollouts may be in flight; each holds a response of mean length.
    """
    in_flight = (cfg.max_lag + 1) * cfg.prompts_per_step * cfg.group_size / cfg.engine.count
    mean = MEAN_SHARE * response_limit(cfg)
    room = gpu_memory.kv_tokens(model, cfg, gpu.memory, mean) / mean
    return max(1.0, min(cfg.engine.arguments["max_num_seqs"], in_flight, room))


def decode_seconds(model: Model, tp: int, batch: float, context: float, gpu: Gpu) -> float:
    """Returns the seconds until each of `batch` sequences of `context` tokens gets its next token.

    That is LAUNCH_S plus the larger of two times: matmuls take 2 FLOPs per weight and token, and
    memory traffic is bf16 KV, Mamba's states, which are read and written, and the weights that any
    token uses, with 1 - (1 - share)^batch of the routed experts.
    """
    routed = model.routed * (1 - (1 - model.expert_share) ** batch)
    weights = 2 * (model.params - model.embedding - model.routed + routed) / tp
    sequence = context * gpu_memory.kv_bytes(model, tp) + 2 * model.state / tp
    memory = (weights + batch * sequence) / gpu.hbm
    return LAUNCH_S + max(memory, 2 * (model.active - model.embedding) * batch / tp / gpu.flops)


def generation_seconds(model: Model, cfg: RunSettings, gpu: Gpu) -> float:
    """Returns the seconds that all engines together need for a batch of mean-length responses.

    A response counts with half of its tokens in the KV cache.
    """
    batch = batch_size(model, cfg, gpu)
    mean = MEAN_SHARE * response_limit(cfg)
    rounds = MEAN_SHARE * step_tokens(cfg) / (cfg.engine.count * batch)
    return rounds * decode_seconds(model, cfg.engine.tensor_parallel, batch, mean / 2, gpu)


def longest_seconds(model: Model, cfg: RunSettings, gpu: Gpu) -> float:
    """Returns the seconds that the longest response takes, alone in its engine."""
    limit = response_limit(cfg)
    return limit * decode_seconds(model, cfg.engine.tensor_parallel, 1, limit / 2, gpu)


def train_flops(model: Model, cfg: "TrainingSettings") -> float:
    """Returns the FLOPs of a batch of mean-length responses (Model.flops).

    Passes: forward, two in backward, one to recompute, and scoring passes. Masked SDPA multiplies a
    whole row, flash attention half a sequence on average.
    """
    passes = 3 + cfg.policy.recomputes + cfg.scoring_passes
    masked = gpu_memory.mask_bytes(cfg.policy).row
    keys = cfg.policy.row_tokens if masked else MEAN_SHARE * response_limit(cfg) / 2
    tokens = MEAN_SHARE * step_tokens(cfg)
    return model.flops(tokens, tokens * keys, passes, bool(cfg.policy.lora_rank))


def bandwidth(gpu: Gpu, ranks: int) -> float:
    """Returns the bytes per second between neighbouring ranks, within a node or between nodes."""
    return gpu.nvlink if ranks <= NODE_GPUS else NETWORK_BYTES_S


def exposed_seconds(cfg: "TrainingSettings", gpu: Gpu) -> dict[str, float]:
    """Returns the seconds per step in which trainer ranks only send, by what they send.

    These are the all-to-alls of Mamba over cp and of experts over ep. Other traffic may overlap
    with the work.
    """
    layout = cfg.policy
    if layout.kind == "fsdp":
        return {}
    shape = megatron_sizes.read_shape(cfg.model, layout)
    tokens = MEAN_SHARE * step_tokens(cfg) / layout.replicas
    mamba = tokens * megatron_sizes.mamba_exchange(shape, layout)
    return {
        "Mamba": mamba / bandwidth(gpu, layout.tp * layout.cp),
        "experts": traffic_seconds(shape, cfg, gpu)["ep"],
    }


def train_seconds(model: Model, cfg: "TrainingSettings", gpu: Gpu) -> float:
    """Returns the seconds that the trainer ranks need for a batch of mean-length responses."""
    work = train_flops(model, cfg) / (cfg.policy.ranks * MFU * gpu.flops)
    return work + sum(exposed_seconds(cfg, gpu).values())


def networks(cfg: "TrainingSettings") -> int:
    """Counts a node's network cards that a weight update passes through; 0 if it stays in a node.

    NCCL makes as many rings as the group has GPUs on the node with the fewest of them.
    """
    nodes = [Node(f"{i:06}", NODE_GPUS) for i in range(math.ceil(len(gpus(cfg)) / NODE_GPUS))]
    if cfg.demand.share < 1:  # gloo sends through one card, that of its route
        return 1
    try:
        places = plan(cfg, nodes)
    except InputError:  # engines and ranks do not fit on nodes of this size
        return 1
    homes = sorted(places.trainers)
    group = Counter({homes[0]: 1 + len(node_mates(cfg, homes))})
    for home in places.engines:
        group[home] += cfg.demand.engine_gpus
    return min(group.values()) if len(group) > 1 else 0


def sync_seconds(model: Model, cfg: "TrainingSettings", gpu: Gpu) -> float:
    """Returns the minimum seconds of a weight update, sent once from rank 0's node or GPU.

    At the same time, an engine's CPU copies tensor after tensor. Adapters are added to all
    weights in bf16, which each worker reads from its node's memory.
    """
    network = sent_bytes(model, cfg) / (networks(cfg) * NETWORK_BYTES_S or gpu.nvlink)
    read = 2 * model.params / HOST_BYTES_S if cfg.policy.lora_rank else 0.0
    return max(network, read, model.tensors * TENSOR_SECONDS)


def sent_bytes(model: Model, cfg: "TrainingSettings") -> float:
    """Returns the bytes of an update: bf16 weights, or adapters (policy/sync/adapter_sync.py).

    Adapters are float32, plus the products of each matrix and 4 vectors: at most 16 bytes per row.
    """
    if not cfg.policy.lora_rank:
        return 2 * model.params
    return 4 * gpu_memory.trained(model, cfg) + 16 * (sum(model.linear.values()) + 2 * model.vocab)


def probe_seconds(model: Model, cfg: RunSettings, gpu: Gpu) -> float:
    """Returns the seconds in which all engines answer a probe, and the trainers score it.

    The engines go on with their other sequences. Each replica of the policy scores all answers.
    """
    batch = batch_size(model, cfg, gpu) + PROMPTS
    context = MEAN_SHARE * response_limit(cfg) / 2
    token = decode_seconds(model, cfg.engine.tensor_parallel, batch, context, gpu)
    length = LENGTH + ANSWER
    scored = cfg.engine.count * PROMPTS * length
    flops = model.flops(scored, scored * length / 2, 1, False)
    ranks = cfg.policy.ranks / cfg.policy.replicas
    return ANSWER * token + flops / (ranks * MFU * gpu.flops)


class Traffic(NamedTuple):
    """The bytes of a weight update, and the minimum number of messages."""

    sent: float  # bytes from trainer rank 0 to the engines
    broadcasts: int
    gathered: float  # bytes that trainer rank 0 gathers first
    messages: int  # messages in which it gathers them


def update_traffic(model: Model, cfg: "TrainingSettings") -> Traffic:
    """Counts what is gathered and then broadcast in buckets. FSDP2 gathers tensor by tensor."""
    layout = cfg.policy
    sent = sent_bytes(model, cfg)
    broadcasts = math.ceil(sent / BUCKET_BYTES)
    if layout.kind == "megatron":
        shape = megatron_sizes.read_shape(cfg.model, layout)
        return Traffic(sent, broadcasts, *megatron_sizes.gathered(shape, layout))
    others = megatron_sizes.ring(layout.ranks)
    return Traffic(sent, broadcasts, sent * others, model.tensors if others else 0)


def traffic_seconds(
    shape: megatron_sizes.Shape, cfg: "TrainingSettings", gpu: Gpu
) -> dict[str, float]:
    """Returns, by axis, the seconds per step that a Megatron rank spends sending.

    No overlap is assumed. One update of the weights is counted. Ranks are numbered with tp
    innermost, then cp, replicas, pp; experts are spread over neighbours.
    """
    layout = cfg.policy
    tokens = MEAN_SHARE * step_tokens(cfg) / layout.replicas
    sent = {k: v * tokens for k, v in megatron_sizes.token_bytes(shape, layout).items()}
    sent |= megatron_sizes.step_bytes(shape, layout)
    span = dict.fromkeys(("gradients", "parameters"), layout.ranks // layout.pp)
    span |= {"tp": layout.tp, "cp": layout.tp * layout.cp, "pp": layout.ranks, "ep": layout.ep}
    return {axis: size / bandwidth(gpu, span[axis]) for axis, size in sent.items()}


def last_part(cfg: RunSettings) -> float:
    """Returns the share of a step trained after its last group: `Run.take` joins small parts."""
    n = cfg.train_parts
    tokens = MEAN_SHARE * step_tokens(cfg) / n
    joined = min(n, math.ceil(cfg.policy.row_tokens * cfg.policy.replicas / tokens))
    return (n - joined * ((n - 1) // joined)) / n


def limits(model: Model, cfg: "TrainingSettings", gpu: Gpu) -> dict[str, float]:
    """Returns a step's limits, in seconds; the largest binds.

    A step needs the policy from max_lag steps earlier: its longest rollout, followed by the
    training of its last part (`train_parts`), may take max_lag + 1 steps.
    """
    training = train_seconds(model, cfg, gpu)
    if not isinstance(cfg, RunSettings):
        return {"training": training}
    generation = generation_seconds(model, cfg, gpu)
    longest = longest_seconds(model, cfg, gpu)
    last = last_part(cfg) * training
    scoring = {f"the teacher {host}": s for host, s in teacher_seconds(cfg, gpu).items()}
    shared = any(len(gpu) > 1 for gpu in gpus(cfg))
    if shared or not cfg.max_lag:
        first = max(generation, longest / (cfg.max_lag + 1))
        return {"generation + training": first + (training if shared else last)} | scoring
    chain = (longest + last) / (cfg.max_lag + 1)
    return {"generation": generation, "training": training, "longest rollout": chain} | scoring


def teacher_seconds(cfg: RunSettings, gpu: Gpu) -> dict[str, float]:
    """Returns the seconds that each teacher takes to score its share of a batch."""
    if not isinstance(cfg, TeacherSettings):
        return {}
    keys = MEAN_SHARE * response_limit(cfg) / 2
    return teacher_costs.seconds(cfg, MEAN_SHARE * step_tokens(cfg), keys, MFU * gpu.flops)


def step_seconds(model: Model, cfg: "TrainingSettings", gpu: Gpu) -> float:
    """Returns the seconds per step: its largest limit plus the weight update."""
    update = sync_seconds(model, cfg, gpu) if cfg.demand.engines else 0.0
    return max(limits(model, cfg, gpu).values()) + update


def trainer_bytes(model: Model, cfg: "TrainingSettings") -> float:
    """Returns the peak bytes of a trainer rank under its kind of policy, with the reserve."""
    if cfg.policy.kind == "fsdp":
        return gpu_memory.trainer_bytes(model, cfg)
    shape = megatron_sizes.read_shape(cfg.model, cfg.policy)
    return megatron_sizes.trainer_bytes(shape, cfg)


def split(cfg: RunSettings, engines: int, ranks: int) -> RunSettings:
    """Returns the same run with these numbers of engines and trainer ranks, on separate GPUs."""
    engine = dataclasses.replace(cfg.engine, count=engines)
    policy = dataclasses.replace(cfg.policy, ranks=ranks)
    return dataclasses.replace(cfg, gpu_share=1.0, engine=engine, policy=policy)


def splits(model: Model, cfg: RunSettings, gpu: Gpu) -> list[RunSettings]:
    """Returns cfg with each split of its GPUs that holds the trainer, fewest engines first."""
    total = sum("teacher" not in gpu for gpu in gpus(cfg))
    tp = cfg.engine.tensor_parallel
    layout = cfg.policy
    unit = math.lcm(layout.tp * layout.cp * layout.pp, layout.pp * layout.ep)  # 1 under FSDP
    engines = (g for g in range(1, (total - 1) // tp + 1) if (total - g * tp) % unit == 0)
    found = (split(cfg, g, total - g * tp) for g in engines)
    return [other for other in found if trainer_bytes(model, other) <= gpu.memory]


def balance(model: Model, cfg: RunSettings, gpu: Gpu) -> RunSettings | None:
    """Returns the fastest of the splits; None if no split holds the trainer.

    If the loops overlap, the slower one counts, else their sum; ideally N_g / N_t = W_g / W_t.
    """

    def seconds(other: RunSettings) -> float:
        both = (generation_seconds(model, other, gpu), train_seconds(model, other, gpu))
        return max(both) if cfg.max_lag else sum(both)

    return min(splits(model, cfg, gpu), key=seconds, default=None)


class Checkpoint(NamedTuple):
    """A checkpoint's bytes, the exported model included."""

    whole: float
    node: float  # bytes on the node that writes most; it holds a copy in memory until then


def trainer_nodes(cfg: "TrainingSettings") -> int:
    """Counts the nodes that hold the trainer ranks."""
    return math.ceil(cfg.policy.ranks / NODE_GPUS)


def checkpoint_bytes(model: Model, cfg: "TrainingSettings") -> Checkpoint:
    """Returns the bytes of a checkpoint, of which every rank writes its share.

    Per parameter under Megatron: 2 for weights, 12 for main parameters and moments, 2 for export.
    Under FSDP2: 12 for trained weights and moments, and 2 for export, which rank 0 writes alone.
    """
    nodes = trainer_nodes(cfg)
    if cfg.policy.kind == "megatron":
        return Checkpoint(16 * model.params, 16 * model.params / nodes)
    trained = 12 * gpu_memory.trained(model, cfg)
    return Checkpoint(trained + 2 * model.params, trained / nodes + 2 * model.params)


def checkpoint_seconds(model: Model, cfg: "TrainingSettings") -> float:
    """Returns the seconds to write a checkpoint and read it back for the CRC-32 of its files."""
    saved = checkpoint_bytes(model, cfg)
    return (saved.node + saved.whole / trainer_nodes(cfg)) / DISK_BYTES_S


def signal_seconds(model: Model, cfg: "TrainingSettings", step: float) -> int:
    """Returns how many seconds before its end a job needs a signal.

    This time covers a step, a checkpoint and Slurm's 60 s. The previous checkpoint may not be
    complete when the signal arrives, and the step's checkpoint waits for it.
    """
    saving = checkpoint_seconds(model, cfg)
    return min(65535, math.ceil(max(step, saving) + saving + 60))  # Slurm accepts 16 bits
