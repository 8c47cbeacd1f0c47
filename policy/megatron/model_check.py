"""Compares a model's folder with its settings, before any actor starts.

Only config.json and the headers of the *.safetensors files are read.
"""

import difflib
import re
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig
from transformers.core_model_loading import revert_weight_conversion

from core.errors import InputError
from policy.finite_weights import refuse_infinite
from policy.megatron.families import FAMILIES, padded
from rollout.messages import load_tokenizer

if TYPE_CHECKING:
    from settings.network import PolicySettings

ASIDE = re.compile(r"mtp\.|.*rotary_emb\.inv_freq$")  # never trained, exported unchanged


class Checkpoint:
    """The tensors of a folder's *.safetensors files, read row by row."""

    def __init__(self, folder: str):
        self.folder = folder
        files = [safe_open(path, "pt") for path in sorted(Path(folder).glob("*.safetensors"))]
        self.files = {name: file for file in files for name in file.keys()}  # noqa: SIM118

    def shape(self, name: str) -> list[int]:
        """Returns the shape of a tensor. Raises ValueError if the checkpoint lacks it."""
        if name not in self.files:
            raise ValueError(f"the checkpoint has no tensor {name}")
        return self.files[name].get_slice(name).get_shape()

    def read(self, name: str, dim: int, start: int, stop: int) -> Tensor:
        """Reads rows (dim 0) or columns (dim 1) of a tensor, and nothing else of it from disk.

        Raises ValueError if a number in them is not finite.
        """
        cut = self.files[name].get_slice(name)
        found = cut[:, start:stop] if dim else cut[start:stop]
        refuse_infinite(name, found, self.folder)
        return found


# Fields of a config.json that change the network without changing its tensors.
FIXED = {
    "hidden_act": "silu",
    "mlp_hidden_act": "relu2",
    "mamba_hidden_act": "silu",
    "use_sliding_window": False,
}
NEMOTRON_H = {
    "norm_topk_prob": True,
    "residual_in_fp32": False,
    "layer_norm_epsilon": 1e-5,  # as in the norm inside Megatron's Mamba layers
}


def check_megatron(model: str, settings: "PolicySettings") -> None:
    """Checks a model's folder against the settings.

    Raises InputError naming the tensor or the field, and what was expected.
    """
    hf = read_config(model, settings)
    check_tensors(model, hf)
    words = len(load_tokenizer(model))
    if words > hf.vocab_size:
        raise InputError(
            f"model = {model!r}: its tokenizer has {words} tokens, but its embedding has "
            f"{hf.vocab_size}"
        )


def read_config(model: str, settings: "PolicySettings") -> PretrainedConfig:
    """Reads config.json. Raises InputError for a family or a layout that cannot be trained."""
    hf = AutoConfig.from_pretrained(model)
    if hf.model_type not in FAMILIES:
        raise InputError(
            f"model = {model!r}: policy.kind = 'megatron' supports {', '.join(FAMILIES)}, "
            f"not {hf.model_type}"
        )
    fixed = FIXED | (NEMOTRON_H if hf.model_type == "nemotron_h" else {})
    for name, value in fixed.items():
        if getattr(hf, name, value) != value:
            raise InputError(
                f"model = {model!r}: its config.json has {name} = {getattr(hf, name)!r}, "
                f"but policy.kind = 'megatron' trains only {value!r}"
            )
    check_layout(settings, hf)
    return hf


def check_kernels(model: str) -> None:
    """Raises InputError if a kernel library is missing; tests/cpu stands in for such libraries."""
    hf = AutoConfig.from_pretrained(model)
    kernels = ["transformer_engine"]
    if hf.model_type == "nemotron_h" and torch.cuda.is_available():
        kernels += ["mamba_ssm", "causal_conv1d"]
    for name in kernels:
        if not find_spec(name):
            raise InputError(
                f"policy.kind = 'megatron' needs {name}, which is missing: "
                "run bash launch/setup.sh megatron; on a CPU, put tests/cpu on PYTHONPATH"
            )


class Divisor(NamedTuple):
    """A setting that must divide one of the model's sizes."""

    field: str
    value: int
    size: int
    what: str  # the size's name


def check_layout(settings: "PolicySettings", hf: PretrainedConfig) -> None:
    """Checks all divisors of a layout. Raises InputError, suggesting the nearest that divides."""
    experts = getattr(hf, "num_local_experts", 0) or getattr(hf, "num_experts", 0) or 0
    if settings.replay_routing and not experts:
        raise InputError(
            f"policy.replay_routing = True: {hf.model_type} has no experts, expected False"
        )
    if settings.ep > 1 and not experts:
        raise InputError(f"policy.ep = {settings.ep}: {hf.model_type} has no experts, expected 1")
    for rule in divisors(settings, hf, experts):
        if rule.size % rule.value:
            divide = (n for n in range(1, rule.size + 1) if rule.size % n == 0)
            near = min(divide, key=lambda n: abs(n - rule.value))
            raise InputError(
                f"{rule.field} = {rule.value} does not divide {rule.what} = {rule.size}: try {near}"
            )
    pairs = [("policy.tp", settings.tp, "num_key_value_heads", hf.num_key_value_heads)]
    if has_mamba(hf):
        groups = hf.n_groups // settings.tp
        pairs.append(("policy.cp", settings.cp, "n_groups of Mamba / policy.tp", groups))
    for field, value, what, size in pairs:
        if size % value and value % size:
            raise InputError(f"{field} = {value} and {what} = {size}: one must divide the other")


def has_mamba(hf: PretrainedConfig) -> bool:
    """Returns True if a model has Mamba layers."""
    return "linear_attention" in (getattr(hf, "layers_block_type", None) or ())


def divisors(settings: "PolicySettings", hf: PretrainedConfig, experts: int) -> list[Divisor]:
    """Returns the divisors that a layout must satisfy, in the order of checking."""
    tp = settings.tp
    layers = getattr(hf, "layers_block_type", None)
    depth = len(layers) if layers else 2 * hf.num_hidden_layers  # attention and MLP count as two
    counted = "the number of layers, attention and MLP counted as two"
    words = "vocab_size, padded to a multiple of 128"
    rules = [
        Divisor("policy.tp", tp, hf.num_attention_heads, "num_attention_heads"),
        Divisor("policy.tp", tp, hf.intermediate_size, "intermediate_size"),
        Divisor("policy.pp", settings.pp, depth, counted),
        Divisor("policy.tp", tp, padded(hf.vocab_size), words),
    ]
    if experts:
        rules.append(Divisor("policy.ep", settings.ep, experts, "the number of experts"))
    if has_mamba(hf):
        heads = hf.mamba_num_heads
        rules.append(Divisor("policy.tp", tp, hf.n_groups, "n_groups of Mamba"))
        rules.append(Divisor("policy.tp * policy.cp", tp * settings.cp, heads, "mamba_num_heads"))
    return rules


def check_tensors(folder: str, hf: PretrainedConfig) -> None:
    """Compares a checkpoint's tensors with its architecture's, by name and shape.

    Raises InputError naming the first wrong tensor.
    """
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
            raise InputError(f"{folder}: {name} is not a tensor of {hf.model_type}")
    for name, shape in expected.items():
        if name in found and files.shape(name) != shape:
            raise InputError(f"{folder}: {name} is {files.shape(name)}, expected {shape}")
