"""Saves and loads checkpoints of the Megatron policy: each rank copies, writes and reads its share.

AdamW's state stays split over replicas and context parallel ranks, so nothing is gathered. Any
number of such ranks can resume from it, but tp, pp and ep must stay the same. Weights, which
replicas have in common, are divided among the replicas. Megatron's own asynchronous save forks the
trainer, and ends with messages in the group that training uses at the same time; this save has its
own group.
"""

from collections import defaultdict
from collections.abc import Callable
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint_io
from megatron.core import dist_checkpointing
from megatron.core import parallel_state as mpu
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, is_main_replica
from megatron.core.dist_checkpointing.serialization import get_default_save_common_strategy
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelSaveStrategyWrapper,
)
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    mcore_to_pyt_state_dict,
)
from megatron.core.optimizer import ChainedOptimizer
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from core.errors import InputError

if TYPE_CHECKING:
    from megatron.core.dist_checkpointing.mapping import (
        CommonStateDict,
        ShardedStateDict,
        ShardedTensor,
    )
    from torch.distributed._shard.sharded_tensor import ShardedTensor as TorchShardedTensor

FORMAT = TorchDistSaveShardedStrategy("torch_dist", 1)


class Shares:
    """Copies, writes and reads one rank's share of a model and its optimizer state.

    `layout` contains the settings that must be the same when a checkpoint is loaded; `group` is the
    process group that is used for writing.
    """

    def __init__(
        self,
        model: MegatronModule,
        optimizer: ChainedOptimizer,
        layout: dict[str, int | None],
        group: dist.ProcessGroup,
    ):
        self.model = model
        self.optimizer = optimizer
        self.layout = layout
        self.group = group
        replicas = mpu.get_data_parallel_group(with_context_parallel=True)
        self.dealer = FullyParallelSaveStrategyWrapper(FORMAT, replicas, do_cache_distribution=True)

    def state(self, loading: bool) -> "dict[str, ShardedStateDict]":
        """Returns everything that training changes, each tensor with its place in the whole."""
        metadata = {"distrib_optim_sharding_type": "dp_reshardable"}
        model = self.model.sharded_state_dict(metadata=metadata)
        moments = self.optimizer.sharded_state_dict(model, is_loading=loading, metadata=metadata)
        return {"model": model, "optimizer": moments}

    def save(self, dir: str, updates: int) -> Callable[[], None]:
        """Copies this rank's share to memory; returns a function that writes it during training."""
        Path(dir).mkdir(parents=True, exist_ok=True)
        state = self.state(loading=False) | {"updates": updates, "layout": self.layout}
        shards, common = save_preprocess(state, validate_access_integrity=False)
        self.dealer.apply_saving_parallelization(shards)
        mine: dict[str, list[ShardedTensor | ShardedObject]] = defaultdict(list)
        for shard in nested_values(shards):
            if is_main_replica(shard.replica_id):
                key = shard.unique_key if isinstance(shard, ShardedObject) else shard.key
                mine[key].append(shard)
                if isinstance(shard.data, Tensor):
                    shard.data = shard.data.detach().to("cpu", copy=True)
        return partial(self._write, dir, mcore_to_pyt_state_dict(mine), common)

    def _write(
        self,
        dir: str,
        shards: "dict[str, TorchShardedTensor | BytesIO]",
        common: "CommonStateDict",
    ) -> None:
        """Writes the data and, once all ranks have done so, the metadata of the checkpoint."""
        planner = MCoreSavePlanner(flatten_state_dict=False)
        checkpoint_io.save(shards, checkpoint_id=dir, planner=planner, process_group=self.group)
        if dist.get_rank(self.group) == 0:
            get_default_save_common_strategy().save_common(common, dir)
            save_config(CheckpointingConfig(FORMAT.backend, FORMAT.version), dir)

    @torch.no_grad()
    def load(self, dir: str) -> int:
        """Loads a checkpoint that `save` wrote, on any number of replicas; returns its `updates`.

        Raises InputError if it was saved with a different `layout`.
        """
        saved = dist_checkpointing.load_common_state_dict(dir)["layout"]
        for name, now in self.layout.items():
            if saved[name] != now:
                raise InputError(
                    f"{dir} was saved with {name} = {saved[name]}, not {now}: restore that "
                    "value, or set model to the folder hf next to it and start anew"
                )
        state = dist_checkpointing.load(self.state(loading=True), dir)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        return state["updates"]
