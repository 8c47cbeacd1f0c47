"""Any Hugging Face causal language model, trained under FSDP2.

Axes:  T tokens of a packed row   N of them trained   V vocabulary   H hidden size

A packed row is several sequences end to end: `tokens_T`, `positions_T` (from 0 in each sequence,
which keeps them apart) and `mask_T` (what the policy sampled). Only those N tokens meet the LM
head, in chunks: no N x V tensor ever exists. Gradients are summed over ranks, not averaged: the
loss divides once, by the token count of the whole batch.

The model is made without memory, sharded, and then filled: of each tensor of the checkpoint a rank
reads its own rows.
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

from policy import AnyRow, LossFn, Row, WeightMeta, allowed_tokens, attention, logprobs, on
from policy.finite_weights import refuse_infinite
from policy.lora import Adapters
from policy.optimizer import adamw, learning_rate

if TYPE_CHECKING:  # pydantic is not needed to train
    from settings.network import PolicySettings


class Outgoing(NamedTuple):
    """A sharded weight or a whole buffer, as it is sent or exported."""

    name: str  # in the checkpoint
    tensor: Tensor
    dtype: torch.dtype  # to leave in


class PackedModel(nn.Module):
    """Decoder and chunked head in one forward: as FSDP's root it holds head and embedding whole."""

    def __init__(self, lm: PreTrainedModel, temperature: float, entropy: logprobs.Entropy):
        super().__init__()
        self.lm = lm
        self.temperature = temperature
        self.entropy = entropy

    def forward(self, row: Row) -> Tensor:
        """Logprobs [T], float32, of the row's own tokens; 0 outside its mask."""
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
        """What forward must equal for one whole sequence: by the model's own logits, unpacked."""
        logits_TV = self.lm(input_ids=tokens_T[None], use_cache=False).logits[0, :-1].float()
        logp_TV = (logits_TV / self.temperature).log_softmax(1)
        return nn.functional.pad(logp_TV.gather(1, tokens_T[1:, None]).squeeze(1), (1, 0))


