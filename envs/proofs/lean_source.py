"""The proof in an answer of envs/proofs/lean.py, and whether Lean is there for it.

No environment by itself.
"""

import functools
import re
import shlex
import shutil
from pathlib import Path

from envs import services
from envs.sandbox import service
from settings.environment_services import is_address

EXPECTED = (
    "a folder that `bash launch/lean.sh FOLDER` makes, a command such as `env LEAN_PATH=... lean`, "
    "or http://HOST:PORT of NeMo-Skills' sandbox service"
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


def url() -> str:
    """The sandbox service that compiles proofs; "" where a command does."""
    own = services.current()
    if is_address(own.lean):
        return own.lean
    return own.sandbox_url if own.sandbox == "http" and not own.lean else ""


def command() -> list[str]:
    """What compiles a file here: the program of a folder that launch/lean.sh made, or a command."""
    own = services.current().lean
    return [program] if (program := of_folder(own)) else shlex.split(own)


def of_folder(lean: str) -> str:
    """The program in a folder that launch/lean.sh made; "" where `lean` is no folder."""
    return str(Path(lean, "bin/lean").absolute()) if lean and Path(lean).is_dir() else ""


def problem() -> str:
    """Why no proof can be compiled, and how to mend it; "" for nothing."""
    own = services.current()
    if address := url():
        return service.problem(address)
    told = f"services.lean = {own.lean!r}"
    if own.sandbox == "http":
        return f"{told} is a command, and services.sandbox = 'http' runs none: expected the URL"
    return unavailable(own.lean) and f"{told}{unavailable(own.lean)} expected {EXPECTED}"


@functools.cache  # it is asked for every row
def unavailable(lean: str) -> str:
    """What is wrong with services.lean as a folder or a command; "" for nothing."""
    if program := of_folder(lean):
        return "" if shutil.which(program) else ": the folder has no program bin/lean;"
    try:
        words = shlex.split(lean)
    except ValueError as error:
        return f": {error};"
    absent = ": no such folder or command;" if lean else ","
    return "" if words and shutil.which(words[0]) else absent


def folders(command: list[str]) -> list[str]:
    """The folders that a command needs beside /usr: those that it names, and of its programs."""
    program = shutil.which(command[0]) or command[0]
    named = [Path(path) for word in [program, *command] for path in re.findall(r"/[^:=]+", word)]
    found = [path if path.is_dir() else path.resolve().parent for path in named if path.exists()]
    tops = [path.parent if path.name == "bin" else path for path in found]
    return sorted({str(path) for path in tops if not path.is_relative_to("/usr")})


NEED = services.Need("lean", problem)
