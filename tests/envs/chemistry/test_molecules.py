"""Numbers of molecules: every format, every kind of property, refused rows, and their episodes."""

import asyncio
import random
import re
import time

import pytest

from core.errors import ModuleError
from envs import check_rows, services
from envs.chemistry import answer_format, molecules, rdkit_check
from envs.chemistry.answer_format import FORMATS
from envs.maths.python_tool import TOOL
from envs.sandbox import sandbox
from rollout.response import Response
from settings.environment_services import Services
from support.scripts import Script, calling
from support.skills import as_sandbox
from support.tables import gives, refused
from support.verifiers import HOSTILE

contained = pytest.mark.skipif(bool(sandbox.problem()), reason=sandbox.problem())
TOOLS = [{"type": "function", "name": TOOL}]
ROW = {"agent_ref": {"name": "rdkit_chemistry_agent"}, "property_type": "count"}
ROW |= {"responses_create_params": {"input": "How many atoms has C(CO)O?"}, "expected_answer": "4"}
WITH_TOOL = ROW | {"responses_create_params": ROW["responses_create_params"] | {"tools": TOOLS}}
# How a prompt of each format may ask for the answer 4.
SAID = ["((4))", "(Answer: 4)", "Final answer: (4)", "Answer is [4]", "[Answer: 4]", "[[4]]"]
SAID += ["Correct Answer: [4]", "\\boxed{4}", "\\boxed{4}", "{{4}}", "Answer Value: {4}", "<<4>>"]
SAID += ["<<4>>", "<4>", "<Answer: 4>", "<final_answer>4</final_answer>", "Final Answer: ||4||"]
SAID += ["The answer is: |4|", "**Answer: 4**", "**Final answer is: 4**", "Answer: *4*"]
SAID += ["## Answer: 4 ##", "ANSWER IS 4", "Response: 4", "Final Answer -> 4", "Final value is: 4"]
SAID += ["Correct Answer >> 4", "Answer Value: 4", "Final Answer = 4", "Correct answer is 4"]
SAID += ["Final Answer: 4"]


def reward(answer: str, **fields: object) -> float:
    return molecules.verify(ROW | fields, answer).value


@pytest.mark.parametrize(("form", "said"), [*zip(FORMATS, SAID, strict=True)])
def test_each_format_holds_a_number_and_no_other_text_does(form, said):
    of = {"answer_format": form}
    assert reward(f"7 or so.\n{said}\nis it", **of) == 1 == reward(said.replace("4", " 4.0 "), **of)
    assert reward(said.replace("4", "5"), **of) == reward("4", **of) == reward("4 " * 9, **of) == 0
    # The last one counts, also where it is no number.
    assert reward(f"{said.replace('4', '5')}\n{said}", **of) == 1
    assert reward(f"{said}\n{said.replace('4', 'five')}", **of) == 0
    others = [other for other in set(SAID) - {said} if not reward(other, **of)]
    assert len(others) >= 26  # "Answer: *4*" is in "Final Answer: *4*", and such


def test_a_row_without_a_format_asks_for_a_box_or_for_parentheses():
    assert [reward(said, use_box_format=True) for said in SAID[:8]] == [0] * 7 + [1]
    assert reward("((4))") == reward("((4))", use_box_format=None, answer_format=None) == 1
    assert reward("((4)) \\boxed{5}", use_box_format=True, answer_format="fmt_00") == 1


NUMBERS = (
    ("4", 4.0), (" -1.5\n", -1.5), ("1.5e-3", 0.0015), ("1_0", 10.0), ("\u0663", 3.0), (".5", 0.5),
    ("about 12.5 g/mol", 12.5), ("3 or 4", 4.0), ("not 4", 4.0), ("C10H-2", -2.0), ("1/2", 2.0),
    ("4,000", 0.0), ("10^3", 3.0), ("9e", 9.0), ("five", None), ("", None), ("-", None),
    ("1e999", float("inf")), ("\x1cinf", float("inf")),
)  # fmt: skip
test_the_number_in_an_answer = gives(answer_format.number_in, *NUMBERS)
test_what_the_last_marks_hold = gives(
    lambda form, text: answer_format.marked(text, FORMATS[form]),
    ("fmt_00", "((4)) (())", ""),
    ("fmt_00", "((((4)))", "((4"),
    ("fmt_00", "((4)) ((5", "4"),
    ("fmt_05", "[[]]", ""),
    ("fmt_05", "[[4]] [[]]", "4"),
    ("fmt_05", "[[]] 4]]", "]] 4"),
    ("fmt_05", "[[[4]]]", "[4"),
    ("fmt_07", "\\boxed{4} boxed{5}", "4"),
    ("fmt_08", "\\boxed{4} boxed{5}", "4"),
    ("fmt_01", "(Answer: 4) (Answer:  )", ""),
    ("fmt_01", "(Answer: 4) (Answer:)", "4"),
    ("fmt_01", "(Answer: ) 4)", ") 4"),
    ("fmt_15", "<final_answer>\n4\n</final_answer>", "4\n"),
    ("fmt_15", "<final_answer>4</final_answer> <final_answer>5", "4"),
    ("fmt_22", "ANSWER IS\n\n 4 \n5", "4 "),
    ("fmt_22", "ANSWER IS 4\nANSWER IS", "4"),
    ("fmt_27", "Answer Value: none\n4", "none"),
    ("fmt_24", "Final Answer\n->\n4", "4"),
)


