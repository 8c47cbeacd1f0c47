"""policy/attention.py on a CPU: what the kernel is given, and what a stand-in for it computes.

The kernel itself runs on GPUs alone. The stand-in has its signature, and the meta device its types.
"""

import inspect
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from torch.nn.attention import _registry as registry
from torch.nn.attention.varlen import varlen_attn

from policy import attention
from policy.fsdp import FSDPPolicy
from settings.network import PolicySettings
from support.tiny_models import SHAPE, make

SEEN = SHAPE | {"num_hidden_layers": 2, "initializer_range": 0.2}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 101, "initializer_range": 0.2}
FAMILIES = {
    "grouped heads": transformers.Qwen3Config(**SEEN),
    "as many keys": transformers.LlamaConfig(**SEEN | {"num_key_value_heads": 4}),
    "a window": transformers.MistralConfig(**SEEN, sliding_window=4),
    "a scale": transformers.GraniteConfig(**SEEN, attention_multiplier=0.7),
    "learned positions": transformers.GPT2Config(**GPT2),
}
LENGTHS = (9, 1, 17, 6)
POSITIONS_1T = torch.cat([torch.arange(n) for n in LENGTHS])[None]
CALLS = []


def stand_in(*args, **kwargs):
    """torch's varlen_attn by SDPA, one sequence after the other; differentiable."""
    given = inspect.signature(varlen_attn).bind(*args, **kwargs)
    given.apply_defaults()
    given = given.arguments
    CALLS.append(given)
    assert given["cu_seq_q"] is given["cu_seq_k"] and given["max_q"] == given["max_k"]
    ends, (before, after) = given["cu_seq_q"].tolist(), given["window_size"]
    parts = []
    for first, last in zip(ends, ends[1:], strict=False):
        q, k, v = (given[name][first:last].transpose(0, 1) for name in ("query", "key", "value"))
        places = torch.arange(last - first)
        back = places[:, None] - places  # from a query to a key
        seen = (back >= -after) & ((back <= before) | (before < 0))
        same = {name: given[name] for name in ("scale", "enable_gqa")}
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, **same)
        parts.append(out.transpose(0, 1))
    return torch.cat(parts)


@pytest.fixture(autouse=True)
def kernel(monkeypatch):
    CALLS.clear()
    attention.limits.cache_clear()
    monkeypatch.setattr(attention, "varlen_attn", stand_in)


def model(name: str, implementation: str):
    torch.manual_seed(0)
    config = type(FAMILIES[name])(**FAMILIES[name].to_dict())
    how = {"attn_implementation": implementation, "dtype": torch.float32}
    return transformers.AutoModelForCausalLM.from_config(config, **how).eval()


def test_positions_become_the_ends_of_sequences():
    ends_N, of_keys, longest, also = attention.limits(POSITIONS_1T)
    assert ends_N.tolist() == [0, 9, 10, 27, 33] and ends_N.dtype == torch.int32
    assert of_keys is ends_N and longest == also == 17 and type(longest) is int
    whole = attention.limits(torch.arange(5)[None])
    assert (whole[0].tolist(), whole[2]) == ([0, 5], 5)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_packed_row_is_that_of_sdpa_with_its_gradients(name):
    tokens_1T = torch.randint(101, POSITIONS_1T.shape, generator=torch.Generator().manual_seed(0))
    found = {}
    for implementation in ("varlen", "sdpa"):
        lm = model(name, implementation)
        logits = lm(input_ids=tokens_1T, position_ids=POSITIONS_1T, use_cache=False).logits
        torch.manual_seed(1)
        (logits * torch.randn_like(logits)).sum().backward()
        found[implementation] = logits, {n: p.grad for n, p in lm.named_parameters()}
    (ours, our_grads), (theirs, their_grads) = found.values()
    assert len(CALLS) == 2  # of two layers
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    for parameter, grad in their_grads.items():
        gap = (our_grads[parameter] - grad).abs().max()
        assert gap <= 1e-4 * grad.abs().max(), parameter


def test_no_mask_is_made_and_the_ends_are_found_once_for_all_layers(monkeypatch):
    masks = []

    def noted(module, q, k, v, mask, **given):
        masks.append(mask)
        return attention.varlen(module, q, k, v, mask, **given)

    monkeypatch.setitem(attention.AttentionInterface._global_mapping, "varlen", noted)
    lm = model("grouped heads", "varlen")
    lm(input_ids=POSITIONS_1T, position_ids=POSITIONS_1T, use_cache=False)
    assert masks == [None, None]
    assert attention.limits.cache_info().misses == 1 and attention.limits.cache_info().hits == 1
    assert CALLS[0]["cu_seq_q"] is CALLS[1]["cu_seq_q"]
    lm(input_ids=POSITIONS_1T, position_ids=POSITIONS_1T.clone(), use_cache=False)
    assert attention.limits.cache_info().misses == 2  # another row, though it looks the same


