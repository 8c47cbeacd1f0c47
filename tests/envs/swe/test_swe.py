"""Agents that repair repositories: whole episodes in real boxes, with a policy that is a script."""

import asyncio
import json
import os
import random
import re
import time
import types
from functools import partial

import pytest

from envs import services
from envs.boxes.box import Box
from envs.check_rows import check_row
from envs.sandbox import sandbox
from envs.services import CheckerError, Limits
from envs.swe import agent_session, repository, swe, swe_judge
from envs.swe.swe_judge import Verdict
from envs.swe.swe_tools import OUTPUT, Tools, tool_sets
from launch import tiny_image
from rollout.drafts import DraftBook
from rollout.episode import Episode, stitch
from settings.config import Sampling
from settings.environment_services import Services
from support.box_images import left, present
from support.chats import Reader, Scripted, real, spell
from support.data import in_both
from support.repairs import calling, solving
from support.scripts import Full, Script
from support.verifiers import gym_rows, replaced

slow = pytest.mark.slow
pytestmark = pytest.mark.skipif(bool(sandbox.problem()), reason=sandbox.problem())
HARNESSES = ("bash", "openhands", "codex", "opencode")
SHELLS = {"bash": "bash", "openhands": "execute_bash", "codex": "shell_command",
          "opencode": "bash"}  # fmt: skip
