"""Computes the bytes that a model takes on a GPU, and the peak memory of a policy/fsdp.py rank.

Axes:  T tokens of the longest row   H hidden size   Q, K width of all query, all key heads
       V vocabulary   C tokens whose logits exist at once

Only config.json is read. The peaks are within a tenth of what torch allocates for Qwen3, dense and
with experts (a test compares them). For Mamba, only weights and an engine's states are counted.
"""

import dataclasses
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from policy import logprobs
from policy.gpus import GIB, planned
from policy.model_shape import Model, read_model
from policy.sync.weight_sync import BUCKET_BYTES

if TYPE_CHECKING:
    from settings.config import RunSettings, TrainingSettings
    from settings.network import PolicySettings

C = TypeVar("C", bound="TrainingSettings")
RESERVE = 4 * GIB  # assumed: CUDA context and graphs, NCCL, an engine's activations, fragmentation


def trained(model: Model, cfg: "TrainingSettings") -> int:
    """Counts the parameters that have gradients: the adapters' with LoRA, else all."""
    rank = cfg.policy.lora_rank
    if not rank:
        return model.params
    chosen = cfg.policy.lora_targets or model.linear
    return rank * sum(model.linear.get(leaf, 0) for leaf in chosen)


def states(model: Model, cfg: "TrainingSettings") -> dict[str, float]:
    """Returns the bytes of shards that a rank always holds: 4 per parameter, 2 in the reference."""
    model_shard = 4 * model.params / cfg.policy.ranks
    shard = 4 * trained(model, cfg) / cfg.policy.ranks
    adapters = shard if cfg.policy.lora_rank else 0
    held = {"weights, float32": model_shard + adapters}
    held |= {"gradients, float32": shard, "AdamW moments": 2 * shard}
    if cfg.has_reference and not cfg.policy.lora_rank:  # with LoRA, it shares the policy's memory
        held["reference of the KL"] = model_shard / 2
    return held


def longest_row(cfg: "TrainingSettings") -> int:
    """Returns T, in tokens: a sample longer than row_tokens has its own row."""
    return max(cfg.row_limits.values())


class Mask(NamedTuple):
    """Bytes of the mask that keeps a row's sequences apart."""

    row: int  # bool, for the whole row
    layer: int  # bf16, for each layer being computed


def mask_bytes(settings: "PolicySettings") -> Mask:
    """Returns the bytes of transformers' sdpa_mask, row_tokens squared, which SDPA converts.

    Other kernels, such as the one that "auto" chooses on a GPU, and policy/megatron need no mask.
    """
    masked = settings.kind == "fsdp" and settings.attention == "sdpa"
    square = settings.row_tokens**2 if masked else 0
    return Mask(square, 2 * square)


def layer_bytes(model: Model, cfg: "TrainingSettings") -> int:
    """Returns the bytes that a decoder layer saves for its backward pass.

    Tensors are bf16, but float32 in norms, as in Qwen3: T (16 H + 10 Q + 10 K + ffn). With a mask,
    keys and values are repeated: T (16 H + 14 Q + 6 K + ffn). Counted as in Korthikanti et al. 2022
    (arXiv:2205.05198), section 4.1.
    """
    Q = model.heads * model.head_dim
    K = model.kv_heads * model.head_dim
    mask = mask_bytes(cfg.policy).layer
    attention = 14 * Q + 6 * K if mask else 10 * Q + 10 * K
    return longest_row(cfg) * (16 * model.hidden + attention + model.ffn) + mask


def saved_bytes(model: Model, cfg: "TrainingSettings") -> int:
    """Returns the bytes that all layers keep until the backward pass: 2 T H each if checkpointed.

    These are the layers' bf16 inputs. Without checkpointing, LoRA needs T (4 H + 2 Q + 2 K) bytes
    fewer per layer, because frozen norms do not keep the tensors that they multiply.
    """
    T = longest_row(cfg)
    frozen = 4 * model.hidden + 2 * (model.heads + model.kv_heads) * model.head_dim
    whole = layer_bytes(model, cfg) - (T * frozen if cfg.policy.lora_rank else 0)
    again = cfg.policy.recomputes
    return model.layers * (2 * T * model.hidden if again else whole)


