"""Rotary embedding of packed rows."""

import torch
from transformer_engine_torch import thd_get_partitioned_indices


def apply_rotary_pos_emb(
    t, freqs, tensor_format="sbhd", interleaved=False, fused=False,
    cu_seqlens=None, cp_size=1, cp_rank=0,
):  # fmt: skip
    """Turns t [L, heads, D] by its places in its sequences; freqs [longest, 1, 1, D or less]."""
    assert (tensor_format, interleaved) == ("thd", False)
    ends = cu_seqlens.long()
    at = torch.cat([torch.arange(int(n)) for n in ends.diff()])
    if cp_size > 1:
        at = at[thd_get_partitioned_indices(ends, len(at), cp_size, cp_rank)]
    angle = freqs[at, :, 0].float()
    size = angle.shape[-1]
    x, rest = t[..., :size].float(), t[..., size:]
    a, b = x.chunk(2, -1)
    turned = x * angle.cos() + torch.cat((-b, a), -1) * angle.sin()
    return torch.cat((turned.to(t.dtype), rest), -1)
