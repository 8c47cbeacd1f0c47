"""What conversations with tools cost beside the engine: many at once, on two cores.

    python bench/chat.py [MODEL [EPISODES [TURNS [TOKENS]]]]

EPISODES conversations at once call tools and go on, up to TURNS answers, or TOKENS tokens if that
is less; then as many again. An engine that only waits gives answers, pickled as Ray does it.
Everything else is real: template, tokenizer, Sampler, converse, stitch. Calls are read from JSON,
as parsers have a process of their own (bench/verifiers.py). MODEL is the folder of a tokenizer.
"""

import asyncio
import json
import os
import pickle
import random
import sys
import time
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from envs.rollout.episode import Turn, stitch  # noqa: E402
from envs.rollout.response import Response  # noqa: E402
from envs.rollout.rows import load_tokenizer  # noqa: E402
from envs.rollout.sampler import Request, Sampler  # noqa: E402
from envs.tools.tools import converse  # noqa: E402
from settings.run import Sampling  # noqa: E402

CORES = {0, 1}
TICK = 0.01
WAVES = 3
SECONDS = 10.0  # that an answer takes at most
OUTPUT = 1500  # characters of what a user or a tool says
TOOLS = [{"type": "function", "name": "look", "parameters": {"type": "object"}}]
CALL = "\nCALL"
WORDS = (ROOT / "docs/grpo_async.md").read_text(encoding="utf-8")


def words(dice: random.Random, characters: int) -> str:
    """Some text."""
    start = dice.randrange(len(WORDS) - characters)
    return WORDS[start : start + characters]


class Reader(Sampler):
    """Reads the call at the end of an answer."""

    async def parse(self, text: str) -> Response:
        """An answer whose last line may be a call."""
        content, called, given = text.partition(CALL)
        call = {"type": "function_call", "name": "look", "arguments": given}
        return Response(text, content=content, tool_calls=[call] if called else [])


class Engine:
    """Answers with a text of 800 characters and a call, all but the last time."""

    def __init__(self, tokenizer, turns: int, seed: int):
        self.tokenizer, self.left, self.dice = tokenizer, turns, random.Random(seed)
        self.generate = SimpleNamespace(remote=self.respond)
        self.seconds = 0.0  # of our processor, which a real engine would not use

    async def respond(self, request: Request) -> list[Turn]:
        """One answer."""
        await asyncio.sleep(self.dice.random() * SECONDS)
        began = time.thread_time()
        self.left -= 1
        text = words(self.dice, 800) + (CALL + json.dumps({"at": self.left})) * (self.left > 0)
        ids = [*self.tokenizer.encode(text, add_special_tokens=False), self.tokenizer.eos_token_id]
        turn = Turn(request.prompt_ids, ids, [-1.0] * len(ids), [0] * len(ids), "stop")
        self.seconds += time.thread_time() - began
        return pickle.loads(pickle.dumps([turn]))


def memory() -> float:
    """GiB that this process holds."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**30


async def episode(engine: Engine, tokenizer, turns: int, tokens: int) -> tuple[int, int, str]:
    """Plays one; returns its turns, the tokens of its sequence, and what ended it."""

    async def call(name: str, given: dict) -> str:
        await asyncio.sleep(engine.dice.random() * SECONDS / 10)
        return words(engine.dice, OUTPUT)

    settings = Sampling(max_model_len=tokens)
    sampler = Reader(engine, tokenizer, settings, 0, [], validation=False)
    asked = [{"role": "user", "content": words(engine.dice, OUTPUT)}]
    talk = await converse(sampler, asked, TOOLS, call, turns)
    (sample,) = stitch(talk.turns)
    sampled = sum((turn.token_ids for turn in talk.turns), [])
    assert sample.tokens_T[sample.mask_T].tolist() == sampled
    return len(talk.turns), len(sample.tokens_T), talk.ended


async def main(tokenizer, episodes: int, turns: int, tokens: int) -> None:
    """Plays WAVES of them, and prints a line of each."""
    busy: list[float] = []  # processor seconds of the event loop's thread between two ticks
    held: list[float] = []

    async def watch() -> None:
        while True:
            began = time.thread_time()
            await asyncio.sleep(TICK)
            busy.append(1e3 * (time.thread_time() - began))
            held.append(memory())

    watcher = asyncio.ensure_future(watch())
    print(
        "   ended  turns  tokens  ended by     ms a turn  event loop busy: 99 %, at most  GiB held"
    )
    for wave in range(WAVES):
        used = time.process_time()
        engines = [Engine(tokenizer, turns, episodes * wave + i) for i in range(episodes)]
        work = [episode(engine, tokenizer, turns, tokens) for engine in engines]
        counts, lengths, ended = zip(*await asyncio.gather(*work), strict=True)
        seconds = time.process_time() - used - sum(engine.seconds for engine in engines)
        print(
            f"{len(counts):8} {sum(counts) / episodes:6.0f} {sum(lengths) / episodes:7.0f}", end=""
        )
        print(f"  {', '.join(sorted(set(ended))):12} {1e3 * seconds / sum(counts):9.2f}", end="")
        print(f"  {sorted(busy)[-1 - len(busy) // 100]:19.0f} {max(busy):8.0f} ms", end="")
        print(f"  {max(held):.2f}, {memory():.2f} afterwards")
        busy.clear()
        held.clear()
    watcher.cancel()


if __name__ == "__main__":
    os.sched_setaffinity(0, CORES)
    folder, *numbers = [*sys.argv[1:], *("models/tiny", "1000", "10", "65536")[len(sys.argv) - 1 :]]
    asyncio.run(main(load_tokenizer(folder), *map(int, numbers)))
