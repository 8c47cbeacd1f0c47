"""GSM8K as NeMo-Gym rows: `python launch/make_gsm8k.py FOLDER` -> data/gsm8k/{train,test}.jsonl.

FOLDER holds train.jsonl and test.jsonl as released in github.com/openai/grade-school-math:
one {"question", "answer"} a line, the number after `####`.
"""

import json
import sys
from pathlib import Path

# The wording of NeMo-Gym's math rows.
PROMPT = (
    "Solve the following math problem. Make sure to put the answer (and only answer) inside "
    "\\boxed{{}}.\n\n{question}"
)


def gym_row(row: dict) -> dict:
    """The row that envs/math.py verifies."""
    message = {"role": "user", "content": PROMPT.format(question=row["question"])}
    return {
        "responses_create_params": {"input": [message]},
        "agent_ref": {"type": "responses_api_agents", "name": "math_with_judge_simple_agent"},
        "question": row["question"],
        "expected_answer": row["answer"].split("####")[-1].strip().replace(",", ""),
    }


def convert(source: Path, target: Path) -> int:
    """Rewrites one file; returns its number of rows."""
    rows = [gym_row(json.loads(line)) for line in source.read_text().splitlines()]
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return len(rows)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python launch/make_gsm8k.py FOLDER   (with train.jsonl and test.jsonl)")
    for name in ("train.jsonl", "test.jsonl"):
        target = Path("data/gsm8k") / name
        print(f"{target}: {convert(Path(sys.argv[1]) / name, target)} rows")
