"""Writes a Megatron policy as a model for transformers and vLLM; each rank writes one file."""

import json
import math
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoTokenizer

from core.write_errors import write_error
from policy.megatron.export import gather, named
from policy.megatron.hf_weights import ASIDE, Weights


@torch.no_grad()
def share(weights: Weights) -> Iterator[tuple[str, Tensor]]:
    """Yields the full tensors that this rank writes, under their checkpoint names.

    Each tensor is in one rank's share, and shares are about equally large. Collective: tensor
    parallel ranks assemble what one of them writes.
    """
    rank = dist.get_rank()
    mates = dist.get_process_group_ranks(mpu.get_tensor_model_parallel_group())
    dealt = [0] * dist.get_world_size()  # bytes dealt to each rank
    for place, dtype, holders in weights.catalog:
        writer = min(holders, key=dealt.__getitem__)
        dealt[writer] += math.prod(weights.shape(place)) * dtype.itemsize
        if writer in mates and place.key in weights.local:
            whole = gather(weights.local[place.key].tensor.detach(), place)
            if writer == rank:
                yield from named(whole, place)
    for name in sorted(filter(ASIDE.match, weights.file.files))[rank :: len(dealt)]:
        yield name, weights.file.files[name].get_tensor(name)


def write(dir: str, source: str, share: dict[str, Tensor], group: dist.ProcessGroup) -> None:
    """Writes a share, and on rank 0 the index, config and tokenizer; collective over all ranks.

    `dir` appears only when it is complete. Files without tensors come from the folder `source`.
    Raises an error on every rank if one of them cannot write its share.
    """
    aside = Path(f"{dir}.partial")
    rank = dist.get_rank()
    if rank == 0:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
    every: list[dict[str, int]] = [{} for _ in range(dist.get_world_size())]
    sizes = {name: tensor.nbytes for name, tensor in share.items()}
    dist.all_gather_object(every, sizes, group)  # once it returns, the folder exists
    writers = [i for i, sizes in enumerate(every) if sizes]
    files = [f"model-{n:05}-of-{len(writers):05}.safetensors" for n in range(1, len(writers) + 1)]
    failure: Exception | None = None
    try:
        if share:
            save_file(share, aside / files[writers.index(rank)], {"format": "pt"})
    except Exception as error:  # the other ranks wait: they must fail as well
        failure = write_error(error, str(aside)) or RuntimeError(f"rank {rank}: {error}")
    failures: list[Exception | None] = [None for _ in every]
    dist.all_gather_object(failures, failure, group)
    for failure in failures:
        if failure:
            raise failure
    if rank > 0:
        return
    places: dict[str, str] = {}
    for writer, file in zip(writers, files, strict=True):
        places |= dict.fromkeys(every[writer], file)
    total = sum(sum(sizes.values()) for sizes in every)
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (aside / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    for name in ("config.json", "generation_config.json"):
        if (Path(source) / name).is_file():
            shutil.copy(Path(source) / name, aside)
    AutoTokenizer.from_pretrained(source).save_pretrained(aside)
    shutil.rmtree(dir, ignore_errors=True)
    os.rename(aside, dir)
