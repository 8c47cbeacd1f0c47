"""Answers parsed by vLLM: whole calls of every form are read and pass, broken ones are flagged."""

import asyncio
import json
import os
import random
import re
import signal
import time

import pytest
from conftest import save_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from core.errors import InputError
from envs import services
from envs.check_rows import load_rows
from envs.parsers import forms, parsers
from rollout import answer_markup
from rollout.answer_markup import flaw
from rollout.episode import Sample, Turn
from rollout.messages import load_tokenizer
from rollout.response import Response
from rollout.sampler import Sampler
from settings.config import Sampling
from settings.environment_services import Services
from support.calls import TOOLS, answer, broken
from support.chats import Scripted
from support.data import template
from support.examples import tries
from support.verifiers import HOSTILE

pytestmark = pytest.mark.slow

THINK = ["<think>", "</think>"]
# What vLLM looks for in the vocabulary; all else is text.
TOKENS = {
    "plain": [],
    "tags": [*THINK, "<tool_call>", "</tool_call>"],
    "llama": ["<|python_tag|>"],
    "deepseek": [*THINK, "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"]
    + ["<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"],
    "mistral": ["[TOOL_CALLS]", "[ARGS]"],
    "old_mistral": ["[TOOL_CALLS]"],
}
NEMOTRON = ("nemotron_v3", "qwen3_coder", "tags")


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory) -> dict[str, str]:
    """Folders of small tokenizers with the tokens that vLLM's parsers look for."""
    folders = {}
    for name, tokens in TOKENS.items():
        folder = tmp_path_factory.mktemp(name)
        save_tokenizer(folder)
        tokenizer = load_tokenizer(str(folder))
        tokenizer.add_tokens(tokens)
        tokenizer.save_pretrained(folder)
        folders[name] = str(folder)
    return folders


@pytest.fixture
def named(tokenizers):
    """A function that names the parsers of this process, and returns the tokenizer's folder."""

    def name(reasoning: str, tool: str, tokenizer: str) -> str:
        services.configure(Services(reasoning_parser=reasoning, tool_parser=tool))
        return tokenizers[tokenizer]

    return name


def of(parse, text: str, **variables) -> Response:
    return Response(text, **parse(text, TOOLS, variables))


@pytest.mark.parametrize(("reasoning", "tool", "tokenizer", "form"), [
    (*NEMOTRON, "qwen3_coder"),
    ("", "qwen3_coder", "plain", "qwen3_coder"),
    ("qwen3", "qwen3_xml", "tags", "qwen3_coder"),
    ("deepseek_r1", "hermes", "tags", "hermes"),
    ("nemotron_v3", "hermes", "plain", "hermes"),
    ("", "qwen3_json", "plain", "hermes"),
    ("glm45", "glm47", "tags", "glm47"),
    ("kimi_k2", "kimi_k2", "tags", "kimi_k2"),
    ("deepseek_r1", "deepseek_v3", "deepseek", "deepseek_v3"),
    ("", "deepseek_v31", "deepseek", "deepseek_v31"),
    ("", "llama3_json", "llama", "llama3_json"),
    ("", "mistral", "mistral", "mistral"),
    ("", "mistral", "old_mistral", "old_mistral"),
])  # fmt: skip
def test_whole_calls_pass_and_broken_ones_never(tokenizers, reasoning, tool, tokenizer, form):
    parse = parsers.make_parse(reasoning, tool, tokenizers[tokenizer])
    rng = random.Random(form)
    for i in range(120):
        thinks = reasoning == "deepseek_r1" or i % 2 == 0
        whole = answer(form, thinks and form != "llama3_json", rng)
        variables = {} if thinks else {"enable_thinking": False}
        found = of(parse, whole.text, **variables)
        calls = [(call["name"], json.loads(call["arguments"])) for call in found.tool_calls]
        assert (found.malformed, calls) == ("", whole.calls), whole.text
        assert "<think>" not in found.content and "</think>" not in found.reasoning
        spoilt = broken(whole, form, rng)
        assert of(parse, spoilt, **variables).malformed == "tool_call", spoilt


