"""An agent that repairs a repository: 1.0 if all tests for its issue pass afterwards, else 0.0.

The policy works in a container of its own (envs/boxes/box.py) with one set of tools, for up to 200
answers, 300 s per command and 3,600 s per episode (half of timeouts.rollout if that is less). Then
its patch, and nothing else, goes into a second, fresh container. There the tests run
(envs/swe/swe_judge.py): all of FAIL_TO_PASS and PASS_TO_PASS have to pass.

Row, as `data_prep.py swe` creates it: `instance_id`, `image`, `workdir`, `base_commit`,
`problem_statement`, `test_patch`, `tests` ({"kind": "script", "script"} or {"kind": "r2e",
"expected"}), `log_parser`, `FAIL_TO_PASS`, `PASS_TO_PASS`, `patch` (the solution), and optional:
    harness     the tool set (envs/swe/swe_tools.py): bash, openhands, codex or opencode
    input       in responses_create_params: the prompt; if it is empty, our own prompt
Our prompt has one of three styles, chosen by the instance's id, so that a group shares it; the
style is also the tool set if the row names none. Rows with an agent `..._val` get the first style.
The agent sees id, statement and base commit; no other field is in its container.

How episodes end, and with which result:
    no patch, or one that does not apply or that the tests refuse    0.0, `reason`
    the agent or the tests exceed their memory or time limit         masked, `reason`
    200 answers, or no room for another, and all tests pass          1.0, masked
    a fault of the node: image, disk, start, a judge without tests   CheckerError: another try
A masked episode counts toward the baseline, but is not trained on. Nothing that the policy can do
leads to another try. After the loss of an engine, the result of each call is shown again, and the
commands are run again once they matter; an episode that had ended is neither played nor judged
again.

Source: NeMo-Gym's responses_api_agents/swe_agents, with the same reward, limits and masks. There,
an episode earns 0 if the node is at fault.
Known leaks: as in envs/swe/swe_judge.py, and a wrong repair that passes all tests.
"""

import random
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from envs import Reward, get, require
from envs.boxes import box, image_names
from envs.services import TOOL_PARSER, Need
from envs.swe import swe_judge
from envs.swe.agent_session import GIB, Desk, Over, Work
from envs.swe.swe_judge import Verdict
from envs.swe.swe_tools import tool_sets
from envs.tools.tools import converse
from rollout.episode import Episode
from rollout.messages import chat

if TYPE_CHECKING:
    from rollout.episode import Episode
    from rollout.sampler import Sampler

AGENTS = ("swe_agents_train", "swe_agents_val", "swe_agents")
ALLOWS_EMPTY_INPUT = True
MAX_TURNS = 200
STYLES = ("openhands", "codex", "opencode")
LIMITS = ("time", "memory")  # ends of an episode whose agent used too much
CUT = ("steps", "room", "length")  # ends of a conversation that the policy did not choose
# Reasons for a reward of 0; each has a metric: the share of episodes that ended that way.
REASONS = (
    "no patch", "a patch over 1 MiB", "does not apply", "tests failed", "canary", "exit code",
    "no results", "processes", "time", "tests time", "memory",
)  # fmt: skip


refusal, flaw = swe_judge.refusal, swe_judge.flaw


def needs(row: dict) -> tuple[Need, ...]:
    """The images in `services.images`, bubblewrap, in which they run, and a tool-call parser."""
    return image_names.NEED, box.NEED, TOOL_PARSER


