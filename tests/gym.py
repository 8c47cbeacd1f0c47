"""Asks real servers of NeMo-Gym, and prints what came of it.

    python tests/gym.py VENV [more words for ng_run]

VENV is a virtual environment with nemo-gym. It starts launch/gym.sh with a multiple choice, a loop
of tools and the office, whose example rows are in that package. The policy says what earns 1, or 0,
in odd spellings of a real template's tokenizer. Then there are 200 episodes at once, and an outage.
What the servers say is in logs/gym.log. The exit status is 1 where a reward is wrong, or an episode
is not one sequence of the sampled ids.
"""

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import ray

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from envs import services  # noqa: E402
from envs.gym import gym, nemo_gym  # noqa: E402
from rollout.episode import stitch  # noqa: E402
from settings.config import Sampling  # noqa: E402
from settings.environment_services import Services  # noqa: E402
from support.chats import Reader, Scripted, real, spell  # noqa: E402

NAMES = ("mcqa", "example_multi_step", "workplace_assistant")
AT_ONCE = 200
START = 900  # seconds; Gym installs what each server needs at the first time
LOG = ROOT / "logs/gym.log"
TOKENIZER = real("qwen3")


class Servers:
    """launch/gym.sh, and what it started."""

    def __init__(self, venv: str, words: list[str]) -> None:
        self.words = words
        (self.package,) = Path(venv).glob("lib/python3*/site-packages")
        self.environment = os.environ | {"GYM": venv, "GYM_PORT": "18311", "ROUTER_PORT": "18300"}
        self.environment |= {"GRPO_PYTHON": sys.executable, "WANDB_MODE": "disabled"}

    def start(self) -> None:
        """Starts them. What they say goes to LOG."""
        LOG.parent.mkdir(exist_ok=True)
        configs = ",".join(f"resources_servers/{name}/configs/{name}.yaml" for name in NAMES)
        command = ["bash", str(ROOT / "launch/gym.sh"), configs, *self.words]
        options = {"cwd": ROOT, "env": self.environment, "start_new_session": True}
        output = {"stdout": LOG.open("a"), "stderr": subprocess.STDOUT}
        self.program = subprocess.Popen(command, **options, **output)

    async def ready(self) -> None:
        """Raises TimeoutError where they do not answer in time, RuntimeError where they ended."""
        async with asyncio.timeout(START):
            while "does not answer" in gym.problem("mcqa_simple_agent"):
                if self.program.poll() is not None:
                    raise RuntimeError(f"launch/gym.sh ended with {self.program.returncode}: {LOG}")
                gym._problem.cache_clear()
                await asyncio.sleep(1)

    def stop(self) -> None:
        os.killpg(self.program.pid, signal.SIGTERM)
        self.program.wait()

    def row(self, name: str) -> dict:
        """The first example row of a resources server."""
        lines = (self.package / f"resources_servers/{name}/data/example.jsonl").read_text()
        agent = {"type": "responses_api_agents", "name": f"{name}_simple_agent"}
        return json.loads(lines.splitlines()[0]) | {"agent_ref": agent, "_line": 1}


def said(call: dict) -> str:
    """An answer that makes a call, as Reader reads it."""
    return json.dumps([[call["name"], call["arguments"]]])


def right(name: str, row: dict) -> list[str]:
    if name == "mcqa":
        return [f"<think>the the</think> an abane \\boxed{{{row['expected_answer']}}}"]
    if name == "workplace_assistant":
        return [*map(said, row["ground_truth"]), " done, the end "]
    words, values = row["expected_synonyms"], row["expected_synonym_values"]
    calls = [("get_synonym_value", {"synonym": word}) for word in words]
    calls += [("extract_synonym_values", {"synonym_values": values})]
    told = [{"name": tool, "arguments": json.dumps(given)} for tool, given in calls]
    return [*map(said, told), " done, the end "]


def sampler(texts: list[str], seed: int) -> Reader:
    """The policy of an episode, which says these texts."""
    dice, left = random.Random(seed), list(texts)

    def answer(request):
        return [*spell(TOKENIZER, left.pop(0), dice), TOKENIZER.eos_token_id], "stop"

    settings = Sampling(max_model_len=1 << 16, max_response_tokens=1 << 12)
    return Reader(Scripted(answer), TOKENIZER, settings, seed, [], validation=False)


async def tried(row: dict, texts: list[str], expected: float, seed: int = 0) -> bool:
    """Whether an episode is one sequence of what was sampled, and earned what it should."""
    episode = await nemo_gym.rollout(row, sampler(texts, seed))
    (sample, *more) = stitch(episode.turns)
    sampled = sum((turn.token_ids for turn in episode.turns), [])
    whole = not more and sample.tokens_T[sample.mask_T].tolist() == sampled
    return whole and len(episode.turns) == len(texts) and episode.reward.value == expected


async def outage(servers: Servers, row: dict, texts: list[str]) -> None:
    """Takes the servers away while an episode is under way."""
    policy = sampler(texts, 0)
    asked = asyncio.Event()

    async def never(request):
        asked.set()
        await asyncio.sleep(3600)

    policy.engine.generate.remote = never
    ray.cancel = lambda answer: None  # there is no Ray here
    rollout = asyncio.create_task(nemo_gym.rollout(row, policy))
    await asked.wait()
    servers.stop()
    began = time.monotonic()
    while not services.report().away and not rollout.done():
        await asyncio.sleep(0.1)
    print(f"outage: noticed after {time.monotonic() - began:.1f} s: {services.report().away}")
    servers.start()
    try:
        await rollout
    except services.Away as error:
        print(f"outage: the try ended after {time.monotonic() - began:.0f} s: {error}")
        return
    raise AssertionError("the try had a reward")


async def main(venv: str, *words: str) -> int:
    """Prints a line for each thing that was asked; returns the exit status."""
    services.configure(Services(nemo_gym=("http://127.0.0.1:18311",)), services.Limits(600.0))
    servers = Servers(venv, list(words))
    wrong = 0
    try:
        servers.start()
        await servers.ready()
        for name in NAMES:
            row = servers.row(name)
            texts = right(name, row)
            good = await tried(row, texts, 1.0)
            good &= await tried(row, ["no"], 0.0)
            wrong += not good
            print(f"{name}: {len(texts)} answers earn 1, 'no' earns 0: {good}")
        row = servers.row("example_multi_step")
        texts = right("example_multi_step", row)
        began = time.monotonic()
        many = await asyncio.gather(*(tried(row, texts, 1.0, i) for i in range(AT_ONCE)))
        seconds = time.monotonic() - began
        each = 1000 * seconds / (AT_ONCE * len(texts))
        print(f"{AT_ONCE} at once: {sum(many)} right in {seconds:.1f} s, {each:.1f} ms an answer")
        wrong += many.count(False)
        await outage(servers, row, texts)
        good = await tried(row, texts, 1.0)
        wrong += not good
        print(f"after the outage: {good}")
    finally:
        servers.stop()
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(asyncio.run(main(*sys.argv[1:])))
