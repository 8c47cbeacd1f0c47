"""How far trainer and engine are apart in bf16, with the engine's experts and without.

    PYTHONPATH=tests/cpu:tests:. python tests/support/routing_replay.py MODEL [PROMPTS]

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

os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
os.environ |= {"TORCH_COMPILE_DISABLE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}

from grpo_async import Config, Generator, pack  # noqa: E402
from policy import Policy  # noqa: E402
from policy.packing import Update  # noqa: E402
from policy.sync.weight_sync import Sender  # noqa: E402
from rollout.episode import Request, Turn, stitch  # noqa: E402
from support.megatron_ranks import config, opened  # noqa: E402


class Chosen:
    """Stands for RouteReplay: writes down what a router chooses by itself."""

    def __init__(self):
        self.experts = []

    def get_replay_topk(self, scores_LE, topk, groups, group_topk, choose):
        values_LK, chosen_LK = choose(scores_LE, topk, groups, group_topk)
        self.experts.append(chosen_LK.sort(1).values)
        return values_LK, chosen_LK


async def sampled(cfg: Config, policy: Policy, prompts: int) -> list[Turn]:
    """Turns of an engine that got the policy's weights."""
    import vllm

    args = vllm.AsyncEngineArgs
    vllm.AsyncEngineArgs = lambda **named: args(**named | {"dtype": "bfloat16"})
    generator = Generator(cfg)
    await generator.start()
    sender = Sender(policy, cfg.timeouts, shares_gpu=True)
    store = dist.TCPStore("127.0.0.1", 0, 2, True, timedelta(seconds=60), False)
    wire = pickle.dumps(sender.wire)
    join = generator.join_sync_group(wire, "127.0.0.1", store.port, 1, 2)
    await asyncio.gather(asyncio.to_thread(sender.join, store, 0, 2), join)
    send = asyncio.to_thread(sender.send, True)
    await asyncio.gather(send, generator.update_weights(0, True))
    draw = torch.Generator().manual_seed(0)
    requests = [
        Request(f"prompt {i}", torch.randint(1, 100, (20,), generator=draw).tolist(), 2, i, [], 200)
        for i in range(prompts)
    ]
    turns = await asyncio.gather(*(generator.generate(request) for request in requests))
    generator.engine.shutdown()
    return [turn for pair in turns for turn in pair]


def main(model: str, prompts: int) -> None:
    """Samples once, scores twice."""
    from policy.megatron import policy as megatron

    store = dist.TCPStore("127.0.0.1", 0, 1, True, timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    build = megatron.build
    megatron.build = lambda settings, hf, dtype: build(settings, hf, torch.bfloat16)
    lengths = {"max_model_len": 512, "max_response_tokens": 200, "row_tokens": 512}
    engine = {"args": {"max_num_seqs": 16}}
    cfg = config(model, replay_routing=True, engine=engine, **lengths)
    replaying, free = (opened(cfg, trainable=False) for _ in range(2))
    routers = [m.router for m in free.model.modules() if hasattr(m, "router")]
    layers = [router.router_replay.layer for router in routers]
    for router in routers:
        del router.router_replay
        router.router_replay = Chosen()
    turns = asyncio.run(sampled(cfg, free, prompts))
    samples = [stitch([turn])[0] for turn in turns]
    rows = [pack([sample], Update(1, 1, []), cfg) for sample in samples]
    found = {}
    for name, policy in (("free", free), ("replayed", replaying)):
        pairs = zip(policy.logprobs(rows), rows, strict=True)
        gaps = [(logp_T - row.engine_logp_T)[row.mask_T].abs() for logp_T, row in pairs]
        gap = torch.cat(gaps)
        found[name] = {"mean": float(gap.mean()), "max": float(gap.max())}
    wanted = sum(int(replay.wanted) for replay in replaying.replays)
    followed = sum(int(replay.followed) for replay in replaying.replays)
    other = []
    for router, layer in zip(routers, layers, strict=True):
        for chosen_LK, row in zip(router.router_replay.experts, rows, strict=True):
            routes_TK = torch.tensor(row.routes_N[0][:-1, layer]).long().sort(1).values
            other.append((chosen_LK[: len(routes_TK)] != routes_TK).any(1))
    found |= {"other experts": float(torch.cat(other).float().mean())}
    found |= {"hit rate": followed / wanted, "tokens": len(gap)}
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], int((*sys.argv[2:], 32)[0]))
