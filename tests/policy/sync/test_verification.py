"""The numbers by which loaded parameters are compared with what was sent."""

from types import SimpleNamespace

import pytest
import torch
import vllm.distributed
from torch import nn
from vllm.model_executor.models.utils import WeightsMapper

from policy.sync.verification import ROUNDING, Proof, value_digests, vectors
from policy.sync.weight_sync import row_digests
from support.host_waits import HostWaits

DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [1, 3, 64, 1000])
def test_a_row_digest_sees_any_change_of_its_row_and_no_other(columns, dtype):
    torch.manual_seed(0)
    rows_RC = torch.randn(700, columns).to(dtype)
    right_R = row_digests(rows_RC)
    assert len(set(right_R.tolist())) > 0.3 * len(right_R)
    assert torch.equal(row_digests(rows_RC.T.contiguous().T), right_R), "by values, not by memory"
    changes = {
        "next value": lambda row: torch.nextafter(row.float(), row.float() + 1).to(dtype) * 1.01,
        "sign": torch.neg,
        "zero": torch.zeros_like,
        "not a number": lambda row: row * torch.nan,
        "signs of two": lambda row: torch.cat([-row[:2], row[2:]]),
    }
    for what, change in changes.items():
        other_RC = rows_RC.clone()
        other_RC[5] = change(other_RC[5])
        wrong_R = row_digests(other_RC) != right_R
        assert wrong_R.nonzero().tolist() == [[5]], what


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_digest_sees_swapped_columns_and_rows(dtype):
    torch.manual_seed(0)
    rows_RC = torch.randn(50, 64).to(dtype)
    right_R = row_digests(rows_RC)
    for a, b in [(0, 1), (0, 2), (31, 32), (1, 63)]:
        order = list(range(64))
        order[a], order[b] = b, a
        assert (row_digests(rows_RC[:, order]) != right_R).all()
    assert torch.equal(row_digests(rows_RC.flip(0)), right_R.flip(0))


