"""The judge of repairs: a small repository, its repair, and patches that cheat, in real boxes."""

import asyncio
import os
import time

import pytest

from envs import services
from envs.boxes import box_budget
from envs.boxes.box import Box, Size
from envs.sandbox import sandbox
from envs.services import CheckerError, Limits
from envs.swe import repository, swe_judge
from envs.swe.swe_judge import judge, patch_of, prepare, refusal, tried
from settings.environment_services import Services
from support.box_images import git, make_image
from support.bugs import diff

SOURCE = "def half(x):\n    return x // 2\n\n\ndef double(x):\n    return x + x\n"
GOLD = SOURCE.replace("//", "/")
TESTS = "from calc import double, half\n\n\ndef test_double():\n    assert double(2) == 4\n"
NEW_TESTS = f"""{TESTS}

def test_half():
    assert half(3) == 1.5


def test_half_of_two():
    assert half(2) == 1.0
"""
FILES = {"calc.py": SOURCE, "tests/test_calc.py": TESTS, ".gitignore": "build\n__pycache__\n"}
FILES |= {"pyproject.toml": "[project]\nname = 'calc'\n[tool.pytest.ini_options]\naddopts = '-q'\n"}
RUN = "python -m pytest -rA -p no:cacheprovider tests/test_calc.py"
SCRIPT = f"""#!/bin/bash
set -uxo pipefail
cd /testbed
git status
git -c core.fileMode=false diff BASE
git checkout BASE tests/test_calc.py
git apply -v - <<'EOF_1'
PATCH
EOF_1
: '>>>>> Start Test Output'
{RUN}
: '>>>>> End Test Output'
git checkout BASE tests/test_calc.py
"""
SMALL = Size(memory=600 << 20, disk=64 << 20, processes=60)


@pytest.fixture(scope="module")
def image(tmp_path_factory):
    """A root folder whose repository is at its base; a later commit and a tag hold its repair."""
    if problem := sandbox.problem():
        pytest.skip(f"no sandbox here: {problem}")
    root = make_image(tmp_path_factory.mktemp("judge") / "image", FILES)
    at = root / "testbed"
    (at / "README").write_text("Halves.\n")
    git("add", ".", at=at)
    git("commit", "-qm", "second", at=at)
    (at / "calc.py").write_text(GOLD)
    git("commit", "-qam", "Repair half, closes #12", at=at)
    git("tag", "v2", at=at)
    git("remote", "add", "origin", "https://example.org/calc", at=at)
    git("update-ref", "refs/remotes/origin/main", "HEAD", at=at)
    git("reset", "-q", "--hard", "HEAD~1", at=at)
    git("pack-refs", "--all", at=at)
    before = services.current()
    services.configure(Services(images=str(root.parent)))
    yield root
    services.configure(before)


def changed(image, **files: str) -> str:
    """The patch that gives files of the repository new contents; "__" stands for "/"."""
    at = image / "testbed"
    for name, text in files.items():
        path = at / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    git("add", "-A", at=at)
    patch = git("diff", "--cached", "--binary", at=at)
    git("reset", "-q", "--hard", at=at)
    return patch


@pytest.fixture(scope="module")
def row(image):
    row = {"instance_id": "calc-1", "workdir": "/testbed", "log_parser": "parse_log_pytest"}
    row["base_commit"] = git("rev-parse", "HEAD", at=image / "testbed").strip()
    row["patch"] = changed(image, **{"calc.py": GOLD})
    row["test_patch"] = changed(image, **{"tests/test_calc.py": NEW_TESTS})
    row["tests"] = {"kind": "script", "script": RUN}
    row["FAIL_TO_PASS"] = ["tests/test_calc.py::test_half"]
    row["PASS_TO_PASS"] = [f"tests/test_calc.py::{name}" for name in ("test_double",)]
    row["PASS_TO_PASS"] += ["tests/test_calc.py::test_half_of_two"]
    assert refusal(row) == ""
    return row


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """No instance has been seen to be sound, and boxes are small."""
    monkeypatch.setattr(swe_judge, "_sound", set())
    monkeypatch.setattr(swe_judge, "TESTS", 60.0)


