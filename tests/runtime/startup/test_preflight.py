"""What is taken before anything starts; what is refused is in tests/test_bad_inputs.py."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from core.errors import InputError
from grpo_async import Config
from policy import model_shape
from runtime.engines import speculation
from runtime.startup import model_checks, preflight
from support.configs import changed
from support.tables import table
from support.tiny_models import FAMILIES

CASES = table(Path(__file__).parents[1] / "cases.txt")


@pytest.fixture
def model(tiny_model, tmp_path) -> Path:
    return Path(shutil.copytree(tiny_model, tmp_path / "model"))


def ask(model: str | Path, **fields) -> Config:
    return changed(Config(model=str(model)), **{"max_model_len": 128} | fields)


@pytest.mark.parametrize("kind", ["fsdp", "megatron"])
def test_every_family_is_taken(models, kind):
    """Experts are one tensor in transformers and many in the checkpoint."""
    for family in FAMILIES:
        model_checks.check_model(ask(models[family], kind=kind))


def test_headers_are_read_as_safetensors_reads_them(tiny_model):
    with safe_open(f"{tiny_model}/model.safetensors", "pt") as file:
        cuts = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        expected = {name: (cut.get_shape(), cut.get_dtype()) for name, cut in cuts.items()}
    assert dict(model_checks.every_tensor(Path(tiny_model))) == expected


def test_an_index_and_its_files_are_taken(model):
    state = load_file(model / "model.safetensors")
    (model / "model.safetensors").unlink()
    names = sorted(state)
    parts = {"part-1.safetensors": names[::2], "part-2.safetensors": names[1::2]}
    for part, chosen in parts.items():
        save_file({name: state[name] for name in chosen}, model / part)
    weight_map = {name: part for part, chosen in parts.items() for name in chosen}
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    model_checks.check_model(ask(model))
    assert len(dict(model_checks.every_tensor(model))) == len(state)


def test_weights_of_another_format_are_left_to_transformers(model):
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    model_checks.check_model(ask(model))


def test_other_names_and_quantised_tensors_are_left_to_transformers(model):
    lm = model_shape.build(str(model))
    found = dict(model_checks.every_tensor(model))
    model_checks.check_tensors("x", {f"language_{name}": s for name, s in found.items()}, lm)
    halved = {name: model_checks.Stored([1], "F32") for name in found}
    with pytest.raises(InputError, match=r"has shape \[1\], but \w+ in config\.json expects \[\d+"):
        model_checks.check_tensors("x", halved, lm)
    lm.config.quantization_config = {"quant_method": "fp8"}
    model_checks.check_tensors("x", halved, lm)


@pytest.mark.parametrize(("fields", "limit"), CASES["longest sequence"])
def test_the_longest_sequence_is_what_vllm_derives(fields, limit):
    """As vllm/config/model.py, _get_and_verify_max_len, does."""
    text = SimpleNamespace(num_attention_heads=4, **fields)
    hf = SimpleNamespace(get_text_config=lambda: text)
    model_checks.check_engine(ask("x", max_model_len=limit), hf)
    if fields:
        with pytest.raises(InputError, match=f"max_model_len = {limit + 1}: "):
            model_checks.check_engine(ask("x", max_model_len=limit + 1), hf)
        model_checks.check_engine(ask("x", max_model_len=limit + 1, replay="y"), hf)


def test_arguments_of_the_engine_are_vllm_s_own():
    """Were its source to change its form, every argument would be taken."""
    known = preflight.arguments("engine.args")
    assert {
        "max_num_seqs",
        "gpu_memory_utilization",
        "kv_cache_dtype",
        "enforce_eager",
    } <= known.keys()
    assert 100 < len(known) < 400


def test_a_share_of_a_gpu_is_refused_where_there_is_none(monkeypatch):
    """With the variable that acts there; a cluster elsewhere may have GPUs."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    cfg = ask("x", engine={"args": {"gpu_memory_utilization": 0.3}})
    expected = (
        "gpu_memory_utilization = 0.3, and this machine has no GPU: .* VLLM_CPU_KVCACHE_SPACE"
    )
    with pytest.raises(InputError, match=expected):
        preflight.check_device(cfg)
    preflight.check_device(ask("x"))
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    preflight.check_device(cfg)
    monkeypatch.delenv("RAY_ADDRESS")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    preflight.check_device(cfg)


def test_the_end_of_a_job_is_a_time(monkeypatch, tmp_path):
    cfg = ask("x", run_dir=str(tmp_path / "run"), save_before=60)
    monkeypatch.setenv("SLURM_JOB_END_TIME", "soon")
    with pytest.raises(InputError, match="SLURM_JOB_END_TIME = 'soon': save_before needs seconds"):
        preflight.check_command(cfg)
    for end in ("", "1790000000", "1790000000.5"):
        monkeypatch.setenv("SLURM_JOB_END_TIME", end)
        preflight.check_command(cfg)


@pytest.mark.parametrize(("value", "annotation", "fits"), [
    (4, "int", True),
    (4, "float", True),
    (4.5, "int | None", False),
    (True, "int", False),
    (None, "Optional[bool]", True),
    ("x", "Literal['x', 'y']", True),
    ("z", "Literal['x', 'y'] | None", False),
    ({"a": 1}, "dict[str, int]", True),
    ("anything", "ModelDType", True),  # a name of the library's own: it has the last word
    ("anything", "'dict[str, Any] | QuantizationConfigArgs | None'", True),
])  # fmt: skip
def test_values_fit_what_a_library_annotates(value, annotation, fits):
    assert (preflight.misfit(value, preflight.argument(annotation, {}, {})) == "") == fits


@pytest.mark.parametrize(("fields", "noted"), [
    ({"steps": 9}, True),
    ({"steps": 10}, False),
    ({"steps": 5, "updates_per_batch": 2, "prompts_per_step": 2}, False),
    ({"steps": 9, "warmup_steps": 0}, False),
    ({"steps": 9, "eval_only": True, "val": "v"}, False),
])  # fmt: skip
def test_a_warm_up_that_a_run_does_not_complete_is_noted(fields, noted):
    said = preflight.short_of_warmup(ask("x", **fields))
    told = "warmup_steps = 10, but the run has 9 optimizer steps"
    assert bool(said) == noted and (told in said) == noted


def test_drafts_are_checked_by_vllm_s_own_names_types_and_limits():
    """Were its source to change its form, every entry would be taken."""
    known = preflight.arguments(preflight.DRAFTS)
    assert known["num_speculative_tokens"].bounds == {"gt": 0}
    assert {"ngram", "mtp", "eagle3", "suffix"} <= set(get_args(get_args(known["method"].kind)[0]))
    assert preflight.misfit([[1, 4, 2]], known["num_speculative_tokens_per_batch_size"]) == ""
    assert preflight.misfit(None, known["prompt_lookup_max"]) == ""
    assert {"qwen3_next", "nemotron_h"} <= speculation.models_with_heads()
