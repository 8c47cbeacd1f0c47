"""Conversations in the form of the Responses API, and what chat templates make of them."""

import functools
import json
from types import SimpleNamespace

import pytest
from conftest import save_tokenizer, write_rows
from transformers import AutoTokenizer

from envs import check_rows, registry
from envs.check_rows import load_rows, render
from rollout.messages import chat, functions, last_question
from settings.config import Data, Sampling
from settings.environment_services import Services
from support.data import HERE, SHARED, shared, template
from support.tables import gives

THOUGHT = {"type": "reasoning", "id": "r", "summary": [{"text": "\nLet me see.\n"}]}
CALL = {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a": [1, "x"]}'}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": '{"sum": 2}'}
TOOL = {"type": "function", "name": "add", "parameters": {"properties": {}}, "strict": True}


def said(role: str, text: str) -> dict:
    return {"role": role, "content": text}


def test_a_turn_of_the_assistant_becomes_one_message():
    spoken = {"type": "message", "role": "assistant", "content": [{"text": "I"}, {"text": " add"}]}
    items = [said("user", "1 + 1?"), THOUGHT, spoken, CALL, OUTPUT, said("assistant", "It is 2.")]
    function = {"name": "add", "arguments": {"a": [1, "x"]}}
    turn = said("assistant", "I add") | {"reasoning_content": "Let me see."}
    turn["tool_calls"] = [{"id": "c1", "type": "function", "function": function}]
    answer = said("tool", '{"sum": 2}') | {"tool_call_id": "c1"}
    assert chat(items) == [items[0], turn, answer, said("assistant", "It is 2.")]
    assert chat([items[0], *chat(items)[1:]]) == chat(items), "a chat stays as it is"
    assert chat("1 + 1?") == [said("user", "1 + 1?")]


def test_tools_take_the_form_of_chats():
    function = {"name": "add", "parameters": {"properties": {}}}
    made = [{"type": "function", "function": function}]
    assert functions([TOOL]) == functions(made) == made
    assert functions([]) is functions(None) is None


test_the_last_question_is_the_users = gives(
    lambda items: last_question({"responses_create_params": {"input": items}}),
    ([], ""),
    ([said("system", "s")], ""),
    ([said("user", "a"), THOUGHT, CALL, OUTPUT], "a"),
    ([said("user", "a"), said("user", "b")], "b"),
    ("c", "c"),
)


@pytest.mark.parametrize(("params", "message"), [
    ({"input": [THOUGHT | {"type": "image"}]}, r"input\[0\]\.type is 'image', expected one"),
    ({"input": [THOUGHT | {"summary": "x"}]}, r"input\[0\]\.summary is 'x', expected a list"),
    ({"input": [THOUGHT | {"content": [7]}]}, r"input\[0\]\.content\[0\]\.text is missing"),
    ({"input": [CALL | {"name": None}]}, r"input\[0\]\.name is missing or null"),
    ({"input": [CALL | {"arguments": "{"}]}, r"input\[0\]\.arguments is '\{', expected a JSON"),
    ({"input": [CALL | {"arguments": "[]"}]}, r"input\[0\]\.arguments is '\[\]', expected a"),
    ({"input": [CALL | {"call_id": 1}]}, r"input\[0\]\.call_id is 1, expected a string"),
    ({"input": [OUTPUT | {"output": None}]}, r"input\[0\]\.output is missing or null"),
    ({"input": [said("assistant", "") | {"tool_calls": [7]}]},
     r"input\[0\]\.tool_calls\[0\]\.func"),
    ({"tools": [TOOL | {"type": "web_search"}]}, r"tools\[0\]\.type is 'web_search', expected"),
    ({"tools": [{"type": "function"}]}, r"tools\[0\]\.name is missing or null"),
    ({"instructions": "Be brief."}, r"instructions is 'Be brief.', expected null"),
    ({"metadata": {"chat_template_kwargs": '{"tokenize": false}'}},
     r"chat_template_kwargs is '\{.*tokenize.*, expected template variables"),
    ({"max_output_tokens": 0}, r"max_output_tokens is 0, expected 1 or more"),
    ({"metadata": {"chat_template_kwargs": {}}}, r"chat_template_kwargs is \{\}, expected"),
    ({"metadata": {"chat_template_kwargs": "[1]"}}, r"chat_template_kwargs is '\[1\]', expected"),
])  # fmt: skip
def test_a_row_that_no_template_can_show_is_refused_by_name(params, message):
    asked = {"input": [said("user", "1 + 1?")]} | params
    row = {"responses_create_params": asked, "agent_ref": {"name": "math"}, "expected_answer": "2"}
    with pytest.raises(ValueError, match=rf"^responses_create_params\.(metadata\.)?{message}"):
        check_rows.check_row(row)


