"""An engine's worker that loads other weights than it receives, by the name of a fault."""

import hashlib
import itertools

import torch

from policy.sync.receiver import WeightReceiver
from policy.sync.verification import vectors
from policy.sync.weight_sync import CutOff

LAYER = "model.layers.1."


def stale(pattern: str):
    """One tensor stays as it was before the update."""
    return lambda new, old: new | {n: old[n] for n in [named(new, pattern)]}


def changed(pattern: str, change):
    """One tensor is another function of itself."""
    return lambda new, old: new | {n: change(new[n].clone()) for n in [named(new, pattern)]}


def swapped(one: str, other: str):
    """All tensors of a prefix lie where those of another belong."""

    def swap(new, old):
        pairs = [(n, n.replace(one, other)) for n in new if one in n]
        return new | {b: new[a] for a, b in pairs} | {a: new[b] for a, b in pairs}

    return swap


def missing(pattern: str):
    """One tensor never arrives."""
    return lambda new, old: {n: t for n, t in new.items() if n != named(new, pattern)}


def named(tensors: dict, pattern: str) -> str:
    """The first tensor of a name that ends with `pattern`, in layer 1 if it is in a layer."""
    ends = [name for name in tensors if name.endswith(pattern)]
    return next((name for name in ends if name.startswith(LAYER)), ends[0])


def rows_swapped(tensor):
    tensor[[7, 60]] = tensor[[60, 7]]
    return tensor


def one_element(tensor):
    tensor.view(-1)[5] *= 1.01
    return tensor


def stale_each(*names: str) -> dict:
    """A fault for each of these tensors."""
    return {f"stale {name}": stale(f"{name}.weight") for name in names}


DENSE = {
    **stale_each("q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "q_norm"),
    "stale layer norm": stale("input_layernorm.weight"),
    "stale final norm": stale("model.norm.weight"),
    "stale embedding": stale("embed_tokens.weight"),
    "doubled q_norm": changed("q_norm.weight", lambda t: 2 * t),
    "two embedding rows swapped": changed("embed_tokens.weight", rows_swapped),
    "two layers swapped": swapped("layers.0.", "layers.1."),
    "k and v swapped": swapped("1.self_attn.k_proj", "1.self_attn.v_proj"),
    "gate and up swapped": swapped("1.mlp.gate_proj", "1.mlp.up_proj"),
    "square matrix transposed": changed("o_proj.weight", lambda t: t.T.contiguous()),
    "one element 1 % larger": changed("down_proj.weight", one_element),
    "one norm element 1 % larger": changed("input_layernorm.weight", one_element),
    "rounded to bfloat16": changed("k_proj.weight", lambda t: t.bfloat16().float()),
    "rounded to float16": changed("down_proj.weight", lambda t: t.half().float()),
    "all zero": changed("o_proj.weight", torch.zeros_like),
    "not a number": changed("down_proj.weight", lambda t: t * torch.nan),
    "negated": changed("up_proj.weight", torch.neg),
    "matrix missing": missing("down_proj.weight"),
    "part of a stack missing": missing("k_proj.weight"),
    "norm missing": missing("k_norm.weight"),
}
MOE = {
    **stale_each("lm_head"),
    "stale router": stale("mlp.gate.weight"),
    "stale w1 of an expert": stale("experts.2.gate_proj.weight"),
    "stale w3 of an expert": stale("experts.2.up_proj.weight"),
    "stale w2 of an expert": stale("experts.2.down_proj.weight"),
    "two experts swapped": swapped("1.mlp.experts.1.", "1.mlp.experts.2."),
    "w1 and w3 of an expert swapped": swapped("experts.2.gate_proj", "experts.2.up_proj"),
    "two router rows swapped": changed("mlp.gate.weight", lambda t: t[[1, 0, 2, 3]]),
    "one element of an expert": changed("experts.3.down_proj.weight", one_element),
    "an expert missing": missing("experts.0.up_proj.weight"),
    "doubled q_norm": changed("q_norm.weight", lambda t: 2 * t),
}
HYBRID = {
    **stale_each("in_proj", "conv1d"),
    "stale A_log": stale("A_log"),
    "stale D": stale("mixer.D"),
    "stale dt_bias": stale("dt_bias"),
    "zero conv1d bias": changed("conv1d.bias", torch.zeros_like),
    **stale_each("up_proj"),
}
FAULTS = DENSE | MOE | HYBRID


def reused(weights):
    """The memory of each tensor is written to while its layer is not complete."""
    last = None
    for name, tensor in weights:
        if last is not None:
            last.zero_()
        last = tensor
        yield name, tensor


class FaultyReceiver(WeightReceiver):
    """Loads what the armed fault makes of a whole policy; each fault holds for one update."""

    fault = ""
    before: dict = {}

    def arm(self, fault: str) -> None:
        """The fault of the next update; "" for none."""
        self.fault = fault

    def known(self) -> tuple[int, int]:
        """How many tensors it copies without vLLM's loaders, and how many layers they fill."""
        return (len(self.copies.readers), len(self.copies.filled)) if self.copies else (0, 0)

    def forget(self) -> None:
        """The next update goes through vLLM's loaders."""
        self.copies = None

    def held(self) -> str:
        """A hash of the bits of all parameters and buffers, and of what packed layers compute."""
        model, found = self.model_runner.get_model(), hashlib.sha256()
        tensors = dict(model.named_parameters()) | dict(model.named_buffers())
        for layer in model.modules():
            if hasattr(layer, "cpu_linear"):
                x_VC = vectors(layer.input_size, self.device).to(layer.params_dtype)
                tensors[str(len(tensors))] = layer.quant_method.apply(layer, x_VC)
        for tensor in tensors.values():
            found.update(tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        return found.hexdigest()

    def receive_weights(self, verify: bool = False) -> int:
        """As a sound worker, but vLLM's loader gets other tensors than came."""
        runner = self.model_runner
        reload = type(runner).reload_weights

        def faulty(weights_iterator):
            weights = self.others(weights_iterator)
            if self.fault == "loaded by load_weights alone":
                return runner.get_model().load_weights(weights)
            return reload(runner, weights_iterator=weights)

        runner.reload_weights = faulty
        try:
            return super().receive_weights(verify)
        finally:
            del runner.reload_weights

    def others(self, weights):
        """What vLLM's loader gets; it asks for it while its layers are being loaded."""
        if self.fault == "bucket used again":
            yield from reused(weights)
            return
        if self.fault == "cut off":
            yield from itertools.islice(weights, 9)
            self.cut.set()
            raise CutOff("the senders have ended the update")
        new = dict(weights)
        loaded = FAULTS.get(self.fault, lambda new, old: new)(new, self.before)
        self.before = {name: tensor.clone() for name, tensor in new.items()}
        yield from loaded.items()

    def refresh_tied_head(self, model) -> None:
        """Left out by one of the faults."""
        if self.fault != "tied head not refreshed":
            super().refresh_tied_head(model)
