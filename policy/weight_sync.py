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
    store, deadline = dist.PrefixStore("weights", store), timedelta(seconds=cfg.sync_timeout)
    if device(cfg) == "cpu":
        return dist.ProcessGroupGloo(store, rank, world, deadline)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = deadline
    return dist.ProcessGroupNCCL(store, rank, world, options)


def pack(weights: Iterator[tuple[str, Tensor]], metas: list, cfg) -> Iterator[Tensor]:
    """Gathers named weights, in the order of `metas`, into the buffers to broadcast."""
    for items, size in buckets(metas):
        buffer = torch.empty(size, dtype=torch.uint8, device=device(cfg))
        for (_, _, dtype, start, stop), (_, tensor) in zip(items, weights, strict=False):
            buffer[start:stop].view(dtype).copy_(tensor.reshape(-1))
        yield buffer


def send(packed: Iterator[Tensor], group) -> None:
    """Broadcasts what `pack` gathers; ranks without a group only gather.

    Raises RuntimeError where a receiver is gone, after the last gather.
    """
    error = None
    for buffer in packed:
        try:
            if group and not error:
                group.broadcast(buffer, 0).wait()
        except RuntimeError as lost:
            error = lost  # go on gathering: the other ranks do
    if error:
        raise error


class WeightReceiver:
    """Mixed into vLLM's workers through `worker_extension_cls`."""

    def join_sync_group(self, cfg: bytes, host: str, port: int, first_rank: int, world: int, metas):
        """Meets trainer rank 0; `metas` tells what each broadcast will hold."""
        self.sync_cfg, self.sync_metas = pickle.loads(cfg), metas
        deadline = timedelta(seconds=self.sync_cfg.sync_timeout)
        store = dist.TCPStore(host, port, world, False, deadline)
        rank = first_rank + self.vllm_config.parallel_config.rank
        self.sync_group = group(store, rank, world, self.sync_cfg)

    def receive_weights(self) -> None:
        """Takes a whole policy through vLLM's reload path.

        `model.load_weights` alone is a silent no-op on packed layers (vllm#42821, SkyRL#1680).
        """
        from vllm.config import set_current_vllm_config

        with set_current_vllm_config(self.vllm_config):
            self.model_runner.reload_weights(weights_iterator=self.incoming())
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            return
        # On CPU a tied head multiplies by a packed copy of the embedding, made once at start.
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

        for layer in self.model_runner.get_model().modules():
            if isinstance(layer, ParallelLMHead):
                layer.quant_method.process_weights_after_loading(layer)

    def incoming(self) -> Iterator[tuple[str, Tensor]]:
        """Named tensors, as they arrive. A bucket is never reused: layers keep views of it."""
        for items, size in buckets(self.sync_metas):
            buffer = torch.empty(size, dtype=torch.uint8, device=device(self.sync_cfg))
            self.sync_group.broadcast(buffer, 0).wait()
            for name, shape, dtype, start, stop in items:
                yield name, buffer[start:stop].view(dtype).view(shape)
