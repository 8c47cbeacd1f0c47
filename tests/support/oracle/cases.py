"""The answers that tests/oracle.py has judged twice: of reviews, NeMo-Gym's, known, and spoiled."""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from support.data import HERE, SHARED
from support.oracle import findings
from support.oracle.changed_answers import spoiled
from support.oracle.replays import REPLAYS

SPOILED = 200
INPUT = {"responses_create_params": {"input": [{"role": "user", "content": "?"}]}}
TOOLS = "single_step_tool_use_with_argument_comparison"
HARNESS, TERMINUS = "terminal_multi_harness", "terminus_judge"
CODE = ("code_edge", "code_function", "code_gen_gym")
IFEVAL = ("ifeval", "instruction_following_gym")
Answer = tuple[str, list[dict]]  # a text, and the calls beside it


class Environment(NamedTuple):
    """An agent of ours, and the server of NeMo-Gym that judges the same rows."""

    agent: str
    server: str
    config: str = ""  # the file of its settings, by default of its name
    known: tuple[str, ...] = ()  # files of known answers


class Case(NamedTuple):
    """An answer to a row."""

    source: str
    row: dict[str, Any]
    text: str
    calls: list[dict]
    replies: list[str] = []  # what a judge says in turn
    config: dict[str, Any] = {}  # settings of NeMo-Gym's server other than the released ones
    group: list[str] = []  # answers that it is compared with, itself too


ENVIRONMENTS = {
    "math": Environment("math", "math_with_judge", known=("math",)),
    "mcqa": Environment("mcqa", "mcqa", known=("mcqa",)),
    "reasoning_gym": Environment("reasoning_gym", "reasoning_gym", known=("reasoning_gym",)),
    "calendar": Environment("calendar", "calendar", known=("calendar",)),
    "structured_outputs": Environment(
        *["structured_outputs"] * 2, "structured_outputs_v4", ("structured_outputs",)
    ),
    "instruction_following": Environment(*["instruction_following"] * 2, known=IFEVAL),
    "code": Environment("code_gen", "code_gen", known=CODE),
    "workplace": Environment(*["workplace_assistant"] * 2, known=("workplace_assistant",)),
    "tool_choice": Environment(TOOLS, TOOLS, known=("single_step_tool_use",)),
    "tool_choice, search": Environment("search_pivot", TOOLS, f"search_pivot_{TOOLS}"),
    "tool_choice, swe": Environment(
        f"swe_pivot_{TOOLS}_agent", TOOLS, f"swe_pivot_{TOOLS}", ("single_step_tool_use",)
    ),
    "swe_pivot": Environment("swe_pivot", "swe_pivot", known=("swe_pivot",)),
    "terminal, calls": Environment(HARNESS, HARNESS, f"{HARNESS}_codex", (HARNESS,)),
    "terminal, keys": Environment(TERMINUS, TERMINUS, f"{TERMINUS}_string_only", (TERMINUS,)),
    "equivalence": Environment(*["equivalence_llm_judge"] * 2),
    "lc_judge": Environment("lc_judge", "equivalence_llm_judge", "lc_judge"),
    "nl2bash": Environment("nl2bash", "equivalence_llm_judge", "nl2bash-equivalency"),
    "multichallenge": Environment(*["multichallenge"] * 2),
    "inverse_if": Environment(*["inverse_if"] * 2),
    "safety, harmful": Environment(
        *["jailbreak_detection"] * 2, "jailbreak_detection_nemotron_combined_reward_tp8"
    ),
    "safety, harmless": Environment(*["over_refusal_detection"] * 2),
    "genrm": Environment(*["genrm_compare"] * 2),
    "conversation": Environment(*["conversational_tool_use_simulation"] * 2),
}
RECORDED = ", recorded"  # behind a name: what judges said in rollouts and unit tests
ENVIRONMENTS |= {f"{name}{RECORDED}": ENVIRONMENTS.pop(name) for name in ("genrm", "conversation")}
ENVIRONMENTS |= {f"{name}{RECORDED}": ENVIRONMENTS[name] for name in findings.REPLIES}


def lines(path: Path) -> list[dict]:
    """The rows of a file; some of NeMo-Gym's hold placeholders, which are none."""
    text = path.read_text(encoding="utf-8")
    return [json.loads(line) for line in text.split("\n") if line.startswith('{"')]


