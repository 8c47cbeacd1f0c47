"""What vLLM's first model runner, the only one on a CPU, lacks: it does not return allowed tokens.

The scheduler, the way to the client and the sampler are vLLM's own.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm import AsyncEngineArgs
from vllm.config import VllmConfig
from vllm.v1.outputs import LogprobsTensors, SamplingMaskLists

from policy.sync.receiver import WeightReceiver


class AnyRunner(VllmConfig):
    """A configuration that does not ask for the second runner; vLLM checks it in each process."""

    def _verify_sampling_replay_config(self) -> None:
        """Nothing to verify."""


class Arguments(AsyncEngineArgs):
    """vLLM's arguments, with which an engine on a CPU returns allowed tokens."""

    def create_engine_config(self, *args: Any, **named: Any) -> VllmConfig:
        """vLLM's own, and the switch that it would refuse."""
        config = super().create_engine_config(*args, **named)
        config.__class__ = AnyRunner
        config.model_config.return_sampling_mask = True
        config.parallel_config.worker_extension_cls = "policy.allowed_tokens_on_cpu.Receiver"
        return config


class Receiver(WeightReceiver):
    """Mixed into vLLM's workers, which have their sets captured before the first request."""

    def join_sync_group(self, *meeting: Any) -> int:
        """As `WeightReceiver` does; a second meeting captures nothing anew."""
        capture(self.model_runner)
        return super().join_sync_group(*meeting)


def capture(runner: Any) -> None:
    """Has a runner return what each token was chosen among.

    Its sampler computes logprobs after truncation, -inf outside of the sets, and takes those that
    were asked for from them: of each request one row, or with drafts one for each token that may
    be accepted. A second call changes nothing.
    """
    if "sample_tokens" in vars(runner):
        return
    gather, sample = runner.sampler.gather_logprobs, runner.sample_tokens
    kept: list[Tensor] = []

    def gather_logprobs(logprobs: Tensor, *args: Any, **named: Any) -> LogprobsTensors:
        kept[:] = [logprobs > -torch.inf]
        return gather(logprobs, *args, **named)

    def sample_tokens(*args: Any, **named: Any) -> Any:
        output = sample(*args, **named)
        if kept and output is not None and output.sampled_token_ids:
            output.sampling_masks = of_step(kept.pop(), [len(x) for x in output.sampled_token_ids])
        return output

    runner.sampler.gather_logprobs, runner.sample_tokens = gather_logprobs, sample_tokens


def of_step(kept_RV: Tensor, sampled: list[int]) -> SamplingMaskLists:
    """The sets of a step, by how many tokens each request has sampled.

    All requests have equally many rows R, of which the first are those of its tokens.
    """
    each = len(kept_RV) // len(sampled)
    used = [i * each + j for i, n in enumerate(sampled) for j in range(n)]
    sets = [row.nonzero().squeeze(1).numpy().astype(np.int32) for row in kept_RV[used]]
    ends = np.cumsum([0, *map(len, sets)])
    flat = np.concatenate([np.zeros(0, np.int32), *sets])
    return SamplingMaskLists(flat, ends, np.cumsum([0, *sampled]).tolist())
