"""Computes logprobs of single tokens from hidden states: the T x V logits never exist.

Axes:  N tokens   C a chunk of them   V vocabulary   H hidden size
"""

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.distributed import ProcessGroup

from policy.allowed_tokens import Choices

CHUNK = 1024  # tokens whose logits exist at once


class Target(NamedTuple):
    """Each token's column in a slice of the vocabulary."""

    column_C1: Tensor  # clamped to the slice
    here_C1: Tensor  # bool, False if the slice does not contain the token


class SliceLogprobs(NamedTuple):
    """Logprobs of a chunk of tokens over the whole vocabulary, from slices of it."""

    logp_C: Tensor
    lse_C: Tensor


class Entropy:
    """Measures the policy's mean entropy in nats over the trained tokens, without another pass.

        H = -sum_v p_v log p_v = logsumexp(z) - p . z      z = W h / temperature
          = -logp_y - ((p - onehot(y)) W) . h / temperature

    Backward computes the product with W anyway, but in bf16: one token is off by some 0.01, and the
    mean by far less.
    """

    def __init__(self, device: torch.device):
        self.sums = torch.zeros(2, dtype=torch.float64, device=device)  # nats, tokens

    def add(self, entropy_N: Tensor, ranks: int) -> None:
        """Counts tokens. Each token's entropy is the sum of the terms that `ranks` ranks add."""
        finite = entropy_N.isfinite()
        nats = torch.where(finite, entropy_N, 0.0).sum()
        self.sums += torch.stack([nats, finite.sum() / ranks])

    def take(self) -> dict[str, float]:
        """Returns the mean over all ranks since the last call, as a metric; 0 without tokens.

        Collective over the default process group.
        """
        dist.all_reduce(self.sums)
        nats, tokens = self.sums.tolist()
        self.sums.zero_()
        return {"entropy": nats / max(tokens, 1)}


class Head(NamedTuple):
    """A rank's part of the head: by default the whole vocabulary, and no entropy."""

    group: ProcessGroup | None = None  # each of its ranks has a slice of the vocabulary
    first: int = 0  # this rank's first row of the vocabulary
    vocab: int | None = None  # rows from here on are padding
    entropy: Entropy | None = None  # counts the trained tokens
    choices: Choices | None = None  # the set that each token was chosen from; None: all tokens

    def logits(self, hidden_NH: Tensor, weight_VH: Tensor, rows: slice, scale: float) -> Tensor:
        """Returns logits [C, V] of a chunk; -inf for padding and for tokens outside the sets."""
        logits_CV = matmul(hidden_NH[rows], weight_VH.T, scale)
        if self.vocab is not None:
            logits_CV[:, max(0, self.vocab - self.first) :] = -torch.inf
        if self.choices:
            self.choices.keep(logits_CV, rows, self.first)
        return logits_CV


WHOLE = Head()


def matmul(a: Tensor, b: Tensor, alpha: float = 1.0, into: Tensor | None = None) -> Tensor:
    """Returns `alpha * a @ b` in at least float32: bf16 would move a logit of 20 by up to 0.06.

    If `into` is given, the product is added to it.
    """
    wide = torch.promote_types(a.dtype, torch.float32)
    mixed = a.is_cuda and a.dtype != wide  # only GPUs multiply bf16 into a float32 accumulator
    if not mixed:
        a = a.to(wide)
        b = b.to(wide)
    out = a.new_empty(len(a), b.shape[1], dtype=wide) if into is None else into
    beta = 0 if into is None else 1
    if mixed:
        return torch.addmm(out, a, b, beta=beta, alpha=alpha, out=out, out_dtype=wide)
    return torch.addmm(out, a, b, beta=beta, alpha=alpha, out=out)


def inside(target_C: Tensor, logits_CV: Tensor) -> Target:
    """Finds each target among the columns."""
    target_C1 = target_C[:, None]
    V = logits_CV.shape[1]
    return Target(target_C1.clamp(0, V - 1), (target_C1 >= 0) & (target_C1 < V))


def over_slices(logits_CV: Tensor, target_C: Tensor, group: ProcessGroup) -> SliceLogprobs:
    """Computes logprobs over the vocabulary slices of a group's ranks; collective.

    The ranks exchange two numbers per token: the logsumexp of their slice, and the target's logit
    if the slice has it, else 0.
    """
    target = inside(target_C, logits_CV)
    logit_C1 = torch.where(target.here_C1, logits_CV.gather(1, target.column_C1), 0.0)
    mine = torch.stack([logits_CV.logsumexp(1), logit_C1.squeeze(1)])
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(every, mine, group=group)
    lse_RC, logit_RC = torch.stack(every, 1)
    lse_C = lse_RC.logsumexp(0)
    return SliceLogprobs(logit_RC.sum(0) - lse_C, lse_C)


