"""GPUs and seconds of a step: a model of the hardware assumed below, good for comparing settings.

Only responses are counted, prompts come on top; `gpu` is the memory of one GPU in bytes.
"""

import dataclasses
import math

from dry_run import megatron_sizes, sizes
from dry_run.sizes import Model

PEAK_FLOPS = 989e12  # dense bf16; NVIDIA H100 SXM data sheet, as is the next
HBM_BYTES_S = 3.35e12
MFU = 0.3  # assumed; prime-rl measured 0.15 (rows of 16k tokens) to 0.36 (65k) for a 4B model
LAUNCH_S = 3e-3  # assumed: an engine step beside its arithmetic and memory traffic
NETWORK_BYTES_S = 50e9  # InfiniBand NDR: 400 Gb/s per GPU
NVLINK_BYTES_S = 450e9  # inside a node; the data sheet's 900 GB/s are both directions together
DISK_BYTES_S = 1e9  # assumed: a node's writes to shared storage
MEAN_SHARE = 0.25  # assumed: mean response over longest response
NODE_GPUS = 8


def place(cfg) -> list[dict[str, int]]:
    """How many engines and trainer ranks each GPU holds: Ray gives whole GPUs or a share of one."""
    gpus, room = [], []
    for role, count, share in (
        ("engine", cfg.generators, cfg.generator_gpus * cfg.tensor_parallel),
        ("trainer", cfg.trainers, cfg.trainer_gpus),
    ):
        for _ in range(count if share else 0):
            fits = (i for i, left in enumerate(room) if share < 1 and left > share - 1e-9)
            i = next(fits, len(gpus))
            if i == len(gpus):
                gpus += [{} for _ in range(math.ceil(share))]
                room += [1.0] * math.ceil(share)
            for at in range(i, i + math.ceil(share)):
                room[at] -= min(share, 1.0)
                gpus[at][role] = gpus[at].get(role, 0) + 1
    return gpus


def ranks_per_node(cfg) -> int:
    """Trainer ranks that start on the fullest node, where engines leave them all its GPUs."""
    return min(cfg.trainers, int(NODE_GPUS / cfg.trainer_gpus)) if cfg.trainer_gpus else 1


def takes_turns(cfg) -> bool:
    """Whether the two loops cannot overlap: without lag, or where they share a GPU."""
    return not cfg.max_lag or any(len(gpu) > 1 for gpu in place(cfg))


def response_limit(cfg) -> int:
    """Tokens of the longest response."""
    return min(cfg.max_response_tokens, cfg.max_model_len)


def step_tokens(cfg) -> int:
    """Response tokens of a batch at most: P x G x the longest."""
    return cfg.prompts_per_step * cfg.group_size * response_limit(cfg)


def batch_size(model: Model, cfg, gpu: float) -> float:
    """Sequences that an engine decodes at once: max_num_seqs, or fewer where KV or rollouts end.

    (max_lag + 1) P G rollouts may be in flight; each holds a mean response.
    """
    in_flight = (cfg.max_lag + 1) * cfg.prompts_per_step * cfg.group_size / cfg.generators
    room = sizes.kv_tokens(model, cfg, gpu) / (MEAN_SHARE * response_limit(cfg))
    return max(1.0, min(cfg.max_num_seqs, in_flight, room))


def decode_seconds(model: Model, tp: int, batch: float, context: float) -> float:
    """Seconds until each of `batch` sequences of `context` tokens gets one more.

    LAUNCH_S and the slower of matmuls, 2 FLOPs a weight and token, and memory: bf16 KV and the
    weights that anyone meets, 1 - (1 - share)^batch of the routed experts.
    """
    routed = model.routed * (1 - (1 - model.expert_share) ** batch)
    weights = 2 * (model.params - model.embedding - model.routed + routed) / tp
    memory = (weights + batch * context * sizes.kv_bytes(model, tp)) / HBM_BYTES_S
    return LAUNCH_S + max(memory, 2 * (model.active - model.embedding) * batch / tp / PEAK_FLOPS)


def generation_seconds(model: Model, cfg, gpu: float) -> float:
    """Seconds in which all engines sample a batch of mean responses, read half written."""
    batch, mean = batch_size(model, cfg, gpu), MEAN_SHARE * response_limit(cfg)
    rounds = MEAN_SHARE * step_tokens(cfg) / (cfg.generators * batch)
    return rounds * decode_seconds(model, cfg.tensor_parallel, batch, mean / 2)


def longest_seconds(model: Model, cfg) -> float:
    """Seconds of the longest response, alone in its engine."""
    limit = response_limit(cfg)
    return limit * decode_seconds(model, cfg.tensor_parallel, 1, limit / 2)


