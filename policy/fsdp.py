"""Trains any Hugging Face causal language model under FSDP2.

Axes:  T tokens of a packed row   N of them trained   V vocabulary   H hidden size

A packed row is several sequences end to end: `tokens_T`, `positions_T` (from 0 in each sequence,
which keeps them apart) and `mask_T` (the tokens that the policy sampled). Only those N tokens reach
the LM head, in chunks: no N x V tensor ever exists. Gradients are summed over ranks, not averaged:
the loss divides once, by the token count of the whole batch.

The model is built without memory, sharded, and then filled: each rank reads its own rows of every
checkpoint tensor.
"""

import copy
import math
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import SimpleNamespace as Packed
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint_io
from torch import Tensor, nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from policy import AnyRow, LossFn, Row, Stats, WeightMeta, allowed_tokens, attention, logprobs, on
from policy.finite_weights import refuse_infinite
from policy.lora import Adapters
from policy.optimizer import adamw, learning_rate
from policy.rounding import Rounding

if TYPE_CHECKING:  # pydantic is not needed to train
    from settings.network import PolicySettings


class Outgoing(NamedTuple):
    """A sharded weight or a whole buffer, before it is sent or exported."""

    name: str  # in the checkpoint
    tensor: Tensor
    dtype: torch.dtype  # the type in which it is sent or exported


def shard(tensor: Tensor) -> Tensor:
    """Returns this rank's part of a tensor that may be sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class PackedModel(nn.Module):
    """Decoder and chunked head in one forward; as FSDP's root, it has whole head and embedding."""

    def __init__(self, lm: PreTrainedModel, temperature: float, entropy: logprobs.Entropy):
        super().__init__()
        self.lm = lm
        self.temperature = temperature
        self.entropy = entropy

    def forward(self, row: Row) -> Tensor:
        """Returns logprobs [T], float32, of the row's own tokens; 0 outside its mask."""
        tokens_T, positions_T, mask_T = row.tokens_T, row.positions_T, row.mask_T
        if (mask_T & (positions_T == 0)).any():
            raise ValueError("mask_T is True at the start of a sequence, which nothing predicts")
        decoder = self.lm.get_decoder()
        head_VH = self.lm.get_output_embeddings().weight
        out = decoder(input_ids=tokens_T[None], position_ids=positions_T[None], use_cache=False)
        at_N = mask_T.nonzero().squeeze(1)
        h_NH = out.last_hidden_state[0].index_select(0, at_N - 1)
        head = logprobs.Head(entropy=self.entropy, choices=allowed_tokens.choices(row, at_N))
        rule = (self.temperature, logprobs.CHUNK, head)
        logp_N = logprobs.TokenLogprobs.apply(h_NH, head_VH, tokens_T[at_N], *rule)
        return torch.zeros_like(mask_T, dtype=logp_N.dtype).masked_scatter(mask_T, logp_N)

    def plain(self, tokens_T: Tensor) -> Tensor:
        """Returns what `forward` must equal for one whole sequence, from the model's own logits."""
        logits_TV = self.lm(input_ids=tokens_T[None], use_cache=False).logits[0, :-1].float()
        logp_TV = (logits_TV / self.temperature).log_softmax(1)
        return nn.functional.pad(logp_TV.gather(1, tokens_T[1:, None]).squeeze(1), (1, 0))


