"""What an engine is started with: the branch of a GPU as data, and as vLLM understands it."""

import asyncio
import gc
import re
import sys
from types import SimpleNamespace

import pytest
import torch

from grpo_async import Config, Generator
from runtime.engines.engine import engine_arguments, open_engine
from runtime.startup import preflight
from settings.conflicts import OWN_ENGINE_ARGS


def arguments(on_cpu: bool = False, **args) -> dict:
    return engine_arguments(Config(engine={"args": args}), on_cpu)


def test_on_a_gpu_weights_are_bf16_and_logits_float32():
    gpu, cpu = arguments(), arguments(on_cpu=True)
    assert (gpu["dtype"], gpu["hf_overrides"]) == ("bfloat16", {"head_dtype": "float32"})
    assert (cpu["dtype"], cpu["hf_overrides"]) == ("float32", {})
    assert (gpu["enforce_eager"], gpu["enable_chunked_prefill"]) == (False, True)
    assert gpu.keys() == cpu.keys() <= preflight.arguments("engine.args").keys()


def test_an_engine_of_several_workers_starts_them_itself():
    """Ray's executor, which vLLM may choose on a cluster, would place them anew."""
    of = {n: engine_arguments(Config(engine={"tensor_parallel": n}), on_cpu=False) for n in (1, 2)}
    assert [of[n]["tensor_parallel_size"] for n in (1, 2)] == [1, 2]
    assert [of[n]["distributed_executor_backend"] for n in (1, 2)] == [None, "mp"]


def test_arguments_of_the_user_come_last_and_dictionaries_are_merged():
    given = {"hf_overrides": {"rope_theta": 1e6}, "enforce_eager": True, "kv_cache_dtype": "fp8"}
    merged = arguments(**given)
    assert merged["hf_overrides"] == {"head_dtype": "float32", "rope_theta": 1e6}
    assert merged["enforce_eager"] is True and merged["kv_cache_dtype"] == "fp8"
    of_model = arguments(hf_overrides={"head_dtype": "model"})
    assert of_model["hf_overrides"] == {"head_dtype": "model"}
    assert merged["max_num_seqs"] == 256 and "max_num_batched_tokens" not in merged


@pytest.mark.parametrize(("name", "setting"), OWN_ENGINE_ARGS.items())
def test_what_the_run_sets_is_refused_with_its_setting(name, setting):
    assert name in preflight.arguments("engine.args")
    own = f"sets '{name}', which the run itself sets.*{re.escape(setting)}"
    with pytest.raises(ValueError, match=own):
        arguments(**{name: 2})


def test_no_garbage_is_looked_for_while_vllm_is_imported(monkeypatch):
    """That would take as long as half of the import. After an error it is looked for as ever."""
    looked = []

    class Broken:
        @staticmethod
        def find_spec(name, *args):
            if name == "vllm":
                looked.append(gc.isenabled())
                raise ImportError("broken")

    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Broken, *sys.meta_path])
    with pytest.raises(ImportError, match="broken"):
        open_engine(Config())
    assert looked == [False] and gc.isenabled()


def started(cfg: Config, monkeypatch):
    """What a generator gives vLLM where a GPU is: its arguments, and the context."""
    from vllm.platforms import current_platform
    from vllm.v1.engine.async_llm import AsyncLLM

    given = []

    def noted(args, usage_context, stat_loggers):
        (make,) = stat_loggers
        given.append((args, usage_context))
        return SimpleNamespace(made=make(None, 0))

    with monkeypatch.context() as patch:
        patch.setattr(AsyncLLM, "from_engine_args", noted)
        patch.setattr(type(current_platform), "is_cpu", lambda self: False)
        asyncio.run(Generator(cfg).start())
    return given[0]


@pytest.mark.slow
def test_vllm_takes_them_on_a_gpu(tiny_model, monkeypatch):
    from vllm import AsyncEngineArgs
    from vllm.platforms import current_platform
    from vllm.usage.usage_lib import UsageContext

    cfg = Config(model=tiny_model, sampling={"max_model_len": 64})
    args, context = started(cfg, monkeypatch)
    model = args.create_model_config()
    assert (model.dtype, model.head_dtype) == (torch.bfloat16, torch.float32)
    # Unset, prefill has the default of this context: 16,384 tokens on an H100, not 2,048.
    assert args.max_num_batched_tokens is None and context is UsageContext.LLM_CLASS
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: False)
    monkeypatch.setattr(current_platform, "get_device_total_memory", lambda *_: 80 << 30)
    monkeypatch.setattr(current_platform, "get_device_name", lambda *_: "NVIDIA H100 80GB HBM3")
    assert AsyncEngineArgs.get_batch_defaults(1)[0][context] == 16384


@pytest.mark.slow
def test_what_vllm_does_by_itself_reaches_it(tiny_model, monkeypatch):
    """Experts over an engine's GPUs, fp8 weights and KV cache."""
    given = {"enable_expert_parallel": True, "kv_cache_dtype": "fp8", "quantization": "fp8"}
    given |= {"mamba_ssm_cache_dtype": "float32"}
    cfg = Config(model=tiny_model, engine={"tensor_parallel": 4, "args": given})
    args, _ = started(cfg, monkeypatch)
    assert {name: getattr(args, name) for name in given} == given
    assert (args.tensor_parallel_size, args.distributed_executor_backend) == (4, "mp")
    assert args.worker_extension_cls == "policy.sync.receiver.WeightReceiver"


@pytest.mark.slow
@pytest.mark.parametrize("named, expected", [({}, "auto"), ({"load_format": "dummy"}, "dummy")])
def test_a_drafter_has_the_weights_of_its_checkpoint(named, expected, tiny_model):
    """vLLM takes the policy's load format where none is named, and no update mends that.

    For a draft model it takes the policy's in any case.
    """
    from vllm import AsyncEngineArgs

    drafts = {"method": "draft_model", "model": tiny_model, "num_speculative_tokens": 3}
    drafts |= {"draft_load_config": named} if named else {}
    args = {"speculative_config": drafts}
    cfg = Config(model=tiny_model, sampling={"max_model_len": 64}, engine={"args": args})
    made = AsyncEngineArgs(**engine_arguments(cfg, True)).create_engine_config()
    assert made.load_config.load_format == expected
    assert made.speculative_config.draft_load_config.load_format == expected


def test_a_policy_is_read_from_its_folder_for_a_draft_model_alone():
    formats = {
        method: arguments(speculative_config={"method": method})["load_format"]
        for method in ("mtp", "eagle3", "ngram", "draft_model")
    }
    assert formats == {"mtp": "dummy", "eagle3": "dummy", "ngram": "dummy", "draft_model": "auto"}
    assert arguments(speculative_config={"model": "models/small"})["load_format"] == "auto"
