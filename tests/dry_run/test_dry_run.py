"""The arithmetic of a dry run against numbers worked out by hand, and against what torch holds."""

import dataclasses
import itertools
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import transformers
from conftest import spelling_rows, write_rows
from torch.testing._internal.distributed.fake_pg import FakeStore

import dry_run
import mopd
from core.errors import InputError
from dry_run import disk, megatron_sizes, pace
from grpo_async import Config
from launch import tiny_model
from policy import fsdp, gpu_memory, logprobs
from policy.gpus import GIB, H100, Gpu, planned
from policy.model_shape import Model, read_model
from prep.check import Summary
from runtime.engines.probe import EVERY
from runtime.processes import placement, trainer_rank
from runtime.processes.trainer_rank import Rank
from settings import reader
from settings.network import PolicySettings
from support import shapes
from support.configs import changed
from support.tables import gives, table
from support.tensor_memory import Peak

ROOT = Path(__file__).resolve().parents[2]
DATA_ROWS = dry_run.data_rows  # the fixture below replaces it
CASES = table(Path(__file__).with_suffix(".txt"))


def test_a_base_model_is_the_problem_and_not_its_rows(tiny_model, tmp_path):
    base = Path(shutil.copytree(tiny_model, tmp_path / "base"))
    (base / "chat_template.jinja").unlink()
    rows = write_rows(tmp_path / "train.jsonl", spelling_rows(2))
    cfg = Config(model=str(base), data={"train": rows})
    told = f"model = {str(base)!r}: its tokenizer has no chat_template, expected one"
    assert DATA_ROWS(cfg).problems == [told]
    assert DATA_ROWS(changed(cfg, model=tiny_model)).problems == []


def h100(memory: float) -> Gpu:
    return planned("h100")._replace(memory=memory * GIB)


KL = {"kl_coef": 1e-4, "skip_zero_advantage": False}
QWEN_8B = shapes.QWEN | {"hidden_size": 4096, "intermediate_size": 12288}
QWEN_8B |= {"num_hidden_layers": 36, "num_attention_heads": 32, "tie_word_embeddings": False}
QWEN_06B = shapes.QWEN | {"hidden_size": 1024, "intermediate_size": 3072}
QWEN_17B = shapes.QWEN | {"hidden_size": 2048, "intermediate_size": 6144}
# Nemotron 3 Super: 40 Mamba, 40 expert and 8 attention layers, 512 experts of which 22 are met.
counts = {"params": 120_600_000_000, "routed": 112_700_000_000, "expert_share": 22 / 512}
counts |= {"embedding": 131072 * 4096, "root": 2 * 131072 * 4096, "layer": 2_900_000_000}
counts |= {"experts": 512 * 2 * 2688 * 1024, "biggest": 131072 * 4096, "tensors": 41_603}
counts |= {"linear": 3_000_000, "layers": 88, "kv_layers": 8, "hidden": 4096, "heads": 32}
counts |= {"kv_heads": 2, "head_dim": 128, "latent": 0, "ffn": 22 * (8 * 2688 + 4 * 4096)}
counts |= {"state": 40 * (4 * 128 * 64 * 128 + 2 * 3 * (128 * 64 + 2 * 8 * 128))}
SUPER = Model(name="super", vocab=131072, **counts)
STATELESS = dataclasses.replace(SUPER, state=0)


