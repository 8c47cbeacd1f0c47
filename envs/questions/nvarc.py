r"""Grid puzzles from ARC-AGI: 1.0 if the test's output grid is right in each cell, else 0.0.

Row: `expected_output`, equally long lists of integers from 0 to 9; `agent_mode`, or else the
agent's name, decides the form of an answer. Judged: the text after the reasoning, as in NeMo-Gym's
resources_servers/nvarc.
    transductive   the grid: the text between the first \boxed{ and the last }, else everything.
                   A line is a row. Its one-digit words are cells, and no other word counts
    inductive      a program that defines transform(grid): the last ```python block, else the last
                   block without a language, else a text with "def transform". It is called once, in
                   the sandbox, with `test_input`. Its result is read as JSON, arrays as lists, and
                   1.0, true or "1" as 1. It has 30 s, and may import numpy, scipy and torch

As in NeMo-Gym, a program that imports os, calls open or uses similar names (nvarc_programs) earns
0, and what it prints is lost. Deliberate deviations: it may define classes, which does not work in
NeMo-Gym's runner, and recurse 50,000 deep; arrays and tensors in a list are lists too; the 30 s are
for the whole program, and waiting for a CPU does not count.

Known leaks: everything but one-digit words is skipped, so "-1", "1." and "0 12 1" read as 1, 1 and
0 1, and a grid needs no box. `train` is not judged: a program earns 1.0 even if it returns a grid
that the policy worked out itself, or if it is right for this input only.
"""

import json
import re

from envs import Reward, final_text, get, require, unfinished
from envs.questions import nvarc_programs
from envs.questions.nvarc_programs import LIMITS, Returned, found_in, program, returned
from envs.sandbox import sandbox
from envs.services import Need

AGENTS = ("nvarc_transductive_simple_agent", "nvarc_inductive_simple_agent", "nvarc")
MODES = ("transductive", "inductive")
SIGN = re.compile(r"[^\s\w]")
CELLS = tuple("0123456789")


def needs(row: dict) -> tuple[Need, ...]:
    """A sandbox with numpy and scipy, for rows that ask for a program."""
    return (sandbox.NEED, nvarc_programs.NEED) if mode(row) == "inductive" else ()


def mode(row: dict) -> str:
    """Returns the form that an answer to a row has: one of MODES, if the row passes `check`."""
    usual = "inductive" if "inductive" in row["agent_ref"]["name"] else "transductive"
    return row.get("agent_mode") or usual


def check(row: dict) -> None:
    """Raises ValueError unless the mode is known and its grids are well-formed."""
    get(row, "agent_mode", str | None, "text or null")
    known = mode(row)
    require(known in MODES, "agent_mode", known, f"one of: {', '.join(MODES)}, or null")
    check_grid(row, "expected_output")
    if known == "inductive":
        check_grid(row, "test_input")


def check_grid(row: dict, field: str) -> None:
    """Raises ValueError unless a field contains rows of equal length, of integers from 0 to 9."""
    grid = get(row, field, list, "a grid, a list of lists")
    require(grid, field, grid, "at least one row")
    for i, line in enumerate(grid):
        cells = isinstance(line, list) and all(type(v) is int and 0 <= v <= 9 for v in line)
        require(cells and line, f"{field}[{i}]", line, "a list of integers from 0 to 9")
        width = len(grid[0])
        same = f"{width} cells, as in the first row"
        require(len(line) == width, f"{field}[{i}]", f"a list of {len(line)}", same)
    size = len(json.dumps(grid))
    most = f"at most {LIMITS.output} bytes of JSON, because a program may return no more"
    require(size <= LIMITS.output, field, f"a grid of {size} bytes", most)


async def verify(row: dict, response: str) -> Reward:
    """Returns 0.0 or 1.0; `reason` and `error` explain a 0.

    Raises CheckerError if no program could run.
    """
    text = final_text(response)
    if reason := unfinished(text):
        return Reward(0.0, {"reason": reason})
    if mode(row) == "transductive":
        found = Returned(await found_in(text, written))
    else:
        source = await found_in(text, program)
        if source is None:
            return Reward(0.0, {"reason": "no code block"})
        found = await returned(source, row["test_input"])
    if not found.failure and found.grid == row["expected_output"]:
        return Reward(1.0)
    wrong = "wrong grid" if found.grid else "no grid"
    return Reward(0.0, {"reason": found.failure or wrong, "error": found.error})


def written(text: str) -> list[list[int]]:
    """Returns the grid in a text; [] if there is none, or if its rows differ in length."""
    opening = text.find("\\boxed{")
    start = opening + len("\\boxed{")
    end = text.rfind("}")
    if opening >= 0 and end > start:
        text = text[start:end]
    grid: list[list[int]] = []
    for line in SIGN.sub("", text).split("\n"):
        cells = [int(word) for word in line.split() if word in CELLS]
        if cells and grid and len(cells) != len(grid[0]):
            return []
        if cells:
            grid.append(cells)
    return grid
