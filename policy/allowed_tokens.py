"""Computes logprobs under truncated sampling (top_p, top_k, min_p), over the engine's token sets.

    logp_t  =  z_t[y_t] - log sum_{v in S_t} exp z_t[v]        S_t: the engine's set, not ours

The trainer's own nucleus would differ at its edge, so the engine sends the ids of each set.
DeepSeek V3.2 calls this "Keep Sampling Mask" (arXiv:2512.02556); vLLM has had it since pull request
49577.

Axes, as suffixes:  T tokens of an answer, a sequence or a row    N trained tokens    C a chunk of
    the N    M ids of sets, end to end    V vocabulary
"""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from policy import Row


class Allowed(NamedTuple):
    """The sets of T tokens: arrays for an answer or a sequence, tensors for a packed row."""

    count_T: Any  # int32, number of ids in each set; 0 for a token that was not sampled
    ids_M: Any  # int32

    @classmethod
    def of(cls, sets: Sequence[Sequence[int]]) -> "Allowed":
        """Builds the sets from one list of ids per token."""
        count_T = np.array([len(ids) for ids in sets], np.int32)
        ids = itertools.chain.from_iterable(sets)
        return cls(count_T, np.fromiter(ids, np.int32, int(count_T.sum())))

    @classmethod
    def joined(cls, parts: "Sequence[Allowed]") -> "Allowed":
        """Joins the sets of one or more parts of an answer."""
        count_T = np.concatenate([part.count_T for part in parts])
        return cls(count_T, np.concatenate([part.ids_M for part in parts]))

    def after(self, n: int) -> "Allowed":
        """Returns the sets after the first n."""
        return Allowed(self.count_T[n:], self.ids_M[self.count_T[:n].sum() :])

    def extended(self, more: "Allowed | None") -> "Allowed":
        """Returns these sets, followed by the sets of the tokens that were sampled next."""
        return Allowed.joined([self, more]) if more else self

    def to(self, device: torch.device) -> "Allowed":
        """Returns the sets of a packed row on this device."""
        return Allowed(self.count_T.to(device), self.ids_M.to(device))

    def at(self, at_N: Tensor) -> "Choices":
        """Returns the sets of the tokens at positions `at_N`. Raises ValueError if one is empty."""
        count_N = self.count_T[at_N].long()
        if not (count_N > 0).all():
            raise ValueError("a trained token has no set of tokens from which the engine chose it")
        return Choices(self.ids_M, self.count_T.cumsum(0)[at_N] - count_N, count_N)


def choices(row: Row, at_N: Tensor) -> "Choices | None":
    """Returns the sets of a row's tokens at positions `at_N`; None: the whole vocabulary."""
    allowed: Allowed | None = getattr(row, "allowed", None)
    return allowed.at(at_N) if allowed else None


class Choices(NamedTuple):
    """The sets of N trained tokens: where each begins in `ids_M`, and how many ids it has."""

    ids_M: Tensor
    first_N: Tensor
    count_N: Tensor

    def keep(self, logits_CV: Tensor, rows: slice, first: int) -> None:
        """Sets the logits of a chunk to -inf, in place, except for the ids in its tokens' sets.

        `rows` selects the chunk's tokens. Column 0 is row `first` of the vocabulary; the rows
        before and after this slice may be on other ranks. Copies one logit per id in the sets.
        """
        count_C = self.count_N[rows]
        row_M = torch.arange(len(count_C), device=count_C.device).repeat_interleave(count_C)
        # The distance from an id's position among this chunk's ids to its position among all ids.
        shift_C = self.first_N[rows] - (count_C.cumsum(0) - count_C)
        place_M = torch.arange(len(row_M), device=row_M.device) + shift_C[row_M]
        column_M = self.ids_M[place_M].long() - first
        here_M = (column_M >= 0) & (column_M < logits_CV.shape[1])
        at = row_M[here_M], column_M[here_M]
        kept_M = logits_CV[at]
        logits_CV.fill_(-torch.inf)[at] = kept_M
