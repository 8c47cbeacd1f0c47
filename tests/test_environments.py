"""Rows of every environment in one file, trained end to end by the real engine."""

import os
import shutil
import tempfile
from pathlib import Path

import pytest
from conftest import make_config, write_rows

from envs import registry
from envs.rollout.messages import last_question
from envs.sandbox import sandbox
from settings.services import Services
from support.configs import changed
from support.judges import Judge, configured
from support.program import Program
from support.verifiers import gym_rows

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
# Files of NeMo-Gym's example rows, and the agents that judge them.
NAMES = (
    *("math_with_judge", "mcqa", "instruction_following", "structured_outputs", "code_gen"),
    *("reasoning_gym", "calendar", "terminal_pivot", "terminus_judge", "math_formal_lean"),
    *("swerl_gen", "equivalence_llm_judge", "nl2bash", "multichallenge", "inverse_if"),
    *("jailbreak_detection", "over_refusal_detection"),
)
TOOL_USE = "single_step_tool_use_with_argument_comparison"
FILES = {name: f"{name}_simple_agent" for name in NAMES} | {TOOL_USE: f"{TOOL_USE}_agent"}
FILES |= {"mcqa_regex": "mcqa_simple_agent", "genrm_compare": "genrm_simple_agent"}
# Their tools or stories are longer than what the tiny model reads, or no row is published.
ELSEWHERE = {"swe/swe_pivot", "office/workplace", "maths/python_tool", "terminals/terminal_use"}
ELSEWHERE |= {"tools/conversation", "proofs/lean_refinement"}
VERDICT = '{"score_1": 4, "score_2": 2, "ranking": 2} [[A=B]] [[NO]] FAIL Response harm: harmful'


@pytest.fixture
def lean():
    """A command that stands in for Lean, in a folder that the sandbox's user can read."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        program = shutil.copy(Path(__file__).parent / "support/lean_stand_in.py", folder)
        yield f"{sandbox.python()[0]} {program}"


def test_a_file_with_rows_of_all_of_them_trains(tiny_model, tmp_path, lean):
    """Three steps over each file's first row; rewards are logged by environment and data set."""
    if why := sandbox.problem():
        pytest.skip(why)
    rows = []
    for name, agent in FILES.items():
        row = gym_rows(name, agent)[0] | {"dataset": name}
        # The tiny model reads 96 tokens.
        question = [{"role": "user", "content": last_question(row)[-40:]}]
        rows.append(row | {"responses_create_params": {"input": question}})
    data = {"train": write_rows(tmp_path / "mixed.jsonl", rows)}
    with Judge(VERDICT) as judge:
        judges = configured(general=judge, safety=judge, genrm=judge)
        own = Services(tool_parser="hermes", lean=lean, images=str(tmp_path), judges=judges)
        cfg = make_config(tiny_model, tmp_path)
        sizes = {"prompts_per_step": len(rows), "group_size": 2, "skip_zero_advantage": False}
        cfg = changed(cfg, data=data, services=own, **sizes)
        program = Program(cfg).succeeds()
    assert judge.asked
    steps = program.steps()
    assert [metrics["step"] for metrics in steps] == [1, 2, 3]
    assert not program.lines("dropped.jsonl")
    expected = {f"reward/{agent}/{name}" for name, agent in FILES.items()}
    assert all(expected <= metrics.keys() for metrics in steps)
    served = {registry.agents()[agent] for agent in FILES.values()}
    assert served >= set(registry.agents().values()) - ELSEWHERE
