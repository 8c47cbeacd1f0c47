"""Measures how often models call a tool that was not given to them, and how often they are right.

    python bench/tool_hallucination.py models/tiny_tools runs/NAME/step_000160/hf ...

Each model answers the validation rows of launch/make_tiny_tools.py eight times, at temperature 1.
Half of the rows declare no tools: a call there is a hallucination, and wrong.
"""

import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from launch.make_tiny_tools import answers  # noqa: E402

SAMPLES = 8


def measured(folder, rows):
    """Returns shares: hallucinated, right, right without tools, right with tools."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    torch.manual_seed(0)
    said = list(answers(model, tokenizer, rows, SAMPLES))
    halves = [[line for line in said if (line["row"] - 1) % 2 == half] for half in (0, 1)]
    calls = ["<tool_call>" in line["response"][0] for line in halves[0]]
    right = [
        sum(line["reward"] for line in lines) / len(lines) for lines in (said, halves[0], halves[1])
    ]
    return [sum(calls) / len(calls), *right]


def main():
    rows = [json.loads(line) for line in (ROOT / "data/tiny_tools/validation.jsonl").open()]
    names = ("hallucinated", "right", "no tools", "with tools")
    print("".join(f"{name:>14}" for name in names), "model")
    for folder in sys.argv[1:]:
        print("".join(f"{share:14.3f}" for share in measured(folder, rows)), folder, flush=True)


if __name__ == "__main__":
    main()
