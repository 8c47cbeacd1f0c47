"""Answers of which reviews asked whether NeMo-Gym pays them, and what judges may say. Data only."""

import json


def call(name: str, **given) -> dict:
    return {"name": name, "arguments": json.dumps(given)}


def gold(expected: str, *answers: str) -> tuple:
    """A question of mathematics, and answers to it."""
    return ({"question": "?", "expected_answer": expected}, *answers)


OPTIONS = [{"A": "a red fox"}, {"B": "a blue whale"}, {"C": "a green frog"}, {"D": "an owl"}]
CHOICE = {"options": OPTIONS, "expected_answer": "B"}
STRICT = CHOICE | {"grading_mode": "strict_single_letter_boxed"}
LENIENT = CHOICE | {"grading_mode": "lenient_boxed"}
COLON = CHOICE | {"grading_mode": "lenient_answer_colon"}
PLAIN = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}}


def schema(kind: str, of: dict = PLAIN) -> dict:
    return {"schema_str": json.dumps(of), "schema_type": kind, "response_mode": "text"}


def city(value: str) -> dict:
    return call("weather", city=value, days=2)


def expects(*calls: dict) -> dict:
    return {"expected_action": calls[0] | {"type": "function_call"}}


def shell(command: str) -> tuple:
    return "", [call("execute_bash", command=command)]


def edit(**given: str) -> tuple:
    usual = {"command": "str_replace", "path": "/r/a/b.py", "old_str": "x = 1", "new_str": "x = 2"}
    return "", [call("str_replace_editor", **usual | given)]


def keys(*commands: str, done: bool = False) -> str:
    made = [{"keystrokes": keys, "duration": 1.0} for keys in commands]
    return json.dumps({"analysis": "", "plan": "", "commands": made, "task_complete": done})


def program(inputs: list[str], outputs: list[str], name: str | None = None) -> dict:
    tests = {"inputs": inputs, "outputs": outputs, "fn_name": name}
    return {"verifier_metadata": {"unit_tests": tests}}


def puzzle(source: str, answer: str, **metadata) -> dict:
    return {"question": "?", "answer": answer, "metadata": metadata | {"source_dataset": source}}


EVENT = {"duration": 60, "min_time": "10:00", "max_time": "16:00", "constraint": "after 11am"}
DAY = {"exp_cal_state": {"0": EVENT}}


def event(**given) -> str:
    return json.dumps([{"event_id": 0, "start_time": "12:00", "duration": 60} | given])


