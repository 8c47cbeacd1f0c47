"""docs/forking.md, carried out: its two diffs apply to a scratch copy, and the result runs."""

import asyncio
import dataclasses
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import save_tokenizer, write_rows

import envs
from envs.episode import Policy, Sample, Turn, stitch

ROOT = Path(__file__).resolve().parents[1]
NOT_COPIED = shutil.ignore_patterns(".*", "__pycache__", "runs", "models", "data", "tests", "bench")
WORDS = "strawberry banana committee possessed mississippi"


@pytest.fixture(scope="module")
def fork(tmp_path_factory) -> Path:
    """A scratch copy of the repository with both forks in it, made by the documented commands."""
    folder = tmp_path_factory.mktemp("fork") / "repo"
    shutil.copytree(ROOT, folder, ignore=NOT_COPIED)
    guide = (ROOT / "docs/forking.md").read_text()
    commands = re.findall(r"^(?:cp|git apply) .*", guide, re.M)
    assert len(commands) == 3
    env = os.environ | {"GIT_CEILING_DIRECTORIES": str(folder.parent)}
    for command in commands:
        done = subprocess.run(command.split(), cwd=folder, env=env, capture_output=True, text=True)
        assert done.returncode == 0, f"{command}\n{done.stderr}"
    return folder


@pytest.fixture
def my_grpo(fork, monkeypatch):
    """The forked trainer as a module."""
    spec = importlib.util.spec_from_file_location("my_grpo", fork / "my_grpo.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "my_grpo", module)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def count_letters(fork, monkeypatch):
    """The new environment, registered."""
    monkeypatch.setattr(envs, "__path__", [str(fork / "envs")])
    envs._registry.cache_clear()
    yield envs.environment("count_letters")
    sys.modules.pop("envs.count_letters")
    envs._registry.cache_clear()


def example_row() -> dict:
    """The row that the guide shows."""
    (block,) = re.findall(r"```json\n(.*?)```", (ROOT / "docs/forking.md").read_text(), re.S)
    return json.loads(block)


@pytest.mark.parametrize("name", ["opo", "count_letters"])
def test_diffs_are_short(name):
    lines = (ROOT / f"docs/forks/{name}.diff").read_text().splitlines()
    assert len(lines) < 60 and all(len(line) <= 101 for line in lines)


# --- a new estimator ------------------------------------------------------------------------------


def test_advantages_are_over_the_length_weighted_mean(my_grpo):
    """By hand: rewards 1, 0, 0, 1 at lengths 10, 30, 40, 20 have the baseline 30 / 100."""
    lengths_G = torch.tensor([10, 30, 40, 20])
    advantages_G = my_grpo.group_advantages(torch.tensor([1.0, 0, 0, 1]), lengths_G, 50)
    torch.testing.assert_close(advantages_G, torch.tensor([0.7, -0.3, -0.3, 0.7]))
    assert (advantages_G * lengths_G).sum().abs() < 1e-5


def test_a_group_that_agrees_has_no_advantage(my_grpo):
    generator = torch.Generator().manual_seed(0)
    for reward in (0.9, 1 / 3, 1e-3, 123.4):
        lengths_G = torch.randint(1, 65536, (16,), generator=generator)
        advantages_G = my_grpo.group_advantages(torch.full((16,), reward), lengths_G, 50)
        assert advantages_G.tolist() == [0.0] * 16
    assert my_grpo.group_advantages(torch.ones(1), torch.tensor([7]), 50).tolist() == [0.0]


def test_the_forks_rollouts_use_it_and_its_loss_is_the_policy_gradient(my_grpo, tmp_path):
    """From rewards to gradients: d loss / d logp = -A / T where trainer and engine agree."""
    save_tokenizer(tmp_path)
    cfg = my_grpo.Config(run_dir=str(tmp_path), model=str(tmp_path))
    worker = my_grpo.RolloutWorker(cfg, 0)
    row = {
        "_line": 1,
        "agent_ref": {"name": "any"},
        "responses_create_params": {"input": [{"role": "user", "content": "?"}]},
    }
    turns = [Turn([7, 8], [9] * n, [-0.5] * n, [0] * n, "stop") for n in (1, 3)]
    rewards = (envs.Reward(1.0), envs.Reward(0.0))
    episodes = [my_grpo.Episode([t], r) for t, r in zip(turns, rewards, strict=True)]
    _, samples = worker.finish(row, 0, episodes)
    assert [sample.advantage for sample in samples] == [0.75, -0.25]

    batch = my_grpo.pack(samples, my_grpo.Update(4, 2, []), cfg)
    logp_T = torch.where(batch.mask_T, -0.5, 0.0).requires_grad_()
    loss, stats = my_grpo.policy_loss(logp_T, batch, cfg)
    loss.backward()
    expected_T = torch.tensor([0, 0, -0.75, 0, 0, 0.25, 0.25, 0.25]) / 4
    torch.testing.assert_close(logp_T.grad, expected_T)
    assert stats["kept_tokens"] == 4 and loss.item() == pytest.approx(0.0)


# --- a new environment ----------------------------------------------------------------------------


def test_the_environment_is_registered_and_checks_its_rows(count_letters):
    row = example_row()
    envs.check_row(row)
    for field, value in (("word", 3), ("letter", "rr"), ("letter", None)):
        with pytest.raises(ValueError, match=field):
            envs.check_row(row | {field: value})


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        ("3", 1.0),
        ("2, no: 3.", 1.0),
        ("<think>2 or 4</think>3", 1.0),
        ("3 or 2", 0.0),
        ("three", 0.0),
        ("", 0.0),
        ("9" * 5000, 0.0),
    ],
)
def test_the_environment_verifies(count_letters, response, reward):
    assert asyncio.run(envs.verify(example_row(), response)).value == reward


