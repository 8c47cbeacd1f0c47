"""policy/megatron on real Megatron-Core: every family under every layout, against transformers.

The ranks of a layout are processes on gloo that compute all families; tests/cpu stands in for
CUDA, Transformer Engine and the Mamba kernel.
"""

import json
import math

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from grpo_async import policy_loss
from policy.fsdp import FSDPPolicy
from runtime.reporting.metrics import reduce_stats
from support.megatron_jobs import compute, run
from support.megatron_ranks import config, rows

pytestmark = [pytest.mark.e2e, pytest.mark.xdist_group("layouts")]
DENSE = ["llama", "qwen2", "qwen3"]
ONE_HEAD = "one_head_nemotron_moe"  # of keys and values, fewer than tp
MAMBA = ["nemotron_dense", "nemotron_moe", ONE_HEAD]
EVERY = [*DENSE, "qwen3_moe", *MAMBA]
LAYOUTS = {
    "tp2": ({"tp": 2}, 2, EVERY[:-1]),
    "cp2": ({"cp": 2}, 2, EVERY[:-1]),
    "pp2": ({"pp": 2}, 2, EVERY[:-1]),
    "one": ({}, 1, EVERY),
    "tp2 ep2": ({"tp": 2, "ep": 2}, 4, ["qwen3_moe", "nemotron_moe"]),
    "tp2 cp2 ep4": ({"tp": 2, "cp": 2, "ep": 4}, 4, [ONE_HEAD]),
}
OVERLAP = {"ddp": {"overlap_param_gather": True, "overlap_grad_reduce": True}}
STEPS = {"apart": {}, "overlapped": {"megatron": OVERLAP}}  # what two replicas send, and compute
ROWS = 2
SMOKE = "tp2"
# In these layouts only a dense model, one with experts and one with Mamba are not long.
THREE = {"llama", "qwen3_moe", "nemotron_moe"}
FEW = ("cp2", "pp2")


@pytest.fixture(scope="module")
def measured(models, tmp_path_factory, request):
    """What each layout computes, by family; one layout alone if no test of another one runs."""
    folder = tmp_path_factory.mktemp("layouts")
    here = [item for item in request.session.items if item.path == request.path]
    asked = {tuple(item.callspec.params.values()) for item in here if hasattr(item, "callspec")}
    jobs = [
        {"name": name, "world": world, "layout": layout, "work": "measure"}
        | {"models": [f for f in families if not is_long(name, f) or (name, f) in asked]}
        for name, (layout, world, families) in LAYOUTS.items()
    ]
    jobs += [
        {"name": name, "world": 2, "layout": layout, "models": ["qwen3_moe"], "work": "steps"}
        | {"steps": [1, 3, 2]}
        for name, layout in STEPS.items()
    ]
    if all(item.get_closest_marker("smoke") for item in here):
        jobs = [job for job in jobs if job["name"] == SMOKE]
    jobs.sort(key=lambda job: {2: 0, 1: 1, 4: 2}[job["world"]])
    for job in jobs:
        job |= {"rows": ROWS, "models": [models[family] for family in job["models"]]}
    return compute(jobs, folder)


CASES = [(name, family) for name, (_, _, families) in LAYOUTS.items() for family in families]


def is_long(name: str, family: str) -> bool:
    """Whether other families in this layout, and other layouts of this family, are enough."""
    return name in FEW and family not in THREE


def marked(cases: list, smoke: bool = True) -> list:
    """The same with their marks: those of one layout are smoke tests."""
    of_smoke = [pytest.mark.smoke] * smoke
    return [
        pytest.param(*c, marks=of_smoke * (c[0] == SMOKE) + [pytest.mark.long] * is_long(*c))
        for c in cases
    ]


@pytest.fixture(scope="module")
def references(models):
    """Of a family the plain model's logits [T, V] of each row, its sequences one by one."""
    found = {}

    def of(family: str) -> list[torch.Tensor]:
        if family not in found:
            lm = AutoModelForCausalLM.from_pretrained(models[family], dtype=torch.float32).eval()
            with torch.no_grad():
                found[family] = [
                    torch.cat([lm(input_ids=t[None]).logits[0] for t in sequences(row)])
                    for row in rows(ROWS)
                ]
        return found[family]

    return of


def sequences(row) -> list[torch.Tensor]:
    """The token ids of each sequence in a packed row."""
    return list(row.tokens_T.split(torch.bincount(row.seq_T).tolist()))


@pytest.mark.parametrize(("name", "family"), marked(CASES))
def test_logits_equal_transformers(name, family, measured, references):
    logits = measured(name)[family]["logits"]
    limit = 1e-3 if family in MAMBA else 1e-5
    assert len(logits) == ROWS
    for ours, theirs in zip(logits, references(family), strict=True):
        assert (ours - theirs).abs().max() < limit