@pytest.fixture
def folder(tmp_path):
    """Writes the config.json of a model, and nothing else, into a folder of a given name."""

    def write(name: str, kind: str = "Qwen3Config", **fields) -> str:
        getattr(transformers, kind)(**fields).save_pretrained(tmp_path / name)
        return str(tmp_path / name)

    return write


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    """Whatever the machine has, an H100 is planned for."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture(autouse=True)
def data_files(monkeypatch) -> set[str]:
    """The data files that a run lacks; the others are taken to be there."""
    absent: set[str] = set()
    monkeypatch.setattr(dry_run, "isfile", lambda path: path not in absent)
    monkeypatch.setattr(dry_run, "data_rows", lambda cfg: Summary([], [], {}))
    return absent


@pytest.fixture
def of_8b(folder):
    """A function that makes a Config for the model of 8B, which fits 16 ranks."""
    usual = {"ranks": 16, "row_tokens": 16384, "attention": "flash_attention_2"}
    return lambda **fields: changed(Config(model=folder("8B", **QWEN_8B)), **usual | fields)


def read(name: str, model: str) -> Config:
    """The configuration of a file in configs/, with a model that is here."""
    return dataclasses.replace(reader.read(Config, ROOT / f"configs/{name}.py"), model=model)


def cell(text: str, label: str) -> str:
    """The value in the row of a table that starts with a label."""
    (value,) = re.findall(rf"^  (?:[+=]|or)? ?{re.escape(label)} {{2,}}(\S+)", text, re.M)
    return value


def check_gib(text: str, **expected: float) -> None:
    """Rows of a table, in GiB, hold these bytes."""
    for label, value in expected.items():
        assert float(cell(text, label)) == pytest.approx(value / GIB, abs=5e-3), label


# --- counting -------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [QWEN_8B, QWEN_06B], ids=["8B", "0.6B"])
def test_a_dense_model_is_counted_to_the_last_parameter(folder, size):
    model = read_model(folder("qwen", **size))
    H, inner, D = size["hidden_size"], size["intermediate_size"], size["head_dim"]
    Q, K, V = D * size["num_attention_heads"], D * 8, 151936
    layer = 2 * H * Q + 2 * H * K + 3 * H * inner + 2 * H + 2 * D
    heads = 1 if size["tie_word_embeddings"] else 2
    assert model.layer == layer and model.root == heads * V * H + H
    assert model.params == size["num_hidden_layers"] * layer + heads * V * H + H
    assert model.params == {1: 596_049_920, 2: 8_190_735_360}[heads]
    assert model.embedding == (0 if heads == 1 else V * H) and model.biggest == V * H
    assert (model.active, model.routed) == (model.params, 0)
    assert (model.kv_layers, model.kv_heads, model.head_dim) == (size["num_hidden_layers"], 8, 128)


def test_of_experts_a_token_meets_its_share(folder):
    size = {"vocab_size": 100, "hidden_size": 32, "intermediate_size": 64, "head_dim": 8}
    size |= {"moe_intermediate_size": 24, "num_experts": 8, "num_experts_per_tok": 2}
    size |= {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
    path = folder("moe", "Qwen3MoeConfig", **size, tie_word_embeddings=False)
    model = read_model(path)
    attention, router = 2 * 32 * 32 + 2 * 32 * 16 + 2 * 8, 8 * 32
    routed = 3 * 8 * 3 * 24 * 32
    rest = 3 * (attention + router + 2 * 32) + 2 * 100 * 32 + 32
    assert (model.routed, model.params) == (routed, routed + rest)
    assert model.experts == routed / 3
    assert model.active == rest + routed / 4
    assert model.ffn == 2 * (8 * 24 + 4 * 32)
    counted = f"moe: {model.params:,} parameters, {model.active:,.0f} of them active"
    assert dry_run.explain(Config(model=path), Config).startswith(counted)


def test_only_attention_layers_of_a_hybrid_keep_kv(folder):
    kinds = ["mamba", "moe", "attention", "mlp", "mamba", "attention"]
    size = {"vocab_size": 64, "hidden_size": 32, "head_dim": 8, "n_routed_experts": 4}
    size |= {"layers_block_type": kinds, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = read_model(folder("hybrid", "NemotronHConfig", **size))
    assert (model.layers, model.kv_layers) == (6, 2)
    assert gpu_memory.kv_bytes(model, 1) == 2 * 2 * 2 * 8 * 2
    # NemotronHConfig's own: 128 heads of 64 with 128 numbers each, 8 groups, 4 taps.
    assert model.state == 2 * (4 * 128 * 64 * 128 + 2 * 3 * (128 * 64 + 2 * 8 * 128))


def test_a_compressed_kv_is_shared_by_all_heads(folder):
    size = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    size |= {"moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2}
    size |= {"num_attention_heads": 4, "num_key_value_heads": 4, "qk_rope_head_dim": 8}
    size |= {"n_group": 1, "topk_group": 1, "kv_lora_rank": 24, "q_lora_rank": 16}
    path = folder("mla", "DeepseekV3Config", **size, first_k_dense_replace=1)
    model = read_model(path)
    assert model.latent == 24 + 8
    assert gpu_memory.kv_bytes(model, 1) == gpu_memory.kv_bytes(model, 4) == 2 * 32 * 2


# --- memory ---------------------------------------------------------------------------------------


def test_states_are_sixteen_bytes_a_parameter_and_two_for_a_reference():
    cfg = changed(Config(), ranks=8, **KL)
    assert sum(gpu_memory.states(SUPER, cfg).values()) == pytest.approx(18 * 120.6e9 / 8)
    trained = gpu_memory.states(SUPER, changed(Config(), ranks=8))
    assert sum(trained.values()) == pytest.approx(16 * 120.6e9 / 8)


def test_adapters_alone_have_gradients_and_moments(folder):
    whole = changed(Config(model=folder("8B", **QWEN_8B)), ranks=8, **KL)
    cfg = changed(whole, lora_rank=16)
    model = read_model(cfg.model)
    attention = 2 * (4096 + 4096) + 2 * (4096 + 1024)  # q, o; k, v
    assert sum(model.linear.values()) == 36 * (attention + 3 * (4096 + 12288))
    adapters = 16 * sum(model.linear.values())
    assert gpu_memory.states(model, cfg) == {
        "weights, float32": 4 * (model.params + adapters) / 8,
        "gradients, float32": 4 * adapters / 8,
        "AdamW moments": 8 * adapters / 8,
    }
    assert gpu_memory.states(model, whole)["reference of the KL"] == 2 * model.params / 8
    assert pace.checkpoint_bytes(model, cfg).whole == 12 * adapters + 2 * model.params
    assert gpu_memory.trainer_bytes(model, cfg) < 0.8 * gpu_memory.trainer_bytes(model, whole)
    assert 0.7 < pace.train_flops(model, cfg) / pace.train_flops(model, whole) < 0.85
    text = dry_run.explain(cfg, Config)
    check_gib(text, **{"AdamW moments": 8 * adapters / 8})
    assert 4 * adapters < pace.sent_bytes(model, cfg) < 1.35 * 4 * adapters
    assert pace.sent_bytes(model, cfg) < pace.sent_bytes(model, whole) / 70
    assert "rank 0 sends 0.2 GB in 1 buckets; engines read the base model" in text
    assert "rank 0 sends 16.4 GB in 62 buckets" in dry_run.explain(whole, Config)


def test_an_update_of_adapters_is_bound_by_the_memory_of_nodes(folder):
    cfg = changed(Config(model=folder("8B", **QWEN_8B)), ranks=8, lora_rank=16)
    model = read_model(cfg.model)
    seconds = pace.sync_seconds(model, cfg, H100)
    assert seconds == 2 * model.params / pace.HOST_BYTES_S == pytest.approx(0.66, abs=0.01)


test_the_head_is_fullest_at_one_of_three_places = gives(
    gpu_memory.head_bytes,
    (4096, 1000, 8, 8 * 4096 * 1000),  # forward: two float32 chunks
    (1024, 1000, 1024, 10 * 1024 * 1000),  # backward: a chunk and the gradient, both float32
    (16, 1000, 1024, 2 * 16 * 1000 + 6 * 1000 * 1024),  # its end: that gradient twice
)


def test_a_mask_is_the_square_of_a_row_and_sdpa_alone_needs_it():
    masked = PolicySettings(row_tokens=65536, attention="sdpa")
    assert gpu_memory.mask_bytes(masked) == (4 * GIB, 8 * GIB)
    for attention in ("auto", "varlen", "flash_attention_2"):  # auto: on a GPU
        assert gpu_memory.mask_bytes(PolicySettings(attention=attention)) == (0, 0)
    assert gpu_memory.mask_bytes(PolicySettings(kind="megatron")) == (0, 0)


class AsOnGPU(Peak):
    """With logprobs.matmul as on a GPU, which allocates no float32 copies of what it multiplies."""

    def matmul(self, a, b, alpha=1.0, into=None):
        out = a.new_empty(len(a), b.shape[1], dtype=torch.float32) if into is None else into
        self.counting = False
        torch.add(0 if into is None else out, a.float() @ b.float(), alpha=alpha, out=out)
        self.counting = True
        return out


SHAPES = dict(CASES["what holds most of a rank's memory"])
LAYOUTS = list(itertools.product([1, 8], [0, 2], [True, False]))
# Every two of the three values meet in four of the eight layouts; the other four are long.
FOUR = [(1, 0, True), (1, 2, False), (8, 0, False), (8, 2, True)]


@pytest.mark.parametrize(("ranks", "lora_rank", "checkpointing"), [
    pytest.param(*layout, marks=[] if layout in FOUR else [pytest.mark.long])
    for layout in LAYOUTS
])  # fmt: skip
@pytest.mark.parametrize("most", SHAPES)
def test_a_trainer_rank_holds_what_is_printed(
    tmp_path, monkeypatch, request, ranks, lora_rank, checkpointing, most
):
    size = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 192, "head_dim": 16}
    size |= {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
    size |= {"tie_word_embeddings": True} | SHAPES[most]
    row_tokens = size.pop("row_tokens")
    monkeypatch.setattr(logprobs, "CHUNK", size.pop("chunk", 64))
    torch.manual_seed(0)
    kind = transformers.Qwen3MoeConfig if "num_experts" in size else transformers.Qwen3Config
    transformers.AutoModelForCausalLM.from_config(kind(**size)).save_pretrained(tmp_path)
    fields = {"ranks": ranks, "lora_rank": lora_rank, "row_tokens": row_tokens}
    fields |= {"activation_checkpointing": checkpointing, "attention": "sdpa"}  # as "auto" is here
    cfg = changed(Config(model=str(tmp_path)), max_model_len=32, **fields)
    backend, store = ("fake", FakeStore()) if ranks > 1 else ("gloo", dist.HashStore())
    bf16 = fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    monkeypatch.setattr(fsdp, "MixedPrecisionPolicy", lambda **_: bf16)  # as on a GPU
    monkeypatch.setattr(fsdp.FSDPPolicy, "_check_architecture", lambda _: None)  # 7 ranks are fake
    monkeypatch.setattr(dist, "new_group", lambda **_: None)
    dist.init_process_group(backend, rank=0, world_size=ranks, store=store)
    request.addfinalizer(dist.destroy_process_group)
    policy = fsdp.FSDPPolicy(cfg.model, cfg.policy, temperature=1.0)
    parameters = list(policy.model.parameters())
    for parameter in policy._trained().values():
        parameter.grad = torch.zeros_like(parameter)
    policy.optimizer.step()
    policy.optimizer.zero_grad()
    moments = [moment for state in policy.optimizer.state.values() for moment in state.values()]
    peak = AsOnGPU([getattr(t, "_local_tensor", t) for t in [*parameters, *moments]])
    monkeypatch.setattr(logprobs, "matmul", peak.matmul)
    row = SimpleNamespace(
        tokens_T=torch.randint(size["vocab_size"], (row_tokens,)),
        positions_T=torch.arange(row_tokens) % 32,
    )
    row.mask_T, row.to = row.positions_T > 0, lambda _: row
    with peak:
        policy.forward_backward([row, row], lambda logp_T, _: (logp_T.sum(), {}))
    model = read_model(cfg.model)
    during = gpu_memory.moments(model, cfg)
    del during["sending weights"]
    printed = sum(gpu_memory.states(model, cfg).values()) + max(during.values())
    # Frozen experts keep less than is counted.
    limit = 1.15 if lora_rank and most == "experts" else 1.1
    assert 0.99 <= printed / peak.bytes <= limit, (printed, peak.bytes)


@pytest.mark.parametrize("heads", [8, 16])
def test_a_layer_saves_what_is_counted(folder, heads):
    """Without a mask, as on a GPU: of a real layer in bf16, all that it keeps for its backward."""
    size = {"vocab_size": 512, "hidden_size": 512, "intermediate_size": 1536, "head_dim": 64}
    size |= {
        "num_hidden_layers": 1,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 2,
    }
    path, T = folder("qwen", **size), 512
    lm = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.from_pretrained(path), dtype=torch.bfloat16
    )
    x = torch.randn(1, T, 512, dtype=torch.bfloat16, requires_grad=True)
    angles = lm.model.rotary_emb(x, torch.arange(T)[None])
    shared = {t.untyped_storage()._cdata for t in (*lm.parameters(), *angles)}
    kept = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in shared:
            kept[storage._cdata] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        lm.model.layers[0](x, attention_mask=None, position_embeddings=angles)
    cfg = changed(Config(model=path), row_tokens=T, max_model_len=T)
    counted = gpu_memory.layer_bytes(read_model(path), cfg)
    assert counted == pytest.approx(sum(s.nbytes() for s in kept.values()), rel=0.01)


def recomputes(cfg: Config, memory: float) -> bool:
    found = gpu_memory.decided(read_model(cfg.model), cfg, memory).policy.activation_checkpointing
    assert isinstance(found, bool)
    return found


def test_activations_stay_where_nine_tenths_of_the_memory_hold_them(folder):
    cfg = changed(Config(model=folder("0.6B", **QWEN_06B)), row_tokens=8192, max_model_len=8192)
    model = read_model(cfg.model)
    taken = gpu_memory.trainer_bytes(model, changed(cfg, activation_checkpointing=False))
    assert taken > gpu_memory.trainer_bytes(model, changed(cfg, activation_checkpointing=True))
    for enough, others in {
        taken / 0.9: {},
        taken / 0.9 / 0.6: {"gpu_share": 0.5, "engine": {"args": {"gpu_memory_utilization": 0.4}}},
        taken / 0.9 / 0.2: {"gpu_share": 0.25, "engine": {"args": {"gpu_memory_utilization": 0.4}}},
    }.items():  # alone, beside an engine, beside two
        auto = changed(cfg, **others)
        assert not recomputes(auto, enough + 1) and recomputes(auto, enough - 1)
        for asked in (True, False):
            assert recomputes(changed(auto, activation_checkpointing=asked), enough) is asked
    assert recomputes(changed(cfg, row_tokens=65536), 80 * GIB)
    assert recomputes(changed(cfg, kind="megatron"), 1e15)
    gpt2 = folder("gpt2", "GPT2Config", n_embd=32, n_layer=2, n_head=4)
    assert recomputes(dataclasses.replace(cfg, model=gpt2), 1e15)  # its sizes have other names


def test_trainer_ranks_decide_by_their_gpu(folder, monkeypatch, request):
    cfg = changed(Config(model=folder("0.6B", **QWEN_06B)), row_tokens=8192, max_model_len=8192)
    opened = []
    monkeypatch.setattr(
        trainer_rank, "open_policy", lambda model, settings, *_: opened.append(settings)
    )
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    request.addfinalizer(dist.destroy_process_group)
    for memory in (80, 20):
        monkeypatch.setattr(gpu_memory, "planned", lambda _, memory=memory: h100(memory))
        Rank(cfg).open_policy(1.0)
        Rank(changed(cfg, activation_checkpointing=True)).open_policy(1.0)
    assert [s.activation_checkpointing for s in opened] == [False, True, True, True]
    assert opened[2] == dataclasses.replace(cfg.policy, activation_checkpointing=True)


def test_kv_of_a_token():
    assert gpu_memory.kv_bytes(SUPER, 1) == 8 << 10  # 64k tokens: 512 MiB
    assert (
        gpu_memory.kv_bytes(SUPER, 2) == gpu_memory.kv_bytes(SUPER, 4) == 4 << 10
    )  # one head at least


def test_kv_gets_what_an_engine_may_take_without_weights_and_reserve():
    cfg = changed(Config(), tensor_parallel=4, engine={"args": {"gpu_memory_utilization": 0.8}})
    budget = 0.8 * 141 * GIB - 120.6e9 * 2 / 4 - 4 * GIB
    assert gpu_memory.kv_budget(SUPER, cfg, 141 * GIB) == pytest.approx(budget)
    for length in (16384, 65536):
        held = gpu_memory.kv_tokens(SUPER, cfg, 141 * GIB, length)
        assert held == int(budget / (4096 + SUPER.state / 4 / length))
    assert gpu_memory.kv_tokens(STATELESS, cfg, 141 * GIB, 1) == int(budget // 4096)
    assert (
        gpu_memory.kv_tokens(SUPER, Config(), 80 * GIB, 1) == 0
    )  # 241 GB of weights leave nothing


def test_the_states_of_super_leave_room_for_37_sequences_and_not_57():
    """160 MiB of float32 each, over the four GPUs of an engine."""
    assert SUPER.state == pytest.approx(160 * 2**20, rel=0.02)
    engine = {"args": {"gpu_memory_utilization": 0.8}, "count": 144, "tensor_parallel": 4}
    cfg, gpu = changed(Config(), engine=engine), h100(80)
    assert int(pace.batch_size(SUPER, cfg, gpu)) == 37
    assert pace.batch_size(STATELESS, cfg, gpu) == pytest.approx(57, abs=0.5)
    rounds = 4096 * 16384 / (144 * pace.batch_size(SUPER, cfg, gpu))
    each = pace.decode_seconds(SUPER, 4, pace.batch_size(SUPER, cfg, gpu), 8192, gpu)
    assert pace.generation_seconds(SUPER, cfg, gpu) == pytest.approx(rounds * each)


def test_an_update_needs_room_beside_the_engines_share(of_8b):
    """Super's layer of experts is 5.6 GB before it is cut, and dense layers are small."""
    cfg = changed(Config(), tensor_parallel=4)
    layer = 2 * 512 * 2 * 2688 * 1024
    assert layer == pytest.approx(5.6e9, rel=0.01)
    assert gpu_memory.reload_bytes(SUPER, cfg) == 1.25 * layer + 2**28
    assert gpu_memory.reload_bytes(SUPER, changed(cfg, tensor_parallel=1, gpu_share=0.5)) == layer
    cfg = of_8b()
    model, embedding = read_model(cfg.model), 2 * 151936 * 4096
    assert (model.experts, gpu_memory.reload_bytes(model, cfg)) == (0, 2 * embedding + 2**28)
    assert "a weight update takes" not in dry_run.explain(cfg, Config)
    text = dry_run.explain(changed(cfg, engine={"args": {"gpu_memory_utilization": 0.97}}), Config)
    assert cell(text, "in an update") == "2.57"
    assert "a weight update takes 2.57 GiB of an engine's GPU, but gpu_memory_util" in text
    assert "= 0.97 leaves 2.37: lower it in engine.args" in text