@pytest.mark.parametrize("form", FORMATS)
def test_the_last_marks_are_those_that_a_regex_finds(form):
    """Texts of marks alone, against the regex that NeMo-Gym's server has for the format."""
    opening, closing, least = FORMATS[form]
    inner = "(.+)" if closing == "\n" else "(.+?)" if least else "(.*?)"
    flags = re.NOFLAG if closing == "\n" else re.DOTALL
    regex = re.compile(opening + inner + re.escape(closing) * (closing != "\n"), flags)
    before, after = SAID[int(form[4:])].split("4")
    pieces = [before, before, before.strip(), after, after, closing, " ", "\n", "4", "5", "*"]
    chance = random.Random(form)
    found = 0
    for _ in range(300):
        text = "".join(chance.choices(pieces, k=chance.randint(1, 9))).strip()
        last = (regex.findall(text) or [""])[-1]
        assert answer_format.marked(text, FORMATS[form]).strip() == last.strip(), text
        found += bool(last)
    assert found > 30


test_kinds_of_properties = gives(
    lambda kind, expected, said: reward(
        f"(({said}))", property_type=kind, expected_answer=expected
    ),
    *((kind, "1", "1", 1.0) for kind in molecules.KINDS),
    *((kind, 1, "0", 0.0) for kind in molecules.KINDS),
    *((kind, 3, said, 0.0) for kind in molecules.KINDS for said in ("inf", "-inf", "nan", "1e999")),
    ("count", 4, "3.6", 1.0),
    ("count", "4", "4.5", 1.0),  # a half is rounded to the even one
    ("count", "5", "4.5", 0.0),
    ("fragment", 4.4, "4", 1.0),
    ("bool", 0, "-0.4", 1.0),
    ("presence", 1, "yes", 0.0),
    ("float", 857.833, "857.833", 1.0),
    ("float", 857.833, "857.834", 0.0),
    ("float", "857.833", "857.8331", 1.0),
    ("float", 0.0, "0.0000009", 1.0),
    ("float", 0.0, "0.000002", 0.0),
    ("float", 4, "3.6", 0.0),
)


def test_what_holds_no_number_says_why():
    reasons = {"": "empty", "<think> ((4))": "truncated", "4": "no number", "(())": "no number"}
    for answer, reason in reasons.items():
        told = molecules.verify(ROW, answer)
        assert (told.value, told.info) == (0.0, {"reason": reason})
    assert reward("<think>((5))</think>((4))") == 1 and reward("((4))</think>5") == 0


TOOLS_AT = "responses_create_params"
test_bad_rows_are_refused = refused(
    lambda fields: check_rows.check_row(WITH_TOOL | fields),
    ({"property_type": "ratio"}, "property_type is 'ratio', expected one of: count, bool"),
    ({"property_type": None}, "property_type is missing or null, expected one of"),
    ({"expected_answer": None}, "expected_answer is missing or null, expected a number"),
    ({"expected_answer": "four"}, "expected_answer is 'four', expected a finite number"),
    ({"expected_answer": "nan"}, "expected_answer is 'nan', expected a finite number"),
    ({"expected_answer": 10**400}, "expected_answer is .*, expected a finite number"),
    ({"expected_answer": [4]}, r"expected_answer is \[4\], expected a number"),
    ({"answer_format": "fmt_31"}, "answer_format is 'fmt_31', expected one of fmt_00 to fmt_30"),
    ({"answer_format": 7}, "answer_format is 7, expected one of fmt_00 to fmt_30, or null"),
    ({"use_box_format": "yes"}, "use_box_format is 'yes', expected true, false or null"),
    ({"answer_type": "float"}, "answer_type is 'float', expected null, because only the agent"),
    ({"match": {"rule": "exact"}}, "match is {'rule': 'exact'}, expected null, because only"),
    ({"output_regex": "(4)"}, r"output_regex is '\(4\)', expected null, because only the agent"),
    (
        {TOOLS_AT: {"input": "4?", "tools": [{"type": "function", "name": "search"}]}},
        rf"tools is \['search'\], expected the tool {TOOL}, or no tool",
    ),
    ({TOOLS_AT: {"input": "4?", "tools": TOOLS * 2}}, "tools is .*, expected the tool"),
    taken=({},),
)


