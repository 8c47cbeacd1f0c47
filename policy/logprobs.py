"""Logprobs of single tokens, straight from hidden states: the T x V logits never exist.

Axes:  N tokens   C a chunk of them   V vocabulary   H hidden size
"""

import torch
import torch.distributed as dist
from torch import Tensor


def matmul(a: Tensor, b: Tensor, alpha: float = 1.0, into: Tensor | None = None) -> Tensor:
    """`alpha * a @ b` in at least float32: bf16 would move a logit of 20 by up to 0.06."""
    wide = torch.promote_types(a.dtype, torch.float32)
    mixed = {"out_dtype": wide} if a.is_cuda and a.dtype != wide else {}
    if not mixed:  # only GPUs multiply bf16 into a float32 accumulator
        a, b = a.to(wide), b.to(wide)
    out = a.new_empty(len(a), b.shape[1], dtype=wide) if into is None else into
    return torch.addmm(out, a, b, beta=int(out is into), alpha=alpha, out=out, **mixed)


def inside(target_C: Tensor, logits_CV: Tensor) -> tuple[Tensor, Tensor]:
    """(target [C, 1] clamped to the columns, whether it is one of them [C, 1])."""
    target_C1, V = target_C[:, None], logits_CV.shape[1]
    return target_C1.clamp(0, V - 1), (target_C1 >= 0) & (target_C1 < V)


def over_slices(logits_CV: Tensor, target_C: Tensor, group) -> tuple[Tensor, Tensor]:
    """(logprobs, logsumexp) [C] over the slices of the vocabulary that the ranks of a group have.

    One exchange of two numbers a token: the slice's logsumexp, and the target's logit if it is in.
    """
    target_C1, here_C1 = inside(target_C, logits_CV)
    logit_C = torch.where(here_C1, logits_CV.gather(1, target_C1), 0.0).squeeze(1)
    mine = torch.stack([logits_CV.logsumexp(1), logit_C])
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(every, mine, group=group)
    lse_RC, logit_RC = torch.stack(every, 1)
    lse_C = lse_RC.logsumexp(0)
    return logit_RC.sum(0) - lse_C, lse_C


class TokenLogprobs(torch.autograd.Function):
    """logp_n = z_n[y_n] - logsumexp(z_n)  with  z_n = W h_n / temperature, `chunk` rows at a time.

        d logp_n / d z_n = onehot(y_n) - softmax(z_n)

    Saved are h, W, y and one logsumexp per token. Backward computes a chunk's logits again, turns
    them into that difference in place and adds up d_W in float32: one matmul more than autograd's
    three buys O(C V) memory instead of O(N V). After Cut Cross-Entropy (arXiv:2411.09009) and Liger
    Kernel (arXiv:2410.10989); any function of logp [N], float32, may follow.

    With `part` = (group, first, vocab) W is this rank's slice of the vocabulary, from its row
    `first` on, d_h its part of a sum over the group's ranks, and rows from `vocab` on are padding.
    """

    @staticmethod
    def forward(ctx, hidden_NH, weight_VH, target_N, temperature, chunk, part=(None, 0, None)):
        wide = torch.promote_types(hidden_NH.dtype, torch.float32)
        logp_N, lse_N = hidden_NH.new_empty(2, len(target_N), dtype=wide)
        group, first, vocab = part
        ranks = dist.get_world_size(group) if group else 1
        ctx.real = len(weight_VH) if vocab is None else max(0, vocab - first)
        target_N = target_N - first  # by row of this rank's slice, which may not have it
        for start in range(0, len(target_N), chunk):
            rows = slice(start, start + chunk)
            logits_CV = matmul(hidden_NH[rows], weight_VH.T, 1 / temperature)
            logits_CV[:, ctx.real :] = -torch.inf  # padding of the vocabulary
            if ranks > 1:
                logp_N[rows], lse_N[rows] = over_slices(logits_CV, target_N[rows], group)
                continue
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
            error_CV[:, ctx.real :] = -torch.inf
            error_CV.sub_(lse_N[rows, None]).exp_()
            target_C1, here_C1 = inside(target_N[rows], error_CV)
            error_CV.scatter_add_(1, target_C1, -here_C1.to(error_CV.dtype))
            error_CV = error_CV.to(weight_VH.dtype)  # only now: bf16 would lose p - 1 for p near 1
            d_hidden_NH[rows] = matmul(error_CV, weight_VH) * scale_N1[rows]
            scaled_CH = (hidden_NH[rows] * scale_N1[rows]).to(weight_VH.dtype)
            matmul(error_CV.T, scaled_CH, into=d_weight_VH)
        return d_hidden_NH, d_weight_VH.to(weight_VH.dtype), *[None] * 4