def train_flops(model: Model, cfg) -> float:
    """FLOPs of a batch of mean responses: 2 N + 4 Q keys per layer, a token and pass.

    Passes: forward, two in backward, one to recompute, one before several updates, one of a KL
    reference. N: active parameters without the lookup. Masked SDPA multiplies a whole row, flash
    attention half a sequence on average. Kaplan et al. 2020 (arXiv:2001.08361), section 2.1.
    """
    passes = 3 + cfg.activation_checkpointing + (cfg.updates_per_batch > 1) + bool(cfg.kl_coef)
    keys = cfg.row_tokens if sizes.mask_bytes(cfg)[0] else MEAN_SHARE * response_limit(cfg) / 2
    attention = 4 * model.heads * model.head_dim * model.kv_layers * keys
    tokens = MEAN_SHARE * step_tokens(cfg)
    return passes * (2 * (model.active - model.embedding) + attention) * tokens


def train_seconds(model: Model, cfg) -> float:
    """Seconds in which all trainer ranks train a batch of mean responses."""
    return train_flops(model, cfg) / (cfg.trainers * MFU * PEAK_FLOPS)


def sync_seconds(model: Model) -> float:
    """Floor of a weight update: all weights in bf16 through one GPU's network, from rank 0."""
    return 2 * model.params / NETWORK_BYTES_S


def traffic_seconds(shape: megatron_sizes.Shape, cfg) -> dict[str, float]:
    """Seconds of a step in which a Megatron rank sends, by axis, if nothing overlapped.

    Ranks are numbered with tp innermost, then cp, replicas, pp; experts are spread over neighbours.
    """
    tokens = MEAN_SHARE * step_tokens(cfg) / cfg.replicas
    sent = {k: v * tokens for k, v in megatron_sizes.token_bytes(shape, cfg).items()}
    for name, size in megatron_sizes.step_bytes(shape, cfg).items():
        sent[name] = size * cfg.updates_per_batch
    span = dict.fromkeys(("gradients", "parameters"), cfg.trainers // cfg.pp)
    span |= {"tp": cfg.tp, "cp": cfg.tp * cfg.cp, "pp": cfg.trainers, "ep": cfg.ep}
    inside = {axis: ranks <= NODE_GPUS for axis, ranks in span.items()}
    return {k: v / (NVLINK_BYTES_S if inside[k] else NETWORK_BYTES_S) for k, v in sent.items()}


def limits(model: Model, cfg, gpu: float) -> dict[str, float]:
    """Seconds of what may bind a step, the largest does; a rollout has max_lag + 1 steps."""
    generation, training = generation_seconds(model, cfg, gpu), train_seconds(model, cfg)
    longest = longest_seconds(model, cfg) / (cfg.max_lag + 1)
    if takes_turns(cfg):
        return {"generation + training": max(generation, longest) + training}
    return {"generation": generation, "training": training, "longest rollout": longest}


def step_seconds(model: Model, cfg, gpu: float) -> float:
    """Seconds of a step: what binds it, and the weight update."""
    return max(limits(model, cfg, gpu).values()) + sync_seconds(model)


def trainer_bytes(model: Model, cfg) -> float:
    """Peak of a trainer rank under its policy, with the reserve."""
    if cfg.policy == "fsdp":
        return sizes.trainer_bytes(model, cfg)
    return megatron_sizes.trainer_bytes(megatron_sizes.read_shape(cfg), cfg)


def balance(model: Model, cfg, gpu: float):
    """cfg with the fastest split of as many whole GPUs that holds the trainer; None: there is none.

    Where the loops overlap, the slower counts, else their sum; N_g / N_t = W_g / W_t in the ideal.
    """
    total, tp = len(place(cfg)), cfg.tensor_parallel
    whole = dataclasses.replace(cfg, generator_gpus=1.0, trainer_gpus=1.0)
    unit = math.lcm(cfg.tp * cfg.cp * cfg.pp, cfg.pp * cfg.ep)  # 1 under FSDP
    engines = (g for g in range(1, (total - 1) // tp + 1) if (total - g * tp) % unit == 0)
    splits = [dataclasses.replace(whole, generators=g, trainers=total - g * tp) for g in engines]
    splits = [split for split in splits if trainer_bytes(model, split) <= gpu]

    def seconds(split) -> float:
        both = generation_seconds(model, split, gpu), train_seconds(model, split)
        return max(both) if cfg.max_lag else sum(both)

    return min(splits, key=seconds, default=None)


def signal_seconds(model: Model, cfg, step: float) -> int:
    """How long before its end a job must be told: a step, a checkpoint, Slurm's own 60 s.

    The checkpoint: 12 bytes a parameter by all trainer nodes, 2 by one, at DISK_BYTES_S each.
    """
    nodes = math.ceil(cfg.trainers * cfg.trainer_gpus / NODE_GPUS) or 1
    checkpoint = (12 / nodes + 2) * model.params / DISK_BYTES_S
    return min(65535, math.ceil(step + checkpoint + 60))  # Slurm takes 16 bits