class Saved(FunctionCtx):
    """The values that `TokenLogprobs.forward` saves for the backward pass."""

    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]
    temperature: float
    chunk: int
    head: Head
    ranks: int  # number of ranks that share the head


class TokenLogprobs(torch.autograd.Function):
    """logp_n = z_n[y_n] - logsumexp(z_n)  with  z_n = W h_n / temperature, `chunk` rows at a time.

        d logp_n / d z_n = onehot(y_n) - softmax(z_n)

    Forward saves h, W, y and one logsumexp per token. Backward computes a chunk's logits again,
    turns them into that difference in place and adds up d_W in float32: one matmul more than
    autograd's three buys O(C V) memory instead of O(N V). This follows Cut Cross-Entropy
    (arXiv:2411.09009) and Liger Kernel (arXiv:2410.10989); any function of logp [N], float32, may
    use the result.

    If a group's ranks share the `head`, W is this rank's slice of the vocabulary, and d_h is this
    rank's part of a sum over those ranks. Backward counts the entropy of the tokens. If the `head`
    has choices, logprobs, gradients and entropy are the truncated policy's: softmax and sum run
    over each token's set.
    """

    @staticmethod
    def forward(
        ctx: Saved,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        target_N: Tensor,
        temperature: float,
        chunk: int,
        head: Head = WHOLE,
    ) -> Tensor:
        wide = torch.promote_types(hidden_NH.dtype, torch.float32)
        logp_N, lse_N = hidden_NH.new_empty(2, len(target_N), dtype=wide)
        group = head.group if head.group and dist.get_world_size(head.group) > 1 else None
        target_N = target_N - head.first  # row in this rank's slice, which may not contain it
        for start in range(0, len(target_N), chunk):
            rows = slice(start, start + chunk)
            logits_CV = head.logits(hidden_NH, weight_VH, rows, 1 / temperature)
            if group:
                logp_N[rows], lse_N[rows] = over_slices(logits_CV, target_N[rows], group)
                continue
            target_C1 = target_N[rows, None]
            logp_N[rows] = logits_CV.log_softmax(1).gather(1, target_C1).squeeze(1)
            lse_N[rows] = logits_CV.gather(1, target_C1).squeeze(1) - logp_N[rows]
        ctx.save_for_backward(hidden_NH, weight_VH, target_N, lse_N, logp_N)
        ctx.temperature = temperature
        ctx.chunk = chunk
        ctx.head = head
        ctx.ranks = dist.get_world_size(group) if group else 1
        return logp_N

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Saved, d_logp_N: Tensor) -> tuple[Tensor | None, ...]:
        hidden_NH, weight_VH, target_N, lse_N, logp_N = ctx.saved_tensors
        scale_N1 = -d_logp_N[:, None] / ctx.temperature
        d_hidden_NH = torch.empty_like(hidden_NH)
        d_weight_VH = None
        if ctx.needs_input_grad[1]:
            d_weight_VH = torch.zeros_like(weight_VH, dtype=lse_N.dtype)
        for start in range(0, len(target_N), ctx.chunk):
            rows = slice(start, start + ctx.chunk)
            error_CV = ctx.head.logits(hidden_NH, weight_VH, rows, 1 / ctx.temperature)
            error_CV.sub_(lse_N[rows, None]).exp_()
            target = inside(target_N[rows], error_CV)
            error_CV.scatter_add_(1, target.column_C1, -target.here_C1.to(error_CV.dtype))
            error_CV = error_CV.to(weight_VH.dtype)  # only now: bf16 would lose p - 1 for p near 1
            product_CH = matmul(error_CV, weight_VH)
            d_hidden_NH[rows] = product_CH * scale_N1[rows]
            if ctx.head.entropy:
                along_C = product_CH.mul_(hidden_NH[rows]).sum(1) / ctx.temperature
                ctx.head.entropy.add(-logp_N[rows] / ctx.ranks - along_C, ctx.ranks)
            if d_weight_VH is not None:
                scaled_CH = (hidden_NH[rows] * scale_N1[rows]).to(weight_VH.dtype)
                matmul(error_CV.T, scaled_CH, into=d_weight_VH)
        if d_weight_VH is not None:
            d_weight_VH = d_weight_VH.to(weight_VH.dtype)
        return d_hidden_NH, d_weight_VH, *[None] * 4
