"""What can be wrong between a model's folder and a configuration, found before any actor starts.

Only config.json and the headers of the *.safetensors files are read.
"""

import difflib
import re
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion

from envs.rows import load_tokenizer
from policy.megatron.families import FAMILIES, padded
from runtime.config import InputError

ASIDE = re.compile(r"mtp\.|.*rotary_emb\.inv_freq$")  # never trained, exported as they came


class Checkpoint:
    """The tensors of a folder's *.safetensors files, read by the row."""

    def __init__(self, folder: str):
        files = [safe_open(path, "pt") for path in sorted(Path(folder).glob("*.safetensors"))]
        self.files = {name: file for file in files for name in file.keys()}  # noqa: SIM118

    def shape(self, name: str) -> list[int]:
        """Of a tensor. Raises ValueError where there is none."""
        if name not in self.files:
            raise ValueError(f"the checkpoint has no tensor {name}")
        return self.files[name].get_slice(name).get_shape()

    def read(self, name: str, dim: int, start: int, stop: int) -> Tensor:
        """Rows (dim 0) or columns (dim 1) of a tensor; no more of it is read from disk."""
        cut = self.files[name].get_slice(name)
        return cut[:, start:stop] if dim else cut[start:stop]


# Fields of a config.json that change the network without changing its tensors.
FIXED = {"hidden_act": "silu", "mlp_hidden_act": "relu2", "mamba_hidden_act": "silu"}
FIXED |= {"use_sliding_window": False}


def check_megatron(cfg) -> None:
    """Raises InputError naming the tensor or the field, and what was expected."""
    hf = read_config(cfg)
    check_tensors(cfg.model, hf)
    words = len(load_tokenizer(cfg.model))
    if words > hf.vocab_size:
        told = f"its tokenizer has {words} tokens, its embedding {hf.vocab_size}"
        raise InputError(f"model = {cfg.model!r}: {told}")


def read_config(cfg):
    """The model's config.json. Raises InputError for a family or layout that cannot be trained."""
    hf = AutoConfig.from_pretrained(cfg.model)
    if hf.model_type not in FAMILIES:
        told = f"policy = 'megatron' knows {', '.join(FAMILIES)}, not {hf.model_type}"
        raise InputError(f"model = {cfg.model!r}: {told}")
    fixed = FIXED | ({"norm_topk_prob": True} if hf.model_type == "nemotron_h" else {})
    for name, value in fixed.items():
        if getattr(hf, name, value) != value:
            told = f"{name} = {getattr(hf, name)!r}, policy = 'megatron' trains {value!r} only"
            raise InputError(f"model = {cfg.model!r}: its config.json has {told}")
    check_layout(cfg, hf)
    return hf


def check_layout(cfg, hf) -> None:
    """What must divide what, with the nearest value that does."""
    layers = getattr(hf, "layers_block_type", None)
    depth = len(layers) if layers else 2 * hf.num_hidden_layers  # attention and MLP are two
    groups, tp, shared = hf.num_key_value_heads, cfg.tp, cfg.tp * cfg.cp
    rules = [
        ("tp", tp, hf.num_attention_heads, "num_attention_heads"),
        ("tp", tp, hf.intermediate_size, "intermediate_size"),
        ("pp", cfg.pp, depth, "the number of layers, attention and MLP counted as two"),
    ]
    rules += [("tp", tp, padded(hf.vocab_size), "vocab_size, padded to a multiple of 128")]
    experts = getattr(hf, "num_local_experts", None) or getattr(hf, "num_experts", 0)
    if cfg.replay_routing and not experts:
        raise InputError(f"replay_routing = True: {hf.model_type} has no experts, expected False")
    if cfg.ep > 1 and not experts:
        raise InputError(f"ep = {cfg.ep}: {hf.model_type} has no experts, expected 1")
    rules += [("ep", cfg.ep, experts, "the number of experts")] if experts else []
    if layers and "linear_attention" in layers:
        rules += [("tp", tp, hf.n_groups, "n_groups of Mamba")]
        rules += [("tp * cp", shared, hf.mamba_num_heads, "mamba_num_heads")]
    for field, value, whole, what in rules:
        if whole % value:
            near = min(
                (n for n in range(1, whole + 1) if not whole % n), key=lambda n: abs(n - value)
            )
            raise InputError(f"{field} = {value} does not divide {what} = {whole}: try {near}")
    if groups % tp and tp % groups:
        raise InputError(f"tp = {tp} and num_key_value_heads = {groups}: one must divide the other")


def check_tensors(folder: str, hf) -> None:
    """The tensors of a checkpoint against those of its architecture, by name and shape."""
    with torch.device("meta"):
        lm = AutoModelForCausalLM.from_config(hf)
    state = revert_weight_conversion(lm, dict(lm.state_dict()))
    expected = {name: list(tensor.shape) for name, tensor in state.items()}
    files = Checkpoint(folder)
    found = files.files
    if not found:
        raise InputError(f"model = {folder!r}: expected *.safetensors files, found none")
    tied = set(lm.all_tied_weights_keys) if hf.tie_word_embeddings else set()
    for name in sorted(expected.keys() - found.keys() - tied):
        close = difflib.get_close_matches(name, found, 1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise InputError(f"{folder}: no tensor {name}, expected by {hf.model_type}{hint}")
    for name in sorted(found.keys() - expected.keys() - tied):
        if not ASIDE.match(name):
            raise InputError(f"{folder}: {name} is no tensor of {hf.model_type}")
    for name, shape in expected.items():
        if name in found and files.shape(name) != shape:
            raise InputError(f"{folder}: {name} is {files.shape(name)}, expected {shape}")
