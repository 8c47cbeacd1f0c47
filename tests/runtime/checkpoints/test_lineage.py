"""The chain of trainings behind a model, and what W&B gets of it."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from core.errors import InputError
from grpo_async import Config
from runtime.checkpoints import lineage
from runtime.processes.cluster import ROOT
from runtime.reporting.log import Log
from support.configs import changed

START = {"program": "grpo_async.py", "commit": "c" * 40, "diff": "", "steps": 3, "versions": {}}


@pytest.fixture
def sft(tmp_path) -> Path:
    """The model that nobody here has trained."""
    folder = tmp_path / "sft"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


def train(tmp_path: Path, name: str, model: Path, **fields) -> Path:
    """What a run leaves of its first three versions; returns its exported model."""
    cfg = changed(Config(run_dir=str(tmp_path / name), model=str(model)), **fields)
    export = tmp_path / name / "step_000003" / "hf"
    export.mkdir(parents=True, exist_ok=True)
    lineage.begin(cfg, START)
    lineage.mark(cfg, str(export.parent), 3)
    return export


def test_stages_can_be_followed_back_to_the_first_model(tmp_path, sft):
    data = tmp_path / "blend" / "train-split.jsonl"
    data.parent.mkdir()
    manifest = data.with_name("manifest.json")
    manifest.write_text('{"run_hash": "x"}')
    model = sft
    for name in ("rlvr1", "swe1", "rlhf"):
        model = train(tmp_path, name, model, data={"train": str(data)})
    command = [sys.executable, "-m", "runtime.checkpoints.lineage", str(model)]
    out = subprocess.check_output(command, cwd=ROOT, text=True, timeout=60).splitlines()
    assert [line.split(", ")[0].split("/")[-1] for line in out] == ["rlhf", "swe1", "rlvr1", "sft"]
    known = f"data {data} (manifest {lineage.digest(manifest.read_bytes())})"
    assert all("version 3, 20" in line and line.endswith(known) for line in out[:3])
    assert out[3].endswith(": no run of this program")
    assert json.loads((model / "lineage.json").read_text())["config"] == {"steps": 3}


@pytest.mark.parametrize("name", ["train-split.jsonl", "train/data.jsonl"])
def test_the_manifest_of_each_layout_of_a_blend_is_found(tmp_path, name):
    manifest = tmp_path / "manifest.json"
    manifest.write_text("{}")
    found = lineage.source(str(tmp_path / name))
    assert found["manifest"] == lineage.digest(manifest.read_bytes())
    assert not lineage.source(str(tmp_path / "a/b/c.jsonl"))["manifest"]


def test_a_run_that_goes_on_keeps_its_parent(tmp_path, sft):
    first = train(tmp_path, "rlvr1", sft)
    second = train(tmp_path, "rlvr2", first)
    again = changed(Config(run_dir=str(tmp_path / "rlvr2"), model="elsewhere"), resume="auto")
    (second.parent / "complete.json").touch()
    lineage.begin(again, START)
    assert lineage.read(tmp_path / "rlvr2")["parent"] == lineage.read(first)
    other = changed(Config(run_dir=str(tmp_path / "rlvr3")), resume=str(second.parent))
    (tmp_path / "rlvr3").mkdir()
    lineage.begin(other, START)
    assert lineage.read(tmp_path / "rlvr3")["parent"] == lineage.read(second)


def test_a_run_without_a_checkpoint_begins_with_the_model_that_it_is_given(tmp_path, sft):
    run = tmp_path / "run"
    run.mkdir()
    for name in ("a", "b"):
        model = str(tmp_path / name)
        lineage.begin(changed(Config(run_dir=str(run), model=model), resume="auto"), START)
        assert lineage.read(run)["parent"]["model"] == model


def test_another_first_model_has_another_digest(tmp_path, sft):
    before = lineage.identity(sft)
    (sft / "config.json").write_text('{"hidden_size": 8}')
    assert lineage.identity(sft) != before
    with pytest.raises(InputError, match="expected a run, a checkpoint or an export with lineage"):
        lineage.main(str(sft))


def test_wandb_gets_data_and_models_as_artifacts(tmp_path, sft, monkeypatch):
    told = []

    class Artifact(SimpleNamespace):
        def add_reference(self, uri, checksum):
            self.uri = uri

    run = SimpleNamespace(
        offline=False,
        define_metric=lambda *_, **__: None,
        use_artifact=lambda made: told.append((made.name, made.type, made.uri)),
        log_artifact=lambda made, aliases: told.append((made.name, *aliases, made.metadata)),
        log=lambda values: None,
        finish=lambda: told.append("finish"),
    )
    made = {"init": lambda **_: run, "Artifact": lambda name, **kw: Artifact(name=name, **kw)}
    monkeypatch.setitem(sys.modules, "wandb", stub := SimpleNamespace(**made))
    monkeypatch.setattr("runtime.reporting.wandb_board.wandb", stub)
    export = train(tmp_path, "run", sft)
    log = Log()
    log.open(Config(run_dir=str(tmp_path / "run"), model=str(sft), wandb=True), 0)
    log.write(1, {})
    (export / "complete.json").write_text("{}")
    log.write(2, {})
    log.write(3, {})
    log.close()
    data = f"file://{ROOT}/data/tiny/train.jsonl"
    assert told == [
        ("DataBlendsArtifact-rl", "dataset", data),
        ("ModelArtifact-rl", "step_000003", "latest", lineage.read(export)),
        "finish",
    ]
