"""What finds the faults of support/weight_faults.py, with real vLLM engines in float32.

    PYTHONPATH=tests/cpu:tests:. python tests/support/check_weights.py MODEL FAULT,FAULT,... ...

Prints for each model, as JSON, what the check of the update said and the probe's gap in nats, by
fault; "" is no fault. "sent: FAULT" is one of the trainer, which sends what it does not train.
"""

import asyncio
import json
import os
import pickle
import shutil
import sys
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any

os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
os.environ |= {"TORCH_COMPILE_DISABLE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from conftest import make_config  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

from policy import WeightMeta  # noqa: E402
from policy.sync.verification import SHARE  # noqa: E402
from policy.sync.weight_sync import CutOff, Sender  # noqa: E402
from rollout.episode import Request  # noqa: E402
from runtime.engines.probe import ANSWER, prompts  # noqa: E402
from settings.config import Timeouts  # noqa: E402
from support.configs import changed  # noqa: E402
from support.weight_faults import FAULTS  # noqa: E402


class Policy:
    """Stands for a trainer: `tensors` by checkpoint name, and what is sent of them; no MTP head."""

    def __init__(self, folder: str):
        self.folder = folder
        every = load_file(f"{folder}/model.safetensors")
        self.tensors = {n: t for n, t in every.items() if not n.startswith("mtp.")}
        self.sent = self.tensors
        self.moves = 0

    def weight_metas(self) -> list[WeightMeta]:
        return [WeightMeta(n, tuple(t.shape), "float32") for n, t in self.tensors.items()]

    def named_weights(self):
        yield from self.sent.items()

    def move(self) -> None:
        """Every weight by about 2 %, as many optimizer steps would."""
        draw = torch.Generator().manual_seed(self.moves)
        self.moves += 1
        for tensor in self.tensors.values():
            size = 0.02 * (tensor.abs().mean() + 0.01)
            tensor += size * torch.randn(tensor.shape, generator=draw)

    @torch.no_grad()
    def gap(self, turns) -> float:
        """Mean |logp - engine_logp|, nats, by transformers."""
        save_file(self.tensors, f"{self.folder}/model.safetensors", {"format": "pt"})
        model = AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.float32).eval()
        gaps = []
        for turn in turns:
            logits_TV = model(torch.tensor([turn.prompt_ids + turn.token_ids])).logits[0]
            logp_TV = logits_TV[len(turn.prompt_ids) - 1 : -1].log_softmax(-1)
            logp_T = logp_TV.gather(1, torch.tensor(turn.token_ids)[:, None])[:, 0]
            gaps.append((logp_T - torch.tensor(turn.logps)).abs())
        return float(torch.cat(gaps).mean())


