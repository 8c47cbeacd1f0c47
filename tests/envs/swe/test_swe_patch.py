"""Patches and tests of repositories: a small repository in a root folder of this machine's files.

The folder stands in for a container image: it has the bash, git, Python and pytest of this machine.
"""

import asyncio
import contextlib
import json
import random
import shutil
import subprocess
import time
from importlib import metadata
from pathlib import Path
from unittest import mock

import pytest
from conftest import write_rows
from hypothesis import given, settings
from hypothesis import strategies as st

from envs import services
from envs.boxes import image_names
from envs.boxes.image_names import folder_of
from envs.sandbox import sandbox
from envs.services import CheckerError
from envs.swe import images as images_module
from envs.swe import swe_patch
from envs.swe.edits import EditError, edited, edits
from envs.swe.test_logs import passed
from settings.environment_services import Services
from support.data import HERE, in_both
from support.examples import tries
from support.tables import gives, refused
from support.verifiers import HOSTILE, gym_rows, replaced

TOOLS = ("bash", "git", "cp", "rm", "grep", "tail", "cat", "python3")
PACKAGES = ("pytest", "pluggy", "iniconfig", "packaging", "pygments")
IMAGE = "demo/calc:latest"
SOURCE = "def half(x):\n    return x // 2\n\n\ndef double(x):\n    return x + x\n"
TESTS = "from calc import double, half\n\n\ndef test_double():\n    assert double(2) == 4\n"
NEW_TESTS = f"""{TESTS}

def test_half():
    assert half(3) == 1.5


def test_half_of_two():
    assert half(2) == 1.0
"""
METADATA = {"image": IMAGE, "relevant_file_contents": {"calc.py": SOURCE}}
INSTANCE = {"repo": "demo/calc", "setup_script": "", "test_script": ""}
INSTANCE |= {"FAIL_TO_PASS": ["a"], "PASS_TO_PASS": "[]"}
PLAIN = {"mode": "eval", "metadata": METADATA, "instance": INSTANCE}


def git(*args: str, at: Path, text: str | None = None) -> str:
    user = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "init.defaultBranch=main"]
    return subprocess.check_output(["git", "-C", at, *user, *args], text=True, input=text)


def diff(at: Path, name: str, content: str) -> str:
    """The patch that gives a file of a repository a content, and leaves the file as it was."""
    (at / name).write_text(content)
    patch = git("diff", at=at)
    git("checkout", "-q", ".", at=at)
    return patch


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """A folder of images with one image; the services of this process name it."""
    if problem := sandbox.problem():
        pytest.skip(f"no sandbox here: {problem}")
    top = tmp_path_factory.mktemp("images")
    root = top / "demo_calc_latest"
    for source in (Path(shutil.which(tool, path="/usr/bin:/bin")).resolve() for tool in TOOLS):
        name = "python" if source.name.startswith("python") else source.name
        linked = subprocess.check_output(["ldd", source], text=True).split()
        for file in [source, *(Path(word) for word in linked if word.startswith("/"))]:
            inside = root / (f"usr/bin/{name}" if file == source else str(file)[1:])
            inside.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(file, inside)
        if name == "python":
            library = Path("usr/lib", source.name)
            shutil.copytree("/" / library, root / library, ignore=shutil.ignore_patterns("test*"))
    for file in (file for package in PACKAGES for file in metadata.files(package)):
        if ".." not in file.parts:
            (root / library / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file.locate(), root / library / file)
    (root / "bin").symlink_to("usr/bin")
    for name in ("tmp", "dev", "proc", "testbed"):
        (root / name).mkdir(exist_ok=True)  # the interpreter may lie there
    repository = root / "testbed"
    git("init", "-q", at=repository)
    (repository / "calc.py").write_text(SOURCE)
    (repository / "test_calc.py").write_text(TESTS)
    git("add", ".", at=repository)
    git("commit", "-q", "-m", "first", at=repository)
    before = services.current()
    services.configure(Services(images=str(top)))
    yield root
    services.configure(before)


@pytest.fixture(scope="module")
def row(images):
    patch = diff(images / "testbed", "test_calc.py", NEW_TESTS)
    add = f"cd /testbed\ngit apply -v - <<'EOF_1'\n{patch}\nEOF_1\n"
    metadata = {"image": IMAGE, "relevant_file_contents": json.dumps({"calc.py": SOURCE})}
    instance = {"repo": "demo/calc", "setup_script": add, "regression_script": "cd /testbed\n"}
    run = "cd /testbed\npython -m pytest -rA -p no:cacheprovider test_calc.py"
    patch = diff(images / "testbed", "calc.py", SOURCE.replace("//", "/"))
    instance |= {"test_script": run, "patch": patch}
    instance["FAIL_TO_PASS"] = json.dumps(["test_calc.py::test_half"])
    instance["PASS_TO_PASS"] = ["test_calc.py::test_double", "test_calc.py::test_half_of_two"]
    metadata["remove_repo_name"] = False
    return {"mode": "eval", "metadata": metadata, "instance": instance}


