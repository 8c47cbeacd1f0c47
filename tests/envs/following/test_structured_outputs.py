"""Structured answers: known answers, real rows, answers that are nearly valid, and bombs."""

import asyncio
import json
import random
import re
import tomllib

import pytest
import xmltodict
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from envs.following import structured_outputs as structured
from envs.following.formats import typed
from rollout.response import Response
from support.data import in_both
from support.examples import tries
from support.loop import at_once
from support.scripts import call
from support.tables import gives, refused
from support.verifiers import HOSTILE, Known, gym_rows, json_values, known_answers

FLAT = {"name": {"type": "string", "minLength": 1}, "age": {"type": "integer", "minimum": 0}}
FLAT |= {"score": {"type": "number"}, "active": {"type": "boolean"}}
DEEP = {"tags": {"type": "array", "items": {"type": "string"}, "minItems": 1}}
DEEP |= {"home": {"type": "object", "properties": {"city": {"type": "string"}}}}
PERSON = {"type": "object", "properties": FLAT | DEEP}
GOLD = {"name": "Ann", "age": 3, "score": 9.5, "active": True, "tags": ["a", "b"]}
GOLD |= {"home": {"city": "Ulm"}}
ROW = {"schema_str": json.dumps(PERSON), "schema_type": "json"}
TABLE = {"type": "array", "items": {"type": "object", "properties": FLAT}}
CSV = {"schema_str": json.dumps(TABLE), "schema_type": "csv"}
XML = {"schema_str": json.dumps({"type": "object", "properties": {"root": PERSON}})}
XML |= {"schema_type": "xml"}
in_child = structured.make_check()


def judge(row: dict, text: str) -> float:
    """The reward by the check of a child, run here."""
    kind = row.get("schema_type") or "json"
    coerce = row.get("xml_coerce_types") is not False
    key = row.get("tool_payload_key") or ""
    return in_child(row["schema_str"], kind, key, coerce, text)["value"]


def verify(row: dict, response: str) -> float:
    return asyncio.run(structured.verify(row, response)).value


def filled(known: Known) -> dict:
    """The row of a known answer, its schema from the example rows where the answer has none."""
    row = known.row | known.case.get("config", {})
    if "schema_str" not in row:
        asked = known.case["prompt"][-1]["content"]
        rows = gym_rows("structured_outputs")
        (example,) = [
            r for r in rows if r["responses_create_params"]["input"][-1]["content"] == asked
        ]
        row |= {key: example[key] for key in ("schema_str", "schema_type")}
    return row


@in_both
def test_known_answers(place):
    for answer in known_answers("structured_outputs", "structured_outputs", 2, place):
        row = filled(answer)
        structured.check(row)
        assert verify(row, answer.response) == answer.reward, answer.case


def example(schema: dict) -> object:
    """Data that is valid against a schema such as those of the example rows."""
    if "enum" in schema:
        return schema["enum"][0]
    match schema.get("type", "object"):
        case "object":
            return {key: example(value) for key, value in schema.get("properties", {}).items()}
        case "array":
            return [example(schema["items"])] * schema.get("minItems", 1)
        case "string":
            words = ("2024", "12345", "2024-05-10", "+15551234567", "12:30", "word", "word " * 20)
            fits = [w for w in words if re.search(schema.get("pattern", ""), w)]
            return next(w for w in fits if len(w) >= schema.get("minLength", 1))
        case "boolean":
            return True
    exclusive = "exclusiveMinimum" in schema
    return schema.get("minimum", 0) + 1 if exclusive else schema.get("minimum", 1)


@in_both
def test_real_rows(place):
    for row in gym_rows("structured_outputs", place=place):
        structured.check(row)
        assert structured.needs(row) == ()
        assert verify(row, "") == verify(row, "I cannot do that.") == verify(row, "{}") == 0
        gold = example(json.loads(row["schema_str"]))
        assert verify(row, json.dumps(gold)) == 1
        assert verify(row, json.dumps(gold | {"more": 1})) == 0
        del gold[next(iter(gold))]
        assert verify(row, json.dumps(gold)) == 0


def test_the_formats():
    assert verify(ROW, f"<think>hm</think>\n\n{json.dumps(GOLD)}\n") == 1
    assert verify(ROW | {"schema_type": None}, json.dumps(GOLD)) == 1
    assert verify(ROW | {"schema_type": "yaml"}, yaml.dump(GOLD)) == 1
    assert verify(XML, xmltodict.unparse({"root": GOLD})) == 1
    assert verify(XML | {"xml_coerce_types": False}, xmltodict.unparse({"root": GOLD})) == 0
    toml = 'name="Ann"\nage=3\nscore=9.5\nactive=true\ntags=["a"]\n[home]\ncity="Ulm"'
    assert tomllib.loads(toml)["home"]
    assert verify(ROW | {"schema_type": "toml"}, toml) == 1
    assert verify(CSV, "name,age,score,active\nAnn,3,9.5,true\nBob,4,1e3,0\n") == 1


