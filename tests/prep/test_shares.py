"""Shares of rows that ask for low effort, for no reasoning, or for a budget of tokens."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import write_rows

import data_prep
from core.errors import InputError
from grpo_async import LowEffort, shaped_reward
from prep.shares import MARKER, mark
from support.blends import math_row

AGENTS = ("math_with_judge", "mcqa", "code_gen", "calendar")


def of_agents(count: int) -> list[dict]:
    named = [{"agent_ref": {"name": f"{agent}_simple_agent"}} for agent in AGENTS]
    return [math_row(i, **named[i % len(named)]) for i in range(count * len(named))]


def run(folder: Path, rows: list[dict], *words: str) -> list[dict]:
    source = write_rows(folder / "in.jsonl", rows)
    assert data_prep.main([words[0], source, str(folder / "out.jsonl"), *words[1:]]) == 0
    return [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]


def marked(rows: list[dict]) -> list[int]:
    asked = [row["responses_create_params"]["input"][-1]["content"] for row in rows]
    return [i for i, text in enumerate(asked) if text.endswith(f" {MARKER}")]


@pytest.mark.parametrize(("phase", "share", "agents"), [("early", 0.02, 3), ("late", 0.01, 2)])
def test_a_share_of_some_domains_asks_for_low_effort(tmp_path, phase, share, agents):
    rows = of_agents(4000)
    out = run(tmp_path, rows, "effort", "--phase", phase)
    chosen = marked(out)
    for k in range(len(AGENTS)):
        count = sum(i % len(AGENTS) == k for i in chosen)
        expected = share if k < agents else 0
        assert abs(count - 4000 * expected) <= 4 * (4000 * expected) ** 0.5
    others = [i for i in range(len(rows)) if i not in chosen]
    assert len(out) == len(rows) and [out[i] for i in others] == [rows[i] for i in others]


def test_the_choice_is_of_the_row_and_not_of_its_place(tmp_path):
    rows = of_agents(500)
    chosen = [rows[i] for i in marked(run(tmp_path, rows, "effort", "--phase", "early"))]
    other = rows[::-1][:1500]
    again = [other[i] for i in marked(run(tmp_path, other, "effort", "--phase", "early"))]
    assert again and again == [row for row in chosen[::-1] if row in other]


def test_the_marker_is_what_the_reward_looks_for(tmp_path):
    """In the last message of the user, of which there may be parts, and answers behind it."""
    parts = [{"type": "input_text", "text": "1 +"}, {"type": "input_text", "text": " 1?"}]
    chat = [{"role": "user", "content": parts}, {"role": "assistant", "content": "Hm."}]
    rows = [math_row(i, responses_create_params={"input": chat}) for i in range(500)]
    out = run(tmp_path, rows, "effort", "--phase", "early")
    (changed, *_) = [row for row, before in zip(out, rows, strict=True) if row != before]
    mark(alone := {"responses_create_params": {"input": "1 + 1?"}}, "")
    assert alone["responses_create_params"]["input"] == f"1 + 1? {MARKER}"
    turns = [SimpleNamespace(token_ids=[])]
    episode = SimpleNamespace(reward=SimpleNamespace(value=1.0), turns=turns)
    rule = LowEffort(weight=0.2)
    assert shaped_reward(changed, episode, rule) == pytest.approx(1.2)
    assert shaped_reward(rows[0], episode, rule) == 1.0


def test_some_rows_lose_reasoning_and_others_get_a_budget(tmp_path):
    rows = [math_row(i) for i in range(20_000)]
    params = [row["responses_create_params"] for row in run(tmp_path, rows, "reasoning_control")]
    off = [i for i, p in enumerate(params) if "metadata" in p]
    limited = [i for i, p in enumerate(params) if "max_output_tokens" in p]
    assert abs(len(off) - 2000) < 170 and abs(len(limited) - 600) < 100
    assert not set(off) & set(limited)
    texts = {params[i]["metadata"]["chat_template_kwargs"] for i in off}
    assert texts == {'{"enable_thinking": false}'}
    budgets = [params[i]["max_output_tokens"] for i in limited]
    assert set(budgets) == {1024, 2048, 4096, 8192}
    assert all(budgets.count(budget) > 100 for budget in budgets)


def test_what_a_row_says_itself_stays(tmp_path):
    own = {"metadata": {"a": "b", "chat_template_kwargs": '{"x": 1}'}, "max_output_tokens": 100}
    rows = [math_row(i) for i in range(50)]
    for row in rows:
        row["responses_create_params"] |= own
    words = ("reasoning_control", "--off", "0.5", "--limited", "0.5", "--budgets", "200")
    kinds = set()
    for row in run(tmp_path, rows, *words):
        params = row["responses_create_params"]
        assert params["max_output_tokens"] == 100 and params["metadata"]["a"] == "b"
        kinds.add(params["metadata"]["chat_template_kwargs"])
    assert kinds == {'{"x": 1}', '{"x": 1, "enable_thinking": false}'}


def all_off(**params) -> tuple[list[dict], tuple[str, ...]]:
    return [math_row(1, responses_create_params=params)], ("reasoning_control", "--off", "1")


NO_USER = [math_row(i, responses_create_params={"input": []}) for i in range(300)]


@pytest.mark.parametrize(("rows", "words", "message"), [
    (NO_USER, ("effort", "--phase", "early"), r":\d+: responses_create_params.input holds \[\]"),
    (*all_off(metadata={"chat_template_kwargs": "{"}), r":1: .*chat_template_kwargs is '{', e"),
    (*all_off(metadata={"chat_template_kwargs": {"a": 1}}), r":1: .*expected a JSON object as"),
    (*all_off(metadata={"chat_template_kwargs": "5"}), r":1: .*chat_template_kwargs is '5', e"),
    ([{"agent_ref": {"name": "a"}}], all_off()[1], r":1: responses_create_params is None, exp"),
    ([math_row(1)], (*all_off()[1], "--limited", "0.1"), r"--off 1.0 --limited 0.1 .*most 1"),
    ([math_row(1)], ("reasoning_control", "--budgets", "0"), r"positive budgets"),
])  # fmt: skip
def test_bad_input_is_named_and_leaves_nothing(tmp_path, rows, words, message):
    words = words if "--limited" in words or "--off" not in words else (*words, "--limited", "0")
    with pytest.raises(InputError, match=message):
        run(tmp_path, rows, *words)
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]