def head_bytes(C: int, V: float, H: int, b: int = 2) -> float:
    """Returns the peak bytes of TokenLogprobs, in addition to the row's inputs and outputs.

    Forward: logits and their log-softmax, 8 C V. Backward: a chunk in float32, the previous chunk
    in bf16, and the head's float32 gradient, 6 C V + 4 V H; finally its bf16 copy, 2 C V + 6 V H.
    With H = 0 the head is not trained. With b = 4 everything is float32, without a copy.
    """
    copy = b * V * H if b < 4 else 0
    return max(8 * C * V, (4 + b) * C * V + 4 * V * H, b * C * V + 4 * V * H + copy)


def moments(model: Model, cfg: "TrainingSettings") -> dict[str, float]:
    """Returns the bytes needed in addition to the states, at four moments that may be the peak.

    FSDP2 holds two gathered layers in bf16, one layer's bf16 gradients and one layer's float32
    input to the reduction: 10 bytes per parameter; the root stays gathered. A single rank gathers
    nothing ahead (8 bytes), but torch 2.13 makes two more copies of what it reduces
    (_fsdp_collectives.py, foreach_reduce): 12 bytes, once the layer's activations are freed. With
    LoRA, weights have no gradients (`t` is 0), and only what FSDP2 gathers counts: 5 bytes, or 3 on
    a single rank.
    """
    alone = cfg.policy.ranks == 1
    lora = bool(cfg.policy.lora_rank)
    t = int(not lora)
    T = longest_row(cfg)
    root = model.root
    layer = model.layer
    ahead, gathered = (0, 3 + 5 * t) if alone else (4, 5 + 5 * t)
    row = 2 * root + saved_bytes(model, cfg) + mask_bytes(cfg.policy).row
    # The last norm in float32, its bf16 input and output, the trained tokens' output and gradient.
    hidden = 12 * T * model.hidden
    recomputed = layer_bytes(model, cfg) if cfg.policy.recomputes else 0
    head = head_bytes(logprobs.CHUNK, model.vocab, t * model.hidden)
    merged = 8 * model.biggest // cfg.policy.ranks if lora else 0  # sum and addend
    working = recomputed + T * model.ffn // 2 + gathered * layer
    bucket = min(max(BUCKET_BYTES, 2 * model.biggest), 2 * model.params)
    return {
        "at the head": row + hidden + head + ahead * layer,
        "in a layer": row + 2 * t * root + max(working, 12 * alone * t * layer),
        "reducing": (12 if alone else 6) * t * root,
        "sending weights": 2 * bucket + 4 * model.biggest + merged,
    }


def trainer_bytes(model: Model, cfg: "TrainingSettings") -> float:
    """Returns the peak bytes of a rank: its states, its fullest moment and the reserve."""
    return sum(states(model, cfg).values()) + max(moments(model, cfg).values()) + RESERVE


class Room(NamedTuple):
    """The memory that a policy/fsdp.py rank needs without recomputation, and the free memory."""

    taken: float  # bytes
    free: float  # bytes that engines on this GPU leave, less the tenth by which `taken` may be off
    is_counted: bool  # False if `taken` omits some of what these layers save

    @property
    def is_enough(self) -> bool:
        """True if activations may stay in memory."""
        return self.is_counted and self.taken <= self.free


