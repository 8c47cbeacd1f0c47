"""Lists the GPUs that a run can be planned for, with their memory and speeds."""

from typing import NamedTuple

import torch

GIB = 2**30


class Gpu(NamedTuple):
    """A GPU: the memory that torch reports, and speeds per second from its data sheet."""

    name: str
    memory: float  # bytes
    flops: float  # dense bf16
    hbm: float  # bytes
    nvlink: float  # bytes to the other GPUs of the node, in one direction


H100 = Gpu("H100", 79 * GIB, 989e12, 3.35e12, 450e9)
H200 = Gpu("H200", 139 * GIB, 989e12, 4.8e12, 450e9)
B200 = Gpu("B200", 178 * GIB, 2250e12, 8e12, 900e9)
KNOWN = (H100, H200, B200)


def planned(choice: str) -> Gpu:
    """Returns the GPU that --gpu names; for "auto" this machine's, or an H100 if it has no GPU.

    A GPU that is not in KNOWN is planned with its own memory and an H100's speeds.
    """
    every = {gpu.name.lower(): gpu for gpu in KNOWN}
    if choice != "auto" or not torch.cuda.is_available():
        return every.get(choice, H100)
    found = torch.cuda.get_device_properties(0)
    like = next((gpu for gpu in every.values() if gpu.name in found.name), H100)
    name = f"{found.name}, as fast as an {like.name}"
    return like._replace(name=name, memory=found.total_memory)
