"""Boxes of agents, counted for a node: in the dry run, and in a job before its GPUs are used."""

import dataclasses

import pytest
from conftest import write_rows

from dry_run import boxes
from envs.boxes import box_budget, image_cache
from grpo_async import Config
from launch import submit_check
from policy.gpus import GIB
from settings import reader
from support.configs import changed
from support.program import ROOT

ROW = {"agent_ref": {"name": "swe_agents_train"}, "image": "a"}


def super_run(**fields) -> Config:
    """SWE 2 of Nemotron 3 Super, with changes."""
    cfg = reader.read(Config, ROOT / "configs/swe2.py")
    return changed(cfg, **fields) if fields else cfg


@pytest.mark.parametrize(("fields", "expected"), [
    # 2 x 16 groups of 32 in flight: one group for each of 32 workers, each on a node of its own.
    ({}, (1024, 32, 32)),
    ({"max_lag": 0}, (512, 32, 32)),
    ({"rollout_workers": 64}, (1024, 64, 32)),  # half of them have a group
    ({"rollout_workers": 8}, (1024, 8, 128)),
    ({"rollout_workers": 128}, (1024, 64, 64)),
    ({"ranks": 64, "count": 16, "rollout_workers": 64}, (1024, 24, 96)),
    ({"prompts_per_step": 1, "train_parts": 1, "max_lag": 0}, (32, 32, 32)),
])  # fmt: skip
def test_boxes_of_the_fullest_node(fields, expected):
    cfg = super_run()
    assert (cfg.max_lag, cfg.rollout_workers, cfg.policy.ranks) == (1, 32, 256)
    assert boxes.count(super_run(**fields)) == expected


@pytest.fixture
def run(tmp_path):
    """The same on rows that are here, with two images; one is a folder."""
    (tmp_path / "images/b").mkdir(parents=True)
    for name, size in {"a": 3 << 20, "c": 1 << 20}.items():
        (tmp_path / "images" / f"{name}.sif").write_bytes(bytes(size))
    rows = [ROW, ROW | {"image": "b"}, ROW | {"image": "c"}, ROW]
    train = write_rows(tmp_path / "rows.jsonl", rows)
    folder = str(tmp_path / "images")
    own = dataclasses.replace(super_run().services, images=folder)
    cfg = dataclasses.replace(super_run(), services=own)
    return changed(cfg, data={"train": train, "val": ""}, val_period=0)


def test_the_dry_run_counts_boxes_memory_and_disk(run):
    values = {label: (value, note) for label, value, note in boxes.rows(run)}
    assert [value for value, _ in values.values()] == ["1,024", "32", "64", "0.00"]
    assert values["episodes at once"][1] == "2 x 16 prompts x 32; rollout_workers 32 on 32 nodes"
    assert "32 at most" in values["GiB of memory"][1]
    assert values["GiB of images"][1].startswith("2 of them here")


def test_a_run_without_agents_in_boxes_counts_none(run, tmp_path):
    rows = write_rows(tmp_path / "other.jsonl", [ROW | {"agent_ref": {"name": "swe_pivot"}}])
    assert boxes.rows(changed(run, data={"train": rows, "val": ""})) == []
    assert boxes.rows(changed(run, data={"train": "none.jsonl", "val": ""})) == []
    mixed = changed(run, data={"train": rows, "val": run.data.train}, val_period=1)
    assert len(boxes.rows(mixed)) == 4


def test_a_node_of_less_memory_is_named_before_its_gpus_are_used(run, monkeypatch, capsys):
    monkeypatch.setattr(box_budget, "memory", lambda: 512 * GIB)
    assert list(submit_check.boxes(run)) == [] and capsys.readouterr().out == ""
    monkeypatch.setattr(box_budget, "memory", lambda: 64 * GIB)
    assert list(submit_check.boxes(run)) == []
    (said,) = capsys.readouterr().out.splitlines()
    note = "note: a node has 32 episodes at once, but room for 16 boxes: the others wait "
    assert said.startswith(note)
    assert "1,800 s at most: raise rollout_workers or GRPO_BOXES" in said
    monkeypatch.setattr(box_budget, "memory", lambda: GIB)
    (problem,) = submit_check.boxes(run)
    assert (
        problem == "this node has 1024 MiB of memory, "
        "but the files that one box changes may take up 2048 MiB"
    )
    monkeypatch.setenv(box_budget.VARIABLE, "no")
    (problem,) = submit_check.boxes(run)
    assert problem.startswith("GRPO_BOXES = 'no'")


def test_a_disk_for_copies_that_holds_no_image_is_named(run, monkeypatch, tmp_path):
    monkeypatch.setenv(box_budget.VARIABLE, "99")
    monkeypatch.setenv(image_cache.FOLDER, str(tmp_path / "cache"))
    assert list(submit_check.boxes(run)) == []
    monkeypatch.setenv(image_cache.MOST, "0.001")
    (problem,) = submit_check.boxes(run)
    assert "the largest image takes 0.00: raise GRPO_IMAGE_CACHE_GIB, or use another" in problem
    monkeypatch.setenv(image_cache.FOLDER, "/proc/none")
    (problem,) = submit_check.boxes(run)
    assert problem.startswith("GRPO_IMAGE_CACHE = '/proc/none'")
