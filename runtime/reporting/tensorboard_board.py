"""Writes a run's metrics for TensorBoard."""

import threading
from collections.abc import Mapping
from pathlib import Path

from torch.utils.tensorboard import SummaryWriter


class TensorBoard:
    """The events file of a run that continues from policy version `version`."""

    def __init__(self, folder: Path, version: int):
        threading.excepthook = print_error
        self.writer = SummaryWriter(str(folder), purge_step=version + 1)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Adds the metrics of a step. Raises the error with which earlier metrics were written."""
        for name, value in metrics.items():
            self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Flushes and closes the file."""
        self.writer.close()


def print_error(args: threading.ExceptHookArgs) -> None:
    """Prints the error of a thread, unless it is TensorBoard's, whose next call raises it."""
    if not type(args.thread).__module__.startswith("tensorboard."):
        threading.__excepthook__(args)