def marked(row: dict) -> dict:
    """The row with a script like SWE-bench's, which applies the tests' patch itself."""
    script = SCRIPT.replace("BASE", row["base_commit"]).replace("PATCH", row["test_patch"])
    return row | {"tests": {"kind": "script", "script": script}}


@pytest.mark.slow
@pytest.mark.smoke
async def test_a_repair_is_resolved_and_nothing_else(image, row):
    for one in (row, marked(row)):
        verdict = await judge(image, one, row["patch"], SMALL)
        assert verdict[:3] == (True, "", False), verdict
        assert verdict.details["fixed"] == verdict.details["kept"] == 1
        assert verdict.details["tampered"] == verdict.details["dropped"] == 0
        assert 0 < verdict.details["seconds"] < 60 and verdict.details["peak"] >= 0
        broken = changed(image, **{"calc.py": GOLD.replace("x + x", "x")})
        verdict = await judge(image, one, broken, SMALL)
        assert verdict[:2] == (False, "tests failed")
        assert (verdict.details["fixed"], verdict.details["kept"]) == (1, 0.5)
        useless = (await tried(image, one, "", SMALL)).verdict
        assert (useless.reason, useless.details["fixed"]) == ("tests failed", 0)
    assert (await judge(image, row, " \n", SMALL))[:2] == (False, "no patch")
    long = await judge(image, row, "+" * (1 << 20) + "\n", SMALL)
    assert long[:2] == (False, "a patch over 1 MiB")


@pytest.mark.slow
async def test_an_agent_starts_with_one_commit(image, row):
    async with Box(image, size=SMALL) as box:
        await prepare(box, row)
        shown = await box.run(
            "git rev-list --all; git log --oneline --reflog; git tag; git remote;"
            " git status --short; cat .git/packed-refs; ls .git/logs",
            20,
        )
        base = row["base_commit"]
        assert shown.output.startswith(f"{base}\n{base[:7]} second\n"), shown.output
        assert not any(word in shown.output for word in ("Repair", "first", "v2", "origin"))
        later = git("rev-parse", "v2", at=image / "testbed").strip()
        older = git("rev-list", "--max-parents=0", "HEAD", at=image / "testbed").strip()
        for commit in (later, older):
            assert (await box.run(f"git cat-file -e {commit}", 20)).code != 0
        assert (await box.run("git fsck", 20)).code == 0
        assert await patch_of(box, row) is None
        await box.run(
            "git config user.name a; git config user.email a@b; sed -i s,//,/, calc.py;"
            " git commit -qam x; echo new >n.txt; git checkout -qb other",
            20,
        )
        patch = await patch_of(box, row)
        assert patch.startswith("diff --git a/calc.py") and "+new" in patch
        await box.run("printf '\\377\\n' >latin.txt; printf '\\0' >zero", 20)
        assert (
            "zero" not in await patch_of(box, row)
            and "latin" not in await patch_of(box, row)
            and "n.txt" in await patch_of(box, row)
        )
        await box.run("head -c 2000000 /dev/zero | tr '\\0' x >big.txt", 20)
        assert (await judge(image, row, await patch_of(box, row))).reason == "a patch over 1 MiB"
        await box.run("rm -rf .git", 20)
        assert await patch_of(box, row) is None


@pytest.mark.slow
async def test_files_of_the_image_that_are_not_committed_are_its_start(image, row):
    (image / "testbed/setup.txt").write_text("of the image\n")
    try:
        async with Box(image, size=SMALL) as box:
            await prepare(box, row)
            count = await box.run("git rev-list --all | wc -l; git status --short", 20)
            assert count.output == "2\n"
            await box.run("sed -i s,//,/, calc.py; echo more >>setup.txt", 20)
            patch = await patch_of(box, row)
        assert "-of the image" not in patch and "+more" in patch
        assert (await judge(image, row, patch, SMALL)).resolved
    finally:
        (image / "testbed/setup.txt").unlink()


