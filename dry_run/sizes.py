"""Bytes of a model on one GPU, and of a rank of `policy/fsdp.py` at its fullest.

Axes:  T tokens of the longest row   H hidden size   Q, K width of all query, all key heads
       V vocabulary   C tokens with logits that exist at once

Read from config.json alone. The peaks are within a tenth of what torch allocates for Qwen3, dense
and with experts (a test compares them). Of Mamba, weights and what an engine keeps are counted.
"""

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from policy import logprobs
from policy.lora import targets
from policy.shape import build
from policy.weight_sync import BUCKET_BYTES

if TYPE_CHECKING:
    from settings.network import PolicySettings
    from settings.run import RunSettings, TrainingSettings

GIB = 2**30
RESERVE = 4 * GIB  # assumed: CUDA context and graphs, NCCL, an engine's activations, fragmentation
# Layer types of transformers that keep no KV; of an unknown one, KV is counted.
WITHOUT_KV = {"linear_attention", "mamba", "conv", "moe", "mlp", "sparse", "dense"}


@dataclass(frozen=True)
class Model:
    """Sizes of a causal LM. Counts are of parameters, tied ones once."""

    name: str
    params: int
    routed: int  # in routed experts
    expert_share: float  # of the routed experts, met by one token
    embedding: int  # that are only looked up: 0 where the head is tied to them
    root: int  # outside of decoder layers
    layer: int  # in the largest decoder layer
    experts: int  # routed, in the layer that has most
    biggest: int  # in the largest tensor
    tensors: int  # of parameters
    linear: dict[str, int]  # parameters of adapters of rank 1, by the last part of layers' names
    layers: int
    kv_layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    latent: int  # width of a compressed KV (MLA), which all heads share; 0: none
    state: int  # bytes that an engine keeps of a sequence, however long it is: Mamba's
    ffn: int  # bytes that a feed-forward saves of each token for its backward, in bf16
    vocab: int

    @property
    def active(self) -> float:
        """Parameters that one token meets, embedding and head included."""
        return self.params - self.routed * (1 - self.expert_share)


