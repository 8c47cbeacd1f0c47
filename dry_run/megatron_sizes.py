"""Computes the bytes that a policy/megatron rank sends, and its peak memory, from config.json.

Axes:  T positions of a packed row   H hidden size   Q, K total width of query heads, of key heads
       F width inside a feed-forward layer   k experts per token   V padded vocabulary
       C tokens whose logits exist at once
       b bytes per weight and per activation: 2 on a GPU; 4 on a CPU (float32)

For a tensor of S bytes over n ranks, ring algorithms send S (n - 1) / n in an all-gather or a
reduce-scatter, and twice that in an all-reduce. In an all-to-all, a rank sends what belongs to
other ranks. Tokens are assumed to spread evenly over experts. On a CPU, the bytes sent and the peak
that bench/megatron_layouts.py measures are within a tenth of these.

Not counted: forward passes other than the training one (a KL reference, logprobs before several
updates); values that do not grow with H, such as a router's; Mamba's activations other than its
projections'. The layers are torch's: Transformer Engine keeps less, and with cp its backward sends
keys and values once more.
"""

import dataclasses
import functools
import math
from typing import TYPE_CHECKING, NamedTuple

from policy import logprobs
from policy.gpu_memory import RESERVE, head_bytes, longest_row
from policy.megatron.families import padded, pattern
from policy.megatron.model_check import read_config
from policy.model_shape import field
from policy.sync.weight_sync import BUCKET_BYTES

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from settings.config import TrainingSettings
    from settings.network import PolicySettings


class Shape:
    """Unsplit widths of a model's layers; 0 for a layer that it lacks. `hf` is its config.json."""

    def __init__(self, hf: "PretrainedConfig"):
        get = functools.partial(field, hf)
        self.layers = pattern(hf)  # M Mamba-2, * attention, - MLP, E experts
        self.hidden = hf.hidden_size
        self.ffn = get("intermediate_size")
        self.vocab = padded(hf.vocab_size)
        self.tied = hf.tie_word_embeddings
        self.bias = hf.model_type == "qwen2"
        self.qk_norm = hf.model_type in ("qwen3", "qwen3_moe")
        # silu(gate) * up and rotary angles, or relu(up)^2 and attention without position embeddings
        self.gated = self.rotary = hf.model_type != "nemotron_h"
        self.head_dim = get("head_dim") or hf.hidden_size // hf.num_attention_heads
        self.query = hf.num_attention_heads * self.head_dim
        self.key = hf.num_key_value_heads * self.head_dim
        self.experts = get("num_experts", "n_routed_experts")
        self.chosen = get("num_experts_per_tok")  # experts that a token uses
        self.expert_ffn = get("moe_intermediate_size")
        self.shared_ffn = get("moe_shared_expert_intermediate_size")
        self.latent = get("moe_latent_size")
        self.seen = self.latent or self.hidden  # width of an expert's input
        self.mamba_heads = get("mamba_num_heads")
        self.groups = get("n_groups")
        self.mamba = self.mamba_heads * get("mamba_head_dim")
        self.state = get("ssm_state_size")
        # The input projection's outputs: gate, x, B, C, dt.
        self.mamba_in = 2 * (self.mamba + self.groups * self.state) + self.mamba_heads


def read_shape(model: str, settings: "PolicySettings") -> Shape:
    """Reads the shape of the model in a folder.

    Raises InputError for a model or a layout that cannot be trained under Megatron.
    """
    return Shape(read_config(model, settings))


# --- parameters -----------------------------------------------------------------------------------


class LayerParams(NamedTuple):
    """A layer's parameters."""

    cut: int  # parameters split over tp
    whole: int  # parameters on every rank
    routed: int  # parameters split over ep
    frozen: int  # frozen parameters, on every rank


class RankParams(NamedTuple):
    """A rank's parameters."""

    shared: float  # all other parameters
    routed: float  # parameters of experts
    frozen: float


class Spread(NamedTuple):
    """Numbers of ranks over which the optimizer state is spread."""

    shared: int
    routed: int  # ranks for an expert


