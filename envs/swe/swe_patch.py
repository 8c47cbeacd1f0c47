r"""Patches and tests for issues of real repositories, judged in their images: 1.0, 0.2 or 0.0.

Row, as in NeMo-Gym's resources_servers/swerl_gen: `mode`, `metadata.image`, and
    eval        `metadata.relevant_file_contents` (path -> content, an object or its JSON),
                `metadata.remove_repo_name`; of `instance`: `repo`, `setup_script` (adds the tests),
                `test_script`, `FAIL_TO_PASS` and `PASS_TO_PASS` (lists of tests, or their JSON)
    repro-gen   of `instance`: `regression_script`, and `patch`, which solves the issue

eval: the answer's first <solution> contains search/replace edits (envs/swe/edits.py). In the image,
the setup script runs, the edited files are written below /testbed, and the test script runs.
The reward is 1.0 if all tests in both lists passed, 0.2 if all of PASS_TO_PASS and some of the
others did, else 0.0.
repro-gen: the last ```python block is run below /testbed, and earns 1.0 if it ends with code 2, and
with code 0 once the patch is applied. Each script has 900 s.

Image: the folder services.images/NAME, which contains the image's root; NAME is `metadata.image`
with "_" for "/" and ":", or the file name of a .sif without its suffix. `apptainer build --sandbox`
and `docker export` create such a folder. It needs bash, git, and everything that the scripts
install: the sandbox has no network.

Deliberate deviations. The edited files are written; NeMo-Gym applies a diff, which fails if an
image has different line endings. A test that was skipped has not passed. The two runs of repro-gen
share nothing, and the exit code is read, not printed. A shebang does not replace a ```python block.
A setup that fails is an error, not a 0. So are tests that do not run: if none passes with an
answer, one must pass without it, or, if PASS_TO_PASS is empty, be named in the log.

Known leaks: patched code runs in the process that logs the passed tests, and can write that log. A
test of repro-gen can check whether the files were patched, instead of how they behave.
"""

import json
from pathlib import PurePosixPath

from core.waits import in_thread
from envs import Reward, final_text, get, require, unfinished
from envs.boxes import image_names
from envs.sandbox import sandbox
from envs.sandbox.outcome import Ran
from envs.services import CheckerError, Need
from envs.swe.edits import EditError, edited, last_block
from envs.swe.images import EVALUATE, REPRODUCE, run_in_image
from envs.swe.row_fields import contents, tests_of
from envs.swe.test_logs import name_of, passed, statuses

RUN: set[int] = set()  # hashes of instances whose tests run without an answer
AGENTS = ("swerl_gen_simple_agent", "swerl_gen")


def needs(row: dict) -> tuple[Need, ...]:
    """The images in `services.images`, and bubblewrap, in which they run."""
    return image_names.NEED, sandbox.NEED


def check(row: dict) -> None:
    """Raises ValueError unless the row has scripts to run, and the tests that count."""
    mode = get(row, "mode", str, '"eval" or "repro-gen"')
    require(mode in ("eval", "repro-gen"), "mode", mode, '"eval" or "repro-gen"')
    image = get(row, "metadata.image", str, "the name of an image")
    image_names.check(image, "metadata.image")
    if mode == "repro-gen":
        get(row, "instance.regression_script", str, "a bash script")
        patch = get(row, "instance.patch", str, "a patch that solves the issue")
        require(patch.strip(), "instance.patch", patch, "a patch that solves the issue")
        return
    for name in ("setup_script", "test_script"):
        get(row, f"instance.{name}", str, "a bash script")
    get(row, "instance.repo", str, "OWNER/NAME")
    get(row, "metadata.remove_repo_name", bool | None, "true or false")
    for path, content in contents(row).items():
        at = f"metadata.relevant_file_contents.{path}"
        require(isinstance(content, str), at, content, "the text of a file")
        inside = not PurePosixPath(path).is_absolute() and ".." not in PurePosixPath(path).parts
        require(inside, "metadata.relevant_file_contents", path, "paths inside the repository")
    for name in ("FAIL_TO_PASS", "PASS_TO_PASS"):
        tests = tests_of(row, name)
        good = all(isinstance(test, str) for test in tests) and (tests or name == "PASS_TO_PASS")
        require(good, f"instance.{name}", tests, "a list of test names")


