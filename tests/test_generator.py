"""A real vLLM engine and a real trainer in one process: parity, in-flight updates, prefix cache."""

import asyncio
import dataclasses
import functools
import itertools
import pickle
import uuid
import zlib
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from conftest import make_config, spelling_rows
from safetensors.torch import load_file

from grpo_async import Generator, Trainer, Update, pack
from rollout import compaction
from rollout.episode import Request, stitch
from rollout.messages import load_tokenizer, render_messages
from rollout.sampler import Sampler
from runtime.engines.probe import prompts
from support.configs import changed
from support.pieces import check
from support.program import Program

pytestmark = [pytest.mark.e2e, pytest.mark.in_order, pytest.mark.xdist_group("pair")]
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
        meeting = self.trainer.open_sync_group(2)
        await asyncio.gather(
            asyncio.to_thread(self.trainer.join_sync_group, meeting, 0, 2),
            self.generator.join_sync_group(*meeting, 1, 2),
        )

    async def generate(self, prompt_ids, n, seed, name="", drafts=(), max_tokens=None) -> list:
        """n answers of the engine to one prompt."""
        name = name or uuid.uuid4().hex
        limit = max_tokens or self.cfg.sampling.max_response_tokens
        request = Request(name, prompt_ids, n, seed, list(drafts), limit)
        return await self.generator.generate(request)

    async def sync(self, version: int, verify: bool = False) -> dict:
        """What `Engines.sync` does, for one engine."""
        send = asyncio.to_thread(self.trainer.send_weights, verify)
        update = self.generator.update_weights(version, verify)
        self.sent, received = await asyncio.gather(send, update)
        phases, self.received, _ = received
        self.version = version
        return phases

    async def next(self, verify: bool = False) -> int:
        """Moves every weight a little, as an optimizer step would, and gives it to the engine."""
        with torch.no_grad():
            for weight in self.trainer.policy.model.parameters():
                weight.add_(0.01 * torch.randn_like(weight))
        await self.sync(self.version + 1, verify)
        return self.version

    def stop(self) -> None:
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


def in_its_loop(test):
    """A test that is a coroutine, in the event loop in which the engine of its pair lives."""

    @functools.wraps(test)
    def run(pair, **fixtures) -> None:
        pair.run(test(pair, **fixtures))

    return run


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
    samples = [sample for turn in turns for sample in stitch([turn])]
    batch = pack(samples, Update(1, 1, []), pair.cfg)
    (logp_T,) = pair.trainer.policy.logprobs([batch])
    return logp_T[batch.mask_T]


async def plain_synchronous_grpo(pair, rows) -> list[float]:
    """Textbook GRPO: sample, score, compare, one gradient step; no buffer, packing or Ray."""
    from reasoning_gym import get_score_answer_fn

    cfg = pair.cfg
    tokenizer = load_tokenizer(cfg.model)
    score = get_score_answer_fn("spell_backward")
    means = []
    for step in range(cfg.steps):
        samples, rewards, advantages = [], [], []
        for p in range(cfg.prompts_per_step):
            slot = step * cfg.prompts_per_step + p
            seed = zlib.crc32(f"{cfg.seed} {slot}".encode())
            row = rows[slot % len(rows)]
            messages = row["responses_create_params"]["input"]
            prompt = render_messages(tokenizer, messages, None, cfg.sampling.chat_template_kwargs)
            turns = await pair.generate(prompt, cfg.group_size, seed, max_tokens=16)
            texts = [tokenizer.decode(t.token_ids, skip_special_tokens=True) for t in turns]
            r = torch.tensor([score(text.strip(), row) if text.strip() else 0.0 for text in texts])
            for i in range(len(r)):
                others = torch.cat([r[:i], r[i + 1 :]]).double()
                spread = others.std()
                raw = r[i] - others.mean()
                advantages.append(float(raw / (spread + 1e-6) if spread > 1e-6 else raw))
            rewards += r.tolist()
            samples += [stitch([turn])[0] for turn in turns]
        step_on(pair.trainer.policy, samples, advantages)
        await pair.sync(step + 1)
        means.append(sum(rewards) / len(rewards))
    return means


def step_on(policy, samples, advantages) -> None:
    """One gradient step, of one sample after the other."""
    total = sum(int(sample.mask_T.sum()) for sample in samples)
    for sample, advantage in zip(samples, advantages, strict=True):
        tokens_T, mask_T = torch.tensor(sample.tokens_T).long(), torch.tensor(sample.mask_T)
        places_T = torch.arange(len(tokens_T))
        batch = SimpleNamespace(tokens_T=tokens_T, positions_T=places_T, mask_T=mask_T)
        batch.to = lambda device, batch=batch: batch

        def loss(logp_T, batch, sample=sample, advantage=advantage):
            gap_T = logp_T.detach() - torch.tensor(sample.engine_logp_T)
            weight_T = gap_T.exp().clamp(max=5)
            return -(weight_T * advantage * logp_T)[batch.mask_T].sum() / total, {}

        policy.forward_backward([batch], loss)
    policy.optimizer_step(1.0)


