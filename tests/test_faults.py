"""Processes are killed: the run recovers, or ends with an error that names what died."""

from pathlib import Path

import pytest
from conftest import write_rows

from support.program import Program, copy, end, survivors
from support.samples import asking

pytestmark = pytest.mark.e2e
DROPPED = "dropped.jsonl"


def test_no_process_of_vllm_outlives_its_actor(tiny_config, monkeypatch):
    """Not even where Ray, which would end it, is killed in the same moment.

    An engine of several parts has a process for each, which the first one starts. Each has its part
    of every update: at lag 0 the trainer computes the logprobs that they sampled with.
    """
    monkeypatch.delenv("PYTHONPATH")  # all starts as a user's does
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # two processes on few processors
    fields = {"tensor_parallel": 2, "max_lag": 0, "verify_sync_every": 1}
    program = Program(tiny_config(steps=10_000, save_period=0, **fields))

    def gaps() -> list[float]:
        tables = (line["rows"] for line in program.lines("mismatch.jsonl"))
        return [row["mean"] for rows in tables for row in rows if row["by"] == "all"]

    try:
        program.wait_until(lambda: len(gaps()) >= 2)  # the second one behind a step
        assert max(gaps()) < 1e-5
        (generator,) = program.pids("Generator")
        processes = {pid: name for pid, name in program.family().items() if b"VLLM::" in name}
        raylet = int(Path(f"/proc/{generator}/stat").read_text().rsplit(")", 1)[1].split()[1])
        assert b"raylet" in Path(f"/proc/{raylet}/cmdline").read_bytes()
        assert len(processes) == 3
        end(raylet)
        end(generator)
        assert not survivors(processes, 20)
    finally:
        program.stop()


BROKEN_ENVIRONMENT = """
import asyncio, math, os, random, time
from envs import Reward

AGENTS = ("broken",)

async def verify(row, response):
    if row["kind"] == "raise":
        raise KeyError("broken on purpose")
    if row["kind"] == "hang":
        await asyncio.sleep(1000)
    if row["kind"] == "exit":
        os._exit(3)
    if row["kind"] == "freeze":
        time.sleep(1000)
    return Reward(math.nan if row["kind"] == "nan" else random.random())
"""


@pytest.mark.long
def test_an_environment_that_fails_costs_its_prompt_and_never_becomes_a_reward(
    tiny_config, tmp_path
):
    """Raising, hanging, NaN, and what takes its worker along: tried again, then the next prompt
    takes the slot, all counted. The neighbours of the guilty ones lose nothing.
    """
    root = copy(tmp_path / "fork")
    for name, long, short in (
        ("core/waits.py", "ANSWER_SECONDS = 25.0", "ANSWER_SECONDS = 10.0"),
        ("runtime/rollouts/dispatch.py", "ATTEMPTS = 3", "ATTEMPTS = 2"),
    ):
        text = (root / name).read_text()
        assert long in text
        (root / name).write_text(text.replace(long, short))
    (root / "envs" / "broken.py").write_text(BROKEN_ENVIRONMENT)
    kinds = {3: "raise", 6: "hang", 9: "nan", 12: "exit", 15: "freeze"}
    rows = [asking(f"row {i}", "broken", kind=kinds.get(i, "well")) for i in range(1, 33)]
    data = {"train": write_rows(tmp_path / "rows.jsonl", rows)}
    cfg = tiny_config(steps=4, timeouts={"rollout": 20.0}, data=data)
    program = Program(cfg, root=root).succeeds(400)  # most of it are deadlines, one after the other
    program.check_slots(cfg, rows=32)
    dropped = {(line["row"].rsplit(":", 1)[1], line["reason"]) for line in program.lines(DROPPED)}
    assert {row for row, _ in dropped} == set(map(str, kinds))
    assert dict(dropped)["6"] == "TimeoutError"
    for row in ("12", "15"):
        (line,) = (line for line in program.lines(DROPPED) if line["row"].endswith(f":{row}"))
        assert f"line {row} crashed its worker while running alone" in line["error"]
    lines = program.lines("rollouts.jsonl")
    assert {line["row"] for line in lines} == set(range(1, 22)) - set(kinds)
    assert all(0 < line["reward"] <= 1 for line in lines)
    assert program.steps()[-1]["dropped_prompts"] == 5
