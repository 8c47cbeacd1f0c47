"""What Weights & Biases gets of a run: its metrics, its data, and the models that it exports."""

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import wandb

from runtime.checkpoints import lineage
from runtime.checkpoints.folders import EXPORT, MARKER
from runtime.reporting import config_json
from settings.config import TrainingSettings


class Board:
    """A run of W&B that is begun, or gone on with, for a run folder."""

    def __init__(self, cfg: TrainingSettings, folder: Path):
        self.cfg = cfg
        self.published: set[Path] = set()  # markers of the exports that W&B knows
        unique = hashlib.sha256(str(folder).encode()).hexdigest()[:16]
        shown = os.environ.get("WANDB_NAME") or folder.name
        name = {"dir": folder, "name": shown, "id": unique, "resume": "allow"}
        self.run: Any = wandb.init(config=config_json.settings(cfg), **name)
        # Its own step never goes back, as that of a run does which is resumed.
        self.run.define_metric("*", step_metric="step")
        if not self.run.offline:
            rows = artifact("DataBlendsArtifact-rl", "dataset", Path(cfg.data.train))
            self.run.use_artifact(rows)

    def write(self, metrics: Mapping[str, float]) -> None:
        """Logs the metrics of a step, `step` among them."""
        self.run.log(dict(metrics))
        self.publish()

    def publish(self) -> None:
        """Registers the exported models that are whole and that W&B does not know."""
        for marker in sorted(Path(self.cfg.writes_to).glob(f"step_*/{EXPORT}{MARKER}")):
            if marker not in self.published:
                model = artifact("ModelArtifact-rl", "model", marker.parent)
                self.run.log_artifact(model, aliases=[marker.parents[1].name, "latest"])
                self.published.add(marker)

    def close(self) -> None:
        """Publishes the last model and ends the run of W&B."""
        self.publish()
        self.run.finish()


def artifact(name: str, kind: str, path: Path) -> Any:
    """A reference to a file or folder and, of a model, its lineage."""
    made = wandb.Artifact(name, type=kind, metadata=lineage.read(path))
    made.add_reference(f"file://{path.resolve()}", checksum=False)
    return made
