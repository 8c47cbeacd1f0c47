"""Operations that make the host wait for a device, counted as they are called; a CPU has them too.

`tolist` and copies from a device are not among them: on a CPU they are no operations.
"""

from torch.utils._python_dispatch import TorchDispatchMode

WAITS = ("aten::_local_scalar_dense", "aten::equal", "aten::nonzero", "aten::masked_select")


class HostWaits(TorchDispatchMode):
    """How often a GPU would have been waited for."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.name().split(".")[0] in WAITS
        return func(*args, **(kwargs or {}))
