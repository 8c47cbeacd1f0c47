"""grpo_async with an engine whose answers depend on prompt, seed and weights alone.

    python tests/support/deterministic_engine.py --config ...

vLLM's answers depend in their last bits on which requests share a batch; these do not, so two runs
can be compared bit by bit. Weights come over the real wire.
"""

import asyncio
import sys
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))


class ExactGenerator:
    """Stands for Generator: one token after the other, by transformers."""

    def __init__(self, cfg):
        self.cfg, self.version = cfg, -1

    async def start(self) -> None:
        """Builds the network; its weights come with the first update."""
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        torch.set_num_threads(1)
        config = AutoConfig.from_pretrained(self.cfg.model)
        self.model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()

    async def join_sync_group(self, *args) -> None:
        """As vLLM's workers do."""
        from policy.weight_sync import WeightReceiver

        self.receiver = WeightReceiver()
        parallel = SimpleNamespace(parallel_config=SimpleNamespace(rank=0))
        self.receiver.vllm_config = parallel
        await asyncio.to_thread(self.receiver.join_sync_group, *args)

    async def update_weights(self, version: int, verify: bool):
        """Receives all weights."""
        sums = {}
        state = await asyncio.to_thread(lambda: dict(self.receiver.incoming(sums, verify)))
        self.model.load_state_dict(state, strict=False)
        self.version = version
        return {"sync_pause": 0.0, "sync_transfer": 0.0, "sync_resume": 0.0}, [sums]

    async def generate(self, prompt_ids, n, seed, call="", drafts=()):
        """n answers, each with its own random numbers."""
        turns = [self.sample(prompt_ids, seed + j, self.cfg.max_response_tokens) for j in range(n)]
        await asyncio.sleep(0.3)  # so that a test can disturb the step
        return turns

    async def probe(self):
        """A short answer."""
        return self.sample(list(range(1, 17)), 0, 8)

    def sample(self, prompt_ids, seed, limit):
        """One Turn, of the weights at its start."""
        import torch

        from envs.episode import Turn

        random, ids, logps = torch.Generator().manual_seed(seed), list(prompt_ids), []
        with torch.no_grad():
            while len(logps) < limit and (not logps or ids[-1] != 1):
                logp_V = self.model(torch.tensor([ids])).logits[0, -1].log_softmax(-1)
                ids.append(int(torch.multinomial(logp_V.exp(), 1, generator=random)))
                logps.append(float(logp_V[ids[-1]]))
        new = ids[len(prompt_ids) :]
        reason = "stop" if new[-1] == 1 else "length"
        return Turn(list(prompt_ids), new, logps, [self.version] * len(new), reason)

    def drafts(self, call, known):
        """Nothing is ever half written."""
        return []

    async def check_health(self) -> None:
        """Always well."""


if __name__ == "__main__":
    import grpo_async

    grpo_async.Generator = ExactGenerator
    grpo_async.main()