def instead(row: dict, **fields: object) -> dict:
    """A row with other fields of its instance."""
    return row | {"instance": row["instance"] | fields}


def reward(row: dict, answer: str):
    swe_patch.check(row)
    return asyncio.run(swe_patch.verify(row, answer))


def solution(*parts: str) -> str:
    return "<solution>\n" + "\n\n".join(parts) + "\n</solution>"


def replacing(search: str, replace: str, path: str = "calc.py") -> str:
    text = f"### {path}\n<<<<<<< SEARCH\n{search}\n=======\n{replace}\n>>>>>>> REPLACE\n"
    return f"```python\n{text}```"


# What the answer of issue "half(3) is 1" must do.
GOLD = replacing("    return x // 2", "    return x / 2")


def test_edits_are_paid_by_the_tests_that_pass(row, images):
    before = {path: path.stat().st_mtime_ns for path in images.rglob("*") if path.is_file()}
    assert reward(row, f"<think>easy</think>{solution(GOLD)}").value == 1
    tests = ["test_calc.py::test_half", "test_calc.py::test_gone"]
    some = reward(instead(row, FAIL_TO_PASS=tests), solution(GOLD))
    assert (some.value, some.info) == (0.2, {"fixed": 0.5, "kept": 1.0})
    broken = reward(row, solution(GOLD, replacing("    return x + x", "    return x")))
    assert (broken.value, broken.info) == (0, {"fixed": 1.0, "kept": 0.5})
    useless = reward(row, solution(replacing("def half(x):", "def half(x):  # half")))
    assert (useless.value, useless.info) == (0, {"fixed": 0.0, "kept": 1.0})
    assert before == {path: path.stat().st_mtime_ns for path in before}


def test_the_name_of_a_repository_is_removed(row):
    contents = {"calc/calc.py": SOURCE}
    named = {"remove_repo_name": True, "relevant_file_contents": contents}
    moved = solution(GOLD.replace("calc.py", "calc/calc.py"))
    assert reward(row | {"metadata": row["metadata"] | named}, moved).value == 1


def test_a_skipped_test_has_not_passed(row):
    edit = "    import pytest\n    pytest.skip()"
    assert reward(row, solution(replacing("    return x // 2", edit))).info["fixed"] == 0


@pytest.mark.parametrize(("answer", "reason"), [
    ("", "empty"),
    (f"<think>{solution(GOLD)}", "truncated"),
    (f"<think>{solution(GOLD)}</think>", "empty"),
    (f"{solution(GOLD)}</think>I have done it.", "no <solution>"),
    (GOLD, "no <solution>"),
    (solution(GOLD).removesuffix("</solution>"), "no <solution>"),
    ("<solution></solution>" + solution(GOLD), "no edit"),
    (solution("I cannot."), "no edit"),
    (solution(GOLD.replace("// 2", "//2")), "search text not found"),
    (solution(GOLD.replace("    return x //", "return x //")), "search text not found"),
    (solution(replacing("def half(x):", "def half(x):")), "an edit changes nothing"),
    (solution(GOLD, replacing("    return x // 2\n", "    return 1")), "edits overlap"),
    (solution(replacing("", "import os\n", "new.py")), "a file that was not shown"),
    (solution(replacing("", "x", "../usr/bin/python")), "a file that was not shown"),
])  # fmt: skip
def test_what_is_no_edit_earns_nothing(row, answer, reason):
    got = reward(row, answer)
    assert (got.value, got.info["reason"]) == (0, reason)


@pytest.mark.parametrize(("edit", "reason"), [
    ("    import time; time.sleep(1000)", "time"),
    ("    import os\n    while True: os.write(1, b'x' * 1000)", "output"),
    ("    import os, time\n    for _ in range(200): os.fork() or time.sleep(1000)\n"
     "    time.sleep(1000)", "processes"),
])  # fmt: skip
def test_limits_of_the_tests(row, edit, reason, monkeypatch):
    own = images_module.LIMITS._replace(seconds=3, output=10**5, processes=100)
    monkeypatch.setattr(images_module, "LIMITS", own)
    script = "cd /testbed; python -c 'from test_calc import *; half(1)'"
    got = reward(instead(row, test_script=script), solution(replacing("    return x // 2", edit)))
    assert (got.value, got.info["reason"]) == (0, reason)


