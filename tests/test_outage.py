"""A judge goes away in the middle of a run: time is lost, and neither a prompt nor a reward."""

import pytest
from conftest import write_rows

from support.judges import Judge
from support.outages import endure, fork, reply, rows

pytestmark = pytest.mark.e2e


@pytest.mark.long
def test_an_outage_of_the_judge_costs_time_alone(tiny_config, tmp_path, monkeypatch):
    """It lasts longer than a call may wait, and no prompt is dropped.

    The judge's address comes by JUDGES_FILE, once the run has started.
    """
    file = tmp_path / "judges"
    monkeypatch.setenv("JUDGES_FILE", str(file))
    fields = {"steps": 4, "prompts_per_step": 8, "save_period": 0}
    fields |= {"timeouts": {"rollout": 8.0}}
    data = write_rows(tmp_path / "rows.jsonl", rows(64))
    cfg = tiny_config(data={"train": data}, max_response_tokens=8, **fields)
    with Judge(reply, seconds=0.2) as judge:
        file.write_text(f"general {judge.url}\n")
        found = endure(cfg, fork(tmp_path / "fork"), judge, "down", seconds=9.0)
    assert found.wrong == 0 and len(found.seconds) == 4
    assert found.failures["general/connection"] >= 3 and 2 <= found.away <= 20
    assert "the run is waiting: judges.general is down: " + judge.url in found.told
    assert "all servers answer again, after" in found.told
    assert max(found.seconds) >= 5
