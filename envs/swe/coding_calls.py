"""Calls of coding agents' tools: kind, target and likeness of two calls.

As in resources_servers/swe_pivot of NeMo-Gym. `kind` is a category of TOOLS, `found` and `wanted`
are the arguments of the answer's call and of the expected one.
"""

import json
import re
from difflib import SequenceMatcher
from typing import Any

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
KINDS = {  # both str_replace_editor and StrReplaceEditor, in lower case
    form: kind
    for kind, names in TOOLS.items()
    for name in names.split()
    for form in (name, name.replace("_", ""))
}
PATH = re.compile(r"""(?:^|[\s='"(])((?:/[\w._-]+)+|\.\.?/[\w._/-]+|[\w._-]+/[\w._/-]+)""")
COMPARED = 2000  # characters: the time grows with their square
LONGEST = 100_000  # characters in which paths are looked for


def kind_of(tool: str) -> str:
    """The purpose of a tool: a key of TOOLS, or "unknown"."""
    return KINDS.get(tool.lower(), "unknown")


def same_tool(found: str, wanted: str) -> bool:
    """Whether two tools have the same name, or the same known purpose."""
    alike = kind_of(found) == kind_of(wanted) != "unknown"
    return found.lower() == wanted.lower() or alike


def path_of(args: dict[str, Any]) -> str:
    """The file or folder of a call, "" for none."""
    return _first(args, "path", "file", "file_path", "filename", "file_name").strip()


def command_of(args: dict[str, Any]) -> str:
    """The shell command of a call, "" for none."""
    return _first(args, "command", "cmd").strip()


def program_of(command: str) -> str:
    """The program that a shell command starts, without its folder."""
    return command.split(None, 1)[0].rpartition("/")[2] if command.strip() else ""


def paths_in(command: str) -> list[str]:
    """The words of a shell command that look like paths."""
    found = PATH.findall(command[:LONGEST])
    return [path for path in found if not path.startswith("--") and len(path) > 2]


def edited(args: dict[str, Any]) -> str:
    """The text that an edit replaces, then the text that it writes."""
    if "new_str" in args:
        return f"{args.get('old_str', '')}\n{args['new_str']}"
    return _first(args, "patch", "diff", "content", "file_text")


def same_target(kind: str, found: dict[str, Any], wanted: dict[str, Any]) -> bool:
    """Whether calls of one kind work on the same file, lines or program."""
    if kind == "edit":
        commands = {str(args.get("command", "")) for args in (found, wanted)} - {""}
        return len(commands) < 2 and _same_path(found, wanted, 2) and _same_lines(found, wanted)
    if kind in ("search", "read"):
        return _same_path(found, wanted, 3)
    if kind != "bash" or not command_of(wanted):
        return True
    run, expected = command_of(found), command_of(wanted)
    ours, theirs = ({_end(path, 3) for path in paths_in(text)} for text in (run, expected))
    return (
        program_of(run) == program_of(expected)
        and (not ours or not theirs or bool(ours & theirs))
        and _ratio(run, expected) >= 0.3
    )


def similarity(kind: str, found: dict[str, Any], wanted: dict[str, Any]) -> float:
    """The likeness of two calls of one kind, from 0 to 1; 1 where only their target matters."""
    if kind == "bash":
        run, expected = command_of(found), command_of(wanted)
        return _ratio(run, expected) if run and expected else 1.0
    if kind != "edit":
        return 1.0
    texts = [[str(args.get(key, "")) for key in ("old_str", "new_str")] for args in (found, wanted)]
    if any(texts[0]) and any(texts[1]):
        if len(set(texts[0])) == 1 < len(set(texts[1])):
            return 0.0  # an edit that changes nothing is often like the one that was expected
        return min(_ratio(*pair) for pair in zip(*texts, strict=True))
    return _ratio(edited(found), edited(wanted))


def size_penalty(kind: str, args: dict[str, Any], most: float) -> float:
    """The penalty for the size of an edit: `most` from 500 characters on."""
    return most * min(len(edited(args)) / 500, 1.0) if kind == "edit" else 0.0


def _first(args: dict[str, Any], *keys: str) -> str:
    return next((str(args[key]) for key in keys if key in args), "")


def _end(path: str, parts: int) -> str:
    return "/".join(path.strip("/").split("/")[-parts:])


def _same_path(found: dict[str, Any], wanted: dict[str, Any], parts: int) -> bool:
    expected = path_of(wanted)
    return not expected or _end(path_of(found), parts) == _end(expected, parts)


def _same_lines(found: dict[str, Any], wanted: dict[str, Any]) -> bool:
    """Whether a view shows 80 % of the expected lines; without a range it shows all."""
    if found.get("command") != "view" or wanted.get("command") != "view":
        return True
    shown, expected = (_lines(args.get("view_range")) for args in (found, wanted))
    if not shown or not expected:
        return True
    (first, last), (start, end) = shown, expected
    seen = max(0, min(last, end) - max(first, start))
    return 10 * seen >= 8 * max(1, end - start)


def _lines(value: Any) -> tuple[int, int] | None:
    try:
        first, last = json.loads(value) if isinstance(value, str) else value
        return int(first), int(last)
    except (TypeError, ValueError, OverflowError, RecursionError):
        return None


def _ratio(found: str, wanted: str) -> float:
    """difflib's likeness of the first characters; 1 for two empty texts."""
    if not found or not wanted:
        return float(found == wanted)
    return SequenceMatcher(None, found[:COMPARED], wanted[:COMPARED]).ratio()
