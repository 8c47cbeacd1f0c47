"""Real vLLM engines that draft, in float32; prints what they answer and hold, as JSON.

    PYTHONPATH=tests/cpu:tests:. python tests/support/drafting.py MODEL DRAFTER MTP_MODEL

The first engine serves MODEL with DRAFTER as its draft model, the second one MTP_MODEL with the MTP
head of its own folder. The policies stand for a trainer that trains no head.
"""

import asyncio
import json
import pickle
import shutil
import sys
import tempfile
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from policy.sync.receiver import WeightReceiver
from support.check_weights import Checked
from support.configs import changed

LENGTH = 300  # tokens of an answer
TOKENS = 100_000
BINS = 100


class Seen(WeightReceiver):
    """A worker whose drafter can be looked at."""

    def drafter(self) -> bytes:
        """Pickled matrices of an MTP head, by name; packed ones as what they multiply by."""
        draft = self.model_runner.get_draft_model()
        layer = draft.model.layers["0"]
        embedding = draft.model.embed_tokens.weight
        head, norm, size = draft.lm_head, layer.enorm.weight, embedding.shape[1]
        found = {"embedding": embedding, "norm": norm}
        found["head"] = head.quant_method.apply(head, torch.eye(size)).T
        found["projection"] = layer.eh_proj(torch.eye(2 * size))[0].T
        return pickle.dumps({name: tensor.detach().clone() for name, tensor in found.items()})


class Drafting(Checked):
    """An engine that drafts, and the policy that it gets."""

    def __init__(self, model: str, folder: Path, drafts: dict):
        from conftest import make_config

        copy = shutil.copytree(model, f"{folder}/model")
        cfg = changed(make_config(copy, folder), max_model_len=512, max_response_tokens=LENGTH)
        args = {"max_num_seqs": 64, "speculative_config": drafts, "enable_prefix_caching": False}
        super().__init__(changed(cfg, engine={"args": args}), copy)
        self.states: dict[int, dict[str, Tensor]] = {}

    async def update(self, moves: bool = True) -> dict:
        """Sends the policy, moved or not; returns what the engine did since the last time."""
        if moves:
            self.policy.move()
        self.version += 1
        self.states[self.version] = {n: t.clone() for n, t in self.policy.tensors.items()}
        send = asyncio.to_thread(self.sender.send, True)
        update = self.generator.update_weights(self.version, True)
        _, (_, _, meters) = await asyncio.gather(send, update)
        return meters

    async def answers(self, count: int, seed: int, length: int = LENGTH) -> list:
        """Turns of `length` tokens, each to a prompt of its own."""
        from rollout.episode import Request

        prompts = [[5 + (7 * i + j * j) % 90 for j in range(20)] for i in range(count)]
        whole = {"ignore_eos": True}
        asked = [
            Request(f"{self.version} {seed} {i}", ids, 1, seed + i, [], length, whole)
            for i, ids in enumerate(prompts)
        ]
        return [turn for (turn,) in await asyncio.gather(*map(self.generator.generate, asked))]

    def plain(self):
        """The policy that the engine has, in transformers."""
        from transformers import AutoModelForCausalLM

        policy = self.policy
        save_file(policy.tensors, f"{policy.folder}/model.safetensors", {"format": "pt"})
        return AutoModelForCausalLM.from_pretrained(policy.folder, dtype=torch.float32).eval()

    def scored(self, turns: list) -> dict:
        """How far logprobs are from transformers' in float64, and where samples lie in its masses.

        A token has a span of the probability mass, in the order of ids. A point drawn in the span
        is uniform in [0, 1] if tokens are drawn by their probabilities: `bins` counts points.
        """
        model = self.plain().double()
        bins, gaps = torch.zeros(BINS), []
        draw = torch.Generator().manual_seed(0)
        for turn in turns:
            ids_T = torch.tensor(turn.token_ids)
            logits_TV = model(torch.tensor([turn.prompt_ids + turn.token_ids])).logits[0]
            logp_TV = logits_TV[len(turn.prompt_ids) - 1 : -1].log_softmax(-1)
            logp_T = logp_TV.gather(1, ids_T[:, None])[:, 0]
            gaps.append(logp_T - torch.tensor(turn.logps))
            p_TV = logp_TV.exp()
            p_T = p_TV.gather(1, ids_T[:, None])[:, 0]
            below_T = p_TV.cumsum(1).gather(1, ids_T[:, None])[:, 0] - p_T
            u_T = below_T + p_T * torch.rand(len(ids_T), generator=draw)
            bins += torch.histc(u_T.float(), BINS, 0, 1)
        return {"bins": bins.tolist(), "gap": float(torch.cat(gaps).abs().max())}


