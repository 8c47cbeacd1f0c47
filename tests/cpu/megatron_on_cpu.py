"""What Megatron-Core 0.16.1 takes for granted of CUDA and mamba_ssm, on a CPU."""

import contextlib
import sys
import types

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")


class Stream:
    """A CUDA stream or event that has nothing to wait for."""

    def __init__(self, *args, **kwargs):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def __getattr__(self, name):
        return lambda *args, **kwargs: Stream()


class CudaIsCpu(TorchFunctionMode):
    """`device="cuda"` means the CPU."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = {k: to_cpu(v) if k == "device" else v for k, v in (kwargs or {}).items()}
        return function(*map(to_cpu, args), **kwargs)


def to_cpu(x):
    """CUDA devices, by name or object, as the CPU; anything else as it is."""
    return CPU if isinstance(x, str | torch.device) and str(x).startswith("cuda") else x


def rms_norm_gated(x, weight, z, eps, group_size):
    """y = norm(x * silu(z)) over groups; after mamba_ssm's layernorm_gated reference."""
    x = x.float() * F.silu(z.float()) if z is not None else x.float()
    grouped = x.unflatten(-1, (-1, group_size))
    grouped = grouped * torch.rsqrt(grouped.square().mean(-1, keepdim=True) + eps)
    return grouped.flatten(-2) * weight.float()


class RMSNorm(nn.Module):
    """mamba_ssm.ops.triton.layernorm_gated.RMSNorm."""

    def __init__(
        self, size, eps=1e-5, group_size=None, norm_before_gate=True, device=None, dtype=None
    ):
        super().__init__()
        assert not norm_before_gate
        self.weight = nn.Parameter(torch.ones(size, dtype=dtype))
        self.eps, self.group_size = eps, group_size

    def forward(self, x, z=None):
        return rms_norm_gated(x, self.weight, z, self.eps, self.group_size).to(x.dtype)


def scan(x, dt, A, B, C, D):
    """h_t = exp(dt_t A) h_{t-1} + dt_t B_t x_t;  y_t = C_t h_t + D x_t, one sequence [L, ...].

    x [L, h, p], dt [L, h], A [h], B and C [L, h, n], D [h]. Mamba-2 (arXiv:2405.21060).
    """
    state, out = x.new_zeros(*x.shape[1:], B.shape[-1]), []
    for x_t, dt_t, B_t, C_t in zip(x, dt, B, C, strict=True):
        decay = torch.exp(dt_t * A)[:, None, None]
        state = decay * state + (dt_t[:, None] * x_t)[..., None] * B_t[:, None]
        out.append((state * C_t[:, None]).sum(-1) + D[:, None] * x_t)
    return torch.stack(out)


def mamba_split_conv1d_scan_combined(
    zxbcdt, weight, bias, dt_bias, A, D, chunk_size, activation, headdim, ngroups,
    norm_before_gate=False, seq_idx=None, rmsnorm_weight=None, **unused,
):  # fmt: skip
    """The training kernel of Mamba-2 without its norm, in torch, a sequence after the other.

    zxbcdt [1, L, 2 h p + 2 g n + h]; weight [h p + 2 g n, 4]. Returns y * silu(z) [1, L, h p].
    """
    heads = len(A)
    inner = heads * headdim
    n = (weight.shape[0] - inner) // (2 * ngroups)
    sizes = [inner, inner + 2 * ngroups * n, heads]
    z, xbc, dt = zxbcdt[0].float().split(sizes, -1)
    idx = torch.zeros(len(z), dtype=torch.long) if seq_idx is None else seq_idx[0]
    lengths = torch.unique_consecutive(idx, return_counts=True)[1].tolist()
    out = []
    for xbc_L, dt_L in zip(xbc.split(lengths), dt.split(lengths), strict=True):
        padded = F.pad(xbc_L.T[None], (weight.shape[1] - 1, 0))
        conv = F.conv1d(padded, weight.float()[:, None], bias.float(), groups=len(weight))[0].T
        x, B, C = F.silu(conv).split([inner, ngroups * n, ngroups * n], -1)
        B, C = (m.unflatten(-1, (ngroups, n)) for m in (B, C))
        B, C = (m.repeat_interleave(heads // ngroups, 1) for m in (B, C))
        rate = F.softplus(dt_L + dt_bias.float())
        y = scan(x.unflatten(-1, (heads, headdim)), rate, A, B, C, D.float())
        out.append(y.flatten(1))
    return (torch.cat(out) * F.silu(z)).to(zxbcdt.dtype)[None]


@contextlib.contextmanager
def pretended(modules: dict[str, dict]):
    """Modules that exist while Megatron looks for them, and not for transformers or vLLM."""
    for name, content in modules.items():
        sys.modules[name] = types.ModuleType(name)
        vars(sys.modules[name]).update(content)
    yield
    for name in modules:
        del sys.modules[name]


def install():
    """Patches torch.cuda and Megatron; called once, when megatron.core has been imported."""
    cuda = torch.cuda
    cuda.current_device = lambda: CPU
    cuda.Stream = cuda.Event = Stream
    cuda.current_stream, cuda.stream = lambda *args: Stream(), lambda stream: stream
    cuda.synchronize = lambda *args: None
    cuda.manual_seed, cuda.get_rng_state = torch.manual_seed, lambda *args: torch.get_rng_state()
    torch.Tensor.cuda = lambda tensor, *args, **kwargs: tensor
    torch.Tensor.record_stream = lambda tensor, stream: None
    kind = torch.Tensor.type

    def cuda_type(tensor, *args, **kwargs):
        if args or kwargs:
            return kind(tensor, *args, **kwargs)
        return "torch.cuda." + kind(tensor).split(".")[-1]

    torch.Tensor.type = cuda_type
    CudaIsCpu().__enter__()
    all_to_all = dist.all_to_all_single

    def all_to_all_single(*args, **kwargs):
        sizes = {k: v.tolist() for k, v in kwargs.items() if "sizes" in k and torch.is_tensor(v)}
        return all_to_all(*args, **kwargs | sizes)

    dist.all_to_all_single = all_to_all_single
    kernels = {"mamba_split_conv1d_scan_combined": mamba_split_conv1d_scan_combined}
    # It imports triton, which has no CPU build.
    inference = "megatron.core.inference.contexts.attention_context.triton.tensor_ops"
    tensor_ops = ("tensor_get_slice_after", "tensor_masked_update", "tensor_merge")
    missing = dict.fromkeys(("mamba_ssm", "mamba_ssm.ops", "mamba_ssm.ops.triton"), {}) | {
        "mamba_ssm.ops.triton.layernorm_gated": {"RMSNorm": RMSNorm},
        "mamba_ssm.ops.triton.ssd_combined": kernels | {"mamba_chunk_scan_combined": None},
        inference: dict.fromkeys(tensor_ops),
    }
    with pretended(missing):
        from megatron.core.ssm import mamba_mixer
    mamba_mixer._check_mamba_sequence_packing_support = lambda **kwargs: (True, None)
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import moe_utils

    random._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    moe_utils.te_general_gemm = None
