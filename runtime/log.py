"""Where a run writes its metrics: JSON lines, TensorBoard, W&B, progress bars."""

import dataclasses
import hashlib
import json
import os
import time
from pathlib import Path

from tqdm import tqdm

from runtime.metrics import mismatch_rows

ALARM = 1.05  # of token_mult_prob_error: NeMo-RL's rule of thumb


def append_to(path: Path):
    """An unbuffered file to append lines to; half a line that a killed writer left is cut off."""
    file = open(path, "ab+", buffering=0)  # noqa: SIM115
    size = file.seek(0, os.SEEK_END)
    start = file.seek(max(0, size - (1 << 26)))  # no line is longer
    file.truncate(start + file.read().rfind(b"\n") + 1)
    return file


class Log:
    """metrics.jsonl, TensorBoard, W&B if asked for, and two progress bars."""

    FILES = ("metrics", "mismatch", "dropped")

    def __init__(self, cfg, version: int):
        folder = Path(cfg.run_dir)
        folder.mkdir(parents=True, exist_ok=True)
        settings = dataclasses.asdict(cfg)
        (folder / "config.json").write_text(json.dumps(settings, indent=1))
        self.files = {
            name: open(folder / f"{name}.jsonl", "a", buffering=1)  # noqa: SIM115
            for name in self.FILES
        }
        from torch.utils.tensorboard import SummaryWriter  # a second of imports, after all checks

        self.board, self.wandb = SummaryWriter(str(folder), purge_step=version + 1), None
        if cfg.wandb:
            import wandb

            unique = hashlib.sha256(str(folder).encode()).hexdigest()[:16]
            name = {"dir": folder, "name": folder.name, "id": unique, "resume": "allow"}
            self.wandb = wandb.init(config=settings, **name)
            # Its own step never goes back, as that of a run does which is resumed.
            self.wandb.define_metric("*", step_metric="step")
        self.began = time.time()
        bar = {"initial": version, "desc": "steps", "unit": "step", "position": 0}
        self.steps = tqdm(total=cfg.steps, **bar)
        samples = cfg.prompts_per_step * cfg.group_size
        self.samples = tqdm(total=samples, desc="rollouts", unit="sample", position=1, leave=False)

    def write(self, step: int, metrics: dict[str, float]) -> None:
        """Appends the metrics of the step that led to policy version `step`."""
        self.line("metrics", {"step": step, "seconds": time.time() - self.began} | metrics)
        for name, value in metrics.items():
            self.board.add_scalar(name, value, step)
        if self.wandb:
            self.wandb.log({"step": step} | metrics)
        if "validation_reward" in metrics:
            self.note(f"step {step}: validation reward {metrics['validation_reward']:.3f}")

    def line(self, name: str, content: dict) -> None:
        """Appends a line to one of the files."""
        self.files[name].write(json.dumps(content) + "\n")

    def mismatch(self, step: int, tables: list[dict]) -> None:
        """Writes a step's mismatch table."""
        self.line("mismatch", {"step": step, "rows": mismatch_rows(tables)})

    def drop(self, slot: int | str, prompt: int, row: str, error: BaseException) -> None:
        """Writes down a prompt that was given up, its place in the stream, and why."""
        told = {"slot": slot, "prompt": prompt, "row": row}
        self.line("dropped", told | {"reason": type(error).__name__, "error": str(error)})
        self.note(f"{row} dropped: {error}")

    def step(self, step: int, metrics: dict[str, float]) -> None:
        """Writes a training step and moves its bar on."""
        self.write(step, metrics)
        self.steps.update()
        if metrics.get("token_mult_prob_error", 1.0) > ALARM:
            error = f"token_mult_prob_error {metrics['token_mult_prob_error']:.3f} > {ALARM}"
            self.note(f"step {step}: {error}: trainer and engine disagree, see docs/debugging.md")
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
        for part in (self.samples, self.steps, *self.files.values(), self.board):
            part.close()
        if self.wandb:
            self.wandb.finish()
