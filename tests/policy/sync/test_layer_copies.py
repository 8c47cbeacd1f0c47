"""What vLLM's loaders are seen to do, and that copying does the same; by vLLM's own reload."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.model_loader.reload import layerwise

from policy import WeightMeta
from policy.sync.layer_copies import Copies, Part, part, tiles

CONFIG = VllmConfig()


def rows(first, last):
    return lambda held, sent: held[first:last].copy_(sent)


def columns(held, sent):
    held.copy_(sent[:, 2:4])


def padded(held, sent):
    held[: len(sent)].copy_(sent)
    held[len(sent) :].fill_(0)


def twice(held, sent):
    """Half of the places, two times."""
    held[:2].copy_(sent[:2])
    held[:2].copy_(sent[2:])


WAYS = {  # of each layer: its shape, and by tensor how it is loaded
    "stack": ((6, 4), {"stack.q": rows(0, 4), "stack.k": rows(4, 6)}),
    "cut": ((4, 2), {"cut.weight": columns}),
    "turned": ((4, 6), {"turned.weight": lambda held, sent: held.copy_(sent.T)}),
    "narrowed": ((3, 4), {"narrowed.weight": lambda held, sent: held.copy_(sent)}),
    "one": ((2, 4), {"both": rows(0, 2)}),
    "other": ((2, 4), {"both": rows(0, 2)}),
    "changed": ((4,), {"changed.A_log": lambda held, sent: held.copy_(-sent.exp())}),
    "scaled": ((4,), {"scaled.weight": lambda held, sent: held.copy_(sent).mul_(2)}),
    "padded": ((5, 4), {"padded.weight": padded}),
    "part": ((5, 4), {"part.weight": rows(0, 4)}),
    "twice": ((4, 4), {"twice.weight": twice}),
    "near": ((6, 4), {"near.plain": rows(0, 4), "near.changed": rows(4, 6)}),
    "far": ((4, 4), {"near.plain": lambda held, sent: held.copy_(sent)}),
    "mixed": ((2, 4), {"near.changed": lambda held, sent: held.copy_(sent * 2)}),
}
SHAPES = {
    "stack.q": (4, 4),
    "stack.k": (2, 4),
    "cut.weight": (4, 8),
    "turned.weight": (6, 4),
    "narrowed.weight": (3, 4),
    "both": (2, 4),
    "changed.A_log": (4,),
    "scaled.weight": (4,),
    "padded.weight": (3, 4),
    "part.weight": (4, 4),
    "twice.weight": (4, 4),
    "near.plain": (4, 4),
    "near.changed": (2, 4),
    "block.experts.9.weight": (7,),
    "other.unread": (7,),
}
FAST = {"stack", "cut", "turned", "narrowed", "one", "other"}
# "mixed" changes a tensor, so "near" waits for its loader, and "far" for another tensor of "near".
SLOW = WAYS.keys() - FAST
WRITTEN = {"part.weight": 4, "twice.weight": 2}


class Model(nn.Module):
    """Layers of one weight each, which are loaded as those of vLLM's models are."""

    def __init__(self):
        super().__init__()
        for layer, (shape, loads) in WAYS.items():
            setattr(self, layer, nn.Module())
            weight = nn.Parameter(torch.zeros(shape), requires_grad=False)
            weight.weight_loader = self.loader(loads)
            getattr(self, layer).weight = weight
        self.asked = []  # names, in order
        layerwise.record_metadata_for_reloading(self)

    @staticmethod
    def loader(loads):
        """As a layer's `weight_loader`."""

        def load(param, loaded_weight, name):
            loads[name](param.data, loaded_weight)

        return load

    def load_weights(self, weights):
        loaded = set()
        for name, tensor in weights:
            self.asked.append(name)
            for layer, (_, loads) in WAYS.items():
                if name in loads:
                    weight = getattr(self, layer).weight
                    weight.weight_loader(weight, tensor, name)
                    loaded.add(f"{layer}.weight")
        return loaded

    def reload(self, tensors, load_weights):
        """An update, as vLLM makes it; returns the parameters that vLLM takes for loaded."""
        layerwise.initialize_layerwise_reload(self)
        loaded = load_weights(iter(tensors.items()))
        layerwise.finalize_layerwise_reload(self, CONFIG.model_config)
        return loaded


def drawn(seed: int) -> dict[str, torch.Tensor]:
    """A policy."""
    draw = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=draw) for name, shape in SHAPES.items()}


def metas() -> list[WeightMeta]:
    return [WeightMeta(name, shape, "float32") for name, shape in SHAPES.items()]


