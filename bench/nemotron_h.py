"""Trains, saves and resumes a tiny Nemotron-H in bf16: does a checkpoint lose anything?

    python bench/nemotron_h.py [megatron | transformers]

Trains with policy/megatron on one rank if Transformer Engine and mamba-ssm are installed, else with
transformers' own modelling code and torch's AdamW, which tests the model's kernels and dtypes, but
not our trainer. A loaded model must equal the saved one bitwise. Its next step must match that of
the original model, up to the rounding of kernels: without its moments, a loaded model would move
elsewhere. On a CPU, Megatron computes in float32.
"""

import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
from bench.random_rows import Row, row  # noqa: E402
from support.tiny_models import ROUTED, nemotron  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LR = 0.01  # large enough to move bf16
ROW = (96, 48, 512)  # tokens per row, tokens per sequence, vocabulary
APART = 0.1  # allowed difference between two equal steps, relative to the norm of a step


class ByMegatron:
    """policy/megatron on one rank."""

    def __init__(self, folder: str):
        from policy.megatron.policy import MegatronPolicy
        from settings.network import PolicySettings

        settings = PolicySettings(kind="megatron", lr=LR, warmup_steps=0)
        self.policy = MegatronPolicy(folder, settings, 1.0, 0, 600.0)

    def step(self, row: Row) -> None:
        self.policy.forward_backward([row], lambda logp_T, row: (-logp_T.mean(), {}))
        self.policy.optimizer_step()

    def saved(self, folder: str, model: str) -> "ByMegatron":
        """Saves a checkpoint; returns another trainer that continues from it."""
        self.policy.save(folder)()
        made = ByMegatron(model)
        made.policy.load(folder)
        return made

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: w.cpu().clone() for name, w in self.policy.named_weights() if w is not None}


class ByTransformers:
    """transformers' modelling code."""

    def __init__(self, folder: str):
        self.lm = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(DEVICE)
        self.optimizer = torch.optim.AdamW(self.lm.parameters(), lr=LR, weight_decay=0.0)

    def step(self, row: Row) -> None:
        tokens_NT = row.tokens_T.view(2, -1).to(DEVICE)
        self.lm(input_ids=tokens_NT, labels=tokens_NT, use_cache=False).loss.backward()
        torch.nn.utils.clip_grad_norm_(self.lm.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def saved(self, folder: str, model: str) -> "ByTransformers":
        """Saves a checkpoint; returns another trainer that continues from it."""
        self.lm.save_pretrained(folder)
        torch.save(self.optimizer.state_dict(), f"{folder}/optimizer.pt")
        made = ByTransformers(folder)
        made.optimizer.load_state_dict(torch.load(f"{folder}/optimizer.pt", map_location=DEVICE))
        return made

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: w.detach().cpu().clone() for name, w in self.lm.state_dict().items()}


def apart(one: dict, other: dict) -> float:
    """Returns the norm of the difference between all weights."""
    squares = (float((one[name].double() - other[name].double()).square().sum()) for name in one)
    return sum(squares) ** 0.5


def main() -> None:
    """Exits with a message if something is lost."""
    kernels = all(find_spec(name) for name in ("transformer_engine", "mamba_ssm"))
    how = sys.argv[1] if len(sys.argv) > 1 else "megatron" if kernels else "transformers"
    dist.init_process_group(
        "nccl" if DEVICE == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1
    )
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        made = AutoModelForCausalLM.from_config(nemotron("ME*E", **ROUTED, vocab_size=ROW[2]))
        made.to(torch.bfloat16).save_pretrained(f"{folder}/model")
        of = {"megatron": ByMegatron, "transformers": ByTransformers}[how]
        trained = of(f"{folder}/model")
        for seed in range(3):
            trained.step(row(*ROW, seed))
        before = trained.weights()
        again = trained.saved(f"{folder}/saved", f"{folder}/model")
        loaded = again.weights()
        lost = [name for name in before if not torch.equal(before[name], loaded[name])]
        for policy in (trained, again):
            policy.step(row(*ROW, 3))
        after = trained.weights()
        share = apart(after, again.weights()) / apart(after, before)
    dist.destroy_process_group()
    if lost or not share < APART:
        sys.exit(f"by {how}: changed {lost[:3]}, the next step ends {share:.1%} apart")
    kinds = sorted({str(w.dtype).removeprefix("torch.") for w in before.values()})
    print(f"{len(before)} tensors of {', '.join(kinds)} resumed by {how}, {share:.1%} apart")


if __name__ == "__main__":
    main()
