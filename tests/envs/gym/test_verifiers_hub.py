"""Environments of the library verifiers, played by the library itself behind launch/verifiers_hub.

GRPO_HUB is a virtual environment with requirements/hub.txt. What needs none is tested without.
"""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

import envs
from core import errors
from envs import check_rows, registry, services
from envs.gym import gym, nemo_gym
from envs.judge import judge
from rollout.chat import NoRoom
from rollout.episode import stitch
from settings.environment_services import Services
from support.chats import CHATML, FORGETFUL, make_tokenizer, saying

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = ROOT / "launch/verifiers_hub.py"
FOLDER = ROOT / "tests/support/hub"  # its modules are environments
FILES = [str(FOLDER / name) for name in ("sums.toml", "counter.toml")]
HUB = os.environ.get("GRPO_HUB", "")
real = pytest.mark.skipif(not HUB, reason="bash tests/run.sh hub runs these")
TOKENIZER = make_tokenizer(FORGETFUL, CHATML, "<|im_end|>")


def hub(*words: str, **options) -> subprocess.Popen:
    """The program, in a session of its own."""
    command = [str(ROOT / HUB / "bin/python"), str(PROGRAM), *words]
    environment = os.environ | {"PYTHONPATH": str(FOLDER)} | options
    both = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, env=environment, cwd=ROOT, start_new_session=True, **both)


def told(*words: str) -> str:
    return hub(*words).communicate(timeout=120)[0]


class Server:
    """The server of both environments, at a port of its own."""

    def __init__(self) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"

    def up(self) -> None:
        self.program = hub(*FILES, HUB_PORT=str(self.port))
        assert self.program.stdout.readline() == f'services.nemo_gym = ("{self.url}",)\n'

    def down(self) -> None:
        os.killpg(self.program.pid, signal.SIGTERM)
        self.program.communicate(timeout=60)

    def players(self) -> int:
        """Processes that the server has started and that live."""
        listed = ["ps", "-o", "pid=", "--ppid", str(self.program.pid)]
        return len(subprocess.run(listed, capture_output=True, text=True).stdout.split())


@pytest.fixture(scope="module")
def server():
    one = Server()
    one.up()
    yield one
    one.down()


@pytest.fixture(scope="module")
def rows():
    """Rows of both environments, by name."""
    lines = told("rows", "4", *FILES)
    by_name: dict[str, list] = {"sums": [], "counter": []}
    for row in map(json.loads, lines.splitlines()):
        by_name[row["agent_ref"]["name"].removeprefix("verifiers.")].append(row)
    return by_name


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    """A try may take a minute: its tools are programs that start."""
    services.configure(Services(), services.Limits(60.0))
    monkeypatch.setattr(judge, "pause", lambda failures: 0.05)
    gym._problem.cache_clear()


def sampler_of(*texts, seed=0, limit=8192):
    """A policy that says these texts, oddly spelled, or fails."""
    left = list(texts)
    return saying(TOKENIZER, lambda prompt: left.pop(0), seed, limit, 1024)


def add(n: int, name: str = "add") -> str:
    return json.dumps([[name, json.dumps({"a": n})]])


def attempt(server, row, *texts, **options):
    """The episode of one rollout, which trains on what was sampled and on nothing else."""
    services.configure(Services(nemo_gym=(server.url,)))
    episode = asyncio.run(nemo_gym.rollout(row, sampler_of(*texts, **options)))
    (sample,) = stitch(episode.turns)
    sampled = sum((turn.token_ids for turn in episode.turns), [])
    assert sample.tokens_T[sample.mask_T].tolist() == sampled
    return episode


def test_without_the_library_it_says_what_is_missing():
    """That of the tests has none; `-S` so that it stays so."""
    words = [sys.executable, "-S", str(PROGRAM), "x.toml"]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 1 and not done.stdout
    expected = "error: No module named 'verifiers'; expected a Python with requirements/hub.txt"
    assert done.stderr.startswith(expected)


def test_a_row_without_its_task_is_refused():
    services.configure(Services(nemo_gym=("http://127.0.0.1:9",)))
    row = {"responses_create_params": {"input": []}, "agent_ref": {"name": "verifiers.sums"}}
    missing = r"task is missing or null, expected .*verifiers_hub.py rows"
    with pytest.raises(ValueError, match=missing):
        check_rows.check_row(row)
    check_rows.check_row(row | {"task": {"idx": 0}})
    check_rows.check_row(row | {"agent_ref": {"name": "verifiers_of_another_kind"}})


@real
def test_an_answer_earns_what_the_environment_says(server, rows):
    row = rows["sums"][3]
    assert row["responses_create_params"]["input"] == [{"role": "user", "content": "3 + 4?"}]
    episode = attempt(server, row, "<think>the the</think> an abane 7")
    assert episode.reward == envs.Reward(1.0, {"words": 3.0})
    assert "user\n3 + 4?<|im_end|>" in TOKENIZER.decode(episode.turns[0].prompt_ids)
    assert attempt(server, row, "an 8").reward == envs.Reward(0.0, {"words": 2.0})
    check_rows.check_row(row)


