"""How weights travel: trainer rank 0 broadcasts buckets, the engines' workers load them.

One code path on CPU and GPU; only the backend differs (gloo or nccl). vLLM's own transfer engines
(nccl, ipc, ...) do not run on a CPU.
"""

import math
import pickle
from collections.abc import Iterator
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

BUCKET_BYTES = 256 << 20


def buckets(metas: list, limit: int = BUCKET_BYTES) -> Iterator[tuple[list, int]]:
    """Cuts (name, shape, dtype) into broadcasts of at most `limit` bytes, alike on both sides.

    Yields ([(name, shape, dtype, start, stop)], bytes); a larger tensor travels alone.
    """
    items, used = [], 0
    for name, shape, dtype_name in metas:
        dtype = getattr(torch, dtype_name)
        size = math.prod(shape) * dtype.itemsize
        if items and used + size > limit:
            yield items, used
            items, used = [], 0
        items.append((name, shape, dtype, used, used + size))
        used += -(-size // 16) * 16  # a view as another dtype needs an aligned start
    yield items, used


def device(cfg) -> str:
    """Where buckets lie. NCCL refuses two ranks on one GPU, so a shared GPU syncs through gloo."""
    return "cuda" if torch.cuda.is_available() and cfg.trainer_gpus >= 1 else "cpu"


def group(store, rank: int, world: int, cfg):
    """A process group beside torch's default one: trainer rank 0 and every engine worker."""
    store, deadline = dist.PrefixStore("weights", store), timedelta(seconds=cfg.timeouts.sync)
    if device(cfg) == "cpu":
        return dist.ProcessGroupGloo(store, rank, world, deadline)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = deadline
    return dist.ProcessGroupNCCL(store, rank, world, options)


def pack(weights: Iterator[tuple[str, Tensor]], metas: list, cfg) -> Iterator[Tensor]:
    """Gathers named weights into the buffers to broadcast; ValueError unless they are `metas`."""
    for items, size in buckets(metas):
        buffer = torch.empty(size, dtype=torch.uint8, device=device(cfg))
        for name, _, dtype, start, stop in items:
            given, tensor = next(weights, ("nothing", None))
            if given != name:
                raise ValueError(f"the policy sends {given} where {name} was announced")
            buffer[start:stop].view(dtype).copy_(tensor.reshape(-1))
        yield buffer


def send(packed: Iterator[Tensor], metas: list, group, verify: bool) -> dict[str, int]:
    """Broadcasts what `pack` gathers; ranks without a group only gather. Checksums if `verify`.

    Raises RuntimeError where a receiver is gone, after the last gather.
    """
    error, sums = None, {}
    for buffer, (items, _) in zip(packed, buckets(metas), strict=True):
        if verify:
            sums |= {name: checksum(buffer[start:stop]) for name, _, _, start, stop in items}
        try:
            if group and not error:
                group.broadcast(buffer, 0).wait()
        except RuntimeError as lost:
            error = lost  # go on gathering: the other ranks do
    if error:
        raise error
    return sums


def checksum(bytes_B: Tensor) -> int:
    """Of a tensor's bytes, each weighed by its place: it changes if two of them change places."""
    total, place = 0, torch.arange(1, 1 + (1 << 16), device=bytes_B.device)
    for i, part in enumerate(bytes_B.split(len(place))):
        part = part.long()
        total += i * len(place) * int(part.sum()) + int((part * place[: len(part)]).sum())
    return total


def difference(sent: dict[str, int], received: list[dict[str, int]]) -> str:
    """The first tensor whose checksum at some worker of an engine differs, "" for none."""
    names = (name for name in sent if any(sums.get(name) != sent[name] for sums in received))
    return next(names, "")


class WeightReceiver:
    """Mixed into vLLM's workers through `worker_extension_cls`."""

    def join_sync_group(self, cfg: bytes, host: str, port: int, first_rank: int, world: int, metas):
        """Meets trainer rank 0; `metas` tells what each broadcast will hold."""
        self.sync_cfg, self.sync_metas = pickle.loads(cfg), metas
        deadline = timedelta(seconds=self.sync_cfg.timeouts.sync)
        store = dist.TCPStore(host, port, world, False, deadline)
        rank = first_rank + self.vllm_config.parallel_config.rank
        self.sync_group = group(store, rank, world, self.sync_cfg)

    def receive_weights(self, verify: bool = False) -> dict[str, int]:
        """Takes a whole policy through vLLM's reload path; checksums of what came if `verify`.

        `model.load_weights` alone is a silent no-op on packed layers (vllm#42821, SkyRL#1680).
        With `verify` all parameters are NaN before, and RuntimeError names one that stays so.
        """
        from vllm.config import set_current_vllm_config

        model, sums = self.model_runner.get_model(), {}
        names = {name for name, p in model.named_parameters() if p.is_floating_point()}
        for name in names if verify else ():
            model.get_parameter(name).data.fill_(torch.nan)
        load = model.load_weights
        if verify:
            model.load_weights = lambda weights: names.difference_update(load(weights) or ())
        try:
            with set_current_vllm_config(self.vllm_config):
                self.model_runner.reload_weights(weights_iterator=self.incoming(sums, verify))
        finally:
            vars(model).pop("load_weights", None)
        self.refresh_tied_head(model)
        left = [name for name, p in model.named_parameters() if verify and p.isnan().any()]
        if verify and (left or names):
            raise RuntimeError(f"the weight update does not write {min([*left, *names])}")
        return sums

    def refresh_tied_head(self, model) -> None:
        """On CPU a tied head multiplies by a packed copy of the embedding, made once at start."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            return
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

        for layer in model.modules():
            if isinstance(layer, ParallelLMHead):
                layer.quant_method.process_weights_after_loading(layer)

    def incoming(self, sums: dict, verify: bool) -> Iterator[tuple[str, Tensor]]:
        """Named tensors, as they arrive. A bucket is never reused: layers keep views of it."""
        for items, size in buckets(self.sync_metas):
            buffer = torch.empty(size, dtype=torch.uint8, device=device(self.sync_cfg))
            self.sync_group.broadcast(buffer, 0).wait()
            for name, shape, dtype, start, stop in items:
                if verify:
                    sums[name] = checksum(buffer[start:stop])
                yield name, buffer[start:stop].view(dtype).view(shape)