@pytest.mark.parametrize(("name", "family"), marked(CASES))
def test_hf_to_megatron_to_hf_is_bitwise(name, family, measured, models):
    found, original = measured(name)[family], load_file(f"{models[family]}/model.safetensors")
    assert found["before"].keys() == original.keys()
    assert all(torch.equal(found["before"][name], w) for name, w in original.items())
    shapes = [(name, tuple(w.shape), "float32") for name, w in found["before"].items()]
    assert found["metas"] == shapes


@pytest.mark.parametrize(("name", "family"), marked(CASES))
def test_weights_travel_among_their_owners_only(name, family, measured):
    """A stage's layers, or a layer's experts, at once; a rank without its own sends nothing."""
    moved, before = measured(name)[family]["moved"], measured(name)[family]["before"]
    assert not any("broadcast" in of_rank for of_rank in moved)
    sent = [of_rank.get("send", []) for of_rank in moved]
    assert sum(sent, []) == moved[0].get("recv", [])
    layers = {tensor.split(".experts.")[0] for tensor in before if ".experts." in tensor}
    each = len(layers)
    counts = {"pp2": [0, 2], "tp2 ep2": [0, each, 0, 0]}  # what is in no layer by itself
    counts["tp2 cp2 ep4"] = [0, each, each, each]
    assert [len(messages) for messages in sent] == counts.get(name, [0] * len(moved))
    if name == "tp2 ep2":
        experts = sum(w.nbytes for tensor, w in before.items() if ".experts." in tensor)
        assert 2 * sum(sent[1]) == experts and moved[2:] == [{}, {}]


@pytest.fixture(scope="module")
def fsdp(models, tmp_path_factory):
    """Of a family: stats, step and weights after it with policy/fsdp.py, routers frozen."""
    store = tmp_path_factory.mktemp("store") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    found = {}

    def of(family: str) -> tuple:
        if family not in found:
            cfg = config(models[family], kind="fsdp")
            policy = FSDPPolicy(cfg.model, cfg.policy, cfg.sampling.temperature)
            for name, parameter in policy.lm.named_parameters():
                parameter.requires_grad_(not name.endswith("mlp.gate.weight"))
            stats = policy.forward_backward(rows(ROWS), lambda *at: policy_loss(*at, cfg))
            total, step = reduce_stats(stats), policy.optimizer_step(1.5)
            path = tmp_path_factory.mktemp(family) / "hf"
            policy.export_hf(str(path))()
            found[family] = total, step, load_file(path / "model.safetensors")
        return found[family]

    yield of
    dist.destroy_process_group()


@pytest.mark.parametrize(("name", "family"), marked([c for c in CASES if c[1] not in MAMBA]))
def test_one_step_is_that_of_fsdp(name, family, measured, fsdp):
    found, (total, step, weights) = measured(name)[family], fsdp(family)
    assert found["total"].keys() == total.keys()
    for key, value in total.items():
        assert found["total"][key] == pytest.approx(value, rel=1e-4, abs=1e-4), key
    assert found["step"]["grad_norm"] == pytest.approx(step["grad_norm"], rel=1e-5)
    assert found["step"]["entropy"] == pytest.approx(step["entropy"], rel=1e-5)
    assert found["step"]["lr"] == step["lr"]
    # Weights that several ranks hold count more than once.
    for key in ("bf16_changed_weights", "bf16_lost_update"):
        assert found["step"][key] == pytest.approx(step[key], abs=0.05), key
    for key, tensor in weights.items():
        assert (found["after"][key] - tensor).abs().max() < 1e-5, key
        assert (found["before"][key] - tensor).abs().max() > 1e-4 or "gate.weight" in key, key


SHARED = [case for case in CASES if case[1] in MAMBA and case[0] != "one"]


@pytest.mark.parametrize(("name", "family"), marked(SHARED, smoke=False))
def test_one_step_with_mamba_is_that_of_one_rank(name, family, measured):
    found, alone = measured(name)[family], measured("one")[family]
    assert found["step"]["grad_norm"] == pytest.approx(alone["step"]["grad_norm"], rel=1e-4)
    assert found["step"]["entropy"] == pytest.approx(alone["step"]["entropy"], rel=1e-4)
    assert found["total"]["loss"] == pytest.approx(alone["total"]["loss"], rel=1e-4)
    for key, tensor in alone["after"].items():
        assert (found["after"][key] - tensor).abs().max() < 1e-5, key


def forced(gate, route_TK):
    """transformers' router of Qwen3-MoE or Nemotron-H with given experts."""
    factor = getattr(gate, "routed_scaling_factor", None)

    def forward(hidden):
        logits_TE = torch.nn.functional.linear(hidden.flatten(0, -2), gate.weight)
        score_TE = logits_TE.sigmoid() if factor else logits_TE.softmax(-1)
        score_TK = score_TE.gather(1, route_TK)
        return logits_TE, score_TK / score_TK.sum(-1, keepdim=True) * (factor or 1), route_TK

    return forward