def test_every_rank_of_a_node_loads_its_share_of_the_model():
    model = dataclasses.replace(SUPER, params=8_000_000_000)
    assert gpu_memory.host_bytes(model, 8, 8) == 4 * gpu_memory.host_bytes(model, 8, 32) == 32e9
    assert pace.ranks_per_node(changed(Config(), ranks=32)) == 8
    assert pace.ranks_per_node(changed(Config(), ranks=3)) == 3


# --- seconds --------------------------------------------------------------------------------------


def test_a_batch_of_super_and_the_floor_of_its_sync():
    assert pace.step_tokens(Config()) == 256 * 16 * 65536 == 268_435_456
    dense = dataclasses.replace(SUPER, tensors=723)
    copied = 41_603 * pace.TENSOR_SECONDS
    for model, engines, seconds in (
        (SUPER, 8, 4.824),
        (dense, 7, 241.2 / 450),  # all in a node
        (SUPER, 7, copied),  # engines' processors take longer
    ):
        cfg = changed(Config(), count=engines, ranks=1)
        assert pace.sync_seconds(model, cfg, h100(80)) == pytest.approx(seconds)
    short = changed(Config(), max_response_tokens=1024, max_model_len=512)
    assert pace.response_limit(short) == 512


def test_what_an_update_is_made_of(tmp_path):
    one, eight = Config(), changed(Config(), ranks=8)
    assert pace.update_traffic(SUPER, one) == (241.2e9, 899, 0, 0)
    assert pace.update_traffic(SUPER, eight) == (241.2e9, 899, 241.2e9 * 7 / 8, 41_603)
    cfg = read("rlvr1", shapes.write("models/super_sft", tmp_path))
    model = read_model(cfg.model)
    # Seven ranks have seven eighths of the experts; a layer's 704 MB take three messages each.
    assert pace.update_traffic(model, cfg)[2:] == (2 * model.routed * 7 / 8, 40 * 7 * 3)
    text = dry_run.explain(cfg, Config)
    assert cell(text, "weight update") == "1.12" and cell(text, "gathered for it") == "197.3"
    assert "at least: rank 0 sends 241.3 GB in 900 buckets; 41,603 tensors\n" in text
    assert "GB that rank 0 receives in 840 messages; not in the step" in text