class FSDPPolicy:
    """A `Policy` for any dense Hugging Face model; `trainable=False` makes a frozen copy.

    Needs the default process group. Weights, gradients and moments are float32 and sharded; a GPU
    computes in bf16, and keeps a frozen network so. Raises ValueError where the checkpoint lacks a
    tensor, RuntimeError where packing would mix sequences or the head is more than a matrix.
    """

    def __init__(
        self, model: str, settings: "PolicySettings", temperature: float, trainable: bool = True
    ):
        gpu = torch.cuda.is_available()
        self.folder, self.settings = model, settings
        self.updates = 0
        self.dp_group: dist.ProcessGroup | None = None
        self.reports = True  # every rank trains rows of its own
        self.device = torch.device("cuda" if gpu else "cpu")
        config = AutoConfig.from_pretrained(model)
        attends = attention.prepared(settings.attention, config)
        make: Any = AutoModelForCausalLM.from_config  # typed as if it took a model's name
        dtype = torch.bfloat16 if gpu else torch.float32
        with torch.device("meta"):
            wide = torch.float32 if trainable else dtype
            self.lm = make(config, dtype=wide, attn_implementation=attends)
            # Written beside training, as its state dict has no FSDP hooks.
            self.shell = make(copy.deepcopy(self.lm.config), dtype=dtype)
        self.lm.eval().requires_grad_(trainable)  # train(), for its checkpointing, brings dropout
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
        # The root last. One rank too: it has a layer at a time in bf16.
        for module in (*layers[::-1], self.model):
            fully_shard(module, mesh=mesh, mp_policy=mixed if gpu else MixedPrecisionPolicy())
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sum
        register_fsdp_forward_method(self.model, "plain")
        self._read()
        if trainable:
            self.optimizer = adamw(self._trained().values(), settings)
            # Its own, because a checkpoint is written while training communicates.
            self.save_group = dist.new_group(backend="gloo")
            # One copy in memory for all checkpoints: fresh pages cost more than the copying.
            self.stager = DefaultStager(StagingOptions(False, False, False, False))
        self._check_architecture()

    def _read(self) -> None:
        """Fills the shards. Raises ValueError naming a tensor that lacks or is NaN."""
        lm = self.lm
        # from_pretrained fills what its class makes, and of a DTensor the rows of this rank alone.
        made: Any = type("Made", (type(lm),), {"__new__": lambda cls, config: lm})
        how = {"dtype": self.lm.dtype, "output_loading_info": True}
        _, loaded = made.from_pretrained(self.folder, key_mapping=self.adapters.renamed, **how)
        self.adapters.start()
        # Rotary tables were computed on the CPU; shards may still be views of a mapped file.
        self.model._apply(lambda tensor: tensor.to(self.device, copy=True))
        if lacking := sorted(loaded["missing_keys"]):
            needed = f"{len(lacking)} tensors that {type(lm).__name__} needs"
            raise ValueError(f"model = {self.folder!r} lacks {needed}, such as {lacking[0]}")
        for name, tensor, _ in self._weights():
            refuse_infinite(name, tensor, self.folder)

    def forward_backward(
        self, rows: Sequence[AnyRow], loss_fn: LossFn[AnyRow], more: bool = False
    ) -> list[Any]:
        """Adds up gradients, over ranks after each row; returns what `loss_fn` says of each."""
        stats = []
        for row in map(partial(on, self.device), rows):
            logp_T = self.model(row)
            loss, row_stats = loss_fn(logp_T, row)
            # The sum of nothing keeps the network in the graph of a loss that is not of it.
            (loss + logp_T[:0].sum()).backward()
            stats.append(row_stats)
        return stats

    @torch.no_grad()
    def logprobs(self, rows: Sequence[AnyRow]) -> list[Tensor]:
        """Logprobs [T] of each packed row, float32, 0 outside its mask."""
        logps = [self.model(on(self.device, row)) for row in rows]
        # FSDP reshards its root only in backward: left whole it would miss the next update.
        self.model.reshard()
        return logps

    def optimizer_step(self, grad_scale: float = 1.0) -> dict[str, float]:
        """Scales the summed gradients, clips their global norm, updates by AdamW and zeroes them.

        Returns the learning rate, the entropy, and as `grad_norm` the norm before clipping.
        Raises FloatingPointError on every rank where that is not finite: no weight changes then.
        """
        settings = self.settings
        measured = self.entropy.take()
        grads = [p.grad.to_local() for p in self._trained().values() if p.grad is not None]
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
        return {"grad_norm": norm, "lr": lr} | measured

    def _trained(self) -> dict[str, Any]:
        """The parameters that have gradients, by name."""
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    def _weights(self) -> Iterator[Outgoing]:
        """All sharded weights and whole buffers, tied ones once; without what adapters add."""
        names: dict[Tensor, str] = {}
        for name, tensor in self.adapters.weights(self.model.state_dict(keep_vars=True)):
            names.setdefault(tensor, name.removeprefix("lm."))  # tied weights have two names
        for tensor, name in names.items():
            halve = self.device.type == "cuda" and isinstance(tensor, DTensor)
            yield Outgoing(name, tensor.detach(), torch.bfloat16 if halve else tensor.dtype)

    @torch.no_grad()
    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Whole weights by checkpoint name, copied one at a time, bf16 on GPU; tied ones once."""
        for name, tensor, dtype in self._weights():
            sent = self.adapters.merged(name, tensor).to(dtype, copy=True)
            yield name, sent.full_tensor() if isinstance(sent, DTensor) else sent

    def weight_metas(self) -> list[WeightMeta]:
        """What `named_weights` yields, in its order; no communication."""
        return [
            WeightMeta(name, tuple(tensor.shape), str(dtype).removeprefix("torch."))
            for name, tensor, dtype in self._weights()
        ]

    def export_hf(self, dir: str) -> Callable[[], None]:
        """Gathers a model for transformers and vLLM on rank 0's CPU. What it returns writes it."""
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
        """All that training changes, by parameter name: `save` writes it and `load` fills it."""
        parameters = self._trained()
        for p in parameters.values():
            if p not in self.optimizer.state:
                zeros = {name: torch.zeros_like(p) for name in ("exp_avg", "exp_avg_sq")}
                self.optimizer.state[p] = {"step": torch.zeros((), device=self.device)} | zeros
        moments = {name: self.optimizer.state[p] for name, p in parameters.items()}
        progress = {"updates": torch.tensor(self.updates), "rng": torch.get_rng_state()}
        return {"weights": parameters, "moments": moments} | progress

    def save(self, dir: str) -> Callable[[], object]:
        """Copies this rank's shards to memory and starts to write. What it returns waits for it."""
        start: Any = partial(checkpoint_io.async_save, process_group=self.save_group)
        return start(self._state(), checkpoint_id=dir, async_stager=self.stager).result

    def load(self, dir: str) -> None:
        """Continues from what `save` wrote, bitwise; each rank reads what it needs."""
        state = self._state()
        checkpoint_io.load(state, checkpoint_id=dir, process_group=self.save_group)
        self.updates = int(state["updates"])
        torch.set_rng_state(state["rng"])

    @torch.no_grad()
    def _check_architecture(self) -> None:
        """Compares a packed row with its two sequences alone, and those with the plain model."""
        index_T = torch.arange(16, device=self.device)
        words: Any = self.lm.get_input_embeddings().weight
        tokens_T = 7919 * (index_T + 1) % len(words)
        two = {"positions_T": index_T % 8, "mask_T": index_T % 8 > 0}
        one = {name: x_T[:8] for name, x_T in two.items()}
        packed_T = self.model(Packed(tokens_T=tokens_T, **two))
        halves = tokens_T.split(8)
        plain_T = torch.cat([self.model.plain(half_T) for half_T in halves])
        alone_T = torch.cat([self.model(Packed(tokens_T=half_T, **one)) for half_T in halves])
        gaps = torch.stack([(alone_T - plain_T).abs().mean(), (packed_T - alone_T).abs().mean()])
        dist.all_reduce(gaps, dist.ReduceOp.MAX)
        self.model.reshard()
        limit = 0.1 if self.device.type == "cuda" else 1e-4  # what bf16, float32 kernels may differ
        causes = (
            "its head is more than hidden @ W.T (soft cap, scale, bias?): teach PackedModel that",
            "its layers ignore position_ids (Mamba, linear attention?): packed rows would mix",
        )
        for gap, cause in zip(gaps.tolist(), causes, strict=True):
            if not gap <= limit:
                raise RuntimeError(f"{type(self.lm).__name__}, off by {gap:.2g} nats: {cause}")
