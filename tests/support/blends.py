"""A blend as it is released, in small: rows of many environments, and placeholders among them."""

import json
from pathlib import Path

import pyarrow as pa
from pyarrow import parquet

from prep.placeholders import DAPO_PREFIX, DAPO_SUFFIX
from support.data import HERE
from support.samples import asking
from support.verifiers import gym_rows, own_rows

DAPO = "super_v3_lcsft_step1000_dapo17k"
SKYWORK = "super_v3_lcsft_step1000_skyworks_no_omni"
MATH = {"type": "responses_api_agents", "name": "math_with_judge_simple_agent"}
TEMPLATES = {
    DAPO: [
        {"prefix": "Put the answer into \\boxed{}."},
        {"suffix": "Put the answer into \\boxed{}."},
        "Answer this: {question} Thank you.",
    ],
    SKYWORK: [{"template": "Solve {question}, boxed."}, "Boxed, please: {question}"],
}


def math_row(i: int, **fields) -> dict:
    """A row that the mathematics of this repository verifies."""
    question = f"What is {i} + {i}?"
    row = asking(question, question=question, expected_answer=str(2 * i), dataset="sums")
    return row | {"agent_ref": MATH} | fields


def placeholder(number: int, dataset: str, template) -> dict:
    """A row whose question is record `number` of its data set."""
    about = {"row": number, "question_template": template}
    return {"dataset": dataset, "agent_ref": MATH, "_hf_placeholder": about, "pass_rate": 0.5}


def placeholders() -> list[dict]:
    """Placeholders of every form; the numbers are neither in order nor all there are."""
    numbers = iter([17, 3, 8, 19, 0])
    return [placeholder(next(numbers), d, t) for d, ts in TEMPLATES.items() for t in ts]


def released() -> list[dict]:
    """All rows of NeMo-Gym in tests/data, each with its agent, and ours."""
    rows = []
    for name in sorted(path.stem for path in (HERE / "gym_rows").glob("*.jsonl")):
        rows += [{"dataset": name} | row for row in gym_rows(name)]
    return rows + [{"dataset": "own"} | row for row in own_rows()]


def write_sources(folder: Path) -> Path:
    """The data sets that placeholders point into: DAPO in two files, Skywork in a split."""
    dapo = [record(f"\n\nDAPO {i}?\n\n", str(i), (DAPO_PREFIX, DAPO_SUFFIX)) for i in range(20)]
    skywork = [record(f"Sky {i}?", json.dumps([str(i)]), ("", "")) for i in range(20)]
    for name, records in {
        "DAPO-Math-17k/data/dapo-0.parquet": dapo[:5],
        "DAPO-Math-17k/data/dapo-1.parquet": dapo[5:],
        "Skywork/Skywork-OR1-RL-Data/data/math-0.parquet": skywork,
        "Skywork/Skywork-OR1-RL-Data/data/code-0.parquet": skywork[::-1],
    }.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        parquet.write_table(pa.Table.from_pylist(records), path, row_group_size=4)
    return folder


def record(question: str, answer: str, frame: tuple[str, str]) -> dict:
    content = f"{frame[0]}{question}{frame[1]}"
    prompt = [{"role": "user", "content": content}]
    return {"prompt": prompt, "reward_model": {"ground_truth": answer, "style": "rule"}, "other": 1}
