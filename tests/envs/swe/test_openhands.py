"""OpenHands itself repairs a bug in a box, with our policy behind it: `tests/run.sh openhands`."""

import asyncio
import json
import os
from pathlib import Path

import pytest

from envs import services
from envs.boxes import sif
from envs.boxes.box import Box
from envs.gym.endpoint import invited
from envs.sandbox import sandbox
from envs.swe import agent_session, repository, swe, swe_judge
from launch import tiny_image
from rollout.episode import stitch
from settings.environment_services import Services
from support.box_images import left, present
from support.chats import real, saying
from support.program import ROOT

PYTHON = Path(os.environ.get("GRPO_OPENHANDS", ""), "bin/python").absolute()
MISSING = "GRPO_OPENHANDS names no environment with OpenHands: bash tests/run.sh openhands"
SECONDS = 240.0  # of an agent, whose imports take 20
pytestmark = [
    pytest.mark.skipif(not PYTHON.is_file(), reason=MISSING),
    pytest.mark.skipif(bool(sandbox.problem()), reason=sandbox.problem()),
]


def bash(command: str) -> str:
    """An answer that runs a command."""
    return json.dumps([["terminal", json.dumps({"command": command})]])


async def conversation(url: str, prompt: str, box: Box, folder: Path) -> list[str]:
    """Has an agent of OpenHands's work in a box; returns its commands."""
    # Neither the variables of this process nor a home of its user; the library writes there.
    env = {"PATH": os.defpath, "HOME": str(folder), "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    pipes = dict.fromkeys(("stdin", "stdout"), asyncio.subprocess.PIPE)
    agent = ROOT / "tests/support/openhands_agent.py"
    with open(folder / "log", "wb") as log:
        process = await asyncio.create_subprocess_exec(
            PYTHON, agent, url, prompt, env=env, cwd=folder, stderr=log, **pipes
        )
    commands = []
    try:
        while line := await process.stdout.readline():
            commands.append(json.loads(line)["command"])
            ran = await box.run(commands[-1], 60)
            outcome = {"output": ran.output, "code": ran.code if ran.code is not None else -1}
            process.stdin.write(json.dumps(outcome).encode() + b"\n")
            await process.stdin.drain()
        code = await process.wait()
    finally:
        await sandbox.kill(process)
    assert code == 0, (folder / "log").read_text()[-3000:]
    return commands


async def test_openhands_repairs_a_bug_through_the_endpoint(tmp_path):
    """Its own loop, prompt and tool; what is trained on are the turns that our sampler saw."""
    images, home = tmp_path / "images", tmp_path / "home"
    home.mkdir()
    row = tiny_image.make_bugs(images)["add"]
    services.configure(Services(images=str(images)))
    before = present()
    works = ["cat add.py", "sed -i s/minus/plus/ add.py", "git diff --stat"]
    finish = json.dumps([["finish", json.dumps({"message": "add adds."})]])
    answers = [*map(bash, works), finish]
    prompts = []

    def say(prompt: str) -> str:
        prompts.append(prompt)
        return answers.pop(0)

    sampler = saying(real("qwen3"), say, limit=1 << 17)
    image = sif.find(row["image"])
    async with Box(image, row["workdir"], agent_session.SIZE) as box, asyncio.timeout(SECONDS):
        await repository.prepare(box, row)
        async with invited(sampler) as guest:
            commands = await conversation(guest.url, swe.prompt(row)[-1]["content"], box, home)
        patch = await repository.patch_of(box, row)
    assert commands == works and not answers
    assert "You are OpenHands agent" in prompts[0] and row["problem_statement"][:40] in prompts[0]
    assert "from ops import minus as add" in prompts[1] and "add.py | 2 +-" in prompts[3]
    assert "+from ops import plus as add" in patch
    assert (await swe_judge.judge(image, row, patch, agent_session.SIZE)).resolved
    (sample,) = stitch(guest.turns)
    assert sample.tokens_T[sample.mask_T].tolist() == sum((t.token_ids for t in guest.turns), [])
    assert len(guest.turns) == 4 and not guest.refused
    await asyncio.sleep(0)
    assert not {item for item in await asyncio.to_thread(left, before) if "process" in item}
