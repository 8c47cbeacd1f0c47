"""Reads and writes docs/processes.md: the modules of ours that each process of a run loads."""

import re
from collections import defaultdict
from pathlib import Path

from support.program import ROOT

PAGE = ROOT / "docs/processes.md"
# The class of an actor, by which its log is named, and how the page calls its process.
ROLES = {"RolloutWorker": "rollout worker", "Generator": "engine", "Trainer": "trainer"}
ORDER = ("driver", *ROLES.values(), "task")
HEAD = """# What each process loads

A reference: the modules of this project that each process of a small GRPO run has loaded by the
time it ends, including modules loaded by the processes that it started. tests/test_run.py records
them during its run and fails if they differ from this page;
`GRPO_MANIFEST=write bash tests/run.sh tests/test_run.py` rewrites the page. The numbers are not
limits, but a commit that changes this page must give the reason in its body. A task is a function
that Ray runs in a process of its own, such as the one that writes groups.

"""


def path_of(module: str) -> Path | None:
    """The file of a module of ours."""
    stem = ROOT / module.replace(".", "/")
    for path in (stem.with_suffix(".py"), stem / "__init__.py"):
        if path.is_file():
            return path
    return None


def of_run(folder: Path, run_dir: Path, driver: int) -> dict[str, set[str]]:
    """The modules by process, from the files in `folder` and the names of the run's logs."""
    roles = {driver: "driver"}
    for log in (run_dir / "logs").glob("*.log"):
        kind, *_, pid = log.stem.split("-")  # such as Trainer-HOST-PID
        roles[int(pid)] = ROLES[kind]
    parents = {}
    modules = defaultdict(set)
    for path in folder.iterdir():
        pid, parent = map(int, path.name.split("-"))
        parents[pid] = parent
        modules[pid] |= {name for name in path.read_text().split() if path_of(name)}

    def role(pid: int) -> str:
        while pid in parents and pid not in roles:
            pid = parents[pid]
        return roles.get(pid, "task")

    found = defaultdict(set)
    for pid, names in modules.items():
        found[role(pid)] |= names
    return dict(found)


def lines_of(modules: set[str]) -> int:
    """The lines of some modules' files."""
    paths = filter(None, map(path_of, modules))
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths)


def table(found: dict[str, set[str]]) -> str:
    """A line for each process: its files, and their lines to the nearest hundred."""
    lines = ["| process | files | lines |", "|---|---|---|"]
    for process in ORDER:
        rounded = round(lines_of(found[process]), -2)
        lines.append(f"| {process} | {len(found[process])} | {rounded:,} |")
    return "\n".join(lines) + "\n"


def page(found: dict[str, set[str]]) -> str:
    """docs/processes.md."""
    text = HEAD + table(found)
    for process in ORDER:
        rooms = defaultdict(list)
        for module in sorted(found[process]):
            package = (ROOT / module.replace(".", "/")).is_dir()
            room = module if package else module.rpartition(".")[0]
            rooms[room.replace(".", "/") or "root"].append("" if package else module.split(".")[-1])
        text += f"\n## {process}\n\n"
        for room, names in sorted(rooms.items()):
            text += f"- {room}: {', '.join(filter(None, names)) or '__init__'}\n"
    return text


def listed() -> dict[str, set[str]]:
    """The modules by process that the page lists."""
    found = {}
    for part in PAGE.read_text(encoding="utf-8").split("\n## ")[1:]:
        process, _, text = part.partition("\n")
        found[process] = set()
        for room, names in re.findall(r"^- ([\w/]+): (.*)$", text, re.M):
            package = "" if room == "root" else room.replace("/", ".")
            found[process] |= {package} - {""}
            modules = [name for name in names.split(", ") if name != "__init__"]
            found[process] |= {f"{package}.{name}".strip(".") for name in modules}
    return found
