"""Makes packed rows of random tokens, to measure a trainer."""

from dataclasses import dataclass

import torch


@dataclass
class Row:
    """A policy.Row that trains all but the first token of each sequence."""

    tokens_T: torch.Tensor
    positions_T: torch.Tensor
    seq_T: torch.Tensor
    mask_T: torch.Tensor
    routes_N: None = None


def row(tokens: int, sequence: int, vocab: int, seed: int = 0) -> Row:
    """Makes random tokens in sequences of equal length."""
    drawn_T = torch.randint(vocab, (tokens,), generator=torch.Generator().manual_seed(seed))
    index_T = torch.arange(tokens)
    return Row(drawn_T, index_T % sequence, index_T // sequence, index_T % sequence > 0)