def test_a_process_that_ends_its_tests_earns_nothing(row):
    for edit in ("import os\nos._exit(0)", "import os, signal\nos.kill(os.getppid(), 9)"):
        assert reward(row, solution(replacing("def half(x):", f"{edit}\ndef half(x):"))).value == 0


def test_known_leaks(row):
    """What the docstring lists: the log is written by the process that it judges."""
    names = ["test_double", "test_half", "test_half_of_two"]
    said = "".join(f"PASSED test_calc.py::{name}\n" for name in names)
    forged = f"import os\nos.write(1, {said!r}.encode())\nos._exit(0)\ndef half(x):"
    script = "cd /testbed && python -m pytest -s -rA test_calc.py"
    edit = solution(replacing("def half(x):", forged))
    assert reward(instead(row, test_script=script), edit).value == 1
    looks = "import sys\nsys.exit(2 if '//' in open('calc.py').read() else 0)"
    assert reward(row | {"mode": "repro-gen"}, f"```python\n{looks}\n```").value == 1


@pytest.mark.parametrize(("code", "value", "reason"), [
    ("import sys, calc\nsys.exit(0 if calc.half(3) == 1.5 else 2)", 1, None),
    ("import sys, calc\nsys.exit(0 if calc.half(3) == 1.5 else 1)", 0, "1 before the patch"),
    ("raise SystemExit(2)", 0, "2 after the patch"),
    ("raise SystemExit(0)", 0, "0 before the patch"),
    ("syntax error", 0, "1 before the patch"),
    # The runs share no files, so that the second is not told apart by what the first left.
    ("import os\nif os.path.exists('a'): os._exit(0)\nopen('a', 'w')\nos._exit(2)", 0,
     "2 after the patch"),
    # Nor does the working folder say which run it is.
    ("import os\nos._exit(0 if os.listdir('/work') else 2)", 0, "2 after the patch"),
    # Nor is it believed what a test says of its end.
    ("print('reproduction test status:2')\nraise SystemExit(0)", 0, "0 before the patch"),
])  # fmt: skip
def test_a_test_must_fail_before_the_patch_and_pass_after_it(row, code, value, reason):
    answer = f"```python\nfirst\n```\n```python\n{code}\n```\nDone."
    got = reward(row | {"mode": "repro-gen"}, answer)
    assert (got.value, got.info.get("reason")) == (value, reason)


@pytest.mark.parametrize("answer", ["", "I cannot.", "<think>```python\nx\n```", "```python\nx"])
def test_an_answer_without_a_test_earns_nothing(row, answer):
    assert reward(row | {"mode": "repro-gen"}, answer).value == 0


def test_an_image_that_is_not_right_is_an_error(row):
    absent = row | {"metadata": row["metadata"] | {"image": "/a/b/gone.sif"}}
    with pytest.raises(CheckerError, match=r"gone.sif is missing: expected a folder \S+/gone:"):
        reward(absent, solution(GOLD))
    broken = row["instance"]["setup_script"].replace("def test_double", "def test_other")
    for field, value, message in (
        ("setup_script", broken, "cannot be set up.*error: patch failed"),
        ("setup_script", "rm -r /testbed/calc.py", "cannot be set up.*no file calc.py"),
        ("setup_script", "no_git apply", "cannot be set up, code 0:.*no_git: command not found"),
        ("setup_script", "echo No space left on device", "cannot be set up.*No space left"),
        ("setup_script", "rm /testbed/test_calc.py", "do not run:.*not found: test_calc.py"),
        ("test_script", "no_pytest", "do not run:.*no_pytest: command not found"),
        ("test_script", "python -m no_pytest", "do not run:.*No module named no_pytest"),
    ):
        with pytest.raises(CheckerError, match=message):
            reward(instead(row, **{field: value}), solution(GOLD))
    for change, message in (
        ({"patch": "--- a/x\n+++ b/x\n@@ -1 +1 @@\n-1\n+2\n"}, "cannot be set up"),
        ({"regression_script": "rm /usr/bin/python"}, "cannot be set up.*no python"),
        ({"regression_script": "rm -r /usr/lib/python*"}, "cannot be set up.*no python"),
        ({"regression_script": "rm /testbed/calc.py"}, "cannot be set up.*calc.py: No such file"),
    ):
        with pytest.raises(CheckerError, match=message):
            reward(instead(row, **change) | {"mode": "repro-gen"}, "```python\nexit(2)\n```")