def test_a_probe_takes_less_than_a_two_hundredth_of_a_step(tmp_path):
    """Engines write 32 tokens more; 32 of 256 ranks score 144 x 8 answers of 48 tokens at once."""
    cfg = read("rlvr1", shapes.write("models/super_sft", tmp_path))
    model, gpu = read_model(cfg.model), planned(cfg.command.gpu)
    batch = pace.batch_size(model, cfg, gpu) + 8
    written = 32 * pace.decode_seconds(model, 4, batch, 8192, gpu)
    scored = model.flops(144 * 8 * 48, 144 * 8 * 48 * 24, 1, False) / (32 * pace.MFU * gpu.flops)
    seconds = pace.probe_seconds(model, cfg, gpu)
    assert seconds == pytest.approx(written + scored)
    share = seconds / (EVERY * pace.step_seconds(model, cfg, gpu))
    assert share < 0.005
    text = dry_run.explain(cfg, Config)
    assert cell(text, "probe") == f"{seconds:.2f}"
    assert f"  every {EVERY} steps: {share:.2%}; not in the step\n" in text


test_an_update_uses_the_cards_that_the_poorest_node_has = gives(
    lambda fields: pace.networks(changed(Config(), **fields)),
    ({"count": 144, "tensor_parallel": 8, "ranks": 256}, 8),
    ({"count": 4, "tensor_parallel": 4, "ranks": 16}, 8),
    ({"count": 3, "tensor_parallel": 4, "ranks": 16}, 4),  # a node has one engine alone
    ({"count": 2, "tensor_parallel": 8, "ranks": 2}, 2),
    ({"count": 2, "tensor_parallel": 8, "ranks": 17}, 1),  # rank 0 has a node for itself
    ({"count": 12, "ranks": 4}, 8),  # four engines beside the ranks
    ({"count": 4, "ranks": 4}, 0),
    ({"count": 16, "ranks": 16, "gpu_share": 0.5}, 1),
    ({"count": 3, "tensor_parallel": 3, "ranks": 7}, 1),  # not on two nodes
)


