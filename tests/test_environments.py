"""Rows of every environment in one file, trained end to end by the real engine."""

import pytest
from conftest import make_config, write_rows

from envs import registry
from envs.sandbox import sandbox
from settings.environment_services import Services
from support.configs import changed
from support.judges import Judge, configured
from support.program import Program
from support.verifiers import VERDICT, gym_rows, own_rows, shortened

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
# Files of NeMo-Gym's example rows in tests/data. Our own rows are taken as well.
FILES = (
    *("math_with_judge", "mcqa", "instruction_following", "structured_outputs", "code_gen"),
    *("reasoning_gym", "calendar", "math_formal_lean", "swerl_gen", "multichallenge"),
    *("inverse_if", "mcqa_regex", "genrm_compare"),
)
# Their tools or stories are longer than what the tiny model reads.
ELSEWHERE = {"swe/swe_pivot", "workplace/workplace", "maths/python_tool", "terminals/terminal_use"}
ELSEWHERE |= {"tools/conversation", "proofs/lean_refinement", "swe/swe"}


def test_a_file_with_rows_of_all_of_them_trains(tiny_model, tmp_path, lean):
    """Three steps over each file's first row; rewards are logged by environment and data set.

    The policy is held near a frozen reference, as in configs/rlhf.py.
    """
    if why := sandbox.problem():
        pytest.skip(why)
    rows = []
    for name in FILES:
        rows.append(shortened(gym_rows(name)[0] | {"dataset": name}))
    for row in own_rows():
        if registry.served()[row["agent_ref"]["name"]] not in ELSEWHERE:
            rows.append(shortened(row | {"dataset": "own"}))
    data = {"train": write_rows(tmp_path / "mixed.jsonl", rows)}
    with Judge(VERDICT) as judge:
        judges = configured(general=judge, safety=judge, genrm=judge)
        own = Services(tool_parser="hermes", lean=lean, images=str(tmp_path), judges=judges)
        cfg = make_config(tiny_model, tmp_path)
        sizes = {"prompts_per_step": len(rows), "group_size": 2, "skip_zero_advantage": False}
        cfg = changed(cfg, data=data, services=own, kl_coef=1e-4, **sizes)
        assert cfg.has_reference
        program = Program(cfg).succeeds()
    assert judge.asked
    steps = program.steps()
    assert [metrics["step"] for metrics in steps] == [1, 2, 3]
    assert not program.lines("dropped.jsonl")
    assert steps[-1]["kl_penalty"] > 0
    expected = {f"reward/{row['agent_ref']['name']}/{row['dataset']}" for row in rows}
    assert all(expected <= metrics.keys() for metrics in steps)
    served = {registry.served()[row["agent_ref"]["name"]] for row in rows}
    assert served >= set(registry.served().values()) - ELSEWHERE