def layer_params(s: Shape, kind: str) -> LayerParams:
    """Counts the parameters of a layer of this kind."""
    H = s.hidden
    matrices = 3 if s.gated else 2
    if kind == "*":
        qkv = s.query + 2 * s.key
        cut = qkv * (H + s.bias) + s.query * H
        return LayerParams(cut, H + 2 * s.head_dim * s.qk_norm, 0, 0)
    if kind == "-":
        return LayerParams(matrices * H * s.ffn, H, 0, 0)
    if kind == "E":
        routed = s.experts * matrices * s.seen * s.expert_ffn
        cut = matrices * H * s.shared_ffn
        return LayerParams(cut, H + 2 * H * s.latent, routed, s.experts * H)
    conv = s.mamba + 2 * s.groups * s.state  # 4 taps and a bias
    vectors = 5 * conv + 3 * s.mamba_heads + s.mamba
    return LayerParams(H * (s.mamba_in + s.mamba) + vectors, H, 0, 0)


def stage_layers(s: Shape, layout: "PolicySettings", stage: int) -> str:
    """Returns the layers of a pipeline stage."""
    depth = len(s.layers) // layout.pp
    return s.layers[stage * depth : (stage + 1) * depth]


def rank_params(s: Shape, layout: "PolicySettings", stage: int) -> RankParams:
    """Counts the parameters of a rank of a stage.

    Tied weights exist twice if the first and the last stage differ.
    """
    each = [layer_params(s, kind) for kind in stage_layers(s, layout, stage)]
    cut = sum(params.cut for params in each)
    whole = sum(params.whole for params in each)
    routed = sum(params.routed for params in each)
    frozen = sum(params.frozen for params in each)
    last = stage == layout.pp - 1
    tables = (stage == 0) + last - (s.tied and layout.pp == 1)
    shared = (cut + tables * s.vocab * s.hidden) / layout.tp + whole + last * s.hidden
    return RankParams(shared, routed / layout.ep, frozen)