def test_decoding_reads_the_weights_that_the_batch_meets():
    gpu = planned("h200")  # TP 4, as in the recipe
    always = 120.6e9 - 112.7e9 - 131072 * 4096
    for batch in (1, 28, 57):
        met = always + 112.7e9 * (1 - (490 / 512) ** batch)
        kept = batch * (6000 * 4096 + 2 * SUPER.state / 4)
        seconds = pace.LAUNCH_S + (2 * met / 4 + kept) / 4.8e12
        assert pace.decode_seconds(SUPER, 4, batch, 6000, gpu) == pytest.approx(seconds)
    roofline = [1e3 * pace.decode_seconds(SUPER, 4, batch, 6000, gpu) for batch in (1, 28, 57)]
    assert roofline == pytest.approx([4.4, 12.8, 15.9], rel=0.03)


def test_a_large_batch_is_bound_by_matmuls():
    seconds = pace.LAUNCH_S + 2 * (SUPER.active - SUPER.embedding) * 100_000 / 4 / 989e12
    found = pace.decode_seconds(STATELESS, 4, 100_000, 0, planned("h100"))
    assert found == pytest.approx(seconds)


def test_the_longest_rollout_has_max_lag_plus_one_steps():
    cfg = changed(Config(), tensor_parallel=4, count=144, ranks=256, max_model_len=49152)
    gpu = h100(141)
    longest = pace.longest_seconds(SUPER, cfg, gpu)
    assert longest == pytest.approx(49152 * pace.decode_seconds(SUPER, 4, 1, 24576, gpu))
    for lag in (1, 3):
        limits = pace.limits(SUPER, dataclasses.replace(cfg, max_lag=lag), gpu)
        chain = longest + pace.train_seconds(SUPER, cfg, gpu)
        assert limits["longest rollout"] == pytest.approx(chain / (1 + lag))


def test_training_costs_six_flops_a_parameter_and_more_for_what_runs_again():
    flash = {"attention": "flash_attention_2", "activation_checkpointing": False}
    cfg = changed(Config(), max_model_len=49152, **flash)
    tokens = 4096 * 12288
    matmuls = 6 * (SUPER.active - SUPER.embedding) * tokens
    attention = 6 * 2 * 32 * 128 * 8 * 6144 * tokens
    assert matmuls == pytest.approx(3.6e18, rel=0.03)
    plain = pace.train_flops(SUPER, cfg)
    assert plain == pytest.approx(matmuls + attention)
    again = {"activation_checkpointing": True, "updates_per_batch": 2}
    assert pace.train_flops(SUPER, changed(cfg, **again)) == pytest.approx(plain * 5 / 3)
    assert pace.train_flops(SUPER, changed(cfg, **KL)) == pytest.approx(plain * 4 / 3)
    masked = changed(cfg, attention="sdpa")
    expected = matmuls + attention * 65536 / 6144
    assert pace.train_flops(SUPER, masked) == pytest.approx(expected)


@pytest.mark.parametrize(("parts", "row_tokens", "share"), [
    (1, 1, 1.0),
    (8, 1, 1 / 8),
    (8, 1000, 1 / 8),
    (8, 1001, 1 / 4),  # a part has 1,000 tokens, so two are trained together
    (8, 2500, 1 / 4),  # three, three and two
    (8, 10**6, 1.0),
])  # fmt: skip
def test_the_last_part_is_what_small_parts_are_joined_to(parts, row_tokens, share):
    fields = {"prompts_per_step": 8, "group_size": 4, "max_response_tokens": 1000}
    fields |= {"max_model_len": 1100, "train_parts": parts, "row_tokens": row_tokens}
    assert pace.last_part(changed(Config(), **fields)) == share


def test_a_step_waits_for_all_to_alls_and_not_for_keys_and_values(tmp_path):
    """At Super's layout over 256 H100s Mamba's take two fifths of what the work takes."""
    cfg = read("rlvr1", shapes.write("models/super_sft", tmp_path))
    shape, gpu = megatron_sizes.read_shape(cfg.model, cfg.policy), planned("h100")
    model = read_model(cfg.model)
    work = pace.train_flops(model, cfg) / (256 * pace.MFU * 989e12)
    sent = pace.traffic_seconds(shape, cfg, gpu)
    mamba, experts = pace.exposed_seconds(cfg, gpu).values()
    assert pace.train_seconds(model, cfg, gpu) == pytest.approx(work + mamba + experts)
    assert sent["cp"] == pytest.approx(38.02, abs=0.01) and sent["ep"] == experts
    # Gate, x and output of 8,192; B and C of 32 groups of 128; dt of 128 heads; to 7 of 8 ranks.
    numbers = 40 * (3 * 8192 + 2 * 32 * 128 + 128) / 32 * 7 / 8
    assert mamba == pytest.approx(3 * 2 * numbers * 4096 * 16384 / 8 / 50e9)
    assert mamba / work == pytest.approx(0.4, abs=0.01)
    text = dry_run.explain(cfg, Config)
    assert f"FLOPs; all-to-alls: Mamba {mamba:.2f}, experts {experts:.2f}\n" in text
    assert cell(text, "training") == f"{work + mamba + experts:.2f}"
    assert pace.exposed_seconds(changed(cfg, cp=1), gpu)["Mamba"] == 0
    inside = changed(cfg, tp=1)  # the ranks of cp are then those of a node
    assert pace.exposed_seconds(inside, gpu)["Mamba"] < mamba / 2
    assert pace.exposed_seconds(Config(), gpu) == {}


def test_engines_decode_no_more_than_slots_rollouts_and_kv_allow():
    engine = {"args": {"max_num_seqs": 64}, "count": 4, "tensor_parallel": 4}
    cfg, gpu = changed(Config(prompts_per_step=16, group_size=4), engine=engine), h100(141)
    assert pace.batch_size(SUPER, cfg, gpu) == 2 * 16 * 4 / 4
    assert pace.batch_size(SUPER, changed(cfg, count=1), gpu) == 64
    small = changed(cfg, engine={"args": {"max_num_seqs": 64, "gpu_memory_utilization": 0.44}})
    tokens = gpu_memory.kv_tokens(SUPER, small, gpu.memory, 16384)
    assert 0 < tokens < 32 * 16384
    assert pace.batch_size(SUPER, small, gpu) == tokens / 16384