class Checked:
    """An engine whose worker can be made to fail, and the policy that it gets."""

    def __init__(self, cfg, folder: str):
        from grpo_async import Generator

        self.policy = Policy(folder)
        self.sender = Sender(self.policy, Timeouts(), shares_gpu=True)
        self.generator = Generator(cfg)
        self.version = -1

    async def start(self) -> None:
        """Starts the engine and joins it."""
        await self.generator.start()
        store = dist.TCPStore("127.0.0.1", 0, 2, True, timedelta(seconds=60), False)
        wire = pickle.dumps(self.sender.wire)
        join = self.generator.join_sync_group(wire, "127.0.0.1", store.port, 1, 2)
        await asyncio.gather(asyncio.to_thread(self.sender.join, store, 0, 2), join)

    async def update(
        self, fault: str = "", sent: str = "", verify: bool = True, moves: bool = True
    ) -> str:
        """Moves and sends the policy; what the check of the update says."""
        if moves:
            self.policy.move()
        self.version += 1
        tensors = self.policy.tensors
        self.policy.sent = FAULTS[sent](tensors, {}) if sent else tensors
        await self.generator.engine.collective_rpc("arm", args=(fault,))
        send = asyncio.to_thread(self.sender.send, verify)
        update = self.generator.update_weights(self.version, verify)
        checksum, received = await asyncio.gather(send, update, return_exceptions=True)
        if isinstance(received, Exception):
            self.generator.version = self.version
            if isinstance(received, CutOff):
                return str(received)
            await self.generator.engine.resume_generation()
            return str(received).splitlines()[0]
        return "" if set(received[1]) == {checksum} else "other bytes came"

    async def asked(self, method: str) -> Any:
        """What the worker says."""
        return (await self.generator.engine.collective_rpc(method))[0]

    async def by_copies(self) -> dict:
        """What it copies by itself, and what it then holds, beside what vLLM's loaders make."""
        known = await self.asked("known")
        await self.update(verify=False)
        copied = await self.asked("held")
        await self.asked("forget")
        await self.update(verify=False, moves=False)
        assert await self.asked("known") == [0, 0]
        return {"known": known, "copied": copied, "loaded": await self.asked("held")}

    async def cut_off(self) -> dict:
        """An update that is cut off while an answer is sampled, and whole ones after it.

        With copies and with vLLM's loaders. `went_on` is whether the answer came without an update.
        """
        found = []
        for copies in ("known", "forget"):
            await self.update()
            await self.asked(copies)
            ids = prompts(64)[0]
            request = Request(f"cut {copies}", ids, 1, 0, [], 256, {"ignore_eos": True})
            answer = asyncio.create_task(self.generator.generate(request))
            await asyncio.sleep(0.05)
            said = [await self.update("cut off", verify=False) for _ in range(2)]
            await asyncio.wait([answer], timeout=0.5)
            went_on = answer.done()
            said.append(await self.update())
            (turn,) = await answer
            found.append({"said": said, "went_on": went_on, "tokens": len(turn.token_ids)})
            found[-1]["versions"] = len(set(turn.versions))
        return {"cuts": found, "gap": await self.gap()}

    async def gap(self) -> float:
        """How far the answers to a probe are from the policy's, nats."""
        embedding = next(t for n, t in self.policy.tensors.items() if "embed" in n)
        requests = [
            Request(f"{self.version} {i}", ids, 1, i, [], ANSWER, {"ignore_eos": True})
            for i, ids in enumerate(prompts(len(embedding)))
        ]
        answers = await asyncio.gather(*map(self.generator.generate, requests))
        return self.policy.gap([turn for (turn,) in answers])


async def check(model: str, faults: list[str]) -> None:
    """Each fault in one update; the next one, whole, mends it."""
    with tempfile.TemporaryDirectory() as folder:
        copy = shutil.copytree(model, f"{folder}/model")
        engine = Checked(changed(make_config(copy, Path(folder)), max_model_len=512), copy)
        await engine.start()
        await engine.update()
        copies = await engine.by_copies()
        cut = await engine.cut_off()
        found = {}
        for fault in ["", *faults]:
            await engine.update()  # a fault has ended what the worker knows of copies
            sent = fault.removeprefix("sent: ") if fault.startswith("sent: ") else ""
            said = await engine.update("" if sent else fault, sent)
            found[fault] = said, await engine.gap()
        mended = await engine.update(), await engine.gap()
        some = [await engine.update(faults[0], verify=False) for _ in range(SHARE)]
        engine.generator.engine.shutdown()
    print(
        json.dumps({"found": found, "mended": mended, "some": some, "copies": copies, "cut": cut})
    )


def main(words: list[str]) -> None:
    """One engine after the other, since most of a start is the import of vLLM."""
    import vllm

    made = vllm.AsyncEngineArgs
    worker = {"worker_extension_cls": "support.weight_faults.FaultyReceiver"}
    vllm.AsyncEngineArgs = lambda **named: made(**named | worker)
    for model, faults in zip(words[::2], words[1::2], strict=True):
        asyncio.run(check(model, faults.split(",")))


if __name__ == "__main__":
    main(sys.argv[1:])
