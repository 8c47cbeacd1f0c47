"""Citations and layouts: known answers, refused rows, and regexes that never end."""

import asyncio

from hypothesis import given, settings
from hypothesis import strategies as st

from envs import Reward, check_rows, registry
from envs.following import format_verification as formats
from rollout.response import Response
from support.examples import tries
from support.loop import at_once
from support.tables import gives, refused
from support.verifiers import HOSTILE

AGENTS = {"string_match": "citation_format_simple_agent"}
BULLETS = {"type": "regex", "pattern_id": "bullet_dash", "verify_regex": [r"^- .+"]}
BULLETS |= {"verify_min_matches": 3}
CITED = {"type": "string_match", "expected_markers": ["[ref:2]", "[ref:5]"]}
CITED |= {"patterns": [r"\[ref:\d+\]"]}
in_child = formats.make_check()


def row(verifier: dict) -> dict:
    """A row as NeMo-Gym's prepare_data.py writes it."""
    agent = AGENTS.get(verifier.get("type", ""), "freeform_formatting_simple_agent")
    asked = [{"role": "user", "content": "Name three rivers, one a line."}]
    given = {"agent_ref": {"type": "responses_api_agents", "name": agent}, "verifier": verifier}
    return given | {"responses_create_params": {"input": asked}}


def judged(text: str, verifier: dict) -> Reward:
    given = row(verifier)
    check_rows.check_row(given)
    return asyncio.run(registry.verify(given, Response.of(text)))


def value(text: str, verifier: dict, **fields) -> float:
    """The reward by the check of a child, run here."""
    formats.check(row(verifier | fields))
    return in_child(text, verifier | fields)["value"]


test_lines_are_counted = gives(
    value,
    ("- Danube\n- Rhine\n- Elbe", BULLETS, 1.0),
    ("- Danube\n- Rhine", BULLETS, 0.0),
    ("Rivers:\n\n- Danube\n\n- Rhine\nand\n- Elbe\nThat is all.", BULLETS, 1.0),
    ("- Danube - Rhine - Elbe", BULLETS, 0.0),
    ("* Danube\n* Rhine\n* Elbe", BULLETS, 0.0),
    ("-Danube\n-Rhine\n-Elbe", BULLETS, 0.0),
    (" - Danube\n - Rhine\n - Elbe", BULLETS, 0.0),
    ("- \n- \n- ", BULLETS, 0.0),
    ("- Danube\r\n- Rhine\r\n- Elbe", BULLETS, 1.0),
    ("- Danube\u2028- Rhine\x0b- Elbe", BULLETS, 0.0),
    ("- Danube", BULLETS | {"verify_min_matches": None}, 1.0),
    ("- Danube", {"type": "inline_prose", "verify_regex": ["Dan"]}, 1.0),
    ("- Danube", {"type": "inline_prose", "verify_regex": ["^Dan"]}, 0.0),
    # A line that two patterns match is one line, and any of them will do.
    ("1. one\n- two", BULLETS | {"verify_regex": [r"^- ", r"^\d+\.", "o"]}, 0.0),
    ("1. one\n- two\nthree or", BULLETS | {"verify_regex": [r"^- ", r"^\d+\.", "or"]}, 1.0),
)
test_markers_are_found = gives(
    value,
    ("It is old [ref:2], and long [ref:5].", CITED, 1.0),
    ("It is old [ref:5][ref:2] [ref:2].", CITED, 1.0),
    ("It is old [ref:2].", CITED, 0.0),
    ("It is old [ref:2], long [ref:5], wide [ref:3].", CITED, 0.0),
    ("It is old [ref: 2], and long [ref:5].", CITED, 0.0),
    ("It is old [REF:2], and long [ref:5].", CITED, 0.0),
    ("It is old [ref:2], long [ref:5], wide [source:3].", CITED, 1.0),
    ("[ref:2] [ref:5] [ref:3]", CITED | {"patterns": []}, 1.0),
    ("[ref:2] [ref:5] [ref:3]", CITED | {"patterns": None}, 1.0),
    ("[ref:2] [ref:5] [ref:3]", CITED | {"patterns": [r"\[ref:2\]", r"\[ref:5\]"]}, 1.0),
    ("(Part 1) and (Part 3)", CITED | {"expected_markers": ["(Part 1)"],
                                       "patterns": [r"\(Part (\d)\)"]}, 0.0),
    ("It is old.", CITED | {"expected_markers": []}, 1.0),
    ("It is old [ref:1].", CITED | {"expected_markers": []}, 0.0),
    # A match of nothing is no marker.
    ("[ref:2] [ref:5]", CITED | {"patterns": [r"(\[ref:9\])?"]}, 0.0),
)  # fmt: skip