def optimizer_spread(layout: "PolicySettings") -> Spread:
    """Returns the numbers of ranks that share the optimizer state of a tensor and of an expert."""
    return Spread(layout.replicas * layout.cp, layout.ranks // layout.pp // layout.ep)


def gradient_bytes(layout: "PolicySettings", b: int = 2) -> int:
    """Returns the bytes per gradient value while it is summed over rows and ranks."""
    return 4 if layout.megatron.ddp.get("grad_reduce_in_fp32", True) else b


def state_bytes(s: Shape, cfg: "TrainingSettings", stage: int, b: int = 2) -> dict[str, float]:
    """Returns the bytes that a rank always holds.

    The optimizer has moments and, for bf16 weights, float32 main parameters.
    """
    params = rank_params(s, cfg.policy, stage)
    spread = optimizer_spread(cfg.policy)
    weights = b * sum(params)
    wide = gradient_bytes(cfg.policy, b)
    each = 12 if b < 4 else 8
    held = {
        "weights": weights,
        f"gradients, {'float32' if wide == 4 else 'bf16'}": wide * (params.shared + params.routed),
        "optimizer": each * (params.shared / spread.shared + params.routed / spread.routed),
    }
    return held | ({"reference of the KL": weights} if cfg.has_reference else {})


# --- activations ----------------------------------------------------------------------------------


def key_width(s: Shape, layout: "PolicySettings") -> float:
    """Returns K of a tensor parallel rank: at least one head."""
    return max(s.key / layout.tp, s.head_dim)


def saved(s: Shape, layout: "PolicySettings", kind: str, b: int = 2) -> float:
    """Counts the values that a layer saves for its backward pass, per position of a rank.

    Its input is not counted. A feed-forward layer saves 5 F: gate and up, silu(gate), up + 0, their
    product; an expert also saves the product scaled by its router. On a CPU, RMSNorm saves its
    normalised output, and attention joins the outputs of single sequences.
    """
    tp = layout.tp
    cpu = b == 4
    inside = 5 if s.gated else 2
    norm = (1 + cpu) * s.hidden / tp
    if kind == "*":
        Q = s.query / tp
        K = key_width(s, layout)
        norms = s.qk_norm * (Q + cpu * (Q + K))
        # q and k are copies, with rotary angles for both; all ranks' k and v are gathered.
        keys = 2 * layout.cp * K if layout.cp > 1 else s.rotary * K
        return norm + Q + 2 * K + norms + Q + keys + 4 * s.head_dim * s.rotary + (1 + cpu) * Q
    if kind == "-":
        return norm + inside * s.ffn / tp
    if kind == "E":
        routed = s.chosen * (s.seen + (inside + 1) * s.expert_ffn)
        return norm + (routed + inside * s.shared_ffn + s.latent) / tp
    return norm + (s.mamba_in + s.mamba) / tp


def at_work(s: Shape, layout: "PolicySettings", kind: str) -> float:
    """Counts the values per token position at a layer's peak, in addition to the saved ones.

    Experts peak in the forward pass: they hold their tokens in the order of the row and after the
    all-to-all, and their outputs in both orders. The other layers peak in the backward pass, due to
    gradients: twice the inside of the feed-forward layer (a third replaces the product), or q, k, v
    and the output; then the layer's output and input.
    """
    H = s.hidden
    tp = layout.tp
    if kind == "E":
        return ((3 + (layout.ep > 1)) * s.chosen * s.seen + H) / tp
    if kind == "*":
        return (2 * s.query + 2 * H) / tp + 2 * key_width(s, layout)
    return ((2 * s.ffn if kind == "-" else s.mamba_in + s.mamba) + 2 * H) / tp


def kept_bytes(s: Shape, cfg: "TrainingSettings", stage: int, b: int = 2) -> float:
    """Returns the bytes that a stage's layers keep for the backward pass of rows in the pipeline.

    These are each layer's input, the stage's output and, without checkpointing, what `saved`
    counts.
    """
    layout = cfg.policy
    layers = stage_layers(s, layout, stage)
    last = stage == layout.pp - 1
    each = (len(layers) + (not last)) * s.hidden / layout.tp
    if not layout.recomputes:
        each += sum(saved(s, layout, kind, b) for kind in layers)
    return b * longest_row(cfg) / layout.cp * (layout.pp - stage) * each


def moments(s: Shape, cfg: "TrainingSettings", stage: int, b: int = 2) -> dict[str, float]:
    """Returns the bytes held in addition to the states, at each moment that may be the peak.

    With tp, all gathers before a matrix share one buffer, T H. A tied head's gradient waits for the
    embedding's. torch's AdamW takes all its square roots at once.
    """
    layout = cfg.policy
    H = s.hidden
    V = s.vocab / layout.tp
    places = longest_row(cfg) / layout.cp
    spread = optimizer_spread(layout)
    params = rank_params(s, layout, stage)
    kept = kept_bytes(s, cfg, stage, b) + b * places * H * (layout.tp > 1)
    again = layout.recomputes
    kinds = set(stage_layers(s, layout, stage))
    layer = max(again * saved(s, layout, k, b) + at_work(s, layout, k) for k in kinds)
    tied = b * V * H if s.tied and layout.pp == 1 else 0
    found = {
        "in a layer": kept + b * places * layer + tied,
        "in the update": 4 * (params.shared / spread.shared + params.routed / spread.routed),
    }
    if stage < layout.pp - 1:
        return found
    # The last norm's input and what it saves; the trained positions, gathered, and their gradient.
    hidden = b * places * H * ((1 + (b == 4)) / layout.tp + 2)
    return {"at the head": kept + hidden + head_bytes(logprobs.CHUNK, V, H, b)} | found


def stage_bytes(s: Shape, cfg: "TrainingSettings", stage: int, b: int = 2) -> float:
    """Returns the peak bytes of a rank of a stage: its states and its fullest moment."""
    return sum(state_bytes(s, cfg, stage, b).values()) + max(moments(s, cfg, stage, b).values())


def fullest_stage(s: Shape, cfg: "TrainingSettings", b: int = 2) -> int:
    """Finds the stage with the fullest ranks: the first keeps most rows, the last has the head."""
    return max(range(cfg.policy.pp), key=lambda stage: stage_bytes(s, cfg, stage, b))


def sending_bytes(s: Shape) -> float:
    """Returns the bytes needed to send or export weights: the largest tensor twice, two buckets.

    Rank 0 holds the whole tensor twice in bf16: as shards or before it is split, and once joined.
    """
    largest = 2 * s.hidden * max(s.vocab, 2 * s.ffn if s.gated else s.ffn)
    return 2 * (largest + max(BUCKET_BYTES, largest))


def trainer_bytes(s: Shape, cfg: "TrainingSettings") -> float:
    """Returns the peak bytes of the fullest rank on a GPU, with the reserve."""
    stage = fullest_stage(s, cfg)
    sending = sum(state_bytes(s, cfg, stage).values()) + sending_bytes(s)
    return max(stage_bytes(s, cfg, stage), sending) + RESERVE


# --- communication --------------------------------------------------------------------------------


def ring(n: int) -> float:
    """Returns what share of a tensor each of n ranks sends in an all-gather or reduce-scatter."""
    return (n - 1) / n


def token_bytes(s: Shape, layout: "PolicySettings", b: int = 2) -> dict[str, float]:
    """Returns the bytes that a rank sends per position of its rows, by axis; stages are averaged.

    Forward, backward, and forward again with checkpointing. tp: a layer's first matrix gathers its
    input (again in backward, and scatters its gradient), its second scatters its output (and
    gathers its gradient); embedding and head do one of each. pp: activations forward, gradients
    back. ep: tokens to their experts and back, with a float32 weight.
    """
    H = s.hidden
    K = key_width(s, layout)
    tp = layout.tp
    cp = layout.cp
    pp = layout.pp
    again = layout.recomputes
    count = s.layers.count
    pairs = count("*") + count("-") + count("M") + count("E") * (s.shared_ffn > 0)
    split = tp * s.head_dim > s.key  # if so, all slices of q, k, v are gathered
    qkv = (2 + again) * count("*") * split * (s.query + 2 * s.key)
    gathered = ((5 + 2 * again) * pairs + 4) * H + qkv
    keys = (2 + again) * count("*") * 2 * K
    routed = (2 + again) * count("E") * s.chosen * (2 * b * s.seen + 4)
    return {
        # Also two float32 numbers per token from every slice of the vocabulary.
        "tp": ring(tp) * (b * gathered + 8 * tp) / (cp * pp),
        # Also the row's float32 logprobs, all-reduced.
        "cp": ring(cp) * (b * keys + 8) / pp + mamba_exchange(s, layout, b),
        "pp": 2 * ring(pp) * b * H / (tp * cp),
        "ep": ring(layout.ep) * routed / (tp * cp * pp),
    }


def mamba_exchange(s: Shape, layout: "PolicySettings", b: int = 2) -> float:
    """Returns the bytes per position that a rank's Mamba all-to-alls over cp send.

    Gate, x, B, C and dt are exchanged: all positions of some heads for some positions of all
    heads; then the output is sent back.
    """
    ranks = layout.tp * layout.cp
    groups = max(s.groups, ranks) * s.state
    each = (3 * s.mamba + 2 * groups + s.mamba_heads) / ranks
    passes = 2 + layout.recomputes
    return ring(layout.cp) * b * passes * s.layers.count("M") * each / layout.pp


class Gathered(NamedTuple):
    """Bytes and messages that trainer rank 0 receives before it can send the weights on."""

    size: float  # bytes
    messages: int  # minimum number of messages


def gathered(s: Shape, layout: "PolicySettings") -> Gathered:
    """Counts the bf16 weights that rank 0 does not own: other ranks' experts and later stages.

    An owner sends a layer's experts, or the rest of its stage, in messages of a bucket's size.
    """
    size = 0.0
    messages = 0
    for stage in range(layout.pp):
        experts = [layer_params(s, kind).routed for kind in stage_layers(s, layout, stage)]
        owners = layout.ep - (stage == 0)
        for each in (2 * routed / layout.ep for routed in experts):
            size += owners * each
            messages += owners * math.ceil(each / BUCKET_BYTES)
        if stage > 0:
            # One rank per stage.
            whole = dataclasses.replace(layout, ranks=layout.pp, tp=1, cp=1, ep=1)
            shared, _, frozen = rank_params(s, whole, stage)
            rest = 2 * (shared + frozen - s.tied * (stage == layout.pp - 1) * s.vocab * s.hidden)
            size += rest
            messages += math.ceil(rest / BUCKET_BYTES)
    return Gathered(size, messages)


def step_bytes(s: Shape, layout: "PolicySettings", b: int = 2) -> dict[str, float]:
    """Returns the bytes that a rank sends per update, averaged over the stages.

    Gradients: a reduce-scatter over the ranks that share the weights, an all-reduce of norms over
    tp and of a tied head between first and last stage. Parameters: an all-gather; Megatron-Core
    0.16.1 has a separate optimizer for experts, and each of the two gathers all parameters.
    """
    spread = optimizer_spread(layout)
    each = [rank_params(s, layout, stage) for stage in range(layout.pp)]
    shared = sum(params.shared for params in each) / layout.pp
    routed = sum(params.routed for params in each) / layout.pp
    scattered = ring(spread.shared) * shared + ring(spread.routed) * routed
    whole = sum(layer_params(s, kind).whole for kind in s.layers) + s.hidden
    ends = 2 * s.vocab * s.hidden / layout.tp if s.tied and layout.pp > 1 else 0
    reduced = 2 * (ring(layout.tp) * whole + ring(2) * ends) / layout.pp
    optimizers = 1 + ("E" in s.layers)
    wide = gradient_bytes(layout, b)
    return {"gradients": wide * (scattered + reduced), "parameters": b * optimizers * scattered}
