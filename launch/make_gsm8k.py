"""Converts mathematics to NeMo-Gym rows, from files with one problem per line.

    python launch/make_gsm8k.py FOLDER                            data/gsm8k/{train,test}.jsonl
    python launch/make_gsm8k.py OUT gsm8k=A.jsonl math=B.jsonl    one file from several

FOLDER holds train.jsonl and test.jsonl as released in github.com/openai/grade-school-math:
{"question", "answer"}, with the number after `####`. A blend takes such files and files like MATH:
{"problem", "answer"}, with `answer` or `expected_answer`. Each file keeps its order and is spread
evenly over the whole. The name before `=` becomes the `dataset` of the file's rows, by which the
metrics are split.
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from core.outputs import output_file  # noqa: E402

# The wording of NeMo-Gym's math rows.
PROMPT = (
    "Solve the following math problem. Make sure to put the answer (and only answer) inside "
    "\\boxed{{}}.\n\n{question}"
)
QUESTIONS = ("question", "problem")
ANSWERS = ("expected_answer", "answer")


def field(row: dict, names: tuple[str, str]) -> str:
    """Returns the first field among these names. Raises ValueError if it is missing or not text."""
    found = next((row[name] for name in names if name in row), None)
    if not isinstance(found, str) or not found.strip():
        raise ValueError(f"{' or '.join(names)} is {found!r}, expected a text with content")
    return found


def gym_row(row: dict) -> dict:
    """Makes the row that envs/maths/math.py verifies. Raises ValueError naming a missing field."""
    question = field(row, QUESTIONS)
    answer = field(row, ANSWERS)
    if "####" in answer:  # GSM8K: a solution, then a number such as 1,200
        answer = field({"answer": answer.split("####")[-1].replace(",", "")}, ANSWERS)
    message = {"role": "user", "content": PROMPT.format(question=question)}
    return {
        "responses_create_params": {"input": [message]},
        "agent_ref": {"type": "responses_api_agents", "name": "math_with_judge_simple_agent"},
        "question": question,
        "expected_answer": answer.strip(),
    }


def read(source: str | Path, target: Path) -> list[dict]:
    """Reads the rows of one file. Raises ValueError naming the file and line if a row is bad.

    Also raises ValueError if writing the target would destroy the file.
    """
    if target.exists() and target.samefile(source):
        raise ValueError(f"{target} would be both read and written, expected two files")
    rows = []
    with open(source, encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if line.isspace():
                continue
            try:
                rows.append(gym_row(json.loads(line)))
            except (ValueError, TypeError) as error:
                raise ValueError(f"{source}:{number}: {error}") from None
    if not rows:
        raise ValueError(f"{source}: holds no rows, expected at least one")
    return rows


def write(rows: list[dict], target: Path) -> int:
    """Writes rows as JSON lines; returns their number.

    Raises InputError if the place of the target is taken by anything but a file.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    output_file(target).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return len(rows)


def convert(source: Path, target: Path) -> int:
    """Rewrites one file; returns its number of rows."""
    return write(read(source, target), target)


def blend(parts: list[str], target: Path) -> int:
    """Writes one file from several, given as NAME=FILE; returns its number of rows."""
    placed = []
    for part in parts:
        name, _, source = part.partition("=")
        if not name or not source:
            raise ValueError(f"{part!r}: expected NAME=FILE, such as math=train.jsonl")
        rows = read(source, target)
        placed += [((i + 0.5) / len(rows), row | {"dataset": name}) for i, row in enumerate(rows)]
    return write([row for _, row in sorted(placed, key=lambda place: place[0])], target)


def main(arguments: list[str]) -> None:
    """Makes GSM8K's two files, or a blend. Raises OSError or ValueError for unreadable files."""
    first = Path(arguments[0])
    if len(arguments) > 1:
        print(f"{first}: {blend(arguments[1:], first)} rows")
        return
    for name in ("train.jsonl", "test.jsonl"):
        target = Path("data/gsm8k") / name
        print(f"{target}: {convert(first / name, target)} rows")


if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    try:
        main(sys.argv[1:])
    except (OSError, ValueError) as error:
        sys.exit(str(error))