def acceptance(meters: dict) -> float:
    """The share of drafted tokens that were accepted."""
    return meters["accepted_draft_tokens"] / meters["draft_tokens"]


@torch.no_grad()
async def sampling(model: str, drafter: str, folder: Path) -> dict:
    """Answers of one policy, of policies that change meanwhile, and of one that has moved far."""
    from test_generator import replay

    drafts = {"method": "draft_model", "model": drafter, "num_speculative_tokens": 3}
    engine = Drafting(model, folder, drafts)
    await engine.start()
    await engine.update(moves=False)
    turns = await engine.answers(-(-TOKENS // LENGTH), seed=1)
    found = engine.scored(turns)
    again = await engine.answers(4, seed=1)
    found["same"] = [t.token_ids for t in again] == [t.token_ids for t in turns[:4]]
    at_first = await engine.update()
    found["accepted"] = [acceptance(at_first)]
    running = asyncio.ensure_future(engine.answers(16, seed=9))
    for _ in range(4):
        await asyncio.sleep(0.1)
        await engine.update()
    turns = await running
    plain = engine.plain()
    gaps = [replay(plain, engine.states, t) - torch.tensor(t.logps) for t in turns]
    found["replayed"] = float(torch.cat(gaps).abs().max())
    found["versions"] = max(len(set(turn.versions)) for turn in turns)
    for _ in range(60):
        engine.policy.move()
    await engine.update()
    await engine.answers(16, seed=20)
    found["accepted"].append(acceptance(await engine.update()))
    engine.generator.engine.shutdown()
    return found


@torch.no_grad()
async def heads(model: str, folder: Path) -> dict:
    """What an MTP head holds before the first update and after the second, and its answers."""
    engine = Drafting(model, folder, {"method": "mtp", "num_speculative_tokens": 2})
    await engine.start()
    saved = load_file(f"{model}/model.safetensors")
    own = {"projection": "mtp.layers.0.eh_proj.weight", "norm": "mtp.layers.0.enorm.weight"}
    embedding = next(name for name in saved if "embeddings" in name)
    shared = {"head": "lm_head.weight", "embedding": embedding}

    async def apart(tensors: dict, names: dict) -> list[float]:
        (held,) = await engine.generator.engine.collective_rpc("drafter")
        held = pickle.loads(held)
        rows = [(held[name], tensors[of]) for name, of in names.items()]
        return [float((ours[: len(sent)] - sent).abs().max()) for ours, sent in rows]

    found = {"at start": await apart(saved, own)}
    await engine.update()
    await engine.update()
    found |= {"own": await apart(saved, own), "shared": await apart(engine.policy.tensors, shared)}
    turns = await engine.answers(64, seed=1, length=64)
    found |= engine.scored(turns)
    found["accepted"] = acceptance(await engine.update())
    engine.generator.engine.shutdown()
    return found


def main(model: str, drafter: str, mtp_model: str) -> None:
    """One engine after the other, since most of a start is the import of vLLM."""
    import vllm

    made = vllm.AsyncEngineArgs
    worker = {"worker_extension_cls": "support.drafting.Seen"}
    vllm.AsyncEngineArgs = lambda **named: made(**named | worker)
    for of in (partial(sampling, model, drafter), partial(heads, mtp_model)):
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(asyncio.run(of(Path(folder)))), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