class FSDPPolicy:
    """A `Policy` for any dense Hugging Face model; `trainable=False` makes a frozen copy.

    Needs the default process group. Weights, gradients and moments are float32 and sharded; a GPU
    computes in bf16 and keeps a frozen network in bf16. Raises ValueError if the checkpoint lacks a
    tensor, RuntimeError if packing would mix sequences or the head is more than a matrix.
    """

    def __init__(
        self, model: str, settings: "PolicySettings", temperature: float, trainable: bool = True
    ):
        gpu = torch.cuda.is_available()
        self.folder, self.settings = model, settings
        self.updates = 0
        self.dp_group: dist.ProcessGroup | None = None
        self.reports = True  # every rank trains its own rows
        self.device = torch.device("cuda" if gpu else "cpu")
        config = AutoConfig.from_pretrained(model)
        attends = attention.prepared(settings.attention, config)
        make = AutoModelForCausalLM.from_config
        dtype = torch.bfloat16 if gpu else torch.float32
        with torch.device("meta"):
            wide = torch.float32 if trainable else dtype
            self.lm = make(config, dtype=wide, attn_implementation=attends)
            # It has none of FSDP's state-dict hooks, so it can be written while training runs.
            self.shell = make(copy.deepcopy(self.lm.config), dtype=dtype)
        # transformers recomputes activations only under train(), which would enable dropout.
        self.lm.eval().requires_grad_(trainable)
        self.adapters = Adapters(self.lm, settings, trainable)
        kinds = self.lm._no_split_modules or ()
        layers = [layer for layer in self.lm.modules() if type(layer).__name__ in kinds]
        for layer in layers if settings.recomputes else ():
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
        self.entropy = logprobs.Entropy(self.device)
        # Any: fully_shard adds methods to what it shards.
        self.model: Any = PackedModel(self.lm, temperature, self.entropy)
        mesh = init_device_mesh(self.device.type, (dist.get_world_size(),))
        mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        # The root comes last. A single rank shards too, to hold one layer at a time in bf16.
        for module in (*layers[::-1], self.model):
            fully_shard(module, mesh=mesh, mp_policy=mixed if gpu else MixedPrecisionPolicy())
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sum
        register_fsdp_forward_method(self.model, "plain")
        self._read()
        if trainable:
            self.optimizer = adamw(self._trained().values(), settings)
            self.rounding = Rounding((name, shard(tensor)) for name, tensor in self._sharded())
            # A group for checkpoints alone: they are written while training communicates.
            self.save_group = dist.new_group(backend="gloo")
            # All checkpoints are copied to the same memory: fresh pages cost more than the copying.
            self.stager = DefaultStager(StagingOptions(False, False, False, False))
        self._check_architecture()

    def _read(self) -> None:
        """Fills the shards. Raises ValueError naming a tensor that is missing or not finite."""
        lm = self.lm
        # from_pretrained fills the instance of this class, and only this rank's rows of a DTensor.
        filled: type[PreTrainedModel] = type("Filled", (type(lm),), {"__new__": lambda *_: lm})
        _, loaded = filled.from_pretrained(
            self.folder,
            key_mapping=self.adapters.renamed,
            dtype=self.lm.dtype,
            output_loading_info=True,
        )
        self.adapters.start()
        # Rotary tables were computed on the CPU; shards may still be views of a mapped file.
        self.model._apply(lambda tensor: tensor.to(self.device, copy=True))
        if lacking := sorted(loaded["missing_keys"]):
            raise ValueError(
                f"model = {self.folder!r} lacks {len(lacking)} tensors that {type(lm).__name__} "
                f"needs, such as {lacking[0]}"
            )
        for name, tensor, _ in self._weights():
            refuse_infinite(name, tensor, self.folder)

    def forward_backward(
        self, rows: Sequence[AnyRow], loss_fn: LossFn[AnyRow, Stats], more: bool = False
    ) -> list[Stats]:
        """Adds up gradients, over ranks after each row; returns the stats of `loss_fn`."""
        stats = []
        for row in map(partial(on, self.device), rows):
            logp_T = self.model(row)
            loss, row_stats = loss_fn(logp_T, row)
            # The empty sum keeps the network in the graph even if the loss does not depend on it.
            (loss + logp_T[:0].sum()).backward()
            stats.append(row_stats)
        return stats

    @torch.no_grad()
    def logprobs(self, rows: Sequence[AnyRow]) -> list[Tensor]:
        """Returns logprobs [T] of each packed row, float32, 0 outside its mask."""
        logps = [self.model(on(self.device, row)) for row in rows]
        # FSDP reshards its root only in backward: left whole, it would miss the next update.
        self.model.reshard()
        return logps

    def optimizer_step(self, grad_scale: float = 1.0) -> dict[str, float]:
        """Scales the summed gradients, clips their global norm, updates with AdamW and zeroes them.

        Returns the learning rate, the entropy, what bf16 shows of training (policy/rounding.py),
        and as `grad_norm` the norm before clipping. Raises FloatingPointError on every rank if the
        norm is not finite; no weight changes in that case.
        """
        settings = self.settings
        measured = self.entropy.take()
        grads = [shard(p.grad) for p in self._trained().values() if p.grad is not None]
        square = nn.utils.get_total_norm(grads).to(self.device) ** 2
        dist.all_reduce(square)
        norm = abs(grad_scale) * square.sqrt().item()
        if not math.isfinite(norm):
            self.optimizer.zero_grad()
            raise FloatingPointError(f"gradient norm is {norm} at update {self.updates}")
        torch._foreach_mul_(grads, grad_scale * min(1.0, settings.max_grad_norm / (norm + 1e-6)))
        lr = learning_rate(self.updates, settings)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.updates += 1
        measured |= self.rounding.compare(self._merged_shards())
        return {"grad_norm": norm, "lr": lr} | measured

    def _trained(self) -> dict[str, nn.Parameter]:
        """Returns the parameters that have gradients, by name."""
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    def _weights(self) -> Iterator[Outgoing]:
        """Yields all sharded weights and whole buffers, tied ones once, adapters not added."""
        names: dict[Tensor, str] = {}
        for name, tensor in self.adapters.weights(self.model.state_dict(keep_vars=True)):
            names.setdefault(tensor, name.removeprefix("lm."))  # tied weights have two names
        for tensor, name in names.items():
            halve = self.device.type == "cuda" and isinstance(tensor, DTensor)
            yield Outgoing(name, tensor.detach(), torch.bfloat16 if halve else tensor.dtype)

    def _sharded(self) -> Iterator[tuple[str, DTensor]]:
        """Yields all weights, tied ones once, adapters not added."""
        for name, tensor, _ in self._weights():
            if isinstance(tensor, DTensor):
                yield name, tensor

    @torch.no_grad()
    def _merged_shards(self) -> Iterator[tuple[str, Tensor]]:
        """Yields this rank's part of all weights, one at a time, adapters added; collective."""
        for name, tensor in self._sharded():
            merged = self.adapters.merged(name, tensor)
            if isinstance(merged, DTensor):
                merged = merged.redistribute(tensor.device_mesh, tensor.placements)
            yield name, shard(merged)

    @torch.no_grad()
    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yields whole weights by checkpoint name, one copy at a time, bf16 on GPU; tied once."""
        for name, tensor, dtype in self._weights():
            sent = self.adapters.merged(name, tensor).to(dtype, copy=True)
            yield name, sent.full_tensor() if isinstance(sent, DTensor) else sent

    def weight_metas(self) -> list[WeightMeta]:
        """Describes the tensors that `named_weights` yields, in its order; no communication."""
        return [
            WeightMeta(name, tuple(tensor.shape), str(dtype).removeprefix("torch."))
            for name, tensor, dtype in self._weights()
        ]

    def export_hf(self, dir: str) -> Callable[[], None]:
        """Gathers a model for transformers and vLLM on rank 0's CPU; returns its writer."""
        state = {name: w.cpu() for name, w in self.named_weights() if dist.get_rank() == 0}
        adapters = self.adapters.unmerged()
        return partial(self._write_hf, dir, state, adapters) if state else lambda: None

    def _write_hf(self, dir: str, state: dict[str, Tensor], adapters: dict[str, Tensor]) -> None:
        aside = f"{dir}.partial"
        self.shell.save_pretrained(aside, state_dict=state)
        if adapters:
            self.adapters.write(f"{aside}/adapter", adapters, self.folder)
        AutoTokenizer.from_pretrained(self.folder).save_pretrained(aside)
        if os.path.isfile(source := os.path.join(self.folder, "generation_config.json")):
            shutil.copy(source, aside)  # transformers would refuse to save one that it has read
        shutil.rmtree(dir, ignore_errors=True)
        os.rename(aside, dir)

    def _state(self) -> dict[str, Any]:
        """Returns all that training changes: `save` writes it and `load` fills it."""
        parameters = self._trained()
        for p in parameters.values():
            if p not in self.optimizer.state:
                self.optimizer.state[p] = {
                    "step": torch.zeros((), device=self.device),
                    "exp_avg": torch.zeros_like(p),
                    "exp_avg_sq": torch.zeros_like(p),
                }
        return {
            "weights": parameters,
            "moments": {name: self.optimizer.state[p] for name, p in parameters.items()},
            "updates": torch.tensor(self.updates),
            "rng": torch.get_rng_state(),
        }

    def save(self, dir: str) -> Callable[[], None]:
        """Copies this rank's shards to memory; returns a function that writes them."""
        copied = self.stager.stage(self._state())
        return partial(checkpoint_io.save, copied, checkpoint_id=dir, process_group=self.save_group)

    def load(self, dir: str) -> None:
        """Continues from what `save` wrote, bitwise; each rank reads only what it needs."""
        state = self._state()
        checkpoint_io.load(state, checkpoint_id=dir, process_group=self.save_group)
        self.updates = int(state["updates"])
        torch.set_rng_state(state["rng"])

    @torch.no_grad()
    def _check_architecture(self) -> None:
        """Compares a packed row with its two sequences alone, and each with the plain model.

        Raises RuntimeError if either comparison differs by more than rounding.
        """
        index_T = torch.arange(16, device=self.device)
        tokens_T = 7919 * (index_T + 1) % len(self.lm.get_input_embeddings().weight)
        two = {"positions_T": index_T % 8, "mask_T": index_T % 8 > 0}
        one = {name: x_T[:8] for name, x_T in two.items()}
        packed_T = self.model(Packed(tokens_T=tokens_T, **two))
        halves = tokens_T.split(8)
        plain_T = torch.cat([self.model.plain(half_T) for half_T in halves])
        alone_T = torch.cat([self.model(Packed(tokens_T=half_T, **one)) for half_T in halves])
        gaps = torch.stack([(alone_T - plain_T).abs().mean(), (packed_T - alone_T).abs().mean()])
        dist.all_reduce(gaps, dist.ReduceOp.MAX)
        self.model.reshard()
        limit = 0.1 if self.device.type == "cuda" else 1e-4  # rounding of bf16, float32 kernels
        causes = (
            "its head is more than hidden @ W.T (soft cap, scale, bias?): teach PackedModel that",
            "its layers ignore position_ids (Mamba, linear attention?): packed rows would mix",
        )
        for gap, cause in zip(gaps.tolist(), causes, strict=True):
            if not gap <= limit:
                raise RuntimeError(f"{type(self.lm).__name__}, off by {gap:.2g} nats: {cause}")
