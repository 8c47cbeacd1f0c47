"""Copies tensors straight into vLLM's layers, by repeating the copies that its loaders make.

The loaders are Python. They take some 0.5 ms per tensor, a mixture of experts has tens of thousands
of tensors, and the engine is paused meanwhile. But they do the same each time: they slice and copy.
So after a verified update, they are run on tensors without memory, and each copy is recorded. If
the copies fill each element of a layer exactly once, later updates only repeat these copies, and
vLLM processes the layer as it does after its own loaders. The loaders still fill all other layers.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.model_loader.reload import layerwise
from vllm.model_executor.model_loader.reload.meta import SKIP_LOAD_TENSORS
from vllm.model_executor.model_loader.reload.utils import get_layer_tensors

from policy import WeightMeta
from policy.sync.verification import is_quantized

if TYPE_CHECKING:
    from torch._ops import OpOverload
    from vllm.config import VllmConfig
    from vllm.model_executor.models.interfaces_base import VllmModel

Weights = Iterable[tuple[str, Tensor]]


class Part(NamedTuple):
    """Some elements of a tensor, as arguments of `torch.as_strided`."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int  # in elements, from the tensor's first one


class Copy(NamedTuple):
    """A loader's copy of a part of a sent tensor to a part of a layer's tensor."""

    tensor: str  # its name as sent
    of: Part
    target: str  # the name of the layer's tensor
    to: Part


class Home(NamedTuple):
    """A layer's tensor."""

    layer: str
    name: str
    tensor: Tensor  # a tensor without memory


def storage(tensor: Tensor) -> int:
    """Returns the address of a tensor's storage, which all its views share."""
    return tensor.untyped_storage()._cdata


def part_of(whole: Tensor, view: Tensor) -> Part:
    """Finds the elements of a view in its whole tensor."""
    offset = int(view.storage_offset() - whole.storage_offset())
    return Part(tuple(view.shape), tuple(view.stride()), offset)


def tiles(parts: list[Part], numel: int) -> bool:
    """Returns True if parts of a dense tensor cover each of its elements once."""
    starts, lengths = [], []
    for size, stride, offset in parts:
        dims = [dim for dim in zip(size, stride, strict=True) if dim[0] != 1]
        length = 1  # length of a run of neighbouring elements
        while dims and dims[-1][1] == length:
            length *= dims.pop()[0]
        start_N = np.array([offset])
        for count, step in dims:
            start_N = np.add.outer(start_N, step * np.arange(count)).ravel()
        starts.append(start_N)
        lengths.append(np.full(len(start_N), length))
    start_N, length_N = np.concatenate(starts), np.concatenate(lengths)
    order_N = np.argsort(start_N, kind="stable")
    end_N = np.cumsum(length_N[order_N])
    return bool(end_N[-1] == numel and (start_N[order_N] == end_N - length_N[order_N]).all())


def part(whole: Tensor, at: Part) -> Tensor:
    """Returns a view of some elements of a tensor."""
    return whole.as_strided(at.size, at.stride, whole.storage_offset() + at.offset)


