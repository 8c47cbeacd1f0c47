"""With this folder on PYTHONPATH a process writes down each of our modules as it imports it.

MANIFEST_FOLDER/PID-PARENT has a line for each module. Written at once, because Ray kills its
processes. Test support: nothing of it is imported by the product.
"""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
FOLDER = os.environ.get("MANIFEST_FOLDER", "")
OURS = {path.stem for path in ROOT.iterdir() if path.suffix == ".py"}
OURS |= {path.parent.name for path in ROOT.glob("*/__init__.py")}


class Witness:
    """A finder that finds nothing: Python asks it for each module that a process has not loaded."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        """Notes a module of ours, and leaves it to the other finders."""
        if name.partition(".")[0] in OURS:
            with open(f"{FOLDER}/{os.getpid()}-{os.getppid()}", "a") as file:
                file.write(f"{name}\n")


if FOLDER:
    sys.meta_path.insert(0, Witness)
