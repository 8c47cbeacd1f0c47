"""The proof in an answer of envs/proofs/lean.py, and whether Lean is there for it.

No environment by itself.
"""

import functools
import re
import shlex
import shutil
from pathlib import Path

from envs.rollout import services

EXPECTED = (
    "a command such as `env LEAN_PATH=... /opt/lean/bin/lean` (elan installs Lean, `lake exe cache "
    "get` Mathlib, `lake env` says LEAN_PATH), or services.sandbox = 'http'"
)
LANGUAGES = ("lean4", "lean3", "lean", "")


def code_of(text: str) -> str:
    """The last fenced block of the first language that has one, else the text without fences."""
    if code := code_block(text):
        return code
    text = re.sub(r"\A\s*```(?:lean4|lean3|lean)?", "", text).strip()
    return text.removesuffix("```").strip()


def code_block(text: str, languages: tuple[str, ...] = LANGUAGES) -> str:
    """The last block that any of the languages opens, the first of them that has one."""
    for language in languages:
        found, at = None, 0
        while (start := text.find("```" + language, at)) >= 0:
            start += 3 + len(language)
            if (end := text.find("```", start)) < 0:
                break
            found, at = text[start:end], end + 3
        if found is not None:
            return found.strip()
    return ""


def proof_of(code: str) -> str:
    """The code after the `:=` and `by` of the first theorem or example; all code without one."""
    lines = code.strip().splitlines()
    heads = (i for i, line in enumerate(lines) if re.match(r"\s*(?:theorem|example)\b", line))
    first = next(heads, len(lines))
    assigned = (i for i in range(first, len(lines)) if ":=" in lines[i])
    if (at := next(assigned, None)) is None:
        return code.strip()
    same_line = lines[at].split(":=", 1)[1].strip()
    proof = [same_line] * bool(same_line) + lines[at + 1 :]
    head = proof[0].lstrip() if proof else ""
    if head == "by":
        proof = proof[1:]
    elif head.startswith("by "):
        proof[0] = head[3:]
    return "\n".join(proof).rstrip()


@functools.cache  # it is asked for every row
def unavailable(command: str) -> str:
    """Why Lean cannot be started by services.lean, and how to mend it; "" for nothing."""
    known = command and shutil.which(shlex.split(command)[0])
    absent = ": no such command;" if command else ","
    return "" if known else f"services.lean = {command!r}{absent} expected {EXPECTED}"


def folders(command: list[str]) -> list[str]:
    """The folders that a command needs beside /usr: those that it names, and of its programs."""
    program = shutil.which(command[0]) or command[0]
    named = [Path(path) for word in [program, *command] for path in re.findall(r"/[^:=]+", word)]
    found = [path if path.is_dir() else path.resolve().parent for path in named if path.exists()]
    tops = [path.parent if path.name == "bin" else path for path in found]
    return sorted({str(path) for path in tops if not path.is_relative_to("/usr")})


services.CHECKS["lean"] = lambda _: unavailable(services.current().lean)