def test_generation_is_rounds_times_seconds_of_one():
    engine = {"args": {"max_num_seqs": 64}, "count": 4, "tensor_parallel": 4}
    cfg, gpu = changed(Config(), engine=engine), h100(141)
    rounds = 4096 * 16384 / (4 * 64)
    each = pace.decode_seconds(SUPER, 4, 64, 8192, gpu)
    assert pace.generation_seconds(SUPER, cfg, gpu) == pytest.approx(rounds * each)


test_gpus_are_whole_or_shared = gives(
    lambda count, tensor_parallel, ranks, gpu_share: placement.gpus(changed(Config(), **locals())),
    (2, 2, 3, 1.0, [{"trainer": 1}] * 3 + [{"engine": 1}] * 4),
    (1, 1, 1, 0.5, [{"engine": 1, "trainer": 1}]),
    (1, 1, 1, 0.6, [{"trainer": 1}, {"engine": 1}]),
    (2, 1, 1, 0.25, [{"engine": 2, "trainer": 1}]),
    (3, 1, 2, 0.5, [{"engine": 1, "trainer": 1}] * 2 + [{"engine": 1}]),
    (7, 1, 1, 0.25, [{"engine": 2, "trainer": 1}, {"engine": 4}, {"engine": 1}]),
)


def test_loops_that_share_a_gpu_or_have_no_lag_take_turns():
    cfg = changed(Config(), max_model_len=1024)
    model, gpu = dataclasses.replace(SUPER, params=10**9, routed=0), h100(80)
    generation = pace.generation_seconds(model, cfg, gpu)
    training = pace.train_seconds(model, cfg, gpu)
    apart = pace.limits(model, cfg, gpu)
    assert (apart["generation"], apart["training"]) == (generation, training)
    for fields in ({"max_lag": 0}, {"gpu_share": 0.5}):
        other = dataclasses.replace(cfg, **fields)
        (seconds,) = pace.limits(model, other, gpu).values()
        assert seconds >= pace.generation_seconds(model, other, gpu) + training
    update = pace.sync_seconds(model, cfg, gpu)
    assert pace.step_seconds(model, cfg, gpu) == max(apart.values()) + update


def test_the_balanced_split_is_the_fastest_that_fits(folder):
    model, gpu = read_model(folder("8B", **QWEN_8B)), h100(80)
    fields = {"max_response_tokens": 16384, "max_model_len": 18432, "row_tokens": 32768}
    cfg = changed(Config(), count=8, ranks=8, attention="flash_attention_2", **fields)
    best = pace.balance(model, cfg, gpu)
    assert best.engine.count + best.policy.ranks == 16
    splits = [changed(cfg, count=g, ranks=16 - g) for g in range(1, 16)]
    fits = [s for s in splits if gpu_memory.trainer_bytes(model, s) <= gpu.memory]
    fastest = min(pace.step_seconds(model, s, gpu) for s in fits)
    assert pace.step_seconds(model, best, gpu) == fastest
    # Now that many trainers are too few.
    tight = gpu._replace(memory=gpu_memory.trainer_bytes(model, best) - 1)
    assert pace.balance(model, cfg, tight).policy.ranks > best.policy.ranks
    assert pace.balance(model, cfg, h100(0)) is None


def test_each_node_writes_what_its_ranks_hold_and_fsdp_exports_on_one():
    model = dataclasses.replace(SUPER, params=8 * 10**9)
    one, four = changed(Config(), ranks=8), changed(Config(), ranks=32)
    assert pace.checkpoint_bytes(model, one) == (14 * 8e9, 14 * 8e9)
    assert pace.checkpoint_bytes(model, four) == (14 * 8e9, (3 + 2) * 8e9)
    assert pace.checkpoint_seconds(model, four) == 5 * 8 + 14 * 8 / 4
    megatron = changed(four, kind="megatron", tp=8)
    assert pace.checkpoint_bytes(model, megatron) == (16 * 8e9, 4 * 8e9)
    assert pace.checkpoint_seconds(SUPER, changed(megatron, ranks=256)) == pytest.approx(120.6)
    assert pace.trainer_nodes(changed(Config(), ranks=9)) == 2


def test_the_signal_comes_a_step_two_checkpoints_and_a_minute_before_the_end():
    """The checkpoint before the last may have been begun with the step."""
    model = dataclasses.replace(SUPER, params=8 * 10**9)
    cfg = changed(Config(), ranks=8)
    saving = 2 * 14 * 8
    assert pace.signal_seconds(model, cfg, 300.0) == 300 + saving + 60
    assert pace.signal_seconds(model, cfg, 100.0) == 2 * saving + 60
    assert pace.signal_seconds(model, cfg, 1e6) == 65535


def test_a_step_of_the_tiny_job_writes_what_was_measured():
    """112 lines of 340 bytes, and 6 KB of metrics; every 40th step the tokens of the samples."""
    step = disk.step_bytes(read("tiny", "models/tiny"))
    assert step["rollouts"] == pytest.approx(112 * 340, rel=0.05)
    assert step["metrics"] == pytest.approx(2_500 + 3_700 + 1_000 + 1_600, rel=0.05)
    assert step["samples"] == 112 * 16 * 18 / 40


@pytest.mark.parametrize(("fields", "exports", "checkpoints"), [
    ({}, 10, 3), ({"keep_exports": 4}, 4, 3), ({"keep_last": 5}, 10, 6), ({"steps": 15}, 2, 2),
    ({"save_period": 0}, 1, 1), ({"steps": 95}, 10, 3),
])  # fmt: skip
def test_the_disk_holds_all_exports_and_the_checkpoints_that_are_kept(fields, exports, checkpoints):
    """And one more, which is written before the oldest is deleted."""
    model = dataclasses.replace(SUPER, params=8 * 10**9)
    cfg = changed(Config(), ranks=8, **{"steps": 100, "save_period": 10} | fields)
    step, rest = disk.rows(model, cfg)
    lines = cfg.steps * sum(disk.step_bytes(cfg).values())
    assert step.startswith(f"disk, for {cfg.steps} steps: {disk.amount(lines / cfg.steps)} a step")
    each = f"exports {exports} x 16.0 GB, checkpoints to resume {checkpoints} x 96.0 GB"
    together = disk.amount(lines + exports * 16e9 + checkpoints * 96e9)
    assert rest == f"  {disk.amount(lines)} in all; {each}; together {together}"


# --- the GPU --------------------------------------------------------------------------------------


def test_a_gpu_is_named_or_that_of_the_machine(monkeypatch):
    assert planned("auto") == planned("h100") == Gpu("H100", 79 * GIB, 989e12, 3.35e12, 450e9)
    assert planned("h200")._replace(name="H100", memory=0, hbm=0) == h100(0)._replace(hbm=0)
    assert planned("b200").memory == 178 * GIB and planned("b200").flops > 2 * planned("h100").flops
    found = SimpleNamespace(name="NVIDIA H200", total_memory=150_000_000_000)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: found)
    here = planned("auto")
    assert (here.memory, here.hbm) == (150e9, planned("h200").hbm) and "NVIDIA H200" in here.name
    assert planned("b200").name == "B200"
    found.name = "NVIDIA RTX 6000 Ada Generation"
    assert planned("auto").hbm == 3.35e12 and planned("auto").memory == 150e9
    assert planned("auto").name == "NVIDIA RTX 6000 Ada Generation, as fast as an H100"