def test_the_kernel_takes_what_it_is_given(monkeypatch):
    """torch's own operator on tensors without data: its schema, its shapes, its backward."""
    monkeypatch.setattr(attention, "varlen_attn", varlen_attn)
    T = sum(LENGTHS)
    like = {"device": "meta", "requires_grad": True}
    q, k, v = (torch.empty(1, heads, T, 8, **like) for heads in (4, 2, 2))
    given = {"position_ids": POSITIONS_1T, "scaling": 0.5, "sliding_window": 3, "dropout": 0.0}
    out, weights = attention.varlen(torch.nn.Identity(), q, k, v, None, **given)
    assert out.shape == (1, T, 4, 8) and weights is None
    out.sum().backward()
    assert (q.grad.shape, k.grad.shape, v.grad.shape) == (q.shape, k.shape, v.shape)


@pytest.mark.parametrize("given", [None, {"softcap": 50.0}, {"s_aux": torch.ones(4)}])
def test_what_the_kernel_does_not_do_is_refused(given):
    """Rows whose places are unknown, a soft cap, and sinks."""
    given = {} if given is None else {"position_ids": POSITIONS_1T} | given
    with pytest.raises(ValueError, match=r"Identity: policy\.attention = 'varlen' needs .*'eager'"):
        attention.varlen(torch.nn.Identity(), *[torch.ones(1, 1, 1, 1)] * 3, None, **given)


@pytest.fixture
def one_rank():
    """A process group of one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
def test_a_policy_trains_with_it_and_exports_a_model_that_does_not_name_it(tiny_model, tmp_path):
    """With recomputed layers: torch asks for their attention twice."""
    folder = make("qwen3", tmp_path / "model", tiny_model)
    tokens_T, places_T = torch.randint(1, 101, (33,)), POSITIONS_1T[0]
    row = SimpleNamespace(tokens_T=tokens_T, positions_T=places_T, mask_T=places_T > 0)
    row.to = lambda device: row
    found = {}
    for name in ("varlen", "sdpa"):
        policy = FSDPPolicy(folder, PolicySettings(attention=name), temperature=1.0)
        CALLS.clear()
        policy.forward_backward([row], lambda logp_T, _: (logp_T.sum(), None))
        (logp_T,) = policy.logprobs([row])
        found[name] = logp_T, policy.optimizer_step()["grad_norm"], len(CALLS)
        policy.export_hf(str(tmp_path / name))()
    (ours, norm, calls), (theirs, expected, others) = found.values()
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert norm == pytest.approx(expected, rel=1e-4)
    assert (calls, others) == (6, 0)  # of two layers: forward, again, and to score
    assert "varlen" not in (tmp_path / "varlen/config.json").read_text()


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("chosen", ["varlen", "sdpa"])
def test_what_is_chosen_for_auto_reaches_the_model(chosen, tiny_model, tmp_path, monkeypatch):
    folder = make("qwen3", tmp_path / "model", tiny_model)
    asked = []

    def choose(name: str) -> str:
        asked.append(name)
        return chosen

    monkeypatch.setattr(attention, "implementation", choose)
    policy = FSDPPolicy(folder, PolicySettings(attention="auto"), temperature=1.0)
    assert asked == ["auto"] and policy.lm.config._attn_implementation == chosen
    assert bool(CALLS) == (chosen == "varlen")  # by the comparison that every policy begins with


@pytest.mark.parametrize(("gpu", "expected"), [(True, "varlen"), (False, "sdpa")])
def test_the_kernel_is_the_default_where_a_gpu_is(monkeypatch, gpu, expected):
    made_new = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(attention, "activate", lambda *given: made_new.append(given))
    config = FAMILIES["grouped heads"]
    assert attention.prepared("flex_attention", config) == "flex_attention" and not made_new
    assert attention.prepared("auto", config) == expected
    assert made_new == [(attention.Heads.of(config), torch.device("cuda:1"))] * gpu


# --- newer kernels --------------------------------------------------------------------------------

HEADS, CPU = attention.Heads(4, 2, 16), torch.device("cpu")


def hopper_with(monkeypatch, kernel) -> None:
    """A Hopper whose FA3, in torch's real registry, computes as `kernel` while it is active."""
    switched = SimpleNamespace(on=False)

    class Handle:
        def remove(self) -> None:
            switched.on = False

    def register() -> Handle:
        switched.on = True
        return Handle()

    def attend(*args, **kwargs):
        return kernel(*args, **kwargs) if switched.on else stand_in(*args, **kwargs)

    monkeypatch.setitem(registry._FLASH_ATTENTION_IMPLS, "FA3", register)
    monkeypatch.setattr(attention, "varlen_attn", attend)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))


