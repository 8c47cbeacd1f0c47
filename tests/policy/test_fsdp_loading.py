"""Each rank reads its own rows of a checkpoint; together the ranks hold what one reads alone."""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file, save_file

from policy.fsdp import FSDPPolicy
from settings.network import PolicySettings
from support.ranks import in_fresh_forks

ROWS = {"vocab_size": 97}  # no number of ranks divides them
SIZES = ROWS | {"hidden_size": 36, "intermediate_size": 60, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 10}
WORLDS = (4, 2)
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
GPT2_SIZES = ROWS | {"n_embd": 36, "n_layer": 2, "n_head": 4, "n_positions": 64}


class Counted:
    """A safetensors file, or one of its slices, that adds up the bytes that are read from it."""

    read = 0

    def __init__(self, inner):
        self.inner = inner

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def get_slice(self, name):
        return Counted(self.inner.get_slice(name))

    def get_tensor(self, name):
        raise AssertionError(f"{name} was read whole")

    def __getitem__(self, rows):
        found = self.inner[rows]
        Counted.read += found.nbytes
        return found


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, str]:
    """Checkpoints of several shapes; `hub` is the name of one in a cache of the hub."""
    root = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    for kind, limit in {"tied": "1GB", "sharded": "20KB"}.items():
        config = transformers.Qwen3Config(**SIZES, tie_word_embeddings=kind == "tied")
        model = transformers.Qwen3ForCausalLM(config).to(torch.bfloat16)
        model.save_pretrained(root / kind, max_shard_size=limit)
    index = json.loads((root / "sharded/model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 3
    # A file has a tensor for each expert, a model one for all.
    sparse = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**SIZES, **EXPERTS))
    sparse.save_pretrained(root / "experts")
    # As OpenAI's own: no prefix, and masks as buffers that no model takes any more.
    gpt2 = transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2_SIZES))
    gpt2.save_pretrained(root / "gpt2")
    state = load_file(root / "gpt2/model.safetensors")
    state = {name.removeprefix("transformer."): tensor for name, tensor in state.items()}
    save_file(state, root / "gpt2/model.safetensors", {"format": "pt"})
    snapshot = root / "cache/models--org--name/snapshots/0"
    snapshot.parent.mkdir(parents=True)
    snapshot.symlink_to(root / "tied")
    (snapshot.parent.parent / "refs").mkdir()
    (snapshot.parent.parent / "refs/main").write_text("0")
    kinds = ("tied", "sharded", "experts", "gpt2")
    return {kind: str(root / kind) for kind in kinds} | {"hub": "org/name"}


def rank_main(rank: int, folder: str, models: dict[str, str]) -> None:
    """One of four ranks, then of two; writes what it read and what it holds."""
    torch.set_num_threads(1)
    torch.cuda.is_available = lambda: False
    opened = transformers.modeling_utils.safe_open
    transformers.modeling_utils.safe_open = lambda *how, **more: Counted(opened(*how, **more))
    for world in WORLDS:
        if rank < world:
            store = f"file://{folder}/store{world}"
            dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world)
            seen = {kind: loaded(model, world) for kind, model in models.items()}
            torch.save(seen, f"{folder}/{rank}_of_{world}.pt")
            dist.destroy_process_group()


def loaded(model: str, world: int) -> dict:
    """What a rank reads of a model, and what it holds then."""
    Counted.read = 0
    policy = FSDPPolicy(model, PolicySettings(ranks=world), temperature=1.0)
    shards = [parameter.to_local() for parameter in policy.model.parameters()]
    held = sum(shard.untyped_storage().nbytes() for shard in shards)
    weights = {name: weight.clone() for name, weight in policy.named_weights()}
    buffers = dict(policy.lm.named_buffers())
    return {"read": Counted.read, "held": held, "weights": weights, "buffers": buffers}


@pytest.mark.slow
def test_each_rank_reads_its_rows_alone(models, tmp_path, monkeypatch):
    cache = str(Path(models["tied"]).parent / "cache")
    for name, value in {"HF_HUB_CACHE": cache, "HF_HUB_OFFLINE": "1"}.items():
        monkeypatch.setenv(name, value)
    in_fresh_forks(rank_main, (str(tmp_path), models), max(WORLDS))
    for kind in models:
        folder = models["tied" if kind == "hub" else kind]
        files = [load_file(path) for path in Path(folder).glob("*.safetensors")]
        written = sum(tensor.nbytes for file in files for tensor in file.values())
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        weights, buffers = dict(model.named_parameters()), dict(model.named_buffers())
        size = sum(tensor.nbytes for tensor in weights.values())
        for world in WORLDS:
            paths = [tmp_path / f"{rank}_of_{world}.pt" for rank in range(world)]
            ranks = [torch.load(path, weights_only=False)[kind] for path in paths]
            assert sum(rank["read"] for rank in ranks) == written
            assert max(rank["read"] for rank in ranks) <= 1.05 * written / world
            assert max(rank["held"] for rank in ranks) <= 1.05 * size / world
            for rank in ranks:
                assert_equal(rank["weights"], weights)
                assert_equal(rank["buffers"], buffers)


def assert_equal(actual: dict, expected: dict) -> None:
    """Tensors by name, to the bit."""
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert actual[name].dtype == tensor.dtype and torch.equal(actual[name], tensor), name
