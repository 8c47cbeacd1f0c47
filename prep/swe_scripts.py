"""Asks prep/swe_tables.py, which runs in another Python, how a repository's tests are run."""

import contextlib
import json
import os
import subprocess
from typing import Any

from core.errors import InputError
from prep import swe_tables
from prep.swe_formats import Refused

SECONDS = 120.0  # seconds that the process may take to end


class Scripts:
    """A process of the Python that has the tables; it starts at the first record that needs it."""

    def __init__(self, python: str) -> None:
        self.python = python
        self.process: subprocess.Popen[str] | None = None

    def of(self, kind: str, record: dict[str, Any]) -> dict[str, str]:
        """Returns the answer for a record. Raises Refused if there is none."""
        if not self.python:
            raise Refused(
                "its tests' script is missing, expected eval_script, or --tables with "
                f"{swe_tables.PACKAGES[kind]}"
            )
        answer = self.answer(kind, record)
        if why := answer.get("why"):
            raise Refused(f"--tables: {why}")
        return answer

    def answer(self, kind: str, record: dict[str, Any]) -> dict[str, str]:
        """Asks the process about a record. Raises InputError if it does not answer."""
        try:
            if self.process is None:
                self.process = subprocess.Popen(
                    [self.python, swe_tables.__file__],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                    env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1"},
                )
            assert self.process.stdin and self.process.stdout
            self.process.stdin.write(json.dumps({"kind": kind, "record": record}) + "\n")
            self.process.stdin.flush()
            return json.loads(self.process.stdout.readline())
        except (OSError, ValueError) as error:
            raise InputError(f"--tables {self.python!r}: expected a Python: {error}") from None

    def __enter__(self) -> "Scripts":
        return self

    def __exit__(self, *_: object) -> None:
        if self.process and self.process.stdin:
            with contextlib.suppress(OSError):
                self.process.stdin.close()
            self.process.wait(SECONDS)
