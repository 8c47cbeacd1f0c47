"""Twenty bugs of a real package, in boxes: `bash tests/run.sh swe` sets GRPO_SWE."""

import asyncio
import os
import time

import pytest

from envs import services
from envs.boxes.box import Box, Size
from envs.check_rows import check_row
from envs.sandbox import sandbox
from envs.services import Limits
from envs.swe import swe
from envs.swe.swe_judge import tried
from envs.swe.swe_tools import tool_sets
from envs.swe.test_logs import outcomes
from rollout.episode import Episode
from settings.environment_services import Services
from support import bugs
from support.repairs import changing, looking
from support.scripts import Script

pytestmark = pytest.mark.skipif(not os.environ.get("GRPO_SWE"), reason="bash tests/run.sh swe")
SMALL = Size(memory=2 << 30, disk=256 << 20, processes=200)
AT_ONCE = 2  # episodes


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    """The folder of images, the files of the package, and a row for each bug."""
    if problem := sandbox.problem():
        pytest.skip(f"no sandbox here: {problem}")
    folder = tmp_path_factory.mktemp("bugs")
    files = bugs.released(folder)
    rows = bugs.rows(folder / "boltons", files)
    tests = asyncio.run(passing(folder / "boltons"))
    for row, bug in zip(rows, bugs.BUGS, strict=True):
        assert set(row["FAIL_TO_PASS"]) <= set(tests[bug.module])
        kept = [test for test in tests[bug.module] if test not in row["FAIL_TO_PASS"]]
        row |= {"image": "boltons", "PASS_TO_PASS": kept}
    return folder, files, rows


@pytest.fixture(autouse=True)
def images(package):
    services.configure(Services(images=str(package[0])), Limits(600.0))


async def passing(image) -> dict[str, list[str]]:
    """The tests of each module that pass in the repository as it was released."""
    modules = dict.fromkeys(bug.module for bug in bugs.BUGS)
    async with Box(image, size=SMALL) as box:
        logs = {module: await box.run(bugs.RUN.format(module), 300) for module in modules}
    found = {module: outcomes("parse_log_pytest", ran.output) for module, ran in logs.items()}
    return {name: [test for test in tests if tests[test] == "PASSED"] for name, tests in
            found.items()}  # fmt: skip


async def test_without_a_repair_no_test_of_a_bug_passes(package):
    folder, _, rows = package
    assert len(rows) == 20
    for pair in zip(rows[::2], rows[1::2], strict=True):
        trials = await asyncio.gather(*(tried(folder / "boltons", row, "", SMALL) for row in pair))
        for verdict in (trial.verdict for trial in trials):
            assert (verdict.resolved, verdict.details["fixed"]) == (False, 0), pair


async def played(rows: list[dict], answers: list[list[str]]) -> list[tuple[Episode, str]]:
    """The episode of each row with its answers, and all that its policy has seen."""
    found = {}
    rest = iter(range(len(rows)))

    async def worker() -> None:
        for i in rest:
            script = Script(answers[i])
            ended = await swe.rollout(rows[i], script)
            found[i] = ended, "\n".join(script.last()[1:])

    await asyncio.gather(*(worker() for _ in range(AT_ONCE)))
    return [found[i] for i in range(len(rows))]


@pytest.mark.parametrize("harness", tool_sets())
async def test_each_bug_is_repaired_with_each_tool_set(package, harness, capsys):
    """By whole episodes. An agent that repairs: 20 of 20. One that looks at the code: 0 of 20."""
    _, files, rows = package
    rows = [row | {"harness": harness} for row in rows]
    for row in rows:
        check_row(row)
    places = [bugs.place(bug, files) for bug in bugs.BUGS]
    began = time.monotonic()
    repairs = await played(rows, [changing(harness, *place) for place in places])
    between = time.monotonic()
    looks = await played(rows, [looking(harness, path) for path, *_ in places])
    seconds = between - began, time.monotonic() - between
    earned = [[ended.reward.value for ended, _ in of] for of in (repairs, looks)]
    with capsys.disabled():
        print(f"\n{harness}: {sum(earned[0]):g} of 20 repaired in {seconds[0]:.0f} s, by one that "
              f"changes nothing {sum(earned[1]):g} of 20 in {seconds[1]:.0f} s")  # fmt: skip
    assert earned == [[1] * 20, [0] * 20]
    for (ended, seen), (path, *_) in zip(repairs + looks, places * 2, strict=True):
        assert not ended.masked and "error: " not in seen and "def " in seen, path
    for (repair, _), (look, _) in zip(repairs, looks, strict=True):
        assert repair.reward.info["tampered"] == 0 and "reason" not in repair.reward.info
        assert look.reward.info["reason"] == "no patch" and look.reward.info["commands"] == 1
