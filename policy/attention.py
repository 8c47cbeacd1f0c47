"""Attention inside each sequence of a packed row, by torch's varlen kernel, which needs no mask.

Axes:  T tokens of a packed row   N its sequences   D width of a head

transformers builds a T x T mask for SDPA; for a name that it knows as an attention alone, none.
"""

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import activate_flash_attention_impl, restore_flash_attention_impl
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface

# torch's name of what may replace its FlashAttention-2, by a GPU's compute capability: Hopper,
# Blackwell. FA3 is in flash_attn_interface, FA4 in flash_attn.cute: neither is a requirement here.
NEWER = {9: "FA3", 10: "FA4"}


def implementation(attention: str) -> str:
    """transformers' name of policy.attention: of "auto" the kernel on a GPU, elsewhere sdpa."""
    automatic = "varlen" if torch.cuda.is_available() else "sdpa"
    return automatic if attention == "auto" else attention


def prepared(attention: str, config: Any) -> str:
    """The same, and on a GPU the kernel is the newest that runs a model of this config.json."""
    name = implementation(attention)
    if name == "varlen" and torch.cuda.is_available():
        activate(Heads.of(config), torch.device("cuda", torch.cuda.current_device()))
    return name


class Heads(NamedTuple):
    """The heads of a model's attention."""

    queries: int
    keys: int
    width: int

    @classmethod
    def of(cls, config: Any) -> "Heads":
        """Those of a config.json."""
        text = config.get_text_config()
        queries = text.num_attention_heads
        keys = getattr(text, "num_key_value_heads", None) or queries
        return cls(queries, keys, getattr(text, "head_dim", None) or text.hidden_size // queries)


@lru_cache
def activate(heads: Heads, device: torch.device) -> str:
    """Makes torch's kernel the newest that this GPU and its packages have; returns, prints which.

    FlashAttention-2 stays where that package is not there, or does something else with such heads.
    """
    name, why = NEWER.get(torch.cuda.get_device_capability(device)[0], ""), ""
    try:
        if name:
            expected = tried(heads, device)
            activate_flash_attention_impl(name)
            if not all(map(alike, tried(heads, device), expected)):
                raise RuntimeError("it computes other numbers")
    except Exception as error:  # of a package of any version, which a run need not have
        restore_flash_attention_impl(_raise_warn=False)
        why = f", not {name}: {type(error).__name__}: {error}".splitlines()[0]
        name = ""
    print(f"attention: {name or 'FA2'}{why}", flush=True)
    return name or "FA2"


def tried(heads: Heads, device: torch.device) -> list[Tensor]:
    """Attention of two sequences in bf16, whole and in a window, each with its gradients."""
    ends_N = torch.tensor([0, 40, 136], dtype=torch.int32, device=device)
    found = []
    for reach in ((-1, 0), (15, 0)):
        # As far apart as cosines of other frequencies, without a use of the random state.
        index = torch.arange(136 * heads.width, device=device).float().view(136, 1, -1)
        sizes = (heads.queries, heads.keys, heads.keys)
        q, k, v = (
            (index * (0.7 + 0.1 * i) + torch.arange(n, device=device)[:, None]).cos().bfloat16()
            for i, n in enumerate(sizes)
        )
        given = [x.requires_grad_() for x in (q, k, v)]
        how: dict[str, Any] = {"window_size": reach, "enable_gqa": True}
        out: Any = varlen_attn(q, k, v, ends_N, ends_N, 96, 96, **how)
        found += [out.detach(), *torch.autograd.grad(out.float().square().sum(), given)]
    return found


def alike(found: Tensor, expected: Tensor) -> bool:
    """Whether two results in bf16 are the same to a fiftieth of their norm; NaN is not."""
    gap = (found.float() - expected.float()).norm()
    return bool(gap <= 0.02 * expected.float().norm())


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
