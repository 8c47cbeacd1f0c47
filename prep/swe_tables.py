"""Looks up how to run a repository's tests in its data set's tables, if the record does not say.

The tables are in the packages that made the data sets. They need different libraries from ours, so
another Python imports them: `python swe_tables.py` answers each line of its input with a line.
Input: {"kind": "bench" or "smith", "record"}. Output: {"eval_script", "log_parser"}, for
SWE-smith {"command", "log_parser"}, or {"why"}.
"""

import contextlib
import importlib
import io
import json
import sys
from typing import Any

PACKAGES = {"bench": "swebench 4.1", "smith": "swesmith"}
WORKDIR = "/testbed"
TESTS = ("FAIL_TO_PASS", "PASS_TO_PASS")


def lists(record: dict[str, Any]) -> list[str]:
    """Returns the tests of both lists, each of which is a list or its JSON."""
    tests: list[str] = []
    for name in TESTS:
        part = record.get(name) or []
        named = json.loads(part) if isinstance(part, str) else part
        if not isinstance(named, list):
            raise TypeError(f"{name} = {named!r}: expected a list of test names")
        tests += named
    return tests


def of_bench(record: dict[str, Any]) -> dict[str, str]:
    """Returns the script that swebench's harness runs, and the name of its parser."""
    make = importlib.import_module("swebench.harness.test_spec.python").make_eval_script_list_py
    specs = importlib.import_module("swebench.harness.constants").MAP_REPO_VERSION_TO_SPECS
    parsers = importlib.import_module("swebench.harness.log_parsers").MAP_REPO_TO_PARSER
    repo = record["repo"]
    version = record["version"]
    if repo not in parsers or version not in specs.get(repo, {}):
        return {"why": f"swebench does not know version {version} of {repo}"}
    spec = specs[repo][version]
    lines = make(record, spec, "testbed", WORKDIR, record["base_commit"], record["test_patch"])
    script = "\n".join(["#!/bin/bash", "set -uxo pipefail", *lines, ""])
    return {"eval_script": script, "log_parser": parsers[repo].__name__}


def of_smith(record: dict[str, Any]) -> dict[str, str]:
    """Returns the test command in SWE-smith's profile of a repository, with the test files."""
    profiles = importlib.import_module("swesmith.profiles")
    python = importlib.import_module("swesmith.profiles.python").PythonProfile
    name = record["instance_id"].rsplit(".", 1)[0]
    try:
        profile = profiles.registry.get(name)
    except KeyError:
        return {"why": f"swesmith does not know {name}"}
    if getattr(type(profile), "log_parser", None) is not python.log_parser:
        return {"why": f"swesmith reads the logs of {name} in its own way"}
    paths = dict.fromkeys(test.partition("::")[0] for test in lists(record))
    command = " ".join([profile.test_cmd, *paths])
    return {"command": command, "log_parser": "swesmith"}


def answer(line: str) -> dict[str, str]:
    """Returns the answer to a line of input."""
    asked = json.loads(line)
    kind, record = asked["kind"], asked["record"]
    try:
        if kind == "smith":
            return of_smith(record)
        return of_bench(record)
    except ImportError as error:
        return {"why": f"{PACKAGES[kind]} cannot be imported: {error}"}
    except Exception as error:  # from the package's own code
        return {"why": f"{PACKAGES[kind]} yields no script: {error!r}"}


def main() -> None:
    """Answers all lines. The packages' own output is dropped."""
    out = sys.stdout
    for line in sys.stdin:
        with contextlib.redirect_stdout(io.StringIO()):
            made = answer(line)
        print(json.dumps(made), file=out, flush=True)


if __name__ == "__main__":
    main()
