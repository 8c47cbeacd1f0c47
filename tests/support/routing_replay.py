"""How far trainer and engine are apart in bf16, with the engine's experts and without.

    PYTHONPATH=tests/cpu python tests/support/routing_replay.py MODEL [PROMPTS]

One process: a vLLM engine and two frozen Megatron policies that hold the same weights, all in bf16.
Prints as JSON, for both policies, mean and largest |logp_train - logp_engine| over the sampled
tokens, and the share of (token, layer) pairs whose experts differ without replay.
"""

import asyncio
import json
import os
import pickle
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

os.environ |= {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "TORCH_COMPILE_DISABLE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}


class Chosen:
    """Stands for Replay: writes down what a router chooses by itself."""

    def __init__(self):
        self.experts = []

    def get_replay_topk(self, scores_LE, topk, groups, group_topk, choose):
        values_LK, chosen_LK = choose(scores_LE, topk, groups, group_topk)
        self.experts.append(chosen_LK.sort(1).values)
        return values_LK, chosen_LK


async def sampled(cfg, policy, prompts: int) -> list:
    """Turns of an engine that got the policy's weights."""
    import vllm

    from grpo_async import Generator
    from policy import weight_sync

    args = vllm.AsyncEngineArgs
    vllm.AsyncEngineArgs = lambda **named: args(**named | {"dtype": "bfloat16"})
    generator, metas = Generator(cfg), policy.weight_metas()
    await generator.start()
    store = dist.TCPStore("127.0.0.1", 0, 2, True, timedelta(seconds=60), False)
    join = generator.join_sync_group(pickle.dumps(cfg), "127.0.0.1", store.port, 1, 2, metas)
    group, _ = await asyncio.gather(asyncio.to_thread(weight_sync.group, store, 0, 2, cfg), join)
    packed = weight_sync.pack(policy.named_weights(), metas, cfg)
    send = asyncio.to_thread(weight_sync.send, packed, metas, group, True)
    await asyncio.gather(send, generator.update_weights(0, True))
    draw = torch.Generator().manual_seed(0)
    ids = [torch.randint(1, 100, (20,), generator=draw).tolist() for _ in range(prompts)]
    turns = await asyncio.gather(*(generator.generate(p, 2, i) for i, p in enumerate(ids)))
    generator.engine.shutdown()
    return [turn for pair in turns for turn in pair]


def main(model: str, prompts: int) -> None:
    """Samples once, scores twice."""
    from envs.episode import stitch
    from grpo_async import Update, pack
    from policy.megatron import policy as megatron
    from support.megatron_rank import config

    store = dist.TCPStore("127.0.0.1", 0, 1, True, timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    build = megatron.build
    megatron.build = lambda cfg, hf, dtype: build(cfg, hf, torch.bfloat16)
    fields = {"max_model_len": 512, "max_response_tokens": 200, "max_num_seqs": 16}
    cfg = config(model, replay_routing=True, row_tokens=512, **fields)
    replaying, free = (megatron.MegatronPolicy(cfg, trainable=False) for _ in range(2))
    routers = [m.router for m in free.model.modules() if hasattr(m, "router")]
    layers = [router.router_replay.layer for router in routers]
    for router in routers:
        del router.router_replay
        router.router_replay = Chosen()
    turns = asyncio.run(sampled(cfg, free, prompts))
    samples = [stitch([turn])[0] for turn in turns]
    rows = [pack([sample], Update(1, 1, []), cfg) for sample in samples]
    told = {}
    for name, policy in (("free", free), ("replayed", replaying)):
        pairs = zip(policy.logprobs(rows), rows, strict=True)
        gaps = [(logp_T - row.engine_logp_T)[row.mask_T].abs() for logp_T, row in pairs]
        gap = torch.cat(gaps)
        told[name] = {"mean": float(gap.mean()), "max": float(gap.max())}
    wanted, followed = (
        sum(int(getattr(r, k)) for r in replaying.replays)
        for k in (
            "wanted",
            "followed",
        )
    )
    other = []
    for router, layer in zip(routers, layers, strict=True):
        for chosen_LK, row in zip(router.router_replay.experts, rows, strict=True):
            routes_TK = row.routes_T[:-1, layer].long().sort(1).values
            other.append((chosen_LK[: len(routes_TK)] != routes_TK).any(1))
    told |= {"other experts": float(torch.cat(other).float().mean())}
    told |= {"hit rate": followed / wanted, "tokens": len(gap)}
    print(json.dumps(told))


if __name__ == "__main__":
    main(sys.argv[1], int((*sys.argv[2:], 32)[0]))