@pytest.mark.parametrize(("name", "family"), [c for c in CASES if c[1].endswith("_moe")])
def test_the_experts_of_the_engine_are_followed(name, family, measured, models):
    """Under random routes: transformers' logits, and in every layout the same step."""
    found, alone = measured(name)[family]["replayed"], measured("one")[family]["replayed"]
    assert found["step"]["routing_replay_hit_rate"] == 1.0
    assert "of the engine's routes; does the engine return them" in found["refused"]
    for key, tensor in alone["after"].items():
        assert (found["after"][key] - tensor).abs().max() < 1e-5, key
    assert found["step"]["grad_norm"] == pytest.approx(alone["step"]["grad_norm"], rel=1e-4)
    lm = AutoModelForCausalLM.from_pretrained(models[family], dtype=torch.float32).eval()
    limit = 1e-3 if family in MAMBA else 1e-5
    free = measured("one")[family]["logits"]
    for i, row in enumerate(rows(ROWS)):
        last_T = row.positions_T.roll(-1) == 0  # whose experts the engine never chose
        ours, others = found["logits"][i], alone["logits"][i]
        assert (ours - others)[~last_T].abs().max() < limit
        assert (ours - free[i])[~last_T].abs().max() > 0.01, "the routes change nothing"
        gates = [gate for name, gate in lm.named_modules() if name.endswith(".gate")]
        theirs = []
        for tokens_T, routes_T in zip(sequences(row), row.routes_N, strict=True):
            assert len(gates) == routes_T.shape[1] == 2
            for k, gate in enumerate(gates):
                gate.forward = forced(gate, torch.tensor(routes_T[:, k]).long())
            with torch.no_grad():
                theirs.append(lm(input_ids=tokens_T[None]).logits[0])
        assert (ours - torch.cat(theirs))[~last_T].abs().max() < limit


def test_expert_biases_move_towards_balance_and_routers_stay(measured):
    found = measured("one")["nemotron_moe"]
    for key, before in found["before"].items():
        moved = found["after"][key] - before
        if key.endswith("e_score_correction_bias"):
            assert torch.allclose(moved.abs()[moved != 0], torch.tensor(1e-3), atol=1e-6)
            assert moved.abs().max() > 0
        elif key.endswith("gate.weight"):
            assert not moved.any()
        else:
            assert moved.abs().max() > 0, key


@pytest.mark.parametrize("name", [name for name, family in CASES if family == "nemotron_moe"])
def test_tokens_of_untrained_samples_move_no_expert_bias(name, measured):
    biases = measured(name)["nemotron_moe"]["biases"]
    for key, before in biases["before"].items():
        assert torch.equal(biases["trains nothing"][key], before)
        kinds = ("one sample trains nothing", "that sample is absent")
        moved, expected = (biases[kind][key] for kind in kinds)
        assert torch.equal(moved, expected) and not torch.equal(moved, before)


def test_what_overlaps_is_complete_where_it_is_saved_and_sent(measured):
    """Gradients are summed after the last row, parameters gathered before the next forward."""
    apart, overlapped = (measured(name)["qwen3_moe"] for name in STEPS)
    assert overlapped["norms"] == pytest.approx(apart["norms"], rel=1e-5)
    for key, tensor in apart["after"].items():
        assert (overlapped["after"][key] - tensor).abs().max() < 1e-6, key
        assert torch.equal(overlapped["loaded"][key], overlapped["after"][key]), key


@pytest.mark.parametrize("name", STEPS)
def test_a_row_at_a_time_is_summed_over_ranks_once(name, measured):
    """As the parts of a batch are (`train_parts`): the same weights as from all rows at once."""
    found = measured(name)["qwen3_moe"]
    for key, tensor in found["after"].items():
        assert (found["in parts"][key] - tensor).abs().max() < 1e-6, key


def test_an_infinite_logprob_that_no_loss_contains_leaves_it_finite(measured):
    losses = measured("one")["llama"]["infinite"]
    assert len(losses) == ROWS and all(math.isfinite(loss) for loss in losses)


def test_super_s_own_widths_are_cut_as_its_checkpoint_has_them():
    """At tp 4, cp 8, ep 8 on 256 ranks, of which eight hold all experts; a layer of each kind."""
    found = json.loads(run("super_widths.py", *map(str, range(8))).splitlines()[-1])
    assert found["nowhere"] == [] and len(found["ranks"]) == 8
    for held in found["ranks"].values():
        assert sum(".experts." in name for name in held) == 2 * 512 // 8
        for name, (shape, whole, placed, dim, ranks) in held.items():
            assert placed == whole[dim], name
            whole[dim] //= ranks
            assert shape == whole, name
    widths = {name.split(".mixer.")[-1]: of[0] for name, of in found["ranks"]["5"].items()}
    assert widths["q_proj.weight"] == [8 * 128 + 128, 4096]  # with a part of keys and of values
    assert widths["in_proj.weight"] == [2 * 2048 + 2 * 2 * 128 + 32, 4096]
    assert widths["conv1d.weight"] == [2048 + 2 * 2 * 128, 1, 4]
    assert widths["experts.320.up_proj.weight"] == [2688, 1024]
