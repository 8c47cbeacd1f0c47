"""Makes an engine on a CPU return allowed tokens, which vLLM's first model runner does not do.

vLLM has no other runner for CPUs. The scheduler, the path to the client and the sampler are vLLM's
own.
"""

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from vllm import AsyncEngineArgs
from vllm.config import VllmConfig
from vllm.v1.outputs import LogprobsTensors, SamplingMaskLists

from policy.sync.receiver import WeightReceiver

if TYPE_CHECKING:
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.core.sched.output import GrammarOutput
    from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner


class AnyRunner(VllmConfig):
    """A configuration that passes each vLLM process's check for the second runner."""

    def _verify_sampling_replay_config(self) -> None:
        """Accepts the configuration."""


class Arguments(AsyncEngineArgs):
    """vLLM's arguments for an engine on a CPU that returns allowed tokens."""

    def create_engine_config(
        self, usage_context: "UsageContext | None" = None, headless: bool = False
    ) -> VllmConfig:
        """Returns vLLM's own configuration, with the switch that vLLM would refuse."""
        config = super().create_engine_config(usage_context, headless)
        config.__class__ = AnyRunner
        config.model_config.return_sampling_mask = True
        config.parallel_config.worker_extension_cls = "policy.allowed_tokens_on_cpu.Receiver"
        return config


class Receiver(WeightReceiver):
    """Mixed into vLLM's workers; captures the token sets, starting before the first request."""

    def join_sync_group(
        self, wire: bytes, host: str, port: int, first_rank: int, world: int
    ) -> int:
        """Starts to capture, and joins as `WeightReceiver` does; may be called again."""
        capture(self.model_runner)
        return super().join_sync_group(wire, host, port, first_rank, world)


def capture(runner: "GPUModelRunner") -> None:
    """Makes a runner return the set that each token was chosen from.

    The runner's sampler computes logprobs after truncation, which are -inf outside the sets, and
    then gathers the requested logprobs. There is one row per request or, with drafts, one per token
    that may be accepted. A second call changes nothing.
    """
    if "sample_tokens" in vars(runner):
        return
    gather = runner.sampler.gather_logprobs
    sample = runner.sample_tokens
    kept: list[Tensor] = []

    def gather_logprobs(logprobs: Tensor, num_logprobs: int, token_ids: Tensor) -> LogprobsTensors:
        kept[:] = [logprobs > -torch.inf]
        return gather(logprobs, num_logprobs, token_ids)

    def sample_tokens(
        grammar_output: "GrammarOutput | None",
    ) -> "ModelRunnerOutput | AsyncModelRunnerOutput | None":
        output = sample(grammar_output)
        if kept and output is not None and output.sampled_token_ids:
            counts = [len(ids) for ids in output.sampled_token_ids]
            output.sampling_masks = of_step(kept.pop(), counts)
        return output

    runner.sampler.gather_logprobs = gather_logprobs
    runner.sample_tokens = sample_tokens


def of_step(kept_RV: Tensor, sampled: list[int]) -> SamplingMaskLists:
    """Returns the token sets of a step, in which each request sampled the given number of tokens.

    `kept_RV` has the same number of rows for every request: its sampled tokens, then padding.
    """
    each = len(kept_RV) // len(sampled)
    used = [i * each + j for i, n in enumerate(sampled) for j in range(n)]
    sets = [row.nonzero().squeeze(1).numpy().astype(np.int32) for row in kept_RV[used]]
    ends = np.cumsum([0, *map(len, sets)])
    flat = np.concatenate([np.zeros(0, np.int32), *sets])
    return SamplingMaskLists(flat, ends, np.cumsum([0, *sampled]).tolist())
