"""Trains a policy on Megatron-Core: one model over TP x PP x CP x EP ranks.

Axes:  T tokens of a packed row   S tokens of the row, padded to equal parts for all ranks
       L this context parallel rank's part of S   N trained tokens   H hidden size   V vocabulary

A replica's ranks (TP x CP x PP) train the same packed rows: tensor parallel ranks hold slices of
every matrix and of the sequence between matrices (sequence parallelism), context parallel ranks
hold parts of every sequence, pipeline stages hold some layers, and expert parallel ranks, across
replicas, hold experts.

The loss is a sum divided once by the whole batch's token count, so gradients are summed, never
averaged: over replicas and context parallel ranks by DistributedDataParallel, over sequence shards
by finalize_model_grads. Each rank computes the loss of its whole row, and passes on the part of the
gradient that belongs to its own tokens.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state as mpu
from megatron.core import tensor_parallel
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.optimizer import get_megatron_optimizer, get_standard_config_overrides
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from torch import Tensor
from torch.utils._pytree import tree_map
from transformers import AutoConfig

import policy
from policy import AnyRow, LossFn, Stats, WeightMeta, allowed_tokens, logprobs, on
from policy.megatron import hf_folder, hf_weights
from policy.megatron.arguments import ddp_config, optimizer_config
from policy.megatron.checkpoint import Shares
from policy.megatron.export import export
from policy.megatron.model import Places, RouteReplay, Row, build, local_places
from policy.optimizer import learning_rate
from policy.rounding import Rounding

if TYPE_CHECKING:
    from megatron.core.models.mamba import MambaModel

    from settings.network import PolicySettings

DTYPE = torch.bfloat16 if torch.cuda.is_available() else torch.float32  # type of the parameters


class Shard:
    """This context parallel rank's part of a packed row.

    A sequence is padded at its end, where no real token attends to the padding, to a multiple of
    2 x CP; the last sequence is padded further, so that the row divides evenly over the TP ranks.
    """

    def __init__(self, row: policy.Row, cp: int, tp: int):
        length_N = torch.bincount(row.seq_T)
        unit = 2 * cp if cp > 1 else 1
        padded_N = -(-length_N // unit) * unit
        padded_N[-1] += -padded_N.sum() % math.lcm(unit, cp * tp)
        ends = F.pad(padded_N.cumsum(0), (1, 0)).to(torch.int32)
        source_S = torch.full((int(ends[-1]),), -1, device=row.tokens_T.device)
        source_S[ends[row.seq_T] + row.positions_T] = torch.arange(len(row.seq_T)).to(source_S)
        mine_L = local_places(ends, cp, mpu.get_context_parallel_rank())
        source_L = source_S[mine_L]
        real_L = source_L >= 0
        self.tokens_L = torch.where(real_L, row.tokens_T[source_L], 0)
        # The row's token that each position predicts; N of these tokens are trained.
        target_L = source_S.roll(-1)[mine_L]
        self.at_N = ((target_L >= 0) & row.mask_T[target_L]).nonzero().squeeze(1)
        self.target_N = target_L[self.at_N]
        # The engine never read the last token of a sequence, so it chose no experts for it.
        read_L = real_L & (target_L >= 0) & (row.positions_T[target_L] > 0)
        trained_N = torch.bincount(row.seq_T[row.mask_T], minlength=len(length_N)) > 0
        counted_L = real_L & trained_N[row.seq_T][source_L]
        routes_L = None
        if row.routes_N is not None:
            # Joined here, row by row, because the routes of all rows would not fit into memory;
            # only this rank's positions are copied to the device.
            routes_T = torch.from_numpy(np.concatenate(row.routes_N))
            routes_L = routes_T[source_L.cpu()].to(real_L.device)
            routes_L = torch.where(real_L[:, None, None], routes_L, -1)
        self.packed = Row(ends, Places(read_L, counted_L, routes_L))


def join_groups(settings: "PolicySettings", seed: int, collective_seconds: float) -> None:
    """Creates Megatron's process groups: TP ranks are adjacent, pipeline stages far apart."""
    if mpu.model_parallel_is_initialized():
        return
    mpu.initialize_model_parallel(
        tensor_model_parallel_size=settings.tp,
        pipeline_model_parallel_size=settings.pp,
        context_parallel_size=settings.cp,
        expert_model_parallel_size=settings.ep,
        expert_tensor_parallel_size=1,
        distributed_timeout_minutes=max(1, round(collective_seconds / 60)),
    )
    model_parallel_cuda_manual_seed(seed)