def test_an_answer_is_judged_in_a_child_behind_its_thought():
    assert judged("<think>- a\n- b</think>- c\n- d\n- e", BULLETS) == Reward(1.0, {"lines": 3})
    assert judged("<think>- a\n- b\n- c</think>- d", BULLETS) == Reward(0.0, {"lines": 1})
    found = judged("<think>[ref:5]</think>[ref:2] [ref:1] [ref:1]", CITED)
    assert found == Reward(0.0, {"missing": 1, "other": 2})
    nothing = CITED | {"expected_markers": []}
    assert judged("<think>hm [ref:1]", nothing) == Reward(0.0, {"reason": "truncated"})
    assert judged("<think>hm</think> \n", nothing) == Reward(0.0, {"reason": "empty"})


def test_blanks_in_front_of_the_first_line_are_part_of_the_layout():
    """The text is no question's answer, around which they would not count."""
    indented = BULLETS | {"verify_regex": ["^  - .+"]}
    assert judged("  - Danube\n  - Rhine\n  - Elbe", indented).value == 1
    assert judged("<think>hm</think>\n\n  - Danube\n  - Rhine\n  - Elbe ", indented).value == 1
    assert judged("  - Danube\n  - Rhine\n  - Elbe", BULLETS).value == 0


def test_a_regex_without_an_end_earns_nothing(monkeypatch):
    monkeypatch.setattr(formats, "DEADLINE", 2.0)
    text = "[ref:2] [ref:5]\n" + "a" * 60 + "!"
    assert judged(text, CITED | {"patterns": ["(a+)+b"]}) == Reward(0.0, {"reason": "timeout"})
    assert judged("[ref:2] [ref:5]", CITED).value == 1, "the next one has a child"


def test_any_text_is_judged():
    rows = [row(BULLETS), row(CITED)]
    asked = [(one, Response.of(text)) for one in rows for text in HOSTILE]
    found = at_once(registry.verify(one, response) for one, response in asked)
    assert [reward.value for reward in found] == [0.0] * len(asked)


@given(st.lists(st.sampled_from(["- a", "-", "- ", "\n", " ", "\r", "b", "\x85"])))
@settings(max_examples=tries(500), deadline=None)
def test_a_line_ends_where_a_line_feed_is(parts):
    text = "".join(parts)
    good = [line for line in text.split("\n") if line.startswith("- ") and len(line) > 2]
    assert value(text, BULLETS) == float(len(good) >= 3)


test_bad_rows_are_refused_with_their_field = refused(
    lambda verifier: check_rows.check_row(row(BULLETS) | {"verifier": verifier}),
    (None, "verifier is missing or null, expected an object"),
    ({}, r"verifier.type is missing or null"),
    ({"type": "json"}, r"verifier.type is 'json', expected one of: regex, inline_prose, string"),
    (BULLETS | {"verify_regex": []}, r"verifier.verify_regex is \[\], expected at least one"),
    ({"type": "regex"}, r"verifier.verify_regex is \[\]"),
    (BULLETS | {"verify_regex": "^-"}, r"verifier.verify_regex is '\^-', expected a list"),
    (BULLETS | {"verify_regex": ["a", "("]}, r"verifier.verify_regex\[1\] is '\(', expected a reg"),
    (BULLETS | {"verify_regex": ["a{99999999999}"]}, r"verifier.verify_regex\[0\] is 'a\{9"),
    (BULLETS | {"verify_regex": [""]}, r"verifier.verify_regex\[0\] is '', expected a text"),
    *((BULLETS | {"verify_min_matches": least}, "verify_min_matches is .*expected a whole number")
      for least in (0, -1, 1.5, True, "3")),
    (CITED | {"expected_markers": [], "patterns": []}, r"verifier.expected_markers is \[\], expec"),
    (CITED | {"expected_markers": ["a", ""]}, r"verifier.expected_markers\[1\] is ''"),
    (CITED | {"expected_markers": [7]}, r"verifier.expected_markers\[0\] is 7, expected a text"),
    (CITED | {"patterns": ["["]}, r"verifier.patterns\[0\] is '\[', expected a regular expression"),
    taken=(CITED | {"expected_markers": ["["]},),
)  # fmt: skip