async def verify(row: dict, response: str) -> Reward:
    """Returns the reward 0.0, 0.2 or 1.0; `reason` explains why nothing was run.

    `fixed` and `kept` are the shares of FAIL_TO_PASS and PASS_TO_PASS that passed. Raises
    CheckerError if the image is missing or cannot be set up.
    """
    text = final_text(response).encode("utf-8", "replace").decode()
    if reason := unfinished(text):
        return Reward(0.0, {"reason": reason})
    if row["mode"] == "repro-gen":
        return await _reproduce(row, text)
    return await _evaluate(row, text)


async def _evaluate(row: dict, text: str) -> Reward:
    solution, closed, _ = text.partition("<solution>")[2].partition("</solution>")
    if not closed:
        return Reward(0.0, {"reason": "no <solution>"})
    try:
        files = await in_thread(edited, contents(row), solution.strip())
    except EditError as error:
        return Reward(0.0, {"reason": str(error)})
    ran = await _tested(row, files)
    if ran.ended:
        return Reward(0.0, {"reason": ran.ended})
    good = await in_thread(passed, row["instance"]["repo"], ran.stdout)
    to_fix = tests_of(row, "FAIL_TO_PASS")
    to_keep = tests_of(row, "PASS_TO_PASS")
    if not any(name_of(test) in good for test in [*to_fix, *to_keep]):
        await _must_run(row)
    fixed = _share(to_fix, good)
    kept = _share(to_keep, good)
    value = 0.0
    if fixed and kept == 1:
        value = 1.0 if fixed == 1 else 0.2
    return Reward(value, {"fixed": fixed, "kept": kept})


async def _tested(row: dict, files: dict[str, str]) -> Ran:
    """Runs the tests with these files in the repository."""
    if row["metadata"].get("remove_repo_name"):
        files = {path.partition("/")[2]: content for path, content in files.items()}
    instance = row["instance"]
    given = {"setup.sh": instance["setup_script"], "test.sh": instance["test_script"]}
    given |= {f"edited/{path}": content for path, content in files.items()}
    return await run_in_image(row["metadata"]["image"], EVALUATE, given, list(files))


async def _must_run(row: dict) -> None:
    """Raises CheckerError if the tests do not run without an answer either."""
    key = hash(json.dumps(row["instance"]))
    if key in RUN:
        return
    ran = await _tested(row, contents(row))
    found = await in_thread(statuses, row["instance"]["repo"], ran.stdout)
    kept = [name_of(test) for test in tests_of(row, "PASS_TO_PASS")]
    runs = any(found.get(test) == "PASSED" for test in kept) if kept else bool(found)
    if not runs:
        why = " ".join(f"{ran.ended} {ran.stdout[-300:]}".split())
        raise CheckerError(f"the tests in {row['metadata']['image']} do not run: {why}")
    RUN.add(key)


async def _reproduce(row: dict, text: str) -> Reward:
    code = last_block(text)
    if code is None:
        return Reward(0.0, {"reason": "no ```python block"})
    instance = row["instance"]
    given = {"setup.sh": instance["regression_script"], "reproduce_bug.py": code}
    for patch, expected in (("", 2), (instance["patch"], 0)):
        files = given | {"gold.patch": patch, "there.patch": instance["patch"]}
        ran = await run_in_image(row["metadata"]["image"], REPRODUCE, files, [])
        if ran.ended or ran.code != expected:
            when = "after" if patch else "before"
            return Reward(0.0, {"reason": f"{ran.ended or ran.code} {when} the patch"})
    return Reward(1.0)


def _share(tests: list[str], good: set[str]) -> float:
    return sum(name_of(test) in good for test in tests) / len(tests) if tests else 1.0
