"""What is measured beside the loss, and where it is written.

Names are those of NeMo-RL's loss_functions.py; docs/grpo_async.md defines each.
"""

import dataclasses
import json
import math
import statistics
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm


def k3(log_ratio_T: Tensor) -> Tensor:
    """Schulman's k3 estimate of KL(p || q) per token [T]: log_ratio = log q - log p, x ~ p."""
    log_ratio_T = log_ratio_T.clamp(-20, 20)
    return log_ratio_T.exp() - 1 - log_ratio_T


def mismatch(logp_T: Tensor, old_logp_T: Tensor, engine_logp_T: Tensor) -> dict[str, Tensor]:
    """Per-token measures [T] of how far the trainer is from the engine that sampled."""
    gap_T = old_logp_T - engine_logp_T
    mixture_T = torch.logaddexp(old_logp_T, engine_logp_T) - math.log(2)
    divergence_T = k3(old_logp_T - mixture_T) + k3(engine_logp_T - mixture_T)
    return {
        "token_mult_prob_error": gap_T.abs().clamp(max=20).exp(),
        "gen_kl_error": k3(gap_T),
        "policy_kl_error": k3(-gap_T),
        "js_divergence_error": divergence_T / 2,
        "approx_entropy": -(logp_T - engine_logp_T).clamp(-20, 20).exp() * logp_T,
    }


@torch.no_grad()
def row_stats(loss: Tensor, batch, mask_T, error_N, trusted_N, measured: dict) -> dict[str, Tensor]:
    """What a packed row adds to the metrics: sums over its kept tokens `mask_T`, and counts.

    `measured` holds values [T] by name; a sequence's mean error [N] decided whether it is trusted.
    """
    sums = {k: torch.where(mask_T, v.detach(), 0.0).sum() for k, v in measured.items()}
    ratio_T = torch.where(mask_T, measured["probs_ratio"].detach(), 1.0)
    present_N = torch.bincount(batch.seq_T[batch.mask_T], minlength=len(error_N)) > 0
    kept_N = torch.bincount(batch.seq_T[mask_T], minlength=len(error_N)) > 0
    dropped_N = present_N & ~trusted_N
    return sums | {
        "loss": loss.detach(),
        "probs_ratio_min": ratio_T.min(),
        "probs_ratio_max": ratio_T.max(),
        "row_tokens": batch.mask_T.sum(),
        "row_sequences": present_N.sum(),
        "kept_tokens": mask_T.sum(),
        "kept_sequences": kept_N.sum(),
        "nonfinite_engine_logprobs": (batch.mask_T & ~batch.engine_logp_T.isfinite()).sum(),
        "num_masked_seqs": dropped_N.sum(),
        "masked_correct_pct": (dropped_N & (batch.reward_N == 1)).sum(),
        "seq_mult_prob_error": torch.where(present_N, error_N, 0.0).sum(),
        "seq_mult_prob_error_max": torch.where(present_N, error_N, 0.0).max(),
    }


def reduce_stats(rows: list[dict[str, Tensor]]) -> dict[str, float]:
    """One dict of the rows' stats, over all rows and ranks: sums, and extremes by their suffix."""
    sign = {k: {"_min": -1, "_max": 1}.get(k[-4:], 0) for k in rows[0]}
    table = torch.stack([torch.stack([r[k].double() for k in sign]) for r in rows])
    sign_K = torch.tensor(list(sign.values()), device=table.device)
    sums, peaks = table.sum(0), (table * sign_K).amax(0)
    if dist.is_initialized():
        dist.all_reduce(sums)
        dist.all_reduce(peaks, op=dist.ReduceOp.MAX)
    picked = torch.where(sign_K == 0, sums, peaks).tolist()
    return {k: -v if s < 0 else v for (k, s), v in zip(sign.items(), picked, strict=True)}