def cases(name: str, gym: Path) -> Iterator[Case]:
    """All cases of an environment; `gym` is the folder with resources_servers."""
    if name.endswith(RECORDED):
        yield from replayed(name.removesuffix(RECORDED))
        yield from rollouts(name, gym)
        return
    given = [*of_reviews(name), *of_gym(name, gym), *known(name)]
    if replies := findings.REPLIES.get(name):
        given = [case._replace(replies=said * 50) for case in given for said in replies]
    yield from given
    dice = random.Random(0)
    for i in range(SPOILED if given else 0):
        case = dice.choice(given)
        text, calls = spoiled(case.text, case.calls, dice)
        yield case._replace(source=f"spoiled {i} of {case.source}", text=text, calls=calls)


def of_reviews(name: str) -> Iterator[Case]:
    """Right answers that earned nothing, and wrong ones that are paid."""
    for i, (fields, *answers) in enumerate(findings.FOUND.get(name, [])):
        for answer in answers:
            text, calls = answer if isinstance(answer, tuple) else (answer, [])
            yield Case(f"review {i}", INPUT | fields, text, calls)


def of_gym(name: str, gym: Path) -> Iterator[Case]:
    """NeMo-Gym's example rows with a right answer, a wrong one and those of its own rollouts."""
    folder = gym / "resources_servers" / ENVIRONMENTS[name].server / "data"
    rows = {}
    for path in sorted(folder.glob("*example*.jsonl")):
        if path.stem.endswith("_prepare") or "rollouts" in path.stem:
            continue
        for i, row in enumerate(lines(path)):
            rows[asked(row)] = row
            source = f"{path.name}:{i + 1}"
            for text, calls in ((right(name, row)), *findings.WRONG):
                yield Case(source, row, text, calls)
    for path in sorted(folder.glob("*rollouts*.jsonl")):
        for i, made in enumerate(lines(path)):
            if "response" in made and (row := rows.get(asked(made))):
                yield Case(f"{path.name}:{i + 1}", row, *said(made["response"]["output"]))


def replayed(name: str) -> Iterator[Case]:
    """The replies of judges in tests/support/oracle/replays.py."""
    for i, replay in enumerate(REPLAYS.get(name, [])):
        group = replay.answers if len(replay.answers) > 1 else []
        for answer in replay.answers:
            told = (replay.replies, replay.config, group)
            yield Case(f"replay {i}", INPUT | replay.row, answer, [], *told)


def rollouts(name: str, gym: Path) -> Iterator[Case]:
    """NeMo-Gym's example rollouts with what its judge said in them."""
    folder = gym / "resources_servers" / ENVIRONMENTS[name].server / "data"
    rows = {
        asked(row): row
        for path in sorted(folder.glob("*example*.jsonl"))
        for row in ([] if path.stem.endswith("_prepare") else lines(path))
        if "rollouts" not in path.stem
    }
    for path in sorted(folder.glob("*rollouts*.jsonl")) if is_first(name) else ():
        for i, made in enumerate(lines(path)):
            told = [e["response"]["output"] for e in made.get("judge_evaluations", [])]
            replies = [said(output)[0] for output in told]
            replies += [e["judge_response"] for e in made.get("rubric_evaluations", [])]
            if replies and (row := rows.get(asked(made))):
                text, calls = said(made["response"]["output"])
                config = {"check_twice_swap": len(replies) > 1} if told else {}
                yield Case(f"{path.name}:{i + 1}", row, text, calls, replies, config)


def is_first(name: str) -> bool:
    """Whether an environment is the first of its server, whose rollouts are its own."""
    server = ENVIRONMENTS[name].server
    names = [other for other, of in ENVIRONMENTS.items() if of.server == server]
    return names[0] == name.removesuffix(RECORDED)