FIX = calling("bash", command="sed -i s/minus/plus/ add.py")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder of images with one image, and its rows."""
    images = tmp_path_factory.mktemp("images")
    return images, tiny_image.make_bugs(images)


@pytest.fixture(autouse=True)
def rows(made):
    services.configure(Services(images=str(made[0])), Limits(600.0))
    return made[1]


@pytest.fixture
def row(rows):
    return rows["add"] | {"harness": "bash"}


def episode(row: dict, *answers: str, policy=Script) -> tuple[Episode, list[list[dict]]]:
    """The episode of these answers, and the messages before each of them."""
    script = policy(answers)
    return asyncio.run(swe.rollout(row, script)), script.seen


# --- rows and prompts -----------------------------------------------------------------------------


def test_rows_are_taken(rows):
    for row in rows.values():
        check_row(row)
        assert [need.name for need in swe.needs(row)] == ["images", "boxes", "tool_parser"]
        r2e = row | {"tests": {"kind": "r2e", "expected": {"a": "PASSED"}}, "FAIL_TO_PASS": []}
        check_row(r2e)


def check_replaced(row: dict, path: list, value) -> None:
    check_row(replaced(row, path, value))


@pytest.mark.parametrize(("path", "value", "message"), [
    (["instance_id"], None, "instance_id is missing or null, expected a text"),
    (["base_commit"], " ", "base_commit is ' ', expected a text"),
    (["workdir"], "testbed", "workdir is 'testbed', expected an absolute path"),
    (["harness"], "vim", "harness is 'vim', expected one of: bash, openhands, codex, opencode"),
    (["tests"], None, "tests is missing or null, expected an object with kind, and script or exp"),
    (["image"], "..", r"image is '\.\.', expected the name of an image, for a folder or"),
    (["image"], "...sif", r"image is '\.\.\.sif', expected the name of an image"),
    (["image"], "..sif", r"image is '\.\.sif', expected the name of an image"),
    (["image"], ".", r"image is '\.', expected the name of an image"),
    (["image"], "a\0b", r"image is 'a\\x00b', expected the name of an image"),
    (["image"], "a" * 400, "image is 'a+\\.\\.\\.a+', expected the name of an image"),
    (["tests"], {"kind": "make"}, "tests.kind is 'make', expected 'script' or 'r2e'"),
    (["tests"], {"kind": "script"}, "tests.script or FAIL_TO_PASS is empty"),
    (["tests"], {"kind": "r2e"}, "tests.expected is empty"),
    (["FAIL_TO_PASS"], [], "tests.script or FAIL_TO_PASS is empty"),
    (["PASS_TO_PASS"], [3], r"PASS_TO_PASS is \[3\], expected a list of test names"),
    (["problem_statement"], "", "problem_statement is '', expected a text"),
])  # fmt: skip
def test_a_bad_row_is_refused(row, path, value, message):
    with pytest.raises(ValueError, match=message):
        check_replaced(row, path, value)


@in_both
def test_rows_of_nemo_gym_are_answered_with_their_conversion(place):
    for released in gym_rows("swe_agents", "swe_agents_train", place):
        with pytest.raises(ValueError, match="instance_id is missing.*data_prep.py swe.* metadata"):
            check_row(released)


SECRETS = ("test_patch", "patch", "FAIL_TO_PASS", "PASS_TO_PASS", "tests", "log_parser", "image")


def test_the_agent_is_told_id_statement_and_commit_alone(rows):
    """By each style of prompt, all of which come up, the same one for each episode of a row."""
    row = rows["add"]
    told = {name: f"secret-{name}" for name in SECRETS}
    styles = set()
    for i in range(40):
        one = row | told | {"instance_id": f"a__b-{i}"}
        messages = swe.prompt(one)
        assert messages == swe.prompt(one) and [m["role"] for m in messages] == ["system", "user"]
        text = json.dumps(messages)
        assert all(part in text for part in (row["base_commit"], "returns a wrong number"))
        assert not any("{" in message["content"] for message in messages)
        assert "secret" not in text and "/testbed" in text
        styles.add(swe.style_of(one))
        assert swe.harness_of(one) == swe.style_of(one) in tool_sets()
    assert styles == set(swe.STYLES)
    assert swe.style_of(row) == random.Random(row["instance_id"]).choice(swe.STYLES)
    assert swe.style_of(row | {"agent_ref": {"name": "swe_agents_val"}}) == "openhands"
    assert swe.harness_of(row | {"harness": "bash"}) == "bash"


def test_a_statement_may_hold_braces(row):
    row["problem_statement"] = "f'{x}' and {statement} and {0}"
    assert row["problem_statement"] in swe.prompt(row)[1]["content"]


def test_a_row_may_have_a_prompt_of_its_own(row):
    own = [{"role": "user", "content": "repair add"}]
    assert swe.prompt(replaced(row, ["responses_create_params", "input"], own)) == own


# --- episodes -------------------------------------------------------------------------------------


@slow
@pytest.mark.parametrize("harness", HARNESSES)
def test_each_bug_is_solved_with_each_tool_set(rows, harness):
    before = present()
    for name, row in rows.items():
        row = row | {"harness": harness}
        ended, seen = episode(row, *solving(harness, name))
        assert ended.reward.value == 1 and not ended.masked and "reason" not in ended.reward.info
        assert len(ended.turns) == len(solving(harness, name)) == ended.reward.info["turns"]
        assert not any("error: " in message["content"] for message in seen[-1][2:])
    assert not left(before)


@slow
@pytest.mark.parametrize("harness", HARNESSES)
def test_nothing_and_nonsense_earn_nothing(row, harness):
    row = row | {"harness": harness}
    shell = SHELLS[harness]
    for answers, reason in [
        (["Done."], "no patch"),
        ([calling(shell, command="ls"), "Done."], "no patch"),
        ([calling(shell, command="echo >> add.py"), "Done."], "tests failed"),
        ([calling("none", x=1), calling(shell, command=3), "Done."], "no patch"),
    ]:
        ended, _ = episode(row, *answers)
        info = ended.reward.info
        assert (ended.reward.value, ended.masked, info["reason"]) == (0, False, reason)
        assert info[reason.replace(" ", "_")] == 1 and info["other"] == 0


@slow
def test_what_is_measured(row):
    ended, _ = episode(row, calling("bash", command="sleep 1.5"), FIX, "Done.")
    info = ended.reward.components
    assert info["turns"] == 3 and info["commands"] == 2 and 0 < info["start"] < 60
    assert 0 < info["agent_peak"] < 1 and 0 < info["judge_seconds"] < 60 and info["fixed"] == 1
    assert not any(info[reason.replace(" ", "_")] for reason in swe.REASONS) and not info["masked"]


@pytest.mark.smoke
@slow
def test_several_calls_in_one_answer(row):
    both = calling("bash", {"command": "sed -i s/minus/X/ add.py"},
                   "bash", {"command": "sed -i s/X/plus/ add.py; cat add.py"})  # fmt: skip
    ended, seen = episode(row, both, "Done.")
    assert ended.reward.value == 1 and seen[-1][-1]["content"].endswith("plus as add")


@slow
def test_much_output_is_cut(row):
    _, seen = episode(row, calling("bash", command="seq 100000"), "Done.")
    shown = seen[-1][-1]["content"]
    assert shown.startswith("1\n2\n") and shown.endswith("\n100000") and len(shown) < OUTPUT + 200


@slow
def test_a_commit_of_the_agent_counts(row):
    user = "git -c user.name=a -c user.email=a@b commit -qam x && git status --short"
    ended, _ = episode(row, FIX, calling("bash", command=user), "Done.")
    assert ended.reward.value == 1


# --- limits ---------------------------------------------------------------------------------------


@slow
def test_200_answers_are_all(row):
    looks = [calling("bash", command=":")] * swe.MAX_TURNS
    ended, seen = episode(row, *looks, "Done.")
    assert len(ended.turns) == len(seen) == 200 and ended.reward.info["ended"] == "steps"
    assert (ended.reward.value, ended.masked) == (0, False)
    ended, _ = episode(row, FIX, *looks)
    assert (ended.reward.value, ended.masked) == (1, True), "as Gym masks it"


@slow
def test_an_episode_without_room_that_solves_is_masked(row):
    ended, _ = episode(row, FIX, policy=Full)
    assert (ended.reward.value, ended.masked, ended.reward.info["ended"]) == (1, True, "room")
    ended, _ = episode(row, calling("bash", command="ls"), policy=Full)
    assert (ended.reward.value, ended.masked) == (0, False)


@slow
def test_a_command_has_its_time(row, monkeypatch):
    monkeypatch.setattr("envs.swe.swe_tools.COMMAND_SECONDS", 1.0)
    ended, seen = episode(row, calling("bash", command="sleep 99"), FIX, "Done.")
    assert "[the command was ended after" in seen[1][-1]["content"] and ended.reward.value == 1


@slow
def test_killing_the_own_shell_ends_the_command_alone(row):
    kills = ("kill -9 $$", "kill -9 -1", "kill -9 1; kill -STOP $PPID", "exit 7")
    answers = [calling("bash", command=command) for command in kills]
    ended, _ = episode(row, *answers, FIX, "Done.")
    assert ended.reward.value == 1


class Slow(Script):
    """A policy that thinks for a while before its second answer."""

    async def chat(self, messages, tools=None):
        if len(self.seen) == 1:
            await asyncio.sleep(60)
        return await super().chat(messages, tools)


@slow
@pytest.mark.parametrize("late", ["command", "answer"])
def test_the_time_of_an_episode_masks_it(row, monkeypatch, late):
    """What is there by then is judged all the same."""
    monkeypatch.setattr(agent_session, "AGENT_SECONDS", 2.0)
    began = time.monotonic()
    wait = "sleep 60" if late == "command" else ":"
    answer = calling("bash", {"command": "sed -i s/minus/plus/ add.py"}, "bash", {"command": wait})
    ended, _ = episode(row, answer, "Done.", policy=Slow)
    assert (ended.masked, ended.reward.info["ended"], ended.reward.value) == (True, "time", 1)
    assert len(ended.turns) == 1 and time.monotonic() - began < 30
    ended, _ = episode(row, calling("bash", command=f"echo 1 > x; {wait}"), "Done.", policy=Slow)
    info = ended.reward.info
    assert (ended.masked, info["reason"], info["time"], info["masked"]) == (True, "time", 1, 1)


@slow
def test_the_start_of_a_box_takes_none_of_the_agents_time(row, monkeypatch):
    prepare = repository.prepare

    async def slowly(*given):
        await asyncio.sleep(2)
        await prepare(*given)

    monkeypatch.setattr(agent_session, "AGENT_SECONDS", 2.0)
    monkeypatch.setattr(repository, "prepare", slowly)
    ended, _ = episode(row, FIX, "Done.")
    assert (ended.reward.value, ended.reward.info["ended"]) == (1, "answer")


@slow
def test_a_deadline_of_the_engine_is_none_of_the_agent(row):
    class Late(Script):
        async def chat(self, messages, tools=None):
            if self.seen:
                raise TimeoutError("the engine")
            return await super().chat(messages, tools)

    with pytest.raises(TimeoutError, match="the engine"):
        episode(row, FIX, policy=Late)


@slow
def test_an_agent_has_half_of_what_a_rollout_may_take(row):
    services.configure(services.current(), Limits(2.0))
    ended, _ = episode(row, calling("bash", command="sleep 60"), policy=Slow)
    assert ended.reward.info["ended"] == "time"


@slow
def test_the_memory_of_a_box_masks_its_episode(row, monkeypatch):
    """Taken by a shell that has no other: its variable grows."""
    monkeypatch.setattr(agent_session, "SIZE", agent_session.SIZE._replace(memory=100 << 20))
    eats = "x=aaaaaaaaaaaaaaaa; while :; do x=$x$x; done"
    ended, _ = episode(row, FIX, calling("bash", command=eats), "Done.")
    assert (ended.reward.value, ended.masked) == (0, True)
    assert ended.reward.info["reason"] == "memory" and ended.reward.info["memory"] == 1
    assert len(ended.turns) == 2, "nothing can be done in it any more"


@slow
@pytest.mark.parametrize("verdict", [
    Verdict(False, "tests time", True, {"seconds": 3.0}),
    Verdict(True, "", False, {"tampered": 1.0}),
    Verdict(False, "of another kind", False, {}),
])  # fmt: skip
def test_a_verdict_decides(row, monkeypatch, verdict):
    async def judge(*_):
        return verdict

    monkeypatch.setattr(swe_judge, "judge", judge)
    ended, _ = episode(row, FIX, "Done.")
    info = ended.reward.info
    assert (ended.reward.value, ended.masked) == (float(verdict.resolved), verdict.masked)
    assert info.get("reason", "") == verdict.reason
    assert info["other"] == float(verdict.reason == "of another kind")
    assert info["tests_time"] == float(verdict.reason == "tests time")


@slow
def test_rm_everything_is_the_policys_own_fault(row):
    wreck = calling("bash", command="rm -rf --no-preserve-root / 2>/dev/null")
    ended, _ = episode(row, FIX, wreck, calling("bash", command="ls"), "Done.")
    assert ended.reward.value == 0 and ended.reward.info["reason"]


@slow
def test_a_missing_image_is_an_error_that_names_it(row):
    with pytest.raises(CheckerError, match="no/such.*is missing"):
        episode(row | {"image": "no/such"}, FIX, "Done.")


# --- another try ----------------------------------------------------------------------------------


class Lost(RuntimeError):
    """The engine is lost."""


TOKENIZER = real("qwen3")


def policy(says: list, drafts: list, seed: int = 0) -> Reader:
    """A real sampler, whose engine takes its answers from a list; an error among them is raised."""
    dice = random.Random(seed)

    def answer(request):
        said = says.pop(0)
        if isinstance(said, Exception):
            raise said
        return spell(TOKENIZER, said, dice) + [TOKENIZER.eos_token_id], "stop"

    options = {"max_model_len": 1 << 17, "max_response_tokens": 4096, "chat_template_kwargs": {}}
    return Reader(Scripted(answer), TOKENIZER, Sampling(**options), seed, drafts, validation=False)


def bash(*commands: str) -> str:
    return json.dumps([["bash", json.dumps({"command": command})] for command in commands])


def tried(row: dict, says: list) -> tuple[Episode, list[str], list[int]]:
    """The episode of a row, tried until no error ends it.

    With it what each prompt of the last try said, and how many answers the engine gave in each.
    """
    book, asked = DraftBook(), []
    while True:
        before = len(says)
        try:
            with book.of("slot", 1, 1) as (drafts,):
                ended = asyncio.run(swe.rollout(row, policy(says, drafts)))
                asked.append(before - len(says))
                return ended, [TOKENIZER.decode(call.prompt_ids) for call in drafts], asked
        except (Lost, CheckerError):
            asked.append(before - len(says))


class Counted(Box):
    """A box that notes that it was opened, and what is run in it."""

    opened: list[list[str]] = []

    async def __aenter__(self):
        self.opened.append([])
        return await super().__aenter__()

    async def run(self, command, *limits):
        self.opened[-1].append(command)
        return await super().run(command, *limits)


@pytest.fixture
def opened(monkeypatch):
    """What was run in each box of an agent so far."""
    monkeypatch.setattr(Counted, "opened", [])
    monkeypatch.setattr(agent_session, "Box", Counted)
    return Counted.opened


@pytest.mark.smoke
@slow
def test_after_an_engine_was_lost_the_policy_sees_what_it_saw(row, opened):
    """The commands run again, as what they did is needed, but their new output is not shown."""
    says = [bash("echo seen $SRANDOM"), bash("sed -i s/minus/plus/ add.py"), Lost(), "Done."]
    ended, prompts, asked = tried(row, says)
    assert ended.reward.value == 1 and asked == [3, 1] and len(opened) == 2
    assert len(stitch(ended.turns)) == 1 and ended.reward.info["commands"] == 2
    number = re.search(r"seen (\d+)", prompts[1])[1]
    assert all(prompt.count(f"seen {number}") == 1 for prompt in prompts[1:])


@slow
def test_a_call_in_the_middle_of_an_answer_is_seen_once(row, opened, monkeypatch):
    """The node fails at the second of two calls: the first one's output is shown again."""
    calls = Tools.call
    failures = [CheckerError("the node")]

    async def call(self, name, given, left):
        if "sed" in given["command"] and failures:
            raise failures.pop()
        return await calls(self, name, given, left)

    monkeypatch.setattr(Tools, "call", call)
    says = [bash("echo seen $SRANDOM", "sed -i s/minus/plus/ add.py"), bash("cat add.py"), "Done."]
    ended, prompts, asked = tried(row, says)
    assert ended.reward.value == 1 and asked == [1, 2] and failures == []
    assert len(re.findall("seen [0-9]+", prompts[-1])) == 1 and "plus as add" in prompts[-1]