def step_metrics(total: dict[str, float], batch_tokens: int, grad_scale: float) -> dict[str, float]:
    """NeMo-RL's training metrics from the reduced stats of one update."""
    kept, sequences = max(total["kept_tokens"], 1), max(total["row_sequences"], 1)
    per_token = (
        "probs_ratio probs_ratio_clamped sampling_importance_ratio is_oob_ratio kl_penalty "
        "token_mult_prob_error gen_kl_error policy_kl_error js_divergence_error approx_entropy"
    )
    # Where every group agreed nothing was computed, and 0 would be a false value.
    metrics = {k: total[k] / kept for k in per_token.split() if total["kept_tokens"]}
    whole = "probs_ratio_min probs_ratio_max seq_mult_prob_error_max num_masked_seqs"
    metrics |= {k: total[k] for k in (whole + " nonfinite_engine_logprobs").split()}
    dropped_tokens = total["row_tokens"] - total["kept_tokens"]
    return metrics | {
        "loss": total["loss"] * grad_scale,
        "seq_mult_prob_error": total["seq_mult_prob_error"] / sequences,
        "masked_correct_pct": total["masked_correct_pct"] / max(total["num_masked_seqs"], 1),
        "num_valid_samples": total["kept_sequences"],
        "global_valid_toks": batch_tokens - dropped_tokens,
    }


def mean_metrics(updates: list[dict[str, float]]) -> dict[str, float]:
    """Mean over a batch's updates of each metric, over those that have it."""
    names = {name: None for metrics in updates for name in metrics}
    return {k: statistics.fmean(m[k] for m in updates if k in m) for k in names}


def rollout_metrics(groups: list, step: int) -> dict[str, float]:
    """What a batch of groups was made of; `step` is the version that trains on it."""
    infos = [info for group in groups for info in group.infos]
    lags = [step - info.oldest_version for info in infos]

    def mean(values) -> float:
        return sum(values) / len(infos)

    return {
        "reward": mean(info.reward for info in infos),
        "lag_mean": mean(lags),
        "lag_max": max(lags),
        "mixed_version_samples": mean(i.oldest_version < i.newest_version for i in infos),
        "response_tokens": mean(info.response_tokens for info in infos),
        "truncated_samples": mean(info.truncated for info in infos),
        "zero_variance_groups": sum(not any(i.has_gradient for i in g.infos) for g in groups)
        / len(groups),
        "global_valid_seqs": sum(info.trained_tokens > 0 for info in infos),
    }


class Log:
    """metrics.jsonl, TensorBoard, W&B if asked for, and two progress bars."""

    def __init__(self, cfg):
        folder = Path(cfg.run_dir)
        folder.mkdir(parents=True, exist_ok=True)
        settings = dataclasses.asdict(cfg)
        (folder / "config.json").write_text(json.dumps(settings, indent=1))
        self.file = open(folder / "metrics.jsonl", "a", buffering=1)  # noqa: SIM115
        from torch.utils.tensorboard import SummaryWriter  # a second of imports, after all checks

        self.board, self.wandb = SummaryWriter(str(folder)), None
        if cfg.wandb:
            import wandb

            self.wandb = wandb.init(dir=folder, name=folder.name, config=settings)
        self.began = time.time()
        self.steps = tqdm(total=cfg.steps, desc="steps", unit="step", position=0)
        samples = cfg.prompts_per_step * cfg.group_size
        self.samples = tqdm(total=samples, desc="rollouts", unit="sample", position=1, leave=False)

    def write(self, step: int, metrics: dict[str, float]) -> None:
        """Appends the metrics of the step that led to policy version `step`."""
        line = {"step": step, "seconds": time.time() - self.began} | metrics
        self.file.write(json.dumps(line) + "\n")
        for name, value in metrics.items():
            self.board.add_scalar(name, value, step)
        if self.wandb:
            self.wandb.log(metrics, step=step)
        if "validation_reward" in metrics:
            self.note(f"step {step}: validation reward {metrics['validation_reward']:.3f}")

    def step(self, step: int, metrics: dict[str, float]) -> None:
        """Writes a training step and moves its bar on."""
        self.write(step, metrics)
        self.steps.update()
        self.steps.set_postfix(
            reward=f"{metrics['reward']:.3f}",
            lag=f"{metrics['lag_mean']:.2f}",
            trainer_waited=f"{metrics['wait_for_rollouts']:.2f}s",
            engines_waited=f"{metrics['wait_for_training']:.2f}s",
        )

    def rollouts(self, ready: int) -> None:
        """Shows how many samples of the step that the trainer waits for are ready."""
        self.samples.update(ready - self.samples.n)

    def note(self, message: str) -> None:
        """A line above the bars."""
        tqdm.write(message)

    def close(self) -> None:
        """Ends the bars and flushes what is buffered."""
        for part in (self.samples, self.steps, self.file, self.board):
            part.close()
        if self.wandb:
            self.wandb.finish()
