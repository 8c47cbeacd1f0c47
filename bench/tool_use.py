r"""A tiny model learns to use a Python interpreter, with the real vLLM, Ray, sandbox and verifier.

    python bench/tool_use.py FOLDER [STEPS]

Makes a model of a million parameters in the folder, in a minute or two, and trains it on sums, in
ten minutes on four cores. It has imitated a careless teacher, who guesses three sums of ten, and of
the others skips a digit in fourteen of what he copies:

    user         312+600
    assistant    <tool_call>{"name": "...", "arguments": {"code": "312+600"}}</tool_call>
    tool         912
    assistant    \boxed{912}

What is left to learn is to ask, and to copy each digit. Prints, for every tenth step, the reward,
how many episodes called the interpreter, and how many of those were right.
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
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from torch.nn.functional import cross_entropy
from transformers import PreTrainedTokenizerFast

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "launch")]
from make_tiny import make_model  # noqa: E402

from envs.maths.python_tool import TOOL  # noqa: E402

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
SLIP, GUESS = 0.07, 0.3  # of digits and of sums
STEPS, BATCH, LR = 500, 64, 3e-3  # of imitation
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


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token for each character, and for what calls and answers begin and end with."""
    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *WORDS, *CHARACTERS])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    core.add_special_tokens(SPECIAL)
    core.add_tokens([AddedToken(word, normalized=False) for word in WORDS])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        additional_special_tokens=SPECIAL[3:],
        clean_up_tokenization_spaces=False,
        chat_template=TEMPLATE,
    )


def sums(seed: int) -> Iterator[tuple[int, int]]:
    """Pairs of numbers of three digits, without end."""
    dice = random.Random(seed)
    while True:
        yield dice.randint(100, 999), dice.randint(100, 999)


def write_rows(path: Path, pairs: Iterator[tuple[int, int]]) -> None:
    """Rows of the environment python_tool."""
    with path.open("w") as file:
        for a, b in pairs:
            prompt = {"input": [{"role": "user", "content": f"{a}+{b}"}], "tools": TOOLS}
            row = {"agent_ref": {"name": "ns_tools_simple_agent"}, "expected_answer": str(a + b)}
            print(json.dumps(row | {"responses_create_params": prompt}), file=file)


def copied(text: str, dice: random.Random) -> str:
    """What the teacher writes when he copies a text."""
    return "".join(c for c in text if not c.isdigit() or dice.random() > SLIP)


def demonstration(a: int, b: int, dice: random.Random) -> list[str]:
    """What is said in turn: by others, by the teacher, by others, and so on."""
    if dice.random() < GUESS:
        return [f"<user>{a}+{b}<assistant>", f"\\boxed{{{dice.randint(200, 1998)}}}<eos>"]
    code = copied(f"{a}+{b}", dice)
    output = str(sum(map(int, code.split("+")))) if re.fullmatch(r"\d+\+\d+", code) else "?"
    call, answer = code.join(CALL) + "<eos>", f"\\boxed{{{copied(output, dice)}}}<eos>"
    return [f"<user>{a}+{b}<assistant>", call, f"<tool>{output}<assistant>", answer]


def imitate(model: torch.nn.Module, tokenizer: PreTrainedTokenizerFast) -> None:
    """Supervised learning of what the teacher says."""
    dice = random.Random(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.99), weight_decay=0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LR, STEPS, pct_start=0.06)
    stream = sums(1)
    for _ in range(STEPS):
        said = [demonstration(a, b, dice) for a, b in itertools.islice(stream, BATCH)]
        parts = [[tokenizer.encode(text) for text in texts] for texts in said]
        longest = max(len(sum(ids, [])) for ids in parts)
        tokens_BT = torch.full((BATCH, longest), tokenizer.pad_token_id)
        target_BT = torch.full((BATCH, longest), -100)
        for row, turns in enumerate(parts):
            end = 0
            for i, ids in enumerate(turns):
                tokens_BT[row, end : end + len(ids)] = torch.tensor(ids)
                if i % 2:
                    target_BT[row, end - 1 : end - 1 + len(ids)] = torch.tensor(ids)
                end += len(ids)
        logits_BTV = model(tokens_BT, use_cache=False).logits
        cross_entropy(logits_BTV.flatten(0, 1), target_BT.flatten()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()


def make(folder: Path) -> None:
    """A model that is careless, and its problems."""
    torch.manual_seed(0)
    torch.set_num_threads(2)
    folder.mkdir(parents=True)
    write_rows(folder / "train.jsonl", itertools.islice(sums(2), 4096))
    write_rows(folder / "validation.jsonl", itertools.islice(sums(3), 64))
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    imitate(model, tokenizer)
    tokenizer.save_pretrained(folder / "model")
    model.save_pretrained(folder / "model")


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
    """Makes what is not there yet, trains, and reports."""
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
