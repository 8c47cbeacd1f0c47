"""Tasks in a terminal: 1.0 if the final working folder passes all checks, else 0.0.

An episode has a shell of its own (envs/sandbox/shell.py), which starts in the working folder. The
row's `harness` decides how the policy types, which its prompt has to explain:
    terminus_1, terminus_2   each answer is a JSON object of that form (envs/terminals/terminus.py)
                             with keystrokes and the seconds to wait for them; "C-c" is a key. The
                             next message shows the terminal, until an answer calls the task
                             complete
    bash                     calls of the tool `bash` with `command`, until an answer has no call
An episode has at most `max_turns` (50) answers. The terminal has at most 120 s for an answer's
keystrokes, and at most 60 s for each command.

Row: the task in the prompt, `harness`, `files` (path -> text, initially in the working folder), and
`checks`, a list of {"command", "stdout", "files"}. When the episode ends, for any reason, its
processes are killed. Each check runs in a fresh sandbox with a copy of the folder: its `files`
overwrite existing ones, and `command` must print `stdout`, apart from white space around it. No
part of a check is in the sandbox before that, and `stdout` never is. An episode in which nothing
was typed earns 0.0.

Source: our own; the forms come from Terminal-Bench's agent Terminus. Known leaks: a `stdout` that
can be guessed, because the policy's code can print it. So a check should print results.
"""

import json
import time
from typing import TYPE_CHECKING

from envs import Json, Reward, final_text, get, require
from envs.sandbox import sandbox, shell
from envs.sandbox.shell import PRINTED, Shell, check_files, said_after
from envs.services import TOOL_PARSER, Need
from envs.terminals import terminus
from envs.terminals.terminus import FORMS, has_form, parsed
from envs.tools.tools import converse
from rollout.chat import NoRoom
from rollout.episode import Episode
from rollout.messages import chat, functions
from rollout.response import Response

if TYPE_CHECKING:
    from rollout.episode import Episode, Turn
    from rollout.sampler import Sampler

AGENTS = ("terminal_use", "terminal_use_agent")
MAX_TURNS = 50
ANSWER_SECONDS = 120.0
COMMAND_SECONDS = 60.0
LIMITS = sandbox.Limits(seconds=120, output=10_000, disk=32 << 20, file_size=32 << 20)
NO_FORM = "The answer is not one JSON object of the form asked for. Nothing was typed."


def needs(row: dict) -> tuple[Need, ...]:
    """Bubblewrap, in which a shell runs, and a tool-call parser for the harness `bash`."""
    return (shell.NEED, TOOL_PARSER) if row["harness"] == "bash" else (shell.NEED,)


def check(row: dict) -> None:
    """Raises ValueError unless the row has a known harness, and checks."""
    harness = get(row, "harness", str, "the name of a harness")
    require(harness in (*FORMS, "bash"), "harness", harness, "one of: bash, " + ", ".join(FORMS))
    if harness == "bash":
        at = "responses_create_params.tools"
        names = [tool["function"]["name"] for tool in functions(get(row, at, list, "bash")) or ()]
        require(names == ["bash"], at, names, "the tool bash")
    turns = get(row, "max_turns", int | None, "a number of answers, or null")
    require(turns is None or turns > 0, "max_turns", turns, "1 or more")
    check_files(row, "")
    require(get(row, "checks", list, "a list of checks"), "checks", [], "one check or more")
    for i, each in enumerate(row["checks"]):
        at = f"checks[{i}]."
        get(each, "command", str, "a bash command", at)
        stdout = get(each, "stdout", str, "what the command prints", at).strip()
        fits = 0 < len(stdout.encode("utf-8", "surrogatepass")) <= PRINTED
        require(fits, at + "stdout", stdout, f"a text of 1 to {PRINTED} bytes")
        check_files(each, at)


async def rollout(row: dict, sampler: "Sampler") -> "Episode":
    """Plays one task. Raises CheckerError, and NoRoom if the first prompt leaves no room."""
    async with Shell(LIMITS, row.get("files") or {}) as shell:
        if row["harness"] == "bash":
            turns = await with_tool(row, sampler, shell)
        else:
            turns = await with_keys(row, sampler, shell)
        return Episode(turns, await judge(row, shell))


async def with_tool(row: dict, sampler: "Sampler", shell: Shell) -> "list[Turn]":
    """Plays an episode that calls `bash`, and returns its turns."""

    async def call(name: str, given: dict[str, Json]) -> str:
        command = given.get("command")
        if not isinstance(command, str):
            return json.dumps({"error": "the argument `command` is not a text"})
        return shell.seen(await shell.run(command, COMMAND_SECONDS))

    params = row["responses_create_params"]
    steps = row.get("max_turns") or MAX_TURNS
    talk = await converse(sampler, chat(params["input"]), params["tools"], call, steps)
    return talk.turns


async def with_keys(row: dict, sampler: "Sampler", shell: Shell) -> "list[Turn]":
    """Plays an episode in which answers contain keystrokes, and returns its turns."""
    messages = chat(row["responses_create_params"]["input"])
    turns: list[Turn] = []
    for _ in range(row.get("max_turns") or MAX_TURNS):
        try:
            turns.append(await sampler.chat(messages))
        except NoRoom:
            if not turns:
                raise
            break
        shown, done = await play(row, shell, turns[-1].judged)
        if done or turns[-1].finish_reason == "length":
            break
        messages += [turns[-1].message, {"role": "user", "content": shown}]
    return turns


async def play(row: dict, shell: Shell, response: Response) -> tuple[str, bool]:
    """Types an answer's keys; returns the terminal's text, and whether the task is complete."""
    answer = parsed(final_text(response))
    if not has_form(answer, row["harness"]):
        return NO_FORM, False
    end = time.monotonic() + ANSWER_SECONDS
    shown = ""
    for command in answer["commands"]:
        if (left := end - time.monotonic()) <= 0 or shell.ended:
            break
        asked = command.get("duration", command.get("timeout_sec", 1.0))
        seconds = 0.05
        if asked > 0:  # False for NaN
            seconds = max(seconds, min(asked, left, COMMAND_SECONDS))
        shown += await shell.type(terminus.keys(command), seconds)
    return shell.seen(shown), bool(answer.get("task_complete") or answer.get("is_task_complete"))


async def judge(row: dict, shell: Shell) -> Reward:
    """Returns the verdict on the working folder. Raises CheckerError."""
    if not shell.used:
        return Reward(0.0, {"reason": "nothing was typed"})
    folder = await shell.pack()
    if folder is None:
        return Reward(0.0, {"reason": "the working folder cannot be read"})
    passed = 0
    for each in row["checks"]:
        output = await said_after(folder, each.get("files") or {}, each["command"], LIMITS)
        passed += output is not None and output.strip() == each["stdout"].strip()
    share = passed / len(row["checks"])
    return Reward(float(share == 1), {"passed": share})


async def verify(row: dict, response: str) -> Reward:
    """Types one answer's keystrokes in a new terminal, and returns the verdict."""
    async with Shell(LIMITS, row.get("files") or {}) as shell:
        if row["harness"] != "bash":
            await play(row, shell, Response.of(response))
        return await judge(row, shell)
