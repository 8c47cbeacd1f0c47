"""Shells in the sandbox: what they remember, what ends them, what they reach; their tasks."""

import asyncio
import json
import os
import subprocess
import time

import pytest

from envs import services
from envs.check_rows import check_row
from envs.sandbox import sandbox, shell
from envs.sandbox.sandbox import Limits
from envs.sandbox.shell import Shell
from envs.services import CheckerError
from envs.terminals import terminal_use
from rollout.response import Response
from settings.environment_services import Services
from support.chats import real, talker
from support.hostile_programs import OUT
from support.loop import at_once
from support.scripts import Script, calling
from support.tables import refused
from support.verifiers import HOSTILE

pytestmark = pytest.mark.skipif(bool(sandbox.problem()), reason=sandbox.problem())
SMALL = Limits(
    seconds=8, memory=1 << 30, processes=32, output=2000, disk=8 << 20, file_size=8 << 20
)
PYTHON = " ".join(sandbox.python())
EATS = 'import time; x = b"a" * (250 << 20); time.sleep(60)'
BASH = [{"type": "function", "name": "bash", "parameters": {"type": "object", "properties": {}}}]
PARAMS = {"input": "Sort numbers.txt into sorted.txt.", "tools": BASH}
ROW = {"agent_ref": {"name": "terminal_use"}, "responses_create_params": PARAMS}
ROW |= {"harness": "terminus_2", "files": {"data/numbers.txt": "30\n4\n100\n"}}
ROW["checks"] = [
    {"command": "cat data/sorted.txt", "stdout": "4\n30\n100\n"},
    {"command": "bash sort.sh < in", "stdout": "17\n1009", "files": {"in": "1009\n17\n"}},
]
SOLVE = "cd data && sort -n numbers.txt > sorted.txt; echo 'sort -n' > ../sort.sh\n"


def typing(*keys: str, done: bool = False, seconds: float = 5) -> str:
    commands = [{"keystrokes": each, "duration": seconds} for each in keys]
    answer = {"analysis": "", "plan": "", "commands": commands, "task_complete": done}
    return f"<think>...</think>{json.dumps(answer)}"


def episode(*answers: str, row: dict = ROW):
    """The episode of these answers, and the last message before each of them."""
    policy = Script(answers)
    return asyncio.run(terminal_use.rollout(row, policy)), policy.last()


async def shown(*keys: str, seconds: float = 5.0, files: dict | None = None) -> list[str]:
    """What one shell shows of these keys."""
    async with Shell(SMALL, files or {}) as terminal:
        return [await terminal.type(each, seconds) for each in keys]


def children() -> set[int]:
    return set(sandbox.family(os.getpid())) - {os.getpid()}


# --- shells ---------------------------------------------------------------------------------------


async def test_a_shell_remembers_and_shows_what_was_typed():
    keys = ("cd a; x=7\n", "pwd; echo $((x * 6))\n", "cat b.txt\n")
    first, second, third = await shown(*keys, files={"a/b.txt": "né\n"})
    assert first == "cd a; x=7\n~/a$ "
    assert second == "pwd; echo $((x * 6))\n/work/a\n42\n~/a$ " and "\nné\n" in third


async def test_it_waits_no_longer_than_the_command_or_than_asked():
    began = time.monotonic()
    keys = ("echo a\n", "sleep 99; echo no\n", "\x03", "(sleep 1; echo late)&\n", "")
    quick, slow, _, after, wait = await shown(*keys, seconds=1.5)
    assert "a\n" in quick and "no\n" not in slow.partition("\n")[2]
    assert "late" not in after.partition("\n")[2] or "late" in wait + after
    assert time.monotonic() - began < 90


async def test_a_command_of_many_lines_is_one():
    async with Shell(SMALL, {}) as terminal:
        lines = "for i in 1 2; do\n  echo $i\ndone\ncat > f <<EOF\nz\nEOF\ncat f; cd /tmp"
        assert await terminal.run(lines, 9) == "1\n2\nz\n/tmp$ "
        await terminal.type("rm -f /tmp/.command; mkfifo /tmp/.command; mkdir /tmp/d\n", 9)
        assert await terminal.run("echo $((6 * 7))", 9) == "42\n/tmp$ "
        await terminal.type("rm -f .command; mkdir .command\n", 9)
        assert "48\n" in await terminal.run("echo $((6 * 8))", 9)
        await terminal.type("rmdir .command; head -c 9M /dev/zero > /tmp/full\n", 9)
        assert "54\n" in await terminal.run("echo $((6 * 9))", 9)


