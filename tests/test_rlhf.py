"""The RLHF configuration with tiny models: groups that a judge compares, for three steps."""

import json
import math
import os
import statistics
from collections import defaultdict

import pytest
from conftest import make_config, serving_judge, spelling_rows, write_rows

from envs.llm_judged import comparison
from grpo_async import Config
from settings import reader
from settings.environment_services import Services, weights
from support.configs import changed, shrunk
from support.judges import Judge
from support.program import ROOT, Program

pytestmark = pytest.mark.e2e
STEPS = 3
AGENTS = ("genrm_simple_agent", "genrm_simple_agent_reasoning_off")


def rows(count: int, seed: int) -> list[dict]:
    """Questions of the two agents that the stage's data name."""
    made = spelling_rows(count, seed)
    for i, row in enumerate(made):
        row["agent_ref"]["name"] = AGENTS[i % 2]
        row["principle"] = "Letters are better than anything else." if i % 4 else None
    return made


def letters(messages: list[dict]) -> str:
    """A judge that counts letters; every third pair it cannot tell apart."""
    first, second = (sum(map(str.isalpha, m["content"])) for m in messages[-2:])
    ranking = 2 if first > second else 5 if second > first else 3.5
    scores = [3, 3] if (first + second) % 3 == 0 else [3 + (first > second), 3 + (second > first)]
    said = {"score_1": scores[0], "score_2": scores[1], "ranking": ranking}
    return f"<think>I count.</think>It is:\n```json\n{json.dumps(said)}\n```"


def run(tiny_model, tmp_path, sampling: dict) -> Program:
    """Trains to the end; the judge's address is in JUDGES_FILE."""
    stage = reader.read(Config, ROOT / "configs/rlhf.py")
    val = write_rows(tmp_path / "val.jsonl", rows(4, 1))
    cfg = shrunk(stage, make_config(tiny_model, tmp_path), val)
    write_rows(tmp_path / "train.jsonl", rows(64, 0))
    judges = {"genrm": stage.services.judges["genrm"] | {"sampling": sampling}}
    services = Services(judges=judges, genrm=stage.services.genrm)
    data = {"val_samples": stage.data.val_samples}
    cfg = changed(cfg, steps=STEPS, save_period=STEPS, services=services, data=data)
    assert cfg.loss.kl_coef == 1e-4 and cfg.has_reference
    program = Program(cfg).succeeds(400)
    program.check_slots(cfg, rows=64)
    assert not program.lines("dropped.jsonl")
    return program


def check_groups(program: Program) -> list[dict]:
    """What was compared: each group's rewards are those of its answers and base scores."""
    stage = reader.read(Config, ROOT / "configs/rlhf.py")
    by = weights(stage.services.genrm)
    groups = defaultdict(list)
    for line in program.lines("rollouts.jsonl"):
        groups[line["evaluation"], line["slot"]].append(line)
    sizes = {len(group) for (evaluation, _), group in groups.items() if evaluation is None}
    assert sizes == {4} and len(groups) == STEPS * 4 + 3 * 4
    for group in groups.values():
        answers = [comparison.Answer("", line["response"][-1].strip()) for line in group]
        base = [line["info"]["base"] for line in group]
        final = comparison.adjusted(base, answers, by)
        for answer, line, reward in zip(answers, group, final, strict=True):
            expected = reward if answer.text else min(0.0, reward)
            assert line["reward"] == pytest.approx(expected, abs=1e-5)
    return [line for group in groups.values() for line in group]


def figures(program: Program, lines: list[dict]) -> list[dict]:
    """Prints what a reader wants to know; returns the steps' metrics."""
    steps = program.steps()
    for m in steps:
        print(", ".join(f"{k} {m[k]:.4g}" for k in ("loss", "grad_norm", "reward", "kl_penalty")))
    nonzero = statistics.fmean(line["advantage"] != 0 for line in lines)
    unread = statistics.fmean(line["info"]["unread"] for line in lines)
    ties = statistics.fmean(line["info"]["ties"] for line in lines)
    rewards = [line["reward"] for line in lines]
    print(f"{len(lines)} answers: rewards {min(rewards):.3f} to {max(rewards):.3f}, ", end="")
    print(f"advantages not 0: {nonzero:.2f}, unread {unread:.2f}, ties {ties:.2f}")
    return steps


@pytest.mark.long
def test_rlhf_trains_on_what_a_judge_says_of_pairs(tiny_model, tmp_path, monkeypatch):
    monkeypatch.setenv("JUDGES_FILE", str(tmp_path / "judges"))
    with Judge(letters, model="genrm") as server:
        (tmp_path / "judges").write_text(f"genrm {server.url}\n")
        program = run(tiny_model, tmp_path, {})
    lines = check_groups(program)
    steps = figures(program, lines)
    assert [m["step"] for m in steps] == [1, 2, 3]
    assert all(math.isfinite(m["loss"]) and m["grad_norm"] > 0 for m in steps)
    assert abs(steps[0]["token_mult_prob_error"] - 1) < 1e-5
    assert (program.folder / f"step_{STEPS:06d}" / "hf" / "config.json").exists()
    assert {line["env"] for line in lines} == set(AGENTS)
    assert statistics.fmean(line["advantage"] != 0 for line in lines) > 0.9
    assert {line["info"]["unread"] for line in lines} == {0.0}
    assert 0 < statistics.fmean(line["info"]["ties"] for line in lines) < 1
    # Training asks 4 pairs of each group, validation 2 of each of 4 rows, at the start and the end.
    assert len(server.asked) >= STEPS * 4 * 4 + 2 * 4 * 2
    body = server.asked[0]
    assert body["max_tokens"] == 16384 and body["model"] == "genrm"
    assert [m["role"] for m in body["messages"]][-3:] == ["principle", "response_1", "response_2"]
    validated = [m["step"] for m in program.lines("metrics.jsonl") if "validation_reward" in m]
    assert validated == [0, 2, 3]


@pytest.mark.skipif(not os.environ.get("GRPO_JUDGES"), reason="GRPO_JUDGES=1 asks for it: 2 min")
def test_a_real_judge_without_a_verdict_ends_the_run_by_name(tiny_model, tmp_path):
    """A random model writes none. No pair becomes a draw for that, and no answer a 0."""
    silent = r"judge 'genrm' gave no verdict in \d+ replies in a row"
    with (
        serving_judge("genrm", tiny_model, tmp_path, 1024),
        pytest.raises(AssertionError, match=silent),
    ):
        run(tiny_model, tmp_path, {"max_tokens": 32})
