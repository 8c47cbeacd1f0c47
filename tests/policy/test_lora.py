"""policy/lora.py against a low-rank training written by hand: y = W x + (32 / rank) B A x.

Axes, as suffixes:  T tokens of a packed row
"""

import peft
import test_fsdp
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint_io
import transformers
from pytest import approx, mark, raises
from safetensors.torch import load_file
from test_fsdp import EMPTY, SEQUENCES, assert_same, loss_fn, opened, pack, plain_logprobs, weights
from torch.distributed.fsdp import MixedPrecisionPolicy
from transformers.pytorch_utils import Conv1D

import policy.fsdp
from core.errors import InputError
from policy.factory import open_policy
from policy.fsdp import FSDPPolicy
from settings.network import PolicySettings
from support.ranks import in_forks

checkpoint = test_fsdp.checkpoint
process_group = test_fsdp.process_group
RANK = 3  # that two ranks do not share evenly
SCALE = 32 / RANK


def adapters(policy: FSDPPolicy) -> dict:
    """Whole matrices {layer: {"A": [rank, in], "B": [out, rank]}} by the layer's name."""
    found: dict = {}
    for name, parameter in policy.lm.named_parameters():
        if ".lora_" in name:
            layer, matrix = name.removesuffix(".default.weight").split(".lora_")
            found.setdefault(layer, {})[matrix] = parameter.detach().full_tensor().clone()
    return found