# --- the table ------------------------------------------------------------------------------------


def test_the_table_of_the_tiny_job(tmp_path):
    tiny_model.make_model(tiny_model.make_tokenizer()).config.save_pretrained(tmp_path / "tiny")
    cfg = read("tiny", str(tmp_path / "tiny"))
    text = dry_run.explain(cfg, Config)
    assert text.startswith("tiny: 1,003,648 parameters\n")
    assert f"prompts_per_step {cfg.prompts_per_step} (256)" in text
    assert "policy.lr 0.00015 (3e-06)" in text
    samples = cfg.prompts_per_step * 16
    assert "group_size" not in text and "max_lag" not in text
    assert cell(text, "samples") == f"{samples:,}"
    assert cell(text, "tokens, at most") == f"{64 * samples:,}"
    assert (cell(text, "together"), cell(text, "engines")) == ("1", "0.5")
    assert float(cell(text, "AdamW moments")) == pytest.approx(8 * 1_003_648 / GIB, abs=5e-5)
    assert cell(text, "KV bytes per token") == f"{4 * 2 * 2 * 32 * 2:,}"
    assert "everything fits" in text


def test_the_table_of_gsm8k(folder):
    cfg, count = read("gsm8k", folder("Qwen3-0.6B", **QWEN_06B)), 596_049_920
    text = dry_run.explain(cfg, Config)
    assert text.startswith("Qwen3-0.6B: 596,049,920 parameters\n")
    root, kept = 151937 * 1024, 28 * 2 * 8192 * 1024
    rows = {"weights, float32": 4 * count, "AdamW moments": 8 * count, "reducing": 12 * root}
    at_head = 2 * root + kept + 12 * 8192 * 1024 + 6 * 1024 * 151936 + 4 * 151936 * 1024
    without = 28 * 8192 * (16 * 1024 + 10 * 2048 + 10 * 1024 + 8 * 3072)
    assert "of 42.66 (free, less a tenth)" in text and cell(text, "checkpointing") == "off"
    check_gib(text, **{"layers keep": without})
    text = dry_run.explain(changed(cfg, activation_checkpointing=True), Config)
    rows |= {"layers keep": kept, "= peak, with reserve": 16 * count + at_head + 4 * GIB}
    rows |= {"weights, bf16": 2 * count, "KV": 0.4 * 79 * GIB - 2 * count - 4 * GIB}
    rows |= {"host, while loading": 4 * count, "host, while saving": 14 * count}
    check_gib(text, **rows)
    assert cell(text, "mask of a row") == "0.00"
    masked = dry_run.explain(changed(cfg, attention="sdpa"), Config)
    assert cell(masked, "mask of a row") == f"{8192**2 / GIB:.4f}"
    assert "x those of policy.attention = 'auto'" in masked
    assert (cell(text, "samples"), cell(text, "tokens, at most")) == ("256", "262,144")
    assert cell(text, "KV bytes per token") == "114,688"
    assert "GPUs shared by both: 1" in text and "generation + training" in text
    assert "--nodes=1 --ntasks-per-node=1 --gpus-per-node=1 --time=00:2" in text
    assert re.search(r"--signal=B:USR1@(\d+)\n.*\n.*SLURM_JOB_END_TIME - \1 ", text)
    assert "; a checkpoint takes 17 s, a node writes 8.3 of 8.3 GB\n" in text
    assert "everything fits" in text


def test_the_table_of_the_math_blend(folder):
    """Trainer and engine fill the GPU: with a tenth more for the engine they do not fit."""
    cfg, count = read("math_blend", folder("Qwen3-1.7B", **QWEN_17B)), 1_720_574_976
    text = dry_run.explain(cfg, Config)
    assert text.startswith("Qwen3-1.7B: 1,720,574,976 parameters\n")
    root, kept = 151937 * 2048, 28 * 2 * 8192 * 2048
    at_head = 2 * root + kept + 12 * 8192 * 2048 + 6 * 1024 * 151936 + 4 * 151936 * 2048
    engine = 0.5 * 79 * GIB - 2 * count - 4 * GIB
    check_gib(text, **{"= peak, with reserve": 16 * count + at_head + 4 * GIB, "KV": engine})
    assert (cell(text, "samples"), cell(text, "tokens, at most")) == ("512", "1,572,864")
    assert "GPUs shared by both: 1" in text and "everything fits" in text
    assert cell(text, "checkpointing") == "on"  # 56 of 36 GiB without
    more = changed(cfg, engine={"args": {"gpu_memory_utilization": 0.6}})
    assert "PROBLEM: a shared GPU needs 80.71 of 79.00 GiB" in dry_run.explain(more, Config)


def test_the_table_fits_a_screen_and_follows_the_gpu(folder):
    cfg = changed(Config(model=folder("8B", **QWEN_8B)), count=12, ranks=12)
    text = dry_run.explain(changed(cfg, gpu="h200"), Config)
    assert len(text.splitlines()) <= 50 and max(map(len, text.splitlines())) <= 100
    assert "assumed: H200: 139.00 GiB" in text and "of 139.00" in text
    assert "nodes of 8: 3" in text and "--nodes=3 --ntasks-per-node=1 --gpus-per-node=8" in text
    assert cell(text, "weight update") == "0.04"
    least = re.search(r"longest rollout .* training: a step of ([\d.,]+) at least", text)[1]
    longest, training = (number(cell(text, name)) for name in ("longest rollout", "training"))
    assert number(least) == pytest.approx((longest + training) / 2, abs=0.1)
    assert cell(text, "= step") == f"{step_through_8_cards(cfg, planned('h200')):,.2f}"


def number(cell: str) -> float:
    return float(cell.replace(",", ""))


def step_through_8_cards(cfg: Config, gpu: Gpu) -> float:
    model = read_model(cfg.model)
    both = pace.generation_seconds(model, cfg, gpu), pace.train_seconds(model, cfg, gpu)
    chain = pace.longest_seconds(model, cfg, gpu) + both[1]
    return max(*both, chain / 2) + 2 * model.params / (8 * 50e9)


