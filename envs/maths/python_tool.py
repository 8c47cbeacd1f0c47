"""Mathematics with a Python interpreter that keeps its state: 1.0 for a right answer, else 0.0.

Row: as for the verifier, the environment that `verifier_type` names (default: math_with_judge),
plus the tool `stateful_python_code_exec` with `code`. An episode has at most 50 answers, of which
the verifier judges the last, as in NeMo-Gym's resources_servers/ns_tools. Each episode has its own
session in the sandbox (envs/sandbox/sessions.py), which ends with the episode. A call returns what
its code printed, the value of its last line, or a traceback: at most 1,000 characters. If a call
takes over 10 s, the interpreter is restarted, and the output states this.

numpy and sympy are available if the sandbox's Python has the same version as ours and the user
nobody may read our packages. If services.sandbox is "http", the interpreter is an IPython session
of NeMo-Skills' service.

Deliberate deviations. The sandbox's own interpreter has no IPython magics, and shows stdout and
stderr together, in the order of printing. When a call ends, its processes and threads are paused or
ended. A calculation that gets no CPU does not time out.

Known leaks: as in envs/maths/math.py. The code can see neither the row nor another episode.
"""

import json
from types import ModuleType
from typing import TYPE_CHECKING

from envs import Reward, get, require
from envs.maths import math
from envs.sandbox import sandbox
from envs.sandbox.sandbox import Limits
from envs.sandbox.sessions import Session
from envs.services import TOOL_PARSER, Need
from envs.tools.tools import Talk, converse
from rollout.episode import Episode
from rollout.messages import chat, functions

if TYPE_CHECKING:
    from rollout.sampler import Sampler

AGENTS = ("ns_tools_simple_agent", "ns_tools")
MAX_STEPS = 50
TOOL = "stateful_python_code_exec"
LIMITS = Limits(seconds=10, output=1000, processes=32, file_size=16 << 20, disk=16 << 20)
VERIFIERS: dict[str | None, ModuleType] = {"math_with_judge": math, None: math}


def needs(row: dict) -> tuple[Need, ...]:
    """A sandbox, a tool-call parser, and the needs of the row's verifier."""
    verifier = VERIFIERS[row.get("verifier_type")]
    judging = verifier.needs(row) if hasattr(verifier, "needs") else ()
    return sandbox.NEED, TOOL_PARSER, *judging


def check(row: dict) -> None:
    """Raises ValueError unless the row can be judged and offers the Python tool alone."""
    kind = get(row, "verifier_type", str | None, "the name of a verifier, or null")
    known = ", ".join(filter(None, VERIFIERS))
    require(kind in VERIFIERS, "verifier_type", kind, f"one of: {known}")
    at = "responses_create_params.tools"
    names = [tool["function"]["name"] for tool in functions(get(row, at, list, TOOL)) or ()]
    require(names == [TOOL], at, names, f"the tool {TOOL}")
    VERIFIERS[kind].check(row)


async def rollout(row: dict, sampler: "Sampler") -> Episode:
    """Solves one task in at most 50 answers."""
    talk = await converse_with_python(row, sampler, MAX_STEPS)
    return Episode(talk.turns, await verify(row, talk.response))


async def converse_with_python(row: dict, sampler: "Sampler", max_steps: int) -> Talk:
    """Holds a conversation of at most `max_steps` answers, with a Python session of its own."""
    params = row["responses_create_params"]
    async with Session(LIMITS) as python:

        async def call(name: str, given: dict) -> str:
            code = given.get("code")
            if not isinstance(code, str):
                return json.dumps({"error": "the argument `code` is not a text"})
            return await python.run(code)

        messages, tools = chat(params["input"]), params.get("tools")
        return await converse(sampler, messages, tools, call, max_steps)


async def verify(row: dict, response: str) -> Reward:
    """Returns the verdict that the row's verifier gives the last answer."""
    return await VERIFIERS[row.get("verifier_type")].verify(row, response)