async def test_a_shell_that_ends_is_followed_by_another():
    gone, new, *_ = await shown("sleep 60 & cd /tmp; exit\n", "pwd; pgrep sleep\n")
    assert "the shell has ended with all that it began" in gone
    assert new == "pwd; pgrep sleep\n/work\n~$ "


async def test_escapes_are_not_shown():
    (text,) = await shown(r"printf '\033[31mred\033[0m \033]0;title\007x\r\n10%%\r20%%\n'" + "\n")
    assert "\nred x\n20%\n" in text


async def test_much_output_is_cut():
    (text,) = await shown("seq 300000\n")
    assert len(text) < 3 * SMALL.output and "[... output cut ...]" in text
    assert text.startswith("seq 300000\n1\n2\n") and text.endswith("\n300000\n~$ ")


@pytest.mark.parametrize(("keys", "ended"), [
    ("yes > /dev/null\n", "time"),
    ("for i in $(seq 20); do (while :; do :; done)& done; wait\n", "time"),
    ("while :; do (timeout 0.2 yes > /dev/null); done\n", "time"),
    (f"for i in 1 2 3; do {PYTHON} -c '{EATS}' & done; wait\n", "memory"),
])  # fmt: skip
async def test_what_uses_too_much_is_ended(keys, ended):
    limits = SMALL._replace(seconds=1 + (ended == "memory"), memory=512 << 20)
    async with Shell(limits, {}) as terminal:
        await terminal.type("echo 1 > kept\n", 5)
        await terminal.type(keys, 60)
        assert terminal.ended == ended
        assert terminal.seen("...") == f"...\n[the terminal was ended: too much {ended}]"
        assert b"kept" in await terminal.pack(), "what was done before counts"


async def test_a_background_process_is_ended_while_the_policy_thinks():
    async with Shell(SMALL._replace(seconds=1), {}) as terminal:
        await terminal.type("yes > /dev/null &\n", 1)
        await asyncio.sleep(5)
        await terminal.type("", 0.1)
        assert terminal.ended == "time"


async def test_what_hurts_does_not_end_the_terminal():
    """A fork bomb, a full disk, killing all, a stopped host, and a terminal in disorder."""
    harm = [
        ":(){ :|:& };:\n",
        "head -c 20M /dev/zero > full; head -c 20M /dev/zero > /tmp/full\n",
        "kill -9 -1; kill -STOP 1; kill -9 1\n",
        "rm -rf / 2>/dev/null; rm -rf ~/* ~/.* 2>/dev/null\n",
        "exec 9>&- 0<&- 1>&- 2>&-\n",
        "stty -echo raw; PROMPT_COMMAND=; exec sh\n",
    ]
    async with Shell(SMALL._replace(seconds=90), {}) as terminal:
        for each in harm:
            await terminal.type(each, 1.0)
        screen, end = "", time.monotonic() + 90
        while "42" not in screen and not terminal.ended and time.monotonic() < end:
            for each in ("\x03", "exit\n", "echo $((6 * 7))\n"):
                screen += await terminal.type(each, 1.0)
        assert "42" in terminal.seen(screen)


@pytest.mark.parametrize(
    ("made", "listed"), [("chmod 0 f; chmod 0 .", "f"), ("mkfifo p; ln -s / up", "f p up")]
)
async def test_odd_folders_are_packed(made, listed):
    async with Shell(SMALL, {"f": "1"}) as terminal:
        await terminal.type(made + "\n", 5)
        packed = await terminal.pack()
    said = await shell.said_after(packed, {}, "cat f; echo ' '$(ls)", SMALL)
    assert said == f"1 {listed}\n"


def test_a_folder_too_large_to_pack_earns_nothing():
    answer = typing("for i in $(seq 40); do truncate -s 30M $i; done\n", done=True)
    made, _ = episode(answer)
    assert made.reward.info == {"reason": "the working folder cannot be read"}


def test_a_folder_too_deep_to_unpack_earns_nothing():
    """Made step by step, as no path names all of it."""
    deep = "for _ in $(seq 40); do mkdir $name; cd $name; done"
    keys = f"cd; name=$(printf d%.0s $(seq 250)); {deep}\n"
    made, _ = episode(typing(keys, done=True))
    assert (made.reward.value, made.reward.info) == (0.0, {"passed": 0.0})


