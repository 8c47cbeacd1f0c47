"""Issues of repositories in each data set's own format, those that are refused, and the check."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import write_rows

import data_prep
from core.errors import InputError
from envs import services
from envs.boxes import image_names
from envs.sandbox import sandbox
from envs.swe import swe_judge
from prep import swe_formats, swe_tables
from settings.environment_services import Services
from support.box_images import git, make_image
from support.issues import COMMIT, GOLD, PATCH, R2E, SOURCE, commit_of, of_gym
from support.tables import gives, table
from support.verifiers import lines

CASES = table(Path(__file__).with_name("cases.txt"))
TESTS = "from calc import double, half\n\n\ndef test_double():\n    assert double(2) == 4\n"
NEW_TESTS = f"{TESTS}\n\ndef test_half():\n    assert half(3) == 1.5\n"
RUN = "python -m pytest -rA -p no:cacheprovider tests/test_calc.py"
VERIFIED = {  # as SWE-bench 5 publishes one, with the fields that are read
    "instance_id": "me__calc-12",
    "repo": "me/calc",
    "base_commit": COMMIT,
    "problem_statement": "half(3) is 1",
    "patch": PATCH,
    "test_patch": PATCH.replace("calc.py", "tests/test_calc.py"),
    "FAIL_TO_PASS": json.dumps(["tests/test_calc.py::test_half"]),
    "PASS_TO_PASS": json.dumps(["tests/test_calc.py::test_double"]),
    "eval_script": f": '>>>>> Start Test Output'\n{RUN}\n: '>>>>> End Test Output'\n",
    "log_parser": "parse_log_pytest",
    "image": "swebench/sweb.eval.x86_64.me_1776_calc-12:latest",
}
GYM = {name: VERIFIED[name] for name in list(VERIFIED)[:8]} | {"version": "5.0"}


@pytest.fixture
def swe(tmp_path, capsys):
    """The rows of some records, and what is printed."""

    def run(records: list[dict], *words: str, code: int = 0) -> tuple[list[dict], str]:
        source = write_rows(tmp_path / "in.jsonl", records)
        out = tmp_path / "out.jsonl"
        assert data_prep.main(["swe", source, str(out), *words]) == code
        rows = [json.loads(line) for line in out.read_text().splitlines()]
        return rows, capsys.readouterr().out

    return run


def test_a_record_of_swe_bench_with_its_script(swe):
    (row,), told = swe([VERIFIED], "--dataset", "SWE-bench/SWE-bench_Verified")
    assert row["image"] == "swebench_sweb.eval.x86_64.me_1776_calc-12.sif"
    assert row["registry"] == VERIFIED["image"]
    assert row["tests"] == {"kind": "script", "script": VERIFIED["eval_script"]}
    assert (row["FAIL_TO_PASS"], row["log_parser"]) == (
        ["tests/test_calc.py::test_half"],
        "parse_log_pytest",
    )
    assert (row["workdir"], row["base_commit"]) == ("/testbed", COMMIT)
    assert row["agent_ref"]["name"] == "swe_agents_train" and "harness" not in row
    assert row["responses_create_params"] == {"input": [], "tools": []}
    assert "SWE-bench/SWE-bench_Verified 1 records, 0 refused" in " ".join(told.split())


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_record_of_r2e_gym(swe, wrapped):
    """Bare, and in a row of NeMo-Gym whose image is named by its instance_id alone."""
    record, words = R2E, ("--dataset", "R2E-Gym/R2E-Gym-Subset")
    if wrapped:
        bare = {name: value for name, value in R2E.items() if name != "docker_image"}
        record = of_gym(bare, "R2E-Gym/R2E-Gym-Subset", instance_id=f"me__Calc-{'f' * 40}")
        words = ("--harness", "bash")
    (row,), _ = swe([record], *words)
    assert row["image"] == f"r2egym_calc_final_{'f' * 40}.sif"
    assert row["registry"] == R2E["docker_image"]
    assert row["tests"] == {"kind": "r2e", "expected": json.loads(R2E["expected_output_json"])}
    assert row["problem_statement"] == "half(3) is 1"
    assert (row["base_commit"], row["patch"]) == (COMMIT, PATCH)
    assert row["agent_ref"]["name"] == ("swe_agents_val" if wrapped else "swe_agents_train")
    assert row.get("harness") == ("bash" if wrapped else None)


def test_what_a_record_lacks_comes_from_another_data_set(swe, tmp_path):
    """The published rows of SWE-Gym have neither lists of tests nor a script."""
    lacking = {name: GYM[name] for name in GYM if not name.endswith("PASS")}
    row = of_gym(lacking, "SWE-Gym/SWE-Gym", instance_id="me__calc-12", golden_patch=PATCH)
    other = write_rows(tmp_path / "all.jsonl", [VERIFIED | {"instance_id": "x"}, VERIFIED])
    (made,), _ = swe([row], "--sources", other)
    assert made["image"] == "swegym_sweb.eval.x86_64.me_s_calc-12.sif"
    assert made["PASS_TO_PASS"] == ["tests/test_calc.py::test_double"]


def test_rows_of_its_own_are_taken_as_they_are(swe):
    rows, _ = swe([VERIFIED, R2E], "--dataset", "SWE-bench")
    again, told = swe(rows)
    assert again == rows and "SWE-bench" in told


def test_what_cannot_be_graded_is_refused_by_name_and_counted(swe):
    records = [VERIFIED | {"dataset_name": "SWE-bench/SWE-bench_Verified"}]
    records += [of_gym(VERIFIED, "nv-internal-1"), of_gym(VERIFIED, "nv-internal-1")]
    del records[1]["responses_create_params"]["metadata"]["instance_dict"]
    bare = {k: v for k, v in VERIFIED.items() if k != "log_parser"}
    records += [of_gym(bare, "nv-internal-1")]
    records += [VERIFIED | {"log_parser": "parse_log_jest", "dataset_name": "SWE-bench"}]
    records += [R2E | {"parsed_commit_content": commit_of("a.rst"), "dataset_name": "R2E-Gym"}]
    rows, told = swe(records)
    assert len(rows) == 2, "a record that has script and parser is graded, whatever its name"
    assert "REFUSED 2 of nv-internal-1: data set 'nv-internal-1', expected one of" in told
    assert "in.jsonl:2" in told and "REFUSED 1 of SWE-bench: log_parser is 'parse_log_jest'" in told
    assert "REFUSED 1 of R2E-Gym: patch is empty" in told
    words = " ".join(told.split())
    assert "nv-internal-1 3 records, 2 refused" in words


def test_the_published_example_rows_say_what_they_lack(swe, tmp_path, capsys):
    with pytest.raises(InputError, match="none of its rows is left"):
        swe(lines("gym_rows", "swe_agents"))
    told = capsys.readouterr().out
    assert "SWE-Gym/SWE-Gym 2 records, 2 refused" in " ".join(told.split())
    expected = "FAIL_TO_PASS is None, expected a list of test names, or its JSON (--sources names"
    assert "getmoto__moto-7365" in told and expected in told


SWE_GYM = {
    "instance_id": "getmoto__moto-7365",
    "repo": "getmoto/moto",
    "dataset_name": "SWE-Gym/SWE-Gym",
    "FAIL_TO_PASS": ["tests/test_calc.py::test_half"],
}


def test_a_record_of_swe_gym_needs_no_other_package(swe):
    lacking = {k: v for k, v in VERIFIED.items() if k not in ("eval_script", "log_parser")}
    gym = lacking | SWE_GYM
    pydantic = gym | {"repo": "pydantic/pydantic", "instance_id": "pydantic__pydantic-1"}
    others = (gym | {"repo": "python/mypy"}, gym | {"test_patch": "+++ b/test-data/a.test\n"})
    rows, told = swe([gym, pydantic, *others])
    assert [row["log_parser"] for row in rows] == ["parse_log_pytest", "parse_log_pytest_pydantic"]
    assert "conda activate testbed\ncd /testbed\n" in rows[0]["tests"]["script"]
    assert "\npytest -n0 -rA tests/test_calc.py\n" in rows[0]["tests"]["script"]
    assert rows[1]["image"] == "swegym_sweb.eval.x86_64.pydantic_s_pydantic-1.sif"
    assert "1 of SWE-Gym/SWE-Gym: repo is 'python/mypy', expected one of bokeh/bokeh" in told
    assert "1 of SWE-Gym/SWE-Gym: test_patch leaves no Python file" in told


REBENCH = {
    "dataset_name": "nebius/SWE-rebench-V2",
    "image_name": "swerebenchv2/me-calc:12",
    "install_config": {"test_cmd": RUN, "install": ["pip install -e ."]},
}


@pytest.mark.parametrize("parser", ["parse_log_pytest", "parse_log_js_4"])
def test_a_record_of_swe_rebench_says_how_its_tests_are_run(swe, parser):
    lacking = {k: v for k, v in VERIFIED.items() if k not in ("eval_script", "log_parser")}
    config = REBENCH["install_config"] | {"log_parser": parser}
    record = lacking | REBENCH | {"install_config": config}
    other = record | {"install_config": {"test_cmd": ["a", "b"], "log_parser": "parse_log_pytest"}}
    none = record | {"install_config": json.dumps({"log_parser": parser})}
    rows, told = swe([other, record, none])
    assert "install_config.test_cmd is missing, expected a command or a list" in told
    assert "a || failed=$?\nb || failed=$?\n(exit $failed)\n" in rows[0]["tests"]["script"]
    if parser == "parse_log_js_4":  # of another language
        assert len(rows) == 1 and "log_parser is 'parse_log_js_4', expected one of" in told
        return
    assert rows[1]["workdir"] == "/calc" and rows[1]["registry"] == "swerebenchv2/me-calc:12"
    assert rows[1]["image"] == "me__calc-12.sif"
    assert rows[1]["tests"]["script"] == (
        f"cd /calc\npip install -e .\n: '>>>>> Start Test Output'\n{RUN}\n"
        ": '>>>>> End Test Output'\n"
    )


@pytest.mark.parametrize(("record", "words", "message"), CASES["swe"])
def test_bad_input_is_named(tmp_path, record, words, message):
    source = write_rows(tmp_path / "in.jsonl", [VERIFIED | record])
    with pytest.raises(InputError, match=message):
        data_prep.main(["swe", source, str(tmp_path / "out.jsonl"), *words])
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


PACKAGE = """
class Registry:
    def get(self, name): return {"me__calc.1234abcd": profile, "odd.1234abcd": Odd()}[name]