@pytest.fixture(scope="module")
def synchronous(tiny_model, tmp_path_factory) -> Program:
    """The whole program at max_lag = 0, which has ended; before `pair` changes the variables."""
    cfg = changed(make_config(tiny_model, tmp_path_factory.mktemp("synchronous")), max_lag=0)
    return Program(cfg).succeeds()


def test_lag_zero_is_synchronous_grpo_step_for_step(synchronous, pair):
    """The asynchronous program at max_lag = 0 and a plain loop make the same model.

    The first test: both start with the model on disk.
    """
    rewards = pair.run(plain_synchronous_grpo(pair, spelling_rows(64)))
    expected = snapshot(pair)
    steps = synchronous.steps()
    assert [m["reward"] for m in steps] == pytest.approx(rewards, abs=1e-6)
    assert all(m["lag_max"] == 0 for m in steps)
    trained = load_file(synchronous.folder / "step_000003" / "hf" / "model.safetensors")
    for name, tensor in expected.items():
        torch.testing.assert_close(trained[name], tensor, atol=1e-4, rtol=1e-3)


@in_its_loop
async def test_logprobs_agree_before_and_after_updates(pair):
    """What the engine reports is what the trainer computes, at every version, within 1e-5."""
    for _ in range(3):
        version = pair.version
        groups = [pair.generate(prompt(i), 3, seed=i) for i in range(4)]
        turns = [turn for group in await asyncio.gather(*groups) for turn in group]
        engine = torch.tensor([logp for turn in turns for logp in turn.logps])
        gap = (trainer_logprobs(pair, turns) - engine).abs()
        assert gap.max() < TOLERANCE, f"version {version}: off by {gap.max():.1e}"
        assert {v for turn in turns for v in turn.versions} == {version}
        await pair.next()


@torch.no_grad()
@in_its_loop
async def test_every_token_replays_under_the_version_it_claims(pair):
    """Updates in flight: requests go on, keep their KV, and label each token exactly."""
    weights = {pair.version: snapshot(pair)}
    groups = [asyncio.ensure_future(pair.generate(prompt(i), 2, i)) for i in range(8)]
    for _ in range(4):
        await asyncio.sleep(0.03)
        version = await pair.next()
        weights[version] = snapshot(pair)
    turns = [turn for group in await asyncio.gather(*groups) for turn in group]
    assert len(turns) == 16 and all(turn.token_ids for turn in turns)
    assert any(len(set(turn.versions)) > 2 for turn in turns), "no answer lived through an update"
    model = plain_model(pair.cfg)
    for turn in turns:
        assert turn.versions == sorted(turn.versions)
        gap = (replay(model, weights, turn) - torch.tensor(turn.logps)).abs().max()
        assert gap < 2 * TOLERANCE, f"off by {gap:.1e}, versions {Counter(turn.versions)}"


@in_its_loop
async def test_no_prefix_is_shared_between_versions(pair):
    """A prompt that starts after an update must not find the blocks of an older policy."""
    long_prompt = [5 + j % 90 for j in range(400)]
    (before,) = await pair.generate(long_prompt, 1, seed=1)
    await pair.next()
    (after,) = await pair.generate(long_prompt, 1, seed=1)
    gap = (trainer_logprobs(pair, [after]) - torch.tensor(after.logps)).abs().max()
    assert gap < TOLERANCE and after.versions[0] == before.versions[0] + 1 == pair.version


@in_its_loop
async def test_a_conversation_finds_its_prefix_in_the_cache_until_an_update(pair):
    """Three answers in one sequence; the trainer agrees with what the engine says of all tokens."""
    engine = SimpleNamespace(generate=SimpleNamespace(remote=pair.generator.generate))
    sampling = dataclasses.replace(pair.cfg.sampling, max_response_tokens=20)
    sampler = Sampler(engine, load_tokenizer(pair.cfg.model), sampling, 7, [], validation=False)
    messages, turns = [], []
    for words in ("a word " * 25, "again", "and again"):
        messages.append({"role": "user", "content": words})
        turns.append(await sampler.chat(messages))
        messages.append(turns[-1].message)
        if len(turns) == 2:
            await pair.next()
    known = [len(turn.prompt_ids) + len(turn.token_ids) for turn in turns]
    assert turns[0].cached == 0 and 0 < known[0] - turns[1].cached <= 128, "whole blocks are kept"
    assert turns[2].cached == 0, "those of an older policy are not found"
    (sample,) = stitch(turns)
    assert len(sample.tokens_T) == known[2]
    assert sample.cache_hits == turns[1].cached / (len(turns[1].prompt_ids + turns[2].prompt_ids))
    assert [turn.versions[0] for turn in turns] == [pair.version - 1] * 2 + [pair.version]
    gap = (trainer_logprobs(pair, turns[2:]) - torch.tensor(turns[2].logps)).abs().max()
    assert gap < TOLERANCE


