"""Errands in a simulated office, with 27 tools: 1.0 if its tables end as they should, else 0.0.

Row: `ground_truth`, the calls that do the errand, each with `name` and `arguments` (JSON as text);
an empty list if there is nothing to do. `category`, `environment_name` and `id` are not used. An
episode has at most 6 answers. Judged, as in NeMo-Gym's resources_servers/workplace_assistant: the
calls in all answers and the row's calls are played in two fresh offices, where failing calls change
nothing. The emails, events, tasks, customers and plots must then be equal and in the same order,
regardless of case in most texts. The folder services.workplace contains NeMo-Gym's five tables.

Deliberate deviations. An answer without calls and without a text after its reasoning earns 0, even
if there was nothing to do. Values that are not texts are compared as they are: Gym treats all of
them as missing, so that any number equals any other. Only the first 500 of the calls that change
something are played. A search takes at most a second. The directory contains the people in the
tables, because Gym's list of addresses is not one of the tables. The tools' refusals are worded
differently.

Known leaks: neither texts nor the results of searches are read. If there is nothing to do, any text
earns 1.0.
"""

import contextlib
import json
from typing import TYPE_CHECKING

from core.waits import in_thread
from envs import Json, Reward, final_text, get, require, services, unfinished
from envs.services import TOOL_PARSER, CheckerError, Need
from envs.tools.calls import check_call
from envs.tools.tools import converse
from envs.workplace import office
from envs.workplace.office import Office, load
from envs.workplace.office_tools import TOOLS, WRITES
from rollout.episode import Episode
from rollout.messages import chat
from rollout.response import Response

if TYPE_CHECKING:
    from rollout.sampler import Sampler

AGENTS = ("workplace_assistant_simple_agent", "workplace_assistant")
MAX_STEPS = 6
MOST_CALLS = 500


def needs(row: dict) -> tuple[Need, ...]:
    """The office's tables in `services.workplace`, and a tool-call parser."""
    return office.NEED, TOOL_PARSER


def check(row: dict) -> None:
    """Raises ValueError unless each call in the ground truth is valid and names a known tool."""
    calls = get(row, "ground_truth", list, "a list of calls")
    for i, call in enumerate(calls):
        check_call(call, f"ground_truth[{i}].")
        known = call["name"] in TOOLS
        require(known, f"ground_truth[{i}].name", call["name"], "one of: " + ", ".join(TOOLS))


async def rollout(row: dict, sampler: "Sampler") -> Episode:
    """Does one errand in at most 6 answers."""
    office = fresh()

    async def call(name: str, given: dict[str, Json]) -> str:
        return await in_thread(used, office, name, given)

    params = row["responses_create_params"]
    talk = await converse(sampler, chat(params["input"]), params.get("tools"), call, MAX_STEPS)
    return Episode(talk.turns, await verify(row, talk.response))


def fresh() -> Office:
    """Returns the office at the start of an errand. Raises CheckerError if there are no tables."""
    if why := office.problem():
        raise CheckerError(why)
    return load(services.current().workplace).copy()


def used(office: Office, name: str, given: dict[str, Json]) -> str:
    """Returns a tool's output as JSON text; if it raises, the output is the error."""
    given = {key: value for key, value in given.items() if value is not None}
    try:
        output = TOOLS[name](office, **given)
    except Exception as error:  # the policy's arguments caused it, so the policy sees it
        output = f"Error: {type(error).__name__}: {error}"
    return json.dumps({"output": output}, ensure_ascii=False, separators=(",", ":"))


async def verify(row: dict, response: str) -> Reward:
    """Returns 0.0 or 1.0; `reason` explains a 0. Raises CheckerError if there are no tables."""
    calls = Response.of(response).tool_calls
    reason = None if calls else unfinished(final_text(response))
    if reason:
        return Reward(0.0, {"reason": reason})
    changed = await in_thread(difference, calls, row.get("ground_truth") or [])
    return Reward(0.0, {"reason": f"wrong {changed}"}) if changed else Reward(1.0)


def difference(calls: list[dict], expected: list[dict]) -> str:
    """Returns the first table that the calls and the expected calls leave different, or "".

    Raises CheckerError if there are no tables.
    """
    made = played(fresh(), calls)
    wanted = played(fresh(), expected)
    return made.difference(wanted)


def played(office: Office, calls: list[dict]) -> Office:
    """Returns the office after the calls that change something."""
    changing = [call for call in calls if call.get("name") in WRITES]
    for call in changing[:MOST_CALLS]:
        with contextlib.suppress(Exception):  # a call that fails changes nothing
            TOOLS[call["name"]](office, **json.loads(call["arguments"]))
    return office