def read_model(folder: str) -> Model:
    """Counts the model of a folder's config.json. Raises InputError where it describes none."""
    lm = build(folder)
    text = lm.config.get_text_config()
    get = functools.partial(field, text)
    sizes = {name: p.numel() for name, p in lm.named_parameters()}
    units = [m for m in lm.modules() if type(m).__name__ in lm._no_split_modules]
    layers = [{name: p.numel() for name, p in unit.named_parameters()} for unit in units]
    embedding = lm.get_input_embeddings().weight
    head = lm.get_output_embeddings().weight
    vocab, hidden = head.shape
    latent = get("kv_lora_rank")
    heads = text.num_attention_heads
    kinds = getattr(text, "layer_types", None) or ["full_attention"] * len(layers)
    experts = get("num_experts", "n_routed_experts", "num_local_experts")
    return Model(
        name=Path(folder).name,
        params=sum(sizes.values()),
        routed=routed(sizes),
        expert_share=get("num_experts_per_tok") / experts if experts else 1.0,
        embedding=0 if embedding is head else embedding.numel(),
        root=sum(sizes.values()) - sum(sum(layer.values()) for layer in layers),
        layer=max(sum(layer.values()) for layer in layers),
        experts=max(routed(layer) for layer in layers),
        biggest=max(sizes.values()),
        tensors=len(sizes),
        linear=adapted(lm),
        layers=len(layers),
        kv_layers=sum(kind not in WITHOUT_KV for kind in kinds),
        hidden=hidden,
        heads=heads,
        kv_heads=get("num_key_value_heads", default=heads),
        head_dim=get("head_dim", default=hidden // heads),
        latent=latent and latent + get("qk_rope_head_dim"),
        state=kinds.count("linear_attention") * mamba_bytes(text),
        ffn=feed_forward_bytes(hidden, text),
        vocab=vocab,
    )


def adapted(lm: Any) -> dict[str, int]:
    """Inputs and outputs of the linear layers but the head, by the last part of their names."""
    found: dict[str, int] = {}
    for name in targets(lm, ()):
        leaf = name.rpartition(".")[2]
        found[leaf] = found.get(leaf, 0) + sum(lm.get_submodule(name).weight.shape)
    return found


def trained(model: Model, cfg: "TrainingSettings") -> int:
    """Parameters that have gradients: the adapters', where there are some, else all."""
    rank, chosen = cfg.policy.lora_rank, cfg.policy.lora_targets or model.linear
    return rank * sum(model.linear.get(leaf, 0) for leaf in chosen) if rank else model.params


def routed(sizes: dict[str, int]) -> int:
    """Parameters of routed experts, of all by name."""
    return sum(size for name, size in sizes.items() if ".experts." in name)


def field(config: Any, *names: str, default: int = 0) -> int:
    """The first of a config.json's fields of these names that is there and not 0."""
    return next((v for v in (getattr(config, name, None) for name in names) if v), default)


def mamba_bytes(config: Any) -> int:
    """Bytes that a Mamba-2 layer keeps of a sequence: float32 [heads, width, state], bf16 inputs.

    The inputs are those of its convolution, of x, B and C.
    """
    get = functools.partial(field, config)
    heads = get("mamba_num_heads") * get("mamba_head_dim")
    convolved = heads + 2 * get("n_groups") * get("ssm_state_size")
    return 4 * heads * get("ssm_state_size") + 2 * (get("conv_kernel") - 1) * convolved


def feed_forward_bytes(hidden: int, config: Any) -> int:
    """Bytes a token that `down(silu(gate) * up)` saves: four bf16 tensors as wide as it is inside.

    Each of a token's experts also copies its input and its output.
    """
    get = functools.partial(field, config)
    inside = get("intermediate_size")
    if not get("num_experts", "n_routed_experts", "num_local_experts"):
        return 8 * inside
    inside = get("moe_intermediate_size", default=inside)
    shared = get("shared_expert_intermediate_size", default=get("n_shared_experts") * inside)
    return get("num_experts_per_tok") * (8 * inside + 4 * hidden) + 8 * shared


def states(model: Model, cfg: "TrainingSettings") -> dict[str, float]:
    """Bytes that a rank always holds: float32, sharded over the ranks, 4 x parameters each."""
    model_shard = 4 * model.params / cfg.policy.ranks
    shard = 4 * trained(model, cfg) / cfg.policy.ranks
    adapters = shard if cfg.policy.lora_rank else 0
    held = {"weights, float32": model_shard + adapters}
    held |= {"gradients, float32": shard, "AdamW moments": 2 * shard}
    if cfg.has_reference and not cfg.policy.lora_rank:  # the model below adapters is theirs
        held["reference of the KL"] = model_shard
    return held


def longest_row(cfg: "TrainingSettings") -> int:
    """T: a sample above row_tokens has a row of its own."""
    return max(cfg.row_limits.values())


class Mask(NamedTuple):
    """Bytes of the mask that keeps a row's sequences apart."""

    row: int  # bool, for the whole row
    layer: int  # bf16, for each layer at work


def mask_bytes(settings: "PolicySettings") -> Mask:
    """row_tokens squared, from transformers' sdpa_mask, which torch's SDPA converts.

    Other kernels, "auto" on a GPU among them, and policy/megatron have none.
    """
    masked = settings.kind == "fsdp" and settings.attention == "sdpa"
    square = settings.row_tokens**2 if masked else 0
    return Mask(square, 2 * square)


def layer_bytes(model: Model, cfg: "TrainingSettings") -> int:
    """Bytes that a decoder layer saves for its backward: bf16, and float32 in norms, as in Qwen3.

    T (16 H + 10 Q + 10 K + ffn); a mask repeats keys and values: T (16 H + 14 Q + 6 K + ffn).
    """
    Q = model.heads * model.head_dim
    K = model.kv_heads * model.head_dim
    mask = mask_bytes(cfg.policy).layer
    attention = 14 * Q + 6 * K if mask else 10 * Q + 10 * K
    return longest_row(cfg) * (16 * model.hidden + attention + model.ffn) + mask


def saved_bytes(model: Model, cfg: "TrainingSettings") -> int:
    """Bytes that all layers keep until backward: with checkpointing bf16 inputs, 2 T H each.

    Norms that are frozen beside adapters do not keep what they multiply: T (4 H + 2 Q + 2 K) less.
    """
    T = longest_row(cfg)
    frozen = 4 * model.hidden + 2 * (model.heads + model.kv_heads) * model.head_dim
    whole = layer_bytes(model, cfg) - (T * frozen if cfg.policy.lora_rank else 0)
    again = cfg.policy.activation_checkpointing
    return model.layers * (2 * T * model.hidden if again else whole)


def head_bytes(C: int, V: float, H: int, b: int = 2) -> float:
    """Most that TokenLogprobs allocates at once, beside inputs and outputs as long as the row.

    Forward: logits and their log-softmax, 8 C V. Backward: a chunk in float32, the one before in
    bf16, and the head's float32 gradient, 6 C V + 4 V H; at last its bf16 copy, 2 C V + 6 V H. With
    H = 0 the head is not trained. With b = 4 all is float32, and there is no copy.
    """
    copy = b * V * H if b < 4 else 0
    return max(8 * C * V, (4 + b) * C * V + 4 * V * H, b * C * V + 4 * V * H + copy)


def moments(model: Model, cfg: "TrainingSettings") -> dict[str, float]:
    """Bytes beside the states at the four moments at which a rank may be fullest.

    Of the layers, FSDP2 holds two gathered in bf16, one's bf16 gradients and one's float32 input of
    the reduction: 10 bytes a parameter; the root stays whole. A single rank has one unit, the root,
    and torch 2.13 copies it twice more where it reduces (_fsdp_collectives.py, foreach_reduce).
    Beside adapters, weights have no gradients (`t` is 0), and what FSDP2 gathers shows: 5 bytes.
    """
    alone = cfg.policy.ranks == 1
    lora = bool(cfg.policy.lora_rank)
    t = int(not lora)
    T = longest_row(cfg)
    root, layer = (model.params, 0) if alone else (model.root, model.layer)
    row = 2 * root + saved_bytes(model, cfg) + mask_bytes(cfg.policy).row
    # The last norm works in float32; its bf16 input and output, the trained ones, their gradients.
    hidden = 12 * T * model.hidden
    recomputed = layer_bytes(model, cfg) if cfg.policy.activation_checkpointing else 0
    head = head_bytes(logprobs.CHUNK, model.vocab, t * model.hidden)
    merged = 8 * model.biggest // cfg.policy.ranks if lora else 0  # and what is added
    bucket = min(max(BUCKET_BYTES, 2 * model.biggest), 2 * model.params)
    return {
        "at the head": row + hidden + head + 4 * layer,
        "in a layer": row + 2 * t * root + recomputed + T * model.ffn // 2 + (5 + 5 * t) * layer,
        "reducing": (12 if alone else 6) * t * root,
        "sending weights": 2 * bucket + 4 * model.biggest + merged,
    }


def trainer_bytes(model: Model, cfg: "TrainingSettings") -> float:
    """Peak of a rank: its states, its fullest moment, the reserve."""
    return sum(states(model, cfg).values()) + max(moments(model, cfg).values()) + RESERVE


def reload_bytes(model: Model, cfg: "RunSettings") -> float:
    """Bytes of an engine's GPU for a weight update, beside gpu_memory_utilization.

    vLLM keeps a layer's tensors uncut, for all ranks of tp, until all have come;
    then it makes this rank's part anew (model_loader/reload/layerwise.py). Tensors come in buckets.
    Those for shared GPUs lie in the host's memory.
    """
    layer = 2 * max(model.experts, model.biggest)
    part = layer / cfg.engine.tensor_parallel
    return part if cfg.gpu_share < 1 else layer + part + BUCKET_BYTES


def kv_bytes(model: Model, tp: int) -> int:
    """KV of one token on one GPU of an engine: layers x (key, value) x heads x width, bf16.

    vLLM gives a GPU at least one KV head, and a compressed KV (MLA) whole.
    """
    width = model.latent or 2 * max(1, model.kv_heads // tp) * model.head_dim
    return 2 * model.kv_layers * width


def kv_budget(model: Model, cfg: "RunSettings", gpu: float) -> float:
    """Bytes that an engine leaves for KV of a GPU of `gpu` bytes.

    gpu_memory_utilization of it, without its share of the bf16 weights and the reserve.
    """
    weights = 2 * model.params / cfg.engine.tensor_parallel
    return cfg.engine.arguments["gpu_memory_utilization"] * gpu - weights - RESERVE


def kv_tokens(model: Model, cfg: "RunSettings", gpu: float, length: float) -> int:
    """Tokens that an engine holds at once, of sequences of `length`: their KV and their states.

    While vLLM fills a new block of KV, it has a sequence's states twice; that is not counted.
    """
    tp = cfg.engine.tensor_parallel
    each = kv_bytes(model, tp) + model.state / tp / length
    return max(0, int(kv_budget(model, cfg, gpu) / max(each, 1)))


def host_bytes(model: Model, here: int, ranks: int) -> float:
    """CPU memory of a node with this number of ranks, while each reads its share in float32."""
    return 4 * model.params * here / ranks
