"""Computes attention within each sequence of a packed row, with torch's varlen kernel.

Axes:  T tokens of a packed row   N its sequences   D width of a head

For SDPA, transformers builds a T x T mask. It builds none for a function without a registered mask
function, and this kernel needs none.
"""

from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import activate_flash_attention_impl, restore_flash_attention_impl
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# torch's names for the kernels that may replace its FlashAttention-2, by GPU compute capability:
# Hopper, Blackwell. FA3 is in flash_attn_interface, FA4 in flash_attn.cute: both are optional.
NEWER = {9: "FA3", 10: "FA4"}


def implementation(attention: str) -> str:
    """Returns transformers' name for policy.attention; "auto" means varlen on a GPU, else sdpa."""
    automatic = "varlen" if torch.cuda.is_available() else "sdpa"
    return automatic if attention == "auto" else attention


def prepared(attention: str, config: "PretrainedConfig") -> str:
    """Returns `implementation`; on a GPU also activates the newest kernel that runs this model."""
    name = implementation(attention)
    if name == "varlen" and torch.cuda.is_available():
        activate(Heads.of(config), torch.device("cuda", torch.cuda.current_device()))
    return name


class Heads(NamedTuple):
    """A model's attention heads."""

    queries: int
    keys: int
    width: int

    @classmethod
    def of(cls, config: "PretrainedConfig") -> "Heads":
        """Reads the heads from a config.json."""
        text = config.get_text_config()
        queries = text.num_attention_heads
        keys = getattr(text, "num_key_value_heads", None) or queries
        width = getattr(text, "head_dim", None) or text.hidden_size // queries
        return cls(queries, keys, width)


@lru_cache
def activate(heads: Heads, device: torch.device) -> str:
    """Activates the newest kernel that the GPU and the packages offer; prints and returns its name.

    FlashAttention-2 stays active if the newer kernel's package is missing, or if the newer kernel
    computes different numbers for these heads.
    """
    name = NEWER.get(torch.cuda.get_device_capability(device)[0], "")
    why = ""
    try:
        if name:
            expected = tried(heads, device)
            activate_flash_attention_impl(name)
            if not all(map(alike, tried(heads, device), expected)):
                raise RuntimeError("its numbers differ")
    except Exception as error:  # an optional package of any version may raise anything
        restore_flash_attention_impl(_raise_warn=False)
        why = f", not {name}: {type(error).__name__}: {error}".splitlines()[0]
        name = ""
    print(f"attention: {name or 'FA2'}{why}", flush=True)
    return name or "FA2"


def tried(heads: Heads, device: torch.device) -> list[Tensor]:
    """Returns full and windowed attention over two bf16 sequences, and the gradients of each."""
    ends_N = torch.tensor([0, 40, 136], dtype=torch.int32, device=device)
    found = []
    for reach in ((-1, 0), (15, 0)):
        # Cosines of different frequencies differ widely, and do not touch the random state.
        index = torch.arange(136 * heads.width, device=device).float().view(136, 1, -1)
        sizes = (heads.queries, heads.keys, heads.keys)
        q, k, v = (
            (index * (0.7 + 0.1 * i) + torch.arange(n, device=device)[:, None]).cos().bfloat16()
            for i, n in enumerate(sizes)
        )
        given = [x.requires_grad_() for x in (q, k, v)]
        out = varlen_attn(q, k, v, ends_N, ends_N, 96, 96, window_size=reach, enable_gqa=True)
        assert isinstance(out, Tensor)  # a tuple only with return_aux
        gradients = torch.autograd.grad(out.float().square().sum(), given)
        found += [out.detach(), *gradients]
    return found


def alike(found: Tensor, expected: Tensor) -> bool:
    """Returns True if two bf16 results agree to within 2 % of the norm; False for NaN."""
    gap = (found.float() - expected.float()).norm()
    return bool(gap <= 0.02 * expected.float().norm())


@lru_cache(maxsize=1)  # all layers share a row's positions, so the GPU is asked once
def limits(positions_1T: Tensor) -> tuple[Tensor, Tensor, int, int]:
    """Returns varlen_attn's arguments that describe sequences: their boundaries and longest length.

    Each is given twice, for queries and for keys; boundaries are int32 [N + 1]. A new sequence
    begins wherever the position is 0.
    """
    starts_N = (positions_1T[0] == 0).nonzero().squeeze(1)
    ends_N = F.pad(starts_N, (0, 1), value=positions_1T.shape[1]).int()
    longest = int(ends_N.diff().max())
    return ends_N, ends_N, longest, longest


def varlen(
    module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: None, **given: Any
) -> tuple[Tensor, None]:
    """Computes causal attention from [1, heads, T, D] to [1, T, heads, D], for transformers.

    Raises ValueError if a layer needs a feature that the kernel does not support.
    """
    row = given.get("position_ids")
    window = given.get("sliding_window")
    if row is None or given.get("softcap") or given.get("s_aux") is not None:
        raise ValueError(
            f"{type(module).__name__}: policy.attention = 'varlen' needs position_ids and "
            "supports neither softcap nor sinks: expected 'eager'"
        )
    q_THD, k_THD, v_THD = (x[0].transpose(0, 1) for x in (q, k, v))
    reach = (window - 1 if window else -1, 0)  # tokens before and after; -1: all
    out = varlen_attn(
        q_THD,
        k_THD,
        v_THD,
        *limits(row),
        scale=given.get("scaling"),
        window_size=reach,
        enable_gqa=True,
    )
    assert isinstance(out, Tensor)  # a tuple only with return_aux
    return out[None], None


AttentionInterface.register("varlen", varlen)
