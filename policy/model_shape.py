"""A model's architecture without its weights: the modules, and their sizes."""

import functools
import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from core.errors import InputError
from policy.lora import targets

# Layer types of transformers that keep no KV; of an unknown one, KV is counted.
WITHOUT_KV = {"linear_attention", "mamba", "conv", "moe", "mlp", "sparse", "dense"}


def build(folder: str) -> PreTrainedModel:
    """The model of a folder's config.json, without storage on the meta device.

    Raises InputError where transformers makes no language model of it.
    """
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        with torch.device("meta"):
            # Another dtype would be the default of all threads meanwhile.
            return AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    except Exception as error:  # transformers raises whatever it stumbles over
        why = f"{type(error).__name__}: {error}".splitlines()[0]
        raise InputError(f"model = {folder!r}: config.json describes no model: {why}") from None


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
    tensors: int  # of a weight update, of each expert its own
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

    def flops(self, tokens: float, keys: float, passes: int, frozen: bool) -> float:
        """FLOPs of passes over tokens which meet `keys` keys in all: 2 N + 4 Q keys of each layer.

        N: active parameters without the lookup. Forward is a pass, backward two, of which frozen
        weights need one. Kaplan et al. 2020 (arXiv:2001.08361), section 2.1.
        """
        of_weights = (passes - frozen) * 2 * (self.active - self.embedding) * tokens
        return of_weights + passes * 4 * self.heads * self.head_dim * self.kv_layers * keys


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
    """Tokens of a sequence at which attention costs as many FLOPs as the weights do.

    One of n tokens meets n^2 / 2 keys, so it costs in proportion to n (n + even_length). Without a
    config.json it is 0: attention alone counts. Raises InputError where that describes no model.
    """
    if not (Path(folder) / "config.json").is_file():
        return 0
    model = read_model(folder)
    return round(2 * model.flops(1, 0, 3, frozen) / max(1, model.flops(0, 1, 3, frozen)))


def adapted(lm: Any) -> dict[str, int]:
    """Inputs and outputs of the linear layers but the head, by the last part of their names."""
    found: dict[str, int] = {}
    for name in targets(lm, ()):
        leaf = name.rpartition(".")[2]
        found[leaf] = found.get(leaf, 0) + sum(lm.get_submodule(name).weight.shape)
    return found


def routed(sizes: dict[str, int]) -> int:
    """Parameters of routed experts, of all by name."""
    return sum(size for name, size in sizes.items() if ".experts." in name)


def sent(name: str, parameter: Any) -> int:
    """Tensors that a checkpoint has of a parameter: transformers stacks a layer's experts."""
    if ".experts." not in name or parameter.dim() < 3:
        return 1
    return len(parameter) * (2 if "gate_up" in name else 1)


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
