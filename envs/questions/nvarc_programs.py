"""Programs of nvarc: which one a text holds, and what its transform makes of a grid.

No environment by itself: nvarc runs answers with it, in the sandbox. nvarc_runner.txt is what runs
there.
"""

import importlib.util
import json
import re
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path
from typing import TypeVar

import pydantic

from core.waits import in_thread
from envs import services
from envs.sandbox import sandbox
from envs.sandbox.programs import programs
from envs.sandbox.sandbox import Limits

T = TypeVar("T")
LONG = 20_000  # characters, of which more are read in a thread
LIMITS = Limits(seconds=30.0, memory=6 << 30)  # PyTorch for CUDA maps 3.2 GB
# The first newline after the fence ends it, and nothing is scanned twice.
PYTHON = re.compile(r"```python[^\S\n]*+\n(.*?)```", re.DOTALL)
PLAIN = re.compile(r"```[^\S\n]*+\n(.*?)```", re.DOTALL)
GRID = pydantic.TypeAdapter(list[list[int]])
# What NeMo-Gym takes from a program: names of Python, and modules that it may not import.
NAMES = """open input breakpoint help license credits copyright exit quit vars dir globals
locals"""
MODULES = """os subprocess shutil pathlib builtins socket urllib requests http ftplib smtplib pickle
shelve marshal importlib pkgutil ctypes multiprocessing threading signal tempfile fileinput codecs
pty fcntl resource syslog asyncio concurrent"""
RUNNER = Path(__file__).with_name("nvarc_runner.txt").read_text(encoding="utf-8")


def problem() -> str:
    """Why programs cannot import what their prompts offer, and how to mend it; "" if they can.

    What the service behind services.sandbox_url can import is not known here.
    """
    if services.current().sandbox == "http":
        return ""
    if not importlib.util.find_spec("scipy"):
        return "prompts of inductive rows offer scipy: expected requirements.txt to be installed"
    if not sandbox.own_packages():
        return "the sandbox's Python cannot import this one's numpy, which the log explains"
    return ""


def program(text: str) -> str | None:
    """The program in a text; None for none."""
    for fenced in (PYTHON, PLAIN):
        if blocks := fenced.findall(text):
            return blocks[-1].strip()
    return text if "def transform" in text else None


async def found_in(text: str, function: Callable[[str], T]) -> T:
    """What a function finds in a text: a megabyte takes it a tenth of a second, so in a thread."""
    return await in_thread(function, text) if len(text) > LONG else function(text)


async def returned(source: str, grid: list[list[int]]) -> tuple[list, str, str]:
    """What a program's transform makes of a grid, [] for no grid; else why it failed, and where.

    Raises CheckerError where no program could run.
    """
    given = {"source": source, "grid": grid, "names": NAMES.split(), "modules": MODULES.split()}
    runs = programs(RUNNER, [json.dumps(given)], LIMITS)
    async with aclosing(runs):
        ran = await anext(runs)
    if ran.ended or ran.code:
        return [], ran.ended or "crashed", ran.stderr[-200:]
    return await found_in(ran.stdout, read), "", ""


def read(text: str) -> list[list[int]]:
    """The grid in a program's output; [] for none."""
    try:
        return GRID.validate_python(json.loads(text))
    except (ValueError, RecursionError):
        return []


NEED = services.Need("scipy", problem, of_node=False)