@pytest.mark.parametrize("form", ["hermes", "qwen3_coder"])
def test_without_a_parser_the_same_calls_pass_and_the_same_are_flagged(form):
    rng = random.Random(form)
    for i in range(500):
        whole = answer(form, i % 2 == 0, rng)
        assert flaw(whole.text) == "", whole.text
        spoilt = broken(whole, form, rng)
        assert flaw(spoilt) == "tool_call", spoilt


PIECES = ["<think>", "</think>", "functions.f:0", "function", "f", "{}", '{"a": 1}', "; ", "\n"]
PIECES += ["```json", "```", '{"name": "f", "arguments": {}}', '{"name": "f", "parameters": {}}']
PIECES += [mark for marks in TOKENS.values() for mark in marks]
PIECES += ["<function=f>", "</function>", "<parameter=p>", "</parameter>", "<arg_key>"]
PIECES += ["</arg_key>", "<arg_value>", "</arg_value>", "<|tool_call_begin|>", "<|tool_call_end|>"]


@settings(max_examples=tries(1000), deadline=None)
@given(st.lists(st.sampled_from(PIECES) | st.text(max_size=3), max_size=12).map("".join))
def test_any_text_has_one_flaw_or_none_in_every_form(text):
    for form in forms.FORMS.values():
        assert flaw(text, form) in answer_markup.FLAWS
        assert flaw(text, form, parsed=0) in answer_markup.FLAWS


@pytest.mark.parametrize(("name", "reasoning", "tool"), [
    ("nemotron_3_nano", "nemotron_v3", "qwen3_coder"),
    ("nemotron_3_super", "nemotron_v3", "qwen3_coder"),
    ("nemotron_3_ultra", "nemotron_v3", "qwen3_coder"),
    ("qwen3", "qwen3", "hermes"),
    ("qwen3_instruct_2507", "", "hermes"),
    ("qwen2_5", "", "hermes"),
    ("llama3_1", "", "llama3_json"),
])  # fmt: skip
def test_what_a_models_template_writes_passes(tokenizers, name, reasoning, tool):
    """The answer is what the template adds for it to a conversation."""
    folder = tokenizers["llama" if tool == "llama3_json" else "tags"]
    parse = parsers.make_parse(reasoning, tool, folder)
    tokenizer = load_tokenizer(folder)
    question = [{"role": "user", "content": "Do it."}]
    rng = random.Random(name)

    usual = {"tools": TOOLS, "tokenize": False, "chat_template": template(name)}

    def write(messages: list) -> str:
        return tokenizer.apply_chat_template(messages, **usual)

    start = len(write(question))
    for _ in range(40):
        calls = answer("hermes" if tool != "qwen3_coder" else "qwen3_coder", False, rng).calls
        calls = calls[:1] if tool == "llama3_json" else calls
        made = [{"type": "function", "function": {"name": n, "arguments": a}} for n, a in calls]
        message = {"role": "assistant", "content": "", "tool_calls": made}
        if reasoning:
            message["reasoning_content"] = "I could use <b>, or not."
        text = write([*question, message])[start:].partition("assistant")[2]
        text = text.removeprefix("<|end_header_id|>").removesuffix("\n")
        text = text.removesuffix("<|im_end|>").removesuffix("<|eot_id|>")
        found = of(parse, text.strip())
        read = [(call["name"], json.loads(call["arguments"])) for call in found.tool_calls]
        assert (found.malformed, read, found.content.strip()) == ("", calls, ""), text
        assert bool(reasoning) == bool(found.reasoning)


CALL = '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>'
XML = "<tool_call>\n<function=add>\n</function>\n</tool_call>"


