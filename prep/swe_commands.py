"""States how the tests of SWE-Gym's repositories and of SWE-rebench-V2's records are run.

The commands, the parsers' names and the repositories are those of github.com/SWE-Gym/SWE-Bench-Fork
at commit 242429c, and of NeMo-Gym's SWERebenchDatasetProcessor. Both install the repository again
before the tests. Here its image has it installed, and a box has no network.
"""

import re
from typing import Any

WORKDIR = "/testbed"
SCRIPT = """source /opt/miniconda3/bin/activate
conda activate testbed
cd {workdir}
: '>>>>> Start Test Output'
{command}
: '>>>>> End Test Output'
"""
BARE = """cd {workdir}
{install}
: '>>>>> Start Test Output'
{command}
: '>>>>> End Test Output'
"""
PYDANTIC = "pytest -rA --tb=short -vv -o console_output_style=classic --no-header"
COMMANDS = {  # of SWE-Gym's repositories; the same for all of their versions
    "bokeh/bokeh": "pytest -rA -n0",
    "conan-io/conan": "PYTHONPATH=${PYTHONPATH:-}:$PWD pytest -n0 -rA",
    "dask/dask": "pytest -n0 -rA --color=no",
    "facebookresearch/hydra": "pytest -rA --tb=long",
    "getmoto/moto": "pytest -n0 -rA",
    "hypothesisworks/hypothesis": "pytest -n0 -rA --tb=no --no-header",
    "iterative/dvc": "pytest -rA",
    "modin-project/modin": "pytest -n0 -rA",
    "pandas-dev/pandas": "pytest -rA --tb=long",
    "project-monai/monai": "pytest -rA",
    "pydantic/pydantic": PYDANTIC,
}
PARSERS = {"pydantic/pydantic": "parse_log_pytest_pydantic"}  # of the others: parse_log_pytest
CHANGED = re.compile(r"^\+\+\+ b/(.*\.py)$", re.M)  # Python files that a patch leaves


def of_swe_gym(record: dict[str, Any]) -> dict[str, str]:
    """Returns eval_script and log_parser of a SWE-Gym record, or why there are none.

    The tests of python/mypy are data files, to which the judge cannot add tests of its own.
    """
    repo = str(record.get("repo")).lower()
    if repo not in COMMANDS:
        return {"why": f"repo is {repo!r}, expected one of {', '.join(COMMANDS)}"}
    files = CHANGED.findall(str(record.get("test_patch")))
    if not files:
        return {"why": "test_patch leaves no Python file, expected the files of its tests"}
    command = " ".join([COMMANDS[repo], *files])
    return {
        "eval_script": SCRIPT.format(workdir=WORKDIR, command=command),
        "log_parser": PARSERS.get(repo, "parse_log_pytest"),
    }


def of_swe_rebench(config: dict[str, Any], workdir: str) -> dict[str, str]:
    """Returns eval_script and log_parser of a SWE-rebench-V2 record, or why there are none.

    `config` is its install_config. If it has several test commands, the exit code is that of the
    last one that failed.
    """
    tests = commands(config.get("test_cmd"))
    if not tests:
        return {"why": "install_config.test_cmd is missing, expected a command or a list of them"}
    command = tests[0]
    if len(tests) > 1:
        each = [f"{test} || failed=$?" for test in tests]
        command = "\n".join(["failed=0", *each, "(exit $failed)"])
    install = "\n".join(commands(config.get("install")))
    return {
        "eval_script": BARE.format(workdir=workdir, install=install, command=command),
        "log_parser": str(config.get("log_parser") or ""),
    }


def commands(value: Any) -> list[str]:
    """Returns shell commands that are given as a text or as a list of texts."""
    given = value if isinstance(value, list) else [value]
    return [one for one in given if isinstance(one, str) and one.strip()]
