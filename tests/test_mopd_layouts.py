"""Teachers of other layouts score the same; a student that is its teacher learns nothing."""

import numpy as np
import pytest

from support.megatron_jobs import compute

MEGATRON = {"kind": "megatron"}
# name: (model, world size, layout)
LAYOUTS = {
    "one": ("qwen3", 1, {}),
    "fsdp2": ("qwen3", 2, {"ranks": 2}),
    "megatron": ("qwen3", 1, MEGATRON),
    "tp2": ("qwen3", 2, MEGATRON | {"ranks": 2, "tp": 2}),
    "cp2": ("qwen3", 2, MEGATRON | {"ranks": 2, "cp": 2}),
    "pp2": ("qwen3", 2, MEGATRON | {"ranks": 2, "pp": 2}),
    "dp2": ("qwen3", 2, MEGATRON | {"ranks": 2}),
    "experts": ("qwen3_moe", 1, MEGATRON),
    "ep2": ("qwen3_moe", 2, MEGATRON | {"ranks": 2, "ep": 2}),
}
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("layouts of teachers")]


@pytest.fixture(scope="module")
def found(models, tmp_path_factory) -> dict[str, dict]:
    folder = tmp_path_factory.mktemp("teachers")
    jobs = [
        {"name": name, "world": world, "layout": layout, "model": models[model]}
        for name, (model, world, layout) in LAYOUTS.items()
    ]
    results = compute(jobs, folder, "teacher_ranks.py")
    return {name: results(name) for name in LAYOUTS}


@pytest.mark.parametrize("name", [name for name in LAYOUTS if name not in ("one", "experts")])
def test_every_layout_scores_the_same(found, name):
    plain = found["experts" if name == "ep2" else "one"]["scores"]
    scores = found[name]["scores"]
    assert scores.keys() == plain.keys() == {0, 1, 2, 3}
    for slot, samples in plain.items():
        for ours, theirs in zip(scores[slot], samples, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-5)
    assert any(np.abs(one).max() > 1 for of in plain.values() for one in of)


@pytest.mark.parametrize("name", LAYOUTS)
def test_one_rank_of_a_replica_reports(found, name):
    _, world, layout = LAYOUTS[name]
    replicas = world // (layout.get("tp", 1) * layout.get("cp", 1) * layout.get("pp", 1))
    assert sum(count > 0 for count in found[name]["reports"]) == replicas
    assert sum(found[name]["reports"]) == 4


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_student_that_is_its_teacher_learns_nothing(found, name):
    """Logprobs of equal networks of one layout are the same bits, so the advantage is 0."""
    none, some = found[name]["norms"]
    assert some > 1e-3
    assert found[name]["same"] and all(found[name]["same"])
    assert none == 0
