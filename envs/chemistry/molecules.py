r"""Properties of molecules that RDKit computes, as numbers: 1.0 for the right one, else 0.0.

Row: `expected_answer` (a number, or a number as text) and its `property_type`: "count", "bool",
"presence" and "fragment" are rounded to integers and compared, "float" is compared to within 1e-6
(relative or absolute). `answer_format` is one of FORMATS (answer_format.py); without it, the format
is \boxed{} if `use_box_format` is true, else ((...)). An episode has at most 10 answers. A row with
the tool `stateful_python_code_exec` has a Python session as in envs/maths/python_tool.py, which can
import rdkit; other rows have no tools.

As in NeMo-Gym's resources_servers/rdkit_chemistry, everything that the policy has said is searched
for the last text in the format. That text is read as a number; if it is not one, the last number in
it is used. The reason `no number` means that neither was found.

`bash launch/setup.sh chemistry` installs rdkit, which only rows with the tool need. If
services.sandbox is "http", the service's Python must have it.

Deliberate deviations. An infinite number is a wrong answer, and a row whose expected answer is not
a finite number is refused: in NeMo-Gym, both make the request fail. Unfinished reasoning does not
count as text.
Known leaks: an answer may hedge, because only the last number in the format counts ("((not 4))",
"((3 or 4))"), whatever it is part of ("((C4))", "((9/4))", "((10^4))", "((4 kg))"). Rounding
accepts 3.6 as 4. If the only possible values are 0 and 1, half of all guesses earn 1.0.
"""

import math
from typing import TYPE_CHECKING, NamedTuple

from envs import Reward, final_text, get, require, unfinished
from envs.chemistry import rdkit_check
from envs.chemistry.answer_format import FORMATS, Format, marked, number_in
from envs.maths import python_tool
from envs.sandbox import sandbox
from envs.services import TOOL_PARSER, Need
from rollout.episode import Episode, Turn
from rollout.messages import functions

if TYPE_CHECKING:
    from rollout.sampler import Sampler

AGENTS = ("rdkit_chemistry_agent", "rdkit_chemistry")
MAX_STEPS = 10
KINDS = ("count", "bool", "presence", "fragment", "float")
NOT_READ = ("answer_type", "match", "output_regex")  # fields that only litmus.py reads


class Said(NamedTuple):
    """What the policy has said in an episode."""

    turns: list[Turn]
    text: str  # of all turns


def needs(row: dict) -> tuple[Need, ...]:
    """A sandbox with rdkit and a tool-call parser if the row has the tool."""
    tools = row["responses_create_params"].get("tools")
    return (sandbox.NEED, TOOL_PARSER, rdkit_check.NEED) if tools else ()


def check(row: dict) -> None:
    """Raises ValueError unless the row can be judged and offers the Python tool or no tool."""
    check_kind(row)
    expected = get(row, "expected_answer", str | int | float, "a number")
    require(math.isfinite(as_number(expected)), "expected_answer", expected, "a finite number")
    for name in NOT_READ:
        given = row.get(name)
        require(given is None, name, given, "null, because only the agent litmus_agent reads it")
    check_format(row)
    check_tools(row)


def check_kind(row: dict) -> None:
    """Raises ValueError unless the row's property is of a known kind."""
    kind = get(row, "property_type", str, "one of: " + ", ".join(KINDS))
    require(kind in KINDS, "property_type", kind, "one of: " + ", ".join(KINDS))


def check_format(row: dict) -> None:
    """Raises ValueError unless the format of the row's answers is known."""
    form = get(row, "answer_format", str | None, "one of fmt_00 to fmt_30, or null")
    require(form is None or form in FORMATS, "answer_format", form, "one of fmt_00 to fmt_30")
    get(row, "use_box_format", bool | None, "true, false or null")


def check_tools(row: dict) -> None:
    """Raises ValueError unless the row offers either the Python tool or none."""
    at = "responses_create_params.tools"
    given = get(row, at, list | None, "a list or null")
    names = [tool["function"]["name"] for tool in functions(given) or ()]
    good = names in ([], [python_tool.TOOL])
    require(good, at, names, f"the tool {python_tool.TOOL}, or no tool")


async def rollout(row: dict, sampler: "Sampler") -> Episode:
    """Plays one episode of at most 10 answers."""
    said = await converse(row, sampler)
    return Episode(said.turns, verify(row, said.text))


async def converse(row: dict, sampler: "Sampler") -> Said:
    """Lets the policy give at most 10 answers, and call the tool if the row has it."""
    talk = await python_tool.converse_with_python(row, sampler, MAX_STEPS)
    texts = [final_text(turn.judged) for turn in talk.turns]
    text = "\n".join(text for text in texts if not unfinished(text))
    return Said(talk.turns, text or talk.response)


def verify(row: dict, response: str) -> Reward:
    """Returns 0.0 or 1.0, in time linear in the length of the text."""
    text = final_text(response)
    if reason := unfinished(text):
        return Reward(0.0, {"reason": reason})
    found = number_in(marked(text, format_of(row)))
    if found is None:
        return Reward(0.0, {"reason": "no number"})
    expected = as_number(row["expected_answer"])
    return Reward(float(is_right(found, expected, row["property_type"])))


def format_of(row: dict) -> Format:
    """Returns the format in which the row's prompt asks for the answer."""
    usual = "fmt_07" if row.get("use_box_format") else "fmt_00"
    return FORMATS[row.get("answer_format") or usual]


def as_number(value: str | float) -> float:
    """Returns a row's value as a number; NaN if it is not one."""
    try:
        return float(value)
    except (ValueError, OverflowError):
        return math.nan


def is_right(found: float, expected: float, kind: str) -> bool:
    """Returns whether a number is the expected one for a property of this kind."""
    if kind == "float" or not math.isfinite(found):
        return math.isclose(found, expected, rel_tol=1e-6, abs_tol=1e-6)
    return round(found) == round(expected)
