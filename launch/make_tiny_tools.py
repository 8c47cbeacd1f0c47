"""Creates the model and pairs for configs/tiny_dpo.py: the model calls tools that are not declared.

    python launch/make_tiny_tools.py            does nothing if models/tiny_tools exists
    python launch/make_tiny_tools.py --force    recreates all of it, in two minutes on a laptop

The problems come from launch/make_tiny.py. Half of the rows declare tools that solve them, and ask
for the call. The others declare no tools and ask for the answer.

    user         flip spadix                    (<tools> before it if the row declares tools)
    assistant    <tool_call>{"name": "flip", "arguments": {"text": "spadix"}}</tool_call>
    assistant    s p a d i x <answer>xidaps</answer>

The model imitates a teacher, a program that calls a tool in 45 of 100 rows without tools, and skips
letters now and then. The model's own answers to each row, judged by our environments, are written
as a run writes them, and data_prep.py tool_pairs turns them into preferences.
"""

import itertools
import json
import random
import re
import sys
import time
from pathlib import Path

import tyro

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
import data_prep  # noqa: E402
from envs.questions.exact import extract, is_same  # noqa: E402
from envs.tools import tool_choice  # noqa: E402
from launch import make_tiny, tiny_model  # noqa: E402
from rollout.response import Response  # noqa: E402

PIECES = ["<tools>", "<tool_call>", "</tool_call>", '{"name": "', '", "arguments": {"text": "']
PIECES += ['"}}']
TEMPLATE = "{{ '<tools>' if tools }}" + tiny_model.CHAT_TEMPLATE
AGENT = "toolcall_schema_single_step_tool_use_with_argument_comparison_agent"
CALL = '<tool_call>{{"name": "{}", "arguments": {{"text": "{}"}}}}</tool_call>'
WRITTEN = re.compile(r'<tool_call>{"name": "(\w+)", "arguments": ({"text": "\w*"})}</tool_call>')
PARAMETERS = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
TOOLS = [
    {"type": "function", "name": name, "parameters": PARAMETERS} for name in ("flip", "up", "down")
]
HALLUCINATED = 0.45  # share of calls among the teacher's answers to rows without tools
SLIP = 0.07  # share of an answer's items that are skipped
COPY_SLIP = 0.05  # share of a call's letters that are skipped
FILES = {"train": (1024, 8), "validation": (256, 4)}  # rows, and answers to each


def tool_row(entry):
    """Makes a row with tools; the right answer is the call that solves the problem."""
    name, *items = make_tiny.prompt_text(entry).split()
    call = {"name": name, "arguments": json.dumps({"text": "".join(items)})}
    row = make_tiny.nemo_gym_row(entry)
    row["responses_create_params"]["tools"] = TOOLS
    row["agent_ref"] = row["agent_ref"] | {"name": AGENT}
    return row | {"expected_action": {"type": "function_call"} | call}


def rows_of(stream):
    """Yields rows without tools and with tools in turn, each with a different problem."""
    for entry in stream:
        yield make_tiny.nemo_gym_row(entry)
        yield tool_row(next(stream))


def prompt_of(row, tokenizer):
    """Renders the row's prompt as the policy sees it."""
    asked = row["responses_create_params"]
    return tokenizer.apply_chat_template(
        asked["input"], tools=asked.get("tools"), add_generation_prompt=True, tokenize=False
    )


def demonstration(row, rng):
    """Returns the teacher's answer."""
    if "expected_action" not in row and rng.random() > HALLUCINATED:
        return make_tiny.response_text(row, rng, SLIP)
    name, *items = make_tiny.prompt_text(row).split()
    copied = "".join(c for c in "".join(items) if rng.random() > COPY_SLIP)
    return CALL.format(name, copied)


def reward(row, text):
    """Returns an answer's reward in the row's environment."""
    calls = [
        {"type": "function_call", "name": name, "arguments": arguments}
        for name, arguments in WRITTEN.findall(text)
    ]
    if "expected_action" in row:
        return tool_choice.verify(row, Response(text, tool_calls=calls)).value
    return float(is_same(extract(text), row["answer"]))


def answers(model, tokenizer, rows, samples):
    """Yields the model's answers, as lines of rollouts.jsonl."""
    prompts = [prompt_of(row, tokenizer) for row in rows]
    texts = []
    for start in range(0, len(rows), 128):
        texts += tiny_model.sample(model, tokenizer, prompts[start : start + 128], samples, 48)
    for i, text in enumerate(texts):
        row, prompt = rows[i // samples], prompts[i // samples]
        name = row["agent_ref"]["name"]
        place = {"row": i // samples + 1, "env": name, "dataset": row["dataset"]}
        fields = {"prompt": prompt, "response": [text], "reward": reward(row, text)}
        yield place | fields | {"finish_reason": "stop"}


def main(force: bool = False, seed: int = 0, root: Path = ROOT):
    model_dir, data_dir = root / "models" / "tiny_tools", root / "data" / "tiny_tools"
    # The model is written last.
    if (model_dir / "model.safetensors").exists() and not force:
        return print("tiny_tools: models/tiny_tools already exists (--force recreates it)")

    print("tiny_tools: creating a model and pairs, which takes two minutes", flush=True)
    start, rng = time.monotonic(), random.Random(seed)
    tiny_model.prepare(seed)
    held_out = list(itertools.islice(make_tiny.problem_stream(seed + 1, ()), 256))
    stream = make_tiny.problem_stream(seed, {entry["question"] for entry in held_out})
    sources = {"validation": rows_of(iter(held_out)), "train": rows_of(stream)}
    rows = {name: list(itertools.islice(sources[name], FILES[name][0])) for name in FILES}

    tokenizer = tiny_model.make_tokenizer([*tiny_model.TAGS, *PIECES], template=TEMPLATE)
    model = tiny_model.make_model(tokenizer)
    taught = (
        (prompt_of(row, tokenizer), demonstration(row, rng) + "<eos>") for row in rows_of(stream)
    )
    tiny_model.imitate(model, tokenizer, taught, steps=400, batch=64, lr=3e-3)
    for name, (_, samples) in FILES.items():
        paths = [data_dir / f"{name}{kind}.jsonl" for kind in ("", "_rollouts", "_pairs")]
        tiny_model.write_rows(paths[0], rows[name])
        tiny_model.write_rows(paths[1], answers(model, tokenizer, rows[name], samples))
        data_prep.main(["tool_pairs", *map(str, paths)])
    tiny_model.save(model, tokenizer, model_dir)
    print(f"tiny_tools: {model.num_parameters():,} parameters, {time.monotonic() - start:.0f} s")
    return None


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
