"""With this folder on PYTHONPATH, as conftest.py puts it there, processes start in less time."""

import sys
from pathlib import Path

CPU = str(Path(__file__).parents[2] / "cpu")
sys.path.insert(0, CPU)
import quick_start  # noqa: E402, F401

sys.path.remove(CPU)
