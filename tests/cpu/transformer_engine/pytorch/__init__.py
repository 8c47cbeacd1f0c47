"""The layers: linear ones with their communication, norms, and attention in packed rows."""

import types

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from transformer_engine_torch import thd_get_partitioned_indices

from transformer_engine.pytorch import distributed, fp8, optimizers, router

__all__ = ["distributed", "fp8", "optimizers", "router"]
ops = types.SimpleNamespace(Sequential=None, FusibleOperation=None)  # for annotations


class Base(nn.Module):
    """What all layers with weights have: a state of fp8, which is empty here."""

    fp8 = fp8_calibration = False

    def __init__(self):
        super().__init__()
        self.fp8_meta = {"fp8_checkpoint": False}

    def init_fp8_metadata(self, num_gemms=1):
        """Nothing, without fp8."""

    def get_extra_state(self):
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state):
        """Nothing, without fp8."""


def weight(rows, columns, init_method, dtype, device):
    """A parameter, filled by `init_method`."""
    made = nn.Parameter(torch.empty(rows, columns, dtype=dtype, device=device))
    init_method(made)
    return made


class Linear(Base):
    """Column parallel, row parallel, or alone; a sequence parallel one moves the sequence."""

    def __init__(
        self, in_features, out_features, sequence_parallel=False, fuse_wgrad_accumulation=False,
        tp_group=None, tp_size=1, get_rng_state_tracker=None, rng_tracker_name=None,
        init_method=None, bias=True, return_bias=False, params_dtype=None, parallel_mode=None,
        device="cuda",
    ):  # fmt: skip
        super().__init__()
        assert not fuse_wgrad_accumulation and not return_bias
        self.parallel_mode = parallel_mode
        self.tp_group = tp_group
        self.tp_size = tp_size
        self.sequence_parallel = tp_size > 1 and sequence_parallel
        self.in_features = in_features // (tp_size if parallel_mode == "row" else 1)
        self.out_features = out_features // (tp_size if parallel_mode == "column" else 1)
        self.use_bias = bias
        like = {"dtype": params_dtype, "device": device}
        self.weight = weight(self.out_features, self.in_features, init_method, **like)
        self.bias = nn.Parameter(torch.zeros(self.out_features, **like)) if bias else None
        split = {"column": 0, "row": 1}.get(parallel_mode)
        mark(self.weight, split)
        if bias:
            mark(self.bias, 0 if split == 0 else None)
            self.bias.sequence_parallel = self.sequence_parallel and parallel_mode == "row"

    def forward(self, inp, is_first_microbatch=None):
        from megatron.core.tensor_parallel import layers, mappings

        parallel = self.tp_size > 1
        column = parallel and self.parallel_mode == "column"
        # As Transformer Engine does, it gathers the sequence again in backward.
        out = layers.linear_with_grad_accumulation_and_async_allreduce(
            inp,
            self.weight,
            None if self.parallel_mode == "row" else self.bias,
            gradient_accumulation_fusion=False,
            allreduce_dgrad=column and not self.sequence_parallel,
            sequence_parallel=column and self.sequence_parallel,
            tp_group=self.tp_group,
        )
        if self.parallel_mode != "row":
            return out
        if parallel:
            scatter = mappings.reduce_scatter_to_sequence_parallel_region
            reduce = mappings.reduce_from_tensor_model_parallel_region
            out = (scatter if self.sequence_parallel else reduce)(out, group=self.tp_group)
        return out if self.bias is None else out + self.bias


def mark(parameter, split):
    """Says along which dimension tensor parallel ranks share a parameter, if they do."""
    parameter.tensor_model_parallel = split is not None
    parameter.partition_dim = -1 if split is None else split
    parameter.partition_stride = 1


