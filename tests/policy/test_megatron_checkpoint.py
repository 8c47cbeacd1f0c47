"""Checkpoints and exports of policy/megatron: what a rank writes, and which layouts go on from it.

The ranks of a layout are processes on gloo, as in test_megatron.py.
"""

import json
import os

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from support.megatron_jobs import compute
from support.tiny_models import make

pytestmark = [pytest.mark.e2e, pytest.mark.xdist_group("layouts")]
EXPERTS = ["qwen3_moe", "nemotron_moe"]
MAMBA = ["nemotron_dense", "nemotron_moe"]
EVERY = ["llama", "qwen2", "qwen3", "qwen3_moe", *MAMBA]
BOTH = {"tp": 2, "ep": 2}
HALVES = "bf16 gradients"
RECIPE = {"grad_reduce_in_fp32": False, "overlap_param_gather": True}  # that of Super
HALF = {"megatron": {"ddp": RECIPE}}
BUCKETS = {"megatron": {"ddp": RECIPE | {"overlap_grad_reduce": True}}}
JOBS = {  # in this order: layout, ranks, families, and what else is not as usual
    "tp2": ({"tp": 2}, 2, EVERY, {}),
    "pp2": ({"pp": 2}, 2, ["qwen2", "nemotron_moe"], {}),
    "one replica": (BOTH, 2, EXPERTS, {}),
    "bf16": ({}, 2, MAMBA, {"dtype": "bfloat16"}),
    HALVES: (HALF, 2, MAMBA[:1], {"dtype": "bfloat16"}),
    "of float32": ({}, 2, MAMBA[:1], {"dtype": "bfloat16", "work": "reload", "from": HALVES}),
    "in buckets": (BUCKETS, 2, MAMBA[:1], {"dtype": "bfloat16", "work": "reload", "from": HALVES}),
    "two replicas": (BOTH, 4, EXPERTS, {}),
    "cp2": ({"tp": 2, "cp": 2}, 4, EVERY, {"work": "reload", "from": "tp2"}),
    "fewer": (BOTH, 2, EXPERTS, {"work": "reload", "from": "two replicas"}),
    "one": ({}, 1, EXPERTS, {"work": "reload", "from": "two replicas"}),
}
RESUMED = [(name, each) for name, job in JOBS.items() if "work" not in job[3] for each in job[2]]
EXPORTED = [(name, family) for name, family in RESUMED if "bf16" not in name]
# Of tp2, and of cp2 from it, these are long: other dense families, and Mamba with experts, are not.
LONG = ["qwen2", "qwen3", "nemotron_dense"]
UNTRAINED = [f"mtp.layers.{i}.norm.weight" for i in range(3)]


def is_long(name: str, family: str) -> bool:
    """Whether the other families of tp2 and cp2, and this one elsewhere, are enough."""
    return name in ("tp2", "cp2") and family in LONG


def marked(cases: list[tuple[str, str]]) -> list:
    """The same with their marks."""
    return [pytest.param(*case, marks=[pytest.mark.long] * is_long(*case)) for case in cases]


@pytest.fixture(scope="module")
def models(tmp_path_factory, tiny_model):
    """A folder for every family; Nemotron-H with experts has tensors that are never trained."""
    folder = tmp_path_factory.mktemp("families")
    made = {family: make(family, folder / family, tiny_model) for family in EVERY}
    path = folder / "nemotron_moe/model.safetensors"
    state = load_file(path)
    state |= {name: torch.full([64], float(i)) for i, name in enumerate(UNTRAINED)}
    save_file(state, path, {"format": "pt"})
    return made


@pytest.fixture(scope="module")
def found(models, tmp_path_factory, request):
    """What each job found, by family; `folder` has what it wrote."""
    folder = tmp_path_factory.mktemp("checkpoints")
    usual = {"work": "resume", "rows": 2}
    here = [item for item in request.session.items if item.path == request.path]
    asked = {tuple(item.callspec.params.values()) for item in here if hasattr(item, "callspec")}
    jobs = [
        usual | {"name": name, "world": world, "layout": layout} | other
        | {"models": [models[f] for f in families if not is_long(name, f) or ("tp2", f) in asked]}
        for name, (layout, world, families, other) in JOBS.items()
    ]  # fmt: skip
    of = compute(jobs, folder)
    of.folder = folder
    return of


@pytest.mark.parametrize(("name", "family"), marked(RESUMED))
def test_the_step_from_a_checkpoint_is_bitwise_that_without(name, family, found):
    """Weights, moments and step counts of every rank; Nemotron-H in bf16 as on a GPU, too."""
    resumed = found(name)[family]
    assert [rank["same"] for rank in resumed["ranks"]] == [True] * JOBS[name][1]
    saved, after = resumed["weights"], resumed["after"]
    assert all(after[key].isfinite().all() for key in saved)
    still = [key for key, tensor in saved.items() if torch.equal(after[key], tensor)]
    if "bf16" in name:  # such small steps are lost in some of its weights
        assert len(still) < len(saved) / 2
    else:
        assert all(key.endswith("gate.weight") for key in still), still