def room(model: Model, cfg: "TrainingSettings", memory: float) -> Room:
    """Computes the room of a rank without checkpointing on a GPU of `memory` bytes."""
    layout = dataclasses.replace(cfg.policy, activation_checkpointing=False)
    taken = trainer_bytes(model, dataclasses.replace(cfg, policy=layout))
    share = cfg.demand.share
    # Engines on the GPU of a trainer rank, as runtime/processes/placement.py counts them.
    beside = int((1 - max(share, 0.5)) / share + 1e-3)
    run: Any = cfg  # RunSettings if GPUs are shared: only RunSettings have engines
    engine = run.engine.arguments["gpu_memory_utilization"] if beside else 0.0
    return Room(taken, 0.9 * memory * (1 - beside * engine), bool(model.ffn and not model.state))


def decided(model: Model, cfg: C, memory: float) -> C:
    """Decides activation_checkpointing = "auto" for GPUs of `memory` bytes; returns the settings.

    Under Megatron it is True: megatron_sizes.py does not count everything that Mamba layers save.
    """
    layout = cfg.policy
    if layout.activation_checkpointing != "auto":
        return cfg
    keeps = layout.kind == "fsdp" and room(model, cfg, memory).is_enough
    return dataclasses.replace(
        cfg, policy=dataclasses.replace(layout, activation_checkpointing=not keeps)
    )


def settled(cfg: "TrainingSettings") -> "PolicySettings":
    """Decides "auto" for the smallest GPU of all ranks; returns the policy's settings. Collective.

    Without a GPU, an H100 is assumed, as in the dry run.
    """
    if cfg.policy.activation_checkpointing != "auto" or cfg.policy.kind == "megatron":
        return cfg.policy  # Megatron recomputes if "auto" is undecided
    device = "cuda" if torch.cuda.is_available() else "cpu"
    memory = torch.tensor(planned("auto").memory, dtype=torch.float64, device=device)
    dist.all_reduce(memory, dist.ReduceOp.MIN)
    return decided(read_model(cfg.model), cfg, memory.item()).policy


def reload_bytes(model: Model, cfg: "RunSettings") -> float:
    """Returns the bytes of an engine's GPU that an update takes beyond gpu_memory_utilization.

    vLLM keeps a layer's tensors whole, for all tp ranks, until all have arrived; then it builds
    this rank's part anew (model_loader/reload/layerwise.py). Tensors arrive in buckets, which are
    in host memory if GPUs are shared.
    """
    layer = 2 * max(model.experts, model.biggest)
    part = layer / cfg.engine.tensor_parallel
    return part if cfg.gpu_share < 1 else layer + part + BUCKET_BYTES


def kv_bytes(model: Model, tp: int) -> int:
    """Returns the bytes of one token's KV on one of an engine's GPUs.

    Layers x (key, value) x heads x width, bf16. A GPU has at least one KV head, or a whole
    compressed KV (MLA).
    """
    width = model.latent or 2 * max(1, model.kv_heads // tp) * model.head_dim
    return 2 * model.kv_layers * width


def kv_budget(model: Model, cfg: "RunSettings", gpu: float) -> float:
    """Returns the bytes for KV on an engine's GPU of `gpu` bytes.

    This is gpu_memory_utilization times `gpu`, less its share of the bf16 weights and the reserve.
    """
    weights = 2 * model.params / cfg.engine.tensor_parallel
    return cfg.engine.arguments["gpu_memory_utilization"] * gpu - weights - RESERVE


def kv_tokens(model: Model, cfg: "RunSettings", gpu: float, length: float) -> int:
    """Returns how many tokens an engine can hold, with states, in sequences of `length` tokens.

    While vLLM fills a new block of KV, it holds a sequence's states twice; this is not counted.
    """
    tp = cfg.engine.tensor_parallel
    each = kv_bytes(model, tp) + model.state / tp / length
    return max(0, int(kv_budget(model, cfg, gpu) / max(each, 1)))


def host_bytes(model: Model, here: int, ranks: int) -> float:
    """Returns the bytes of CPU memory that a node needs while its ranks read their shares.

    The node has `here` of all `ranks` ranks, and shares are in float32.
    """
    return 4 * model.params * here / ranks
