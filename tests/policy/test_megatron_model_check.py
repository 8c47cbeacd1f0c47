"""What is wrong between a model and a layout is reported before any actor starts."""

import json
import math
import re
import sys
import time
from importlib.metadata import requires
from pathlib import Path

import pydantic
import pytest
from packaging.requirements import Requirement
from safetensors.torch import load_file, save_file

from core.errors import InputError
from policy.megatron.model_check import Checkpoint, check_kernels, check_megatron
from settings.network import PolicySettings
from support.program import ROOT, ran
from support.tables import table
from support.tiny_models import FAMILIES, make

CASES = table(Path(__file__).with_name("cases.txt"))


def test_kernels_are_pinned_to_what_megatron_asks_for_and_the_page_names_the_same():
    text = (ROOT / "requirements/megatron.txt").read_text()
    lines = [line.partition("#")[0].strip() for line in text.splitlines()]
    assert "-r gpu.txt" in lines
    pinned = [Requirement(line) for line in lines if line and not line.startswith("-")]
    assert {p.name for p in pinned} == {"transformer-engine", "mamba-ssm", "causal-conv1d"}
    named = [Requirement(line) for line in requires("megatron-core")]
    asked = {r.name: r for r in named if r.marker and r.marker.evaluate({"extra": "dev"})}
    page = (ROOT / "docs/megatron.md").read_text()
    for pin in pinned:
        (version,) = (spec.version for spec in pin.specifier)
        assert asked[pin.name].specifier.contains(version), f"{pin}, not {asked[pin.name]}"
        assert pin.extras == asked[pin.name].extras
        assert re.search(rf"{pin.name.replace('-', '.')} {re.escape(version)}", page, re.IGNORECASE)


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tiny_model):
    """A function that makes a family's model, its files changed by `edit` and `tensors`."""

    def of(family: str, edit=None, tensors=None) -> str:
        path = tmp_path_factory.mktemp(family)
        make(family, path, tiny_model)
        if edit:
            config = json.loads((path / "config.json").read_text())
            (path / "config.json").write_text(json.dumps(config | edit))
        if tensors:
            state = load_file(path / "model.safetensors")
            tensors(state)
            save_file(state, path / "model.safetensors", {"format": "pt"})
        return str(path)

    return of


def refusal(model: str, **fields) -> str:
    """The error of a configuration on Megatron."""
    with pytest.raises(InputError) as error:
        check_megatron(model, PolicySettings(kind="megatron", **fields))
    return str(error.value)


@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - {"one_head_nemotron_moe"}))
def test_every_family_passes(family, folder):
    fields = {"ep": 2} if "moe" in family else {}
    check_megatron(folder(family), PolicySettings(kind="megatron", ranks=4, tp=2, **fields))


def test_missing_kernels_are_named_with_what_installs_them(folder, monkeypatch):
    monkeypatch.setattr(sys, "path", [path for path in sys.path if not path.endswith("cpu")])
    monkeypatch.delitem(sys.modules, "transformer_engine", raising=False)
    model = folder("llama")
    check_megatron(model, PolicySettings(kind="megatron"))  # a machine that submits needs none
    with pytest.raises(InputError, match="transformer_engine.* bash launch/setup.sh megatron"):
        check_kernels(model)


def test_an_unknown_architecture_names_those_that_are_known(folder, tiny_model):
    message = refusal(folder("qwen3", edit={"model_type": "granite", "architectures": ["Granite"]}))
    assert "llama, qwen2, qwen3, qwen3_moe, nemotron_h, not granite" in message


def test_missing_extra_and_misshapen_tensors_are_named(folder):
    lost = folder("llama", tensors=lambda state: state.pop("model.layers.1.mlp.up_proj.weight"))
    message = refusal(lost)
    assert "no tensor model.layers.1.mlp.up_proj.weight" in message and "did you mean" in message
    name = "model.layers.0.self_attn.q_proj.lora"
    more = folder("qwen3", tensors=lambda s: s.update({name: s["model.norm.weight"] + 0}))
    assert f"{name} is not a tensor of qwen3" in refusal(more)

    def cut(state):
        state["model.norm.weight"] = state["model.norm.weight"][:-1].clone()

    assert "model.norm.weight is [63], expected [64]" in refusal(folder("qwen2", tensors=cut))


def test_a_number_that_is_not_finite_is_named_where_it_is_read(folder):
    name = "model.layers.1.self_attn.v_proj.weight"
    spoilt = folder("llama", tensors=lambda state: state[name][3].fill_(math.nan))
    file = Checkpoint(spoilt)
    rows, columns = file.shape(name)
    assert file.read(name, 0, 4, rows).isfinite().all()
    for dim, start, stop, count in ((0, 0, 4, columns), (1, 0, 7, 7)):
        with pytest.raises(ValueError, match=f"{name}: {count} of .* are NaN or infinite"):
            file.read(name, dim, start, stop)


@pytest.mark.parametrize(("family", "field", "value"), CASES["fields"])
def test_fields_that_change_the_network_alone_are_refused(family, field, value, folder):
    """They change none of its tensors, which would be loaded without a word."""
    message = refusal(folder(family, edit={field: value}))
    assert f"its config.json has {field} = {value!r}, but policy.kind = 'megatron'" in message


def test_heads_of_prediction_are_kept_aside(folder):
    def add(state):
        state["mtp.layers.0.norm.weight"] = state["backbone.norm_f.weight"] + 0

    check_megatron(folder("nemotron_moe", tensors=add), PolicySettings(kind="megatron"))


def test_a_tokenizer_larger_than_the_embedding_is_refused(folder):
    def cut(state):
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            state[name] = state[name][:90].clone()

    message = refusal(folder("qwen3", edit={"vocab_size": 90}, tensors=cut))
    assert "its tokenizer has 101 tokens, but its embedding has 90" in message


@pytest.mark.parametrize(("family", "fields", "expected"), CASES["layouts of a model"])
def test_what_does_not_divide_comes_with_the_nearest_that_does(family, fields, expected, folder):
    assert expected in refusal(folder(family), ranks=12, **fields)


def test_ranks_that_share_sequences_share_groups_of_mamba(folder):
    model = folder("nemotron_moe", edit={"mamba_num_heads": 12})
    message = refusal(model, ranks=6, tp=1, cp=3, row_tokens=96)
    assert "policy.cp = 3 and n_groups of Mamba / policy.tp = 2: one must divide" in message


@pytest.mark.parametrize(("fields", "expected"), CASES["layouts"])
def test_contradictions_of_a_layout(fields, expected):
    with pytest.raises(pydantic.ValidationError) as error:
        PolicySettings(**fields)
    assert expected in str(error.value)


def test_replicas_of_a_layout():
    layout = PolicySettings(kind="megatron", ranks=16, tp=2, cp=2, pp=2)
    assert layout.replicas == 2
    assert [layout.replica_of(rank) for rank in range(16)] == [0] * 4 + [1] * 4 + [0] * 4 + [1] * 4


@pytest.mark.slow
def test_the_program_refuses_a_layout_within_seconds(folder, warm_python):
    flags = ["--policy.kind", "megatron", "--policy.tp", "3", "--policy.ranks", "3"]
    began = time.monotonic()
    ended = ran(warm_python, "grpo_async.py", "--model", folder("qwen3"), *flags)
    assert ended.returncode == 1 and "error: policy.tp = 3 does not divide" in ended.stderr
    assert time.monotonic() - began < 30 and "Traceback" not in ended.stderr