def check(row: dict) -> None:
    """Raises ValueError unless the row has an issue, an image, and tests that can be judged."""
    meta = row["responses_create_params"].get("metadata")
    of_gym = "instance_id" not in row and isinstance(meta, dict) and "instance_id" in meta
    convert = "; `data_prep.py swe` creates it from NeMo-Gym's metadata" if of_gym else ""
    for name in ("instance_id", "image", "problem_statement", "base_commit"):
        text = get(row, name, str, f"a text{convert}")
        require(text.strip(), name, text, "a text")
    image_names.check(row["image"], "image")
    folder = get(row, "workdir", str, "the folder of the repository")
    require(folder.startswith("/"), "workdir", folder, "an absolute path")
    harness = get(row, "harness", str | None, "the name of a tool set, or null")
    known = tool_sets()
    require(harness is None or harness in known, "harness", harness, "one of: " + ", ".join(known))
    for name in ("FAIL_TO_PASS", "PASS_TO_PASS"):
        tests = get(row, name, list, "a list of test names")
        good = all(isinstance(test, str) for test in tests)
        require(good, name, tests, "a list of test names")
    for name in ("test_patch", "patch", "log_parser"):
        get(row, name, str, "a text, which may be empty")
    get(row, "tests", dict, "an object with kind, and script or expected")
    get(row, "tests.script", str | None, "a bash script, or null")
    get(row, "tests.expected", dict | None, "an object: test -> status, or null")
    if why := swe_judge.refusal(row):
        raise ValueError(why)


def style_of(row: dict) -> str:
    """Returns the prompt's style, which is the same for all episodes of an instance."""
    if row["agent_ref"]["name"].endswith("_val"):
        return STYLES[0]
    return random.Random(row["instance_id"]).choice(STYLES)


def harness_of(row: dict) -> str:
    """Returns the tool set's name."""
    return row.get("harness") or style_of(row)


def prompt(row: dict) -> list[dict]:
    """Returns the row's own prompt; if it has none, the prompt for the row's style.

    The prompt for a style is filled in with the row's issue.
    """
    if given := row["responses_create_params"]["input"]:
        return chat(given)
    text = Path(__file__).with_name(f"swe_{style_of(row)}.txt").read_text(encoding="utf-8")
    system, _, user = text.partition("-----\n")
    asked = user.format(
        workdir=row["workdir"],
        base_commit=row["base_commit"],
        statement=row["problem_statement"].strip(),
    )
    return [
        {"role": "system", "content": system.strip()},
        {"role": "user", "content": asked.strip()},
    ]


async def rollout(row: dict, sampler: "Sampler") -> "Episode":
    """Plays one episode. Raises CheckerError, and NoRoom if the first prompt leaves no room."""
    async with AsyncExitStack() as stack:
        harness = harness_of(row)
        desk = Desk(row, harness, sampler, stack)
        try:
            talk = await converse(desk, prompt(row), tool_sets()[harness], desk.call, MAX_TURNS)
            ended = talk.ended
        except Over as over:
            ended = str(over)
        work = desk.known or await desk.work(ended)
    verdict = work.verdict or await desk.verdict(work)
    return Episode(desk.turns, reward(work, verdict), is_masked(work, verdict))


def reward(work: Work, verdict: Verdict) -> Reward:
    """Returns 1.0 for a resolved issue, else 0.0 with a `reason`; each of REASONS has a metric."""
    limit = work.ended if work.ended in LIMITS else ""
    reason = "" if verdict.resolved else limit or verdict.reason
    info: dict[str, str | float] = {"ended": work.ended}
    if reason:
        info["reason"] = reason
    numbers = work.info | verdict.details
    seconds = numbers.pop("seconds", 0.0)
    peak = numbers.pop("peak", 0.0)
    info |= numbers
    info["judge_seconds"] = seconds
    info["judge_peak"] = peak / GIB
    for name in REASONS:
        info[name.replace(" ", "_")] = float(name == reason)
    info["other"] = float(bool(reason) and reason not in REASONS)
    info["masked"] = float(is_masked(work, verdict))
    return Reward(float(verdict.resolved), info)


def is_masked(work: Work, verdict: Verdict) -> bool:
    """Returns whether the episode's limits decided the outcome, or a cut-off episode earned 1."""
    limited = work.ended in LIMITS or verdict.masked
    return limited or (verdict.resolved and work.ended in CUT)