@in_its_loop
async def test_forty_turns_in_a_window_of_eight_are_trained_in_pieces(pair):
    """Weights arrive meanwhile. The trainer agrees with what the engine says of the last pieces.

    A random model ends few summaries, so that those which were cut off count as ended here.
    """
    made = []

    async def respond(request):
        (turn,) = await pair.generator.generate(request)
        made.append(dataclasses.replace(turn))
        summed = request.prompt_ids[-len(asked) - 1 : -1] == asked
        return [dataclasses.replace(turn, finish_reason="stop") if summed else turn]

    engine = SimpleNamespace(generate=SimpleNamespace(remote=respond))
    lengths = {"max_response_tokens": 20, "max_model_len": 500}
    sampling = dataclasses.replace(pair.cfg.sampling, **lengths)
    tokenizer = load_tokenizer(pair.cfg.model)
    sampler = Sampler(engine, tokenizer, sampling, 7, [], validation=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compaction, "REQUEST", "sum up")
        patch.setattr(compaction, "MARGIN", 4)
        asked = tokenizer.encode("sum up")
        sampler.compaction = compaction.Compaction(40, sampling)
        messages, turns = [{"role": "user", "content": "the task"}], []
        for n in range(40):
            update = asyncio.ensure_future(pair.next() if n in (7, 20) else asyncio.sleep(0))
            turns.append(await sampler.chat(messages))
            await update
            messages += [turns[-1].message, {"role": "user", "content": f"{n} goes on " * 2}]
    samples = check(turns, made, 500)
    assert len(samples) == 1 + sampler.compaction.info(turns)["compactions"] >= 5
    assert len({version for turn in made for version in turn.versions}) == 3
    last = [s for s in samples if {*s.version_T[s.mask_T].tolist()} == {pair.version}]
    assert len(last) >= 2, "pieces that were read by the newest policy alone"
    batch = pack(last, Update(1, 1, []), pair.cfg)
    (logp_T,) = pair.trainer.policy.logprobs([batch])
    gap = (logp_T - batch.engine_logp_T)[batch.mask_T].abs().max()
    assert gap < TOLERANCE


@in_its_loop
async def test_same_seed_same_answers(pair):
    """Sampling is a function of weights, prompt and seed; samples of a group differ."""
    first = await pair.generate(prompt(0), 3, seed=7)
    second = await pair.generate(prompt(0), 3, seed=7)
    assert [t.token_ids for t in first] == [t.token_ids for t in second]
    assert len({tuple(t.token_ids) for t in first}) == 3


@torch.no_grad()
@in_its_loop
async def test_an_answer_goes_on_from_its_draft(pair):
    """What a lost engine had written is kept, with its versions; the rest is sampled after it."""
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
    turns = await pair.generate(prompt(3), 4, 5, "again", drafts)
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


@in_its_loop
async def test_a_checked_update_compares_all_bytes_and_names_a_missing_tensor(pair, monkeypatch):
    """Checksums of what was sent and what came agree; a forgotten tensor is found and named.

    The last test: no update repairs an engine after one that failed.
    """
    await pair.next(verify=True)
    assert pair.received == [pair.sent] != [0]
    metas = pair.trainer.sender.metas
    asked = [
        Request(f"probe {i}", ids, 1, i, [], 32, {"ignore_eos": True})
        for i, ids in enumerate(prompts(101))
    ]
    answers = await asyncio.gather(*map(pair.generator.generate, asked))
    turns = [turn for (turn,) in answers]
    gaps = pair.trainer.probe_gaps([turns, turns])
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


def test_who_hears_that_an_engine_is_dead_need_not_import_vllm(pair):
    """Ray pickles what a call raises; its caller would import the class, and stand for seconds."""
    from ray import cloudpickle
    from vllm.v1.engine.exceptions import EngineDeadError

    pickled = cloudpickle.dumps(EngineDeadError())
    assert b"vllm" not in pickled
    heard = pickle.loads(pickled)
    assert type(heard) is RuntimeError and "EngineCore" in str(heard)
