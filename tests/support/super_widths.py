"""What ranks of a Megatron layout hold of a layer of each kind at Nemotron 3 Super's own widths.

    PYTHONPATH=tests/cpu:tests:. python tests/support/super_widths.py RANK...

Each rank builds its part beside 255 that do not exist, and places it in a checkpoint of shapes
alone. Prints JSON: which names of the checkpoint no rank has, and by rank of each tensor its shape
there, the whole one by the checkpoint, the rows or columns by its place, over which dimension and
how many ranks it is cut.
"""

import json
import sys
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion

from policy.megatron import hf_weights
from policy.megatron.model import build
from policy.megatron.policy import join_groups, mpu
from settings.network import PolicySettings
from support import shapes

SETTINGS = PolicySettings(kind="megatron", ranks=256, tp=4, cp=8, ep=8)


def checkpoint(hf) -> dict[str, list[int]]:
    """Names and shapes of the model's tensors, by transformers."""
    with torch.device("meta"):
        lm = AutoModelForCausalLM.from_config(hf)
    state = revert_weight_conversion(lm, dict(lm.state_dict()))
    return {name: list(tensor.shape) for name, tensor in state.items()}


def held(rank: int, hf) -> dict[str, hf_weights.Local]:
    """What a rank has, by the first tensor of the checkpoint that is in it."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=SETTINGS.ranks)
    join_groups(SETTINGS, 0, 600.0)
    weights = hf_weights.Weights("", hf, build(SETTINGS, hf, torch.bfloat16).to("meta"))
    mpu.destroy_model_parallel()
    dist.destroy_process_group()
    return {key[1]: local for key, local in weights.local.items()}


def main(ranks: list[int]) -> None:
    """Builds the ranks one after the other."""
    group = dist.new_group
    dist.new_group = lambda *args, **given: group(*args, **given | {"backend": "fake"})
    hf = shapes.nemotron_super("M*E")
    full = checkpoint(hf)

    def read(name: str, dim: int, first: int, last: int) -> torch.Tensor:
        shape = list(full[name])
        shape[dim] = last - first
        return torch.empty(shape, device="meta")

    file = SimpleNamespace(shape=lambda name: list(full[name]), read=read)
    hf_weights.Checkpoint = lambda folder: file
    hf_weights.Weights.gather_catalog = lambda weights: []  # there is nobody to ask
    found, homes = {}, set()
    for rank in ranks:
        mine = held(rank, hf)
        homes |= {name for local in mine.values() for name in local.place.names()}
        found[rank] = {}
        for name, (place, tensor) in mine.items():
            whole = list(full[name])
            whole[place.dim] = sum(full[part][place.dim] for part in place.names())
            placed = sum(place.sizes())
            found[rank][name] = list(tensor.shape), whole, placed, place.dim, place.ranks
    print(json.dumps({"ranks": found, "nowhere": sorted(full.keys() - homes)}))


if __name__ == "__main__":
    main([int(text) for text in sys.argv[1:]])