def test_tests_that_a_signal_ended_run_once_more(row, images):
    """It may have come from outside."""
    run = row["instance"]["test_script"]
    times = []

    async def first_is_killed(*args, real=sandbox.run, **given):
        times.append(len(times))
        if len(times) == 1:
            given["files"] = given["files"] | {"test.sh": "kill -9 $$\n" + run}
        return await real(*args, **given)

    with mock.patch.object(sandbox, "run", first_is_killed):
        assert reward(row, solution(GOLD)).value == 1
    assert times == [0, 1]


def test_images_are_found_by_name():
    own = services.current().images
    name = "x_sweb.eval.x86_64.a_s_b-1"
    assert folder_of("org/name:tag") == Path(own, "org_name_tag").absolute()
    assert folder_of(f"/shared/{name}.sif") == Path(own, name).absolute()
    assert folder_of("/") == Path(own, "_").absolute()


def test_no_image_is_outside_the_folder_of_images(tmp_path):
    """A name such as ".." would show the agent what lies beside it: the rows with their answers."""
    for name in ("..", ".", "", "...sif", "..sif", "x/.sif", "a\0b", "a" * 400):
        with pytest.raises(ValueError, match="expected the name of an image, for a folder or .sif"):
            folder_of(name)
    rows = write_rows(tmp_path / "rows.jsonl", [{"image": ".."}, {"image": "a/b"}])
    assert list(image_names.named(rows)) == ["a/b"]


@pytest.mark.parametrize(("own", "message"), [
    ({}, "services.images = '', expected services.sandbox = 'bubblewrap', and a folder of"),
    ({"images": "/none"}, "services.images = '/none', services.sandbox = 'bubblewrap', expect"),
    ({"images": "/", "sandbox": "http"}, "sandbox = 'http', expected services.sandbox = 'bubb"),
])  # fmt: skip
def test_what_is_missing_is_named_at_the_start(own, message, monkeypatch):
    monkeypatch.setattr(services, "_current", [Services(**own)])
    assert [need.name for need in swe_patch.needs({})] == ["images", "sandbox"]
    assert message in image_names.NEED.problem()


@in_both
def test_real_rows(tmp_path, place):
    """The patch of each row, written as edits, gives the files that git makes of it."""
    rows = gym_rows("swerl_gen", place=place)
    assert {row["mode"] for row in rows} == ({"eval"} if place == HERE else {"eval", "repro-gen"})
    for row in rows:
        swe_patch.check(row)
        contents = json.loads(row["metadata"]["relevant_file_contents"])
        for path, content in contents.items():
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_text(content.rstrip("\n") + "\n")  # some rows lack the last one
        git("apply", "-", at=tmp_path, text=row["instance"]["patch"])
        after = {path: (tmp_path / path).read_text().rstrip("\n") for path in contents}
        new = edited(contents, as_edits(row["instance"]["patch"]))
        assert {path: content.rstrip("\n") for path, content in new.items()} == after


def as_edits(patch: str) -> str:
    """A patch, hunk by hunk, as an answer writes it."""
    found = []
    for file in patch.split("diff --git ")[1:]:
        header, *hunks = file.split("\n@@ ")
        path = header.rpartition("+++ b/")[2]
        for hunk in hunks:
            lines = [line or " " for line in hunk.removesuffix("\n").split("\n")[1:]]
            old = "\n".join(line[1:] for line in lines if line[0] in " -")
            new = "\n".join(line[1:] for line in lines if line[0] in " +")
            found.append(replacing(old, new, path))
    return "\n".join(found)


def test_changed_answers_change_the_files_otherwise(row):
    """A thousand changes of the right answer: none makes the files that it makes."""
    rng = random.Random(0)
    contents = {"calc.py": SOURCE}
    right = edited(contents, GOLD)
    for _ in range(1000):
        text = GOLD
        match rng.randrange(5):
            case 0:
                lines = text.split("\n")
                lines.pop(rng.randrange(1, len(lines)))
                text = "\n".join(lines)
            case 1:
                text = text.replace("x / 2", f"x / {rng.randrange(3, 99)}")
            case 2:
                text = text.replace("return x /", "RETURN x /")
            case 3:
                text = text.replace("SEARCH", rng.choice(["search", "FIND", ""]))
            case 4:
                text += "\n" + replacing("def double(x):", f"def junk{rng.randrange(9)}(x):")
        try:
            assert edited(contents, text) != right, text
        except EditError:
            continue


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))  # too long for an environment
def test_hostile_answers(row, text):
    began = time.perf_counter()
    for answer in (text, f"<solution>{text}</solution>", f"```\n### a\n<<<<<<< SEARCH\n{text}"):
        assert reward(row, answer).value == 0
    assert len(edits(f"{GOLD}\n{text}\n{GOLD}")) <= 2
    for repo in ("a/b", "django/django", "sympy/sympy"):
        assert not passed(repo, text)
    assert time.perf_counter() - began < 20