NANO = {"hidden_size": 2048, "moe_intermediate_size": 768, "num_hidden_layers": 48}
NANO |= {"num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8}
NANO |= {"tie_word_embeddings": False, "vocab_size": 151936, "head_dim": 128}


def test_the_table_of_a_megatron_layout(folder):
    path = folder("30B", "Qwen3MoeConfig", num_key_value_heads=4, **NANO)
    layout = {"kind": "megatron", "ranks": 16, "tp": 2, "cp": 2, "pp": 2, "ep": 4}
    cfg = changed(Config(model=path), count=16, **layout)
    text = dry_run.explain(cfg, Config)
    assert len(text.splitlines()) <= 56 and max(map(len, text.splitlines())) <= 100
    shape = megatron_sizes.read_shape(cfg.model, cfg.policy)
    states = megatron_sizes.state_bytes(shape, cfg, 0)
    assert "GiB: stage 1 of 2, 2 replicas" in text  # the first keeps two rows
    peak = {"= peak, with reserve": megatron_sizes.trainer_bytes(shape, cfg)}
    check_gib(text, **states | peak)
    for label, value in megatron_sizes.token_bytes(shape, cfg.policy).items():
        assert cell(text, label) == f"{value:,.0f}"
    tokens = 256 * 16 * 65536 * pace.MEAN_SHARE / 2
    seconds = pace.traffic_seconds(shape, cfg, planned("h100"))
    sent = megatron_sizes.token_bytes(shape, cfg.policy)
    assert seconds["tp"] == pytest.approx(sent["tp"] * tokens / 450e9)
    assert seconds["pp"] == pytest.approx(sent["pp"] * tokens / 50e9)  # 16 ranks are two nodes
    assert "mask" not in text


@pytest.mark.parametrize(("fields", "message"), CASES["refused on megatron"])
def test_what_megatron_or_an_engine_cannot_do_is_refused(of_8b, fields, message):
    with pytest.raises(InputError, match=message):
        dry_run.explain(of_8b(kind="megatron", **fields), Config)


def test_what_megatron_cannot_train_is_refused(folder):
    with pytest.raises(InputError, match="nemotron_h, not gpt2"):
        gpt = folder("gpt", "GPT2Config")
        dry_run.explain(changed(Config(model=gpt), kind="megatron"), Config)


def test_splits_of_megatron_hold_whole_layouts(folder):
    layout = {"kind": "megatron", "tp": 2, "ep": 4}
    nano = folder("30B", "Qwen3MoeConfig", num_key_value_heads=4, **NANO)
    cfg = changed(Config(model=nano), count=16, ranks=16, row_tokens=16384, **layout)
    model = read_model(nano)
    best = pace.balance(model, cfg, h100(141))
    assert best.policy.ranks % 4 == 0 and best.engine.count + best.policy.ranks == 32
    assert pace.trainer_bytes(model, best) <= 141 * GIB


def test_only_changed_fields_are_listed():
    cfg = changed(Config(steps=7), lr=1e-6, engine={"args": {"max_num_seqs": 512}})
    assert dry_run.changed(cfg, Config) == [
        "changed (from)",
        f"{'  steps 7 (1000)':<50}policy.lr 1e-06 (3e-06)",
        "  engine.args {'max_num_seqs': 512} ({})",
    ]


@pytest.mark.parametrize(("fields", "expected"), CASES["does not fit"])
def test_what_does_not_fit_names_the_field_to_change(of_8b, fields, expected):
    text = dry_run.explain(of_8b(**fields), Config)
    assert [part for part in expected if part not in text] == []
    assert ("PROBLEM" in text) == bool(expected) and ("everything fits" in text) != bool(expected)


def test_a_data_file_that_is_not_there_does_not_fit(of_8b, data_files):
    cfg = of_8b(data={"train": "a.jsonl"})
    assert "everything fits" in dry_run.explain(cfg, Config)
    data_files.add("a.jsonl")
    text = dry_run.explain(cfg, Config)
    assert text.endswith("PROBLEM: data.train = 'a.jsonl': there is no such file")
    assert "everything fits" not in text


def test_jobs_are_counted_for_twice_the_estimate_and_by_the_jobs_length(of_8b, monkeypatch):
    """A job trains the whole steps between its start and Slurm's warning."""
    cfg = of_8b(steps=1000, save_before=1800, prompts_per_step=16)
    for hours in (4, 12):
        monkeypatch.setenv("JOB_SECONDS", str(hours * 3600))
        text = dry_run.explain(cfg, Config)
        step = float(re.search(r"= step +([\d,.]+)", text)[1].replace(",", ""))
        in_a_job = (hours * 3600 - 900 - 1800) // step
        (count, length) = re.search(r"--jobs=(\d+) of (\d+) h", text).groups()
        assert int(length) == hours and abs(int(count) - 2 * 1000 / in_a_job) <= 1
    assert int(count) > 1


def test_wandb_that_is_not_installed_is_noted(of_8b):
    """No problem: where a job is submitted it need not be there."""
    text = dry_run.explain(of_8b(wandb=True), Config)
    assert "note: W&B is not installed here: pip install wandb" in text
    assert "note: W&B" not in dry_run.explain(of_8b(), Config)


# --- teachers -------------------------------------------------------------------------------------


def test_teachers_are_counted_and_one_that_does_not_fit_is_a_problem(folder):
    """One of 8B fits a GPU, ten times as many layers do not, and fit four."""
    small = folder("8B", **QWEN_8B)
    big = folder("80B", **QWEN_8B | {"num_hidden_layers": 360})
    names = {"teachers": {"one": small, "two": big}, "routes": {"math": "two"}}
    data = {"train": "none.jsonl"}  # whose rows would say what each teacher scores
    cfg = changed(mopd.Config(model=small, **names, default_teacher="one"), gpu="h100", data=data)
    text = dry_run.explain(cfg, mopd.Config)
    problem = "PROBLEM: a rank of the teacher 'two' takes"
    assert problem in text and "PROBLEM: a rank of the teacher 'one'" not in text
    assert "raise ranks in teacher_layouts['two']" in text
    assert re.search(r"teachers +2  one 1, two 1", text)
    wide = dataclasses.replace(cfg, teacher_layouts={"two": {"ranks": 4}})
    text = dry_run.explain(wide, mopd.Config)
    assert problem not in text and re.search(r"teachers +5  one 1, two 4", text)
    busy = re.findall(r"scores 50% of the rows; busy (\d+)% of a step", text)
    assert len(busy) == 2 and max(map(int, busy)) > 0
    assert len(placement.gpus(wide)) == len(placement.gpus(cfg)) + 3


def test_a_teacher_that_is_slower_than_the_rest_binds_the_step(folder):
    small = folder("8B", **QWEN_8B)
    big = folder("80B", **QWEN_8B | {"num_hidden_layers": 360})
    cfg = mopd.Config(model=small, teachers={"one": big}, default_teacher="one")
    wide = changed(cfg, gpu="h100", engine={"count": 64}, policy={"ranks": 64})
    assert "bound by the teacher one" in dry_run.explain(wide, mopd.Config)
