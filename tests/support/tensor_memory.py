"""How much memory tensors take, counted as they are made."""

import weakref

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class Peak(TorchDispatchMode):
    """The most bytes of storage that were alive at the end of any operation."""

    def __init__(self, tensors=()):
        super().__init__()
        self.live, self.bytes, self.counting = {}, 0, True
        self.add(tensors)

    def add(self, tree) -> None:
        for tensor in tree_iter(tree):
            if isinstance(tensor, torch.Tensor) and not isinstance(tensor, DTensor):
                storage = tensor.untyped_storage()
                key = storage._cdata
                if key not in self.live:
                    forget = lambda _, key=key: self.live.pop(key, None)  # noqa: E731
                    self.live[key] = weakref.ref(storage, forget)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if self.counting:
            self.add((args, kwargs, out))
            storages = [ref() for ref in list(self.live.values())]
            self.bytes = max(self.bytes, sum(s.nbytes() for s in storages if s is not None))
        return out
