"""policy/fsdp.py against plain transformers: same logprobs, same gradients, whatever the packing.

Axes, as suffixes:  T tokens of a packed row   N tokens   V vocabulary   H hidden size
"""

import json
import math
import shutil
from dataclasses import dataclass, fields
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy

import policy.fsdp
from policy import logprobs
from policy.fsdp import FSDPPolicy
from policy.logprobs import Entropy, Head, TokenLogprobs
from settings.network import PolicySettings
from support.ranks import in_forks

VOCAB, TEMPERATURE = 96, 0.7
SIZES = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64, "head_dim": 8}
SIZES |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
SIZES |= {"max_position_embeddings": 128, "initializer_range": 0.08, "tie_word_embeddings": False}
GPT2_SIZES = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}
FAMILIES = {
    "qwen3": (transformers.Qwen3ForCausalLM, SIZES),
    "qwen3_tied": (transformers.Qwen3ForCausalLM, SIZES | {"tie_word_embeddings": True}),
    "llama": (transformers.LlamaForCausalLM, SIZES),
    "gpt2": (transformers.GPT2LMHeadModel, GPT2_SIZES),  # learned positions, biases, dropout, tied
    "mamba": (transformers.MambaForCausalLM, {"hidden_size": 32, "num_hidden_layers": 2}),
    "gemma2": (transformers.Gemma2ForCausalLM, SIZES | {"final_logit_softcapping": 1.0}),
    "granite": (transformers.GraniteForCausalLM, SIZES | {"logits_scaling": 8.0}),
}


@dataclass
class Row:
    """A packed row; `weight_T` is what a test's loss multiplies each logprob with."""

    tokens_T: Tensor
    positions_T: Tensor
    mask_T: Tensor
    weight_T: Tensor