@slow
def test_an_episode_that_had_ended_is_only_judged_again(row, opened, monkeypatch):
    judge, patches = swe_judge.judge, []

    async def failing(image, row, patch, size):
        patches.append(patch)
        if len(patches) < 3:
            raise CheckerError("the judge's node")
        return await judge(image, row, patch, size)

    monkeypatch.setattr(swe_judge, "judge", failing)
    ended, _, asked = tried(row, [bash("sed -i s/minus/plus/ add.py"), "Done."])
    assert ended.reward.value == 1 and asked == [2, 0, 0]
    assert len(opened) == 1 and len(patches) == 3 and len(set(patches)) == 1
    assert len(ended.turns) == 2 and ended.reward.info["commands"] == 1


@slow
@pytest.mark.parametrize("says", [
    [bash("sed -i s/minus/plus/ add.py"), "Done."], ["Done."], [bash("echo > x"), "Done."],
    [json.dumps([["finish", "{}"]])],
])  # fmt: skip
def test_an_episode_that_was_judged_is_not_judged_again(row, opened, monkeypatch, says):
    """As where another one of its group has failed."""
    if "finish" in says[0]:
        row["harness"] = "openhands"
    book = DraftBook()
    found = []
    for _ in range(2):
        with pytest.raises(Lost), book.of("slot", 1, 1) as (drafts,):
            found.append(asyncio.run(swe.rollout(row, policy(says, drafts))))
            monkeypatch.setattr(swe_judge, "judge", None)
            monkeypatch.setattr(agent_session, "Box", None)
            raise Lost
    first, second = found
    assert first.reward == second.reward and len(first.turns) == len(second.turns)


