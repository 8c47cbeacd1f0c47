"""A thousand episodes with a Python session each, at once: what they cost, and what they leave.

    taskset -c 0,1 python bench/sessions.py [EPISODES] [SECONDS that the policy thinks]

The real `envs/maths/python_tool.py`, sandbox and verifier; the policy is a script of three calls
and an
answer, whose numbers are random, so that a lost or mixed-up session earns 0. Memory is the share of
all processes (Pss); the time of a turn is that of a processor in this process.
"""

import asyncio
import json
import os
import random
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
from envs.maths import python_tool  # noqa: E402
from envs.rollout.episode import Turn  # noqa: E402
from envs.rollout.response import Response  # noqa: E402
from envs.sandbox.sandbox import family  # noqa: E402

TURNS = 4
TOOLS = [{"type": "function", "name": python_tool.TOOL}]


class Policy:
    """Asks for a product in three steps, and thinks after each."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.factors = random.sample(range(10**6), 2)
        self.read: list[str] = []

    async def chat(self, messages: list[dict], tools: list | None = None) -> Turn:
        """The next call, or the answer that the last one gave."""
        self.read.append(messages[-1]["content"])
        a, b = self.factors
        codes = (f"x = {a}\nx", f"import sympy\ny = sympy.Integer({b})\nprint(y)", "x * y")
        said = Response(f"\\boxed{{{self.read[-1]}}}")
        if len(self.read) < TURNS:
            await asyncio.sleep(self.seconds * random.uniform(1, 1.1) * (len(self.read) > 1))
            arguments = json.dumps({"code": codes[len(self.read) - 1]})
            call = {"type": "function_call", "name": python_tool.TOOL, "arguments": arguments}
            said = Response("call", content="", tool_calls=[call])
        ids = list(range(len(self.read) * 2))
        return Turn(ids[:-1], ids[-1:], [-1.0], [0], "stop", parsed=said)


async def episode(seconds: float) -> float:
    """The reward of one episode."""
    policy = Policy(seconds)
    gold = str(policy.factors[0] * policy.factors[1])
    row = {"responses_create_params": {"input": "?", "tools": TOOLS}, "expected_answer": gold}
    return (await python_tool.rollout(row, policy)).reward.value


def memory() -> tuple[float, int]:
    """MB of this process and all that it began, and how many they are."""
    found = []
    for pid in family(os.getpid()):
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except OSError:  # it has ended
            continue
        found += [int(line.split()[1]) / 1000 for line in lines if line.startswith("Pss:")]
    return sum(found), len(found)


async def measure(episodes: int, seconds: float) -> None:
    """Prints one line for each of three rounds."""
    print("round  lost  seconds  all alive: MB  processes  after: MB  processes  own ms a turn")
    for number in range(3):
        began, own = time.monotonic(), time.process_time()
        tasks = [asyncio.create_task(episode(seconds)) for _ in range(episodes)]
        # Each has made its first call when the first of them makes its second.
        await asyncio.sleep(0.95 * seconds)
        most = await asyncio.to_thread(memory)
        rewards = await asyncio.gather(*tasks, return_exceptions=True)
        lost = sum(reward != 1 for reward in rewards)
        took = time.monotonic() - began
        cost = (time.process_time() - own) / episodes / TURNS * 1000
        await asyncio.sleep(1)
        rest = memory()
        print(
            f"{number:5} {lost:5} {took:8.0f} {most[0]:14.0f} {most[1]:10} {rest[0]:10.0f}"
            f" {rest[1]:10} {cost:14.1f}",
            flush=True,
        )


if __name__ == "__main__":
    count, thinks, *_ = [*map(float, sys.argv[1:]), *(1000.0, 60.0)[len(sys.argv) - 1 :]]
    asyncio.run(measure(int(count), thinks))