def sequence(length: int, seed: int) -> Row:
    """One random sequence whose first third is its prompt."""
    random = torch.Generator().manual_seed(seed)
    return Row(
        torch.randint(VOCAB, (length,), generator=random),
        torch.arange(length),
        torch.arange(length) >= max(1, length // 3),
        torch.randn(length, generator=random),
    )


def pack(*rows: Row) -> Row:
    columns = ([getattr(row, field.name) for row in rows] for field in fields(Row))
    return Row(*(torch.cat(column) for column in columns))


EMPTY = Row(torch.zeros(1).long(), torch.zeros(1).long(), torch.zeros(1).bool(), torch.zeros(1))
SEQUENCES = [sequence(length, seed) for seed, length in enumerate([9, 2, 17, 6, 12])]


def loss_fn(logp_T: Tensor, row: Row) -> tuple[Tensor, dict]:
    """Of a row that trains nothing it does not depend on the network."""
    loss = (row.weight_T * logp_T).sum() / 10 if row.mask_T.any() else torch.zeros(())
    return loss, {"tokens": int(row.mask_T.sum())}


def opened(model: Path, temperature=TEMPERATURE, trainable=True, **changes) -> FSDPPolicy:
    """The policy of a folder, with settings that suit a tiny model."""
    usual = {"lr": 1e-3, "warmup_steps": 2, "warmup_lr": 5e-4, "weight_decay": 0.01}
    settings = PolicySettings(**{"activation_checkpointing": False} | usual | changes)
    return FSDPPolicy(str(model), settings, temperature, trainable)


@pytest.fixture(scope="module", autouse=True)
def process_group():
    """One rank on the CPU, in float32, even where there are GPUs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: False)
        patch.setattr(logprobs, "CHUNK", 5)
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        yield
        dist.destroy_process_group()


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """Returns the folder of a tiny random model, by family; each is made once."""
    made = {}

    def folder(family: str) -> Path:
        if family not in made:
            made[family] = tmp_path_factory.mktemp(family)
            model_class, sizes = FAMILIES[family]
            torch.manual_seed(0)
            settings = {"vocab_size": VOCAB, "initializer_range": 0.08} | sizes
            settings |= {"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0}
            model_class(model_class.config_class(**settings)).save_pretrained(made[family])
            vocabulary = {f"<{i}>": i for i in range(VOCAB)}
            words = Tokenizer(models.WordLevel(vocabulary, unk_token="<0>"))
            tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words)
            tokenizer.save_pretrained(made[family])
        return made[family]

    return folder


def gradients(policy: FSDPPolicy) -> dict[str, Tensor]:
    """Whole gradients by checkpoint name; the policy's own are dropped."""
    grads = {name: p.grad.full_tensor().clone() for name, p in policy.lm.named_parameters()}
    policy.optimizer.zero_grad()
    return grads


def weights(policy: FSDPPolicy) -> dict[str, Tensor]:
    return {name: weight.clone() for name, weight in policy.named_weights()}


def plain_logprobs(model, row: Row, temperature: float = TEMPERATURE) -> Tensor:
    """Logprobs [T] of one sequence by transformers and autograd alone."""
    logits_TV = model(row.tokens_T[None]).logits[0, :-1] / temperature
    logp_T = logits_TV.log_softmax(-1).gather(1, row.tokens_T[1:, None]).squeeze(1)
    return torch.cat([logp_T.new_zeros(1), logp_T]) * row.mask_T


def assert_same(actual: dict, expected: dict, tolerance: float) -> None:
    """Compares tensors by name, relative to the largest entry of them all."""
    assert actual.keys() == expected.keys()
    scale = max(x.abs().max() for x in expected.values())
    for name, value in expected.items():
        assert (actual[name] - value).abs().max() <= tolerance * scale, name


def naive(hidden_NH: Tensor, weight_VH: Tensor, target_N: Tensor, temperature: float) -> Tensor:
    logp_NV = (hidden_NH @ weight_VH.T / temperature).log_softmax(-1)
    return logp_NV.gather(1, target_N[:, None]).squeeze(1)


def head_inputs(dtype: torch.dtype, scale: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(0)
    hidden_NH = torch.randn(7, 4, generator=random, dtype=torch.float64) * scale
    weight_VH = torch.randn(11, 4, generator=random, dtype=torch.float64)
    target_N = torch.randint(11, (7,), generator=random)
    return hidden_NH.to(dtype).requires_grad_(), weight_VH.to(dtype).requires_grad_(), target_N


@pytest.mark.parametrize("chunk", [1, 3, 7, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_token_logprobs_match_autograd_in_float64(chunk, temperature):
    hidden_NH, weight_VH, target_N = head_inputs(torch.float64)
    logp_N = TokenLogprobs.apply(hidden_NH, weight_VH, target_N, temperature, chunk)
    expected_N = naive(hidden_NH, weight_VH, target_N, temperature)
    torch.testing.assert_close(logp_N, expected_N, rtol=1e-12, atol=1e-12)
    logprobs_of = lambda h, w: TokenLogprobs.apply(h, w, target_N, temperature, chunk)  # noqa: E731
    torch.autograd.gradcheck(logprobs_of, (hidden_NH, weight_VH))


def test_token_logprobs_of_huge_logits_stay_finite():
    hidden_NH, weight_VH, target_N = head_inputs(torch.float32, scale=1e4)
    logp_N = TokenLogprobs.apply(hidden_NH, weight_VH, target_N, 1.0, 3)
    logp_N.sum().backward()
    torch.testing.assert_close(logp_N, naive(hidden_NH, weight_VH, target_N, 1.0))
    assert hidden_NH.grad.isfinite().all() and weight_VH.grad.isfinite().all()


def test_token_logprobs_of_bf16_are_float32_and_as_good_as_their_operands():
    hidden_NH, weight_VH, target_N = head_inputs(torch.bfloat16)
    logp_N = TokenLogprobs.apply(hidden_NH, weight_VH, target_N, 0.6, 3)
    logp_N.sum().backward()
    wide = [x.detach().float().requires_grad_() for x in (hidden_NH, weight_VH)]
    expected_N = naive(*wide, target_N, 0.6)
    expected_N.sum().backward()
    torch.testing.assert_close(logp_N, expected_N)  # logits were not rounded to bf16
    for actual, expected in zip((hidden_NH, weight_VH), wide, strict=True):
        assert actual.grad.dtype == torch.bfloat16
        torch.testing.assert_close(actual.grad.float(), expected.grad, rtol=1e-2, atol=2e-2)


@pytest.mark.parametrize("chunk", [1, 3, 100])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 2e-2)]
)
def test_entropy_is_that_of_the_whole_vocabulary(chunk, dtype, tolerance):
    """It counts what is trained, whatever the loss; a token without finite logits is left out."""
    hidden_NH, weight_VH, target_N = head_inputs(dtype)
    logp_NV = (hidden_NH.double() @ weight_VH.double().T / 0.6).log_softmax(1)
    dense_N = -(logp_NV.exp() * logp_NV).sum(1).detach()
    head = Head(entropy=(entropy := Entropy(torch.device("cpu"))))
    for factor in (1.0, -3.0, 0.0):
        logp_N = TokenLogprobs.apply(hidden_NH, weight_VH, target_N, 0.6, chunk, head)
        (factor * logp_N).sum().backward()
    assert entropy.sums[1] == 21
    assert entropy.take()["entropy"] == pytest.approx(float(dense_N.mean()), rel=tolerance)
    assert entropy.take() == {"entropy": 0.0}
    with torch.no_grad():
        hidden_NH[2, 0] = math.inf
    logp_N = TokenLogprobs.apply(hidden_NH, weight_VH, target_N, 0.6, chunk, head)
    logp_N.sum().backward()
    left = dense_N[torch.arange(7) != 2]
    assert entropy.take()["entropy"] == pytest.approx(float(left.mean()), rel=tolerance)


def test_the_entropy_of_a_step_is_that_of_its_trained_tokens(checkpoint):
    policy = opened(checkpoint("qwen3"))
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint("qwen3")).eval()
    found = []
    for row in SEQUENCES:
        logp_TV = (model(row.tokens_T[None]).logits[0] / TEMPERATURE).log_softmax(1)
        entropy_T = -(logp_TV.exp() * logp_TV).sum(1)
        found.append(entropy_T[:-1][row.mask_T[1:]])
    policy.logprobs(SEQUENCES)  # these are not trained
    policy.forward_backward([EMPTY], loss_fn)
    assert policy.optimizer_step()["entropy"] == 0
    policy.forward_backward([pack(*SEQUENCES[:3]), EMPTY, pack(*SEQUENCES[3:])], loss_fn)
    expected = float(torch.cat(found).mean())
    assert policy.optimizer_step()["entropy"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_tied", "llama", "gpt2"])
def test_packed_row_equals_plain_transformers(family, checkpoint):
    policy = opened(checkpoint(family))
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint(family)).eval()
    expected_T = torch.cat([plain_logprobs(model, row) for row in SEQUENCES])
    row = pack(*SEQUENCES)
    loss_fn(expected_T, row)[0].backward()
    logp_T = policy.logprobs([row])[0]
    assert logp_T.dtype == torch.float32 and (logp_T[~row.mask_T] == 0).all()
    torch.testing.assert_close(logp_T, expected_T.detach(), rtol=0, atol=1e-5)
    assert policy.forward_backward([row], loss_fn) == [{"tokens": int(row.mask_T.sum())}]
    assert_same(gradients(policy), {n: p.grad for n, p in model.named_parameters()}, 1e-5)