class PythonProfile:
    test_cmd = "pytest -v"
    def log_parser(self, log): return {}
class Odd(PythonProfile):
    def log_parser(self, log): return 1
profile, registry = PythonProfile(), Registry()
def make_eval_script_list_py(instance, specs, env, repo, base, patch):
    print("noise")
    return [": '>>>>> Start Test Output'", specs["test_cmd"], ": '>>>>> End Test Output'"]
def parse_log_pytest(log): pass
MAP_REPO_VERSION_TO_SPECS = {"me/calc": {"5.0": {"test_cmd": "pytest -rA"}}}
MAP_REPO_TO_PARSER = {"me/calc": parse_log_pytest}
"""
MODULES = ("test_spec.python", "constants", "log_parsers")
MODULES = (*(f"swebench.harness.{name}" for name in MODULES), "swesmith.profiles")
MODULES += ("swesmith.profiles.python",)
SMITH = {"instance_id": "me__calc.1234abcd.combine__1", "image_name": "a/swesmith.x86_64.me_1776_c"}
SMITH |= {name: VERIFIED[name] for name in ("patch", "FAIL_TO_PASS", "PASS_TO_PASS")}
SMITH |= {
    "problem_statement": "half(3) is 1",
    "dataset_name": "SWE-bench/SWE-smith-py",
}


@pytest.fixture
def python(tmp_path):
    """A Python with packages of these names, in place of those of the data sets."""
    folder = tmp_path / "packages"
    for name in MODULES:
        path = folder / name.replace(".", "/") / "__init__.py"
        for parent in (path.parent, path.parent.parent, path.parent.parent.parent):
            parent.mkdir(parents=True, exist_ok=True)
            if parent.is_relative_to(folder) and parent != folder:
                (parent / "__init__.py").touch()
    for name in MODULES[:4]:
        (folder / name.replace(".", "/") / "__init__.py").write_text(PACKAGE)
    same = "from swesmith.profiles import PythonProfile\n"
    (folder / "swesmith/profiles/python/__init__.py").write_text(same)
    program = tmp_path / "python"
    program.write_text(f'#!/bin/sh\nPYTHONPATH={folder} exec {sys.executable} "$@"\n')
    program.chmod(0o755)
    return str(program)


def test_another_python_has_the_tables(swe, python, capsys):
    """Its packages print, know some repositories, and are imported by it alone."""
    bench = GYM | {"dataset_name": "SWE-bench/SWE-bench"}
    odd = SMITH | {"instance_id": "odd.1234abcd.x"}
    unknown = (bench | {"version": "6"}, odd, SMITH | {"instance_id": "other.1234abcd.x"})
    rows, told = swe([bench, SMITH, *unknown], "--tables", python)
    assert "pytest -rA" in rows[0]["tests"]["script"]
    assert rows[0]["log_parser"] == "parse_log_pytest"
    assert "swebench does not know version 6 of me/calc" in told
    assert "swesmith reads the logs of odd.1234abcd in its own way" in told
    assert "swesmith does not know other.1234abcd" in told
    smith = rows[1]
    assert "pytest -v tests/test_calc.py\n" in smith["tests"]["script"]
    assert smith["image"] == "swesmith.x86_64.me_1776_c.sif"
    assert (
        smith["start_patch"] == PATCH
        and smith["base_commit"] == "HEAD"
        and smith["log_parser"] == "swesmith"
    )
    with pytest.raises(InputError, match="none of its rows is left"):
        swe([bench], "--tables", sys.executable)
    told = capsys.readouterr().out
    assert "swebench 4.1 cannot be imported: No module named 'swebench'" in told
    repaired = "+    return x // 2\n-    return x / 2"
    assert smith["patch"] == PATCH.replace("-    return x // 2\n+    return x / 2", repaired)


PATCHES = {  # the first files, and those that a patch makes of them
    "edit": ({"a": "1\n2\n3\n"}, {"a": "1\n4\n3\n"}),
    "new file": ({"a": "1\n"}, {"a": "1\n", "b/c": "2\n"}),
    "removed": ({"a": "1\n", "b": "--- x\n+++ y\n"}, {"a": "1\n"}),
    "no line end": ({"a": "1\n2"}, {"a": "1\n3"}),
    "line end": ({"a": "1\n2"}, {"a": "1\n2\n"}),
    "signs": ({"a": "-- x\n++ y\nz\n"}, {"a": "z\n-- y\n@@ -1 +1 @@\n"}),
    "renamed": ({"a": "1\n2\n3\n4\n5\n"}, {"b": "1\n2\n3\n4\n6\n"}),
    "empty": ({"a": "x\n"}, {"a": "", "b": ""}),
    "far apart": (
        {"a": "".join(f"{i}\n" for i in range(99))},
        {"a": "".join(f"{i}{'x' * (i in (1, 50, 98))}\n" for i in range(99))},
    ),
}


def tree(folder: Path, files: dict[str, str]) -> None:
    """Makes these files all that a folder holds beside .git."""
    for path in folder.iterdir():
        if path.name != ".git":
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    git("add", "-A", at=folder)


@pytest.mark.parametrize("name", PATCHES)
def test_a_reversed_patch_undoes_the_patch(tmp_path, name):
    git("init", "-q", at=tmp_path)
    before, after = PATCHES[name]
    tree(tmp_path, before)
    first = git("write-tree", at=tmp_path).strip()
    git("commit", "-qm", "a", at=tmp_path)
    tree(tmp_path, after)
    patch = git("diff", "--cached", "-M", at=tmp_path)
    git("apply", "--index", "-", at=tmp_path, text=swe_formats.reverse(patch))
    assert git("write-tree", at=tmp_path).strip() == first
    assert swe_formats.reverse(swe_formats.reverse(patch)) == patch or name == "renamed"


test_the_first_lines_of_a_range = gives(
    swe_formats.range_of,
    ({"start": 3, "length": None}, "3"),
    ({"start": 0, "length": 0}, "0,0"),
)


@pytest.fixture(scope="module")
def image(tmp_path_factory):
    """An image as a folder, named as those of SWE-bench are."""
    if problem := sandbox.problem():
        pytest.skip(f"no sandbox here: {problem}")
    folder = tmp_path_factory.mktemp("images")
    files = {"calc.py": SOURCE, "tests/test_calc.py": TESTS}
    return make_image(folder / "swebench_sweb.eval.x86_64.me_1776_calc-12", files)


def changed(root: Path, path: str, text: str) -> str:
    """The patch that gives a file of the image's repository another content."""
    at = root / "testbed"
    (at / path).write_text(text)
    patch = git("diff", at=at)
    git("checkout", "-q", "--", ".", at=at)
    return patch