@pytest.mark.parametrize("text", [
    "name,age,score,active",  # NeMo-Gym pays a table without rows, and any other line
    "I cannot do that.",
    "name,age,score,active\nAnn,3,9.5",
    "name,age,score,active\nAnn,3,9.5,true,1",
    "name,age,score\nAnn,3,9.5",
    "name,age,score,active\nAnn,3,nan,true",
    "name,age,score,active\nAnn,1_000,9.5,true",
    "name,age,score,active\nAnn,,9.5,true",
    "```csv\nname,age,score,active\nAnn,3,9.5,true\n```",
])  # fmt: skip
def test_csv_that_is_not_paid(text):
    assert judge(CSV, text) == 0


test_texts_become_what_the_schema_says = gives(
    typed,
    ({"a": "7"}, {"type": "object", "properties": {"a": {"type": "integer"}}}, {"a": 7}),
    ({"item": ["1", "2"]}, {"type": "array", "items": {"type": "integer"}}, [1, 2]),
    ({"item": "1"}, {"type": "array", "items": {"type": "integer"}}, [1]),
    (None, {"type": "array"}, []),
    (None, {"type": ["array", "null"]}, None),
    (None, {"type": "string"}, ""),
    (None, {"type": "integer"}, None),
    ("", {"type": ["integer", "null"]}, None),
    ("7", {"type": ["integer", "null"]}, 7),
    ("7", {"type": ["string", "integer"]}, "7"),
    ("TRUE", {"type": "boolean"}, True),
    ("+.5e1", {"type": "number"}, 5.0),
    ("inf", {"type": "number"}, "inf"),
    ("٣", {"type": "integer"}, "٣"),
    ("9" * 5000, {"type": "integer"}, "9" * 5000),
    ("7", True, "7"),
    ({"a": "7"}, {"type": "object", "properties": {"a": True}}, {"a": "7"}),
)


def test_a_tool_call():
    row = ROW | {"response_mode": "tool_call", "tool_name": "save", "tool_payload_key": "data"}
    structured.check(row)
    assert [need.name for need in structured.needs(row)] == ["tool_parser"]
    good = call("save", {"data": GOLD})
    assert verify(row, Response("", tool_calls=[good])) == 1
    assert verify(row, Response("Here it is.", tool_calls=[good])) == 1
    assert verify(row | {"tool_name": None}, Response("", tool_calls=[good | {"name": "x"}])) == 1
    assert verify(row | {"tool_payload_key": None}, Response("", tool_calls=[good])) == 0
    wrong = [[], [good, good], [good | {"name": "Save"}], [good | {"arguments": "{"}]]
    wrong += [[good | {"arguments": "[" * 10**5}], [call("save", GOLD)], [call("save", [GOLD])]]
    wrong += [[call("save", {"data": GOLD | {"age": "3"}})], [{"type": "function_call"}]]
    for calls in wrong:
        assert verify(row, Response(json.dumps(GOLD), tool_calls=calls)) == 0, calls
    assert verify(row, json.dumps(GOLD)) == 0


def test_the_schema_is_tightened():
    """All properties are needed and no others, but not inside lists of schemas."""
    loose = {"type": "object", "properties": {"a": {"anyOf": [{"properties": {"b": {}}}]}}}
    row = {"schema_str": json.dumps(loose)}
    assert judge(row, '{"a": {"c": 1}}') == 1
    assert judge(row, "{}") == judge(row, '{"a": 1, "b": 2}') == 0
    named = {"type": "object", "properties": {"properties": {"type": "string"}}}
    structured.check({"schema_str": json.dumps(named)})
    assert judge({"schema_str": json.dumps(named)}, '{"properties": "x"}') == 1


def changed(rng: random.Random) -> str:
    """The right answer with one fault."""
    data = json.loads(json.dumps(GOLD))
    key = rng.choice(list(GOLD))
    match rng.randrange(9):
        case 0:
            del data[key]
        case 1:
            data[key + rng.choice("sx_ ")] = 1
        case 2:
            data[key.upper()] = data.pop(key)
        case 3:
            data[key] = rng.choice((None, {}, [1], [[]]))
        case 4:
            data["age"] = rng.choice((-1, "3", 3.5, True, None))
        case 5:
            data["home"] |= {"zip": 1}
        case 6:
            junk = rng.choice(("x", "```", "{}", "]", "I hope this helps.", "# Document"))
            return json.dumps(GOLD) + "\n" + junk
        case 7:
            return rng.choice(("```json\n%s\n```", "Here: %s", "[%s]", '"%s"')) % json.dumps(GOLD)
        case 8:
            return rng.choice((ROW["schema_str"], "{}", "[]", "null", "NaN", json.dumps(PERSON)))
    return json.dumps(data)


