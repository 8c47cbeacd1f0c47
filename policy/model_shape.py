"""Reads a model's architecture, its modules and their sizes, without its weights."""

import functools
import itertools
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from core.errors import InputError, brief
from policy.lora import targets

# transformers' layer types that keep no KV; for an unknown type, KV is counted.
WITHOUT_KV = {"linear_attention", "mamba", "conv", "moe", "mlp", "sparse", "dense"}


def build(folder: str) -> PreTrainedModel:
    """Builds the model of a folder's config.json on the meta device, without storage.

    Raises InputError if transformers cannot build a language model from it.
    """
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        with torch.device("meta"):
            # Any other dtype would become the default of all threads during the call.
            return AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    except Exception as error:  # transformers may raise anything
        raise InputError(
            f"model = {folder!r}: config.json describes no model: {brief(error)}"
        ) from None


@dataclass(frozen=True)
class Model:
    """Sizes of a causal LM. Counts are numbers of parameters, with tied ones counted once."""

    name: str
    params: int
    routed: int  # parameters in routed experts
    expert_share: float  # share of the routed experts that one token uses
    embedding: int  # parameters that are only looked up; 0 if the head is tied to the embedding
    root: int  # parameters outside the decoder layers
    layer: int  # parameters in the largest decoder layer
    experts: int  # routed parameters in the layer that has the most
    biggest: int  # parameters in the largest tensor
    tensors: int  # tensors in a weight update; those of each expert are counted separately
    linear: dict[str, int]  # parameters of adapters of rank 1, by the last part of layers' names
    layers: int
    kv_layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    latent: int  # width of a compressed KV (MLA), which all heads share; 0: not compressed
    state: int  # bytes of Mamba state that an engine keeps for a sequence of any length
    ffn: int  # bytes per token that a feed-forward layer saves for backward, in bf16
    vocab: int

    @property
    def active(self) -> float:
        """Parameters that one token uses, embedding and head included."""
        return self.params - self.routed * (1 - self.expert_share)

    def flops(self, tokens: float, keys: float, passes: int, frozen: bool) -> float:
        """Returns the FLOPs of passes over tokens that attend to `keys` keys in total.

        A pass takes 2 N per token and 4 Q per key and layer. N is the number of active parameters
        without the lookup, Q the width of all query heads. Forward is one pass, backward two, of
        which frozen weights need one. Kaplan et al. 2020 (arXiv:2001.08361), section 2.1.
        """
        of_weights = (passes - frozen) * 2 * (self.active - self.embedding) * tokens
        return of_weights + passes * 4 * self.heads * self.head_dim * self.kv_layers * keys


def read_model(folder: str) -> Model:
    """Reads the sizes of a folder's model. Raises InputError if config.json describes no model."""
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
    heads = get("num_attention_heads", default=1)
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
        tensors=sum(itertools.starmap(sent, lm.named_parameters())),
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


@functools.lru_cache
def even_length(folder: str, frozen: bool) -> int:
    """Returns the length in tokens at which attention costs as many FLOPs as the weights.

    A sequence of n tokens attends to n^2 / 2 keys, so its cost is proportional to
    n (n + even_length). Without a config.json it is 0, so that only attention counts. Raises
    InputError if config.json does not describe a model.
    """
    if not (Path(folder) / "config.json").is_file():
        return 0
    model = read_model(folder)
    return round(2 * model.flops(1, 0, 3, frozen) / max(1, model.flops(0, 1, 3, frozen)))


def adapted(lm: PreTrainedModel) -> dict[str, int]:
    """Sums inputs and outputs of linear layers except the head, by the last part of layer names."""
    found: dict[str, int] = {}
    for name in targets(lm, ()):
        leaf = name.rpartition(".")[2]
        found[leaf] = found.get(leaf, 0) + sum(lm.get_submodule(name).weight.shape)
    return found


def routed(sizes: dict[str, int]) -> int:
    """Counts the parameters of routed experts, given the size of each parameter by name."""
    return sum(size for name, size in sizes.items() if ".experts." in name)


def sent(name: str, parameter: Tensor) -> int:
    """Counts a parameter's tensors in a checkpoint: transformers stacks a layer's experts."""
    if ".experts." not in name or parameter.dim() < 3:
        return 1
    return len(parameter) * (2 if "gate_up" in name else 1)


def field(config: PretrainedConfig, *names: str, default: int = 0) -> int:
    """Returns the first of these config.json fields that is set and not 0."""
    for name in names:
        if value := getattr(config, name, None):
            return value
    return default


def mamba_bytes(config: PretrainedConfig) -> int:
    """Returns the bytes that a Mamba-2 layer keeps per sequence.

    These are its state, float32 [heads, width, state], and the bf16 inputs of its convolution: x, B
    and C.
    """
    get = functools.partial(field, config)
    heads = get("mamba_num_heads") * get("mamba_head_dim")
    convolved = heads + 2 * get("n_groups") * get("ssm_state_size")
    return 4 * heads * get("ssm_state_size") + 2 * (get("conv_kernel") - 1) * convolved


def feed_forward_bytes(hidden: int, config: PretrainedConfig) -> int:
    """Returns the bytes per token that `down(silu(gate) * up)` saves for its backward pass.

    These are four bf16 tensors of the inner width. Each of a token's experts also copies its input
    and its output.
    """
    get = functools.partial(field, config)
    inside = get("intermediate_size")
    if not get("num_experts", "n_routed_experts", "num_local_experts"):
        return 8 * inside
    inside = get("moe_intermediate_size", default=inside)
    shared = get("shared_expert_intermediate_size", default=get("n_shared_experts") * inside)
    return get("num_experts_per_tok") * (8 * inside + 4 * hidden) + 8 * shared
