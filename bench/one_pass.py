"""Measures trainer seconds per batch: one pass, as in grpo_async.py, against the recipe's two.

    python bench/one_pass.py [REPETITIONS]

NeMo-RL's recipe for Nemotron 3 Super computes the logprobs of the whole batch before it trains, for
the sequence-error filter, the importance weights and the divisor. With one update per batch, the
forward pass of training computes the same logprobs again. One pass is the trainer as shipped,
metrics included; `two_passes` is the recipe, written here by hand. Each has its own policy and
trains the same batches in turn; the gradients and weights of both must stay equal up to rounding.

The policy is a random Qwen3 under FSDP2, one rank, one CPU thread, with activations recomputed as
in the recipe. Seconds are CPU time, so that other work on the machine hardly affects them. The
filter drops one sequence, and some weights are truncated. The dropped sequence has a nonzero
advantage: our trainer skips sequences whose advantage is zero, so these cannot fail the filter and
stay in the divisor.
"""

import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parent.parent))

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from grpo_async import Batch, Config, Group, Trainer, group_advantages, pack, plan_step
from policy import Policy
from policy.factory import open_policy
from policy.fsdp import FSDPPolicy
from policy.packing import Update
from rollout.episode import Sample

P = 4  # groups
LENGTHS = (384, 320, 192, 128)  # tokens of a group's samples: two groups fill a row
PROMPT = 32
SIZE = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 6, "vocab_size": 4096}
SIZE |= {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64}
ROUNDING = 1e-4  # allowed difference between the gradients, relative to their norm


def two_passes(policy: Policy, rows: list[Batch]) -> None:
    """Runs a pass for the previous logprobs, then the training pass; `rows` are all samples."""
    weights = []
    for row, previous_T in zip(rows, policy.logprobs(rows), strict=True):
        gap_T = torch.where(row.mask_T, previous_T - row.engine_logp_T, 0.0)
        trained_NT = torch.nn.functional.one_hot(row.seq_T).T.float() * row.mask_T
        error_N = trained_NT @ gap_T.abs().exp() / trained_NT.sum(1)
        kept_T = row.mask_T & (error_N <= 2)[row.seq_T]
        weights.append(gap_T.exp().clamp(max=5) * kept_T)
    divisor = sum(int(weight_T.count_nonzero()) for weight_T in weights)
    weight_of_row = iter(weights)

    def loss_fn(logp_T: Tensor, row: Batch) -> tuple[Tensor, None]:
        ratio_T = (logp_T - logp_T.detach()).exp()
        return -(next(weight_of_row) * row.advantage_T * ratio_T).sum() / divisor, None

    policy.forward_backward(rows, loss_fn)
    policy.optimizer_step()


def make_groups(policy: Policy, agreeing: int, cfg: Config) -> list[Group]:
    """Makes random groups; the samples of the last `agreeing` have equal rewards."""
    random = np.random.default_rng(0)
    groups = []
    for g in range(P):
        rewards_G = torch.from_numpy(random.normal(size=len(LENGTHS)) * (g < P - agreeing))
        advantages_G = group_advantages(rewards_G, cfg.advantage)
        samples = []
        for length, advantage in zip(LENGTHS, advantages_G, strict=True):
            mask_T = np.arange(length) >= PROMPT
            tokens_T = random.integers(0, SIZE["vocab_size"], length)
            flaw_T = np.zeros(length, np.int8)
            made = Sample(tokens_T, mask_T, 0.0 * tokens_T, mask_T - 1, flaw_T, truncated=False)
            made.advantage = float(advantage)
            (logp_T,) = policy.logprobs([pack([made], Update(1, 1, []), cfg)])
            # The engine is off by 1 nat at each token of one sequence, and by 2 at 1 % of the
            # others.
            gap_T = random.normal(0, 0.02, length) + 2 * (random.random(length) < 0.01)
            made.engine_logp_T = logp_T.numpy() - (gap_T if samples or g else 1.0)
            samples.append(made)
        groups.append(Group(g, 0, g + 1, [sample.info() for sample in samples], samples))
    return groups


def packed(groups: list[Group], cfg: Config) -> tuple[Update, list[Batch]]:
    """Returns the update of a single rank, and its rows."""
    (share,) = plan_step(groups, cfg)
    (update,) = share.updates
    rows = [[groups[share.groups[g]].samples[j] for g, j in row] for row in update.rows]
    return update, [pack(samples, update, cfg) for samples in rows]


def flat(tensors: Iterable[DTensor]) -> Tensor:
    """Copies the local shards of tensors, joined end to end."""
    return torch.cat([tensor.detach().to_local().flatten() for tensor in tensors])


def gradient(policy: FSDPPolicy) -> Tensor:
    """Returns AdamW's running mean of the gradients."""
    return flat(policy.optimizer.state[p]["exp_avg"] for p in policy.model.parameters())


def main() -> None:
    """Trains both policies in turn and prints one table."""
    repetitions = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        Qwen3ForCausalLM(Qwen3Config(**SIZE)).save_pretrained(folder)
        # Clipping the gradient norm would hide a wrong divisor.
        settings = {"row_tokens": 2 * sum(LENGTHS), "max_grad_norm": 1e9}
        ours = Config(model=folder, policy=settings)
        recipe = Config(model=folder, policy=settings, loss={"skip_zero_advantage": False})
        trainer = Trainer(ours)
        trainer.start(0, trainer.open_store(1))
        policy = open_policy(folder, recipe.policy)
        assert isinstance(policy, FSDPPolicy)
    start = flat(policy.model.parameters())
    print(f"{len(start) / 1e6:.0f}M parameters, {P} x {sum(LENGTHS)} tokens; median (range)\n")
    print("| groups that agree | one pass, s | two passes, s | ratio |\n|---|---|---|---|")
    for agreeing in (0, P // 2):
        groups = make_groups(policy, agreeing, recipe)
        work: list[Callable] = [partial(trainer.update, *packed(groups, ours))]
        work += [partial(two_passes, policy, packed(groups, recipe)[1])]
        seconds: list[list[float]] = [[], []]
        for repetition in range(repetitions):
            for i in (0, 1) if repetition % 2 else (1, 0):
                began = time.process_time()
                work[i]()
                seconds[i].append(time.process_time() - began)
            mine, theirs = gradient(trainer.policy), gradient(policy)
            error = float((mine - theirs).norm() / theirs.norm())
            assert error < ROUNDING, f"the gradients differ by {error:.1e}"
        ratios = [two / one for one, two in zip(*seconds, strict=True)]
        columns = (*seconds, ratios)
        cells = [f"{median(x):.2f} ({min(x):.2f}-{max(x):.2f})" for x in columns]
        print(f"| {agreeing} of {P} | {' | '.join(cells)} |", flush=True)
    mine, theirs = flat(trainer.policy.model.parameters()), flat(policy.model.parameters())
    moved = float((mine - theirs).norm() / (theirs - start).norm())
    print(f"\nDifference of the gradients: {error:.1e} of their norm;", end=" ")
    print(f"of the weights: {moved:.1e} of what training changed")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
