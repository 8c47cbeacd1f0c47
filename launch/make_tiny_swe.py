"""Creates the model, image and rows for configs/tiny_swe.py: the model repairs three small bugs.

    python launch/make_tiny_swe.py            does nothing if models/tiny_swe exists
    python launch/make_tiny_swe.py --force    recreates all of it, in a minute on a laptop

The image is a folder with bash, git and a repository of four scripts (launch/tiny_image.py), three
of which call a wrong function. An episode is a command, and a word after its output:

    user         repair add
    assistant    a call of the tool bash: sed -i s/minus/plus/ add.py
    user         [no output]
    assistant    done

The model imitates a teacher, a program that knows the file and the wrong function, and guesses the
right one. So one in three answers is right, and reinforcement learning must find out which.
"""

import itertools
import random
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import tyro

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from core.outputs import output_folder  # noqa: E402
from launch import tiny_image, tiny_model  # noqa: E402


def command(name: str, guess: str) -> str:
    """Returns the command that replaces the wrong function with another."""
    return f"sed -i s/{tiny_image.BUGS[name][0]}/{guess}/ {name}.py"


GUESSES = ("plus", "minus", "times")
OPEN, CLOSE = '<tool_call>{"name": "bash", "arguments": {"command": "', '"}}</tool_call>'
PIECES = ["<tool_call>", "</tool_call>", '{"name": "bash", "arguments": {"command": "', '"}}']
PIECES += [command(name, guess) for name in tiny_image.BUGS for guess in GUESSES]  # one token each
# The calls in earlier answers are rendered too; the next message begins where they end.
TEMPLATE = (
    "{% for m in messages %}{{ '<assistant>' if m.role == 'assistant' else '<user>' }}"
    "{{ m.content }}{% for call in m.tool_calls or [] %}"
    "<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "{{ '<eos>' if m.role == 'assistant' }}{% endfor %}"
    "{{ '<assistant>' if add_generation_prompt }}"
)
TRAIN_ROWS = 3072  # the three bugs in turn
SHOWN = "[no output]"  # the result of a command that prints nothing


def tiny_row(row: dict, name: str) -> dict:
    """Returns a bug's row with a prompt that the tiny model can read, and the one tool."""
    params = {"input": [{"role": "user", "content": f"repair {name}"}], "tools": []}
    return row | {"responses_create_params": params, "harness": "bash", "dataset": name}


def demonstrations(rng: random.Random) -> Iterator[list[str]]:
    """Yields conversations: prompts and the teacher's answers, in turn."""
    while True:
        name = rng.choice(list(tiny_image.BUGS))
        call = OPEN + command(name, rng.choice(GUESSES)) + CLOSE
        yield [
            f"<user>repair {name}<assistant>",
            f"{call}<eos>",
            f"<user>{SHOWN}<assistant>",
            "done<eos>",
        ]


def main(force: bool = False, seed: int = 0, root: Path = ROOT):
    model_dir = root / "models" / "tiny_swe"
    data_dir = output_folder(root / "data" / "tiny_swe")
    # The model is written last.
    if (model_dir / "model.safetensors").exists() and not force:
        return print("tiny_swe: models/tiny_swe already exists (--force recreates it)")

    print("tiny_swe: creating a model, an image and its bugs, which takes a minute", flush=True)
    start = time.monotonic()
    shutil.rmtree(data_dir, ignore_errors=True)
    bugs = tiny_image.make_bugs(data_dir / "images")
    rows = [tiny_row(row, name) for name, row in bugs.items()]
    tiny_model.write_rows(data_dir / "validation.jsonl", rows)
    tiny_model.write_rows(
        data_dir / "train.jsonl", itertools.islice(itertools.cycle(rows), TRAIN_ROWS)
    )

    tiny_model.prepare(seed)
    tokenizer = tiny_model.make_tokenizer([*tiny_model.TAGS, *PIECES], template=TEMPLATE)
    model = tiny_model.make_model(tokenizer)
    taught = demonstrations(random.Random(seed))
    tiny_model.imitate(model, tokenizer, taught, steps=150, batch=32, lr=4e-3)
    tiny_model.save(model, tokenizer, model_dir)
    print(f"tiny_swe: {model.num_parameters():,} parameters, {time.monotonic() - start:.0f} s")
    return None


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
