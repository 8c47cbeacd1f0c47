"""A run with agents whose engine is killed, then its driver: `bash tests/run.sh swe`."""

import os
import re
import sys

import pytest

from envs.sandbox import sandbox
from grpo_async import Config
from launch import make_tiny_swe, tiny_image
from settings import reader
from support.box_images import adopting, orphans
from support.configs import changed
from support.program import ROOT, Program, end, ran

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif("GRPO_SWE" not in os.environ, reason="bash tests/run.sh swe"),
    pytest.mark.skipif(bool(sandbox.problem()), reason=sandbox.problem()),
]
STEPS = 6
CALL = re.escape(make_tiny_swe.OPEN) + r"sed -i s/(\w+)/(\w+)/ (\w+)\.py" + make_tiny_swe.CLOSE
REASONS = (None, "no patch", "tests failed")  # of a reward that the answer has earned


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with the tiny model, the image, and the rows."""
    folder = tmp_path_factory.mktemp("made")
    made = ran(sys.executable, "launch/make_tiny_swe.py", "--root", folder, seconds=600)
    assert made.returncode == 0, made.stderr
    return folder


def in_a_group(program: Program) -> None:
    """Waits until a command runs in a box, so that an answer of a group is not finished."""
    program.wait_until(lambda: any(b"bwrap" in name for name in program.family().values()))


def left_of(before: set[int]) -> dict[int, bytes]:
    """Processes of a run that has ended; the agents of Ray's own node may stay for a while."""
    found = orphans(before, 30)
    return {pid: name for pid, name in found.items() if b"Agent" not in name}


def earned(line: dict) -> float | None:
    """What an answer is worth; None where it is not one command, which was run."""
    found = re.fullmatch(CALL, line["response"][0])
    if not found or len(line["response"]) != 2 or line["response"][1] != "done":
        return None
    wrong, guess, file = found.groups()
    bug = tiny_image.BUGS[line["dataset"]]
    return float((wrong, guess, file) == (*bug[:2], line["dataset"]))


def test_an_engine_and_the_driver_are_killed_within_groups(made, tmp_path, capsys):
    """Each prompt is trained once, none is dropped, each answer has the reward that it earned."""
    fields = {"steps": STEPS, "val_period": 0, "save_period": 1, "sample_period": 0}
    data, images = made / "data/tiny_swe", made / "data/tiny_swe/images"
    cfg = changed(
        reader.read(Config, ROOT / "configs/tiny_swe.py"),
        run_dir=str(tmp_path / "run"),
        model=str(made / "models/tiny_swe"),
        data={"train": str(data / "train.jsonl"), "val": ""},
        services={"images": str(images)},
        **fields,
    )
    with adopting() as before:
        program = Program(cfg)
        program.wait_until(lambda: len(program.steps()) >= 1, 300)
        in_a_group(program)
        cores = program.engine_cores()
        end(cores[0])
        done = len(program.steps())
        program.wait_until(lambda: len(program.steps()) >= done + 2, 300)
        assert len(cores) == 1 and not set(cores) & set(program.engine_cores())
        in_a_group(program)
        program.stop()
        done = len(program.steps())
        assert done < STEPS, "killed too late"
        assert left_of(before) == {}
        program = Program(cfg, "--resume", "auto").succeeds(600)
        assert left_of(before) == {}
    rows = len((data / "train.jsonl").read_text().splitlines())
    program.check_slots(cfg, rows)
    assert program.lines("dropped.jsonl") == []
    lines = program.lines("rollouts.jsonl")
    worth = [(earned(line), line["reward"]) for line in lines]
    known = [pair for pair in worth if pair[0] is not None]
    assert len(known) > len(lines) / 2 and all(own == got for own, got in known)
    assert {line["info"].get("reason") for line in lines} <= set(REASONS)
    with capsys.disabled():
        print(f"\nan engine was killed, then the driver after step {done} of {STEPS}: "
              f"{len(lines)} answers, {sum(got for _, got in worth):g} paid, none dropped; "
              f"of {len(known)} that are one command each has what it earned")  # fmt: skip