async def test_nobody_gets_out_or_at_the_host():
    """The programs of support/hostile_programs.py; the first process stands for the parent."""
    of_host = {name: code for name, code in OUT.items() if "getppid" in code or "/proc/1" in code}
    assert len(of_host) > 9
    pieces = {f"{i}.py": code for i, code in enumerate(of_host.values())}
    texts = {p: f"{c.replace('os.getppid()', '1')}\nprint(4_9)\n" for p, c in pieces.items()}
    texts["control.py"] = "print(49)"
    loop = f"for i in *.py; do timeout 9 {PYTHON} $i > $i.out 2>/dev/null </dev/null; done\n"
    *_, said = await shown(loop, "grep -lx 49 *.out; echo end\n", files=texts, seconds=60)
    assert [line for line in said.split("\n") if ".py.out" in line] == ["control.py.out"]


async def cancelled(seconds: float, *keys: str, timeout: float = 60) -> None:
    """Cancels a shell into which these keys are typed, which then has to end in time."""

    async def use() -> None:
        async with Shell(SMALL, {}) as terminal:
            for each in keys:
                await terminal.type(each, 60)

    task = asyncio.create_task(use())
    await asyncio.sleep(seconds)
    task.cancel()
    assert (await asyncio.wait({task}, timeout=timeout))[0], seconds


def test_nothing_is_left_of_a_shell_that_is_cancelled():
    before = children()
    for seconds in (0.0, 0.005, 0.02, 0.05, 0.1, 0.3, 1.0):
        asyncio.run(cancelled(seconds, "(setsid sleep 300 &) ; sleep 300\n"))
        end = time.monotonic() + 60
        while children() > before and time.monotonic() < end:
            time.sleep(0.05)
        assert children() <= before, seconds


def test_a_shell_that_is_cancelled_while_it_starts_is_not_waited_for():
    """For a few milliseconds bubblewrap's child outlives it, and holds the pipes."""
    for i in range(50):
        at_once(cancelled((i + j / 4) % 30 / 1000, timeout=10) for j in range(4))


def test_many_at_once():
    async def one(i: int) -> str:
        async with Shell(SMALL, {"n": str(i)}) as terminal:
            await terminal.type("sleep 0.5; x=$(cat n)\n", 30)
            return await terminal.run("echo $((x * 2))", 30)

    before = children()
    assert [int(text.split()[0]) for text in at_once(map(one, range(16)))] == [*range(0, 32, 2)]
    assert children() <= before


@pytest.mark.parametrize("name", ["unsafe", "http"])
async def test_only_bubblewrap_holds_shells(name):
    services.configure(Services(sandbox=name, sandbox_url="http://127.0.0.1:9"))
    assert shell.NEED.problem() == f"services.sandbox = {name!r}, expected 'bubblewrap'"
    with pytest.raises(CheckerError, match="bubblewrap|no commands"):
        await shown("ls\n")


async def test_a_terminal_that_dies_is_an_error():
    with pytest.raises(CheckerError, match="a sandbox terminal"):
        async with Shell(SMALL, {}) as terminal:
            terminal.process.kill()
            await terminal.type("ls\n", 1)


# --- tasks ----------------------------------------------------------------------------------------


def test_a_task_is_solved_in_several_answers():
    made, seen = episode(typing("ls data\n"), "no JSON", typing(SOLVE), typing(done=True))
    assert (made.reward.value, made.reward.info) == (1.0, {"passed": 1.0})
    assert seen[0] == ROW["responses_create_params"]["input"] and "numbers.txt" in seen[1]
    assert seen[2] == terminal_use.NO_FORM and "~/data$" in seen[3] and len(made.turns) == 4


def test_an_episode_is_one_sequence():
    """On a real chat template, by a real sampler."""
    tokenizer = real("qwen3")
    sampler, _ = talker(tokenizer, [typing("ls data\n"), typing(SOLVE, done=True)], limit=1 << 16)
    made = asyncio.run(terminal_use.rollout(ROW, sampler))
    (sample,) = made.samples(ROW)
    sampled = [token for turn in made.turns for token in turn.token_ids]
    assert sample.tokens_T[sample.mask_T].tolist() == sampled and made.reward.value == 1
    assert "numbers.txt" in tokenizer.decode(sample.tokens_T[~sample.mask_T])


