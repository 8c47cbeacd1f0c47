"""Runs the tools of coding agents in a box, and describes them to the policy.

This is not an environment itself: envs/swe/swe.py uses it. swe_tools.json describes four sets, in
our words:
    bash        one tool, as in mini-swe-agent
    openhands   the tools of OpenHands' CodeActAgent
    codex       the tools of Codex up to version 0.98
    opencode    the tools of OpenCode
Nemotron 3 Super's fork of OpenHands offers the last three. Files are read and written by the box's
`get` and `put`, so an image needs bash, find and grep, but no Python.

Deliberate deviations: each command has a new shell; in the originals it runs in the previous
command's shell. So no tool types into a running command, and none undoes an edit.
"""

import functools
import json
import re
import shlex
from collections.abc import Awaitable, Callable
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, TypedDict, Unpack

from envs import Json
from envs.following.schemas import validator
from envs.sandbox.shell import shortened
from envs.swe import codex_patch

if TYPE_CHECKING:
    from envs.boxes.box import Box, Ran

OUTPUT = 10_000  # characters of a result that the policy sees
COMMAND_SECONDS = 300.0  # seconds that a command may take
SEARCH_SECONDS = 60.0
LARGEST = 1 << 20  # bytes of a file that is read or written
CUT_OFF = 141  # exit code of a search whose output `head` has cut off
AROUND = 4  # lines before and after a change that are shown
FINISH = "finish"  # the tool that ends an episode
# The folders of the repository's own Python in SWE-bench, SWE-Gym and R2E-Gym images.
PYTHONS = ("/opt/miniconda3/envs/testbed", "/testbed/.venv")
SETTING = (
    "for p in " + " ".join(PYTHONS) + "; do [ ! -d $p/bin ] || PATH=$p/bin:$PATH; done; "
    "export PATH PAGER=cat GIT_PAGER=cat MANPAGER=cat LESS=-R PIP_PROGRESS_BAR=off TQDM_DISABLE=1; "
)
EDITS = {"create": "file_text", "str_replace": "old_str", "insert": "new_str insert_line"}
PLAIN = re.compile(r"([^\w*?\[\]{},!./^-])")  # a character with no role in a file-name pattern


class ToolError(Exception):
    """Raised with a message for the policy if a call is invalid or fails."""


class Edit(TypedDict, total=False):
    """Arguments of OpenHands' editor, besides command and path."""

    file_text: str
    old_str: str
    new_str: str
    insert_line: int
    view_range: list[int]


@functools.cache
def tool_sets() -> dict[str, list[dict]]:
    """Returns the tools of each set, as chat templates expect them."""
    declared = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
    return {
        name: [{"type": "function", "function": function} for function in functions]
        for name, functions in declared.items()
    }


