"""Extracts the proof from an answer for envs/proofs/lean.py, and finds the Lean that compiles it.

Not an environment.
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
    "a folder that `bash launch/lean.sh FOLDER` creates, a command such as "
    "`env LEAN_PATH=... lean`, or http://HOST:PORT of NeMo-Skills' sandbox service"
)
LANGUAGES = ("lean4", "lean3", "lean", "")


def code_of(text: str) -> str:
    """Returns the last fenced block of the first language that has one, else the bare text."""
    if code := code_block(text):
        return code
    text = re.sub(r"\A\s*```(?:lean4|lean3|lean)?", "", text).strip()
    return text.removesuffix("```").strip()


def code_block(text: str, languages: tuple[str, ...] = LANGUAGES) -> str:
    """Returns the last block of the first language that opens one; "" if there is no block."""
    for language in languages:
        found = None
        at = 0
        while (start := text.find("```" + language, at)) >= 0:
            start += 3 + len(language)
            end = text.find("```", start)
            if end < 0:
                break
            found = text[start:end]
            at = end + 3
        if found is not None:
            return found.strip()
    return ""


def proof_of(code: str) -> str:
    """Returns the code after `:=` and `by` in the first theorem or example, else all code."""
    lines = code.strip().splitlines()
    heads = (i for i, line in enumerate(lines) if re.match(r"\s*(?:theorem|example)\b", line))
    first = next(heads, len(lines))
    assigned = (i for i in range(first, len(lines)) if ":=" in lines[i])
    at = next(assigned, None)
    if at is None:
        return code.strip()
    proof = lines[at + 1 :]
    if same_line := lines[at].split(":=", 1)[1].strip():
        proof = [same_line, *proof]
    head = proof[0].lstrip() if proof else ""
    if head == "by":
        proof = proof[1:]
    elif head.startswith("by "):
        proof[0] = head[3:]
    return "\n".join(proof).rstrip()


def url() -> str:
    """Returns the URL of the sandbox service that compiles proofs; "" if a command does so."""
    own = services.current()
    if is_address(own.lean):
        return own.lean
    return own.sandbox_url if own.sandbox == "http" and not own.lean else ""


def command() -> list[str]:
    """Returns the words of the command that compiles a file here.

    Its program is in a folder that launch/lean.sh created, or services.lean is the whole command.
    """
    own = services.current().lean
    program = of_folder(own)
    return [program] if program else shlex.split(own)


def of_folder(lean: str) -> str:
    """Returns the program in a folder from launch/lean.sh; "" if `lean` is not a folder."""
    if not lean or not Path(lean).is_dir():
        return ""
    return str(Path(lean, "bin/lean").absolute())


def problem() -> str:
    """Returns why no proof can be compiled, and the remedy; "" if proofs can be compiled."""
    own = services.current()
    if address := url():
        return service.problem(address)
    if own.sandbox == "http":
        return (
            f"services.lean = {own.lean!r} is a command, but services.sandbox = 'http' runs no "
            "commands: expected a URL"
        )
    if why := unavailable(own.lean):
        return f"services.lean = {own.lean!r}{why} expected {EXPECTED}"
    return ""


@functools.cache  # called for every row
def unavailable(lean: str) -> str:
    """Returns what is wrong with services.lean as a folder or a command; "" if nothing is."""
    if program := of_folder(lean):
        return "" if shutil.which(program) else ": the folder has no program bin/lean;"
    try:
        words = shlex.split(lean)
    except ValueError as error:
        return f": {error};"
    if words and shutil.which(words[0]):
        return ""
    return ": no such folder or command;" if lean else ","


def folders(command: list[str]) -> list[str]:
    """Returns the folders outside /usr that a command names, or that contain its programs."""
    program = shutil.which(command[0]) or command[0]
    found = set()
    for word in [program, *command]:
        for path in map(Path, re.findall(r"/[^:=]+", word)):
            if path.exists():
                folder = path if path.is_dir() else path.resolve().parent
                found.add(folder.parent if folder.name == "bin" else folder)
    return sorted(str(folder) for folder in found if not folder.is_relative_to("/usr"))


NEED = services.Need("lean", problem)
