r"""Teaches a tiny model to use a Python interpreter, with the real vLLM, Ray, sandbox and verifier.

    python bench/tool_use.py FOLDER [STEPS]

Creates a model of a million parameters in the folder, in a minute or two, and trains it on sums, in
ten minutes on four cores. The model has imitated a careless teacher, who guesses three sums in ten,
and in the others skips one in fourteen of the digits that it copies:

    user         312+600
    assistant    <tool_call>{"name": "...", "arguments": {"code": "312+600"}}</tool_call>
    tool         912
    assistant    \boxed{912}

What is left to learn is to ask, and to copy each digit. Prints, for every tenth step, the reward,
how many episodes called the interpreter, and how many of these were right.
"""

import itertools
import json
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from envs.maths.python_tool import TOOL  # noqa: E402
from launch import tiny_model  # noqa: E402

CALL = (f'<tool_call>{{"name": "{TOOL}", "arguments": {{"code": "', '"}}</tool_call>')
SPECIAL = ["<pad>", "<eos>", "<unk>", "<user>", "<assistant>", "<tool>"]
WORDS = ["<tool_call>", "</tool_call>", CALL[0][11:], '"}}', "\\boxed{"]
CHARACTERS = "".join(map(chr, range(32, 127))) + "\n"
TEMPLATE = (
    "{% set tags = {'assistant': '<assistant>', 'tool': '<tool>'} %}{% for m in messages %}"
    "{{ tags.get(m.role, '<user>') ~ m.content }}{% for call in m.tool_calls or [] %}<tool_call>"
    "{{ {'name': call.function.name, 'arguments': call.function.arguments}|tojson }}</tool_call>"
    "{% endfor %}{{ '<eos>' if m.role == 'assistant' }}{% endfor %}"
    "{{ '<assistant>' if add_generation_prompt }}"
)
PARAMETERS = {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]}
TOOLS = [{"type": "function", "name": TOOL, "parameters": PARAMETERS}]
SLIP, GUESS = 0.07, 0.3  # share of digits, share of sums
CONFIG = '''"""Sums, with Python at hand."""
from configs.tiny import *

run_dir = "{folder}/run"
model = "{folder}/model"
data = {{"train": "{folder}/train.jsonl", "val": "{folder}/validation.jsonl"}}
steps = {steps}
val_period = 20
services = {{"tool_parser": "hermes"}}
sampling = {{"max_model_len": 128, "max_response_tokens": 32}}
timeouts = {{"start": 180.0, "rollout": 120.0, "train": 120.0, "sync": 60.0}}
'''


def sums(seed: int) -> Iterator[tuple[int, int]]:
    """Yields pairs of three-digit numbers, endlessly."""
    dice = random.Random(seed)
    while True:
        yield dice.randint(100, 999), dice.randint(100, 999)


def write_rows(path: Path, pairs: Iterator[tuple[int, int]]) -> None:
    """Writes rows of the environment python_tool."""
    rows = []
    for a, b in pairs:
        prompt = {"input": [{"role": "user", "content": f"{a}+{b}"}], "tools": TOOLS}
        row = {"agent_ref": {"name": "ns_tools_simple_agent"}, "expected_answer": str(a + b)}
        rows.append(row | {"responses_create_params": prompt})
    tiny_model.write_rows(path, rows)


def copied(text: str, dice: random.Random) -> str:
    """Copies text as the teacher does, with slips."""
    return "".join(c for c in text if not c.isdigit() or dice.random() > SLIP)


def demonstration(a: int, b: int, dice: random.Random) -> list[str]:
    """Returns a conversation: the texts of the others and of the teacher, in turn."""
    if dice.random() < GUESS:
        return [f"<user>{a}+{b}<assistant>", f"\\boxed{{{dice.randint(200, 1998)}}}<eos>"]
    code = copied(f"{a}+{b}", dice)
    output = str(sum(map(int, code.split("+")))) if re.fullmatch(r"\d+\+\d+", code) else "?"
    call, answer = code.join(CALL) + "<eos>", f"\\boxed{{{copied(output, dice)}}}<eos>"
    return [f"<user>{a}+{b}<assistant>", call, f"<tool>{output}<assistant>", answer]


def make(folder: Path) -> None:
    """Creates a careless model, and its problems."""
    torch.manual_seed(0)
    torch.set_num_threads(2)
    folder.mkdir(parents=True)
    write_rows(folder / "train.jsonl", itertools.islice(sums(2), 4096))
    write_rows(folder / "validation.jsonl", itertools.islice(sums(3), 64))
    tokenizer = tiny_model.make_tokenizer(
        WORDS, CHARACTERS, TEMPLATE, SPECIAL, additional_special_tokens=SPECIAL[3:]
    )
    model, dice = tiny_model.make_model(tokenizer), random.Random(0)
    taught = (demonstration(a, b, dice) for a, b in sums(1))
    tiny_model.imitate(model, tokenizer, taught, steps=500, batch=64, lr=3e-3)
    tiny_model.save(model, tokenizer, folder / "model")


def report(folder: Path) -> None:
    """Prints the table."""
    print("step  episodes  reward  called  right of those that called")
    lines = [json.loads(line) for line in (folder / "run/rollouts.jsonl").open()]
    trained = [line for line in lines if line["step"] is not None]
    for step, of_step in itertools.groupby(trained, lambda line: line["step"]):
        if step % 10 not in (0, 1):
            continue
        rewards = [(line["reward"], len(line["response"]) > 1) for line in of_step]
        called = [reward for reward, calls in rewards if calls]
        mean = sum(reward for reward, _ in rewards) / len(rewards)
        right = sum(called) / max(1, len(called))
        share = len(called) / len(rewards)
        print(f"{step:4} {len(rewards):9} {mean:7.3f} {share:7.3f} {right:7.3f}")


def main() -> None:
    """Creates what is missing, trains, and reports."""
    folder = Path(sys.argv[1]).resolve()
    steps = int([*sys.argv, "60"][2])
    if not folder.exists():
        make(folder)
    config = folder / "config.py"
    config.write_text(CONFIG.format(folder=folder, steps=steps))
    command = [sys.executable, str(ROOT / "grpo_async.py"), "--config", str(config)]
    subprocess.run(command, check=True, cwd=ROOT)
    report(folder)


if __name__ == "__main__":
    main()
