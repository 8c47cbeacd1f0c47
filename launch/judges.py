"""Where judges are served: how many nodes they take, and which servers each node starts.

    python launch/judges.py GPUS          how many nodes of GPUS they take
    python launch/judges.py GPUS NODE     the servers of a node: NAME MODEL GPUS FIRST_GPU [flags]

JUDGES is a file, or the lines themselves: NAME MODEL GPUS [xCOUNT] [flags of vLLM's server]; `#`
begins a comment. With counts, that many servers fill the nodes in the order of the lines, each on
the first node that has room. Without, nodes take the lines in turn for as long as their GPUs allow,
and the next node begins with the next line; JUDGE_NODES says how many nodes there are.
"""

import os
import re
import shlex
import sys
from pathlib import Path
from typing import NamedTuple

LINE = re.compile(r"(\S+)\s+(\S+)\s+(\d+)(?:\s+x(\d+))?(?:\s+([-#].*))?")
EXPECTED = "NAME MODEL GPUS [xCOUNT] [flags], or a file of such lines"


class Judge(NamedTuple):
    """A line of JUDGES."""

    name: str
    model: str
    gpus: int
    count: int  # servers; 0: as many as the nodes' turns give
    flags: list[str]


def read(text: str, gpus: int) -> list[Judge]:
    """The judges of JUDGES. Raises ValueError for a malformed line, or a judge of more GPUs."""
    text = Path(text).read_text() if os.path.isfile(text) else text
    found = []
    for line in (line.strip() for line in text.removeprefix("\ufeff").splitlines()):
        if not line or line[0] == "#":
            continue
        match = LINE.fullmatch(line)
        if not match or match[4] == "0":
            raise ValueError(f"{line!r}: expected {EXPECTED}")
        name, model, size, count, flags = match.groups("")
        try:
            words = shlex.split(flags, comments=True)
        except ValueError as error:
            raise ValueError(f"{line!r}: {error}") from None
        found.append(Judge(name, model, int(size), int(count or 0), words))
        if int(size) > gpus:
            raise ValueError(f"{name} takes {size} GPUs, a node has {gpus}")
    if not found:
        raise ValueError(f"it is empty: expected lines of {EXPECTED}")
    if len({bool(judge.count) for judge in found}) > 1:
        raise ValueError("some lines have a count: expected xCOUNT in all of them, or in none")
    return found


def packed(judges: list[Judge], gpus: int) -> list[list[Judge]]:
    """The servers of each node, by the lines' counts."""
    nodes: list[list[Judge]] = []
    for judge in (one for one in judges for _ in range(one.count)):
        room = (node for node in nodes if judge.gpus + sum(one.gpus for one in node) <= gpus)
        if (node := next(room, None)) is not None:
            node.append(judge)
        else:
            nodes.append([judge])
    return nodes


def in_turn(judges: list[Judge], gpus: int, node: int) -> list[Judge]:
    """The servers of a node that takes the lines in turn until none has room."""
    found: list[Judge] = []
    passed = 0
    while passed < len(judges):
        judge = judges[node % len(judges)]
        node, passed = node + 1, passed + 1
        fits = judge.gpus + sum(one.gpus for one in found) <= gpus
        # A model without GPUs, on a CPU, is served once.
        if fits and (judge.gpus or judge not in found):
            found.append(judge)
            passed = 0
    return found


def nodes_of(judges: list[Judge], gpus: int, given: str) -> int:
    """How many nodes serve judges. Raises ValueError where `given`, JUDGE_NODES, differs."""
    if not judges[0].count:
        if not given.isdigit():
            raise ValueError(f"no line has a count, JUDGE_NODES = {given!r}: expected a number")
        every = {one.name for node in range(int(given)) for one in in_turn(judges, gpus, node)}
        if absent := next((one.name for one in judges if one.name not in every), ""):
            told = f"JUDGE_NODES = {given}: {absent} is served on no node"
            raise ValueError(f"{told}, expected more nodes, or counts")
        return int(given)
    needed = len(packed(judges, gpus))
    if given not in ("", str(needed)):
        parts = " + ".join(f"{one.count} x {one.gpus} ({one.name})" for one in judges)
        total = sum(one.count * one.gpus for one in judges)
        told = f"{parts} = {total} GPUs, which fill {needed} nodes of {gpus}"
        raise ValueError(f"{told}: JUDGE_NODES = {given!r}, expected {needed} or none")
    return needed


def servers(judges: list[Judge], gpus: int, given: str, node: int) -> list[Judge]:
    """The servers of one node. Raises ValueError as `nodes_of` does."""
    if not judges[0].count:
        return in_turn(judges, gpus, node)
    nodes_of(judges, gpus, given)
    return packed(judges, gpus)[node]


def main(gpus: str, node: str = "") -> None:
    """Prints what its arguments ask for; ends the program with a message where JUDGES is wrong."""
    given = os.environ.get("JUDGE_NODES", "")
    try:
        judges = read(os.environ.get("JUDGES", ""), int(gpus))
        if not node:
            print(nodes_of(judges, int(gpus), given))
            return
        first = 0
        for judge in servers(judges, int(gpus), given, int(node)):
            print(judge.name, judge.model, judge.gpus, first, shlex.join(judge.flags))
            first += judge.gpus
    except ValueError as error:
        sys.exit(f"error: JUDGES: {error}")


if __name__ == "__main__":
    main(*sys.argv[1:])
