"""Rows of every environment in one file, trained end to end by the real engine."""

import json
import os
import shutil
import tempfile
from pathlib import Path

import pytest
from conftest import make_config

import envs
from envs.rollout import services
from envs.rollout.rows import last_question
from envs.sandbox import sandbox
from support.configs import changed
from support.judges import Judge, configured
from support.program import Program
from support.verifiers import gym_rows

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
# Files of NeMo-Gym's example rows, and the agents that judge them.
FILES = {
    "math_with_judge": "math_with_judge_simple_agent",
    "mcqa": "mcqa_simple_agent",
    "mcqa_regex": "mcqa_simple_agent",
    "instruction_following": "instruction_following_simple_agent",
    "structured_outputs": "structured_outputs_simple_agent",
    "code_gen": "code_gen_simple_agent",
    "reasoning_gym": "reasoning_gym_simple_agent",
    "calendar": "calendar_simple_agent",
    "single_step_tool_use_with_argument_comparison": (
        "single_step_tool_use_with_argument_comparison_agent"
    ),
    "terminal_pivot": "terminal_pivot_simple_agent",
    "terminus_judge": "terminus_judge_simple_agent",
    "math_formal_lean": "math_formal_lean_simple_agent",
    "swerl_gen": "swerl_gen_simple_agent",
    "equivalence_llm_judge": "equivalence_llm_judge_simple_agent",
    "nl2bash": "nl2bash_simple_agent",
    "multichallenge": "multichallenge_simple_agent",
    "inverse_if": "inverse_if_simple_agent",
    "jailbreak_detection": "jailbreak_detection_simple_agent",
    "over_refusal_detection": "over_refusal_detection_simple_agent",
    "genrm_compare": "genrm_simple_agent",
}
# Their tools or stories are longer than what the tiny model reads, or no row is published.
ELSEWHERE = {"swe_pivot", "workplace", "python_tool", "terminal_use", "conversation"}
ELSEWHERE |= {"lean_refinement"}
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
    path = tmp_path / "mixed.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with Judge(VERDICT) as judge:
        judges = configured(general=judge, safety=judge, genrm=judge)
        own = services.Services(
            tool_parser="hermes", lean=lean, images=str(tmp_path), judges=judges
        )
        cfg = make_config(tiny_model, tmp_path)
        sizes = {"prompts_per_step": len(rows), "group_size": 2, "skip_zero_advantage": False}
        program = Program(changed(cfg, data={"train": str(path)}, services=own, **sizes))
        assert program.ends() == 0, program.told()[-4000:]
    assert judge.asked
    steps = program.steps()
    assert [metrics["step"] for metrics in steps] == [1, 2, 3]
    assert not program.lines("dropped.jsonl")
    expected = {f"reward/{agent}/{name}" for name, agent in FILES.items()}
    assert all(expected <= metrics.keys() for metrics in steps)
    modules = {agent: path.split(".")[-1] for agent, path in envs.agents().items()}
    served = {modules[agent] for agent in FILES.values()}
    assert served >= set(modules.values()) - ELSEWHERE
