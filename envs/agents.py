"""Which module serves each agent, as the files below envs/ declare it; none is imported."""

import ast
import functools
import re
from pathlib import Path
from typing import Any

import envs
from core.errors import ModuleError

# What a module that serves an agent cannot lack. The others are not parsed.
SERVES = re.compile(r"\bAGENTS\b|^(async )?def (verify|rollout|score_group)\b", re.MULTILINE)


@functools.cache
def served() -> dict[str, str]:
    """Agent name -> module, such as maths/math, read from the files.

    Raises ModuleError where two claim a name.
    """
    claimed: dict[str, str] = {}
    root = Path(envs.__path__[0])
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).with_suffix("").as_posix()
        if path.with_suffix("").is_dir():
            raise ModuleError(f"envs/{name}.py has the name of the folder envs/{name}/: rename it")
        for agent in declared(path):
            if agent in claimed:
                files = f"envs/{claimed[agent]}.py and envs/{name}.py"
                raise ModuleError(f"{files} both declare the agent {agent!r}, expected one of them")
            claimed[agent] = name
    return claimed


def declared(path: Path) -> tuple[str, ...]:
    """What a module's top-level `AGENTS = (...)` says, without importing it; () where it has none.

    Raises ModuleError where it is no literal tuple or list of strings.
    """
    try:
        text = path.read_text(encoding="utf-8")
        module = ast.parse(text if SERVES.search(text) else "", path)
    except (SyntaxError, ValueError) as error:
        raise ModuleError(f"{path} cannot be read as Python: {error}") from None
    found: tuple[str, ...] = ()
    for node in module.body:
        targets = getattr(node, "targets", None) or [getattr(node, "target", None)]
        if "AGENTS" not in [target and ast.unparse(target) for target in targets]:
            continue
        value = getattr(node, "value", None)  # `AGENTS += ...` depends on what stands above it
        items: list[Any] = [None]
        if isinstance(value, ast.Tuple | ast.List) and not isinstance(node, ast.AugAssign):
            items = [getattr(item, "value", None) for item in value.elts]
        if not all(isinstance(item, str) for item in items):
            shown = ast.unparse(value) if value else "nothing"
            raise ModuleError(f"{path}: AGENTS is {shown}, expected a literal tuple of names")
        found = tuple(items)
    return found
