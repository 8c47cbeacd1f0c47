"""Weights of a model, as they are read from its files."""

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


def refuse_infinite(name: str, tensor: Tensor, folder: str) -> None:
    """Raises ValueError where a tensor, or this rank's shard of it, is not finite everywhere.

    Types of one byte are left out, for which torch has no such test on a CPU.
    """
    if tensor.dtype.itemsize == 1:
        return
    held = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    if wrong := int((~torch.isfinite(held)).sum()):
        numbers = f"{wrong} of {held.numel()} numbers are NaN or infinite"
        raise ValueError(f"model = {folder!r}: {name}: {numbers}: download or export it again")