MARKS = ["```", "```python\n", "### calc.py", "\n", "<<<<<<< SEARCH\n", "=======\n", " ", "x"]
PARTS = st.lists(st.sampled_from([*MARKS, ">>>>>>> REPLACE\n", "def half(x):\n"]), max_size=12)


@given(PARTS.map("".join) | st.text())
@settings(max_examples=tries(10_000), deadline=None)
def test_any_text_is_edits_or_none(text):
    text = GOLD[: len(text) % len(GOLD)] + text
    for path, search, replace in edits(text):
        assert f"### {path}" in text and search in text and replace in text
    with contextlib.suppress(EditError):
        assert edited({"calc.py": SOURCE}, text).keys() == {"calc.py"}


test_logs = gives(
    passed,
    ("a/b", "PASSED t.py::a\nFAILED t.py::b - assert 1\nERROR t.py::c", {"t.py::a"}),
    ("a/b", "PASSED t.py::a\nFAILED t.py::a", set()),
    ("a/b", "t.py::a PASSED   [ 50%]\nt.py::b SKIPPED [100%]", {"t.py::a"}),
    ("a/b", "\x1b[32mPASSED\x1b[0m t.py::a[x y]", {"t.py::a[x"}),
    ("a/b", "PASSED t.py::a[/tmp/z/f.txt]", {"t.py::a[/f.txt]"}),
    ("a/b", "PASSED t.py::a[//z/f] \nPASSEDt.py::b\nPASSED", {"t.py::a[//z/f]"}),
    ("django/django", "t (a.B) ... ok\nu (a.B) ... FAIL\nv (a.B) ... noise\nok",
     {"t (a.B)", "v (a.B)"}),
    ("django/django", "t (a.B) ... ok\nFAIL: t (a.B)\nu ... skipped 'no'", {"t (a.B)"}),
    ("sympy/sympy", "test_a ok\ntest_b F\ntest_c E\ntest_d ok [OK]", {"test_a", "test_d"}),
    ("sympy/sympy", "PASSED t.py::a\nt.py::b PASSED", {"t.py::a", "t.py::b"}),
)  # fmt: skip


test_bad_rows = refused(
    lambda path, value: swe_patch.check(replaced(PLAIN, path.split("."), value)),
    ("mode", "test", 'mode is \'test\', expected "eval" or "repro-gen"'),
    ("metadata", None, "metadata.image is missing or null, expected the name of an image"),
    ("metadata.image", "..", "metadata.image is '..', expected the name"),
    ("metadata.image", "...sif", "metadata.image is '...sif', expected the name"),
    ("metadata.image", "a\0", "metadata.image is 'a.x00', expected the name"),
    ("metadata.remove_repo_name", "no", "metadata.remove_repo_name is 'no', expected true"),
    ("metadata.relevant_file_contents", "{", "metadata.relevant_file_contents is '{', expect"),
    ("metadata.relevant_file_contents", "[]", r"relevant_file_contents is \[\], expected an"),
    ("metadata.relevant_file_contents", {"a": 1}, "relevant_file_contents.a is 1, expected"),
    ("metadata.relevant_file_contents", {"/a": ""}, "contents is '/a', expected paths inside"),
    ("metadata.relevant_file_contents", {"../a": ""}, "contents is '../a', expected paths"),
    ("instance.repo", None, "instance.repo is missing or null, expected OWNER/NAME"),
    ("instance.setup_script", 3, "instance.setup_script is 3, expected a bash script"),
    ("instance.test_script", None, "instance.test_script is missing"),
    ("instance.FAIL_TO_PASS", "[]", r"instance.FAIL_TO_PASS is \[\], expected a list of"),
    ("instance.FAIL_TO_PASS", "a", "instance.FAIL_TO_PASS is 'a', expected a list of test names"),
    ("instance.PASS_TO_PASS", [1], r"instance.PASS_TO_PASS is \[1\], expected a list of te"),
)


ROW_OF_TESTS = PLAIN | {"mode": "repro-gen", "instance": {"regression_script": "", "patch": "x"}}
test_bad_rows_of_tests = refused(
    lambda path, value: swe_patch.check(replaced(ROW_OF_TESTS, path.split("."), value)),
    ("instance.regression_script", None, "regression_script is missing or null, expected a"),
    ("instance.patch", None, "instance.patch is missing or null, expected a"),
    taken=("mode", "repro-gen"),
)
