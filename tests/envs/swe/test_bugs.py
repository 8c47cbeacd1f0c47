"""Twenty bugs of a real package, in boxes: `bash tests/run.sh swe` sets GRPO_SWE."""

import asyncio
import os

import pytest

from envs.rollout import services
from envs.sandbox import sandbox
from envs.swe.box import Box, Size
from envs.swe.swe_judge import judge, patch_of, prepare, refusal, tried
from envs.swe.test_logs import outcomes
from settings.services import Services
from support import bugs

pytestmark = pytest.mark.skipif(not os.environ.get("GRPO_SWE"), reason="bash tests/run.sh swe")
SMALL = Size(memory=2 << 30, disk=256 << 20, processes=200)


@pytest.fixture(scope="module")
def image(tmp_path_factory):
    if problem := sandbox.problem():
        pytest.skip(f"no sandbox here: {problem}")
    folder = tmp_path_factory.mktemp("bugs")
    files = bugs.released(folder)
    before = services.current()
    services.configure(Services(images=str(folder)))
    yield folder / "boltons", bugs.rows(folder / "boltons", files)
    services.configure(before)


async def passing(image) -> dict[str, list[str]]:
    """The tests of each module that pass in the repository as it was released."""
    modules = dict.fromkeys(bug.module for bug in bugs.BUGS)
    async with Box(image, size=SMALL) as box:
        logs = {module: await box.run(bugs.RUN.format(module), 300) for module in modules}
    found = {module: outcomes("parse_log_pytest", ran.output) for module, ran in logs.items()}
    return {name: [test for test in tests if tests[test] == "PASSED"] for name, tests in
            found.items()}  # fmt: skip


async def test_each_bug_is_repaired_by_its_repair_alone(image):
    """An agent that repairs all: 20 of 20. One that does nothing: 0 of 20."""
    folder, rows = image
    tests = await passing(folder)
    repaired, idle, fixed = [], [], []
    for row, bug in zip(rows, bugs.BUGS, strict=True):
        kept = [test for test in tests[bug.module] if test not in row["FAIL_TO_PASS"]]
        row = row | {"PASS_TO_PASS": kept}
        assert refusal(row) == "" and set(row["FAIL_TO_PASS"]) <= set(tests[bug.module])
        async with Box(folder, size=SMALL) as box:
            await prepare(box, row)
            assert await patch_of(box, row) is None
            await box.put("/tmp/repair", row["patch"].encode())
            assert (await box.run("git apply /tmp/repair && rm /tmp/repair", 60)).code == 0
            patch = await patch_of(box, row)
        verdicts = await asyncio.gather(
            judge(folder, row, patch, SMALL), tried(folder, row, "", SMALL)
        )
        repaired.append(verdicts[0].resolved)
        idle.append(verdicts[1].verdict.resolved)
        fixed.append(verdicts[1].verdict.details["fixed"])
        assert verdicts[0].details["tampered"] == 0, row["instance_id"]
    assert (sum(repaired), sum(idle), max(fixed)) == (20, 0, 0), (repaired, idle, fixed)