class Tools:
    """One set of tools, which acts on one box."""

    def __init__(self, name: str, box: "Box", workdir: str) -> None:
        self.box = box
        self.workdir = workdir
        self.schemas = {
            tool["function"]["name"]: tool["function"]["parameters"] for tool in tool_sets()[name]
        }
        self.left = COMMAND_SECONDS  # seconds that the next command may take
        self.plan = ""

    async def call(self, name: str, given: dict[str, Json], left: float) -> str:
        """Runs a call, which may take `left` seconds, and returns its result for the policy."""
        self.left = min(left, COMMAND_SECONDS)
        try:
            known = fitting(given, self.schemas[name])
            return shortened(await TOOLS[name](self, **known), OUTPUT)
        except ToolError as error:
            return shortened(f"error: {error}", OUTPUT)

    # --- commands -----------------------------------------------------------------------------

    async def run(self, command: str, seconds: float, folder: str = "") -> "Ran":
        """Runs a command in the repository, or in a folder."""
        go = f"cd {shlex.quote(self.path(folder))} && " if folder else ""
        if "\0" in command:
            raise ToolError("the command has a NUL character")
        text = f"{SETTING}{go}{command}".encode("utf-8", "replace").decode()
        return await self.box.run(text, max(0.1, min(seconds, self.left)), OUTPUT)

    async def bash(
        self, command: str, timeout: float = COMMAND_SECONDS, description: str = ""
    ) -> str:
        """Runs `bash` and `execute_bash`."""
        return shown(await self.run(command, timeout))

    async def shell_command(
        self, command: str, workdir: str = "", timeout_ms: float = 1000 * COMMAND_SECONDS
    ) -> str:
        """Runs Codex's `shell_command`."""
        return shown(await self.run(command, timeout_ms / 1000, workdir))

    async def found(self, command: str, folder: str = "") -> str:
        """Returns a search's output. Raises ToolError if it failed."""
        ran = await self.run(f"set -o pipefail; {command}", SEARCH_SECONDS, folder)
        if ran.code not in (0, 1, CUT_OFF):
            raise ToolError(shown(ran))
        return ran.output.rstrip("\n")

    # --- files --------------------------------------------------------------------------------

    def path(self, path: str) -> str:
        """Returns the absolute form of a path, which may be relative to the repository."""
        if not path or "\0" in path or len(path) > 4000:
            raise ToolError(f"{path[:100]!r} is not a path")
        return str(PurePosixPath(self.workdir, path.encode("utf-8", "replace").decode()))

    async def text(self, path: str) -> str:
        """Returns a file's text, with bytes that are not UTF-8 as surrogates. Raises ToolError."""
        content = await self.box.get(self.path(path), LARGEST + 1)
        if content is None:
            raise ToolError(f"{path} is not a file that can be read")
        if len(content) > LARGEST:
            raise ToolError(f"{path} has more than {LARGEST:,} bytes: use a command")
        return content.decode("utf-8", "surrogateescape")

    async def put(self, path: str, text: str) -> None:
        """Writes a file. Raises ToolError if that cannot be done."""
        try:
            content = text.encode("utf-8", "surrogateescape")
        except UnicodeEncodeError:
            raise ToolError("the text contains a lone surrogate") from None
        if len(content) > LARGEST:
            raise ToolError(f"{path} would have more than {LARGEST:,} bytes")
        try:
            await self.box.put(self.path(path), content)
        except ValueError as error:
            raise ToolError(f"{path} cannot be written: {error}") from None

    async def listed(self, path: str, depth: int) -> list[str]:
        """Lists a folder without hidden files; folder names end in /. Raises ToolError."""
        depth = max(1, min(depth, 20))
        own = r"-mindepth 1 -maxdepth %d -name '.?*' -prune -o -mindepth 1 -maxdepth %d"
        kinds = r"\( -type d -printf '%P/\n' -o -printf '%P\n' \)"
        search = f"find -H {shlex.quote(self.path(path))} {own % (depth, depth)} {kinds}"
        said = await self.found(f"test -d {shlex.quote(self.path(path))} && {search} | sort")
        if not said and await self.found(f"test -d {shlex.quote(self.path(path))} || echo no"):
            raise ToolError(f"{path} is not a file or folder that can be read")
        return said.splitlines()

    async def numbered(self, path: str, first: int, count: int) -> str:
        """Returns some of a file's lines, with their numbers; or a folder's entries."""
        try:
            lines = (await self.text(path)).split("\n")
        except ToolError as error:
            if "is not a file" not in str(error):
                raise
            return "\n".join(await self.listed(path, 2)) or "[an empty folder]"
        if lines[-1] == "":
            lines.pop()
        if not lines:
            return "[an empty file]"
        if not 1 <= first <= len(lines) or count < 1:
            raise ToolError(f"{path} has lines 1 to {len(lines)}")
        last = min(len(lines), first + count - 1)
        rest = f"\n[lines {first} to {last} of {len(lines)}]" if last < len(lines) else ""
        return numbers(lines, first, count) + rest

    async def replaced(self, path: str, old: str, new: str, every: bool) -> str:
        """Replaces a text that occurs once, or each occurrence if `every`; shows the change."""
        text = await self.text(path)
        if not old:
            raise ToolError("the text to replace is empty")
        if old == new:
            raise ToolError("both texts are the same")
        count = text.count(old)
        if count != 1 and not (every and count):
            raise ToolError(f"{path} contains this text {count} times, expected once")
        await self.put(path, text.replace(old, new))
        line = text[: text.index(old)].count("\n") + 1
        return await self.changed(path, line, new.count("\n") + 1)

    async def changed(self, path: str, line: int, count: int) -> str:
        """Shows the file around a change of `count` lines from `line` on."""
        lines = (await self.text(path)).split("\n")
        first = max(1, line - AROUND)
        return f"{path} was changed:\n{numbers(lines, first, line + count + AROUND - first)}"

    async def write(self, file_path: str, content: str) -> str:
        """Runs OpenCode's `write`."""
        await self.put(file_path, content)
        return f"{file_path} was written"

    async def edit(
        self, file_path: str, old_string: str, new_string: str, replace_all: bool = False
    ) -> str:
        """Runs OpenCode's `edit`."""
        return await self.replaced(file_path, old_string, new_string, replace_all)

    async def read(self, file_path: str, offset: int = 1, limit: int = 2000) -> str:
        """Runs `read` and `read_file`."""
        return await self.numbered(file_path, offset or 1, limit)

    async def str_replace_editor(self, command: str, path: str, **given: Unpack[Edit]) -> str:
        """Runs OpenHands' editor."""
        if command == "view":
            first, last = [*given.get("view_range", (1, -1)), -1, -1][:2]
            count = LARGEST if last < 0 else last - first + 1
            return await self.numbered(path, first, count)
        needed = EDITS[command].split()
        if not given.keys() >= set(needed):
            raise ToolError(f"{command} needs {' and '.join(needed)}")
        if command == "create":
            if await self.box.get(self.path(path), 1) is not None:
                raise ToolError(f"{path} exists already")
            return await self.write(path, given["file_text"])
        if command == "str_replace":
            return await self.replaced(path, given["old_str"], given.get("new_str", ""), False)
        lines = (await self.text(path)).split("\n")
        new = given["new_str"].split("\n")
        at = given["insert_line"]
        if not 0 <= at <= len(lines):
            raise ToolError(f"insert_line is {at}, expected 0 to {len(lines)}")
        await self.put(path, "\n".join([*lines[:at], *new, *lines[at:]]))
        return await self.changed(path, at + 1, len(new))

    async def apply_patch(self, input: str) -> str:
        """Runs Codex's `apply_patch`, which changes nothing if one of the changes does not fit."""
        try:
            changes = codex_patch.parsed(input)
            written: dict[str, str | None] = {}
            for change in changes:
                if change.text is not None:
                    written[change.path] = change.text
                    continue
                text = written.get(change.path) or await self.text(change.path)
                target = change.to or change.path
                written[change.path] = None
                if change.to is not None:
                    written[target] = codex_patch.updated(text, change)
        except ValueError as error:
            raise ToolError(str(error)) from None
        for path, new in written.items():
            if new is not None:
                await self.put(path, new)
        gone = [shlex.quote(self.path(path)) for path, new in written.items() if new is None]
        if gone:
            await self.found(f"rm -f -- {' '.join(gone)}")
        said = (f"{'D' if new is None else 'M'} {path}" for path, new in written.items())
        return "Done:\n" + "\n".join(said)

    # --- searches -----------------------------------------------------------------------------

    async def list_dir(
        self, dir_path: str = "", offset: int = 1, limit: int = 0, depth: int = 2, path: str = "."
    ) -> str:
        """Runs Codex's `list_dir`, which shows a page, and OpenCode's, which shows all."""
        entries = await self.listed(dir_path or path, depth)
        limit = limit or (25 if dir_path else len(entries))
        page = entries[max(0, offset - 1) : max(0, offset - 1) + max(0, limit)]
        more = len(entries) - max(0, offset - 1) - len(page)
        text = "\n".join(page or ["[nothing]"])
        return f"{text}\n[and {more} more]" if more > 0 else text

    async def grep_files(
        self, pattern: str, include: str = "", path: str = ".", limit: int = 100
    ) -> str:
        """Runs Codex's `grep_files`."""
        search = grep("-rlIE", pattern, include, self.path(path))
        return await self.found(f"{search} | head -n {max(1, min(limit, 2000))}") or "[no file]"

    async def grep(self, pattern: str, path: str = ".", include: str = "") -> str:
        """Runs OpenCode's `grep`."""
        search = grep("-rnIE", pattern, include, self.path(path))
        return await self.found(f"{search} | cut -c -500 | head -n 200") or "[no line]"

    async def glob(self, pattern: str, path: str = ".") -> str:
        """Runs OpenCode's `glob`."""
        if "\0" in pattern:
            raise ToolError("the pattern has a NUL character")
        names = PLAIN.sub(r"\\\1", pattern.removeprefix(f"{self.path(path)}/"))
        each = 'do [ ! -e "$name" ] || printf "%s\\n" "$name"; done'
        listing = f"shopt -s globstar nullglob; for name in {names}; {each} | head -n 200"
        return await self.found(listing, path) or "[no file]"

    # --- notes --------------------------------------------------------------------------------

    async def think(self, thought: str) -> str:
        """Runs OpenHands' `think`."""
        return "Noted."

    async def update_plan(self, plan: list, explanation: str = "") -> str:
        """Runs Codex's `update_plan`."""
        return "The plan was updated."

    async def todowrite(self, todos: list) -> str:
        """Runs OpenCode's `todowrite`."""
        self.plan = json.dumps(todos, indent=1)
        return self.plan

    async def todoread(self) -> str:
        """Runs OpenCode's `todoread`."""
        return self.plan or "[]"

    async def task_tracker(self, command: str, task_list: list | None = None) -> str:
        """Runs OpenHands' `task_tracker`."""
        if command == "view":
            return await self.todoread()
        return await self.todowrite(task_list or [])