@real
def test_tools_and_their_state_decide_over_many_turns(server, rows):
    row = rows["counter"][1]
    said = [add(3), add(1), "<think>the</think> there, the end "]
    episode = attempt(server, row, *said)
    assert episode.reward.value == 1.0 and [turn.text for turn in episode.turns] == said
    text = TOKENIZER.decode(episode.turns[2].prompt_ids)
    assert "<|im_start|>tool\nit is 3<|im_end|>" in text and "tool\nit is 4<|im_end|>" in text
    episode = attempt(server, row, add(3), add(9, "nothing"), "done")
    assert episode.reward.value == 0.0
    assert "error: unknown tool 'nothing'" in TOKENIZER.decode(episode.turns[2].prompt_ids)


@real
def test_many_at_once_keep_apart(server, rows):
    services.configure(Services(nemo_gym=(server.url,)))
    samplers = [sampler_of(f"it is {n}", seed=n) for n in range(12)]
    episodes = asyncio.run(registry.rollouts(rows["sums"][2], samplers))
    assert [episode.reward.value for episode in episodes] == [float(n == 6) for n in range(12)]


@real
def test_a_full_context_ends_an_episode_that_is_scored_and_has_to_begin(server, rows):
    row = rows["counter"][1]
    first = attempt(server, row, add(4), "done").turns[1].prompt_ids
    limit = len(first)  # which leaves no room for a second answer
    episode = attempt(server, row, add(4), "done", limit=limit)
    assert len(episode.turns) == 1 and episode.reward.value == 1.0
    with pytest.raises(NoRoom):
        attempt(server, row, add(4), limit=20)


@real
def test_what_fails_in_the_environment_is_no_reward(server, rows):
    row = rows["sums"][3]
    with pytest.raises(services.CheckerError, match="no verdict: TaskError: .*the rubric broke"):
        attempt(server, row, "broken")
    with pytest.raises(services.CheckerError, match="no verdict: row: .*task is .*answer"):
        attempt(server, row | {"task": {"answer": 3}}, "7")


@real
@pytest.mark.parametrize("said", [[], [add(3)]])
def test_an_engine_that_dies_ends_the_try_at_once_and_leaves_no_process(server, rows, said):
    lost = ConnectionError("the engine is lost")
    with pytest.raises(ConnectionError, match="the engine is lost"):
        attempt(server, rows["counter"][1], *said, lost)
    limit = time.monotonic() + 10
    while server.players() and time.monotonic() < limit:
        time.sleep(0.1)
    assert not server.players()


@real
async def test_a_server_that_is_away_costs_time(rows):
    server = Server()
    services.configure(Services(nemo_gym=(server.url,)))
    try:
        trying = asyncio.create_task(nemo_gym.rollout(rows["sums"][3], sampler_of("so 7")))
        await asyncio.sleep(1)
        assert list(services.report().away) == ["nemo_gym.verifiers.sums"]
        await asyncio.to_thread(server.up)
        assert (await trying).reward.value == 1.0
    finally:
        server.down()


@real
def test_environments_that_nobody_has_are_refused_by_name(server, rows):
    services.configure(Services(nemo_gym=(server.url,)))
    check_rows.check_services(rows["sums"][0])
    absent = "no agent 'verifiers.sudoku' there, but verifiers.c"
    with pytest.raises(errors.ModuleError, match=absent):
        check_rows.check_services(rows["sums"][0] | {"agent_ref": {"name": "verifiers.sudoku"}})


@real
@pytest.mark.parametrize(("config", "expected"), [
    ('[env.taskset]\nid = "sudoku"', "ModuleNotFoundError: taskset 'sudoku' not found"),
    ('[env]\nretries.max_retries = 2\ntaskset.id = "sums"', "retries = max_retries=2"),
    ('[env.agent]\nretries.max_retries = 2\n[env.taskset]\nid = "sums"', "retries = max_retri"),
    ('[env]\nid = "user-sim"\ntaskset.id = "sums"', "plays are ['assistant', 'user'], exp"),
    ("[env", "TOMLDecodeError"),
    ("x = 1", "KeyError: 'env'"),
    ('[env]\nhue = 1\ntaskset.id = "sums"', "hue\n  Extra inputs are not permitted"),
])  # fmt: skip
def test_a_file_that_nothing_can_be_trained_with_is_refused(tmp_path, config, expected):
    path = tmp_path / "x.toml"
    path.write_text(config)
    text = told(str(path))
    assert text.startswith(f"error: {path}: ") and expected in text


@real
@pytest.mark.parametrize("words", [[], ["x"], ["rows", "2"], ["rows", "0", "x.toml"]])
def test_words_that_say_nothing_are_refused(words):
    assert told(*words).endswith("expected FILE.toml..., or rows NUMBER FILE.toml\n")
