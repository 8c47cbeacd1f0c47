"""Compares calls to coding agents' tools by kind, target and similarity.

The rules come from NeMo-Gym's resources_servers/swe_pivot. `kind` is a category of TOOLS; `found`
and `wanted` are the arguments in the answer's call and in the expected call.
"""

import json
import re
from collections.abc import Mapping
from difflib import SequenceMatcher
from typing import Any

from envs import Json

TOOLS = {
    "edit": """str_replace_editor text_editor file_editor code_editor edit_file modify_file
        update_file file_edit edit modify apply_patch patch_file apply_diff apply_changes write
        write_file save_file create_file""",
    "bash": """execute_bash run_bash bash_exec shell_run shell bash terminal shell_command shell_cmd
        run_shell_cmd exec_command exec_cmd""",
    "search": """grep search_text find_pattern text_search glob find_files file_glob match_files
        grep_files search_files find_in_files code_search list_dir ls show_dir ls_dir
        list_directory""",
    "read": """read read_file view_file cat_file view file_view inspect show_file
        read_file_content""",
    "finish": "finish submit",
    "think": "think",
    "planning": """task_tracker todo_tracker plan_tracker todo_read todo_write update_plan
        list_tasks update_tasks read_todos write_todos edit_plan modify_plan""",
}
KINDS: dict[str, str] = {}  # by lower-case name, with and without underscores (StrReplaceEditor)
for _kind, _names in TOOLS.items():
    for _name in _names.split():
        KINDS[_name] = _kind
        KINDS[_name.replace("_", "")] = _kind
PATH = re.compile(r"""(?:^|[\s='"(])((?:/[\w._-]+)+|\.\.?/[\w._/-]+|[\w._-]+/[\w._/-]+)""")
COMPARED = 2000  # characters that are compared; the time grows with their square
LONGEST = 100_000  # characters of a command that are searched for paths


def kind_of(tool: str) -> str:
    """Returns a tool's purpose: a key of TOOLS, or "unknown"."""
    return KINDS.get(tool.lower(), "unknown")


def same_tool(found: str, wanted: str) -> bool:
    """Returns whether two tools have the same name, or the same known purpose."""
    alike = kind_of(found) == kind_of(wanted) != "unknown"
    return found.lower() == wanted.lower() or alike


def path_of(args: Mapping[str, Json]) -> str:
    """Returns the file or folder that a call names, or ""."""
    return _first(args, "path", "file", "file_path", "filename", "file_name").strip()


def command_of(args: Mapping[str, Json]) -> str:
    """Returns a call's shell command, or ""."""
    return _first(args, "command", "cmd").strip()


def program_of(command: str) -> str:
    """Returns the program that a shell command starts, without its folder."""
    return command.split(None, 1)[0].rpartition("/")[2] if command.strip() else ""


def paths_in(command: str) -> list[str]:
    """Returns the words in a shell command that look like paths."""
    found = PATH.findall(command[:LONGEST])
    return [path for path in found if not path.startswith("--") and len(path) > 2]


def edited(args: Mapping[str, Json]) -> str:
    """Returns the text that an edit replaces, then the text that it writes."""
    if "new_str" in args:
        return f"{args.get('old_str', '')}\n{args['new_str']}"
    return _first(args, "patch", "diff", "content", "file_text")


def same_target(kind: str, found: Mapping[str, Json], wanted: Mapping[str, Json]) -> bool:
    """Returns whether calls of one kind work on the same file, lines or program."""
    if kind == "edit":
        commands = {str(args.get("command", "")) for args in (found, wanted)} - {""}
        return len(commands) < 2 and _same_path(found, wanted, 2) and _same_lines(found, wanted)
    if kind in ("search", "read"):
        return _same_path(found, wanted, 3)
    if kind != "bash" or not command_of(wanted):
        return True
    run = command_of(found)
    expected = command_of(wanted)
    ours = {_end(path, 3) for path in paths_in(run)}
    theirs = {_end(path, 3) for path in paths_in(expected)}
    return (
        program_of(run) == program_of(expected)
        and (not ours or not theirs or bool(ours & theirs))
        and _ratio(run, expected) >= 0.3
    )


def similarity(kind: str, found: Mapping[str, Json], wanted: Mapping[str, Json]) -> float:
    """Returns the similarity of two calls of one kind, 0 to 1; 1 if only their target matters."""
    if kind == "bash":
        run = command_of(found)
        expected = command_of(wanted)
        return _ratio(run, expected) if run and expected else 1.0
    if kind != "edit":
        return 1.0
    old, new = _old_and_new(found)
    expected_old, expected_new = _old_and_new(wanted)
    if (old or new) and (expected_old or expected_new):
        if old == new and expected_old != expected_new:
            return 0.0  # an edit that changes nothing is often similar to the expected edit
        return min(_ratio(old, expected_old), _ratio(new, expected_new))
    return _ratio(edited(found), edited(wanted))


def _old_and_new(args: Mapping[str, Json]) -> tuple[str, str]:
    return str(args.get("old_str", "")), str(args.get("new_str", ""))


def size_penalty(kind: str, args: Mapping[str, Json], most: float) -> float:
    """Returns the penalty for the size of an edit: `most` from 500 characters on."""
    return most * min(len(edited(args)) / 500, 1.0) if kind == "edit" else 0.0


def _first(args: Mapping[str, Json], *keys: str) -> str:
    return next((str(args[key]) for key in keys if key in args), "")


def _end(path: str, parts: int) -> str:
    return "/".join(path.strip("/").split("/")[-parts:])


def _same_path(found: Mapping[str, Json], wanted: Mapping[str, Json], parts: int) -> bool:
    expected = path_of(wanted)
    return not expected or _end(path_of(found), parts) == _end(expected, parts)


def _same_lines(found: Mapping[str, Json], wanted: Mapping[str, Json]) -> bool:
    """Returns whether a view shows 80 % of the expected lines; without a range, it shows all."""
    if found.get("command") != "view" or wanted.get("command") != "view":
        return True
    shown = _lines(found.get("view_range"))
    expected = _lines(wanted.get("view_range"))
    if not shown or not expected:
        return True
    first, last = shown
    start, end = expected
    seen = max(0, min(last, end) - max(first, start))
    return 10 * seen >= 8 * max(1, end - start)


def _lines(value: Any) -> tuple[int, int] | None:
    try:
        first, last = json.loads(value) if isinstance(value, str) else value
        return int(first), int(last)
    except (TypeError, ValueError, OverflowError, RecursionError):
        return None


def _ratio(found: str, wanted: str) -> float:
    """Returns difflib's similarity of the first COMPARED characters; 1 for two empty texts."""
    if not found or not wanted:
        return float(found == wanted)
    return SequenceMatcher(None, found[:COMPARED], wanted[:COMPARED]).ratio()