def test_gradients_do_not_depend_on_packing_chunk_or_checkpointing(checkpoint, monkeypatch):
    one, two, three, four, five = SEQUENCES
    policy = opened(checkpoint("qwen3"))
    policy.forward_backward([pack(*SEQUENCES)], loss_fn)
    expected = gradients(policy)
    for rows in (SEQUENCES, [pack(five, one), EMPTY, pack(three, two, four)]):
        policy.forward_backward(rows, loss_fn)
        assert_same(gradients(policy), expected, 1e-6)
    for chunk, again in ((1000, False), (5, True)):
        monkeypatch.setattr(logprobs, "CHUNK", chunk)
        other = opened(checkpoint("qwen3"), activation_checkpointing=again)
        other.forward_backward([pack(*SEQUENCES)], loss_fn)
        assert_same(gradients(other), expected, 1e-6)


def test_checkpointing_recomputes_each_layer_and_dropout_is_off(checkpoint):
    assert transformers.AutoConfig.from_pretrained(checkpoint("gpt2")).resid_pdrop > 0
    policy = opened(checkpoint("gpt2"), activation_checkpointing=True)
    calls = []
    policy.lm.transformer.h[0].ln_1.register_forward_hook(lambda *_: calls.append(1))
    policy.forward_backward([SEQUENCES[0]], loss_fn)
    assert len(calls) == 2
    first = gradients(policy)
    policy.forward_backward([SEQUENCES[0]], loss_fn)
    assert_same(gradients(policy), first, 0)


