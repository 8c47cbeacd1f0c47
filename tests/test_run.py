"""Whole runs with real Ray, vLLM and FSDP, started as a user starts them."""

import asyncio
import json
import os
import re
import subprocess
import sys
import zlib
from pathlib import Path

import pytest
import torch
from test_generator import Pair

from support.configs import changed
from support.program import Program

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.e2e
of_one_run = pytest.mark.xdist_group("a finished run")


def run(cfg, timeout: float = 240) -> Path:
    """`python grpo_async.py` with this configuration; returns its run folder."""
    program = Program(cfg)
    assert program.ends(timeout) == 0, program.told()[-3000:]
    return program.folder


def read(path: Path) -> list[dict]:
    """The lines of a JSONL file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def finished(tiny_model, tmp_path_factory):
    """One asynchronous run on two engines, and its configuration."""
    from conftest import spelling_rows, write_rows

    from grpo_async import Config

    folder = tmp_path_factory.mktemp("async")
    cfg = changed(
        Config(),
        run_dir=str(folder / "run"),
        model=tiny_model,
        data={
            "train": write_rows(folder / "train.jsonl", spelling_rows(64)),
            "val": write_rows(folder / "val.jsonl", spelling_rows(8, seed=1)),
        },
        engine={"count": 2, "args": {"max_num_seqs": 8}},
        val_period=3,
        steps=6,
        prompts_per_step=4,
        group_size=4,
        max_model_len=96,
        max_response_tokens=48,
        lr=1e-3,
        warmup_lr=1e-3,
        warmup_steps=0,
        row_tokens=128,
        skip_zero_advantage=False,
        activation_checkpointing=False,
        timeouts={"start": 180.0, "train": 60.0},
    )
    return run(cfg), cfg


@of_one_run
def test_metrics_of_a_run(finished):
    """Every step is logged once, lag keeps its bound, and the first step is exactly on-policy."""
    folder, cfg = finished
    steps = [m for m in read(folder / "metrics.jsonl") if "loss" in m]
    assert [m["step"] for m in steps] == list(range(1, cfg.steps + 1))
    assert all(0 <= m["lag_mean"] <= m["lag_max"] <= cfg.max_lag for m in steps)
    assert steps[0]["lag_max"] == 0 and abs(steps[0]["token_mult_prob_error"] - 1) < 1e-5
    assert any(m["lag_max"] == 1 for m in steps)
    assert all(m["num_valid_samples"] > 0 and m["grad_norm"] >= 0 for m in steps)
    validated = [m["step"] for m in read(folder / "metrics.jsonl") if "validation_reward" in m]
    assert validated == [0, 3, 6]


@of_one_run
def test_rollouts_of_a_run(finished):
    """Every slot once, with prompt, response, reward, advantage and its tokens' versions."""
    folder, cfg = finished
    lines = [r for r in read(folder / "rollouts.jsonl") if r["evaluation"] is None]
    slots = sorted(r["slot"] for r in lines)
    assert slots == sorted(list(range(cfg.steps * cfg.prompts_per_step)) * cfg.group_size)
    for line in lines:
        assert line["step"] == line["slot"] // cfg.prompts_per_step + 1
        assert line["row"] == line["slot"] % 64 + 1, "prompts are used in file order"
        assert line["prompt"].startswith("<user>") and 0 <= line["reward"] <= 1
        versions = [version for version, _ in line["versions"]]
        assert line["step"] - 1 - cfg.max_lag <= versions[0] <= versions[-1] <= line["step"] - 1
    by_slot = {}
    for line in lines:
        by_slot.setdefault(line["slot"], []).append(line)
    for group in by_slot.values():
        assert abs(sum(line["advantage"] for line in group)) < 100
        if len({line["reward"] for line in group}) == 1:
            assert all(line["advantage"] == 0 for line in group)


@of_one_run
def test_what_a_run_prints(finished):
    """Its folder first, what it waits for, a line a step, and at the end what came out of it."""
    folder, cfg = finished
    lines = folder.with_suffix(".out").read_text().splitlines()
    expected = [
        f"run folder: {folder}",
        r" +\d+ s  starting Ray",
        r" +\d+ s  loading .* \(trainer ranks: 1\)",
        r" +\d+ s  starting vLLM \(engines: 2\)",
        r" +\d+ s  sending the policy to the engines",
        r"evaluating version 0 \(prompts: 8\)",
        r"version 0: validation reward 0\.\d{3}, exact 0\.\d{3}",
        r"step 1/6  reward 0\.\d{3}  lag 0\.00  trainer waited \d+\.\d\d s",
        *(rf"step {step}/6  .* s  \d\d:\d\d left" for step in (2, 3)),
        r"evaluating version 3 .*",
        "version 3: .*",
        *(rf"step {step}/6  .*" for step in (4, 5, 6)),
        r"evaluating version 6 .*",
        "version 6: .*",
        r"done in \d\d:\d\d",
        r"validation_reward: \d.\d+ -> \d.\d+ \(\d.\d+ at best\)",
        r"validation_exact: \d.\d+ -> \d.\d+ \(\d.\d+ at best\)",
        "prompt: <user>.*",
        "answer: .*",
        r"reward of this answer: [\d.]+",
        f"model: {folder}/step_000006/hf, .*",
        f"next: .* --run_dir {folder} --resume auto --steps 12",
        f"report: {folder}/report.html",
    ]
    assert len(lines) == len(expected), "\n".join(lines)
    for line, pattern in zip(lines, expected, strict=True):
        assert re.fullmatch(pattern, line), (line, pattern)
    logs = "".join(path.read_text() for path in (folder / "logs").glob("Generator*"))
    assert "Failed to load weights" not in logs
    written = json.loads((folder / "config.json").read_text())
    assert {"commit", "diff", "versions", "command_line"} <= written.keys()
    assert written["steps"] == cfg.steps