@pytest.mark.parametrize(("pair", "text", "expected"), [
    (NEMOTRON, "<think>\na\n</think>\n\nb", ("\na", "\n\nb", 0, "")),
    (NEMOTRON, "<think>a thought that was cut", ("a thought that was cut", "", 0, "")),
    (NEMOTRON, "<think>a</think>b</think>c", ("a", "bc", 0, "thinking")),
    (NEMOTRON, "<think>a<think></think>b", ("a", "b", 0, "thinking")),
    (NEMOTRON, f"<think>a{XML}</think>b", ("a", "", 1, "tool_call")),  # in a thought
    (NEMOTRON, f"<think>a{XML}", ("a", "", 1, "tool_call")),  # </think> is missing
    (NEMOTRON, f"<think>a</think>{XML[12:]}", ("a", "", 1, "tool_call")),  # vLLM mends it
    (NEMOTRON, f"<think>a</think>b{XML}c{XML}", ("a", "b", 2, "")),
    (NEMOTRON, f"<think>a</think>{CALL}", ("a", "", 0, "tool_call")),  # another form
    (NEMOTRON, "<think>a</think>b<tool_call>", ("a", "b", 0, "tool_call")),  # vLLM drops it
    (("deepseek_r1", "hermes", "tags"), f"<think>a</think>b{CALL}", ("a", "b", 1, "")),
    (("deepseek_r1", "hermes", "tags"), f"a{CALL}</think>b", (f"a{CALL}", "b", 0, "")),
    (("deepseek_r1", "", "tags"), f"<think>a</think>{CALL}", ("a", CALL, 0, "")),
    (("deepseek_r1", "", "tags"), "a</think><tool_call>", ("a", "<tool_call>", 0, "tool_call")),
    (("", "hermes", "tags"), f"<think>a</think>b{CALL}", ("a", "b", 1, "")),
    (("", "xlam", "tags"), "a<tool_call>", ("", "a<tool_call>", 0, "tool_call")),
    (("", "xlam", "tags"), "a</think>", ("a", "", 0, "")),
    (("", "llama3_json", "llama"), '{"answer": 5}', ("", '{"answer": 5}', 0, "")),
    (("", "llama3_json", "llama"), "{x} is a set", ("", "{x} is a set", 0, "")),
    (("", "glm47", "tags"), "<tool_call>unknown\n</tool_call>", ("", "", 0, "tool_call")),
])  # fmt: skip
def test_thought_content_calls_and_flaw(tokenizers, pair, text, expected):
    reasoning, tool, tokenizer = pair
    found = of(parsers.make_parse(reasoning, tool, tokenizers[tokenizer]), text)
    assert (found.reasoning, found.content, len(found.tool_calls), found.malformed) == expected


def test_arguments_take_the_types_of_the_rows_tools(tokenizers):
    parse = parsers.make_parse(*NEMOTRON[:2], tokenizers["tags"])
    text = "<tool_call>\n<function=add>\n<parameter=n>\n5\n</parameter>\n</function>\n</tool_call>"
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}}
    typed = [{"type": "function", "function": {"name": "add", "parameters": schema}}]
    calls = [parse(text, tools, {})["tool_calls"][0] for tools in (typed, None)]
    assert [call["arguments"] for call in calls] == ['{"n": 5}', '{"n": "5"}']


@pytest.mark.parametrize(("reasoning", "tool", "tokenizer", "said"), [
    ("deepseek_r1", "", "plain", "could not locate think start/end tokens"),
    ("", "mistral", "tags", "could not locate the tool call token"),
])  # fmt: skip
def test_parsers_that_cannot_be_used_are_refused(tokenizers, reasoning, tool, tokenizer, said):
    with pytest.raises(ValueError, match=said):
        parsers.make_parse(reasoning, tool, tokenizers[tokenizer])


@pytest.mark.parametrize(("named", "said"), [
    (Services(tool_parser="hermse"), "tool_parser = 'hermse': expected one of: .*, hermes, "),
    (Services(reasoning_parser="r1"), "reasoning_parser = 'r1': expected one of: .*, deepseek_r1"),
])  # fmt: skip
def test_an_unknown_name_is_refused_without_an_import_of_vllm(tokenizers, monkeypatch, named, said):
    monkeypatch.setattr(parsers, "Server", lambda names: pytest.fail("a process was started"))
    assert re.search(said, parsers.problem(named, tokenizers["tags"]))


def test_a_run_with_an_unknown_parser_does_not_start(tiny_config):
    cfg = tiny_config(services=Services(tool_parser="hermse"))
    with pytest.raises(InputError, match=r"tool_parser = 'hermse': expected one of: .*hermes"):
        load_rows(cfg.data.train, cfg)


# --- the process ----------------------------------------------------------------------------------


