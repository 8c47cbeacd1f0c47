"""An algorithm with an engine whose answers depend on prompt, seed and weights alone.

    python tests/support/deterministic_engine.py --config ...

vLLM's answers depend in their last bits on which requests share a batch; these do not, so two runs
can be compared bit by bit. Weights come over the real wire. $GRPO_ALGORITHM names another program
than grpo_async, whose engines it has.
"""

import asyncio
import importlib
import os
import sys
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))


class ExactGenerator:
    """Stands for Generator: one token after the other, by transformers."""

    def __init__(self, cfg):
        self.cfg = cfg
        self.version = -1

    async def start(self) -> None:
        """Builds the network; its weights come with the first update."""
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        torch.set_num_threads(1)
        config = AutoConfig.from_pretrained(self.cfg.model)
        self.model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()

    async def join_sync_group(self, wire: bytes, host: str, port: int, rank: int, world: int):
        """As vLLM's workers do."""
        from policy.sync.receiver import WeightReceiver

        self.receiver = WeightReceiver()
        self.receiver.vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(rank=0))
        join = self.receiver.join_sync_group
        return [await asyncio.to_thread(join, wire, host, port, rank, world)]

    async def update_weights(self, version: int, verify: bool):
        """Receives all weights."""
        from policy.sync.weight_sync import checksum
        from runtime.engines.fleet import Received

        digests = []
        state = await asyncio.to_thread(lambda: dict(self.receiver.incoming(digests, verify)))
        self.model.load_state_dict(state, strict=False)
        self.version = version
        phases = {"sync_pause": 0.0, "sync_transfer": 0.0, "sync_resume": 0.0}
        return Received(phases, [checksum(digests)], {})

    async def generate(self, request):
        """The request's answers, each with its own random numbers."""
        limit = request.max_tokens or self.cfg.sampling.max_response_tokens
        turns = [self.sample(request.prompt_ids, request.seed + j, limit) for j in range(request.n)]
        await asyncio.sleep(0.3)  # so that a test can disturb the step
        return turns

    def sample(self, prompt_ids: list[int], seed: int, limit: int):
        """One Turn, of the weights at its start."""
        import torch

        from rollout.episode import Turn

        random = torch.Generator().manual_seed(seed)
        ids = list(prompt_ids)
        logps = []
        with torch.no_grad():
            while len(logps) < limit and (not logps or ids[-1] != 1):
                logp_V = self.model(torch.tensor([ids])).logits[0, -1].log_softmax(-1)
                ids.append(int(torch.multinomial(logp_V.exp(), 1, generator=random)))
                logps.append(float(logp_V[ids[-1]]))
        new = ids[len(prompt_ids) :]
        reason = "stop" if new[-1] == 1 else "length"
        return Turn(list(prompt_ids), new, logps, [self.version] * len(new), reason)

    def drafts(self, name, known):
        """Nothing is ever half written."""
        return []

    async def check_health(self) -> None:
        """Always well."""


if __name__ == "__main__":
    import grpo_async

    grpo_async.Generator = ExactGenerator
    importlib.import_module(os.environ.get("GRPO_ALGORITHM", "grpo_async")).main()
