"""Each script starts from a clean clone: it finds what it imports, without pytest's paths."""

import os
import re
import subprocess

import pytest

from support import forked_python
from support.program import ROOT, copy, ran

FILES = subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).split()
SCRIPTS = [
    name
    for name in FILES
    if re.fullmatch(r"((bench|docs|launch|tests)/)?(?!test_)\w+\.py", name)
    and "__main__" in (ROOT / name).read_text(encoding="utf-8")
]
ELSEWHERE = {"trl", "verifiers"}  # libraries of environments of their own, in requirements/
PAGES = [name for name in FILES if name.endswith(".md")]
# As `python SCRIPT` finds modules; what stands below `if __name__ == "__main__"` does not run.
IMPORT = """
import os, runpy, sys
sys.path[0] = os.path.dirname(sys.argv[1])
runpy.run_path(sys.argv[1], run_name="imported")
"""


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """A clone without data and models, and a Python whose libraries are loaded."""
    folder = copy(tmp_path_factory.mktemp("clone"))
    python = tmp_path_factory.mktemp("warm") / "python"
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with forked_python.python(python, env):
        yield folder, python


def test_scripts_that_pages_name_are_among_these():
    named = set()
    for page in PAGES:
        text = (ROOT / page).read_text(encoding="utf-8")
        named |= set(re.findall(r"\b(?:python|bash) ((?:bench|tests|launch|docs)/\w+\.py)", text))
    assert {"tests/gym.py", "tests/kills.py", "bench/sync.py"} <= named <= set(SCRIPTS)


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_finds_what_it_imports(script, clone):
    folder, python = clone
    done = ran(python, "-c", IMPORT, folder / script, root=folder.parent, seconds=600)
    lacks = re.search(r"No module named '(\w+)", done.stderr)
    if lacks and lacks[1] in ELSEWHERE:
        pytest.skip(f"{script} needs {lacks[1]}, which this environment lacks")
    assert done.returncode == 0, done.stderr
