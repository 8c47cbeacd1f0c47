"""Answers of agents that repair a bug, with each set of tools."""

import json

from launch.tiny_image import BUGS
from rollout.response import Response


def solving(harness: str, name: str) -> list[str]:
    """Answers that repair one of BUGS with a set of tools."""
    wrong, right, _ = BUGS[name]
    file, line = f"{name}.py", f"from ops import {wrong} as {name}"
    look = f"python3 -c 'from {name} import {name}; print({name}(7, 2))'"
    path = f"/testbed/{file}"
    answers = {
        "bash": [
            calling("bash", command=f"cat {file}; {look}"),
            calling("bash", command=f"sed -i s/{wrong}/{right}/ {file}"),
            "Done.",
        ],
        "openhands": [
            calling("str_replace_editor", command="view", path=path),
            calling("str_replace_editor", command="str_replace", path=path,
                    old_str=line, new_str=line.replace(wrong, right)),
            calling("execute_bash", command=look, timeout=20),
            calling("finish", message="Done."),
        ],
        "codex": [
            calling("read_file", file_path=path),
            calling("apply_patch", input=f"*** Begin Patch\n*** Update File: {file}\n"
                    f"-{line}\n+{line.replace(wrong, right)}\n*** End Patch"),
            "Done.",
        ],
        "opencode": [
            calling("grep", pattern=wrong, include="*.py"),
            calling("edit", file_path=path, old_string=wrong, new_string=right),
            "Done.",
        ],
    }  # fmt: skip
    return answers[harness]


SCRIPT = """python3 - <<'END'
from pathlib import Path
path = Path({!r})
path.write_text(path.read_text().replace({!r}, {!r}))
END"""


def looking(harness: str, file: str) -> list[str]:
    """Answers that look at a file, and change nothing."""
    path = f"/testbed/{file}"
    looks = {
        "bash": calling("bash", command=f"cat {file}"),
        "openhands": calling("str_replace_editor", command="view", path=path),
        "codex": calling("read_file", file_path=path),
        "opencode": calling("read", file_path=path),
    }
    ends = calling("finish", message="Done.") if harness == "openhands" else "Done."
    return [looks[harness], ends]


def changing(harness: str, file: str, old: str, new: str) -> list[str]:
    """Answers that look at a file, and put lines in the place of others, which are there once."""
    path = f"/testbed/{file}"
    lines = [f"-{line}" for line in old.splitlines()] + [f"+{line}" for line in new.splitlines()]
    patch = ["*** Begin Patch", f"*** Update File: {file}", *lines, "*** End Patch"]
    changes = {
        "bash": calling("bash", command=SCRIPT.format(file, old, new)),
        "openhands": calling("str_replace_editor", command="str_replace", path=path,
                             old_str=old, new_str=new),
        "codex": calling("apply_patch", input="\n".join(patch)),
        "opencode": calling("edit", file_path=path, old_string=old, new_string=new),
    }  # fmt: skip
    look, ends = looking(harness, file)
    return [look, changes[harness], ends]


def calling(*calls: str | dict, **given: object) -> Response:
    """An answer that calls a tool, or of (name, arguments) pairs several ones."""
    pairs = list(zip(calls[::2], calls[1::2], strict=True)) if given == {} else [(calls[0], given)]
    made = [
        {"type": "function_call", "name": name, "arguments": json.dumps(arguments)}
        for name, arguments in pairs
    ]
    return Response(f"<tool_call>{len(made)}</tool_call>", content="", tool_calls=made)