def test_only_an_environment_that_says_so_takes_no_input(monkeypatch):
    row = {"responses_create_params": {"input": []}, "agent_ref": {"name": "agent"}}
    module = SimpleNamespace()
    monkeypatch.setattr(registry, "environment", lambda name: module)
    with pytest.raises(ValueError, match="at least one message"):
        check_rows.check_row(row)
    module.ALLOWS_EMPTY_INPUT = True
    check_rows.check_row(row)


QWEN = ("qwen3", "qwen3_instruct_2507", "qwen2_5")
TEMPLATES = (*QWEN, "nemotron_3_super", "nemotron_3_nano")


@pytest.fixture(scope="module")
def with_template(tmp_path_factory):
    """A function that returns the character tokenizer with a model's template."""
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(folder)

    @functools.cache
    def make(name: str):
        made = AutoTokenizer.from_pretrained(folder)
        made.chat_template = template(name)
        return made

    return make


@pytest.mark.parametrize(
    ("place", "names"), [(HERE, QWEN), (SHARED, TEMPLATES)], ids=["here", "shared"]
)
def test_every_released_row_loads_and_is_rendered(
    place, names, with_template, tmp_path, monkeypatch
):
    """The examples of NeMo-Gym lack `agent_ref`, which the blends have."""
    folder = shared("gym_rows") if place == SHARED else HERE / "gym_rows"
    tokenizers = {name: with_template(name) for name in names}
    served = SimpleNamespace(ALLOWS_EMPTY_INPUT=True)
    monkeypatch.setattr(registry, "environment", lambda name: served)
    agent = {"agent_ref": {"type": "responses_api_agents", "name": "any"}}
    for source in sorted(folder.glob("*.jsonl")):
        rows = [agent | json.loads(line) for line in source.read_text().splitlines()]
        path = write_rows(tmp_path / source.name, rows)
        of_rows = {row["responses_create_params"].get("temperature") for row in rows} - {None}
        sampling = Sampling(temperature=of_rows.pop() if of_rows else 1.0)
        made = {"data": Data(), "sampling": sampling, "services": Services()}
        cfg = SimpleNamespace(**made, model="", run_dir="")
        monkeypatch.setattr("envs.check_rows.load_tokenizer", lambda model: tokenizers["qwen3"])
        found = load_rows(path, cfg)
        assert [row["_line"] for row in found] == list(range(1, len(rows) + 1))
        for row, tokenizer in ((r, t) for r in found for t in tokenizers.values()):
            assert not row["responses_create_params"]["input"] or render(tokenizer, row, {})


@pytest.mark.parametrize(("name", "expected"), [
    ("nemotron_3_super", "<think>\nLet me see.\n</think>\nI add\n<tool_call>\n<function=add>\n"
     "<parameter=a>\n[1, \"x\"]\n</parameter>\n</function>\n</tool_call>\n<|im_end|>"),
    ("qwen3", "<think>\nLet me see.\n</think>\n\nI add\n<tool_call>\n"
     '{"name": "add", "arguments": {"a": [1, "x"]}}\n</tool_call><|im_end|>'),
])  # fmt: skip
def test_templates_show_thoughts_calls_and_tools(with_template, name, expected):
    items = [said("user", "1 + 1?"), THOUGHT, said("assistant", "I add"), CALL, OUTPUT]
    row = {"responses_create_params": {"input": items, "tools": [TOOL]}}
    tokenizer = with_template(name)
    prompt = tokenizer.decode(render(tokenizer, row, {}))
    assert expected in prompt and '{"sum": 2}' in prompt and "strict" not in prompt
    plain = {"input": [said("user", "1 + 1?")], "tools": []}
    assert "tool" not in tokenizer.decode(render(tokenizer, {"responses_create_params": plain}, {}))


def test_a_rows_own_variable_turns_reasoning_off(with_template):
    """As data_prep.py reasoning_control writes it."""
    variables = {"chat_template_kwargs": '{"enable_thinking": false}'}
    params = {"input": [said("user", "1 + 1?")], "metadata": variables}
    tokenizer = with_template("nemotron_3_super")
    ids = render(tokenizer, {"responses_create_params": params}, {"enable_thinking": True})
    assert tokenizer.decode(ids).endswith("<think></think>")


def test_an_agent_turns_reasoning_off_unless_the_row_has_it_on(with_template):
    params = {"input": [said("user", "1 + 1?")]}
    row = {"agent_ref": {"name": "genrm_simple_agent_reasoning_off"}}
    row["responses_create_params"] = params
    tokenizer = with_template("nemotron_3_super")
    ids = render(tokenizer, row, {"enable_thinking": True})
    assert tokenizer.decode(ids).endswith("<think></think>")
    params["metadata"] = {"chat_template_kwargs": '{"enable_thinking": true}'}
    ids = render(tokenizer, row, {"enable_thinking": False})
    assert tokenizer.decode(ids).endswith("<think>\n")
