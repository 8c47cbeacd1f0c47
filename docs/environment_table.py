"""Writes the table of docs/environments.md from the modules of envs/.

A folder of envs/ with a module that declares AGENTS is a family; other folders are mechanisms. The
modules are parsed, not imported. For an environment's module, the table shows the first line of its
docstring, its AGENTS, the docstring of its `needs`, and the files of envs/ that it imports,
directly or through families.
"""

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/environments.md"
BEGIN, END = "<!-- shelf: written by docs/environment_table.py -->\n", "<!-- end of the shelf -->\n"
HEAD = "| module | `agent_ref.name` | what is judged: the reward | needs | uses |\n"
RULE = "|---|---|---|---|---|\n"
COMMON = "rollout"  # a folder that every environment uses


def parse(path: Path) -> ast.Module:
    """Returns the syntax tree of a file."""
    return ast.parse(path.read_text(encoding="utf-8"), path)


def first_line(node: ast.Module | ast.FunctionDef) -> str:
    """Returns the first line of a docstring without its full stop; "" if there is no docstring."""
    return (ast.get_docstring(node) or "").partition("\n")[0].removesuffix(".")


def agents(module: ast.Module) -> tuple[str, ...] | None:
    """Returns the literal value of a module's AGENTS; None if the module declares no AGENTS."""
    for node in module.body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if "AGENTS" in map(ast.unparse, targets):
                return tuple(ast.literal_eval(node.value))
    return None


def names(node: ast.AST) -> list[str]:
    """Returns the names in an expression, such as the targets of an assignment."""
    return [part.id for part in ast.walk(node) if isinstance(part, ast.Name)]


def imported(module: ast.Module) -> set[str]:
    """Returns the files in folders of envs/ that a module imports, such as maths/math."""
    named = set()
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            named |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            named |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    files = (name.removeprefix("envs.").replace(".", "/") for name in named if name[:5] == "envs.")
    return {file for file in files if "/" in file and (ROOT / f"envs/{file}.py").is_file()}


def needs(module: ast.Module) -> str:
    """Returns the docstring of a module's `needs`, "as X" if X defines it, or "-" without one."""
    for node in module.body:
        if isinstance(node, ast.FunctionDef) and node.name == "needs":
            return first_line(node)
        if isinstance(node, ast.Assign) and "needs" in names(node.targets[0]):
            return f"as {names(node.value)[0]}"
    return "-"


class Shelf:
    """The files of envs/, the files among them that serve agents, and the folders of these."""

    def __init__(self) -> None:
        folder = ROOT / "envs"
        self.modules = {
            path.relative_to(folder).with_suffix("").as_posix(): parse(path)
            for path in sorted(folder.rglob("*.py"))
            if not path.name.startswith("__")
        }
        self.serving = {name for name, module in self.modules.items() if agents(module) is not None}
        self.families = {name.rpartition("/")[0] for name in self.serving}

    def uses(self, name: str) -> str:
        """Returns the files that a module imports, itself or through files of families."""
        seen, queue = {name}, [name]
        while queue:
            new = imported(self.modules[queue.pop()]) - seen
            new = {file for file in new if file.partition("/")[0] != COMMON}
            seen |= new
            queue += [file for file in new if file.partition("/")[0] in self.families]
        own = name.rpartition("/")[0]
        near = [file.removeprefix(f"{own}/") for file in sorted(seen - {name})]
        return ", ".join(sorted(near, key=lambda file: ("/" in file, file))) or "-"

    def row(self, name: str) -> str:
        """Returns the table line for a module that serves agents."""
        module = self.modules[name]
        served = ", ".join(f"`{agent}`" for agent in agents(module)) or "any other"
        link = f"[{name.rpartition('/')[2]}](../envs/{name}.py)"
        about = first_line(module)
        if ": " not in about:
            sys.exit(f"envs/{name}.py: begins with {about!r}, expected a docstring JUDGED: REWARD.")
        cells = (link, served, about, needs(module), self.uses(name))
        return f"| {' | '.join(cells)} |\n"

    def heading(self, folder: str) -> str:
        """Returns the table line for a folder: its purpose, and its files that serve no agents."""
        if not folder:
            return "| **envs/** | | modules without a family | | |\n"
        about = first_line(parse(ROOT / f"envs/{folder}/__init__.py"))
        files = [name for name in self.modules if name.rpartition("/")[0] == folder]
        rest = [name for name in files if name not in self.serving]
        links = ", ".join(f"[{name.rpartition('/')[2]}](../envs/{name}.py)" for name in rest)
        own = f" Helpers: {links}." if folder in self.families else f" Files: {links}."
        return f"| **[{folder}/](../envs/{folder})** | | **{about}.**{own if rest else ''} | | |\n"

    def table(self) -> str:
        """Returns the families with their environments, then the folders that serve no agents."""
        lines = []
        for family in sorted(self.families):
            members = [name for name in sorted(self.serving) if name.rpartition("/")[0] == family]
            lines += [self.heading(family), *map(self.row, members)]
        folders = {name.rpartition("/")[0] for name in self.modules} - self.families - {""}
        return HEAD + RULE + "".join(lines) + "".join(map(self.heading, sorted(folders)))


def page() -> str:
    """Returns the page with its own text, and the current table between the two markers."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    if not after:
        sys.exit(f"{PAGE}: lacks the lines {BEGIN.strip()} and {END.strip()}")
    return f"{before}{BEGIN}\n{Shelf().table()}\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
