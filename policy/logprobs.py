"""Logprobs of single tokens, straight from hidden states: the T x V logits never exist.

Axes:  N tokens   C a chunk of them   V vocabulary   H hidden size
"""

import torch
from torch import Tensor


def matmul(a: Tensor, b: Tensor, alpha: float = 1.0, into: Tensor | None = None) -> Tensor:
    """`alpha * a @ b` in at least float32: bf16 would move a logit of 20 by up to 0.06."""
    wide = torch.promote_types(a.dtype, torch.float32)
    mixed = {"out_dtype": wide} if a.is_cuda and a.dtype != wide else {}
    if not mixed:  # only GPUs multiply bf16 into a float32 accumulator
        a, b = a.to(wide), b.to(wide)
    out = a.new_empty(len(a), b.shape[1], dtype=wide) if into is None else into
    return torch.addmm(out, a, b, beta=int(out is into), alpha=alpha, out=out, **mixed)


class TokenLogprobs(torch.autograd.Function):
    """logp_n = z_n[y_n] - logsumexp(z_n)  with  z_n = W h_n / temperature, `chunk` rows at a time.

        d logp_n / d z_n = onehot(y_n) - softmax(z_n)

    Saved are h, W, y and one logsumexp per token. Backward computes a chunk's logits again, turns
    them into that difference in place and adds up d_W in float32: one matmul more than autograd's
    three buys O(C V) memory instead of O(N V). After Cut Cross-Entropy (arXiv:2411.09009) and Liger
    Kernel (arXiv:2410.10989); any function of logp [N], float32, may follow.
    """

    @staticmethod
    def forward(ctx, hidden_NH, weight_VH, target_N, temperature: float, chunk: int):
        wide = torch.promote_types(hidden_NH.dtype, torch.float32)
        logp_N, lse_N = hidden_NH.new_empty(2, len(target_N), dtype=wide)
        for start in range(0, len(target_N), chunk):
            rows = slice(start, start + chunk)
            logits_CV = matmul(hidden_NH[rows], weight_VH.T, 1 / temperature)
            target_C1 = target_N[rows, None]
            logp_N[rows] = logits_CV.log_softmax(1).gather(1, target_C1).squeeze(1)
            lse_N[rows] = logits_CV.gather(1, target_C1).squeeze(1) - logp_N[rows]
        ctx.save_for_backward(hidden_NH, weight_VH, target_N, lse_N)
        ctx.temperature, ctx.chunk = temperature, chunk
        return logp_N

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, d_logp_N):
        hidden_NH, weight_VH, target_N, lse_N = ctx.saved_tensors
        scale_N1 = -d_logp_N[:, None] / ctx.temperature
        d_hidden_NH = torch.empty_like(hidden_NH)
        d_weight_VH = torch.zeros_like(weight_VH, dtype=lse_N.dtype)
        for start in range(0, len(target_N), ctx.chunk):
            rows = slice(start, start + ctx.chunk)
            error_CV = matmul(hidden_NH[rows], weight_VH.T, 1 / ctx.temperature)
            error_CV.sub_(lse_N[rows, None]).exp_()
            error_CV.scatter_(1, target_N[rows, None], -1, reduce="add")
            error_CV = error_CV.to(weight_VH.dtype)  # only now: bf16 would lose p - 1 for p near 1
            d_hidden_NH[rows] = matmul(error_CV, weight_VH) * scale_N1[rows]
            scaled_CH = (hidden_NH[rows] * scale_N1[rows]).to(weight_VH.dtype)
            matmul(error_CV.T, scaled_CH, into=d_weight_VH)
        return d_hidden_NH, d_weight_VH.to(weight_VH.dtype), None, None, None
