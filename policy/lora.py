"""Low-rank adapters (LoRA) on every linear layer but the head, by the library peft.

    y = W x + (ALPHA / rank) B A x         A [rank, in], B [out, rank]: they alone are trained

B starts at 0, so the first policy is the model itself. Engines get W + (ALPHA / rank) B A under the
checkpoint's names, and need to know nothing. ALPHA is fixed: then the best learning rate hardly
depends on the rank, and is ten times that of full training ("LoRA Without Regret", Thinking
Machines 2025). Hu et al. 2021 (arXiv:2106.09685).
"""

import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import distribute_tensor
from transformers.pytorch_utils import Conv1D

ALPHA = 32
NAME = "default"  # of the adapter, as peft calls it


def is_adapted(lm: Any, module: nn.Module) -> bool:
    """Whether a module of a model gets an adapter."""
    return isinstance(module, nn.Linear | Conv1D) and module is not lm.get_output_embeddings()


class Adapters:
    """The adapters of a model whose parameters need no memory yet; with rank 0 there are none."""

    def __init__(self, lm: Any, rank: int):
        self.layers: dict[str, Any] = {}  # by the name of their weight in the checkpoint
        if not rank:
            return
        from peft import LoraConfig, inject_adapter_in_model

        names = [name for name, module in lm.named_modules() if is_adapted(lm, module)]
        how = LoraConfig(r=rank, lora_alpha=ALPHA, target_modules=names)
        inject_adapter_in_model(how, lm, low_cpu_mem_usage=True)
        # No checkpoint has adapters: `start` fills them.
        lm._keys_to_ignore_on_load_missing = {*(lm._keys_to_ignore_on_load_missing or ()), "lora_"}
        for name in names:
            self.layers[f"{name}.weight"] = lm.get_submodule(name)

    @property
    def renamed(self) -> dict[str, str]:
        """Where tensors of the checkpoint belong, as `key_mapping` of from_pretrained."""
        leaves = "|".join(sorted({re.escape(name.split(".")[-2]) for name in self.layers}))
        kinds = ("weight", "bias") if leaves else ()
        return {rf"\b({leaves})\.{kind}$": rf"\1.base_layer.{kind}" for kind in kinds}

    @torch.no_grad()
    def start(self) -> None:
        """Draws A, uniform in +- 1 / sqrt(in), as whole matrices: alike on any number of ranks."""
        draw = torch.Generator().manual_seed(torch.initial_seed())
        for layer in self.layers.values():
            A = layer.lora_A[NAME].weight
            layer.lora_B[NAME].weight.zero_()
            whole = nn.init.kaiming_uniform_(torch.empty(A.shape), math.sqrt(5), generator=draw)
            A.copy_(distribute_tensor(whole, A.device_mesh, A.placements, src_data_rank=None))

    def weights(self, state: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """The model's own weights of a state dict, by their names in the checkpoint."""
        for name, tensor in state.items():
            if ".lora_" not in name:
                yield name.replace(".base_layer.", "."), tensor

    def merged(self, name: str, weight: Tensor) -> Tensor:
        """A weight as engines get it, sharded as it is; collective."""
        layer = self.layers.get(name)
        return weight + layer.get_delta_weight(NAME) if layer else weight


class Base:
    """The model below a policy's adapters, as a reference: its memory is that of the policy."""

    def __init__(self, policy: Any):
        self.policy = policy

    def logprobs(self, rows: Sequence[Any]) -> list[Tensor]:
        """Those of `Policy.logprobs`, of the model as it was before training."""
        layers = self.policy.adapters.layers.values()
        try:
            for layer in layers:
                layer.set_scale(NAME, 0)
            return self.policy.logprobs(rows)
        finally:
            for layer in layers:
                layer.set_scale(NAME, 1)
