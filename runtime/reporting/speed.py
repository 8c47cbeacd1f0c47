"""Computes a run's speed in the field's units: tokens per second, MFU, shares of waiting."""

from collections.abc import Collection, Mapping
from pathlib import Path

import ray

from policy.gpus import KNOWN
from policy.model_shape import read_model
from runtime.engines.speculation import Acceptance
from runtime.processes import placement
from runtime.reporting.metrics import SYNC
from settings.config import TrainingSettings

KIND = "accelerator_type:"


def of_cluster() -> set[str]:
    """Returns Ray's names for the cluster's GPU types, such as H100; empty without GPUs."""
    resources = ray.cluster_resources() if ray.is_initialized() else {}
    if not resources.get("GPU"):
        return set()
    kinds = {name.removeprefix(KIND) for name in resources if name.startswith(KIND)}
    return kinds or {"of no known kind"}


# A batch's tokens, prompts included; what the trainers computed for the batch; and what all engines
# did since the last weight update (runtime/engines/stat_logger.py).
OF_BATCH = ("batch_tokens", "train_tokens", "train_keys")
COUNTS = (*OF_BATCH, "engine_tokens", "drafts", "draft_tokens", "accepted_draft_tokens")


class Speed:
    """A run's speed metrics, on GPUs of the types that `of_cluster` names, or on CPUs."""

    def __init__(self, cfg: TrainingSettings, kinds: Collection[str]):
        self.cfg = cfg
        self.gpus = len(placement.gpus(cfg)) if kinds else 0
        known = [gpu for gpu in KNOWN if {gpu.name} == {*kinds}]
        self.peak = known[0].flops * cfg.policy.ranks if known else 0.0  # FLOPs per second
        self.model = read_model(cfg.model) if known else None
        self.drafts = Acceptance(Path(cfg.writes_to, "metrics.jsonl"))

    def of(self, step: Mapping[str, float]) -> dict[str, float]:
        """Returns the metrics of a step, with speed metrics instead of COUNTS."""
        found = {name: value for name, value in step.items() if name not in COUNTS}
        seconds = step.get("step_seconds", 0.0)
        training = step.get("train_seconds", 0.0)
        if not seconds:  # nothing was trained
            return found
        tokens = step["batch_tokens"]
        found |= {"tokens_per_second": tokens / seconds}
        if training:
            found |= {"train_tokens_per_second": step["train_tokens"] / training}
        if self.gpus:
            found |= {"tokens_per_second_per_gpu": tokens / seconds / self.gpus}
        if self.peak and training:
            found |= {"mfu": self.flops(step) / training / self.peak}
        if "wait_for_rollouts" in step:
            syncing = sum(step.get(name, 0.0) for name in SYNC)
            found |= {"wait_share": step["wait_for_rollouts"] / seconds}
            found |= {"sync_share": syncing / seconds}
        if "engine_tokens" in step:
            found |= {"engine_tokens_per_second": step["engine_tokens"] / seconds}
        drafts = step.get("drafts")
        if drafts:
            accepted = step["accepted_draft_tokens"]
            found |= {"draft_acceptance": accepted / step["draft_tokens"]}
            found |= {"accepted_length": 1 + accepted / drafts}
        return found

    def flops(self, step: Mapping[str, float]) -> float:
        """Estimates the FLOPs of training a step, without recomputed activations.

        A batch takes three passes, plus the passes that only score it.
        """
        assert self.model
        passes = 3 + self.cfg.scoring_passes
        frozen = bool(self.cfg.policy.lora_rank)
        return self.model.flops(step["train_tokens"], step["train_keys"], passes, frozen)
