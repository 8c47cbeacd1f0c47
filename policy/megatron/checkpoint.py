"""Checkpoints of the Megatron policy: each rank copies, writes and reads its share.

AdamW's state stays cut as it is over replicas and context parallel ranks, so none is gathered. Any
number of those goes on from it; another tp, pp or ep does not. Weights, which replicas have in
common, are dealt out among them. Megatron's own asynchronous way to save forks the trainer, and
ends with messages in the group that the training uses meanwhile; what is here has its own group.
"""

from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

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

FORMAT = TorchDistSaveShardedStrategy("torch_dist", 1)


class Shares:
    """One rank's share of a model and of its optimizer's state: copied, written and read.

    `layout` are the settings that must be the same when a checkpoint is loaded, `group` is the
    process group that writing uses.
    """

    def __init__(
        self,
        model: MegatronModule,
        optimizer: ChainedOptimizer,
        layout: dict[str, Any],
        group: dist.ProcessGroup,
    ):
        self.model = model
        self.optimizer = optimizer
        self.layout = layout
        self.group = group
        replicas = mpu.get_data_parallel_group(with_context_parallel=True)
        self.dealer = FullyParallelSaveStrategyWrapper(FORMAT, replicas, do_cache_distribution=True)

    def state(self, loading: bool) -> dict[str, Any]:
        """All that training changes, each tensor with its place in the whole."""
        how = {"distrib_optim_sharding_type": "dp_reshardable"}
        model = self.model.sharded_state_dict(metadata=how)
        moments = self.optimizer.sharded_state_dict(model, is_loading=loading, metadata=how)
        return {"model": model, "optimizer": moments}

    def save(self, dir: str, updates: int) -> Callable[[], None]:
        """Copies this rank's share to memory; returns a function that writes it meanwhile."""
        Path(dir).mkdir(parents=True, exist_ok=True)
        state = self.state(loading=False) | {"updates": updates, "layout": self.layout}
        shards, common = save_preprocess(state, validate_access_integrity=False)
        self.dealer.apply_saving_parallelization(shards)
        mine = defaultdict(list)
        for shard in nested_values(shards):
            if is_main_replica(shard.replica_id):
                is_object = isinstance(shard, ShardedObject)
                mine[shard.unique_key if is_object else shard.key].append(shard)
                if isinstance(shard.data, Tensor):
                    shard.data = shard.data.detach().to("cpu", copy=True)
        return partial(self._write, dir, mcore_to_pyt_state_dict(mine), common)

    def _write(self, dir: str, shards: dict[str, Any], common: dict[str, Any]) -> None:
        """Writes the data, and after those of all ranks the metadata that mark the checkpoint."""
        planner = MCoreSavePlanner(flatten_state_dict=False)
        checkpoint_io.save(shards, checkpoint_id=dir, planner=planner, process_group=self.group)
        if dist.get_rank(self.group) == 0:
            get_default_save_common_strategy().save_common(common, dir)
            save_config(CheckpointingConfig(FORMAT.backend, FORMAT.version), dir)

    @torch.no_grad()
    def load(self, dir: str) -> int:
        """Loads a checkpoint of `save`, for any number of replicas; returns its `updates`.

        Raises InputError where it was saved with another `layout`.
        """
        saved = dist_checkpointing.load_common_state_dict(dir)["layout"]
        for name, now in self.layout.items():
            if saved[name] != now:
                differs = f"{dir} was saved with {name} = {saved[name]}, not {now}"
                remedy = "set that, or set model to the folder hf beside it and start anew"
                raise InputError(f"{differs}: {remedy}")
        state = dist_checkpointing.load(self.state(loading=True), dir)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        return state["updates"]