def test_hostile_answers_take_little_time():
    began = time.process_time()
    for form, said in zip(FORMATS, SAID, strict=True):
        before, after = said.split("4")
        for text in (f"{before} ", f"{after or before} ", f"{before}   "):
            assert reward(text * 10**4, answer_format=form) == 0
    for text in HOSTILE:
        assert reward(Response.of(text)) == reward(f"(({text}))") == 0
    assert time.process_time() - began < 20


# --- episodes -------------------------------------------------------------------------------------


def episode(row: dict, *answers: str) -> tuple:
    """The reward of an episode, its answers, and what its policy has read before each of them."""
    script = Script(answers)
    done = asyncio.run(molecules.rollout(row, script))
    return done.reward.value, len(done.turns), script.last()


@contained
def test_an_episode_calculates_and_all_that_it_says_is_judged():
    run = lambda code, said="": Response(said, content=said, tool_calls=of(code))  # noqa: E731
    of = lambda code: calling(TOOL, code=code).tool_calls  # noqa: E731
    assert episode(WITH_TOOL, run("n = 2"), run("n * 2"), "((4))")[:2] == (1, 3)
    assert episode(WITH_TOOL, run("2 + 2"), "It is 4.")[::2] == (
        0,
        ["How many atoms has C(CO)O?", "4"],
    )
    # As in NeMo-Gym, what was said beside a call counts, and a later answer counts more.
    assert episode(WITH_TOOL, run("2", "((4))"), "Done.")[0] == 1
    assert episode(WITH_TOOL, run("2", "((4))"), "((5))")[0] == 0
    assert episode(WITH_TOOL, run("2", "((4))"), "<think>((5))")[0] == 1
    assert episode(WITH_TOOL, run("2", "<think>((4))"), "<think>")[0] == 0
    assert episode(WITH_TOOL, *[run("print('((4))')")] * 20)[:2] == (0, 10)


def test_a_row_without_the_tool_has_none():
    assert molecules.needs(ROW) == () and molecules.needs(WITH_TOOL)[-1] == rdkit_check.NEED
    check_rows.check_row(ROW)
    assert episode(ROW, "((4))")[:2] == (1, 1)
    done, turns, read = episode(ROW, calling(TOOL, code="4"), "((4))")
    assert (done, turns) == (1, 2) and "there is no tool" in read[1]


# --- rdkit ----------------------------------------------------------------------------------------


@pytest.fixture
def asked_again():
    rdkit_check.lacking_here.cache_clear()
    rdkit_check.lacking_there.cache_clear()
    yield
    rdkit_check.lacking_here.cache_clear()


@contained
def test_a_row_with_the_tool_says_what_it_lacks(asked_again, monkeypatch):
    services.configure(Services(tool_parser="hermes"))
    monkeypatch.setattr(rdkit_check, "IMPORT", "import rdkit_of_nobody")
    expected = "'rdkit_chemistry_agent' lacks rdkit: .*No module named 'rdkit_of_nobody'; expected"
    with pytest.raises(ModuleError, match=f"{expected} launch/setup.sh chemistry"):
        check_rows.check_services(WITH_TOOL)
    check_rows.check_services(ROW)
    rdkit_check.lacking_here.cache_clear()
    monkeypatch.setattr(rdkit_check, "IMPORT", "import numpy; print('imported')")
    if sandbox.own_packages():
        check_rows.check_services(WITH_TOOL)


@pytest.mark.parametrize("known", ["", "print('imported')"])
def test_the_service_is_asked_for_it(asked_again, known):
    """Before a run, in a session that ends."""
    seen = []

    def answer(asked, request: dict) -> dict:
        seen.append((asked.command, asked.headers["X-Session-ID"], request.get("language")))
        said = {"stdout": "imported\n" * bool(known), "stderr": "" if known else "No module rdkit"}
        return {"process_status": "completed"} | said

    with as_sandbox(answer) as url:
        why = rdkit_check.NEED.problem()
    assert (why == "") == bool(known)
    assert known or why.startswith(
        f"the sandbox service at {url} cannot import it: No module rdkit"
    )
    (post, name, language), (delete, same, _) = seen
    assert (post, language, delete) == ("POST", "ipython", "DELETE") and name == same


@contained
def test_a_session_computes_with_rdkit():
    if why := rdkit_check.NEED.problem():
        pytest.skip(why)
    code = "from rdkit import Chem\nChem.MolFromSmiles('C(CO)O').GetNumAtoms()"
    done, _, read = episode(WITH_TOOL, calling(TOOL, code=code), "((4))")
    assert (done, read[1]) == (1, "4")