@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
def test_temperature_divides_the_logits(temperature, checkpoint):
    policy = opened(checkpoint("llama"), temperature, trainable=False)
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint("llama"))
    expected_T = plain_logprobs(model, SEQUENCES[2], temperature).detach()
    torch.testing.assert_close(policy.logprobs([SEQUENCES[2]])[0], expected_T, rtol=0, atol=1e-5)


def test_bf16_compute_keeps_float32_masters_and_gradients(checkpoint, monkeypatch):
    """The precision that GPUs get, here on the CPU."""
    exact = opened(checkpoint("qwen3_tied"))
    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    monkeypatch.setattr(policy.fsdp, "MixedPrecisionPolicy", lambda **_: mixed)
    monkeypatch.setattr(FSDPPolicy, "_check_architecture", lambda self: None)  # has its own limit
    rounded, row = opened(checkpoint("qwen3_tied")), pack(*SEQUENCES)
    logp_T, expected_T = rounded.logprobs([row])[0], exact.logprobs([row])[0]
    assert logp_T.dtype == torch.float32
    assert 1e-5 < (logp_T - expected_T).abs().max() < 0.1
    for each in (exact, rounded):
        each.forward_backward([row], loss_fn)
    expected, actual = gradients(exact), gradients(rounded)
    assert all(grad.dtype == torch.float32 for grad in actual.values())
    assert_same(actual, expected, 0.05)


def test_empty_rows_add_exactly_nothing(checkpoint):
    policy = opened(checkpoint("qwen3_tied"))
    prompt = sequence(5, 0)
    prompt.mask_T[:] = False
    assert (policy.logprobs([prompt])[0] == 0).all()
    policy.forward_backward([EMPTY, prompt], lambda logp_T, row: (torch.zeros(()), {}))
    assert all((grad == 0).all() for grad in gradients(policy).values())


def test_an_infinite_logprob_that_no_loss_contains_leaves_it_finite(checkpoint, monkeypatch):
    policy = opened(checkpoint("qwen3"))
    losses, backward = [], Tensor.backward

    def noted(loss: Tensor) -> None:
        losses.append(loss.item())
        backward(loss)

    monkeypatch.setattr(Tensor, "backward", noted)
    rows = SEQUENCES[:2]
    policy.forward_backward(rows, lambda logp_T, row: (logp_T[1:].sum(), {}))
    expected = gradients(policy)
    first = torch.tensor([0])
    policy.model.register_forward_hook(lambda *at: at[-1].index_fill(0, first, -torch.inf))
    assert policy.logprobs(rows)[0][0] == -torch.inf
    policy.forward_backward(rows, lambda logp_T, row: (logp_T[1:].sum(), {}))
    policy.forward_backward(rows, lambda logp_T, row: (torch.zeros(()), {}))
    assert losses == [*losses[:2], *losses[:2], 0, 0]
    assert_same(gradients(policy), expected, 0)


