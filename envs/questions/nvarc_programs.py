"""Finds the program in an nvarc answer, and runs its transform on a grid in the sandbox.

Not an environment: nvarc uses it. nvarc_runner.txt is the program that runs in the sandbox.
"""

import importlib.util
import json
import re
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path
from typing import NamedTuple, TypeVar

import pydantic

from core.waits import in_thread
from envs import services
from envs.sandbox import sandbox
from envs.sandbox.outcome import refused_by_limits
from envs.sandbox.programs import programs
from envs.sandbox.sandbox import Limits

T = TypeVar("T")
LONG = 20_000  # characters; a longer text is read in a thread
LIMITS = Limits(seconds=30.0, memory=6 << 30)  # PyTorch for CUDA maps 3.2 GB
# The opening line ends at the first newline after the fence, and nothing is scanned twice.
PYTHON = re.compile(r"```python[^\S\n]*+\n(.*?)```", re.DOTALL)
PLAIN = re.compile(r"```[^\S\n]*+\n(.*?)```", re.DOTALL)
GRID = pydantic.TypeAdapter(list[list[int]])
# NeMo-Gym denies a program these Python names and modules.
NAMES = """open input breakpoint help license credits copyright exit quit vars dir globals
locals"""
MODULES = """os subprocess shutil pathlib builtins socket urllib requests http ftplib smtplib pickle
shelve marshal importlib pkgutil ctypes multiprocessing threading signal tempfile fileinput codecs
pty fcntl resource syslog asyncio concurrent"""
RUNNER = Path(__file__).with_name("nvarc_runner.txt").read_text(encoding="utf-8")


class Returned(NamedTuple):
    """The result of a program."""

    grid: list[list[int]]  # [] if it returned no grid
    failure: str = ""  # the reason for a failed run
    error: str = ""  # the end of its stderr


def problem() -> str:
    """Returns why programs cannot import what their prompts offer, and the remedy; "" if they can.

    What the service at services.sandbox_url can import is not known here.
    """
    if services.current().sandbox == "http":
        return ""
    if not importlib.util.find_spec("scipy"):
        return (
            "the prompts in inductive rows offer scipy: expected requirements.txt to be installed"
        )
    if not sandbox.own_packages():
        return "the sandbox's Python cannot import this Python's numpy: the log says why"
    return ""


def program(text: str) -> str | None:
    """Returns the program in a text; None if there is none."""
    for fenced in (PYTHON, PLAIN):
        if blocks := fenced.findall(text):
            return blocks[-1].strip()
    return text if "def transform" in text else None


async def found_in(text: str, function: Callable[[str], T]) -> T:
    """Returns the result of applying a function to a text.

    A long text is read in a thread, because a megabyte takes a tenth of a second.
    """
    return await in_thread(function, text) if len(text) > LONG else function(text)


async def returned(source: str, grid: list[list[int]]) -> Returned:
    """Runs a program's transform on a grid. Raises CheckerError if no program could run."""
    given = {"source": source, "grid": grid, "names": NAMES.split(), "modules": MODULES.split()}
    runs = programs(RUNNER, [json.dumps(given)], LIMITS)
    async with aclosing(runs):
        ran = await anext(runs)
    if ran.ended or ran.code:
        failure = ran.ended or refused_by_limits(ran.stderr, LIMITS) or "crashed"
        return Returned([], failure, ran.stderr[-200:])
    return Returned(await found_in(ran.stdout, read))


def read(text: str) -> list[list[int]]:
    """Returns the grid in a program's output; [] if there is none."""
    try:
        return GRID.validate_python(json.loads(text))
    except (ValueError, RecursionError):
        return []


NEED = services.Need("scipy", problem, of_node=False)
