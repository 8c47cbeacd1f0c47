"""Rows with `exact` are judged in the worker: as the library would extract, and in little time."""

import asyncio
import os
import random
import re
import time

from hypothesis import given, settings
from hypothesis import strategies as st
from reasoning_gym.utils import extract_answer

from envs.questions import reasoning_gym
from envs.questions.exact import extract
from envs.sandbox.checkers import Checkers
from support.examples import tries

PARTS = ["<answer>", "</answer>", "\\boxed{", "}", "{", "[", "]", "'", ",", " ", "\n", "a", "<"]
ROW = {"question": "?", "answer": "a", "metadata": {"source_dataset": "spell_backward"}}


def as_gym(text: str) -> str:
    """What NeMo-Gym's resources_servers/reasoning_gym extracts."""
    if (tagged := extract_answer(text)) is not None:
        return tagged
    boxed = re.search(r"\\boxed\{([^}]+)\}", text)
    return (boxed[1] if boxed else text).strip()


@given(st.lists(st.sampled_from(PARTS)).map("".join) | st.text())
@settings(max_examples=tries(2000), deadline=None)
def test_an_answer_is_extracted_as_by_the_library(text):
    assert extract(text) == as_gym(text)


def test_hostile_answers_take_little_time_and_no_process(monkeypatch):
    """As many as GRPO_HOSTILE says, of 300,000 characters each."""
    monkeypatch.delattr(Checkers, "run")
    n = random.Random(0)
    slowest = 0.0
    for _ in range(int(os.environ.get("GRPO_HOSTILE", "300"))):
        chosen = n.choices(PARTS, k=n.randint(1, 4))
        text = "".join(chosen) * (300_000 // len("".join(chosen)))
        row = ROW | {"exact": True, "answer": n.choice(["a", "['a', 'b']"])}
        began = time.process_time()
        asyncio.run(reasoning_gym.verify(row, text))
        slowest = max(slowest, time.process_time() - began)
    print(f"the slowest took {1000 * slowest:.1f} ms")
    assert slowest < 2  # 0.02 on an idle machine