def test_a_mask_at_a_sequence_start_is_an_error(checkpoint):
    policy = opened(checkpoint("qwen3"))
    row = pack(SEQUENCES[0], SEQUENCES[1])
    row.mask_T[9] = True
    with pytest.raises(ValueError, match="start of a sequence"):
        policy.logprobs([row])


def test_learning_rate_warms_up_then_stays(checkpoint):
    schedule = {"lr": 3e-6, "warmup_lr": 3e-7, "warmup_steps": 10}
    policy = opened(checkpoint("qwen3"), **schedule)
    rates = []
    for _ in range(12):
        policy.forward_backward([EMPTY], loss_fn)
        rates.append(policy.optimizer_step()["lr"])
    expected = [3e-7 + 2.7e-7 * k for k in range(10)] + [3e-6, 3e-6]
    assert rates == pytest.approx(expected, rel=1e-9)
    assert rates[0] == 3e-7 and rates[-1] == 3e-6
    policy = opened(checkpoint("qwen3"), **schedule | {"warmup_steps": 0})
    policy.forward_backward([EMPTY], loss_fn)
    assert policy.optimizer_step()["lr"] == 3e-6


def test_optimizer_step_is_scaled_clipped_adamw(checkpoint):
    policy = opened(checkpoint("llama"), max_grad_norm=0.5, warmup_steps=0)
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint("llama"))
    groups = [
        {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
        {"params": [p for p in model.parameters() if p.ndim == 2], "weight_decay": 0.01},
    ]
    adamw = torch.optim.AdamW(groups, 1e-3)
    for scale in (3.0, 0.001):  # clipped, then not
        (scale * loss_fn(plain_logprobs(model, SEQUENCES[4]), SEQUENCES[4])[0]).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        adamw.step()
        adamw.zero_grad()
        policy.forward_backward([SEQUENCES[4]], loss_fn)
        metrics = policy.optimizer_step(grad_scale=scale)
        assert metrics["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
        assert (norm > 0.5) == (scale == 3.0)
    assert_same(weights(policy), dict(model.state_dict()), 1e-5)


def test_logprobs_see_the_last_update_though_no_backward_ran_between(checkpoint):
    policy = opened(checkpoint("qwen3_tied"), lr=0.1, warmup_steps=0)
    policy.forward_backward([SEQUENCES[0]], loss_fn)
    before_T = policy.logprobs([SEQUENCES[0]])[0]
    policy.optimizer_step()
    after_T = policy.logprobs([SEQUENCES[0]])[0]
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint("qwen3_tied"))
    model.load_state_dict(weights(policy), strict=False)
    assert (before_T - after_T).abs().max() > 0.1
    expected_T = plain_logprobs(model, SEQUENCES[0]).detach()
    torch.testing.assert_close(after_T, expected_T, rtol=0, atol=1e-5)


def poison(logp_T: Tensor, row: Row) -> tuple[Tensor, dict]:
    return (logp_T * float("nan")).sum(), {}


def test_a_nonfinite_gradient_raises_and_changes_nothing(checkpoint):
    policy = opened(checkpoint("qwen3"))
    before = weights(policy)
    policy.forward_backward([SEQUENCES[0]], poison)
    with pytest.raises(FloatingPointError, match="update 0"):
        policy.optimizer_step()
    assert_same(weights(policy), before, 0)
    policy.forward_backward([SEQUENCES[0]], loss_fn)  # the poisoned gradients are gone
    policy.optimizer_step()


@pytest.mark.parametrize("family", ["qwen3", "qwen3_tied", "llama", "gpt2"])
def test_named_weights_are_the_checkpoint(family, checkpoint):
    policy = opened(checkpoint(family))
    stored = load_file(checkpoint(family) / "model.safetensors")
    actual = weights(policy)
    assert_same(actual, stored, 0)
    metas = [(name, tuple(weight.shape), "float32") for name, weight in actual.items()]
    assert policy.weight_metas() == metas


def test_export_is_what_transformers_loads(checkpoint, tmp_path):
    policy, folder = opened(checkpoint("qwen3_tied")), tmp_path / "export"
    for _ in range(2):  # the second replaces the first
        policy.forward_backward([SEQUENCES[0]], loss_fn)
        policy.optimizer_step()
        policy.export_hf(str(folder))()
    assert [path.name for path in tmp_path.iterdir()] == ["export"]
    assert json.loads((folder / "config.json").read_text())["dtype"] == "float32"
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    logp_T = plain_logprobs(model, SEQUENCES[2]).detach()
    torch.testing.assert_close(policy.logprobs([SEQUENCES[2]])[0], logp_T, rtol=0, atol=1e-5)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert tokenizer.convert_tokens_to_ids("<7>") == 7


def test_save_and_load_continue_bitwise(checkpoint, tmp_path):
    def step(policy: FSDPPolicy) -> None:
        policy.forward_backward(SEQUENCES, loss_fn)
        policy.optimizer_step()

    policy, resumed = (opened(checkpoint("qwen3_tied")) for _ in range(2))
    wait = policy.save(f"{tmp_path}/start")
    start = weights(policy)
    step(policy)  # while the checkpoint is being written
    wait()
    policy.load(f"{tmp_path}/start")
    assert_same(weights(policy), start, 0)
    assert policy.updates == 0
    step(policy)
    wait = policy.save(f"{tmp_path}/one")
    step(policy)
    wait()
    resumed.load(f"{tmp_path}/one")
    step(resumed)
    assert_same(weights(resumed), weights(policy), 0)
    assert resumed.updates == policy.updates == 2


UNFIT = [("mamba", "position_ids"), ("gemma2", "head"), ("granite", "head")]


@pytest.mark.parametrize(("family", "part"), UNFIT)
def test_what_cannot_be_packed_or_chunked_is_refused(family, part, checkpoint):
    with pytest.raises(RuntimeError, match=f"ForCausalLM.*{part}"):
        opened(checkpoint(family), attention="eager")


@pytest.mark.parametrize("lost", ["model.layers.1.mlp.up_proj.weight", "model.norm.weight"])
def test_a_checkpoint_that_lacks_a_tensor_is_refused(lost, checkpoint, tmp_path):
    """transformers would fill it with noise and train that."""
    folder = shutil.copytree(checkpoint("qwen3_tied"), tmp_path / "model")
    state = load_file(folder / "model.safetensors")
    del state[lost]
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=f"lacks 1 tensors that Qwen3.*, such as {lost}"):
        opened(folder)


