"""The commands of docs/forking.md: its diffs apply to a scratch copy, and the result runs."""

import asyncio
import importlib.util
import json
import math
import os
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import make_config, save_tokenizer, write_rows
from test_algorithm import TablePolicy, sample

import envs
from envs.episode import Sample, Turn, stitch
from envs.sampler import Sampler
from runtime.dispatch import Slot
from runtime.settings import Sampling
from support.configs import changed
from support.program import Program

ROOT = Path(__file__).resolve().parents[1]
NOT_COPIED = shutil.ignore_patterns(".*", "__pycache__", "runs", "models", "data", "tests", "bench")
WORDS = "strawberry banana committee possessed mississippi"


@pytest.fixture(scope="module")
def fork(tmp_path_factory) -> Path:
    """A scratch copy of the repository with all forks in it, made by the documented commands."""
    folder = tmp_path_factory.mktemp("fork") / "repo"
    shutil.copytree(ROOT, folder, ignore=NOT_COPIED)
    guide = (ROOT / "docs/forking.md").read_text()
    commands = re.findall(r"^(?:cp|git apply) .*", guide, re.M)
    assert len(commands) == 5
    env = os.environ | {"GIT_CEILING_DIRECTORIES": str(folder.parent)}
    for command in commands:
        done = subprocess.run(command.split(), cwd=folder, env=env, capture_output=True, text=True)
        assert done.returncode == 0, f"{command}\n{done.stderr}"
    return folder