@pytest.mark.usefixtures("warm_parsers")
async def test_answers_are_parsed_in_a_process_and_the_event_loop_is_not_held_up(named):
    """As `Sampler.generate` has them parsed. With 1 MB of each piece a parse takes 8 s at most."""
    model = named(*NEMOTRON)
    sampler = Sampler(None, load_tokenizer(model), Sampling(), 0, [], validation=False)
    sampler.tools = TOOLS
    whole = answer("qwen3_coder", True, random.Random(0))
    pieces = ("<tool_call>", "<", ">", "</think>", f"{XML}\n", XML[:-12], "<parameter=")
    tiled = [f"<think></think>{piece * (10**5 // len(piece))}" for piece in pieces]
    value = "\n<div class='a'>x > 1 && y -> z</div>" * 10_000
    tiled.append(XML.replace("add>", f"add>\n<parameter=n>{value}\n</parameter>"))
    held = []

    async def watch():
        while True:
            began = time.perf_counter()
            await asyncio.sleep(0.001)
            held.append(time.perf_counter() - began)

    watcher = asyncio.ensure_future(watch())
    first = await sampler.parse(whole.text)
    await asyncio.gather(*(sampler.parse(text) for text in HOSTILE + tiled))
    again = await sampler.parse(whole.text)
    watcher.cancel()
    assert first == again == whole.text and vars(first) == vars(again)
    assert [call["name"] for call in first.tool_calls] == [name for name, _ in whole.calls]
    assert sorted(held)[-5] < 0.3  # 0.04, but others use the CPUs


@pytest.mark.usefixtures("warm_parsers")
def test_a_turn_is_parsed_once_for_the_tools_and_the_template_of_its_row(named):
    tokenizer = load_tokenizer(named(*NEMOTRON))
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}}
    tools = [{"type": "function", "name": "add", "parameters": schema}]  # as rows have them
    call = XML.replace("add>", "add>\n<parameter=n>\n5\n</parameter>")

    def generate(text: str, opening: str, sampling: Sampling) -> Turn:
        engine = Scripted(lambda request: (tokenizer.encode(text), "length"))
        sampler = Sampler(engine, tokenizer, sampling, 0, [], validation=False)
        sampler.render("go", tools)
        (turn,) = asyncio.run(sampler.generate(tokenizer.encode("go" + opening)))
        return turn

    turn = generate(f"I add.</think>{call}", "<think>", Sampling())
    called = {"type": "function_call", "name": "add", "arguments": '{"n": 5}'}
    assert turn.judged is turn.parsed and turn.judged == f"<think>I add.</think>{call}"
    assert (turn.judged.reasoning, turn.judged.content) == ("I add.", "")
    assert turn.judged.tool_calls == [called] and not Sample.of([turn]).flaw_T.any()
    silent = Sampling(chat_template_kwargs={"enable_thinking": False})
    assert generate("5", "", silent).judged.content == "5"
    assert generate("5", "", Sampling()).judged.content == "", "a thought that was cut"
    broken = generate(call[:-5], "", silent)
    assert broken.judged.malformed == "tool_call" and (Sample.of([broken]).flaw_T[2:] == 1).all()


@pytest.mark.usefixtures("warm_parsers")
async def test_an_answer_that_takes_too_long_is_malformed_and_the_next_is_read(named, monkeypatch):
    """vLLM joins the characters of arguments that are JSON in quadratic time."""
    monkeypatch.setattr(parsers, "CPU_SECONDS", 0.5)
    model = named("", "kimi_k2", "tags")
    whole = answer("kimi_k2", True, random.Random(0))
    call = "<|tool_calls_section_begin|><|tool_call_begin|>f:0<|tool_call_argument_begin|>"
    slow = f'<think>a</think>{call}{{"a": "{"b" * 10**6}"}}'
    asked = (whole.text, slow, whole.text)
    first, late, next_one = [await parsers.read(text, model, None, {}) for text in asked]
    assert [call["name"] for call in first.tool_calls] == [name for name, _ in whole.calls]
    assert (late, late.reasoning, late.tool_calls) == (slow, "a", []) and late.malformed
    assert len(next_one.tool_calls) == len(whole.calls)


async def test_a_server_that_died_is_started_again(named):
    model = named("", "hermes", "plain")
    before = await parsers.read(CALL, model, None, {})
    old = parsers.server("", "hermes", model).process
    os.killpg(old.pid, signal.SIGKILL)  # the fork as well
    after = await parsers.read(CALL, model, None, {})
    assert vars(after) == vars(before) and before.tool_calls[0]["name"] == "add"
    assert parsers.server("", "hermes", model).process.pid != old.pid