def test_a_generation_config_is_exported_as_it_came(checkpoint, tmp_path):
    """transformers reads this one, as vLLM does, and refuses to save it."""
    folder = shutil.copytree(checkpoint("qwen3_tied"), tmp_path / "model")
    text = '{"temperature": 0.6, "top_p": 0.9, "eos_token_id": [1, 2]}'
    (folder / "generation_config.json").write_text(text)
    opened(folder).export_hf(str(tmp_path / "export"))()
    assert (tmp_path / "export/generation_config.json").read_text() == text


@pytest.mark.parametrize("number", [math.nan, math.inf])
@pytest.mark.parametrize("changes", [{}, {"lora_rank": 2}])
def test_a_number_that_is_not_finite_is_refused(number, changes, checkpoint, tmp_path):
    folder = shutil.copytree(checkpoint("qwen3_tied"), tmp_path / "model")
    state = load_file(folder / "model.safetensors")
    spoilt = "model.layers.1.mlp.up_proj.weight"
    state[spoilt][3, 5] = number
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    says = f"{spoilt}: 1 of {state[spoilt].numel()} numbers are NaN or infinite"
    with pytest.raises(ValueError, match=says):
        opened(folder, **changes)


def rows_of(rank: int, world: int) -> list[Row]:
    """Two rows a step on each rank: with two ranks, the last has nothing but padding."""
    return [EMPTY, EMPTY] if rank else [pack(*SEQUENCES[:3]), pack(*SEQUENCES[3:])]