class GroupedLinear(Base):
    """Several products, of neighbouring rows each, whose weights are weight0, weight1, ..."""

    def __init__(
        self, num_gemms, in_features, out_features, sequence_parallel=False,
        fuse_wgrad_accumulation=False, tp_group=None, tp_size=1, get_rng_state_tracker=None,
        rng_tracker_name=None, init_method=None, bias=True, return_bias=False, params_dtype=None,
        parallel_mode=None, device="cuda", ub_name=None,
    ):  # fmt: skip
        super().__init__()
        assert not fuse_wgrad_accumulation and not bias and tp_size == 1
        self.num_gemms = num_gemms
        self.use_bias = bias
        for i in range(num_gemms):
            made = weight(out_features, in_features, init_method, params_dtype, device)
            mark(made, {"column": 0, "row": 1}.get(parallel_mode))
            self.register_parameter(f"weight{i}", made)

    def forward(self, inp, m_splits, is_first_microbatch=None):
        parts = inp.split(m_splits)
        return torch.cat([F.linear(x, getattr(self, f"weight{i}")) for i, x in enumerate(parts)])


class LayerNormLinear(Base):
    """A norm fused with a linear layer: Mamba stacks of ours have none."""


class LayerNormMLP(Base):
    """For peft, which asks whether a layer is one."""


class LayerNorm(nn.Module):
    """A norm that no family of ours has."""


class RMSNorm(nn.Module):
    """The norm, computed in float32."""

    def __init__(
        self, hidden_size, eps=1e-5, sequence_parallel=None, params_dtype=None,
        zero_centered_gamma=False, device="cuda",
    ):  # fmt: skip
        super().__init__()
        assert not zero_centered_gamma
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=params_dtype, device=device))
        self.weight.sequence_parallel = sequence_parallel

    def forward(self, x):
        norm = F.rms_norm(x.float(), list(self.weight.shape), self.weight.float(), self.eps)
        return norm.to(x.dtype)


class DotProductAttention(nn.Module):
    """Causal attention inside each sequence of a packed row, whose keys all ranks gather."""

    def __init__(
        self, num_attention_heads, kv_channels, num_gqa_groups=None, attention_dropout=0.1,
        attn_mask_type="causal", sequence_parallel=False, tp_size=1, get_rng_state_tracker=None,
        tp_group=None, layer_number=None, attention_type="self", cp_group=None,
        cp_global_ranks=None, cp_stream=None, cp_comm_type="p2p", softmax_scale=None,
    ):  # fmt: skip
        super().__init__()
        assert not attention_dropout and attn_mask_type == "causal" and attention_type == "self"
        self.cp_group = cp_group
        self.scale = softmax_scale

    def forward(
        self, query_layer, key_layer, value_layer, attention_mask=None, qkv_format=None,
        cu_seqlens_q=None, cu_seqlens_kv=None, cu_seqlens_q_padded=None,
        cu_seqlens_kv_padded=None, max_seqlen_q=None, max_seqlen_kv=None, attn_mask_type=None,
    ):  # fmt: skip
        assert (qkv_format, attn_mask_type) == ("thd", "padding_causal")
        q, k, v = query_layer, key_layer, value_layer
        total = int(cu_seqlens_q[-1])
        mine = torch.arange(total)
        if self.cp_group:
            from megatron.core.tensor_parallel import gather_from_sequence_parallel_region as gather

            n = dist.get_world_size(self.cp_group)
            ranks = [thd_get_partitioned_indices(cu_seqlens_q, total, n, i) for i in range(n)]
            order = torch.cat(ranks).argsort()
            k, v = (gather(x, group=self.cp_group).index_select(0, order) for x in (k, v))
            mine = ranks[dist.get_rank(self.cp_group)]
        seq = torch.bucketize(torch.arange(total), cu_seqlens_q[1:], right=True)
        out = torch.empty(*q.shape[:-1], v.shape[-1], dtype=q.dtype)
        for i in range(len(cu_seqlens_q) - 1):
            own = (seq[mine] == i).nonzero().squeeze(1)
            keys = (seq == i).nonzero().squeeze(1)
            seen = mine[own][:, None] >= keys
            heads = (x.transpose(0, 1)[None] for x in (q[own], k[keys], v[keys]))
            how = {"attn_mask": seen, "scale": self.scale, "enable_gqa": True}
            part = F.scaled_dot_product_attention(*heads, **how)
            out = out.index_copy(0, own, part[0].transpose(0, 1))
        return out.flatten(1)