def load(fork: Path, name: str, monkeypatch) -> ModuleType:
    """A forked trainer as a module."""
    spec = importlib.util.spec_from_file_location(name, fork / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def my_grpo(fork, monkeypatch) -> ModuleType:
    """The trainer with OPO's advantages."""
    return load(fork, "my_grpo", monkeypatch)


@pytest.fixture
def dr_grpo(fork, monkeypatch) -> ModuleType:
    """The trainer with Dr. GRPO's advantages and divisor."""
    return load(fork, "dr_grpo", monkeypatch)


@pytest.fixture
def count_letters(fork, monkeypatch):
    """The new environment, registered."""
    monkeypatch.setattr(envs, "__path__", [str(fork / "envs")])
    envs.agents.cache_clear()
    yield envs.environment("count_letters")
    sys.modules.pop("envs.count_letters")
    envs.agents.cache_clear()


def example_row() -> dict:
    """The row of count_letters that the guide shows."""
    return json.loads(blocks("json")[1])


def blocks(language: str) -> list[str]:
    """The guide's examples in a language."""
    guide = (ROOT / "docs/forking.md").read_text()
    return re.findall(rf"```{language}\n(.*?)```", guide, re.S)


@pytest.mark.parametrize(("name", "most"), [("opo", 40), ("dr_grpo", 40), ("count_letters", 50)])
def test_diffs_are_short(name, most):
    lines = (ROOT / f"docs/forks/{name}.diff").read_text().splitlines()
    assert sum(line[0] in "+-" for line in lines[2:]) < most
    assert all(len(line) <= 101 for line in lines)


WHICH_CLASSES = """
import runpy, sys
import bare

def main():
    print(bare.Run.__module__, bare.Trainer.__module__, "grpo_async" in sys.modules)

bare.main = main
runpy.run_path("bare.py", run_name="__main__")
"""


@pytest.mark.slow
def test_a_bare_copy_runs_its_own_classes(fork):
    """No line of the copy names the file: neither its classes nor its usage are grpo_async's."""
    shutil.copy(ROOT / "grpo_async.py", fork / "bare.py")
    run = partial(subprocess.run, cwd=fork, capture_output=True, text=True, timeout=100)
    done = run([sys.executable, "-c", WHICH_CLASSES])
    assert done.stdout.split() == ["bare", "bare", "False"], done.stderr
    done = run([sys.executable, "bare.py", "--help"])
    assert done.stdout.startswith("usage: bare.py "), done.stderr


# --- a new estimator ------------------------------------------------------------------------------


def test_advantages_are_over_the_length_weighted_mean(my_grpo):
    """By hand: rewards 1, 0, 0, 1 at lengths 10, 30, 40, 20 have the baseline 30 / 100."""
    lengths_G = torch.tensor([10, 30, 40, 20])
    rule = my_grpo.Advantage()
    advantages_G = my_grpo.group_advantages(torch.tensor([1.0, 0, 0, 1]), lengths_G, rule)
    torch.testing.assert_close(advantages_G, torch.tensor([0.7, -0.3, -0.3, 0.7]))
    assert (advantages_G * lengths_G).sum().abs() < 1e-5


def test_a_group_that_agrees_has_no_advantage(my_grpo):
    generator = torch.Generator().manual_seed(0)
    rule = my_grpo.Advantage()
    for reward in (0.9, 1 / 3, 1e-3, 123.4):
        lengths_G = torch.randint(1, 65536, (16,), generator=generator)
        advantages_G = my_grpo.group_advantages(torch.full((16,), reward), lengths_G, rule)
        assert advantages_G.tolist() == [0.0] * 16
    assert my_grpo.group_advantages(torch.ones(1), torch.tensor([7]), rule).tolist() == [0.0]


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
    samples = worker.finish(row, Slot(0), episodes).samples
    assert [s.advantage for s in samples] == [0.75, -0.25]

    batch = my_grpo.pack(samples, my_grpo.Update(4, 2, []), cfg)
    logp_T = torch.where(batch.mask_T, -0.5, 0.0).requires_grad_()
    loss, stats = my_grpo.policy_loss(logp_T, batch, cfg)
    loss.backward()
    expected_T = torch.tensor([0, 0, -0.75, 0, 0, 0.25, 0.25, 0.25]) / 4
    torch.testing.assert_close(logp_T.grad, expected_T)
    assert stats["kept_tokens"] == 4 and loss.item() == pytest.approx(0.0)


# --- a new divisor --------------------------------------------------------------------------------


REWARDS = [1.0, 0.0, 0.0, 1.0, 0.5]
ANSWERS = [[1, 2], [2, 3, 3], [1], [3, 1, 2, 2], [2, 2]]
TABLE = [0.0, -1.0, -1.5, -0.7]


@pytest.mark.parametrize("dropped", [False, True])
def test_dr_grpo_divides_by_a_constant_whatever_the_filter_drops(dr_grpo, dropped):
    """By hand: d loss / d logp(v) = -sum w A / (1 * 5 * 7), of the sequences that are kept."""
    cfg = changed(dr_grpo.Config(), prompts_per_step=1, group_size=5, max_response_tokens=7)
    advantages_G = dr_grpo.group_advantages(torch.tensor(REWARDS), cfg.advantage)
    torch.testing.assert_close(advantages_G, torch.tensor(REWARDS) - 0.5)
    samples = []
    expected_V = torch.zeros(4)
    for j, (ids, advantage) in enumerate(zip(ANSWERS, advantages_G.tolist(), strict=True)):
        gap = -3.0 if dropped and j == 1 else 0.2  # trainer - engine; exp(3) is above the limit, 2
        samples.append(sample(ids, [TABLE[v] - gap for v in ids], advantage))
        for v in ids if gap > 0 else []:
            expected_V[v] -= math.exp(gap) * advantage / (1 * 5 * 7)

    (share,) = dr_grpo.plan_step([dr_grpo.Group(0, 0, 1, [s.info() for s in samples], None)], cfg)
    trainer = dr_grpo.Trainer(cfg, 0)
    trainer.policy = TablePolicy(TABLE)
    (update,) = share.updates
    rows = [[samples[j] for _, j in row] for row in update.rows]
    batches = [dr_grpo.pack(of_row, update, cfg) for of_row in rows]
    metrics = trainer.update(batches).metrics
    torch.testing.assert_close(trainer.policy.grads[0], expected_V)
    assert metrics["num_masked_seqs"] == dropped


def test_dr_grpo_has_no_advantage_where_a_group_agrees(dr_grpo):
    for reward in (0.9, 1 / 3, 1e-3, 123.4):
        rewards_G = torch.full((16,), reward)
        assert dr_grpo.group_advantages(rewards_G, dr_grpo.Advantage()).tolist() == [0.0] * 16


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


class ScriptedEngine:
    """An engine with given answers; each call must continue what was said before."""

    def __init__(self, tokenizer, *answers):
        self.tokenizer = tokenizer
        self.answers = list(answers)
        self.generate = SimpleNamespace(remote=self.answer)

    async def answer(self, request):
        """One Turn for each call."""
        text, reason = self.answers.pop(0)
        ids = self.tokenizer.encode(text) + [1] * (reason == "stop")
        return [Turn(request.prompt_ids, ids, [-1.0] * len(ids), [0] * len(ids), reason)]


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
    engine = ScriptedEngine(tokenizer, *answers)
    sampler = Sampler(engine, tokenizer, Sampling(max_model_len=512), 0, [], False)
    episode = asyncio.run(count_letters.rollout(example_row(), sampler))
    assert episode.reward.value == reward and len(episode.turns) == turns
    (joined,) = stitch(episode.turns)
    assert isinstance(joined, Sample)
    trained = tokenizer.decode(joined.tokens_T[joined.mask_T], skip_special_tokens=True)
    assert trained == "".join(text for text, _ in answers)
    whole = tokenizer.decode(joined.tokens_T)
    assert ("Count again" in whole) == (turns == 2)


def test_the_environment_of_one_turn_works_as_it_stands_in_the_guide(tmp_path, monkeypatch):
    (code,) = [block for block in blocks("python") if "AGENTS" in block]
    (tmp_path / "vowels.py").write_text(code)
    monkeypatch.setattr(envs, "__path__", [*envs.__path__, str(tmp_path)])
    monkeypatch.setattr(envs, "agents", lambda: {"vowels": "vowels"})
    row = json.loads(blocks("json")[0])
    envs.check_row(row)
    assert asyncio.run(envs.verify(row, "abc")).value == pytest.approx(1 / 3)
    assert asyncio.run(envs.verify(row, "<think>hm</think>")).value == 0
    sys.modules.pop("envs.vowels")


# --- both, through the command line ---------------------------------------------------------------


@pytest.mark.e2e
def test_a_forked_trainer_trains_on_the_new_environment(fork, my_grpo, tiny_model, tmp_path):
    """Two steps with real Ray and vLLM; advantages add up to zero over the tokens of each group."""
    rows = []
    for word in WORDS.split():
        for letter in sorted(set(word)):
            message = {"role": "user", "content": f"How many {letter} are in {word}?"}
            params = {"responses_create_params": {"input": [message]}}
            rows.append(example_row() | params | {"word": word, "letter": letter})
    cfg = changed(
        make_config(tiny_model, tmp_path, my_grpo.Config),
        data={"train": write_rows(tmp_path / "letters.jsonl", rows)},
        steps=2,
        group_size=8,
        max_model_len=320,
        max_response_tokens=64,
        row_tokens=320,
        skip_zero_advantage=False,
    )
    program = Program(cfg, script="my_grpo.py", root=fork)
    assert program.ends(240) == 0, program.told()[-3000:]

    steps = program.steps()
    assert [m["step"] for m in steps] == [1, 2]
    assert all(np.isfinite(m["loss"]) for m in steps) and steps[-1]["grad_norm"] >= 0
    assert abs(steps[0]["token_mult_prob_error"] - 1) < 1e-5

    lines = program.lines("rollouts.jsonl")
    assert {line["env"] for line in lines} == {"count_letters"}
    assert {len(line["response"]) for line in lines} == {1, 2}, "some answers got a second try"
    groups = defaultdict(list)
    for line in lines:
        tokens = sum(count for _, count in line["versions"])
        groups[line["slot"]].append(tokens * line["advantage"])
    assert len(groups) == 8 and any(any(group) for group in groups.values())
    assert all(abs(sum(group)) < 1e-3 for group in groups.values())
