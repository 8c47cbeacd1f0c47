"""policy/sync/adapter_sync.py: what engines make of adapters alone, against the merged weights."""

import json
import os
import re
from pathlib import Path

import pytest
import test_fsdp
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from test_fsdp import SEQUENCES, assert_same, loss_fn, opened, weights
from torch.distributed.tensor.debug import CommDebugMode

from policy.fsdp import FSDPPolicy
from policy.sync.adapter_sync import LEFT, PRODUCT, RIGHT, AdapterUpdate, Base, outgoing
from policy.sync.verification import vectors
from support.ranks import in_forks

checkpoint = test_fsdp.checkpoint
process_group = test_fsdp.process_group
RANK = 3  # that two ranks do not share evenly
CPU = torch.device("cpu")
GATE = "model.layers.0.mlp.gate_proj.weight"
UP = "model.layers.0.mlp.up_proj.weight"


def trained(folder: Path, rank: int = 0, world: int = 1, steps: int = 3, **changes) -> FSDPPolicy:
    """A policy whose adapters are not 0 any more."""
    policy = opened(folder, **{"lora_rank": RANK, "lr": 1e-2, "warmup_steps": 0} | changes)
    for _ in range(steps):
        policy.forward_backward(test_fsdp.split_rows(rank, world), loss_fn)
        policy.optimizer_step()
    return policy


def sent(update: AdapterUpdate) -> dict[str, torch.Tensor]:
    """What an update sends, by name; it is what was announced."""
    tensors = dict(update.named_weights())
    metas = update.weight_metas()
    assert [meta.name for meta in metas] == list(tensors)
    for meta, tensor in zip(metas, tensors.values(), strict=True):
        assert (meta.shape, f"torch.{meta.dtype}") == (tuple(tensor.shape), str(tensor.dtype))
    return tensors


