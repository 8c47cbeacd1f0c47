"""A real vLLM engine and a real trainer in one process: parity, in-flight updates, prefix cache."""

import asyncio
import dataclasses
import itertools
import pickle
import uuid
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from conftest import make_config

from envs.rollout.episode import stitch
from envs.rollout.rows import load_tokenizer
from envs.rollout.sampler import Request, Sampler
from runtime.probe import prompts
from support.configs import changed

pytestmark = [pytest.mark.e2e, pytest.mark.xdist_group("pair")]
TOLERANCE = 1e-5  # float32, dense model


class Pair:
    """One Trainer and one Generator that share a process group; Ray is not involved."""

    def __init__(self, cfg, monkeypatch):
        for name, value in {
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "TORCH_COMPILE_DISABLE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }.items():
            monkeypatch.setenv(name, value)
        from grpo_async import Generator, Trainer

        self.version = 0
        self.cfg = cfg
        self.generator = Generator(cfg)
        self.trainer = Trainer(cfg)
        self.trainer.start(0, self.trainer.open_store(1))

    async def start(self) -> None:
        """Loads the engine, connects both and gives the engine version 0."""
        await self.generator.start()
        await self.connect()
        await self.sync(0)

    async def connect(self) -> None:
        """What `Fleet.connect` does, for one engine."""
        address = self.trainer.open_store(2)
        wire = pickle.dumps(self.trainer.sender.wire)
        await asyncio.gather(
            asyncio.to_thread(self.trainer.join_sync_group, *address, 0, 2),
            self.generator.join_sync_group(wire, *address, 1, 2),
        )

    async def generate(self, prompt_ids, n, seed, name="", drafts=()) -> list:
        """n answers of the engine to one prompt."""
        request = Request(name or uuid.uuid4().hex, prompt_ids, n, seed, list(drafts))
        return await self.generator.generate(request)

    async def sync(self, version: int, verify: bool = False) -> dict:
        """What `Engines.sync` does, for one engine."""
        send = asyncio.to_thread(self.trainer.send_weights, verify)
        update = self.generator.update_weights(version, verify)
        self.sent, received = await asyncio.gather(send, update)
        self.received = received.checksums
        self.version = version
        return received.phases

    async def next(self, verify: bool = False) -> int:
        """Moves every weight a little, as an optimizer step would, and gives it to the engine."""
        with torch.no_grad():
            for weight in self.trainer.policy.model.parameters():
                weight.add_(0.01 * torch.randn_like(weight))
        await self.sync(self.version + 1, verify)
        return self.version

    def stop(self) -> None:
        """Ends the engine's process and the trainer's group."""
        self.generator.engine.shutdown()
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def pair(tiny_model, tmp_path_factory):
    """A running pair that all tests share, as it takes long to start; each goes on to new versions.

    `pair.run` runs a coroutine in the event loop in which the engine lives.
    """
    config = make_config(tiny_model, tmp_path_factory.mktemp("pair"))
    config = changed(config, max_model_len=512, max_response_tokens=300)
    with pytest.MonkeyPatch.context() as patch, asyncio.Runner() as runner:
        pair = Pair(config, patch)
        pair.run = runner.run
        pair.run(pair.start())
        yield pair
        pair.stop()


def prompt(i: int) -> list[int]:
    """Twenty token ids that differ from prompt to prompt."""
    return [5 + (7 * i + j * j) % 90 for j in range(20)]


def snapshot(pair) -> dict[str, torch.Tensor]:
    """A copy of the trainer's weights under checkpoint names."""
    return {name: tensor.clone() for name, tensor in pair.trainer.policy.named_weights()}


def replay(model, weights_by_version: dict, turn) -> torch.Tensor:
    """Logprobs of a turn's tokens, each forward under the version that the engine claims.

    A token is sampled from the forward pass of the token before it; old tokens keep the KV that
    the old weights made, as in the engine.
    """
    from transformers import DynamicCache

    ids = turn.prompt_ids + turn.token_ids
    producers = [turn.versions[0]] * (len(turn.prompt_ids) - 1) + turn.versions
    cache = DynamicCache()
    logits = []
    start = 0
    for version, run in itertools.groupby(producers):
        stop = start + len(list(run))
        model.load_state_dict(weights_by_version[version], strict=False)
        out = model(torch.tensor([ids[start:stop]]), past_key_values=cache, use_cache=True)
        logits.append(out.logits[0])
        start = stop
    logp = torch.cat(logits).log_softmax(-1)[len(turn.prompt_ids) - 1 :]
    return logp.gather(1, torch.tensor(turn.token_ids)[:, None])[:, 0]


def plain_model(cfg):
    """The same architecture in transformers, weights to be loaded."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(cfg.model, dtype=torch.float32).eval()


def trainer_logprobs(pair, turns) -> list[torch.Tensor]:
    """The trainer's own packed forward over the same tokens."""
    from envs.rollout.episode import stitch
    from grpo_async import Update, pack

    samples = [sample for turn in turns for sample in stitch([turn])]
    batch = pack(samples, Update(1, 1, []), pair.cfg)
    (logp_T,) = pair.trainer.policy.logprobs([batch])
    return logp_T[batch.mask_T]


def test_logprobs_agree_before_and_after_updates(pair):
    """What the engine reports is what the trainer computes, at every version, within 1e-5."""

    async def scenario():
        for _ in range(3):
            version = pair.version
            groups = [pair.generate(prompt(i), 3, seed=i) for i in range(4)]
            turns = [turn for group in await asyncio.gather(*groups) for turn in group]
            engine = torch.tensor([logp for turn in turns for logp in turn.logps])
            gap = (trainer_logprobs(pair, turns) - engine).abs()
            assert gap.max() < TOLERANCE, f"version {version}: off by {gap.max():.1e}"
            assert {v for turn in turns for v in turn.versions} == {version}
            await pair.next()

    pair.run(scenario())


@torch.no_grad()
def test_every_token_replays_under_the_version_it_claims(pair):
    """Updates in flight: requests go on, keep their KV, and label each token exactly."""
    updates = 4

    async def scenario():
        weights = {pair.version: snapshot(pair)}
        groups = [asyncio.ensure_future(pair.generate(prompt(i), 2, i)) for i in range(8)]
        for _ in range(updates):
            await asyncio.sleep(0.03)
            version = await pair.next()
            weights[version] = snapshot(pair)
        return weights, [turn for group in await asyncio.gather(*groups) for turn in group]

    weights, turns = pair.run(scenario())
    assert len(turns) == 16 and all(turn.token_ids for turn in turns)
    assert any(len(set(turn.versions)) > 2 for turn in turns), "no answer lived through an update"
    model = plain_model(pair.cfg)
    for turn in turns:
        assert turn.versions == sorted(turn.versions)
        gap = (replay(model, weights, turn) - torch.tensor(turn.logps)).abs().max()
        assert gap < 2 * TOLERANCE, f"off by {gap:.1e}, versions {Counter(turn.versions)}"


def test_no_prefix_is_shared_between_versions(pair):
    """A prompt that starts after an update must not find the blocks of an older policy."""

    async def scenario():
        long_prompt = [5 + j % 90 for j in range(400)]
        (before,) = await pair.generate(long_prompt, 1, seed=1)
        await pair.next()
        (after,) = await pair.generate(long_prompt, 1, seed=1)
        return before, after

    before, after = pair.run(scenario())
    gap = (trainer_logprobs(pair, [after]) - torch.tensor(after.logps)).abs().max()
    assert gap < TOLERANCE and after.versions[0] == before.versions[0] + 1 == pair.version


def test_a_conversation_finds_its_prefix_in_the_cache_until_an_update(pair):
    """Three answers in one sequence; the trainer agrees with what the engine says of all tokens."""
    engine = SimpleNamespace(generate=SimpleNamespace(remote=pair.generator.generate))
    sampling = dataclasses.replace(pair.cfg.sampling, max_response_tokens=20)
    sampler = Sampler(engine, load_tokenizer(pair.cfg.model), sampling, 7, [], validation=False)

    async def scenario():
        messages, turns = [], []
        for words in ("a word " * 25, "again", "and again"):
            messages.append({"role": "user", "content": words})
            turns.append(await sampler.chat(messages))
            messages.append(turns[-1].message)
            if len(turns) == 2:
                await pair.next()
        return turns

    turns = pair.run(scenario())
    known = [len(turn.prompt_ids) + len(turn.token_ids) for turn in turns]
    assert turns[0].cached == 0 and 0 < known[0] - turns[1].cached <= 128, "whole blocks are kept"
    assert turns[2].cached == 0, "those of an older policy are not found"
    (sample,) = stitch(turns)
    assert len(sample.tokens_T) == known[2]
    assert sample.cache_hits == turns[1].cached / (len(turns[1].prompt_ids + turns[2].prompt_ids))
    assert [turn.versions[0] for turn in turns] == [pair.version - 1] * 2 + [pair.version]
    gap = (trainer_logprobs(pair, turns[2:]) - torch.tensor(turns[2].logps)).abs().max()
    assert gap < TOLERANCE


def test_same_seed_same_answers(pair):
    """Sampling is a function of weights, prompt and seed; samples of a group differ."""

    async def scenario():
        first = await pair.generate(prompt(0), 3, seed=7)
        second = await pair.generate(prompt(0), 3, seed=7)
        return first, second

    first, second = pair.run(scenario())
    assert [t.token_ids for t in first] == [t.token_ids for t in second]
    assert len({tuple(t.token_ids) for t in first}) == 3


@torch.no_grad()
def test_an_answer_goes_on_from_its_draft(pair):
    """What a lost engine had written is kept, with its versions; the rest is sampled after it."""

    async def scenario():
        first = asyncio.ensure_future(pair.generate(prompt(3), 4, 5, "call"))
        drafts = []
        while not drafts or min(len(draft.token_ids) for draft in drafts) < 8:
            await asyncio.sleep(0.01)
            drafts = pair.generator.drafts("call", [])
            assert not first.done()
        more = pair.generator.drafts("call", [8, None, 0, 10**6])
        assert more[1] is None and not more[3].token_ids
        assert more[0] == drafts[0].after(8) and more[2].token_ids[:8] == drafts[2].token_ids[:8]
        first.cancel()
        weights = [snapshot(pair)]
        await pair.next()
        weights.append(snapshot(pair))
        return weights, drafts, await pair.generate(prompt(3), 4, 5, "again", drafts)

    weights, drafts, turns = pair.run(scenario())
    model = plain_model(pair.cfg)
    for draft, turn in zip(drafts, turns, strict=True):
        n = len(draft.token_ids)
        assert turn.token_ids[:n] == draft.token_ids and turn.logps[:n] == draft.logps
        assert turn.prompt_ids == prompt(3) and turn.finish_reason in ("stop", "length")
        new = len(turn.token_ids) - n
        assert turn.versions == [pair.version - 1] * n + [pair.version] * new
        for version, part in ((0, slice(0, n)), (1, slice(n, None))):
            model.load_state_dict(weights[version], strict=False)
            ids = torch.tensor([turn.prompt_ids + turn.token_ids])
            logp = model(ids).logits[0, len(turn.prompt_ids) - 1 : -1].log_softmax(-1)
            logp = logp.gather(1, torch.tensor(turn.token_ids)[:, None])[:, 0]
            gap = (logp - torch.tensor(turn.logps))[part].abs()
            assert not len(gap) or gap.max() < 2 * TOLERANCE, (version, gap)
    assert any(len(t.token_ids) > len(d.token_ids) for t, d in zip(turns, drafts, strict=True))
    assert len({tuple(turn.token_ids) for turn in turns}) == 4


def test_a_checked_update_compares_all_bytes_and_names_a_tensor_that_is_missing(pair, monkeypatch):
    """Checksums of what was sent and what came agree; a forgotten tensor is found and named.

    The last test: no update repairs an engine after one that failed.
    """

    async def scenario():
        await pair.next(verify=True)
        assert pair.received == [pair.sent] != [0]
        metas = pair.trainer.sender.metas
        asked = [
            Request(f"probe {i}", ids, 1, i, [], 32, {"ignore_eos": True})
            for i, ids in enumerate(prompts(101))
        ]
        answers = await asyncio.gather(*map(pair.generator.generate, asked))
        turns = [turn for (turn,) in answers]
        gaps = pair.trainer.probe_gaps([turns, turns[:1]])
        assert len(gaps) == 2 and max(gaps) < TOLERANCE
        assert {len(turn.token_ids) for turn in turns} == {32}

        gone = "model.layers.1.mlp.down_proj.weight"
        everything = pair.trainer.policy.named_weights
        fewer = ((name, weight) for name, weight in everything() if name != gone)
        monkeypatch.setattr(pair.trainer.policy, "named_weights", lambda: fewer)
        fewer_metas = [meta for meta in metas if meta.name != gone]
        pair.trainer.sender.wire = pair.trainer.sender.wire._replace(metas=fewer_metas)
        await pair.connect()
        with pytest.raises(Exception, match=f"does not write {gone}"):
            await pair.sync(pair.version + 1, verify=True)

    pair.run(scenario())


def test_who_hears_that_an_engine_is_dead_need_not_import_vllm(pair):
    """Ray pickles what a call raises; its caller would import the class, and stand for seconds."""
    from ray import cloudpickle
    from vllm.v1.engine.exceptions import EngineDeadError

    pickled = cloudpickle.dumps(EngineDeadError())
    assert b"vllm" not in pickled
    heard = pickle.loads(pickled)
    assert type(heard) is RuntimeError and "EngineCore" in str(heard)