def test_terminus_1():
    command = {"keystrokes": SOLVE, "is_blocking": True, "timeout_sec": 9}
    answer = {"state_analysis": "", "explanation": "", "commands": [command]}
    answer["is_task_complete"] = True
    row = ROW | {"harness": "terminus_1"}
    assert episode(json.dumps(answer), row=row)[0].reward.value == 1
    assert episode(typing(SOLVE, done=True), "", row=row | {"max_turns": 2})[0].reward.value == 0


def test_a_tool_of_commands():
    row = ROW | {"harness": "bash"}
    check_row(row)
    assert [need.name for need in terminal_use.needs(row)] == ["shell", "tool_parser"]
    answers = [calling("bash", command="ls data"), calling("bash", command=3)]
    made, seen = episode(*answers, calling("bash", command=SOLVE), "Done.", row=row)
    assert made.reward.value == 1 and seen[1].startswith("numbers.txt\n")
    assert json.loads(seen[2]) == {"error": "the argument `command` is not a text"}
    assert episode("Done.", row=row)[0].reward.info == {"reason": "nothing was typed"}


def test_part_of_a_task_earns_nothing_but_is_told():
    made, _ = episode(typing("sort -n data/numbers.txt > data/sorted.txt\n", done=True))
    assert (made.reward.value, made.reward.info) == (0.0, {"passed": 0.5})


def test_turns_are_limited_and_the_folder_counts_all_the_same():
    row = ROW | {"max_turns": 2}
    made, seen = episode(typing("ls\n"), typing(SOLVE), typing(SOLVE), row=row)
    assert made.reward.value == 1 and len(seen) == len(made.turns) == 2


def test_an_answer_waits_for_a_limited_time(monkeypatch):
    monkeypatch.setattr(terminal_use, "ANSWER_SECONDS", 1.0)
    began = time.monotonic()
    waits = ["sleep 500\n"] * 50
    for seconds in (1e400, 10**400, -1, float("nan"), 40):
        episode(typing(*waits, done=True, seconds=seconds), row=ROW | {"checks": ROW["checks"][:1]})
    assert time.monotonic() - began < 300


@pytest.mark.parametrize("keys", [
    # What is left behind is dead before the check, and its shell is another.
    "(while :; do echo '4 30 100' > data/sorted.txt; done) & alias cat='echo 4 30 100'\n",
    "echo 'cat() { echo 4; echo 30; echo 100; }' > .bashrc; cp .bashrc .profile\n",
    "mkdir bin; printf '#!/bin/sh\\necho 17; echo 1009' > bin/bash; chmod +x bin/bash; "
    "PATH=$PWD/bin:$PATH; cp -r bin .local\n",
    # What the check brings is written over what is there.
    "mkdir .given; printf '17\\n1009' > .given/in; ln -s .given/in in; echo cat > sort.sh\n",
    "mkdir -p /tmp/given && chmod 0 /tmp/given; echo cat > sort.sh; mkdir in\n",
])  # fmt: skip
def test_a_check_cannot_be_forged(keys):
    made, _ = episode(typing(keys, done=True, seconds=1))
    assert made.reward.value == 0, keys


def test_a_check_whose_sandbox_does_not_begin_is_an_error(monkeypatch):
    refused = ["sh", "-c", "echo bwrap: no more namespaces >&2; exit 1"]
    monkeypatch.setattr(sandbox, "wrapped", lambda *_: refused)
    with pytest.raises(CheckerError, match="did not start a run: code 1: .*no more namespaces"):
        asyncio.run(shell.said_after(b"", {}, "echo 17", SMALL))


@pytest.mark.parametrize("place", ["base64 -d", "tar -x"])
def test_a_folder_that_cannot_be_unpacked_is_an_error(monkeypatch, place):
    """As where a process is refused, or killed."""
    broken = shell.CHECK.replace(place, "sh -c 'kill -9 $$'")
    assert broken != shell.CHECK
    monkeypatch.setattr(shell, "CHECK", broken)
    with pytest.raises(CheckerError, match="a folder cannot be unpacked: code"):
        episode(typing(SOLVE, done=True))


@pytest.mark.parametrize("number", [1, 2, 9, 15])
def test_a_check_that_a_signal_ends_runs_once_more(default_signals, monkeypatch, number):
    run, left = sandbox.run, [f"kill -{number} $$; sleep 60"]

    async def runs(argv: list[str], **options) -> sandbox.Ran:
        return await run([*argv[:-1], left.pop() if left else argv[-1]], **options)

    monkeypatch.setattr(sandbox, "run", runs)
    folder = subprocess.check_output(["tar", "-c", "-T", os.devnull])
    assert asyncio.run(shell.said_after(folder, {}, "echo 17", SMALL)) == "17\n"
    assert asyncio.run(shell.said_after(folder, {}, f"kill -{number} $$", SMALL)) == ""