class MegatronPolicy:
    """A `Policy` on Megatron-Core; `trainable=False` makes a frozen copy.

    Needs the default process group, of TP x CP x PP x replicas ranks. On a GPU, parameters are bf16
    with float32 main parameters, and gradients are summed in float32, unless `settings.megatron`
    sets another type; on a CPU, everything is float32. Routers are frozen. The bias by which
    Nemotron-H chooses experts moves by 1e-3 per step towards experts that are chosen too rarely
    (arXiv:2408.15664). Raises ValueError naming a tensor that the checkpoint or the model lacks.
    """

    def __init__(
        self,
        model: str,
        settings: "PolicySettings",
        temperature: float,
        seed: int,
        collective_seconds: float,
        trainable: bool = True,
    ):
        self.folder = model
        self.settings = settings
        self.temperature = temperature
        self.updates = 0
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        join_groups(settings, seed, collective_seconds)
        self.write_group = dist.new_group(backend="gloo")  # used while training communicates
        hf = AutoConfig.from_pretrained(model)
        self.model = build(settings, hf, DTYPE).to(self.device)
        self.weights = hf_weights.Weights(model, hf, self.model)
        self.vocab = hf.vocab_size
        self.entropy = logprobs.Entropy(self.device)
        self.dp_group = mpu.get_data_parallel_group()  # the ranks that train different rows
        others = (mpu.get_tensor_model_parallel_rank(), mpu.get_context_parallel_rank())
        self.reports = mpu.is_pipeline_last_stage() and others == (0, 0)
        self.replays = [m for m in self.model.modules() if isinstance(m, RouteReplay)]
        # The schedule runs the model, or Megatron's wrapper that sums its gradients.
        self.chunk: MambaModel | DistributedDataParallel = self.model
        # A frozen copy keeps `requires_grad`: else Megatron's linear layers round differently.
        if trainable:
            self._make_optimizer()

    def _make_optimizer(self) -> None:
        """Wraps the model to sum its gradients, and spreads AdamW's state over the replicas."""
        ddp = ddp_config(self.settings)
        self.chunk = DistributedDataParallel(self.model.config, ddp, self.model)
        adam = optimizer_config(self.settings, DTYPE)
        apart = get_standard_config_overrides(adam)  # norms and biases, which do not decay
        self.optimizer = get_megatron_optimizer(adam, [self.chunk], config_overrides=apart)
        cut = {f"policy.{axis}": getattr(self.settings, axis) for axis in ("tp", "pp", "ep")}
        # AdamW's state is split like Megatron's gradient buffers, by type and bucket.
        for name in ("grad_reduce_in_fp32", "overlap_grad_reduce", "bucket_size"):
            cut[f"policy.megatron.ddp.{name}"] = getattr(ddp, name)
        self.shares = Shares(self.model, self.optimizer, cut, self.write_group)
        self.rounding = Rounding(self.model.named_parameters())

    def forward_backward(
        self, rows: Sequence[AnyRow], loss_fn: LossFn[AnyRow, Stats], more: bool = False
    ) -> list[Stats]:
        """Adds up the gradients of `loss_fn(logp_T, row) -> (loss, stats)`; returns all stats.

        Every rank of a replica passes the same rows and gets the same stats; `loss_fn` is called on
        the last pipeline stage. Gradients are summed over ranks once per update: by
        `optimizer_step`, or with `overlap_grad_reduce` during the last row, unless there are
        `more`.
        """
        alone = self.chunk.no_sync if more else nullcontext
        # The schedule would end `no_sync` before its last row.
        self.model.config.no_sync_func = nullcontext if more else self.chunk.no_sync
        with alone():
            return self._schedule(rows, loss_fn, forward_only=False)

    @torch.no_grad()
    def logprobs(self, rows: Sequence[AnyRow]) -> list[Tensor]:
        """Returns logprobs [T] of each row, float32, 0 outside its mask; the same on every rank."""

        def loss_fn(logp_T: Tensor, row: policy.Row) -> tuple[Tensor, Tensor]:
            return logp_T.sum(), logp_T

        return self._schedule(rows, loss_fn, forward_only=True)

    def _schedule(
        self, rows: Sequence[AnyRow], loss_fn: LossFn[AnyRow, Stats], forward_only: bool
    ) -> list[Stats]:
        """Runs Megatron's pipeline schedule over packed rows; returns the last stage's stats."""
        stats: list[Stats] = []

        def forward_step(
            waiting: Iterator[AnyRow], model: "MambaModel"
        ) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, Tensor, dict]]]:
            row = on(self.device, next(waiting))
            shard = Shard(row, self.settings.cp, self.settings.tp)
            hidden = model(
                shard.tokens_L[None], None, attention_mask=None, packed_seq_params=shard.packed
            )
            return hidden, partial(finish, row, shard)

        def finish(row: AnyRow, shard: Shard, hidden_1LH: Tensor) -> tuple[Tensor, Tensor, dict]:
            logp_T = self._logp(hidden_1LH[0], row, shard)
            loss, row_stats = loss_fn(logp_T, row)
            stats.append(row_stats)
            # The empty sum keeps the network in the graph even if the loss does not depend on it.
            return loss + logp_T[:0].sum(), torch.tensor(0), {}

        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(rows),
            model=[self.chunk],
            num_microbatches=len(rows),
            seq_length=self.settings.row_tokens,
            micro_batch_size=1,
            forward_only=forward_only,
        )
        shared = [move(stats, "cpu")]
        if self.settings.pp > 1:
            last = mpu.get_pipeline_model_parallel_last_rank()
            dist.broadcast_object_list(shared, last, mpu.get_pipeline_model_parallel_group())
        return move(shared[0], self.device)

    def _logp(self, h_LH: Tensor, row: policy.Row, shard: Shard) -> Tensor:
        """Computes logprobs [T] of a row's trained tokens, from all its context parallel ranks."""
        if self.settings.tp > 1:  # backward sums the gradients of all slices of the vocabulary
            h_LH = tensor_parallel.gather_from_sequence_parallel_region(h_LH)
        head_VH = self.model.output_layer.weight
        if head_VH is None:
            head_VH = self.model.shared_embedding_or_output_weight()
        first = len(head_VH) * mpu.get_tensor_model_parallel_rank()
        ranks = mpu.get_tensor_model_parallel_group()
        choices = allowed_tokens.choices(row, shard.target_N)
        logp_N = logprobs.TokenLogprobs.apply(
            h_LH[shard.at_N],
            head_VH,
            row.tokens_T[shard.target_N],
            self.temperature,
            logprobs.CHUNK,
            logprobs.Head(ranks, first, self.vocab, self.entropy, choices),
        )
        logp_T = logp_N.new_zeros(len(row.tokens_T)).index_add(0, shard.target_N, logp_N)
        # Every rank continues with the whole row; backward gives each the gradient of its tokens.
        cp = mpu.get_context_parallel_group()
        return tensor_parallel.reduce_from_tensor_model_parallel_region(logp_T, group=cp)

    def optimizer_step(self, grad_scale: float = 1.0) -> dict[str, float]:
        """Sums the gradients over ranks, scales and clips them, updates with AdamW and zeroes them.

        Returns the learning rate, the entropy, what bf16 shows of training (policy/rounding.py),
        and as `grad_norm` the norm before clipping. Raises FloatingPointError on every rank if the
        norm is not finite, and RuntimeError if the engine's experts could not be replayed. In both
        cases, weights stay unchanged and gradients are dropped.
        """
        settings = self.settings
        done = self.updates
        measured = self.entropy.take() | self._replayed()
        biases = [b for name, b in self.model.named_buffers() if name.endswith("expert_bias")]
        before = [bias.clone() for bias in biases]
        finalize_model_grads([self.chunk])
        self.chunk.scale_gradients(grad_scale)
        self.optimizer.prepare_grads()
        norm = float(self.optimizer.get_grad_norm())
        if not math.isfinite(norm):
            for bias, old in zip(biases, before, strict=True):
                bias.copy_(old)
            self._zero_grad()
            raise FloatingPointError(f"gradient norm is {norm} at update {done}")
        lr = learning_rate(done, settings)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
            group["weight_decay"] = settings.weight_decay * group["wd_mult"]
        adam = self.optimizer.config
        decoupled = adam.use_precision_aware_optimizer_no_fp8_or_ds_fp8
        for part in self.optimizer.chained_optimizers:
            clip_grad_by_total_norm_fp32(part.get_parameters(), adam.clip_grad, norm, decoupled)
        self.optimizer.step_with_ready_grads()
        self._zero_grad()
        self.updates += 1
        self._gather()
        measured |= self.rounding.compare(self.model.named_parameters())
        return {"grad_norm": norm, "lr": lr} | measured

    def _replayed(self) -> dict[str, float]:
        """Measures the share of the engine's routes that the last rows followed.

        Raises RuntimeError if they did not follow all of them.
        """
        if not self.settings.replay_routing:
            return {}
        counts = torch.zeros(2, dtype=torch.int64, device=self.device)
        for replay in self.replays:
            counts += torch.stack([replay.followed, replay.wanted])
            replay.followed.zero_()
            replay.wanted.zero_()
        dist.all_reduce(counts)
        followed, wanted = counts.tolist()
        if followed < wanted:
            self._zero_grad()
            raise RuntimeError(
                f"policy.replay_routing: the trainer could follow only {followed / wanted:.2%} of "
                "the engine's routes; does the engine return them?"
            )
        return {"routing_replay_hit_rate": followed / wanted if wanted else 1.0}

    def _zero_grad(self) -> None:
        self.chunk.zero_grad_buffer()
        self.optimizer.zero_grad()

    def named_weights(self) -> Iterator[tuple[str, Tensor | None]]:
        """Yields the checkpoint's tensor names and, on rank 0, whole weights; tied weights once."""
        self._gather()
        return export(self.weights)

    def _gather(self) -> None:
        """Gathers the parameters that `overlap_param_gather` leaves to the next forward pass."""
        if self.chunk is not self.model and self.chunk.ddp_config.overlap_param_gather:
            self.chunk.start_param_sync(force_sync=True)

    def weight_metas(self) -> list[WeightMeta]:
        """Describes the tensors that `named_weights` yields, in its order; no communication."""
        return self.weights.metas()

    def export_hf(self, dir: str) -> Callable[[], None]:
        """Copies this rank's share of the model to memory, in the format of transformers and vLLM.

        Returns a function that writes it, and on rank 0 also the index, config and tokenizer.
        """
        self._gather()
        share = {name: tensor.cpu() for name, tensor in hf_folder.share(self.weights)}
        return partial(hf_folder.write, dir, self.folder, share, self.write_group)

    def save(self, dir: str) -> Callable[[], None]:
        """Copies this rank's share to memory; returns a function that writes it during training."""
        self._gather()
        return self.shares.save(dir, self.updates)

    def load(self, dir: str) -> None:
        """Resumes from what `save` wrote, on any number of replicas; each rank reads its share.

        Raises InputError if tp, pp, ep, the gradients' type or their buckets differed.
        """
        self.updates = self.shares.load(dir)


def move(stats: list[Stats], device: torch.device | str) -> list[Stats]:
    """Moves the tensors of stats to a device, detached."""
    return tree_map(lambda tensor: tensor.detach().to(device), stats)