def test_wrong_answers_earn_nothing():
    """A thousand changes of a right one. Other values that fit the schema are a known leak."""
    rng = random.Random(0)
    for _ in range(1000):
        text = changed(rng)
        assert judge(ROW, text) == 0, text
    assert judge(ROW, json.dumps(GOLD | {"name": "Zoe", "age": 4})) == 1


@pytest.mark.parametrize("kind", structured.TYPES)
@pytest.mark.parametrize("text", HOSTILE, ids=lambda text: repr(text[:8]))
def test_hostile_answers(kind, text):
    assert judge(ROW | {"schema_type": kind}, text[:20_000]) == 0


def test_bombs_end_at_the_deadline(monkeypatch):
    """Entities, aliases, patterns that backtrack, and a megabyte of YAML: none hangs or pays."""
    monkeypatch.setattr(structured, "DEADLINE", 1.0)
    any_object = {"schema_str": json.dumps({"type": "object", "uniqueItems": True})}
    deep = {"type": "object", "additionalProperties": {"$ref": "#"}}
    walked = {"schema_str": json.dumps({"items": {"$ref": "#"}, "maxItems": 9})}
    walked |= {"schema_type": "yaml"}
    slow = {"schema_str": json.dumps({"type": "string", "pattern": "^(a+)+$"})}
    entities = "".join(f'<!ENTITY e{i + 1} "{f"&e{i};" * 9}">' for i in range(9))
    laughs = "- &a0 [x]\n" + "".join(f"- &a{i + 1} [{f'*a{i}, ' * 9}]\n" for i in range(8))
    bombs = [
        (XML, f'<!DOCTYPE x [<!ENTITY e0 "ha">{entities}]><x>&e9;</x>'),
        (XML, '<!DOCTYPE x [<!ENTITY e SYSTEM "file:///etc/passwd">]><x>&e;</x>'),
        (walked, laughs),
        (walked, "&a [*a]"),
        (slow, json.dumps("a" * 64 + "!")),
        ({"schema_str": json.dumps(deep)}, '{"a":' * 10**5),
        (any_object | {"schema_type": "yaml"}, "- a\n" * 250_000),
        (any_object, "1e" + "9" * 10**6),
        (any_object, "\ud800\x00"),
    ]
    rewards = at_once(structured.verify(row, text) for row, text in bombs)
    assert [reward.value for reward in rewards] == [0] * len(bombs)


def test_no_schema_is_fetched():
    row = {"schema_str": json.dumps({"$ref": "http://127.0.0.1:1/schema.json"})}
    for judges in (structured.check, lambda row: verify(row, "{}")):
        with pytest.raises(ValueError, match="cannot resolve .ref http://127.0.0.1:1/schema.json"):
            judges(row)


@given(st.sampled_from(structured.TYPES), st.text())
@settings(max_examples=tries(5000))
def test_any_text_is_judged(kind, text):
    assert judge(ROW | {"schema_type": kind}, text) == 0


KEYS = st.sampled_from(list(GOLD))


@given(json_values(st.text() | KEYS), KEYS)
@settings(max_examples=tries(2500))  # two cases each
def test_any_json_is_judged(data, key):
    assert judge(ROW, json.dumps(data)) == 0
    assert judge(ROW, json.dumps(GOLD | {key: data})) in (0, 1)


def test_references_are_looked_up_when_rows_are_read():
    """What only looks like one is none."""
    tree = {"properties": {"$ref": {"$ref": "#/$defs/a"}}, "$defs": {"a": {"$ref": "#"}}}
    for schema in (tree, {"const": {"$ref": "x"}}, {"$id": "http://a", "$ref": "#/$defs"}, True):
        structured.check(ROW | {"schema_str": json.dumps(schema)})


test_bad_rows = refused(
    lambda change: structured.check(ROW | change),
    ({"schema_str": None}, "schema_str is missing or null, expected a JSON schema"),
    ({"schema_str": PERSON}, "schema_str is {.*}, expected a JSON schema as text"),
    ({"schema_str": "{"}, "schema_str is '{', expected a JSON schema .*: Expecting"),
    ({"schema_str": "[" * 10**5}, "schema_str is .*expected a JSON schema"),
    ({"schema_str": '{"type": "text"}'}, "schema_str is .*'text' is not valid"),
    ({"schema_str": '{"pattern": "("}'}, "schema_str is .*is not a 'regex'"),
    ({"schema_str": '{"items": {"$ref": "#/$defs/a"}}'}, "cannot resolve .ref #/.defs/a"),
    ({"schema_str": '{"$ref": "http://a/b"}'}, "schema_str is .*cannot resolve .ref http://a/b"),
    ({"schema_type": "html"}, "schema_type is 'html', expected one of: json, yaml"),
    ({"response_mode": "tool"}, "response_mode is 'tool', expected text or tool_call"),
    ({"tool_name": 5}, "tool_name is 5, expected a text or null"),
    ({"tool_payload_key": []}, r"tool_payload_key is \[\], expected a text or null"),
    ({"xml_coerce_types": "yes"}, "xml_coerce_types is 'yes', expected true or false"),
)