def split_rows(rank: int, world: int) -> list[Row]:
    return [pack(*SEQUENCES[:2]), SEQUENCES[2], pack(*SEQUENCES[3:]), EMPTY][rank::world]


def train(policy: FSDPPolicy, rank: int, world: int) -> list[dict]:
    """Three updates; weights after the first and the last, with both steps' metrics."""
    history = []
    for step, rows in enumerate([split_rows, rows_of, split_rows]):
        policy.forward_backward(rows(rank, world), loss_fn)
        metrics = policy.optimizer_step(grad_scale=2.0)
        history.append({"metrics": metrics, "weights": weights(policy) if step != 1 else {}})
    return history


def rank_main(rank: int, folder: str, models: dict[str, Path]) -> None:
    """One of two ranks; writes what it saw for the test to compare."""
    torch.set_num_threads(1)
    torch.cuda.is_available = lambda: False
    logprobs.CHUNK = 5
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    policy = opened(models["qwen3_tied"], activation_checkpointing=True)
    seen = {"history": train(policy, rank, 2), "metas": policy.weight_metas()}
    write, wait = policy.export_hf(f"{folder}/export"), policy.save(f"{folder}/saved")
    # Only rank 0's loss is poisoned, both must stop.
    policy.forward_backward([SEQUENCES[0]], poison if rank == 0 else loss_fn)
    with pytest.raises(FloatingPointError):
        policy.optimizer_step()
    seen["poisoned"] = weights(policy)
    write()
    policy.forward_backward(split_rows(rank, 2), loss_fn)
    policy.optimizer_step()
    seen["fourth"] = weights(policy)
    wait()
    policy.load(f"{folder}/saved")
    seen["logprobs"] = policy.logprobs([pack(*SEQUENCES)])
    policy.forward_backward(split_rows(rank, 2), loss_fn)
    policy.optimizer_step()
    seen["resumed"] = weights(policy)
    with pytest.raises(RuntimeError, match="position_ids"):
        opened(models["mamba"], attention="eager")
    torch.save(seen, f"{folder}/rank{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.slow
def test_two_ranks_train_as_one(checkpoint, tmp_path):
    models = {family: checkpoint(family) for family in ("qwen3_tied", "mamba")}
    in_forks(rank_main, (str(tmp_path), models), 2)
    seen = [torch.load(tmp_path / f"rank{rank}.pt", weights_only=False) for rank in range(2)]
    policy = opened(models["qwen3_tied"])
    alone = train(policy, 0, 1)
    for ours in seen:
        for step in (0, 1, 2):
            expected, actual = alone[step], ours["history"][step]
            assert actual["metrics"] == pytest.approx(expected["metrics"], rel=1e-5)
            if step != 1:
                assert_same(actual["weights"], expected["weights"], 1e-6)
        last = ours["history"][2]["weights"]
        assert_same(ours["poisoned"], last, 0)
        assert_same(ours["resumed"], ours["fourth"], 0)
        assert_same(load_file(tmp_path / "export" / "model.safetensors"), last, 0)
        assert ours["metas"] == policy.weight_metas()
        (logp_T,) = policy.logprobs([pack(*SEQUENCES)])
        torch.testing.assert_close(ours["logprobs"][0], logp_T, rtol=0, atol=1e-4)
    policy.load(f"{tmp_path}/saved")  # one rank reads what two wrote
    assert_same(weights(policy), seen[0]["history"][2]["weights"], 0)
    assert policy.updates == 3