NAMES = (
    "bash", "shell_command", "str_replace_editor", "think", "task_tracker", "list_dir",
    "grep_files", "apply_patch", "update_plan", "read", "write", "edit", "glob", "grep",
    "todowrite", "todoread",
)  # fmt: skip
TOOLS: dict[str, Callable[..., Awaitable[str]]] = {
    "execute_bash": Tools.bash,
    "read_file": Tools.read,
    **{name: getattr(Tools, name) for name in NAMES},
}


def fitting(given: dict[str, Json], schema: dict) -> dict[str, Json]:
    """Returns the given arguments that a tool accepts. Raises ToolError if they do not fit.

    Tool-call parsers leave numbers and lists as text if they do not know the tool's types.
    """
    known: dict[str, Json] = {}
    for name, of in schema["properties"].items():
        value = given.get(name)
        if value is None:
            continue
        if isinstance(value, str) and of["type"] != "string":
            try:
                value = json.loads(value.lower() if of["type"] == "boolean" else value)
            except (ValueError, RecursionError):
                raise ToolError(f"{name} is {value[:100]!r}, expected a {of['type']}") from None
        known[name] = value
    try:
        error = next(validator(schema).iter_errors(known), None)
    except RecursionError:
        raise ToolError("the arguments are nested too deeply") from None
    if error:
        raise ToolError(f"{error.json_path.removeprefix('$.')}: {error.message[:200]}")
    return known


def grep(options: str, pattern: str, include: str, path: str) -> str:
    """Returns the command for a search."""
    if "\0" in pattern + include:
        raise ToolError("the pattern has a NUL character")
    names = f" --include={shlex.quote(include)}" if include else ""
    target = f"-e {shlex.quote(pattern)} -- {shlex.quote(path)}"
    return f"grep {options} --exclude-dir=.git{names} {target}"


def numbers(lines: list[str], first: int, count: int) -> str:
    """Returns `count` lines with their numbers, as `cat -n` shows them."""
    some = lines[first - 1 : first - 1 + count]
    text = "\n".join(f"{number:6}\t{line}" for number, line in enumerate(some, first))
    return text.encode("utf-8", "replace").decode()


def shown(ran: "Ran") -> str:
    """Returns a command's output, and how it ended unless it succeeded."""
    output = ran.output.rstrip("\n")
    if ran.ended:
        why = {"time": f"after {ran.seconds:.0f} s", "memory": "for its memory"}
        return f"{output}\n[the command was ended {why.get(ran.ended, '')}]".lstrip("\n")
    if ran.code:
        return f"{output}\n[exit code {ran.code}]".lstrip("\n")
    return output or "[no output]"