@slow
def test_an_answer_that_differs_ends_the_journal(row, opened):
    """A try that begins anew, as its worker was lost, has none."""
    for number in range(2):
        ended, prompts, asked = tried(row, [bash(f"echo {number}"), "Done."])
        assert f"<tool_response>\n{number}\n" in prompts[1] and asked == [2]


# --- cancelled ------------------------------------------------------------------------------------


@types.coroutine
def cancelled_at(n: int, coroutine):
    """Runs a coroutine, whose task is cancelled as it waits for the n-th time."""
    step, waits = partial(coroutine.send, None), 0
    while True:
        try:
            waited = step()
        except StopIteration as stop:
            return stop.value
        if waits == n:
            asyncio.current_task().cancel()
        waits += 1
        try:
            yield waited
            step = partial(coroutine.send, None)
        except BaseException as error:
            step = partial(coroutine.throw, error)


@slow
def test_nothing_is_left_of_an_episode_that_is_cancelled_where_it_waits(row):
    """At each fifth of its awaits; in `bash tests/run.sh swe` at each."""
    asyncio.run(swe.rollout(row, Script(["Done."])))
    before = present()
    answers = [calling("bash", command="(setsid sleep 300 &); ls"), FIX, "Done."]

    def run(n: int) -> bool:
        """Whether the episode was cancelled at its n-th await, and left nothing."""

        async def play():
            return await cancelled_at(n, swe.rollout(row, Script(answers)))

        try:
            asyncio.run(play())
        except asyncio.CancelledError:
            assert not left(before), n
            return True
        return False

    n, step = (0, 1) if "GRPO_SWE" in os.environ else (random.randrange(5), 5)
    while run(n):
        n += step
    assert n > 50