def value_digest(values: torch.Tensor) -> int:
    """Of one matrix."""
    return int(value_digests(values[None]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_value_digest_sees_values_and_not_their_places(dtype):
    torch.manual_seed(0)
    values = torch.randn(300, 1000).to(dtype)
    right = value_digest(values)
    shuffled = values.flatten()[torch.randperm(values.numel())]
    assert value_digest(shuffled) == right
    assert value_digest(torch.cat([values, torch.zeros(10, 1000, dtype=dtype)])) == right
    assert int(value_digests(values.view(2, 150, 1000)).sum()) == right
    assert value_digests(torch.stack([values, shuffled.view(300, 1000)])).tolist() == [right] * 2
    for change in (torch.neg, lambda x: 2 * x, lambda x: x * torch.nan):
        other = values.clone()
        other[7, 9] = change(other[7, 9])
        assert value_digest(other) != right
        assert value_digest(change(values)) != right


@pytest.mark.parametrize("columns", [64, 1024, 6144])
def test_rounding_of_many_rows_stays_within_what_is_allowed(columns):
    torch.manual_seed(0)
    rows_RC = torch.randn(20_000, columns)
    x_VC = vectors(columns, rows_RC.device)
    gap_RV = torch.nn.functional.linear(x_VC, rows_RC).T - rows_RC @ x_VC.T
    assert (gap_RV.norm(dim=1) / rows_RC.norm(dim=1)).max() < ROUNDING[torch.float32] / 3


@pytest.fixture
def stacked(monkeypatch):
    """A function that makes a model of one stack of two matrices, with a mapper or without."""
    monkeypatch.setattr(vllm.distributed, "get_tensor_model_parallel_rank", lambda: 0)

    def make(mapper):
        model = nn.Module()
        model.gate_up_proj = nn.Linear(4, 6, bias=False)
        model.hf_to_vllm_mapper = mapper
        return model

    return make


@pytest.mark.parametrize("mapper", [None, WeightsMapper()])
def test_a_stack_that_the_model_makes_by_itself_is_unverified_and_not_refused(stacked, mapper):
    proof = Proof(stacked(mapper))
    for name in ("gate_proj.weight", "up_proj.weight"):
        proof.add(name, torch.randn(3, 4))
    proof.check()
    assert proof.unverified >= {"gate_proj.weight", "up_proj.weight"}


def test_rows_that_are_missing_or_other_are_refused_where_all_places_are_known(stacked):
    model = stacked(WeightsMapper())
    right = model.gate_up_proj.weight.detach()
    for sent, problem in (
        (right[:3], "does not write gate_up_proj.weight, row 3 of 6"),
        (right.flip(0), "does not hold row 0 of gate_up_proj.weight as it was sent"),
    ):
        proof = Proof(model)
        proof.add("gate_up_proj.weight", sent)
        with pytest.raises(RuntimeError, match=problem):
            proof.check()
    proof = Proof(model)
    proof.add("gate_up_proj.weight", right)
    proof.check()
    with pytest.raises(RuntimeError, match=r"does not write gate_up_proj\.weight"):
        Proof(model).check()


E, INNER, HIDDEN = 20, 6, 8


@pytest.fixture
def experts(monkeypatch):
    """A model of one layer of experts as vLLM names it, and what its checkpoint would hold."""
    monkeypatch.setattr(vllm.distributed, "get_tensor_model_parallel_rank", lambda: 0)
    torch.manual_seed(0)
    layer = nn.Module()
    layer.w13_weight = nn.Parameter(torch.randn(E, 2 * INNER, HIDDEN))
    layer.w2_weight = nn.Parameter(torch.randn(E, HIDDEN, INNER))
    layer.ckpt_up_proj_name, layer.ckpt_down_proj_name = "up_proj", "down_proj"
    split = SimpleNamespace(tp_size=1, tp_rank=0, enable_eplb=False)
    layer.moe_config = SimpleNamespace(moe_parallel_config=split)
    layer.expert_map_manager = SimpleNamespace(map_global_to_local=lambda e: e)
    model = nn.Module()
    model.hf_to_vllm_mapper = WeightsMapper()
    model.mlp = nn.Module()
    model.mlp.experts = nn.Module()
    model.mlp.experts.routed_experts = layer
    sent = {}
    for e in range(E):
        gate, up = layer.w13_weight.detach()[e].clone().chunk(2)
        down = layer.w2_weight.detach()[e].clone()
        for kind, tensor in (("gate", gate), ("up", up), ("down", down)):
            sent[f"mlp.experts.{e}.{kind}_proj.weight"] = tensor
    return model, sent


def verdict(model: nn.Module, sent: dict) -> str:
    """What a proof says of what was sent."""
    proof = Proof(model)
    list(proof.watch(sent.items()))
    try:
        proof.check()
    except RuntimeError as error:
        return str(error)
    return ", ".join(sorted(proof.unverified))


def test_experts_are_compared_by_values_and_by_places(experts):
    model, sent = experts
    layer = "mlp.experts.routed_experts"
    assert verdict(model, sent) == ""
    other = sent | {"mlp.experts.17.up_proj.weight": sent["mlp.experts.17.up_proj.weight"] * 1.01}
    assert verdict(model, other) == f"{layer}.w13_weight does not hold expert 17 as it was sent"
    one, two = "mlp.experts.3.down_proj.weight", "mlp.experts.4.down_proj.weight"
    swapped = sent | {one: sent[two], two: sent[one]}
    assert verdict(model, swapped) == f"{layer}.w2_weight does not hold expert 3 as it was sent"
    turned = {name: t.flip(0) if "down" in name else t for name, t in sent.items()}
    assert verdict(model, turned) == f"the order in {layer}.w2_weight", "as of a kernel's own order"
    proof, layer_of = Proof(model), model.mlp.experts.routed_experts
    list(proof.watch(sent.items()))
    held = layer_of.w13_weight
    layer_of.w13_weight = nn.Parameter(held.detach().transpose(1, 2).contiguous())
    proof.check()
    assert proof.unverified == {f"the order in {layer}.w13_weight"}, "as of a transposed one"
    layer_of.w13_weight = held
    both = {one.replace("down", kind): sent[one.replace("down", kind)] for kind in ("gate", "up")}
    places = dict(zip(both, reversed(both.values()), strict=True))
    message = f"{layer}.w13_weight does not hold expert 3 as it was sent"
    assert verdict(model, sent | places) == message
    fewer = {name: tensor for name, tensor in sent.items() if "experts.5.up" not in name}
    message = f"the weight update does not write expert 5 of {layer}.w13_weight"
    assert verdict(model, fewer) == message


def test_a_proof_waits_for_no_device_but_once(experts):
    """However many experts there are; `Tensor.cpu` brings all verdicts, and is no wait on a CPU."""
    model, sent = experts
    proof = Proof(model)
    with HostWaits() as waits:
        list(proof.watch(sent.items()))
        verdicts = list(proof.verdicts())
    assert waits.count == 0 and [len(verdict.wrong_N) for verdict in verdicts] == [2 * E, 2 * E]