def known(name: str) -> Iterator[Case]:
    """Known answers of ../shared/data, or, without it, the part that is in tests/data."""
    for file in ENVIRONMENTS[name].known:
        path = SHARED / f"known_answers/{file}.jsonl"
        if not path.is_file():
            print(f"{name}: of {path.name} only the part in tests/data: ../shared/data is absent")
            path = HERE / f"known_answers/{file}.jsonl"
        for i, case in enumerate(lines(path)):
            row = INPUT | case.get("metadata", {})
            if prompt := case.get("prompt"):
                row["responses_create_params"] = {"input": prompt}
            row = filled(name, row, case)
            calls = [item for item in case.get("output", []) if item["type"] == "function_call"]
            calls = [{key: call[key] for key in ("name", "arguments")} for call in calls]
            yield Case(f"{file}:{i + 1}", row, case["response"], calls)


def filled(name: str, row: dict, case: dict) -> dict:
    """A row of a known answer, with the fields that its file keeps elsewhere."""
    if name == "math":
        return row | {"question": "?", "expected_answer": case["reference"]}
    if name == "reasoning_gym":
        own = {"answer": case["reference"], "metadata": case["metadata"]}
        return row | {"question": case["question"]} | own
    if name == "code" and "unit_tests" in row:
        return row | {"verifier_metadata": {"unit_tests": row["unit_tests"]}}
    if name == "instruction_following":
        return {"id": 1, "prompt": "?"} | row | row.get("verifier_metadata", {})
    if name == "workplace":
        return {"id": 1, "category": "", "environment_name": ""} | row
    mode = (case.get("config") or {}).get("grading_mode")
    return row | ({"grading_mode": mode} if mode else {})


def asked(row: dict) -> str:
    """What tells rows apart."""
    prompt = row["responses_create_params"]["input"]
    return prompt if isinstance(prompt, str) else json.dumps([m.get("content") for m in prompt])


def said(output: list[dict]) -> Answer:
    """Text and calls of a response."""
    parts = [part for item in output if item["type"] == "message" for part in item["content"]]
    calls = [item for item in output if item["type"] == "function_call"]
    text = "".join(part.get("text", "") for part in parts)
    return text, [{key: call[key] for key in ("name", "arguments")} for call in calls]


def right(name: str, row: dict) -> Answer:
    """An answer that should earn 1, or that tries to."""
    if name == "calendar":
        events = row["exp_cal_state"].items()
        made = [{"event_id": i, "start_time": e["min_time"]} | e for i, e in events]
        return json.dumps(made), []
    if name == "workplace":
        return "", row["ground_truth"]
    if action := row.get("expected_action"):
        calls = action.get("calls") or [action]
        is_call = action["type"] != "message"
        return (
            ("", [{k: c[k] for k in ("name", "arguments")} for c in calls])
            if is_call
            else (action["content"], [])
        )
    if name == "structured_outputs":
        return structured(row)
    if name == "terminal, keys":
        return row["expected_answer"], []
    answer = row.get("expected_answer") or row.get("answer") or "An answer."
    return (
        f"<think>Hm.</think>Answer: {answer}\nSo <answer>{answer}</answer> \\boxed{{{answer}}}",
        [],
    )


def structured(row: dict) -> Answer:
    """The least data that a row's schema allows, in its format."""
    data = least(json.loads(row["schema_str"]))
    if row.get("response_mode") == "tool_call":
        data = {row["tool_payload_key"]: data} if row.get("tool_payload_key") else data
        return "", [{"name": row.get("tool_name") or "f", "arguments": json.dumps(data)}]
    is_yaml = row.get("schema_type") == "yaml"
    return yaml.safe_dump(data) if is_yaml else json.dumps(data), []


def least(schema: dict) -> Any:
    """A value that a schema allows."""
    for key in ("const", "default"):
        if key in schema:
            return schema[key]
    for key in ("enum", "examples"):
        if schema.get(key):
            return schema[key][0]
    for key in ("anyOf", "oneOf", "allOf"):
        if schema.get(key):
            return least(schema[key][0])
    kind = schema.get("type", "object")
    kind = kind[0] if isinstance(kind, list) else kind
    if kind == "object":
        return {key: least(value) for key, value in schema.get("properties", {}).items()}
    if kind == "array":
        return [least(schema.get("items", {}))] * max(1, schema.get("minItems", 1))
    text = "2024-01-01" if "date" in str(schema.get("format")) else "a" * schema.get("minLength", 3)
    number = schema.get("minimum", 1)
    return {"integer": number, "number": number, "boolean": True, "null": None}.get(kind, text)