@pytest.mark.parametrize("family", EXPERTS)
def test_a_rank_holds_and_writes_its_share(family, found):
    """Half as much with twice the replicas; of weights and moments, 16 bytes a parameter."""
    one, two = (found(f"{n} replica" + "s" * (n == "two"))[family] for n in ("one", "two"))
    sizes = {key: [rank[key] for rank in one["ranks"]] for key in ("held", "written")}
    for key, whole in sizes.items():
        halves = [rank[key] for rank in two["ranks"]]
        assert max(halves) < 0.55 * max(whole), key
        assert sum(halves) < 1.1 * sum(whole), key
    elements = sum(tensor.numel() for tensor in one["weights"].values())
    assert 0.9 < sum(sizes["held"]) / (16 * elements) < 1.1


@pytest.mark.parametrize("family", EXPERTS)
def test_no_rank_holds_the_model_while_it_is_exported(family, found):
    """Of four ranks each holds its quarter, and beside it the parts of a tensor, put together."""
    trained = found("two replicas")[family]
    whole = sum(tensor.nbytes for tensor in trained["weights"].values())
    largest = max(tensor.nbytes for tensor in trained["weights"].values())
    for rank in trained["ranks"]:
        assert whole / 8 < rank["exporting"] < whole / 4 + 3 * largest < whole


OTHERS = [("tp2", family) for family in EVERY] + [("two replicas", family) for family in EXPERTS]


@pytest.mark.parametrize(("source", "family"), marked(OTHERS))
def test_other_replicas_go_on_from_a_checkpoint(source, family, found):
    name = {"tp2": "cp2", "two replicas": "fewer"}[source]
    loaded, saved = found(name)[family], found(source)[family]
    assert all(torch.equal(loaded["weights"][k], w) for k, w in saved["weights"].items())
    assert loaded["step"]["grad_norm"] == pytest.approx(saved["step"]["grad_norm"], rel=1e-4)
    for key, tensor in saved["after"].items():
        assert (loaded["after"][key] - tensor).abs().max() < 1e-5, key


@pytest.mark.parametrize("family", EXPERTS)
def test_another_tp_or_ep_is_refused_and_starts_from_the_export(family, found):
    one, saved = found("one")[family], found("two replicas")[family]
    refused = one["refused"]
    assert "was saved with policy.tp = 2, not 1: restore that value, or set model to" in refused
    assert all(torch.equal(one["weights"][key], w) for key, w in saved["weights"].items())


def test_gradients_in_bf16_are_those_of_float32_but_for_rounding(found):
    halves, whole = (found(name)["nemotron_dense"] for name in (HALVES, "bf16"))
    norms = [of["step"]["grad_norm"] for of in (halves, whole)]
    assert norms[0] != norms[1] and norms[0] == pytest.approx(norms[1], rel=0.01)

    def moved(of: dict) -> torch.Tensor:
        steps = [of["after"][key] - old for key, old in of["weights"].items()]
        return torch.cat([step.float().flatten() for step in steps])

    assert torch.cosine_similarity(moved(halves), moved(whole), dim=0) > 0.9


@pytest.mark.parametrize(
    ("name", "field"),
    [("of float32", "grad_reduce_in_fp32"), ("in buckets", "overlap_grad_reduce")],
)
def test_gradients_of_another_type_or_in_buckets_are_refused(name, field, found):
    told = found(name)["nemotron_dense"]["refused"]
    saved = f"was saved with policy.megatron.ddp.{field} = False, not True"
    assert f"{saved}: restore that value, or set model to" in told


def test_what_says_that_a_checkpoint_is_there_is_written_last(found):
    assert found("two replicas")["qwen3_moe"]["early"] == []
    files = sorted((found.folder / "saved-two replicas-qwen3_moe").iterdir(), key=os.path.getmtime)
    assert [file.name for file in files][-2:] == ["common.pt", "metadata.json"]
    assert {f"__{rank}_0.distcp" for rank in range(4)} < {file.name for file in files}


def test_gradients_are_copied_and_measured_once_a_step(found):
    assert found("tp2")["llama"]["calls"] == {"prepare_grads": 1, "get_grad_norm": 1}


@pytest.mark.parametrize(("name", "family"), marked(EXPORTED))
def test_each_rank_exports_its_share_and_transformers_loads_all(name, family, found):
    folder = found.folder / f"export-{name}-{family}"
    saved = found(name)[family]["weights"]
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    parts = {path.name: load_file(path) for path in folder.glob("*.safetensors")}
    ranks = JOBS[name][1]
    assert sorted(parts) == [f"model-{i:05}-of-{ranks:05}.safetensors" for i in range(1, ranks + 1)]
    assert index["weight_map"] == {key: file for file, part in parts.items() for key in part}
    whole = {key: tensor for part in parts.values() for key, tensor in part.items()}
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in whole.values())
    assert all(torch.equal(whole[key], tensor) for key, tensor in saved.items())
    untrained = UNTRAINED if family == "nemotron_moe" else []
    assert sorted(whole.keys() - saved.keys()) == untrained
    assert [float(whole[key].mean()) for key in untrained] == [0, 1, 2][: len(untrained)]
    sizes = [sum(tensor.nbytes for tensor in part.values()) for part in parts.values()]
    assert max(sizes) < 1.3 * sum(sizes) / ranks
    assert {"tokenizer.json", "config.json"} <= set(os.listdir(folder))
    lm = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert lm(input_ids=torch.arange(9)[None]).logits.isfinite().all()