@of_one_run
def test_product_of_a_run_loads_in_transformers_and_vllm(finished):
    """The exported policy answers alike in both, with its own tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = finished[0] / "step_000006" / "hf"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "abc"}], add_generation_prompt=True, return_dict=False
    )
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    greedy = model.generate(
        torch.tensor([ids]),
        attention_mask=torch.ones(1, len(ids)),
        max_new_tokens=12,
        do_sample=False,
    )
    program = (
        "from vllm import LLM, SamplingParams as S\n"
        "if __name__ == '__main__':\n"
        f"    m = LLM({str(folder)!r}, dtype='float32', enforce_eager=True, max_model_len=64)\n"
        f"    p = {{'prompt_token_ids': {ids}}}\n"
        "    answer = m.generate(p, S(temperature=0, max_tokens=12))[0].outputs[0]\n"
        "    print('IDS', list(answer.token_ids))"
    )
    env = os.environ | {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "TORCH_COMPILE_DISABLE": "1",
    }
    script = finished[0] / "load.py"
    script.write_text(program)
    done = subprocess.run([sys.executable, script], env=env, capture_output=True, text=True)
    answers = [line for line in done.stdout.splitlines() if line.startswith("IDS")]
    assert answers, done.stderr[-2000:]
    assert json.loads(answers[0][4:]) == greedy[0, len(ids) :].tolist()


def plain_synchronous_grpo(pair, rows) -> list[dict]:
    """Textbook GRPO: sample, score, compare, one gradient step; no buffer, packing or Ray."""
    from reasoning_gym import get_score_answer_fn

    from envs.rollout.episode import stitch
    from envs.rollout.rows import load_tokenizer, render_messages

    cfg = pair.cfg
    tokenizer = load_tokenizer(cfg.model)
    score = get_score_answer_fn("spell_backward")

    async def one_step(step):
        samples = []
        rewards = []
        advantages = []
        for p in range(cfg.prompts_per_step):
            slot = step * cfg.prompts_per_step + p
            seed = zlib.crc32(f"{cfg.seed} {slot}".encode())
            row = rows[slot % len(rows)]
            messages = row["responses_create_params"]["input"]
            prompt = render_messages(tokenizer, messages, None, cfg.sampling.chat_template_kwargs)
            turns = await pair.generate(prompt, cfg.group_size, seed)
            texts = [tokenizer.decode(t.token_ids, skip_special_tokens=True) for t in turns]
            r = torch.tensor([score(text.strip(), row) if text.strip() else 0.0 for text in texts])
            for i in range(len(r)):
                others = torch.cat([r[:i], r[i + 1 :]]).double()
                spread = others.std()
                raw = r[i] - others.mean()
                advantages.append(float(raw / (spread + 1e-6) if spread > 1e-6 else raw))
            rewards += r.tolist()
            samples += [stitch([turn])[0] for turn in turns]
        step_on(samples, advantages)
        await pair.sync(step + 1)
        return sum(rewards) / len(rewards)

    def step_on(samples, advantages):
        policy = pair.trainer.policy
        total = sum(int(sample.mask_T.sum()) for sample in samples)
        for sample, advantage in zip(samples, advantages, strict=True):
            batch = PlainBatch(sample)

            def loss(logp_T, batch, sample=sample, advantage=advantage):
                gap_T = logp_T.detach() - torch.tensor(sample.engine_logp_T)
                weight_T = gap_T.exp().clamp(max=5)
                return -(weight_T * advantage * logp_T)[batch.mask_T].sum() / total, {}

            policy.forward_backward([batch], loss)
        policy.optimizer_step(1.0)

    async def loop():
        await pair.start()
        return [await one_step(step) for step in range(cfg.steps)]

    return asyncio.run(loop())


class PlainBatch:
    """One unpacked sequence."""

    def __init__(self, sample):
        self.tokens_T = torch.tensor(sample.tokens_T, dtype=torch.int64)
        self.positions_T = torch.arange(len(self.tokens_T))
        self.mask_T = torch.tensor(sample.mask_T)

    def to(self, device):
        """Already there."""
        return self


def test_lag_zero_is_synchronous_grpo_step_for_step(tiny_config, monkeypatch):
    """The asynchronous program at max_lag = 0 and a plain loop make the same model."""
    from conftest import spelling_rows
    from safetensors.torch import load_file

    cfg = tiny_config(max_lag=0)
    folder = run(cfg)
    pair = Pair(cfg, monkeypatch)
    try:
        rewards = plain_synchronous_grpo(pair, spelling_rows(64))
        expected = {name: tensor.clone() for name, tensor in pair.trainer.policy.named_weights()}
    finally:
        pair.stop()
    steps = [m for m in read(folder / "metrics.jsonl") if "loss" in m]
    assert [m["reward"] for m in steps] == pytest.approx(rewards, abs=1e-6)
    assert all(m["lag_max"] == 0 for m in steps)
    trained = load_file(folder / "step_000003" / "hf" / "model.safetensors")
    for name, tensor in expected.items():
        torch.testing.assert_close(trained[name], tensor, atol=1e-4, rtol=1e-3)
