"""Adds low-rank adapters (LoRA) to linear layers, with the peft library.

    y = W x + (alpha / rank) B A x         A [rank, in], B [out, rank]: only these are trained

B starts at 0, so the first policy is the model itself. Engines compute with W + (alpha / rank) B A:
updates carry A and B (policy/sync/adapter_sync.py), exports the sum. With one alpha for all ranks,
the best learning rate hardly depends on the rank, and is ten times full training's ("LoRA Without
Regret", Thinking Machines 2025). Hu et al. 2021 (arXiv:2106.09685).
"""

import math
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import distribute_tensor
from transformers.pytorch_utils import Conv1D

from core.errors import InputError
from policy import Row

if TYPE_CHECKING:
    from peft.tuners.lora import LoraLayer
    from transformers import PreTrainedModel

    from policy.fsdp import FSDPPolicy
    from settings.network import PolicySettings

NAME = "default"  # peft's name for the adapter


def targets(lm: "PreTrainedModel", chosen: Sequence[str]) -> list[str]:
    """Returns the names of linear layers that get an adapter: the `chosen`, or all but the head.

    Layers are chosen by the last part of their names. Raises InputError if no layer has a chosen
    name.
    """
    kinds = nn.Linear | Conv1D
    head = lm.get_output_embeddings()
    linear = [n for n, m in lm.named_modules() if isinstance(m, kinds) and m is not head]
    leaves = dict.fromkeys(name.rpartition(".")[2] for name in linear)
    for leaf in chosen:
        if leaf not in leaves:
            raise InputError(
                f"policy.lora_targets = {tuple(chosen)}: no linear layer is called {leaf!r}, "
                f"expected some of {', '.join(leaves)}"
            )
    return [name for name in linear if not chosen or name.rpartition(".")[2] in chosen]


def check_adapters(lm: "PreTrainedModel", settings: "PolicySettings") -> None:
    """Raises InputError if no layer has the name of a target, or if the rank exceeds all layers."""
    names = targets(lm, settings.lora_targets)
    sizes = {name: tuple(lm.get_submodule(name).weight.shape) for name in names}
    widest = max(sizes, key=lambda name: min(sizes[name]))
    if settings.lora_rank > min(sizes[widest]):
        raise InputError(
            f"policy.lora_rank = {settings.lora_rank}: {widest} is {list(sizes[widest])}, "
            f"so no adapter has a rank above {min(sizes[widest])}"
        )


class Adapters:
    """The adapters of a model whose parameters may not have memory yet; empty if the rank is 0."""

    def __init__(self, lm: "PreTrainedModel", settings: "PolicySettings", trainable: bool = True):
        self.layers: dict[str, LoraLayer] = {}  # by the name of their weight in the checkpoint
        if not settings.lora_rank or not trainable:
            return
        from peft import LoraConfig, inject_adapter_in_model

        names = targets(lm, settings.lora_targets)
        self.scale = settings.lora_alpha / settings.lora_rank
        self.config = LoraConfig(
            r=settings.lora_rank,
            lora_alpha=settings.lora_alpha,
            target_modules=names,
            task_type="CAUSAL_LM",
        )
        inject_adapter_in_model(self.config, lm, low_cpu_mem_usage=True)
        # Checkpoints contain no adapters; `start` fills them.
        lm._keys_to_ignore_on_load_missing = {*(lm._keys_to_ignore_on_load_missing or ()), "lora_"}
        for name in names:
            self.layers[f"{name}.weight"] = lm.get_submodule(name)

    @property
    def renamed(self) -> dict[str, str]:
        """New names for the checkpoint's tensors, as from_pretrained's `key_mapping`."""
        leaves = "|".join(sorted({re.escape(name.split(".")[-2]) for name in self.layers}))
        kinds = ("weight", "bias") if leaves else ()
        return {rf"\b({leaves})\.{kind}$": rf"\1.base_layer.{kind}" for kind in kinds}

    @torch.no_grad()
    def start(self) -> None:
        """Draws each A from +- 1 / sqrt(in), the same on any number of ranks; sets each B to 0."""
        draw = torch.Generator().manual_seed(torch.initial_seed())
        for layer in self.layers.values():
            A = layer.lora_A[NAME].weight
            layer.lora_B[NAME].weight.zero_()
            whole = nn.init.kaiming_uniform_(torch.empty(A.shape), math.sqrt(5), generator=draw)
            A.copy_(distribute_tensor(whole, A.device_mesh, A.placements, src_data_rank=None))

    def weights(self, state: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yields the model's own weights in a state dict, under their names in the checkpoint."""
        for name, tensor in state.items():
            if ".lora_" not in name:
                yield name.replace(".base_layer.", "."), tensor

    def unmerged(self) -> dict[str, Tensor]:
        """Returns the whole adapters, under the names that peft uses in a file; collective."""
        found = {}
        for name, layer in self.layers.items():
            path = name.rpartition(".")[0]
            for part in ("lora_A", "lora_B"):
                weight = getattr(layer, part)[NAME].weight.detach()
                whole = weight.full_tensor().to("cpu", copy=True)
                found[f"base_model.model.{path}.{part}.weight"] = whole
        return found

    def write(self, folder: str, tensors: dict[str, Tensor], model: str) -> None:
        """Writes the tensors from `unmerged` in peft's format; `model` is the adapted model."""
        self.config.base_model_name_or_path = model
        self.config.inference_mode = True
        self.config.save_pretrained(folder)
        save_file(tensors, f"{folder}/adapter_model.safetensors", {"format": "pt"})

    def merged(self, name: str, weight: Tensor) -> Tensor:
        """Returns a weight with its adapter added, sharded like the weight; collective."""
        layer = self.layers.get(name)
        return weight + layer.get_delta_weight(NAME) if layer else weight

    def sides(self, name: str) -> tuple[Tensor, Tensor] | None:
        """Returns the two factors of a weight's adapter, without the scale; None if it has none.

        GPT-2's layers store their weights transposed.
        """
        layer = self.layers.get(name)
        if layer is None:
            return None
        A = layer.lora_A[NAME].weight.detach()
        B = layer.lora_B[NAME].weight.detach()
        return (A.T, B.T) if layer.fan_in_fan_out else (B, A)


class Base:
    """The base model under a policy's adapters, used as a reference; shares the policy's memory."""

    def __init__(self, policy: "FSDPPolicy"):
        self.policy = policy

    def logprobs(self, rows: Sequence[Row]) -> list[Tensor]:
        """Returns `Policy.logprobs` of the model as it was before training."""
        layers = self.policy.adapters.layers.values()
        try:
            for layer in layers:
                layer.set_scale(NAME, 0)
            return self.policy.logprobs(rows)
        finally:
            for layer in layers:
                layer.set_scale(NAME, 1)
