"""Multiple choice: known answers, real rows, every grading mode, and answers nobody should pay."""

import asyncio
import random
import re
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envs.questions import letters, mcqa
from support.data import in_both
from support.examples import tries
from support.tables import gives, refused
from support.verifiers import HOSTILE, gym_rows, known_answers

TEXTS = ["a red fox", "a blue whale", "a green frog", "an owl"]
PLAIN = dict(zip("ABCD", TEXTS, strict=True))
OPTIONS = [{letter: text} for letter, text in PLAIN.items()]
STRICT, LENIENT, COLON, MARKDOWN = mcqa.MODES


def row(mode: str = STRICT, answer: str = "B", **fields) -> dict:
    return {"options": OPTIONS, "expected_answer": answer, "grading_mode": mode} | fields


def reward(text: str, of: dict) -> float:
    return asyncio.run(mcqa.verify(of, text)).value


def test_known_answers():
    known = [k for k in known_answers("mcqa", "mcqa") if "options" in k.row]
    assert len(known) >= 17
    for of, response, expected, case in known:
        of["grading_mode"] = (case.get("config") or {}).get("grading_mode") or of["grading_mode"]
        mcqa.check(of)
        assert reward(response, of) == expected, case


@in_both
def test_real_rows(place):
    for of in gym_rows("mcqa", place=place) + gym_rows("mcqa_regex", place=place):
        mcqa.check(of)
        answer = of["expected_answer"]
        other = "A" if answer != "A" else "B"
        assert reward("", of) == reward("I do not know.", of) == 0
        for letter in (answer, other):
            said = f"Option Selected: {letter}\nAnswer: \\boxed{{{letter}}}\nFinal Answer: {letter}"
            assert reward(said, of) == (letter == answer), of["template_metadata"]


test_grading_modes = gives(
    lambda mode, text: mcqa.choice(text, PLAIN, mode, ""),
    (STRICT, r"\boxed{B}", "B"),
    (STRICT, r"\boxed{A} no, \boxed{ (B) }", "B"),
    (STRICT, r"\boxed{\text{\text{ B }}}", "B"),
    (STRICT, r"\boxed{B: a blue whale}", "B"),
    (STRICT, r"\boxed{B. x}", "B"),
    (STRICT, r"\boxed{b}", None),
    (STRICT, r"\boxed{E}", None),
    (STRICT, r"\boxed{AB}", None),
    (STRICT, r"\boxed{a blue whale}", None),
    (STRICT, r"\boxed{B", None),
    (STRICT, "B. So {x}}", None),
    (LENIENT, r"\fbox{\text{a blue whale}}", None),
    (LENIENT, r"\boxed{it is A Blue  whale}", "B"),
    (LENIENT, r"\boxed{a blue whale or an owl}", None),
    (LENIENT, "a blue whale", None),
    (COLON, "Answer: b", "B"),
    (COLON, "ANSWER :  A blue  whale", "B"),
    (COLON, "Answer: A\nAnswer: B", "A"),
    (COLON, "Answer: B because", None),
    (MARKDOWN, "**Answer:** B because of C", "B"),
    (MARKDOWN, "Answer: the right one is B", "B"),
    (MARKDOWN, "Answer: A, B", None),
    (MARKDOWN, "Answer: A/B", None),
    (MARKDOWN, "Answer: \uff22", "B"),
    (MARKDOWN, "Answer: \u0628", "B"),
    (MARKDOWN, "Answer: B\nAnswer: A or B", "B"),
    (MARKDOWN, r"\boxed{B}", None),
)


def test_a_row_may_have_a_prefix_of_its_own():
    of = row(MARKDOWN, template_metadata={"answer_prefix": "Final choice ="})
    assert reward("Answer: A\nfinal choice = B", of) == 1
    assert reward("Answer: A", of) == 0
    assert reward(r"\boxed{B}", of) == 1


def test_the_regexes_of_a_row_come_first():
    of = row(template_metadata={"output_regex": [r"Pick (\w+)", r"Take ([a-z ]+)\."]})
    assert reward("Pick A. Pick b", of) == reward("Take a blue whale.", of) == 1
    assert reward(r"Pick Z. \boxed{B}", of) == 0  # a letter is trusted, in the options or not
    assert reward(r"Pick them. \boxed{B}", of) == 1
    assert reward("Pick A", row(answer="A", options=None, **{k: of[k] for k in of if "meta" in k}))