def by_hand(folder, start: dict) -> tuple:
    """A model of plain transformers with low-rank terms, and their matrices, by layer."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval().requires_grad_(False)
    matrices = {}
    for layer, pair in start.items():
        A, B = (pair[name].clone().requires_grad_() for name in "AB")
        add = lambda _, x, y, A=A, B=B: y + SCALE * (x[0] @ A.T) @ B.T  # noqa: E731
        model.get_submodule(layer).register_forward_hook(add)
        matrices[layer] = {"A": A, "B": B}
    return model, matrices


def flat(matrices: dict) -> dict:
    return {f"{layer} {name}": x for layer, pair in matrices.items() for name, x in pair.items()}


def step(policy: FSDPPolicy, rows=SEQUENCES, scale: float = 1.0) -> dict[str, float]:
    policy.forward_backward(rows, loss_fn)
    return policy.optimizer_step(scale)


@mark.parametrize("family", ["qwen3_tied", "llama", "gpt2"])
@mark.parametrize("again", [False, True])
def test_it_trains_as_by_hand(family, again, checkpoint):
    """Losses, norms before clipping and matrices, clipped and not, for several steps."""
    settings = {"lr": 1e-2, "warmup_steps": 0, "max_grad_norm": 0.5}
    policy = opened(checkpoint(family), lora_rank=RANK, activation_checkpointing=again, **settings)
    start = adapters(policy)
    model, matrices = by_hand(checkpoint(family), start)
    linear = [n for n, m in model.named_modules() if isinstance(m, torch.nn.Linear | Conv1D)]
    assert sorted(start) == sorted(set(linear) - {"lm_head"})
    leaves = [matrix for pair in matrices.values() for matrix in pair.values()]
    adamw = torch.optim.AdamW(leaves, 1e-2, weight_decay=0.01)
    clipped = []
    for scale in (3.0, 3.0, 0.001, 3.0, 0.001, 3.0):
        losses = [loss_fn(plain_logprobs(model, row), row)[0] for row in SEQUENCES]
        (scale * sum(losses)).backward()
        norm = torch.nn.utils.clip_grad_norm_(leaves, 0.5)
        adamw.step()
        adamw.zero_grad()
        seen = []

        def noted(logp_T, row, seen=seen):
            loss, stats = loss_fn(logp_T, row)
            seen.append(loss.item())
            return loss, stats

        policy.forward_backward([pack(*SEQUENCES), EMPTY], noted)
        assert seen[0] == approx(sum(losses).item(), rel=1e-5, abs=1e-5)
        assert policy.optimizer_step(scale)["grad_norm"] == approx(norm.item(), rel=1e-4)
        clipped.append(bool(norm > 0.5))
    assert set(clipped) == {False, True}
    assert_same(flat(adapters(policy)), {k: v.detach() for k, v in flat(matrices).items()}, 1e-4)


@mark.parametrize("family", ["qwen3_tied", "llama", "gpt2"])
def test_the_first_policy_is_the_model_to_the_bit(family, checkpoint):
    trained, whole = (opened(checkpoint(family), lora_rank=rank) for rank in (RANK, 0))
    assert_same(weights(trained), weights(whole), 0)
    assert list(weights(trained)) == [meta.name for meta in whole.weight_metas()]
    assert trained.weight_metas() == whole.weight_metas()
    row = pack(*SEQUENCES)
    assert torch.equal(trained.logprobs([row])[0], whole.logprobs([row])[0])
    for pair in adapters(trained).values():
        bound = pair["A"].shape[1] ** -0.5
        assert (pair["B"] == 0).all() and 0.8 * bound < pair["A"].abs().max() <= bound


def test_only_adapters_have_gradients_and_moments(checkpoint):
    policy = opened(checkpoint("qwen3"), lora_rank=RANK)
    policy.forward_backward(SEQUENCES, loss_fn)
    for name, parameter in policy.lm.named_parameters():
        assert (parameter.grad is not None) == parameter.requires_grad == (".lora_" in name), name
    policy.optimizer_step()
    assert len(policy.optimizer.state) == len(policy._trained()) == 2 * len(policy.adapters.layers)


@mark.parametrize("family", ["qwen3_tied", "llama", "gpt2"])
def test_engines_and_exports_get_the_merged_weights(family, checkpoint, tmp_path):
    policy = opened(checkpoint(family), lora_rank=RANK, lr=1e-2)
    for _ in range(3):
        step(policy)
    sent = weights(policy)
    expected = load_file(checkpoint(family) / "model.safetensors")
    for layer, pair in adapters(policy).items():
        name = f"{layer}.weight"
        delta = SCALE * pair["B"] @ pair["A"]
        expected[name] = expected[name] + (delta.T if family == "gpt2" else delta)
        assert (sent[name] - expected[name]).abs().max() < 1e-6 < delta.abs().max()
        expected[name] = sent[name]
    assert_same(sent, expected, 0)  # all else is the model's, to the bit
    policy.export_hf(str(tmp_path / "export"))()
    assert_same(load_file(tmp_path / "export/model.safetensors"), sent, 0)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    logp_T = plain_logprobs(model, SEQUENCES[2])
    torch.testing.assert_close(policy.logprobs([SEQUENCES[2]])[0], logp_T, rtol=0, atol=1e-5)


@mark.parametrize("family", ["qwen3_tied", "gpt2"])
def test_adapters_are_exported_beside_the_merged_model(family, checkpoint, tmp_path):
    """Put on the model that the run began with by peft, they make what the merged one is."""
    folder = checkpoint(family)
    policy = opened(folder, lora_rank=RANK, lr=1e-2)
    step(policy)
    write = policy.export_hf(str(tmp_path / "export"))
    step(policy)  # a checkpoint is written while training goes on
    write()
    base = transformers.AutoModelForCausalLM.from_pretrained(folder)
    adapted = peft.PeftModel.from_pretrained(base, tmp_path / "export/adapter").eval()
    assert adapted.peft_config["default"].base_model_name_or_path == str(folder)
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "export").eval()
    logp_T = plain_logprobs(adapted, SEQUENCES[2])
    torch.testing.assert_close(logp_T, plain_logprobs(merged, SEQUENCES[2]), rtol=0, atol=1e-5)
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    assert (logp_T - plain_logprobs(plain, SEQUENCES[2])).abs().max() > 1e-3


def test_alpha_scales_what_is_added_and_targets_choose_the_layers(checkpoint):
    layers = ("q_proj", "down_proj")
    start = {"lora_rank": RANK, "lora_targets": layers, "warmup_steps": 0}
    usual, tripled = (opened(checkpoint("qwen3"), **start, lora_alpha=a) for a in (32.0, 96.0))
    names = [name.split(".")[-2] for name in usual.adapters.layers]
    assert set(names) == set(layers) and len(names) == 2 * 2
    trained = {name for name, p in usual.lm.named_parameters() if p.requires_grad}
    assert all(".lora_" in name for name in trained) and len(trained) == 2 * len(names)
    for made, scale in ((usual, 32 / RANK), (tripled, 96 / RANK)):
        step(made)
        sent, before = weights(made), load_file(checkpoint("qwen3") / "model.safetensors")
        for layer, pair in adapters(made).items():
            expected = before[f"{layer}.weight"] + scale * pair["B"] @ pair["A"]
            torch.testing.assert_close(sent[f"{layer}.weight"], expected, rtol=0, atol=1e-6)


def test_a_target_that_no_layer_has_is_named_with_those_that_are(checkpoint):
    says = (
        r"lora_targets = \('query',\): no linear layer is called 'query', expected some of q_proj"
    )
    with raises(InputError, match=says):
        opened(checkpoint("qwen3"), lora_rank=RANK, lora_targets=("query",))


def test_a_checkpoint_holds_adapters_alone_and_resumes_to_the_bit(checkpoint, tmp_path):
    policy, resumed = (opened(checkpoint("qwen3"), lora_rank=RANK) for _ in range(2))
    step(policy)
    wait = policy.save(f"{tmp_path}/one")
    step(policy)  # while it is being written
    wait()
    held = checkpoint_io.FileSystemReader(f"{tmp_path}/one").read_metadata().state_dict_metadata
    assert {name for name in held if ".lora_" not in name} == {"updates", "rng"}
    assert sum(name.startswith("weights.") for name in held) == 2 * len(policy.adapters.layers)
    resumed.load(f"{tmp_path}/one")
    step(resumed)
    assert_same(weights(resumed), weights(policy), 0)
    assert_same(flat(adapters(resumed)), flat(adapters(policy)), 0)
    for rank in (0, RANK + 1):
        with raises(BaseException, match="Missing key|Size mismatch"):
            opened(checkpoint("qwen3"), lora_rank=rank).load(f"{tmp_path}/one")


def test_a_frozen_copy_is_the_model_without_adapters(checkpoint):
    frozen = opened(checkpoint("qwen3"), lora_rank=RANK, trainable=False)
    assert frozen.adapters.layers == {}
    assert_same(weights(frozen), load_file(checkpoint("qwen3") / "model.safetensors"), 0)


def test_the_reference_is_the_model_below_the_adapters(checkpoint):
    settings = PolicySettings(lora_rank=RANK, lr=1e-2, warmup_steps=0)
    trained = open_policy(str(checkpoint("qwen3")), settings)
    reference = open_policy(str(checkpoint("qwen3")), settings, reference_of=trained)
    row = pack(*SEQUENCES)
    (start_T,) = trained.logprobs([row])
    for _ in range(2):
        step(trained)
    (moved_T,) = trained.logprobs([row])
    (base_T,) = reference.logprobs([row])
    assert torch.equal(base_T, start_T) and not torch.equal(moved_T, start_T)
    assert torch.equal(trained.logprobs([row])[0], moved_T)  # and it trains on
    plain = opened(checkpoint("qwen3"))
    whole = open_policy(str(checkpoint("qwen3")), PolicySettings(), reference_of=plain)
    assert not any(p.requires_grad for p in whole.model.parameters())
    assert torch.equal(whole.logprobs([row])[0], start_T)


def test_bf16_compute_keeps_float32_adapters(checkpoint, monkeypatch):
    """The precision that GPUs get, here on the CPU; the frozen head gets no gradient at all."""
    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    exact = opened(checkpoint("qwen3_tied"), lora_rank=RANK)
    monkeypatch.setattr(policy.fsdp, "MixedPrecisionPolicy", lambda **_: mixed)
    monkeypatch.setattr(FSDPPolicy, "_check_architecture", lambda self: None)  # has its own limit
    rounded = opened(checkpoint("qwen3_tied"), lora_rank=RANK)
    for each in (exact, rounded):
        each.forward_backward([pack(*SEQUENCES)], loss_fn)
    trained = [each._trained().items() for each in (rounded, exact)]
    grads = [{name: p.grad.full_tensor() for name, p in named} for named in trained]
    assert all(grad.dtype == torch.float32 for grad in grads[0].values())
    assert_same(*grads, 0.05)


def test_a_frozen_head_costs_no_gradient(monkeypatch):
    hidden_NH, weight_VH, target_N = test_fsdp.head_inputs(torch.float32)
    grads = []
    for frozen in (False, True):
        weight_VH.requires_grad_(not frozen)
        multiplied = []
        matmul = policy.logprobs.matmul
        note = lambda *a, **b: multiplied.append(b) or matmul(*a, **b)  # noqa: B023, E731
        with monkeypatch.context() as patch:
            patch.setattr(policy.logprobs, "matmul", note)
            logp_N = policy.logprobs.TokenLogprobs.apply(hidden_NH, weight_VH, target_N, 1.0, 3)
            grads.append(torch.autograd.grad(logp_N.sum(), hidden_NH)[0])
        assert any("into" in named for named in multiplied) == (not frozen)
    assert torch.equal(*grads)


def test_megatron_has_no_adapters():
    with raises(ValueError, match="lora_rank = 8 needs policy.kind = 'fsdp', not 'megatron'"):
        PolicySettings(kind="megatron", lora_rank=8)


def rank_main(rank: int, folder: str, model: str) -> None:
    """One of two ranks; writes what it saw for the test to compare."""
    torch.set_num_threads(1)
    torch.cuda.is_available = lambda: False
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    torch.manual_seed(7)
    policy = opened(model, lora_rank=RANK)
    seen = {"start": flat(adapters(policy))}
    measured = [step(policy, test_fsdp.split_rows(rank, 2)) for _ in range(2)]
    seen |= {"measured": measured, "trained": flat(adapters(policy)), "sent": weights(policy)}
    write = policy.export_hf(f"{folder}/export")
    policy.save(f"{folder}/saved")()
    write()
    step(policy, test_fsdp.split_rows(rank, 2))
    seen["third"] = flat(adapters(policy))
    policy.load(f"{folder}/saved")
    step(policy, test_fsdp.split_rows(rank, 2))
    seen["resumed"] = flat(adapters(policy))
    torch.save(seen, f"{folder}/rank{rank}.pt")
    dist.destroy_process_group()


@mark.slow
def test_two_ranks_train_as_one(checkpoint, tmp_path):
    in_forks(rank_main, (str(tmp_path), checkpoint("qwen3_tied")), 2)
    torch.manual_seed(7)
    alone = opened(checkpoint("qwen3_tied"), lora_rank=RANK)
    start = flat(adapters(alone))
    measured = [step(alone, test_fsdp.split_rows(0, 1)) for _ in range(2)]
    for rank in range(2):
        seen = torch.load(tmp_path / f"rank{rank}.pt", weights_only=False)
        assert_same(seen["start"], start, 0)
        for ours, theirs in zip(seen["measured"], measured, strict=True):
            assert ours["grad_norm"] == approx(theirs["grad_norm"], rel=1e-5)
            for name in ("bf16_changed_weights", "bf16_lost_update"):
                assert ours[name] == approx(theirs[name], abs=1e-3)
        assert_same(seen["trained"], flat(adapters(alone)), 1e-6)
        assert_same(seen["sent"], weights(alone), 1e-6)
        assert_same(seen["resumed"], seen["third"], 0)
        assert_same(load_file(tmp_path / "export/model.safetensors"), seen["sent"], 0)
        written = load_file(tmp_path / "export/adapter/adapter_model.safetensors")
        named = {
            f"base_model.model.{name[:-2]}.lora_{name[-1]}.weight": x
            for name, x in seen["trained"].items()
        }
        assert_same(written, named, 0)
    alone.load(f"{tmp_path}/saved")  # one rank reads what two wrote
    assert_same(flat(adapters(alone)), seen["trained"], 0)