@pytest.fixture
def records(image) -> list[dict]:
    """One that is sound; one whose repair is none; one that nothing is wrong with; no image."""
    at = {"base_commit": git("rev-parse", "HEAD", at=image / "testbed").strip()}
    at |= {"patch": changed(image, "calc.py", GOLD), "eval_script": RUN}
    at |= {"test_patch": changed(image, "tests/test_calc.py", NEW_TESTS)}
    sound = VERIFIED | at | {"dataset_name": "SWE-bench"}
    useless = sound | {"patch": changed(image, "calc.py", SOURCE.replace("half(x)", "half(y)"))}
    lists = {"FAIL_TO_PASS": ["tests/test_calc.py::test_double"], "PASS_TO_PASS": []}
    return [useless, sound | lists, sound | {"instance_id": "me__gone-1"}, sound]


def test_a_check_keeps_rows_whose_own_repair_alone_is_resolved(swe, records, image, tmp_path):
    before = services.current()
    try:
        words = ("--check", "--images", str(image.parent), "--at_once", "2")
        rows, told = swe(records, *words, code=1)
        assert len(rows) == 1 and rows[0]["FAIL_TO_PASS"] == ["tests/test_calc.py::test_half"]
        assert rows[0]["patch"] == records[3]["patch"]
        assert "resolved by their own repairs only: 1 of 3 (33.3%)" in told
        flaw = "its own reference patch does not resolve it: tests failed"
        assert f"LEFT OUT 1: {flaw} (me__calc-12)" in told
        assert f"LEFT OUT 1: {swe_judge.UNBROKEN} (me__calc-12)" in told
        assert "NOT JUDGED 1: the image IMAGE.sif is missing" in told and "me__gone-1" in told
        journal = (tmp_path / "out.jsonl.check.jsonl").read_text()
        assert len(journal.splitlines()) == 3
        # What was judged is not judged again: a verdict of another time is believed.
        (tmp_path / "out.jsonl.check.jsonl").write_text(journal.replace(swe_judge.UNBROKEN, ""))
        assert len(swe(records, *words, code=1)[0]) == 2
        assert services.current() == Services(images=str(image.parent))
    finally:
        services.configure(before)


def test_a_check_without_images_says_what_is_missing(tmp_path):
    source = write_rows(tmp_path / "in.jsonl", [VERIFIED])
    with pytest.raises(InputError, match="--check: services.images = '/none'"):
        data_prep.main(
            [
                "swe",
                source,
                str(tmp_path / "o"),
                "--check",
                "--images",
                "/none",
                "--dataset",
                "SWE-bench",
            ]
        )


def test_images_are_found_by_the_name_in_a_row():
    assert image_names.folder_of("r2egym_numpy_final_ab.c.sif").name == "r2egym_numpy_final_ab.c"


def test_the_script_of_the_tables_imports_nothing_of_ours():
    """Another Python runs it, which has none of our libraries."""
    code = "import sys; sys.argv = ['x']; import runpy; runpy.run_path(sys.stdin.read().strip())"
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code], input=swe_tables.__file__, text=True
    )
    assert done.returncode == 0
