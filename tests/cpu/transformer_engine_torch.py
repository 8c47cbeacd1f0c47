"""Stands for Transformer Engine's extension: which places of a packed row a rank has."""

import torch


def thd_get_partitioned_indices(ends, total, cp_size, cp_rank):
    """Of each sequence in 2 n parts the rank-th from the front, and the rank-th from the back."""
    runs, every = [], ends.tolist()
    for first, last in zip(every, every[1:], strict=False):
        size = (last - first) // (2 * cp_size)
        runs.append(torch.arange(first + cp_rank * size, first + (cp_rank + 1) * size))
        runs.append(torch.arange(last - (cp_rank + 1) * size, last - cp_rank * size))
    return torch.cat(runs)
