"""Prints how many nodes the judges take, and which servers each node starts.

    python launch/judges.py GPUS          how many nodes of GPUS they take
    python launch/judges.py GPUS NODE     the servers of a node: NAME MODEL GPUS FIRST_GPU [flags]

JUDGES is a file, or the lines themselves: NAME MODEL GPUS [xCOUNT] [flags of vLLM's server]; `#`
begins a comment. With counts, that many servers fill the nodes in the order of the lines, each on
the first node that has room. Without counts, each node cycles through the lines until none fits on
its remaining GPUs, and each node starts one line after the previous node did; JUDGE_NODES is the
number of nodes.
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
    count: int  # number of servers; 0: nodes cycle through the lines
    flags: list[str]


def read(text: str, gpus: int) -> list[Judge]:
    """Reads JUDGES. Raises ValueError if a line is malformed, or a judge does not fit a node."""
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
            raise ValueError(f"{name} takes {size} GPUs, but a node has {gpus}")
    if not found:
        raise ValueError(f"it has no lines: expected {EXPECTED}")
    if len({bool(judge.count) for judge in found}) > 1:
        raise ValueError("some lines have a count: expected xCOUNT in all of them, or in none")
    return found


def packed(judges: list[Judge], gpus: int) -> list[list[Judge]]:
    """Places the servers on nodes, according to the lines' counts."""
    nodes: list[list[Judge]] = []
    for judge in judges:
        for _ in range(judge.count):
            for node in nodes:
                if judge.gpus + sum(one.gpus for one in node) <= gpus:
                    node.append(judge)
                    break
            else:
                nodes.append([judge])
    return nodes


def in_turn(judges: list[Judge], gpus: int, node: int) -> list[Judge]:
    """Returns the servers of a node that cycles through the lines until none fits."""
    found: list[Judge] = []
    passed = 0
    while passed < len(judges):
        judge = judges[node % len(judges)]
        node += 1
        passed += 1
        fits = judge.gpus + sum(one.gpus for one in found) <= gpus
        # A model without GPUs, which runs on a CPU, is served once.
        if fits and (judge.gpus or judge not in found):
            found.append(judge)
            passed = 0
    return found


def nodes_of(judges: list[Judge], gpus: int, given: str) -> int:
    """Counts the nodes that serve judges. Raises ValueError if `given`, JUDGE_NODES, differs."""
    if not judges[0].count:
        if not given.isdigit():
            raise ValueError(f"no line has a count, and JUDGE_NODES = {given!r}: expected a number")
        every = {one.name for node in range(int(given)) for one in in_turn(judges, gpus, node)}
        for judge in judges:
            if judge.name not in every:
                raise ValueError(
                    f"JUDGE_NODES = {given}: {judge.name} is served on no node, expected more "
                    "nodes, or counts"
                )
        return int(given)
    needed = len(packed(judges, gpus))
    if given not in ("", str(needed)):
        parts = " + ".join(f"{one.count} x {one.gpus} ({one.name})" for one in judges)
        total = sum(one.count * one.gpus for one in judges)
        raise ValueError(
            f"{parts} = {total} GPUs, which fill {needed} nodes of {gpus}: "
            f"JUDGE_NODES = {given!r}, expected {needed} or none"
        )
    return needed


def servers(judges: list[Judge], gpus: int, given: str, node: int) -> list[Judge]:
    """Returns the servers of one node. Raises ValueError as `nodes_of` does."""
    if not judges[0].count:
        return in_turn(judges, gpus, node)
    nodes_of(judges, gpus, given)
    return packed(judges, gpus)[node]


def hub_folder() -> Path:
    """Returns the folder for downloads of the Hugging Face hub, as launch/grpo.sbatch sets it."""
    cache = os.environ.get("PERSISTENT_CACHE")
    usual = f"{cache}/hf" if cache else "~/.cache/huggingface"
    return Path(os.environ.get("HF_HOME") or usual).expanduser()


def check_weights(judges: list[Judge]) -> None:
    """Raises ValueError if the jobs must not use the hub and a model is not here."""
    if os.environ.get("HF_HUB_OFFLINE", "").upper() not in ("1", "ON", "YES", "TRUE"):
        return
    for judge in judges:
        cached = hub_folder() / "hub" / f"models--{judge.model.replace('/', '--')}"
        if not Path(judge.model).is_dir() and not any(cached.glob("snapshots/*/config.json")):
            raise ValueError(
                f"{judge.name}: HF_HUB_OFFLINE is set, and {judge.model} is neither a folder nor "
                f"in {hub_folder()}: launch/fetch_judges.py downloads it"
            )


def main(gpus: str, node: str = "") -> None:
    """Prints the number of nodes, or a node's servers; exits with a message if JUDGES is wrong."""
    given = os.environ.get("JUDGE_NODES", "")
    try:
        judges = read(os.environ.get("JUDGES", ""), int(gpus))
        if not node:
            check_weights(judges)
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