def test_layers_that_copies_fill_need_no_loader_and_get_its_bits():
    model = Model()
    model.reload(drawn(1), model.load_weights)
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    memory = {name: weight.data_ptr() for name, weight in model.named_parameters()}
    copies = Copies(model, CONFIG, metas())
    assert set(copies.filled) == FAST
    for name, weight in model.named_parameters():
        assert torch.equal(weight, before[name]), "asked, a loader changes nothing"
    model.asked.clear()
    loaded = model.reload(drawn(2), lambda weights: copies.load(model.load_weights, weights))
    assert loaded == {name for name, _ in model.named_parameters()}, "vLLM would warn of others"
    by_copies = {name: weight.clone() for name, weight in model.named_parameters()}
    slow = {name for layer in SLOW for name in WAYS[layer][1]}
    assert set(model.asked) == slow | {"other.unread"}
    model.reload(drawn(2), model.load_weights)
    for name, weight in model.named_parameters():
        rows = WRITTEN.get(name, len(weight))  # others hold what was in memory
        assert torch.equal(weight[:rows], by_copies[name][:rows]), name
        assert not torch.equal(weight[:rows], before[name][:rows]), "it was updated"
        assert weight.data_ptr() == memory[name], "the memory that CUDA graphs know"


def test_an_expert_that_nothing_reads_is_left_out():
    """It belongs to another worker."""
    model = Model()
    copies = Copies(model, CONFIG, metas())
    model.asked.clear()
    model.reload(drawn(5), lambda weights: copies.load(model.load_weights, weights))
    assert "block.experts.9.weight" not in model.asked
    assert "other.unread" in model.asked, "a loader may keep it aside"


def test_a_buffer_that_is_not_saved_is_left_to_the_loaders():
    """vLLM keeps what the layer had, except where one of its loaders has written it."""
    model = Model()
    model.cut.register_buffer("scale", torch.zeros(7), persistent=False)
    model.cut.scale.weight_loader = model.loader(
        {"other.unread": lambda held, sent: held.copy_(sent)}
    )
    layerwise.record_metadata_for_reloading(model)
    whole = model.load_weights

    def load_weights(weights):
        for name, tensor in weights:
            whole([(name, tensor)])
            if name == "other.unread":
                model.cut.scale.weight_loader(model.cut.scale, tensor, name)

    model.load_weights = load_weights
    copies = Copies(model, CONFIG, metas())
    assert set(copies.filled) == FAST - {"cut"}
    model.reload(sent := drawn(6), lambda weights: copies.load(load_weights, weights))
    assert torch.equal(model.cut.scale, sent["other.unread"])


def test_experts_that_move_between_updates_go_through_the_loaders():
    model = Model()
    moving = SimpleNamespace(parallel_config=SimpleNamespace(enable_eplb=True))
    copies = Copies(model, moving, metas())
    sent = drawn(3)
    assert list(copies._left_of(sent.items(), set())) == list(sent.items()) and not model.asked


def test_a_layer_that_is_not_being_reloaded_is_refused():
    """vLLM's `load_weights` alone would leave it as it is, without an error."""
    model = Model()
    copies = Copies(model, CONFIG, metas())
    with pytest.raises(RuntimeError, match="vLLM does not reload stack"):
        copies.load(model.load_weights, drawn(4).items())


def test_asking_a_loader_that_reads_values_restores_the_model(monkeypatch):
    monkeypatch.setitem(
        WAYS["cut"][1], "cut.weight", lambda held, sent: held.fill_(float(sent.sum()))
    )
    model = Model()
    model.reload(drawn(1), model.load_weights)
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    with pytest.raises(RuntimeError, match="meta"):
        Copies(model, CONFIG, metas())
    for name, weight in model.named_parameters():
        assert torch.equal(weight, before[name])


@pytest.mark.parametrize("seed", range(200))
def test_parts_tile_a_tensor_only_if_each_element_is_in_one(seed):
    draw = np.random.default_rng(seed)
    whole = torch.zeros(tuple(draw.integers(1, 6, 3).tolist()), dtype=torch.int64)
    boxes = [whole]
    for _ in range(draw.integers(0, 5)):
        box = boxes.pop(draw.integers(len(boxes)))
        axis, size = int(draw.integers(3)), 1
        size = box.shape[axis]
        cut = int(draw.integers(1, size)) if size > 1 else 0
        boxes += [box.narrow(axis, 0, cut), box.narrow(axis, cut, size - cut)] if cut else [box]
    change = draw.integers(4)
    if change == 1:
        boxes.append(boxes[draw.integers(len(boxes))])
    if change == 2 and len(boxes) > 1:
        boxes.pop()
    if change == 3:
        boxes[0] = boxes[-1]
    boxes = [box.transpose(0, 2) if draw.integers(2) else box for box in boxes]
    parts = [Part(tuple(b.shape), tuple(b.stride()), int(b.storage_offset())) for b in boxes]
    for at in parts:
        part(whole, at).add_(1)
    assert tiles(parts, whole.numel()) == bool((whole == 1).all())