@pytest.fixture
def afresh():
    """Nothing is activated before or after."""
    attention.activate.cache_clear()
    yield
    attention.activate.cache_clear()
    registry.restore_flash_attention_impl(_raise_warn=False)


def in_float32(*args, **kwargs):
    return stand_in(*(x.float() for x in args[:3]), *args[3:], **kwargs).bfloat16()


def fails(*args, **kwargs):
    raise RuntimeError("head dimension unsupported\nand more")


def forgets_the_window(*args, **kwargs):
    return stand_in(*args, **kwargs | {"window_size": (-1, 0)})


def without_gradient(*args, **kwargs):
    with torch.no_grad():
        out = stand_in(*args, **kwargs)
    return out + 0 * sum(x.sum() for x in args[:3])


def test_torch_has_the_newer_kernels_in_the_modules_that_are_named_here():
    assert {*attention.NEWER.values()} <= {*registry.list_flash_attention_impls()}
    source = Path(attention.__file__).read_text()
    for name in attention.NEWER.values():
        path = inspect.signature(registry._FLASH_ATTENTION_IMPLS[name]).parameters["module_path"]
        assert path.default.removesuffix(".interface") in source


@pytest.mark.usefixtures("afresh")
@pytest.mark.parametrize(("capability", "tells"), [
    ((8, 0), "attention: FA2\n"),
    ((9, 0), "attention: FA2, not FA3: ModuleNotFoundError: No module named 'flash_attn_interface"),
    ((10, 0), "attention: FA2, not FA4: ModuleNotFoundError: No module named 'flash_attn'"),
    ((12, 0), "attention: FA2\n"),
])  # fmt: skip
def test_without_its_package_a_gpu_keeps_what_torch_has(monkeypatch, capsys, capability, tells):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    for _ in range(2):
        assert attention.activate(HEADS, CPU) == "FA2"
    assert registry.current_flash_attention_impl() is None
    told = capsys.readouterr().out
    assert told.startswith(tells) and told.count("\n") == 1


@pytest.mark.usefixtures("afresh")
@pytest.mark.parametrize(("kernel", "active", "tells"), [
    (stand_in, "FA3", "attention: FA3\n"),
    (in_float32, "FA3", "attention: FA3\n"),
    (fails, None, "attention: FA2, not FA3: RuntimeError: head dimension unsupported\n"),
    (forgets_the_window, None, "attention: FA2, not FA3: RuntimeError: its numbers differ"),
    (without_gradient, None, "attention: FA2, not FA3: RuntimeError: its numbers differ"),
])  # fmt: skip
def test_a_newer_kernel_stays_where_it_computes_the_same(
    monkeypatch, capsys, kernel, active, tells
):
    hopper_with(monkeypatch, kernel)
    assert attention.activate(HEADS, CPU) == (active or "FA2")
    assert registry.current_flash_attention_impl() == active
    assert capsys.readouterr().out.startswith(tells)


def test_rounding_is_far_below_what_counts_as_another_result(monkeypatch):
    for heads in (HEADS, attention.Heads(32, 8, 128), attention.Heads(16, 8, 128)):
        monkeypatch.setattr(attention, "varlen_attn", stand_in)
        rounded = attention.tried(heads, CPU)
        monkeypatch.setattr(attention, "varlen_attn", in_float32)
        exact = attention.tried(heads, CPU)
        gaps = [
            float((a.float() - b.float()).norm() / b.float().norm())
            for a, b in zip(rounded, exact, strict=True)
        ]
        assert len(gaps) == 8 and max(gaps) < 0.01


@pytest.mark.parametrize("name", FAMILIES)
def test_the_heads_of_a_config_are_those_of_its_layers(name):
    config, heads = FAMILIES[name], attention.Heads.of(FAMILIES[name])
    CALLS.clear()
    model(name, "varlen")(
        input_ids=torch.ones_like(POSITIONS_1T), position_ids=POSITIONS_1T, use_cache=False
    )
    shapes = [tuple(CALLS[0][part].shape[1:]) for part in ("query", "key")]
    assert shapes == [(heads.queries, heads.width), (heads.keys, heads.width)], config