# What a policy may leave so that reading its patch takes long, and whether there is a patch then.
SLOW = {
    "git": ("echo 'sleep 98' >/usr/bin/git", True),
    "all programs": ("cp /bin/sleep /s; for p in /usr/bin/*; do cp -f /s $p; done", True),
    "shell": ("echo 'sleep 98' >/b; chmod +x /b; rm /usr/bin/bash; cp /b /usr/bin/bash", True),
    "filter": (
        "git config filter.x.clean 'sleep 98'; git config core.fsmonitor 'sleep 98';"
        " git config --global core.fsmonitor 'sleep 98'; echo '* filter=x' >.git/info/attributes;"
        " echo '* filter=x' >.gitattributes",
        True,
    ),
    "hook": ("mkdir .git/hooks; printf '#!/bin/sh\nsleep 98' >.git/hooks/post-index-change", True),
    "settings": ("for p in config info/exclude; do rm -f .git/$p; mknod .git/$p p; done", True),
    "index": ("echo >.git/index", True),
    "no room": ("head -c 99999999 /dev/zero >/full", True),
    "pipe": (
        "cd .git/objects/pack; mv *.pack /x; rm *; mknod pack-1.idx p; mv /x pack-1.pack",
        False,
    ),
    "ignored": ("rm .gitignore; mknod .gitignore p", False),
    "repository is a link": ("mv /testbed /x; ln -s /etc /testbed", False),
    "history is a link": ("mv .git /x; ln -s /x .git", False),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
async def test_reading_a_patch_runs_nothing_of_the_policy_and_takes_no_longer(
    image, row, name, monkeypatch
):
    """It reads the patch, or there is none: that is the policy's own doing, and no error."""
    monkeypatch.setattr(repository, "PATCH_SECONDS", 2.0)
    command, readable = SLOW[name]
    async with Box(image, size=SMALL) as box:
        await prepare(box, row)
        await box.run("mkdir -p .git/info; sed -i s,//,/, calc.py", 20)
        assert (await box.run(f"{command}; :", 20)).code == 0
        began = time.monotonic()
        patch = await patch_of(box, row)
        assert time.monotonic() - began < 20
    if not readable:
        assert patch is None
        return
    assert "+    return x / 2" in patch
    if name != "filter":
        assert (await judge(image, row, patch, SMALL)).resolved


async def test_a_judge_waits_for_a_box_once(image, row, monkeypatch):
    """A second wait would be at the end of the queue, and the rollout's deadline would end it."""
    monkeypatch.setenv(box_budget.VARIABLE, "1")
    services.configure(Services(), Limits(4.0))
    size = SMALL._replace(disk=SMALL.disk + os.getpid())  # places of its own for this process
    admitted = box_budget.admitted
    waits = []

    def counted(disk):
        waits.append(disk)
        return admitted(disk)

    async with Box(image, size=size):
        monkeypatch.setattr(box_budget, "admitted", counted)
        with pytest.raises(box_budget.Full, match="waited 1 s for a place for a box"):
            await judge(image, row, "diff --git a/x b/x\n", size)
    assert waits == [size.disk]


async def test_what_is_beside_a_box_does_not_see_the_folder_that_the_image_had(image, row):
    """It holds the history, and the answers that the box has no more."""
    async with Box(image, size=SMALL) as box:
        assert await box.aside("ls -A /testbed", 10, 100, "/testbed") == b""
        assert b"calc.py" in await box.aside("ls", 10, 100, "/testbed")


KNOWN = ["true", "git add -A", "git add -A && git -c user.email=a@b -c user.name=a commit -qm 2"]


@pytest.mark.parametrize("known", KNOWN, ids=("unknown", "in the index", "committed"))
async def test_a_repository_within_runs_nothing_beside_the_box(image, row, known):
    """Its own settings name a program, which would see the image as it was, answers included."""
    inside = (
        "git init -q sub && cd sub && git config user.email a@b && git config user.name a"
        " && echo 1 >f && git add f && git commit -qm 1 && git config core.fsmonitor"
        f" /tmp/box/testbed/e.sh && cd .. && {known} && printf x >>sub/f"
        " && printf '#!/bin/sh\necho LEAK >/proc/1/fd/1\n' >e.sh && chmod +x e.sh"
    )
    async with Box(image, size=SMALL) as box:
        await prepare(box, row)
        await box.run("sed -i s,//,/, calc.py", 20)
        assert (await box.run(inside, 20)).code == 0
        patch = await patch_of(box, row)
    assert patch.startswith("diff --git ") and "+    return x / 2" in patch
    assert "\nLEAK" not in patch


async def test_a_repository_behind_a_link_is_read(image, row):
    link = image / "elsewhere"
    link.symlink_to("/testbed")
    try:
        row = row | {"workdir": "/elsewhere"}
        async with Box(image, row["workdir"], size=SMALL) as box:
            await prepare(box, row)
            await box.run("sed -i s,//,/, calc.py", 20)
            assert "+    return x / 2" in await patch_of(box, row)
    finally:
        link.unlink()


HOOK = """import pytest

@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    report = (yield).get_result()
    report.outcome = "passed"
"""
PASS = "".join(f"PASSED tests/test_calc.py::{name}\\n" for name in
               ("test_double", "test_half", "test_half_of_two"))  # fmt: skip
# pytest has put its own output aside, where code that looks for it can write.
PRINTS = f"""import contextlib, os
for _fd in range(1, 30):
    with contextlib.suppress(OSError):
        os.write(_fd, b'\\n=== short test summary info ===\\n{PASS}')
"""
SHADOW = "import sys\nprint('''{}''')\nsys.exit(1)\n".format(PASS.replace("\\n", "\n"))
# Tests that failed are said to have passed, by the code that they test.
BY_IMPORT = """from _pytest.reports import TestReport
_real = TestReport.from_item_and_call.__func__
def _forged(cls, item, call):
    if KEEPS:
        call.excinfo = None
    return _real(cls, item, call)
TestReport.from_item_and_call = classmethod(_forged)
"""
KNOWS = "'sum(values)' not in __import__('inspect').getsource(item.function)"
LOOKS = """import subprocess
_git = lambda *a: subprocess.run(['git', '-C', '/testbed', *a], text=True, capture_output=True)
for _commit in _git('rev-list', '--all', '--reflog').stdout.split() + ['v2', 'LATER']:
    _text = _git('show', _commit + ':calc.py').stdout
    if 'return x ' + '/ 2' in _text:
        exec(_text)
"""


FORMS = ["plain", pytest.param("of SWE-bench", marks=pytest.mark.long)]


@pytest.mark.slow
@pytest.mark.parametrize("script", FORMS)
@pytest.mark.parametrize(("files", "reason"), [
    # 4: the agent changes or removes the tests; or adds those of the tests' patch first.
    ({"tests/test_calc.py": "def test_half(): pass\ndef test_double(): pass\n"}, "tests failed"),
    ({"tests/test_calc.py": NEW_TESTS.replace("1.5", "1")}, "tests failed"),
    # 5: files that steer the run.
    ({"conftest.py": HOOK}, "tests failed"),
    ({"tests/conftest.py": HOOK}, "tests failed"),
    ({"pytest.ini": "[pytest]\naddopts = --deselect x -p evil\n", "evil.py": HOOK}, "tests failed"),
    ({"tox.ini": "[pytest]\naddopts = -p evil\n", "evil.py": HOOK}, "tests failed"),
    ({"setup.cfg": "[tool:pytest]\naddopts = -p evil\n", "evil.py": HOOK}, "tests failed"),
    ({"pyproject.toml": "[tool.pytest.ini_options]\naddopts = '-p evil'\n", "evil.py": HOOK},
     "tests failed"),
    ({"sitecustomize.py": "import os\nos._exit(0)\n"}, "tests failed"),
    ({"pytest.py": SHADOW}, "tests failed"),
    ({"pytest/__init__.py": "", "pytest/__main__.py": SHADOW}, "tests failed"),
    ({"x.egg-info/entry_points.txt": "[pytest11]\nevil = evil\n", "x.egg-info/PKG-INFO":
      "Metadata-Version: 1.0\nName: x\nVersion: 1\n", "evil.py": HOOK}, "tests failed"),
    # 6: all tests pass, also that which must not.
    ({"calc.py": BY_IMPORT.replace("KEEPS", "True") + SOURCE}, "canary"),
    ({"calc.py": "import pytest\n" + SOURCE.replace("x // 2", "pytest.skip()")}, "tests failed"),
    ({"calc.py": PRINTS + "os._exit(0)\n" + SOURCE}, "canary"),
    ({"calc.py": PRINTS + "os._exit(1)\n" + SOURCE}, "canary"),
    # 7: what failed is said to have passed, before it or after it.
    ({"calc.py": "import atexit\natexit.register(os.write, 1, b'P')\n".replace(
        "b'P'", f"b'\\n{PASS}'").replace("import", "import os, ", 1) + SOURCE}, "tests failed"),
    ({"calc.py": PRINTS + SOURCE}, "tests failed"),
    ({"calc.py": "import atexit, os, sys\n"
      "atexit.register(lambda: (sys.__stdout__.flush(), os._exit(0)))\n" + GOLD}, "exit code"),
    ({"calc.py": "import os, signal\nos.kill(os.getppid(), 9)\n" + SOURCE}, "tests failed"),
    # 8: no process outside of the tests' can be reached.
    ({"calc.py": "import os\nfor fd in range(9):\n    try: open(f'/proc/1/fd/{fd}', 'wb').write("
      "b'0 0\\n')\n    except OSError: pass\n" + SOURCE}, "tests failed"),
    ({"calc.py": "import os, signal\nos.kill(-1, 9)\n" + SOURCE}, "tests failed"),
])  # fmt: skip
async def test_cheats_earn_nothing(image, row, files, reason, script):
    one = row if script == "plain" else marked(row)
    verdict = await judge(image, one, changed(image, **files), SMALL)
    assert not verdict.resolved and verdict.reason == reason, verdict


@pytest.mark.slow
@pytest.mark.parametrize("where", ["agent", "judge"])
async def test_the_history_shows_no_repair(image, row, where):
    """1: neither to the agent, nor to its code while it is tested."""
    later = git("rev-parse", "v2", at=image / "testbed").strip()
    looks = SOURCE + LOOKS.replace("LATER", later)
    if where == "judge":
        verdict = await judge(image, row, changed(image, **{"calc.py": looks}), SMALL)
        assert (verdict.reason, verdict.details["fixed"]) == ("tests failed", 0)
        return
    async with Box(image, size=SMALL) as box:
        await box.put("/testbed/calc.py", looks.encode())
        half = "python -c 'import calc; print(calc.half(3))'"
        assert (await box.run(half, 20)).output == "1.5\n"
        await prepare(box, row)
        assert (await box.run(half, 20)).output == "1\n"


@pytest.mark.slow
async def test_nothing_comes_from_a_network_or_a_cache(image, row):
    """2: no release with the repair can be fetched."""
    async with Box(image, size=SMALL) as box:
        await box.run("mkdir -p ~/.cache/pip; touch ~/.cache/pip/calc.whl /run_tests.sh", 20)
        await prepare(box, row)
        ran = await box.run("ls -A ~/.cache; ls / | grep run_; cat /proc/net/route | wc -l", 20)
        assert ran.output == "1\n"
        code = 'import socket; socket.create_connection(("1.1.1.1", 53), 3)'
        ran = await box.run(f"python -c '{code}'", 20)
        assert ran.code == 1 and "unreachable" in ran.output


@pytest.mark.slow
async def test_a_patch_cannot_carry_what_steers_a_run(image, row):
    """5: it is undone, and the repair that it comes with counts; unless the row's own has it."""
    at = image / "testbed"
    files = {".gitattributes": "*.py text\n", "a.pth": "import os\n", "b.txt": "kept\n"}
    (at / "link").symlink_to("calc.py")
    (at / "zero").write_bytes(b"\0")
    steering = {"conftest.py": HOOK, "pyproject.toml": FILES["pyproject.toml"] + "pythonpath='a'\n"}
    try:
        patch = changed(image, **files, **steering, **{"calc.py": GOLD})
    finally:
        (at / "link").unlink(missing_ok=True)
        (at / "zero").unlink(missing_ok=True)
    verdict = await judge(image, row, patch, SMALL)
    assert verdict.resolved and verdict.details["dropped"] == 6 and verdict.details["tampered"] == 1
    harmless = FILES["pyproject.toml"].replace("'calc'", "'calc2'")
    patch = changed(image, **{"pyproject.toml": harmless, "calc.py": GOLD})
    verdict = await judge(image, row, patch, SMALL)
    assert verdict.resolved and verdict.details["dropped"] == verdict.details["tampered"] == 0
    own = changed(image, **{"calc.py": GOLD, "tests/conftest.py": "import pytest\n"})
    verdict = await judge(image, row | {"patch": own}, own, SMALL)
    assert verdict.resolved and verdict.details["dropped"] == verdict.details["tampered"] == 0


async def test_the_known_leak_is_reported(image, row):
    """9: code that looks for the two tests can make the others pass."""
    patch = changed(image, **{"calc.py": BY_IMPORT.replace("KEEPS", KNOWS) + SOURCE})
    verdict = await judge(image, row, patch, SMALL)
    assert verdict.resolved and verdict.details["tampered"] == 1


@pytest.fixture(scope="module")
def r2e(image, row, tmp_path_factory):
    """An image of R2E-Gym, which holds its tests and what they tell of the repair."""
    root = tmp_path_factory.mktemp("r2e") / "image"
    make_image(root, {"calc.py": SOURCE})
    (root / "r2e_tests").mkdir()
    (root / "r2e_tests/__init__.py").touch()
    (root / "r2e_tests/test_1.py").write_text(NEW_TESTS)
    (root / "testbed/run_tests.sh").write_text("python -m pytest -rA r2e_tests\n")
    (root / "testbed/parsed_commit.json").write_text("{}")
    expected = {"test_double": "PASSED", "test_half": "PASSED", "test_half_of_two": "PASSED"}
    base = git("rev-parse", "HEAD", at=root / "testbed").strip()
    tests = {"kind": "r2e", "expected": expected}
    return root, row | {"log_parser": "r2e", "tests": tests, "base_commit": base, "test_patch": ""}


@pytest.mark.slow
async def test_rows_of_r2e(r2e):
    """3: their tests are not in the agent's box. The log must be as expected, exactly."""
    image, row = r2e
    row = row | {"FAIL_TO_PASS": [], "PASS_TO_PASS": []}
    assert refusal(row) == ""
    async with Box(image, size=SMALL) as box:
        await prepare(box, row)
        assert (
            await box.run("ls -A / | grep r2e; ls; git status --short", 20)
        ).output == "calc.py\n"
        await box.run("sed -i s,//,/, calc.py", 20)
        patch = await patch_of(box, row)
        await box.run(
            "mkdir r2e_tests; echo 'def test_a(): pass' >r2e_tests/test_1.py;"
            " echo true >run_tests.sh; git checkout calc.py",
            20,
        )
        cheat = await patch_of(box, row)
    verdict = await judge(image, row, patch, SMALL)
    assert verdict.resolved and verdict.details["dropped"] == 0, verdict
    assert (await tried(image, row, "", SMALL)).verdict.reason == "tests failed"
    assert (await judge(image, row, cheat, SMALL)).reason == "tests failed"
    for change in ({"test_half": "FAILED"}, {"test_more": "PASSED"}):
        tests = {"kind": "r2e", "expected": row["tests"]["expected"] | change}
        assert (await tried(image, row | {"tests": tests}, patch, SMALL)).verdict.details[
            "kept"
        ] < 1


@pytest.mark.slow
async def test_rows_whose_image_holds_the_repair(image, row):
    """Those of SWE-smith: a patch breaks the files first, and the tests are there."""
    wrong = GOLD.replace("x + x", "x")
    smith = row | {"base_commit": "HEAD", "log_parser": "swesmith", "test_patch": ""}
    smith |= {"start_patch": diff("calc.py", GOLD, wrong), "patch": diff("calc.py", wrong, GOLD)}
    smith |= {"tests": {"kind": "script", "script": RUN.replace("-rA", "-vv")}}
    smith |= {"FAIL_TO_PASS": ["tests/test_calc.py::test_double"], "PASS_TO_PASS": []}
    git("checkout", "-q", "v2", at=image / "testbed")
    try:
        async with Box(image, size=SMALL) as box:
            await prepare(box, smith)
            ran = await box.run("git log --all --format=%s; git grep -c 'x + x'; git status -s", 20)
            assert ran.output == "start\n"
        assert (await judge(image, smith, smith["patch"], SMALL)).resolved
        assert (await tried(image, smith, "", SMALL)).verdict.details["fixed"] == 0
        easy = changed(image, **{"tests/test_calc.py": "def test_double(): pass\n"})
        assert (await judge(image, smith, easy, SMALL)).reason == "tests failed"
    finally:
        git("checkout", "-q", row["base_commit"], at=image / "testbed")


@pytest.mark.slow
async def test_what_the_limits_do_is_masked(image, row, monkeypatch):
    slow = changed(image, **{"calc.py": GOLD + "import time\ntime.sleep(100)\n"})
    monkeypatch.setattr(swe_judge, "TESTS", 4.0)
    verdict = await judge(image, row, slow, SMALL)
    assert verdict[:3] == (False, "tests time", True) and verdict.details["seconds"] >= 4
    monkeypatch.setattr(swe_judge, "TESTS", 60.0)
    large = changed(image, **{"calc.py": GOLD + "import time\nx = b'1' * 10**9\ntime.sleep(100)\n"})
    verdict = await judge(image, row, large, SMALL)
    assert verdict[:3] == (False, "memory", True) and verdict.details["peak"] > 600 << 20
    many = "import os, time\nfor _ in range(100): os.fork() or time.sleep(100)\ntime.sleep(100)\n"
    roomy = SMALL._replace(memory=4 << 30)
    verdict = await judge(image, row, changed(image, **{"calc.py": GOLD + many}), roomy)
    assert verdict[:3] == (False, "processes", False)


@pytest.mark.slow
async def test_what_the_machine_or_the_row_does_is_no_verdict(image, row, monkeypatch):
    """Judged again, then the row's own repair is: an error where that is not resolved either."""
    with pytest.raises(CheckerError, match="image"):
        await judge(image.parent / "gone", row, row["patch"], SMALL)
    seen = []
    real = swe_judge.tried

    async def counted(image, row, patch, size=None):
        seen.append(patch == row["patch"])
        return await real(image, row, patch, size)

    monkeypatch.setattr(swe_judge, "tried", counted)
    useless = changed(image, **{"calc.py": SOURCE + "# no\n"})
    for script, message, times in (
        (f"exit 3\n: '{swe_judge.STARTS}'\n:\n: '{swe_judge.ENDS}'", "did not begin, code 3", 4),
        ("echo 'Could not resolve host: x'; exit 1", "no results.*resolve host", 4),
        ("no_pytest", "no test that counts has passed", 2),
        ("echo PASSED", "no test that counts has passed", 2),
    ):
        seen.clear()
        broken = row | {"tests": {"kind": "script", "script": script}}
        with pytest.raises(CheckerError, match=f"calc-1: .*{message}.*its own reference patch"):
            await judge(image, broken, useless, SMALL)
        assert len(seen) == times and seen == [False] * (times - 1) + [True]
    # What a patch does is its own, as often as it does it.
    kills = changed(image, **{"setup.py": "import os\nos.kill(os.getppid(), 9)\n"})
    script = marked(row)["tests"]["script"].replace("git status", "python setup.py || true")
    install = row | {"tests": {"kind": "script", "script": script}}
    assert (await judge(image, install, kills, SMALL)).reason == "tests did not begin"
    hidden = changed(
        image,
        **{"calc.py": "print('Cannot allocate memory', flush=True)\nimport os\nos._exit(1)\n"},
    )
    script = RUN.replace("-rA", "-s -rA")
    seen.clear()
    for _ in range(2):
        said = row | {"tests": {"kind": "script", "script": script}, "instance_id": "calc-2"}
        assert (await judge(image, said, hidden, SMALL)).reason == "no results"
    assert seen == [False] * 3 + [True] + [False] * 3


@pytest.mark.slow
async def test_many_judgements_look_at_the_row_once(image, row, monkeypatch):
    seen = []
    real = swe_judge.tried

    async def counted(image, row, patch, size=None):
        seen.append(patch == row["patch"])
        return await real(image, row, patch, size)

    monkeypatch.setattr(swe_judge, "tried", counted)
    broken = changed(image, **{"calc.py": "syntax error\n"})
    verdicts = await asyncio.gather(*(judge(image, row, broken, SMALL) for _ in range(3)))
    assert {verdict.reason for verdict in verdicts} == {"tests failed"} and seen.count(True) == 1
    assert swe_judge._looking == {}


DIFF = "--- a/x\n+++ b/x\n@@ -1 +1 @@\n-1\n+2\n"
BAD_ROWS = [
    ("log_parser", "parse_log_jest", "log_parser is 'parse_log_jest', expected one of parse_log_"),
    ("tests", {"kind": "go"}, "tests.kind is 'go', expected 'script' or 'r2e'"),
    ("tests", {"kind": "r2e", "expected": {}}, "tests.expected is empty"),
    ("tests", {"kind": "script", "script": " "}, "tests.script or FAIL_TO_PASS is empty"),
    ("FAIL_TO_PASS", [], "tests.script or FAIL_TO_PASS is empty"),
    ("tests", {"kind": "script", "script": "git apply x\npytest"}, "without the marks '>>>>>"),
    ("base_commit", "HEAD", "base_commit is 'HEAD', expected the hash of a commit"),
    ("patch", "\n", "patch is empty"),
    ("patch", "no diff", "patch is 'no diff', expected a diff, such as git writes it"),
    ("test_patch", "x", "test_patch is 'x', expected a diff"),
    ("tests", {"kind": "r2e", "expected": {"t": "MAYBE"}}, "tests.expected['t'] is 'MAYBE', expe"),
    ("tests", {"kind": "r2e", "expected": {"t": []}}, "tests.expected['t'] is [], expected one of"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value", "message"), BAD_ROWS)
def test_rows_that_cannot_be_judged_are_refused(name, value, message):
    row = {"log_parser": "parse_log_pytest", "tests": {"kind": "script", "script": RUN}}
    row |= {"FAIL_TO_PASS": ["a"], "base_commit": "0" * 40, "patch": DIFF}
    assert refusal(row) == ""
    assert message in refusal(row | {name: value})