class Recorder(TorchDispatchMode):
    """A mode that records loaders' copies from `sent` to `homes`, without making them.

    `doubted` contains the layers to which anything else is written, and `used` the tensors from
    which anything else is computed.
    """

    def __init__(self, sent: dict[str, Tensor], homes: list[Home]):
        super().__init__()
        self.sent = {storage(tensor): (name, tensor) for name, tensor in sent.items()}
        self.homes = {storage(home.tensor): home for home in homes}
        self.copies: dict[str, list[Copy]] = defaultdict(list)  # by layer
        self.doubted: set[str] = set()
        self.used: set[str] = set()

    def __torch_dispatch__(
        self,
        function: "OpOverload",
        types: Sequence[type],
        args: tuple = (),
        kwargs: dict | None = None,
    ) -> Any:
        """Runs an operation, unless it writes to a layer; returns what the operation returns."""
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        homes = [self.homes[at] for at in map(storage, tensors) if at in self.homes]
        if homes and function._schema.is_mutable:
            self._note(function, homes, tensors)
            return args[0]
        found = function(*args, **(kwargs or {}))
        made = {storage(x) for x in tree_leaves(found) if isinstance(x, Tensor)}
        self._use(x for x in tensors if storage(x) not in made)  # a view does not count as a use
        return found

    def _note(self, function: "OpOverload", homes: list[Home], tensors: list[Tensor]) -> None:
        to, of = tensors[0], tensors[-1]
        is_copy = function is torch.ops.aten.copy_.default and len(homes) == 1
        if is_copy and storage(of) in self.sent and to.shape == of.shape:
            name, whole = self.sent[storage(of)]
            home = homes[0]
            copy = Copy(name, part_of(whole, of), home.name, part_of(home.tensor, to))
            self.copies[home.layer].append(copy)
        else:
            self.doubted |= {home.layer for home in homes}
            self._use(tensors)

    def _use(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            if sent := self.sent.get(storage(tensor)):
                name, _ = sent
                self.used.add(name)


class Copies:
    """The copies that fill a vLLM model's layers from tensors that `metas` announce.

    `filled` maps each layer to its copies, and `readers` maps each copied tensor to its layers. Any
    other tensor is left to vLLM's loaders.
    """

    @torch.no_grad()
    def __init__(self, model: "VllmModel", config: "VllmConfig", metas: list[WeightMeta]):
        """Observes the loaders. Passes on what they raise for a tensor without memory."""
        self.layers: dict[str, nn.Module] = dict(model.named_modules())
        self.filled: dict[str, list[Copy]] = {}
        self.readers: dict[str, list[str]] = {}
        self.sources: dict[str, int] = {}  # number of sent tensors that each filled layer needs
        if config.parallel_config.enable_eplb:  # experts move between updates
            return
        layerwise.initialize_layerwise_reload(model)
        try:
            noted, whole = self._asked(model, metas)
        finally:
            layerwise.finalize_layerwise_reload(model, config.model_config)
        slow = set(noted.used)
        while True:  # either all tensors of a layer are copied, or none is
            left = {
                path
                for path, copies in noted.copies.items()
                if path not in whole or any(copy.tensor in slow for copy in copies)
            }
            others = {copy.tensor for path in left for copy in noted.copies[path]} - slow
            if not others:
                break
            slow |= others
        self.filled = {path: noted.copies[path] for path in noted.copies.keys() - left}
        # No layer here reads other workers' experts, of which there are many.
        unread = {m.name for m in metas if ".experts." in m.name and m.name not in slow}
        self.readers = {name: [] for name in unread}
        for path, copies in self.filled.items():
            for name in {copy.tensor for copy in copies}:
                self.readers.setdefault(name, []).append(path)
        self.sources = {path: len({c.tensor for c in self.filled[path]}) for path in self.filled}

    def _asked(self, model: "VllmModel", metas: list[WeightMeta]) -> tuple[Recorder, set[str]]:
        """Records what the loaders do; also returns the layers that their copies fill."""
        sent = {
            meta.name: torch.empty(meta.shape, dtype=getattr(torch, meta.dtype), device="meta")
            for meta in metas
        }
        homes = []
        for path, layer in self.layers.items():
            for name, tensor in get_layer_tensors(layer).items():
                homes.append(Home(path, name, tensor))
                tensor.weight_loader = layerwise._get_original_loader(tensor)
        with Recorder(sent, homes) as noted:
            model.load_weights(iter(sent.items()))
        whole = set()
        for path, copies in noted.copies.items():
            layer = self.layers[path]
            if path in noted.doubted or is_deferred_attention_layer(layer) or is_quantized(layer):
                continue
            parts = defaultdict(list)
            for copy in copies:
                parts[copy.target].append(copy.to)
            held = get_layer_tensors(layer)
            # vLLM does not reload non-persistent buffers.
            if layer._non_persistent_buffers_set & parts.keys():
                continue
            if all(
                name in parts and tiles(parts[name], held[name].numel())
                for name in held.keys() - SKIP_LOAD_TENSORS
            ):
                whole.add(path)
        return noted, whole

    def load(
        self, load_weights: Callable[[Weights], set[str] | None], weights: Weights
    ) -> set[str] | None:
        """Loads a whole policy; vLLM's `load_weights` gets the tensors that have no copies.

        Returns the names of the loaded parameters, from which vLLM concludes which ones were not
        loaded. Returns None if `load_weights` does not return names.
        """
        copied: set[str] = set()
        loaded = load_weights(self._left_of(weights, copied))
        return None if loaded is None else loaded | copied

    @torch.no_grad()
    def _left_of(self, weights: Weights, copied: set[str]) -> Iterator[tuple[str, Tensor]]:
        """Yields the tensors without copies; adds to `copied` the parameters that copies fill."""
        arrived: dict[str, dict[str, Tensor]] = defaultdict(dict)
        for name, tensor in weights:
            if name not in self.readers:
                yield name, tensor
            for path in self.readers.get(name, ()):
                arrived[path][name] = tensor
                if len(arrived[path]) == self.sources[path]:
                    self._fill(path, arrived.pop(path))
                    copied |= {f"{path}.{copy.target}" for copy in self.filled[path]}

    def _fill(self, path: str, sent: dict[str, Tensor]) -> None:
        """Copies the parts of a layer, and has vLLM process it."""
        layer = self.layers[path]
        info = layerwise.get_layerwise_info(layer)
        if not info.can_load():
            raise RuntimeError(f"vLLM does not reload {path}")
        layerwise.materialize_layer(layer, info)
        held = {name: tensor.data for name, tensor in get_layer_tensors(layer).items()}
        to = [part(held[copy.target], copy.to) for copy in self.filled[path]]
        of = [part(sent[copy.tensor], copy.of) for copy in self.filled[path]]
        torch._foreach_copy_(to, of)
        layerwise._layerwise_process(layer, info)