def test_a_regex_that_takes_for_ever_costs_its_answer(monkeypatch):
    monkeypatch.setattr(mcqa, "DEADLINE", 1.0)
    of = row(template_metadata={"output_regex": r"(a+)+(B)"})
    assert reward("aaB", of) == 0 and reward("a" * 40, of) == 0


def spoiled(rng: random.Random, mode: str) -> str:
    """A wrong answer that is near the right one."""
    wrong = rng.choice("ACD")
    form = r"\boxed{%s}" if mode in (STRICT, LENIENT) else "Answer: %s"
    wrongs = [
        form % wrong,
        form % "B" + "\n" + form % wrong if mode != COLON else form % wrong + form % "B",
        form % " or ".join(rng.sample("ABCD", 4)),
        form % "/".join("ABCD"),
        form % PLAIN[wrong],
        form % rng.choice(("E", "Z", "", "?", "BB", "1", "none", "all of them")),
        "It is B, a blue whale.",
        "Which animal? " + " ".join(f"{k}: {v}" for k, v in PLAIN.items()),
        form.replace("Answer", "Anser").replace("boxed", "bxed") % "B",
    ]
    return rng.choice(wrongs)


@pytest.mark.parametrize("mode", mcqa.MODES)
def test_wrong_answers_earn_nothing(mode):
    rng = random.Random(0)
    for text in (spoiled(rng, mode) for _ in range(1000)):
        assert mcqa.choice(text, PLAIN, mode, "") != "B", text


@pytest.mark.parametrize("mode", mcqa.MODES)
def test_hostile_answers(mode):
    for text in [*HOSTILE, "\\text{" * 10**5 + "}" * 10**5, "Answer: " * 10**5, "A or " * 10**5]:
        assert mcqa.choice(text, PLAIN, mode, "") != "B"


def test_the_event_loop_reads_no_answer(monkeypatch):
    """1 MB of them takes seconds."""
    threads = []
    monkeypatch.setattr(mcqa, "choice", lambda *_: threads.append(threading.current_thread()))
    assert reward("\\boxed{B}", row()) == 0
    assert threads and threading.main_thread() not in threads


@given(st.text(st.sampled_from("AB{}\\boxed text answer:*\n")))
@settings(max_examples=tries(2500))  # in four modes
def test_any_text_is_judged(text):
    for mode in mcqa.MODES:
        assert mcqa.choice(text, PLAIN, mode, "") in ("A", "B", "C", "D", None)


@given(st.text(st.sampled_from("ab{}\\\\text \n")))
@settings(max_examples=500)
def test_wrappers_are_taken_off_as_the_pattern_says(text):
    expected = text
    while found := re.fullmatch(r"\\text\{\s*(.*?)\s*\}", expected, re.DOTALL):
        expected = found[1]
    assert letters.unwrapped(text) == expected


test_bad_rows = refused(
    lambda fields: mcqa.check(row(**fields) if "grading_mode" not in fields else row() | fields),
    ({"options": "A"}, "options is 'A', expected a list"),
    ({"options": [{"A": 5}]}, r"options\[0\] is {'A': 5}, expected an object"),
    ({"expected_answer": None}, "expected_answer is missing"),
    ({"expected_answer": "AB"}, "expected_answer is 'AB', expected a letter"),
    ({"expected_answer": "E"}, "expected_answer is 'E', expected one of the options A, B, C"),
    ({"options": [{"A": "x", "B": None}]}, "expected_answer is 'B', expected one of the .* A$"),
    ({"options": None}, "expected_answer is 'B', expected one of the options"),
    ({"grading_mode": "loose"}, "grading_mode is 'loose', expected one of: strict"),
    ({"template_metadata": []}, r"template_metadata is \[\], expected"),
    ({"template_metadata": {"output_regex": 5}}, "template_metadata.output_regex is 5"),
    ({"template_metadata": {"output_regex": ["(", "x"]}}, r"output_regex is '\(', expected a"),
    ({"template_metadata": {"answer_prefix": 1}}, "template_metadata.answer_prefix is 1"),
)