def merged(base: Base, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What an engine makes of it."""
    return dict(base.merged(iter(tensors.items()), CPU))


@pytest.mark.parametrize("family", ["qwen3_tied", "llama", "gpt2"])
@pytest.mark.parametrize("targets", [(), "some"])
@pytest.mark.parametrize("at_once", [1, 50, 1 << 26])
def test_engines_make_the_merged_weights(family, targets, at_once, checkpoint, monkeypatch):
    monkeypatch.setattr("policy.sync.adapter_sync.AT_ONCE", at_once)
    some = ("c_attn",) if family == "gpt2" else ("q_proj", "down_proj")
    policy = trained(checkpoint(family), lora_targets=some if targets else ())
    update = outgoing(policy)
    tensors = sent(update)
    made, whole = merged(update.base, tensors), weights(policy)
    assert list(made) == list(whole)
    assert_same(made, whole, 1e-6)
    before = load_file(checkpoint(family) / "model.safetensors")
    for name, tensor in made.items():
        has_adapter = name in policy.adapters.layers
        assert has_adapter == (name + LEFT in tensors) == (not torch.equal(tensor, before[name]))
    left = [name for name in tensors if name.endswith(LEFT)]
    assert len(left) == len(policy.adapters.layers)


def test_the_first_update_is_the_checkpoint_to_the_bit(checkpoint):
    policy = trained(checkpoint("qwen3"), steps=0)
    update = outgoing(policy)
    made = merged(update.base, sent(update))
    assert_same(made, load_file(checkpoint("qwen3") / "model.safetensors"), 0)


def test_nothing_drifts_over_many_updates(checkpoint):
    """An engine that took every update has what one has that took the last alone.

    GRPO_UPDATES=1000: more.
    """
    policy = trained(checkpoint("qwen3"), steps=0, lr=1e-3)
    update = outgoing(policy)
    for _ in range(int(os.environ.get("GRPO_UPDATES", "30"))):
        policy.forward_backward(SEQUENCES, loss_fn)
        policy.optimizer_step()
        made = merged(update.base, sent(update))
    fresh = Base(update.base.folder, update.base.scale, update.base.metas)
    assert_same(made, merged(fresh, sent(update)), 0)


def test_a_bf16_base_is_rounded_once(checkpoint, tmp_path):
    """As on a GPU: the checkpoint and the engine have bf16, the sum is made in float32."""
    policy = trained(checkpoint("qwen3"))
    update = outgoing(policy)
    tensors = sent(update)
    metas = [meta._replace(dtype="bfloat16") for meta in update.base.metas]
    made = merged(update.base._replace(metas=metas), tensors)
    for name, tensor in weights(policy).items():
        if tensor.dim() > 1:
            gap = (made[name].float() - tensor).abs()
            assert made[name].dtype == torch.bfloat16 and (gap <= tensor.abs() / 256 + 1e-6).all()


def test_an_update_is_small(checkpoint):
    """At the sizes of Qwen3-8B and rank 16: 16.4 GB whole, and this; by the shapes alone."""
    H, FF, KV, V, layers = 4096, 12288, 1024, 151936, 36
    shapes = [(H, H), (KV, H), (KV, H), (H, H), (FF, H), (FF, H), (H, FF)]
    adapters = layers * sum(16 * (rows + columns) for rows, columns in shapes)
    products = 4 * (layers * sum(rows for rows, _ in shapes) + 2 * V)
    assert 4 * adapters == pytest.approx(175e6, rel=0.01)
    assert 4 * products == pytest.approx(25e6, rel=0.1)
    policy = trained(checkpoint("qwen3"))
    tensors = sent(outgoing(policy))
    own = {name for name in tensors if ":" not in name}
    assert own == {name for name, tensor in weights(policy).items() if tensor.dim() == 1}


def test_files_that_transformers_does_not_read_are_not_read(checkpoint, tmp_path):
    """Older weights under other names, and one that is no file of tensors."""
    for path in checkpoint("qwen3").iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    held = load_file(tmp_path / "model.safetensors")
    save_file({name: x + 1 for name, x in held.items()}, tmp_path / "model_old.safetensors")
    (tmp_path / "broken.safetensors").write_text("version https://git-lfs.github.com/spec/v1")
    policy = trained(tmp_path)
    assert_same(merged(outgoing(policy).base, sent(outgoing(policy))), weights(policy), 1e-6)
    names = sorted(held)
    parts = {"a.safetensors": names[:9], "b.safetensors": names[9:]}
    for file, some in parts.items():
        save_file({name: held[name] for name in some}, tmp_path / file, {"format": "pt"})
    (tmp_path / "model.safetensors").unlink()
    homes = {name: file for file, some in parts.items() for name in some}
    index = {"metadata": {}, "weight_map": homes}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    policy = trained(tmp_path)
    assert_same(merged(outgoing(policy).base, sent(outgoing(policy))), weights(policy), 1e-6)


def test_a_folder_that_has_lost_its_weights_is_named(checkpoint, tmp_path):
    policy = trained(checkpoint("qwen3"), steps=0)
    update = outgoing(policy)
    tensors = sent(update)
    base = update.base._replace(folder=str(tmp_path))
    with pytest.raises(RuntimeError, match=rf"{tmp_path}, .* no longer has model.embed_tokens"):
        merged(base, tensors)


def other(policy: FSDPPolicy, **changes) -> AdapterUpdate:
    """An update of another policy of the same model."""
    return outgoing(trained(Path(policy.folder), **changes))


def swap(tensors: dict, one: str, two: str, *ends: str) -> None:
    for end in ends:
        tensors[one + end], tensors[two + end] = tensors[two + end], tensors[one + end]


def fault(kind: str, policy: FSDPPolicy, tensors: dict, tmp_path: Path) -> Base:
    """Changes what an engine gets; returns the base that it adds this to."""
    base = outgoing(policy).base
    stale = sent(other(policy, steps=2))
    match kind:
        case "an adapter is ignored":
            del tensors[GATE + LEFT], tensors[GATE + RIGHT]
        case "all adapters are ignored":
            for name in [name for name in tensors if name.endswith((LEFT, RIGHT))]:
                del tensors[name]
        case "a stale adapter":
            tensors |= {GATE + end: stale[GATE + end] for end in (LEFT, RIGHT)}
        case "a stale factor":
            tensors[GATE + LEFT] = stale[GATE + LEFT]
        case "all are stale":
            tensors |= {name: x for name, x in stale.items() if name.endswith((LEFT, RIGHT))}
        case "two layers swapped":
            swap(tensors, GATE, UP, LEFT, RIGHT)
        case "two layers swapped left":
            swap(tensors, GATE, UP, LEFT)
        case "another rank":
            wide = sent(other(policy, lora_rank=RANK + 2))
            tensors |= {GATE + end: wide[GATE + end] for end in (LEFT, RIGHT)}
        case "another scale":
            return base._replace(scale=base.scale * 2)
        case "a row of the adapter":
            tensors[GATE + LEFT][5] *= 1.5
        case "a NaN":
            tensors[GATE + RIGHT][0, 0] = torch.nan
        case "another base":
            folder = tmp_path / "base"
            folder.mkdir()
            held = load_file(f"{policy.folder}/model.safetensors")
            held["model.embed_tokens.weight"][3] *= 1.01  # which has no adapter
            save_file(held, folder / "model.safetensors")
            return base._replace(folder=str(folder))
        case _:
            raise AssertionError(kind)
    return base


FAULTS = {
    "an adapter is ignored": GATE,
    "all adapters are ignored": "model.layers.0.",
    "a stale adapter": GATE,
    "a stale factor": GATE,
    "all are stale": "model.layers.0.",
    "two layers swapped": GATE,
    "two layers swapped left": GATE,
    "another rank": GATE,
    "another scale": "model.layers.0.",
    "a row of the adapter": GATE + ", row 5:",
    "a NaN": GATE,
    "another base": "model.embed_tokens.weight, row 3:",
}


@pytest.mark.parametrize("kind", FAULTS)
def test_every_fault_of_an_adapter_is_named(kind, checkpoint, tmp_path):
    policy = trained(checkpoint("qwen3"))
    tensors = {name: x.clone() for name, x in sent(outgoing(policy)).items()}
    base = fault(kind, policy, tensors, tmp_path)
    with pytest.raises(RuntimeError, match="do not add up to the trainer's weight") as caught:
        merged(base, tensors)
    assert str(caught.value).startswith(FAULTS[kind])


def test_a_product_is_made_without_merging(checkpoint):
    """So a merging that is wrong on both sides would not agree with it."""
    policy = trained(checkpoint("qwen3"))
    tensors = sent(outgoing(policy))
    whole = weights(policy)  # merged by peft
    for name in policy.adapters.layers:
        expected_RV = whole[name] @ vectors(whole[name].shape[1], CPU).T
        torch.testing.assert_close(tensors[name + PRODUCT], expected_RV, rtol=1e-5, atol=1e-5)


def test_a_checkpoint_with_other_names_is_sent_merged(checkpoint, tmp_path, capsys):
    for path in checkpoint("qwen3").iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    held = load_file(tmp_path / "model.safetensors")
    renamed = {re.sub(r"^model\.", "", name): tensor for name, tensor in held.items()}
    save_file(renamed, tmp_path / "model.safetensors", {"format": "pt"})
    policy = trained(tmp_path, steps=0)
    assert outgoing(policy) is policy
    said = capsys.readouterr().out
    assert "updates carry merged weights, not adapters alone" in said and "embed_tokens" in said


def test_without_adapters_all_weights_are_sent(checkpoint):
    policy = opened(checkpoint("qwen3"))
    assert outgoing(policy) is policy


def rank_main(rank: int, folder: str, model: str) -> None:
    """One of two ranks; writes what it sends."""
    torch.set_num_threads(1)
    torch.cuda.is_available = lambda: False
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    torch.manual_seed(7)
    policy = trained(Path(model), rank, 2)
    with CommDebugMode() as calls:
        tensors = sent(outgoing(policy))
    gathers = sum(calls.get_comm_counts().values())
    torch.save((tensors, weights(policy), gathers), f"{folder}/rank{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_tied", "gpt2"])
def test_two_ranks_send_what_one_would(family, checkpoint, tmp_path):
    in_forks(rank_main, (str(tmp_path), checkpoint(family)), 2)
    torch.manual_seed(7)
    alone = trained(checkpoint(family))
    for rank in range(2):
        tensors, whole, gathers = torch.load(tmp_path / f"rank{rank}.pt", weights_only=False)
        assert gathers <= len(tensors), "a matrix was gathered whole"
        assert_same(tensors, sent(outgoing(alone)), 1e-5)
        assert_same(merged(outgoing(alone).base, tensors), whole, 1e-6)
