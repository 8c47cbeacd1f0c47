"""Sends a run to Weights & Biases: its metrics, its data, and the models that it exports."""

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

import wandb

from runtime.checkpoints import lineage
from runtime.checkpoints.folders import EXPORT, MARKER
from runtime.reporting import config_json
from settings.config import TrainingSettings


class Board:
    """The W&B run for a run folder, new or resumed."""

    def __init__(self, cfg: TrainingSettings, folder: Path):
        self.cfg = cfg
        self.published: set[Path] = set()  # markers of the exports that were sent to W&B
        self.run: wandb.Run = wandb.init(
            config=config_json.settings(cfg),
            dir=folder,
            name=os.environ.get("WANDB_NAME") or folder.name,
            id=hashlib.sha256(str(folder).encode()).hexdigest()[:16],
            resume="allow",
        )
        # W&B's own step never decreases, but the step of a resumed run does.
        self.run.define_metric("*", step_metric="step")
        if not self.run.offline:
            rows = artifact("DataBlendsArtifact-rl", "dataset", Path(cfg.data.train))
            self.run.use_artifact(rows)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Logs the metrics of a step, and publishes new models."""
        self.run.log({"step": step, **metrics})
        self.publish()

    def publish(self) -> None:
        """Registers the exported models that are complete and not registered yet."""
        for marker in sorted(Path(self.cfg.writes_to).glob(f"step_*/{EXPORT}{MARKER}")):
            if marker not in self.published:
                model = artifact("ModelArtifact-rl", "model", marker.parent)
                self.run.log_artifact(model, aliases=[marker.parents[1].name, "latest"])
                self.published.add(marker)

    def close(self) -> None:
        """Publishes the last model and ends the W&B run."""
        self.publish()
        self.run.finish()


def artifact(name: str, kind: str, path: Path) -> "wandb.Artifact":
    """Creates a reference to a file or a folder, with a model's lineage."""
    made = wandb.Artifact(name, type=kind, metadata=lineage.read(path))
    made.add_reference(f"file://{path.resolve()}", checksum=False)
    return made
