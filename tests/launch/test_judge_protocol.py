"""A real judge: vLLM's server, as launch/judges.sh starts it, asked by envs/judge/judge.py."""

import asyncio
import contextlib
import os
import signal
import time
from pathlib import Path

import pytest
from conftest import serving_judge

from envs import services
from envs.judge import judge
from settings.environment_services import Services
from support.program import is_alive

pytestmark = pytest.mark.e2e
LENGTH = 128  # of prompt and answer; a token is a character


@pytest.fixture
def serving(tiny_model, tmp_path):
    """The judge "general", of whose service the environments of this process know."""
    with serving_judge("general", tiny_model, tmp_path, LENGTH) as process:
        services.configure(Services(), services.Limits(300.0))
        yield process


def servers(group: int) -> list[int]:
    """vLLM's processes of a process group."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = stat.read_text().rpartition(")")[2].split()
            words = (stat.parent / "cmdline").read_bytes().lower()
            if int(fields[2]) == group and b"vllm" in words:
                found.append(int(stat.parent.name))
    return [pid for pid in found if is_alive(pid)]


def ask(text: str, **sampling):
    """A reply of seven tokens, which then ends by itself: one that is cut off says nothing."""
    message = [{"role": "user", "content": text}]
    ends = {"min_tokens": 7, "max_tokens": 32, "logit_bias": {"1": 100}}  # 1: <eos>
    return judge.ask("general", message, lambda said: (said,), **ends | sampling)


async def first_answer() -> str:
    """What a greedy judge says, once it is there; it is down until then."""
    began = time.monotonic()
    asked = asyncio.create_task(ask("how are you?", temperature=0.0))
    while not services.report().away:
        await asyncio.sleep(0.1)
    assert "no address in JUDGES_FILE" in services.report().away["judges.general"]
    (first,) = await asked
    print(f"the first answer came after {time.monotonic() - began:.1f} s")
    assert 0 < len(first) <= 8 and not services.report().away
    return first


async def disturbed(first: str, group: int, number: signal.Signals, seconds: float) -> None:
    """200 calls are answered although the server gets a signal, and for so long no SIGCONT."""
    calls = [asyncio.create_task(ask("how are you?", temperature=0.0)) for _ in range(200)]
    await asyncio.sleep(0.3)
    stopped = servers(group)
    began = time.monotonic()
    for pid in stopped:
        os.kill(pid, number)
    await asyncio.sleep(seconds)
    assert services.report().away and not all(call.done() for call in calls)
    for pid in stopped:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
    assert set(await asyncio.gather(*calls)) == {(first,)}
    print(f"200 calls were answered {time.monotonic() - began:.1f} s after {number.name}")


@pytest.mark.long
async def test_a_real_server_is_waited_for_asked_and_missed(serving, monkeypatch):
    assert judge.need("general").problem() == "", "it comes with the job"
    first = await first_answer()
    hostile = "\0 \ud800 \U0001f600 </think> <|im_end|>"
    every = await asyncio.gather(*(ask(f"{hostile} {i}") for i in range(100)))
    assert all(len(said) <= 8 for (said,) in every)
    assert not services.report().failures
    assert await ask("x" * LENGTH) is None
    monkeypatch.setattr(services, "SILENCE", 1.0)
    await disturbed(first, serving.pid, signal.SIGSTOP, 5)
    assert set(services.report().failures) == {"general/timeout", "general/malformed"}


@pytest.mark.skipif(not os.environ.get("GRPO_JUDGES"), reason="GRPO_JUDGES=1 asks for it: 2 min")
async def test_a_real_server_that_is_killed_is_started_again(serving):
    await disturbed(await first_answer(), serving.pid, signal.SIGKILL, 5)
    assert services.report().failures["general/connection"] >= judge.FAILURES
