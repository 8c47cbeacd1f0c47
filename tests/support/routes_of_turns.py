"""A real engine's routes over conversations: each sent once, beside all sent with every turn.

    PYTHONPATH=tests/cpu:tests:. python tests/support/routes_of_turns.py MODEL

Two rollouts of each conversation take turns at one engine, whose weights change between two turns.
Prints as JSON: tokens, whether both have the same tokens and joined routes, the share of rows that
is sent, and of a first turn's rows those that the next turn's weights would route otherwise.
"""

import asyncio
import json
import os
import sys
from types import SimpleNamespace

import numpy as np
import torch

os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
os.environ |= {"TORCH_COMPILE_DISABLE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
os.environ |= {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}  # `nudge` is sent to the engine

from grpo_async import Generator  # noqa: E402
from rollout.drafts import answers  # noqa: E402
from rollout.episode import Request, Turn, stitch  # noqa: E402
from support.megatron_ranks import config  # noqa: E402

CONVERSATIONS, TURNS = 4, 3


def nudge(worker) -> None:
    """Moves what a router sees."""
    with torch.no_grad():
        for name, weight in worker.model_runner.get_model().named_parameters():
            if "embed" in name:
                weight.add_(0.05 * torch.randn(weight.shape))


class Rollout:
    """One conversation with the engine; `whole` has every turn send all."""

    def __init__(self, generator: Generator, name: str, whole: bool):
        self.name, self.whole = name, whole
        self.calls, self.turns, self.rows = [], [], 0
        self.generator = generator
        self.engine = SimpleNamespace(generate=SimpleNamespace(remote=self.generate))

    async def generate(self, request: Request) -> list[Turn]:
        """As the engine's actor; counts what it would send."""
        if self.whole:
            request = request._replace(known_routes=0)
        turns = await self.generator.generate(request)
        self.rows += sum(len(piece) for turn in turns for piece in turn.routes)
        return turns

    async def ask(self, k: int, new: list[int]) -> None:
        """Turn k: all that was said, and some new tokens."""
        last = self.turns[-1] if self.turns else None
        prompt = (last.prompt_ids + last.token_ids if last else []) + new
        request = Request(f"{self.name} {k}", prompt, 1, 7 * k, [], 30)
        self.turns += await answers(self.calls, k, self.engine, request)


async def main(model: str) -> None:
    """Plays all conversations."""
    lengths = {"max_model_len": 512, "max_response_tokens": 200, "row_tokens": 512}
    import vllm

    args = vllm.AsyncEngineArgs  # no trainer sends the weights
    vllm.AsyncEngineArgs = lambda **named: args(**named | {"load_format": "auto"})
    engine = {"args": {"max_num_seqs": 16}}
    generator = Generator(config(model, replay_routing=True, engine=engine, **lengths))
    await generator.start()
    draw = torch.Generator().manual_seed(0)
    found = {"tokens": 0, "same tokens": True, "same routes": True}
    sent = {False: 0, True: 0}
    moved = []
    await generator.engine.update_weight_version("0")
    for i in range(CONVERSATIONS):
        pair = [Rollout(generator, f"{i} {whole}", whole) for whole in (False, True)]
        for k in range(TURNS):
            generator.version += 1
            new = torch.randint(1, 100, (20,), generator=draw).tolist()
            for rollout in pair:
                await rollout.ask(k, new)
            await generator.engine.collective_rpc(nudge)
        (ours,), (theirs,) = (stitch(rollout.turns) for rollout in pair)
        found["tokens"] += len(theirs.tokens_T)
        found["same tokens"] &= np.array_equal(ours.tokens_T, theirs.tokens_T)
        found["same routes"] &= np.array_equal(ours.routes_T, theirs.routes_T)
        sent = {whole: sent[whole] + rollout.rows for whole, rollout in enumerate(pair)}
        (first,), (second,) = (turn.routes for turn in pair[1].turns[:2])
        moved.append((np.sort(first) != np.sort(second[: len(first)])).any((1, 2)))
    generator.engine.shutdown()
    found |= {"sent": sent[0] / sent[1], "moved": float(np.concatenate(moved).mean())}
    print(json.dumps(found))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
