"""The arithmetic of dry_run/megatron_sizes.py against numbers worked out by hand.

bench/megatron_layouts.py compares it with what is measured.
"""

from pathlib import Path

import pytest
import transformers

from dry_run import megatron_sizes
from dry_run.megatron_sizes import Shape
from grpo_async import Config
from policy import gpu_memory, logprobs
from policy.gpus import GIB
from policy.megatron import families
from policy.model_shape import read_model
from settings.network import PolicySettings
from settings.reader import read
from support import shapes
from support.configs import changed

ROOT = Path(__file__).resolve().parents[2]

TINY = {"hidden_size": 64, "head_dim": 16, "num_attention_heads": 8, "num_key_value_heads": 2}
TINY |= {"intermediate_size": 256, "vocab_size": 128, "num_hidden_layers": 2}
TINY |= {"tie_word_embeddings": False}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
KINDS = ["linear_attention", "moe", "full_attention", "mlp"]
MAMBA = {"layers_block_type": KINDS, "mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 2}
MAMBA |= {"ssm_state_size": 16, "n_routed_experts": 4, "moe_shared_expert_intermediate_size": 32}
H, Q, K, D, F, V = 64, 128, 32, 16, 256, 128
ATTENTION, MLP = H * (Q + 2 * K) + Q * H, 3 * H * F


def dense(**fields) -> Shape:
    return Shape(transformers.Qwen3Config(**TINY | fields))


def sparse(**fields) -> Shape:
    return Shape(transformers.Qwen3MoeConfig(**TINY | EXPERTS | fields))


def hybrid() -> transformers.NemotronHConfig:
    return transformers.NemotronHConfig(**TINY | EXPERTS | MAMBA, moe_latent_size=32)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(logprobs, "CHUNK", 16)


def config(ranks: int = 1, **fields) -> Config:
    """Rows of 1,024 tokens on Megatron."""
    rows = {"row_tokens": 1024, "max_model_len": 32}
    return changed(Config(), kind="megatron", ranks=ranks, **rows | fields)


def layout(ranks: int = 1, **fields) -> PolicySettings:
    """The part of a configuration that says which rank holds what."""
    return config(ranks, **fields).policy


CONFIGS = {
    "qwen3": transformers.Qwen3Config(**TINY),
    "tied": transformers.Qwen3Config(**TINY | {"tie_word_embeddings": True}),
    "qwen2": transformers.Qwen2Config(**TINY),
    "llama": transformers.LlamaConfig(**TINY),
    "experts": transformers.Qwen3MoeConfig(**TINY, **EXPERTS, mlp_only_layers=[1]),
    "hybrid": hybrid(),
}


@pytest.mark.parametrize("hf", CONFIGS.values(), ids=CONFIGS)
def test_one_rank_has_every_parameter_of_transformers(hf, tmp_path):
    hf.save_pretrained(tmp_path)
    counted = megatron_sizes.rank_params(Shape(hf), layout(), 0)
    assert sum(counted) == read_model(str(tmp_path)).params


def test_layers_of_a_config():
    assert families.pattern(hybrid()) == "ME*-"
    assert sparse(mlp_only_layers=[0]).layers == "*-*E"
    assert sparse(decoder_sparse_step=2).layers == "*-*E"
    assert dense().layers == "*-*-"


def test_what_a_rank_of_a_layout_has():
    cut = 2 * (ATTENTION + MLP) + 2 * V * H
    whole = 2 * (2 * H + 2 * D) + H
    assert megatron_sizes.rank_params(dense(), layout(2, tp=2), 0) == (cut / 2 + whole, 0, 0)
    first = ATTENTION + MLP + V * H + 2 * H + 2 * D
    assert megatron_sizes.rank_params(dense(), layout(2, pp=2), 0) == (first, 0, 0)
    assert megatron_sizes.rank_params(dense(), layout(2, pp=2), 1) == (first + H, 0, 0)
    tied = dense(tie_word_embeddings=True)  # both ends have a copy
    assert megatron_sizes.rank_params(tied, layout(2, pp=2), 1) == (first + H, 0, 0)
    routed, frozen = 2 * 4 * 3 * H * 48, 2 * 4 * H
    of_experts = megatron_sizes.rank_params(sparse(), layout(2, tp=2, ep=2), 0)[1:]
    assert of_experts == (routed / 2, frozen)


def test_states_of_a_parameter_on_a_gpu_and_on_a_cpu():
    shared, routed, frozen = megatron_sizes.rank_params(sparse(), layout(8, cp=2, ep=4), 0)
    held = megatron_sizes.state_bytes(sparse(), config(8, cp=2, ep=4), 0)
    expected = (2 + 4 + 12 / 8) * shared + (2 + 4 + 12 / 2) * routed + 2 * frozen
    assert sum(held.values()) == pytest.approx(expected)
    held = megatron_sizes.state_bytes(sparse(), config(8, cp=2, ep=4), 0, b=4)
    expected = (4 + 4 + 8 / 8) * shared + (4 + 4 + 8 / 2) * routed + 4 * frozen
    assert sum(held.values()) == pytest.approx(expected)
    kl = {"kl_coef": 1e-4, "skip_zero_advantage": False}
    held = megatron_sizes.state_bytes(sparse(), config(1, **kl), 0)
    assert held["reference of the KL"] == held["weights"]


def test_gradients_in_bf16_take_half_and_let_super_fit_an_h100(tmp_path):
    """With the recipe's layout of 256 B200, and its arguments of Megatron."""
    cfg = read(Config, ROOT / "configs/rlvr1.py")
    wide = changed(cfg, megatron={})
    shape = megatron_sizes.read_shape(shapes.write("models/super_sft", tmp_path), cfg.policy)
    held = [megatron_sizes.state_bytes(shape, c, 0) for c in (cfg, wide)]
    assert 2 * held[0]["gradients, bf16"] == held[1]["gradients, float32"]
    peaks = [megatron_sizes.trainer_bytes(shape, c) / GIB for c in (cfg, wide)]
    assert peaks == pytest.approx([74.2, 104.6], abs=0.1)
    sent = [megatron_sizes.step_bytes(shape, c.policy)["gradients"] for c in (cfg, wide)]
    assert 2 * sent[0] == sent[1]
    on_cpu = megatron_sizes.state_bytes(shape, cfg, 0, b=4)  # where all is float32
    assert on_cpu["gradients, float32"] == held[1]["gradients, float32"]


def test_what_a_layer_saves_of_a_place():
    one, two = layout(), layout(4, tp=2, cp=2)
    # Norm, q k v, q twice, k once, angles, output.
    attention = H + Q + 2 * K + Q + Q + K + 4 * D + Q
    assert megatron_sizes.saved(dense(), one, "*") == attention
    assert megatron_sizes.saved(dense(), one, "*", b=4) == attention + H + Q + K + Q
    shared = (H + 4 * Q + 2 * K) / 2 + 4 * D + 2 * 2 * K / 2  # keys and values of both cp ranks
    assert megatron_sizes.saved(dense(), two, "*") == shared
    assert megatron_sizes.saved(dense(), one, "-") == H + 5 * F
    assert megatron_sizes.saved(dense(), two, "-", b=4) == (2 * H + 5 * F) / 2
    assert megatron_sizes.saved(sparse(), one, "E") == H + 2 * (H + 6 * 48)
    mixed = Shape(hybrid())
    assert megatron_sizes.saved(mixed, one, "-") == H + 2 * F
    assert megatron_sizes.saved(mixed, one, "E") == H + 2 * (32 + 3 * 48) + 2 * 32 + 32
    assert megatron_sizes.saved(mixed, one, "M") == H + 2 * (128 + 32) + 8 + 128


def test_a_layer_at_work():
    assert megatron_sizes.at_work(dense(), layout(2, tp=2), "-") == (2 * F + 2 * H) / 2
    assert megatron_sizes.at_work(dense(), layout(), "*") == 2 * Q + 2 * K + 2 * H
    assert megatron_sizes.at_work(sparse(), layout(), "E") == 3 * 2 * H + H
    assert megatron_sizes.at_work(sparse(), layout(2, ep=2), "E") == 4 * 2 * H + H


def test_sending_takes_the_largest_tensor_and_two_buckets(monkeypatch):
    monkeypatch.setattr(megatron_sizes, "BUCKET_BYTES", 1000)
    assert megatron_sizes.sending_bytes(dense()) == 8 * H * 2 * F  # gate and up are one
    assert megatron_sizes.sending_bytes(dense(vocab_size=1024)) == 8 * H * 1024
    assert megatron_sizes.sending_bytes(Shape(hybrid())) == 8 * H * F
    monkeypatch.undo()
    assert megatron_sizes.sending_bytes(dense()) == 4 * H * 2 * F + 2 * (256 << 20)
    cfg, states = config(), megatron_sizes.state_bytes(dense(), config(), 0)
    peak = sum(states.values()) + megatron_sizes.sending_bytes(dense()) + gpu_memory.RESERVE
    assert megatron_sizes.trainer_bytes(dense(), cfg) == peak


def test_earlier_stages_keep_more_rows():
    cfg = config(2, pp=2)
    kept = [megatron_sizes.kept_bytes(dense(), cfg, stage) for stage in (0, 1)]
    assert kept == [2 * 1024 * 2 * 3 * H, 2 * 1024 * 2 * H]
    cfg = config(2, pp=2, activation_checkpointing=False)
    each = sum(megatron_sizes.saved(dense(), cfg.policy, kind) for kind in "*-")
    assert megatron_sizes.kept_bytes(dense(), cfg, 1) == 2 * 1024 * (2 * H + each)


def test_the_moments_of_a_rank():
    found = megatron_sizes.moments(dense(), config(2, tp=2), 0)
    kept = 2 * 1024 * (4 * H / 2 + H)  # inputs of layers, and the buffer of gathers
    assert found["in a layer"] == kept + 2 * 1024 * ((H + 5 * F) / 2 + (2 * F + 2 * H) / 2)
    head = max(6 * 16 * 64 + 4 * 64 * H, 2 * 16 * 64 + 6 * 64 * H)
    assert found["at the head"] == kept + 2 * 1024 * (H / 2 + 2 * H) + head
    tied = dense(tie_word_embeddings=True)
    plain = [megatron_sizes.moments(s, config(), 0)["in a layer"] for s in (dense(), tied)]
    assert plain[1] - plain[0] == 2 * V * H
    assert "at the head" not in megatron_sizes.moments(dense(), config(2, pp=2), 0)


def test_the_head_in_bf16_is_that_of_fsdp():
    for head in ((4096, 1000, 8), (1024, 1000, 1024), (16, 1000, 1024)):
        assert megatron_sizes.head_bytes(*head) == gpu_memory.head_bytes(*head)
    assert megatron_sizes.head_bytes(16, 1000, 64, b=4) == 8 * 16 * 1000 + 4 * 1000 * 64


def test_rank_0_gathers_what_others_own():
    assert megatron_sizes.gathered(dense(), layout(8, tp=2, cp=2)) == (0, 0)
    routed = 2 * 2 * 4 * 3 * H * 48  # two layers of four experts, in bf16
    assert megatron_sizes.gathered(sparse(), layout(8, tp=2, ep=4)) == (routed * 3 / 4, 2 * 3)
    last = ATTENTION + MLP + V * H + 2 * H + 2 * D + H
    assert megatron_sizes.gathered(dense(), layout(4, tp=2, pp=2)) == (2 * last, 1)
    tied = dense(tie_word_embeddings=True)  # rank 0 has the embedding
    assert megatron_sizes.gathered(tied, layout(2, pp=2)) == (2 * (last - V * H), 1)
    last = ATTENTION + V * H + 2 * H + 2 * D + H + 4 * H  # and the router
    found = megatron_sizes.gathered(sparse(), layout(4, pp=2, ep=2))
    assert found == (routed / 4 + routed / 2 + 2 * last, 1 + 2 + 1)


def test_nothing_is_sent_by_one_rank():
    for shape in (dense(), sparse(), Shape(hybrid())):
        one = layout()
        sent = megatron_sizes.token_bytes(shape, one) | megatron_sizes.step_bytes(shape, one)
        assert set(sent.values()) == {0}


@pytest.mark.parametrize(("again", "passes"), [(False, 2), (True, 3)])
def test_bytes_of_a_token(again, passes):
    def sent(shape, axis, ranks=2, **sizes):
        spread = layout(ranks, activation_checkpointing=again, **sizes)
        return megatron_sizes.token_bytes(shape, spread)[axis]

    times = 2 * passes + 1  # 5 for each layer, 7 with checkpointing
    assert sent(dense(), "tp", tp=2) == ((times * 4 + 4) * H * 2 + 16) / 2
    assert sent(dense(), "tp", 4, tp=2, cp=2) == ((times * 4 + 4) * H * 2 + 16) / 4
    wide = passes * 2 * (Q + 2 * K)  # four ranks share two heads of keys
    assert sent(dense(), "tp", 4, tp=4) == ((times * 4 * H + 4 * H + wide) * 2 + 32) * 3 / 4
    assert sent(sparse(), "tp", tp=2) == ((times * 2 + 4) * H * 2 + 16) / 2
    assert sent(dense(), "cp", cp=2) == (passes * 2 * 2 * K * 2 + 8) / 2
    assert sent(dense(), "cp", 4, cp=2, tp=2) == (passes * 2 * 2 * K / 2 * 2 + 8) / 2
    assert sent(dense(), "pp", 4, pp=4) == 2 * H * 2 * 3 / 4
    assert sent(sparse(), "ep", ep=2) == passes * 2 * 2 * (2 * 2 * H + 4) / 2
    mamba = (3 * 128 + 2 * 2 * 16 + 8) / 2  # of both cp ranks: gate, x, B, C, dt; the output
    assert sent(Shape(hybrid()), "cp", cp=2) == (passes * (2 * K + mamba) * 2 + 8) / 2
    assert sent(Shape(hybrid()), "ep", ep=2) == passes * 2 * (2 * 2 * 32 + 4) / 2
    assert sent(Shape(hybrid()), "tp", tp=2) == ((times * 4 + 4) * H * 2 + 16) / 2


def test_bytes_of_an_update():
    shared, _, _ = megatron_sizes.rank_params(dense(), layout(4, cp=2), 0)
    sent = megatron_sizes.step_bytes(dense(), layout(4, cp=2))
    assert sent == {"gradients": 4 * shared * 3 / 4, "parameters": 2 * shared * 3 / 4}
    norms = 2 * (2 * H + 2 * D) + H
    sent = megatron_sizes.step_bytes(dense(), layout(2, tp=2))
    assert sent == {"gradients": 4 * 2 * norms / 2, "parameters": 0}
    sent = megatron_sizes.step_bytes(dense(tie_word_embeddings=True), layout(2, pp=2))
    assert sent == {"gradients": 4 * 2 * V * H / 2, "parameters": 0}
    # Experts have an optimizer of their own, after which all parameters are gathered again.
    shared, routed, _ = megatron_sizes.rank_params(sparse(), layout(4, ep=2), 0)
    scattered = shared * 3 / 4 + routed / 2
    sent = megatron_sizes.step_bytes(sparse(), layout(4, ep=2))
    assert sent == pytest.approx({"gradients": 4 * scattered, "parameters": 2 * 2 * scattered})
