"""Attention inside each sequence of a packed row, by torch's varlen kernel, which needs no mask.

Axes:  T tokens of a packed row   N its sequences   D width of a head

transformers builds a T x T mask for SDPA; for a name that it knows as an attention alone, none.
"""

from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface


def implementation(attention: str) -> str:
    """transformers' name of policy.attention: of "auto" the kernel on a GPU, elsewhere sdpa."""
    automatic = "varlen" if torch.cuda.is_available() else "sdpa"
    return automatic if attention == "auto" else attention


@lru_cache(maxsize=1)  # the layers of a row share its positions: the GPU is asked once
def limits(positions_1T: Tensor) -> tuple[Tensor, Tensor, int, int]:
    """Of queries and of keys, which are the same: where sequences begin and end, the longest.

    int32 [N + 1]. A sequence begins at position 0.
    """
    starts_N = (positions_1T[0] == 0).nonzero().squeeze(1)
    ends_N = F.pad(starts_N, (0, 1), value=positions_1T.shape[1]).int()
    longest = int(ends_N.diff().max())
    return ends_N, ends_N, longest, longest


def varlen(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: None, **given: Any) -> Any:
    """Causal attention, heads [1, heads, T, D] to [1, T, heads, D]; transformers' interface.

    Raises ValueError where a layer asks for what the kernel does not do.
    """
    row, window = given.get("position_ids"), given.get("sliding_window")
    if row is None or given.get("softcap") or given.get("s_aux") is not None:
        lacking = "policy.attention = 'varlen' needs position_ids and knows no softcap, no sinks"
        raise ValueError(f"{type(module).__name__}: {lacking}: expected 'eager'")
    q_THD, k_THD, v_THD = (x[0].transpose(0, 1) for x in (q, k, v))
    how: dict[str, Any] = {"scale": given.get("scaling"), "enable_gqa": True}
    reach = (window - 1 if window else -1, 0)  # tokens before and after; -1: all
    out: Any = varlen_attn(q_THD, k_THD, v_THD, *limits(row), window_size=reach, **how)
    return out[None], None


AttentionInterface.register("varlen", varlen)