class Scripted:
    """A generator that says what it is told to; each call must continue what was said before."""

    def __init__(self, tokenizer, *answers):
        self.tokenizer, self.answers, self.generate = tokenizer, list(answers), SimpleNamespace()
        self.generate.remote = self.answer

    async def answer(self, prompt_ids, n, seed, call, drafts):
        """One Turn for each call."""
        text, reason = self.answers.pop(0)
        ids = self.tokenizer.encode(text) + [1] * (reason == "stop")
        return [Turn(prompt_ids, ids, [-1.0] * len(ids), [0] * len(ids), reason)]


@pytest.mark.parametrize(
    ("answers", "reward", "turns"),
    [
        ([("3", "stop")], 1.0, 1),
        ([("2", "stop"), ("3", "stop")], 0.5, 2),
        ([("2", "stop"), ("4", "stop")], 0.0, 2),
        ([("2", "length")], 0.0, 1),
    ],
)
def test_the_environment_gives_a_second_try(count_letters, tmp_path, answers, reward, turns):
    """Both turns are one sample, the hint masked out: no id is tokenised again."""
    from envs.rows import load_tokenizer

    save_tokenizer(tmp_path)
    tokenizer = load_tokenizer(str(tmp_path))
    cfg = SimpleNamespace(thinking=False, max_model_len=512)
    policy = Policy(Scripted(tokenizer, *answers), tokenizer, cfg, 0, drafts=[])
    episode = asyncio.run(count_letters.rollout(example_row(), policy))
    assert episode.reward.value == reward and len(episode.turns) == turns
    (sample,) = stitch(episode.turns)
    assert isinstance(sample, Sample)
    trained = tokenizer.decode(sample.tokens_T[sample.mask_T], skip_special_tokens=True)
    assert trained == "".join(text for text, _ in answers)
    whole = tokenizer.decode(sample.tokens_T)
    assert ("Count again" in whole) == (turns == 2)


# --- both, through the command line ---------------------------------------------------------------


@pytest.mark.e2e
def test_the_forked_trainer_trains_on_the_new_environment(fork, tiny_config, tmp_path):
    """Two steps with real Ray and vLLM; advantages add up to zero over the tokens of each group."""
    rows = []
    for word in WORDS.split():
        for letter in sorted(set(word)):
            message = {"role": "user", "content": f"How many {letter} are in {word}?"}
            params = {"responses_create_params": {"input": [message]}}
            rows.append(example_row() | params | {"word": word, "letter": letter})
    cfg = tiny_config(
        train_data=write_rows(tmp_path / "letters.jsonl", rows),
        steps=2,
        group_size=8,
        max_model_len=320,
        max_response_tokens=64,
        row_tokens=320,
        skip_zero_advantage=False,
    )
    config = tmp_path / "config.py"
    values = dataclasses.asdict(cfg)
    config.write_text("".join(f"{name} = {value!r}\n" for name, value in values.items()))
    command = [sys.executable, "my_grpo.py", "--config", str(config)]
    done = subprocess.run(command, cwd=fork, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]

    folder = Path(cfg.run_dir)
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [m["step"] for m in metrics] == [1, 2]
    assert all(np.isfinite(m["loss"]) for m in metrics) and metrics[-1]["grad_norm"] >= 0
    assert abs(metrics[0]["token_mult_prob_error"] - 1) < 1e-5

    lines = [json.loads(line) for line in (folder / "rollouts.jsonl").read_text().splitlines()]
    assert {line["env"] for line in lines} == {"count_letters"}
    assert {len(line["response"]) for line in lines} == {1, 2}, "some answers got a second try"
    groups = defaultdict(list)
    for line in lines:
        tokens = sum(count for _, count in line["versions"])
        groups[line["slot"]].append(tokens * line["advantage"])
    assert len(groups) == 8 and any(any(group) for group in groups.values())
    assert all(abs(sum(group)) < 1e-3 for group in groups.values())
