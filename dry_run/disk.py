"""Counts the bytes that a run writes to its folder.

A line of rollouts.jsonl, and what else a step writes, are as measured in the tiny job with 112
rollouts per step.
"""

import math

from dry_run import pace
from policy.model_shape import Model
from settings.config import RunSettings, TrainingSettings

LINE = 270  # of a rollout, without its texts
TEXT = 4  # assumed: of a token's text
METRICS = 6_000  # of a step, as JSON lines and for TensorBoard
OTHERS = 2_600  # of a step with rollouts: mismatch.jsonl, and an engine's log
SAMPLED = 18  # of a token in samples/: id, mask, version, flaw, logprobs of engine and trainer
UNITS = {"TB": 1e12, "GB": 1e9, "MB": 1e6, "KB": 1e3}


def step_bytes(cfg: TrainingSettings) -> dict[str, float]:
    """Returns the bytes of a training step by what they are; prompts are not counted."""
    if not isinstance(cfg, RunSettings):
        return {"metrics": METRICS}
    samples = cfg.prompts_per_step * cfg.group_size
    tokens = pace.MEAN_SHARE * pace.step_tokens(cfg)
    found = {"rollouts": LINE * samples + TEXT * tokens, "metrics": METRICS + OTHERS}
    if cfg.sample_period:
        found["samples"] = SAMPLED * tokens / cfg.sample_period
    return found


def saves(cfg: TrainingSettings) -> int:
    """Returns how many checkpoints a run writes, the last one at its end."""
    return math.ceil(cfg.steps / cfg.save_period) if cfg.save_period else 1


def rows(model: Model, cfg: TrainingSettings) -> list[str]:
    """Lists what a step writes, and what lies in the folder after all steps."""
    step = step_bytes(cfg)
    parts = ", ".join(f"{name} {amount(size)}" for name, size in step.items())
    export = 2 * model.params
    exports = min(saves(cfg), cfg.keep_exports or saves(cfg))
    resumable = pace.checkpoint_bytes(model, cfg).whole - export
    checkpoints = min(saves(cfg), cfg.keep_last + 1)  # a new one is written before one is deleted
    lines = cfg.steps * sum(step.values())
    together = lines + exports * export + checkpoints * resumable
    return [
        f"disk, for {cfg.steps:,} steps: {amount(sum(step.values()))} a step ({parts}),",
        f"  {amount(lines)} in all; exports {exports} x {amount(export)}, checkpoints to resume "
        f"{checkpoints} x {amount(resumable)}; together {amount(together)}",
    ]


def amount(size: float) -> str:
    """Formats bytes with a unit."""
    for unit, scale in UNITS.items():
        if size >= scale:
            return f"{size / scale:,.1f} {unit}"
    return f"{size:.0f} bytes"
