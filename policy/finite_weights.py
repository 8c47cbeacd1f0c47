"""Refuses weights that are not finite, as they are read from a model's files."""

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


def refuse_infinite(name: str, tensor: Tensor, folder: str) -> None:
    """Raises ValueError if a tensor, or this rank's shard of it, has numbers that are not finite.

    One-byte types are not checked: torch has no such test for them on a CPU.
    """
    if tensor.dtype.itemsize == 1:
        return
    held = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    if wrong := int((~torch.isfinite(held)).sum()):
        raise ValueError(
            f"model = {folder!r}: {name}: {wrong} of {held.numel()} numbers are NaN or infinite: "
            "download or export the model again"
        )