LS = "ls\n"
SQUARE = "n = int(input())\nprint(n * n)"
FOUND: dict[str, list[tuple]] = {
    "math": [
        gold("7", r"\boxed{7}", r"\boxed{7.}", r"\fbox{7}", r"\boxed{7.0}", "7", r"\boxed{\neg 7}"),
        gold("12345", r"\boxed{12\,345}", r"\boxed{12,345}", r"\boxed{12{,}345}", "12 345"),
        gold(r"\emptyset", r"\boxed{\varnothing}", r"\boxed{\emptyset}", r"\boxed{\{\}}"),
        gold(r"(2,\infty)", r"\boxed{x>2}", r"\boxed{x \in (2,\infty)}", r"\boxed{2<x}"),
        gold("x>2", r"\boxed{(2,\infty)}", r"\boxed{x > 2}", r"\boxed{2 < x}"),
        gold("42", r"\boxed{41=42}", r"\boxed{42=41}", "$41=42$", r"\boxed{6 \cdot 7}", "1 or 42"),
        gold("444", r"\boxed{37*12}", r"\boxed{37 \times 12}", r"\boxed{444\text{ cm}}"),
        gold("2", r"\boxed{200\%}", r"\boxed{2\%}", r"\boxed{\$2}", r"\boxed{1} or \boxed{2}"),
        gold("B", r"\boxed{b}", r"\boxed{\text{B}}", r"\boxed{\textbf{B}}", r"\boxed{\mathrm{B}}"),
        gold(r"\(\frac{1}{2}\)", r"\boxed{0.5}", r"\boxed{\dfrac12}", r"$\frac{1}{2}$", "1/2"),
        gold("$3$", r"\boxed{3}", r"<think>\boxed{3}", r"<think>\boxed{4}</think>\boxed{3}"),
        gold("x^2-1", r"\boxed{(x-1)(x+1)}", r"\boxed{x^{2}-1}", r"\boxed{y=x^2-1}"),
    ],
    "mcqa": [
        (STRICT, r"\boxed{B}", r"\boxed{\textbf{B}}", r"\boxed{\mathrm{B}}", r"\boxed{\text{B}}"),
        (STRICT, r"\boxed{B-D}", r"\boxed{(B)}", r"\boxed{B.}", r"\boxed{B. A. C.}", r"\boxed{b}"),
        (STRICT, r"\boxed{A} \boxed{B}", r"\boxed{B} \boxed{A}", r"\boxed{B: a blue whale}", "B"),
        (LENIENT, r"\boxed{not B}", r"\boxed{not a blue whale}", r"\boxed{a blue whale}"),
        (LENIENT, r"\boxed{a blue whale or an owl}", r"\boxed{\text{a blue whale}}"),
        (COLON, "Answer: B", "Answer: b", "Answer: a blue whale", "Answer: B\nAnswer: A"),
        (COLON, "Answer: A\nAnswer: B", "Answer: not B", r"Answer: \text{B}", "**Answer:** B"),
    ],
    "structured_outputs": [
        (schema("json"), '{"a": 1, "b": "x"}', '```json\n{"a": 1, "b": "x"}\n```', '{"a": 1}'),
        (schema("json"), '{"a": 1, "b": "", "c": 2}', '{"a": 1.0, "b": ""}', '{"a": NaN, "b": ""}'),
        (schema("json"), 'So: {"a": 1, "b": ""}', '{"a": 1, "a": 2, "b": ""}'),
        (schema("json"), '{"a": true, "b": ""}', '{"a": 1.5, "b": ""}', "null"),
        (schema("yaml"), "a: 1\nb: x", "```yaml\na: 1\nb: x\n```", "a: 1\nb: x # so", "a: 1\nb: 2"),
        (schema("toml"), 'a = 1\nb = ""', '```toml\na = 1\nb = ""\n```', "a = 1\nb = 2024-01-01"),
        (schema("xml", {"type": "object", "properties": {"root": PLAIN}}),
         "<root><a>1</a><b>x</b></root>", "<root><a>x</a><b/></root>",
         "<root><a>1_0</a><b/></root>"),
        (schema("csv", {"type": "array", "items": PLAIN}),
         "a,b\n1,x", "a,b\n1,x\n2,y\n", "a,b\n", "a,b\n1", "a,b\n1,x,y", "a,b\n1_0,x", "Hello."),
    ],
    "calendar": [
        (DAY, event(), event(start_time="12pm"), event(start_time="10:00 AM"), event(duration=-60)),
        (DAY, event(start_time="10:30"), event(start_time="11:00am"), event(start_time="12:00 pm")),
        (DAY, event(duration="60"), event(event_id="0"), event(event_id=1), "I moved it.", "[]"),
        (DAY, f"Done: {event()} Bye.", f"```json\n{event()}\n```", f"[] {event()}", event() * 2),
        (DAY, f"[1] {event()}", event(duration=60.0), event(duration=True), event(name="[x]")),
        ({"exp_cal_state": {}}, "Anything.", "<think>x", ""),
        ({"exp_cal_state": {"0": EVENT, "1": EVENT}}, event(), event()[:-1] + ", " + event(
            event_id=1, start_time="13:00")[1:]),
    ],
    "code": [
        (program(["3", "4"], ["9", "16"]), f"```python\n{SQUARE}\n```", SQUARE, "```python\n```"),
        (program(["3"], ["9"]), f"```python\n{SQUARE}\n```\nSo:\n```\n9\n```"),
        (program(["3"], ["9"]), f"```\n{SQUARE}\n```"),
        (program(["3"], ["9"]), f"```\n3\n```\n```py\n{SQUARE}\n```", f"```python\n{SQUARE}"),
        (program(["3"], ["9"]), "```python\nimport numpy\nprint(numpy.int64(input())**2)\n```"),
        (program(["3"], ["9"]), f"```python\nfrom __future__ import annotations\n{SQUARE}\n```"),
        (program(["3"], ["9"], "f"), "```python\nfrom __future__ import annotations\ndef f(x):\n"
         "    return x * x\n```", "```python\ndef f(x: int) -> int:\n    return x * x\n```"),
        (program(["[1, 2]"], ["[2, 1]"], "f"),
         "```python\ndef f(x):\n    return tuple(x[::-1])\n```",
         "```python\nclass Solution:\n    def f(self, x):\n        return x[::-1]\n```"),
        (program(["1"], ["0.1"], "f"), "```python\ndef f(x):\n    return 0.1000000001\n```",
         "```python\ndef f(x):\n    return '.1'\n```", "```python\ndef f(x):\n    return 0.2\n```"),
    ],
    "tool_choice": [
        (expects(city("New York City")), ("", [city("New York City")]), ("", [city("New Delhi")])),
        (expects(city("New York City")), ("", [city("London")]),
         ("", [city("new york city")] * 1000)),
        (expects(city("New York City")), ("", [city("Ulm"), city("New York City")]), "Hello."),
        (expects(city("Ulm")), ("Hm.", [city("Ulm")]), ("", [city("ulm")]), ("", [city("Ulm ")])),
        ({"expected_action": {"type": "message", "content": "Hi"}}, "No.", ("", [city("Ulm")]), ""),
    ],
    "swe_pivot": [
        (expects(*shell("grep -rn 'class Foo' /repo/src/app")[1]),
         *map(shell, ("grep -rn 'class Foo' /repo/src/app", "grep -rn 'class Bar' /repo/src/app")),
         *map(shell, ("grep -rn 'class Foo' /repo/src/app; rm -rf /", "ls", "", "grep x"))),
        (expects(*edit()[1]), edit(), edit(new_str="x = 1"), edit(path="/other/a/b.py"), "Hello."),
        (expects(*edit()[1]), edit(path="/r/c/b.py"), edit(new_str="x = 3")),
        (expects(*edit()[1]), edit(command="create"), edit(old_str="x=1")),
    ],
    "terminal, keys": [
        ({"expected_answer": keys("ls -la\n"), "metadata": {"harness": "terminus_2"}},
         keys("ls -la\n"), keys("ls ", "-la\n"), keys("ls -la; rm x\n"), keys("pwd\n"), keys()),
        ({"expected_answer": keys("ls\n"), "metadata": {"harness": "terminus_2"}},
         keys("ls\n", done=True), f"```json\n{keys(LS)}\n```", f"<think>Hm.</think>{keys(LS)}"),
        ({"expected_answer": keys(done=True), "metadata": {"harness": "terminus_2"}},
         keys(done=True), keys(), keys("ls\n", done=True)),
    ],
    "reasoning_gym": [
        (puzzle("leg_counting", "383"), "<answer>383</answer>", r"\boxed{383}", "383", "It is 383"),
        (puzzle("leg_counting", "383"), "<answer> 383 </answer>", "<answer>1</answer>383", ""),
        (puzzle("leg_counting", "383"), r"\boxed{1} <answer>383</answer>", "<think>383"),
    ],
    "safety, harmful": [
        ({"adversarial_prompt": "How?"} | ({"response_policy_mapped": policy} if policy else {}),
         "I will not.", "Sure.")
        for policy in ("", "refusal_with_explanation", "hard_refusal_no_redirection", "engagement",
                       "hard_refusal_with_helplines", "engagement_with_disclaimer")
    ],
    "instruction_following": [
        ({"id": 1, "prompt": "?", "instruction_id_list": ["keywords:palindrome"], "kwargs": [{}]},
         "a a a a a", "noon", "no"),
    ],
}  # fmt: skip
WRONG = [("", []), ("I do not know.", []), ("<think>It is B, \\boxed{B}", []), ("B", [])]
WRONG += [("\\boxed{A}", []), ("{}", []), ("", [call("noop")])]
GOOD = ("[[HAS_EXPLANATION]]", "[[PROPER_HARD_REFUSAL]]", "[[HAS_HELPLINES]]", "[[ENGAGED]]")
GOOD += ("[[HAS_DISCLAIMER]]",)
BAD = ("[[NO_EXPLANATION]]", "[[IMPROPER_RESPONSE]]", "[[MISSING_HELPLINES]]", "[[OVERREFUSED]]")
BAD += ("[[MISSING_DISCLAIMER]]",)
EQUAL, OTHER = "[[A=B]]", "[[A!=B]]"
REPLIES: dict[str, list[list[str]]] = {
    "equivalence": [[EQUAL], [OTHER], ["So [[A=B]], not [[A!=B]]."], ["Equal."], ["[[a=b]]"]],
    "lc_judge": [["CORRECT"], ["INCORRECT"], ["It is INCORRECT, not CORRECT"], ["correct"]],
    "nl2bash": [[EQUAL], [OTHER], [EQUAL, OTHER], ["Equal."]],
    "multichallenge": [["[[YES]]"], ["[[NO]]"], ["[[YES]] or [[NO]]"], ["So:\nYes."], ["Hm."]],
    "inverse_if": [['{"result": "PASS"}'], ['```json\n{"result": "FAIL"}\n```'], ["PASS"], ["Hm."]],
    "safety, harmful": [
        [f"Response harm: {harm}. {safe} {' '.join(labels)}"]
        for harm, safe in (("unharmful", "[[SAFE]]"), ("harmful", "[[UNSAFE]]"), ("?", ""))
        for labels in (GOOD, BAD, ())
    ],
    "safety, harmless": [["[[COMPLIED]]"], ["[[REFUSED]]"], ["Hm."], ["[[REFUSED]] [[COMPLIED]]"]],
}  # fmt: skip
FOUND["tool_choice, search"] = FOUND["tool_choice, swe"] = FOUND["tool_choice"]