async def test_a_pack_that_is_killed_is_an_error(monkeypatch):
    text = shell.TEXT.replace('["tar", "-c", "-C", "/work", "."]', '["sh", "-c", "kill -9 $$"]')
    assert text != shell.TEXT
    monkeypatch.setattr(shell, "TEXT", text)
    async with Shell(SMALL, {}) as terminal:
        with pytest.raises(CheckerError, match="tar was killed"):
            await terminal.pack()


def test_what_a_check_expects_is_nowhere_in_the_sandbox():
    secret = "d41d8cd98f-secret"
    hidden = {"command": f"cat x; : {secret}-command", "stdout": secret, "files": {"x": secret}}
    row = ROW | {"checks": [hidden]}
    look = "cat /proc/*/environ /proc/*/cmdline 2>/dev/null | grep -ac 'd41d[8]'\n"
    find = "grep -rs 'd41d[8]' / --exclude-dir=proc --exclude-dir=usr --exclude-dir=sys | wc -l\n"
    _, seen = episode(typing(look), typing(find, seconds=60), typing(done=True), row=row)
    assert [text.split("\n")[1] for text in seen[1:]] == ["0", "0"]


def test_an_untouched_folder_earns_nothing():
    row = ROW | {"checks": [{"command": "cat data/numbers.txt", "stdout": "30\n4\n100"}]}
    for answers in ([""], ["<think>"], ["I am done."]):
        made, _ = episode(*answers, row=row | {"max_turns": 1})
        assert made.reward.info == {"reason": "nothing was typed"} and made.reward.value == 0
    assert episode(typing("ls\n", done=True), row=row)[0].reward.value == 1


async def test_hostile_answers_are_typed_in_time():
    """Keys of any kind neither stop a terminal nor end it."""
    for text in HOSTILE:
        began = time.monotonic()
        played = await terminal_use.play(ROW, None, Response.of(text))
        assert played == (terminal_use.NO_FORM, False)
        async with Shell(SMALL, {}) as terminal:
            answer = Response.of(typing(text, "\x03", "\n", seconds=0.3))
            told, done = await terminal_use.play(ROW, terminal, answer)
            assert len(told) < 2 * terminal_use.LIMITS.output and not done and not terminal.ended
            assert await terminal.pack()
        assert time.monotonic() - began < 60, text[:9]


def test_one_answer_is_judged_by_itself():
    assert asyncio.run(terminal_use.verify(ROW, Response(typing(SOLVE)))).value == 1


test_bad_rows = refused(
    lambda change: check_row(ROW | change),
    ({"harness": None}, "harness is missing or null, expected the name of a harness"),
    ({"harness": "codex"}, "harness is 'codex', expected one of: bash, terminus_1, term"),
    ({"max_turns": 0}, "max_turns is 0, expected 1 or more"),
    ({"files": []}, r"files is \[\], expected an object"),
    ({"files": {"/etc/x": ""}}, "files is '/etc/x', expected paths inside"),
    ({"files": {"a/../../x": ""}}, "files is 'a/../../x', expected paths inside"),
    ({"files": {"": ""}}, "files is '', expected paths inside"),
    ({"files": {"a": 1}}, "files.a is 1, expected the text of a file"),
    ({"checks": []}, r"checks is \[\], expected one check or more"),
    ({"checks": ["ls"]}, r"checks\[0\].command is missing or null"),
    ({"checks": [{"command": "ls"}]}, r"checks\[0\].stdout is missing or null"),
    ({"checks": [{"command": "ls", "stdout": " "}]}, r"checks\[0\].stdout is '', expected a te"),
    ({"checks": [{"command": "ls", "stdout": "a" * 2**20 + "b"}]},
     r"checks\[0\].stdout is 'a.*b', expected a text of 1 to 1048576 bytes"),
    ({"checks": [{"command": "ls", "stdout": "a", "files": {"..": ""}}]},
     r"checks\[0\].files is '..', expected paths inside"),
    ({"harness": "bash", "responses_create_params": {"input": "?"}}, "tools is missing"),
    taken=({},),
)  # fmt: skip
