"""What policy/rounding.py measures, against known answers and all weights of a policy."""

import shutil

import pytest
import test_fsdp
import torch
from safetensors.torch import load_file, save_file
from test_fsdp import SEQUENCES, loss_fn, opened, weights

from policy import rounding
from policy.rounding import Rounding

checkpoint = test_fsdp.checkpoint
process_group = test_fsdp.process_group


def matrix(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Weights that bf16 holds exactly, as those of most published models."""
    torch.manual_seed(0)
    return torch.randn(300, 100).bfloat16().to(dtype)


def compared(factor: float, dtype: torch.dtype = torch.float32) -> dict[str, float]:
    """The measures of weights that were multiplied by a factor."""
    start = matrix(dtype)
    return Rounding([("w", start)]).compare([("w", start * factor)])


def test_bf16_loses_a_small_update_and_keeps_a_large_one():
    assert compared(1.0) == {"bf16_changed_weights": 0}
    assert compared(1 + 1e-4) == {"bf16_changed_weights": 0, "bf16_lost_update": 1}
    found = compared(1.25)
    assert found["bf16_changed_weights"] == 1 and abs(found["bf16_lost_update"]) < 0.01


def test_weights_in_bf16_lose_nothing_that_could_be_measured():
    assert compared(1.25, torch.bfloat16) == {"bf16_changed_weights": 1}


def test_few_weights_stand_for_all(monkeypatch):
    whole = compared(1.003)
    monkeypatch.setattr(rounding, "SAMPLE", 3000)
    start = matrix()
    measure = Rounding([("w", start), ("of no row", torch.empty(0, 100))])
    assert len(measure.start["w"]) == 3000
    some = measure.compare([("w", 1.003 * start)])
    assert 0.2 < whole["bf16_changed_weights"] < 0.8 and whole == pytest.approx(some, abs=0.05)


@pytest.mark.parametrize(("lora_rank", "lr"), [(0, 1e-5), (3, 2e-6)])
def test_a_policy_measures_the_weights_that_it_exports(lora_rank, lr, checkpoint, tmp_path):
    folder = shutil.copytree(checkpoint("gpt2"), tmp_path / "model")
    exact = load_file(folder / "model.safetensors")
    exact = {name: w.bfloat16().float() for name, w in exact.items()}
    save_file(exact, folder / "model.safetensors", {"format": "pt"})
    policy = opened(folder, lora_rank=lora_rank, lr=lr, warmup_lr=lr)
    before = weights(policy)
    for _ in range(5):
        policy.forward_backward(SEQUENCES, loss_fn)
        measured = policy.optimizer_step()
    after = weights(policy)
    names = list(dict(policy._sharded()))  # no buffers
    start = torch.cat([before[name].flatten() for name in names])
    end = torch.cat([after[name].flatten() for name in names])
    changed = (start.bfloat16() != end.bfloat16()).double().mean().item()
    assert measured["bf16_changed_weights"] == pytest.approx(changed) and 0 < changed < 0.9
    rounded, update = (end.bfloat16() - start.bfloat16()).double(), (end - start).double()
    lost = 1 - (rounded @ update / (update @ update)).item()
    assert measured["bf16_lost_update"] == pytest.approx(lost, abs=1e-3) and lost > 0.1
