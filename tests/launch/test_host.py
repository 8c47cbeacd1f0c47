"""Submitting from a machine that has bash, Python without packages, and sbatch."""

import os
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from conftest import spelling_rows, write_rows

import dpo
import grpo_async
import mopd
from core import errors
from launch import host
from runtime.processes import placement
from settings import reader
from support.configs import changed
from support.program import ROOT, copy, ran
from support.tables import table

CASES = table(Path(__file__).with_name("cases.txt"))["host"]
CONFIGS = sorted(path for path in ROOT.glob("configs/**/*.py") if path.name[0] != "_")
# As NVIDIA's recipe pages have it.
PUBLISHED = """
[wandb]
project = "nemotron"
entity = "team"

[YOUR-CLUSTER]
executor = "slurm"
account = "me"
partition = "batch"
nodes = 2
ntasks_per_node = 8
gpus_per_node = 8
mounts = ["/lustre:/lustre"]
"""


def program_of(path: Path) -> ModuleType:
    """The program that a configuration is for."""
    return {"dpo": dpo, "mopd": mopd}.get(path.stem.rpartition("_")[2], grpo_async)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_configuration_takes_the_gpus_of_its_dry_run(path):
    program = program_of(path)
    cfg = reader.read(program.Config, path)
    found = host.settings(["--config", str(path)], Path(program.__file__))
    assert host.gpus(found, program is not dpo) == len(placement.gpus(cfg))
    assert [found["save_before"], found["keep_last"]] == [cfg.save_before, cfg.keep_last]
    assert [found["data.train"], found["data.val"]] == [cfg.data.train, cfg.data.val]


@pytest.mark.parametrize("values", [(3, 2, 4, 1.0), (5, 1, 2, 0.5), (9, 1, 2, 0.2), (1, 1, 3, 0.7)])
def test_flags_count_and_gpus_are_shared_as_in_the_dry_run(values):
    count, size, ranks, share = values
    flags = ["--config", str(ROOT / "configs/math_blend.py"), f"--engine.count={count}"]
    flags += ["--engine.tensor-parallel", str(size), "--policy.ranks", str(ranks)]
    found = host.settings([*flags, "--eval_only", "--gpu_share", str(share)])
    fields = {"count": count, "tensor_parallel": size, "ranks": ranks, "gpu_share": share}
    assert host.gpus(found, True) == len(placement.gpus(changed(grpo_async.Config(), **fields)))


def test_teachers_share_their_ranks_as_in_the_dry_run(tmp_path):
    shared = 'teachers = {"swe": "a", "rlhf": "a"}\nteacher_beside = {"ifbench": "reasoning"}\n'
    layouts = 'teacher_layouts = {"general": {"ranks": 32}}\n'
    path = tmp_path / "own.py"
    path.write_text(f"from configs.ultra_mopd import *\n{shared}{layouts}")
    cfg = reader.read(mopd.Config, path)
    program = Path(mopd.__file__)
    found = host.settings(["--config", str(path)], program)["teacher_ranks"]
    assert found == sum(ranks for ranks, _ in cfg.teacher_ranks) == 32 + 16 + 16
    flags = ["--teacher_policy.ranks", "48", "--teachers", '{"swe": "b"}']
    assert host.settings(["--config", str(path), *flags], program)["teacher_ranks"] == 32 + 3 * 48
    for wrong in ("{", "[1]"):
        with pytest.raises(errors.InputError, match="teachers = .*: expected a dictionary"):
            host.settings(["--config", str(path), "--teachers", wrong], program)


def test_dictionaries_merge_as_the_reader_merges_them(tmp_path):
    text = "from configs.rlvr1 import *\n\nengine = {'count': 2}\npolicy = {'ranks': 64}\n"
    (tmp_path / "own.py").write_text(text)
    found = host.settings(["--config", str(tmp_path / "own.py")])
    cfg = reader.read(grpo_async.Config, tmp_path / "own.py")
    assert found["engine.tensor_parallel"] == cfg.engine.tensor_parallel == 4
    assert host.gpus(found, True) == len(placement.gpus(cfg)) == 72


@pytest.mark.parametrize(("config", "rows", "flags", "told"), CASES)
def test_what_is_wrong_is_named(config, rows, flags, told, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(config)
    (tmp_path / "rows.jsonl").write_text(rows)
    (tmp_path / "config.json").write_text("{}")
    given = ["--config", "own.py", "--model", ".", "--data.train", "rows.jsonl"]
    with pytest.raises(errors.InputError) as error:
        host.main([*given, *flags])
    assert str(error.value) == f"error: {told}"


def test_a_run_that_uses_its_rows_too_often_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    rows = write_rows(tmp_path / "rows.jsonl", [{"any": 1}] * 206)
    words = ["--config", str(ROOT / "configs/ultra_swe.py"), "--model", str(tmp_path)]
    words += ["--data.train", rows, "--data.val="]
    with pytest.raises(errors.InputError, match="steps = 960: 149 passes over 206 training rows"):
        host.main(words)
    host.main([*words, "--steps", "600"])


@pytest.fixture
def bare(tmp_path):
    """The project without .venv, and a PATH whose Python has no packages and whose sbatch notes."""
    notes = f'printf "%s\\n" "$@" >{tmp_path}/asked\nenv >{tmp_path}/env\necho 7\n'
    python = f'exec {os.path.realpath(sys.executable)} -I -S "$@"\n'
    programs = {"python3": f"#!/bin/bash\n{python}", "sbatch": f"#!/bin/bash\n{notes}"}
    for name, text in programs.items():
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    (tmp_path / "env.toml").write_text(PUBLISHED)
    root = copy(tmp_path / "project")
    (root / "models/super").mkdir(parents=True)
    (root / "models/super/config.json").write_text("{}")
    write_rows(root / "rows.jsonl", [{"any": 1}] * 3)
    return root


def test_a_container_needs_nothing_of_ours_on_the_machine_that_submits(bare, tmp_path, tiny_model):
    """The pages' env.toml has two nodes for a run of 104 and five of judges."""
    given = {"EXP_NAME": "one", "CONFIG_PATH": "configs/rlvr1.py", "MODEL_PATH": "models/super"}
    given |= {"TRAIN_PATH": "rows.jsonl", "VAL_PATH": "rows.jsonl", "CONTAINER": "nvcr.io/x/y:1"}
    given |= {"JUDGE_NODES": "5", "JUDGES": "genrm x 8", "SKIP_CODE_SNAPSHOT": "true"}
    given |= {"EXCLUDE_NODES": "n[1-2]", "SLURM_QOS": "high", "SLURM_RESERVATION": "r 1"}
    given |= {"PATH": f"{tmp_path}/bin:/usr/bin:/bin", "SEGMENT": "4", "HOME": str(tmp_path)}
    command = ["bash", "launch/submit.sh", "--profile", "YOUR-CLUSTER", "--steps", "7"]
    done = ran(*command, root=bare, env=given)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ok: models/super, 3 rows, 3 for evaluation" in done.stdout
    assert "job 7: one, 109 nodes" in done.stdout
    asked = (tmp_path / "asked").read_text().splitlines()
    assert {"--nodes=109", "--signal=B:USR1@1800", "--gres=gpu:8", "--exclude=n[1-2]"} <= set(asked)
    assert {"--qos=high", "--reservation=r 1", "--segment=4", "--partition=batch"} <= set(asked)
    assert asked[-4:] == ["--steps", "7", "--resume", "auto"]
    env = (tmp_path / "env").read_text().splitlines()
    assert "GRPO_PYTHON=/opt/grpo_async/.venv/bin/python" in env
    assert {"WANDB_PROJECT=nemotron", "WANDB_ENTITY=team", "EXTRA_MOUNTS=/lustre:/lustre"} <= {*env}
    (bare / ".venv").symlink_to(ROOT / ".venv")  # of the machine that submits
    fsdp = {"CONFIG_PATH": "configs/tiny.py", "MODEL_PATH": tiny_model, "JUDGE_NODES": "0"}
    write_rows(bare / "rows.jsonl", spelling_rows(4))
    other = ran(*command, root=bare, env=given | fsdp)
    assert "job 7: one, 2 nodes" in other.stdout, other.stdout + other.stderr
    env = (tmp_path / "env").read_text().splitlines()
    assert "GRPO_PYTHON=/opt/grpo_async/.venv/bin/python" in env
    (bare / ".venv").unlink()
    write_rows(bare / "rows.jsonl", [{"any": 1}] * 3)
    few = ran(*command, root=bare, env=given | {"SBATCH_NUM_NODES": "108"})
    told = "expected 109 or more: 104 for the run, JUDGE_NODES = 5, CPU_NODES = 0"
    assert few.returncode == 1 and f"error: SBATCH_NUM_NODES = 108: {told}" in few.stderr
    half = ran(*command, root=bare, env=given | {"GPUS_PER_NODE": "4", "JUDGE_NODES": "0"})
    assert half.returncode == 1 and "GPUS_PER_NODE = 4: nodes are counted with 8" in half.stderr
    auto = ran(*command, root=bare, env=given | {"JOBS": "auto"})
    assert auto.returncode == 1 and "JOBS = auto: the dry run counts jobs" in auto.stderr
    more = ran(*command, root=bare, env=given | {"SBATCH_NUM_NODES": "110"})
    assert "job 7: one, 110 nodes" in more.stdout
    without = ran(*command, root=bare, env=given | {"CONTAINER": ""})
    told = ".venv/bin/python does not exist: run bash launch/setup.sh, or set CONTAINER"
    assert without.returncode == 1 and told in without.stderr


def test_a_disk_has_room_for_checkpoints_and_a_note_counts_the_exports_that_stay(
    tmp_path, monkeypatch, capsys
):
    """Three checkpoints of five times the model, and ten exports, of which two are there."""
    gib = 1 << 30
    model, run = tmp_path / "model", tmp_path / "run"
    for folder in (model, run / "step_000010/hf", run / "step_000020/hf"):
        folder.mkdir(parents=True)
    with open(model / "model.safetensors", "wb") as file:
        file.truncate(2 * gib)
    words = ["--config", str(ROOT / "configs/rlvr1.py"), "--model", str(model)]
    words += ["--run_dir", str(run), "--steps", "95", "--keep_last", "2"]
    cfg = SimpleNamespace(**host.settings(words))
    for free, problems, noted in ((29, 1, False), (45, 0, True), (46, 0, False)):
        usage = SimpleNamespace(free=free * gib)
        monkeypatch.setattr(host.shutil, "disk_usage", lambda path, usage=usage: usage)
        assert len(list(host.disk(cfg))) == problems
        said = "8 exports of 2 GiB stay, but 15 GiB are left: delete exports"
        assert (said in capsys.readouterr().out) is noted


def test_ranks_of_a_teacher_that_are_no_number_are_refused():
    flags = ["--config", str(ROOT / "configs/ultra_mopd.py"), "--teacher_layouts"]
    for value in ('"x"', "0", "-1"):
        with pytest.raises(errors.InputError, match="ranks of the teacher 'swe': expected a whole"):
            host.settings([*flags, f'{{"swe": {{"ranks": {value}}}}}'], Path(mopd.__file__))


WRONG = {  # what passed once, although the job refuses it in its first minute
    "--polcy.lr 1e-6": "--polcy.lr: there is no such flag; did you mean --policy.lr?",
    "grpo.num_generations_per_prompt=16": "a key of NeMo-RL; here: group_size (docs/from_nemo_rl",
    "--policy.lr abc": "the command line: policy.lr = 'abc': expected a number above 0",
    "--gpu b900": "the command line: gpu = 'b900': expected one of auto, h100, h200, b200",
    "--steps 7": "genrm_simple_agent lacks judges.genrm: no url, and neither JUDGES_FILE nor",
}


@pytest.mark.parametrize("flags", WRONG)
def test_five_wrong_calls_are_refused_before_anything_is_submitted(flags, bare, tmp_path):
    """On Python without packages, with CONTAINER; the last one lacks JUDGES."""
    write_rows(bare / "rows.jsonl", [{"agent_ref": {"name": "genrm_simple_agent"}}])
    given = {"EXP_NAME": "one", "CONFIG_PATH": "configs/rlvr1.py", "MODEL_PATH": "models/super"}
    given |= {"TRAIN_PATH": "rows.jsonl", "CONTAINER": "nvcr.io/x/y:1", "SLURM_ACCOUNT": "me"}
    given |= {"SLURM_PARTITION": "batch", "PATH": f"{tmp_path}/bin:/usr/bin:/bin"}
    given |= {"HOME": str(tmp_path), "SKIP_CODE_SNAPSHOT": "true"}
    if flags != "--steps 7":
        given |= {"JUDGES": "launch/judges/rlvr.txt"}
    done = ran("bash", "launch/submit.sh", "--data.val=", *flags.split(), root=bare, env=given)
    assert done.returncode == 1 and WRONG[flags] in done.stderr, done.stdout + done.stderr
    assert not (tmp_path / "asked").exists()


@pytest.mark.parametrize(("agent", "judges", "lacks"), [
    ("math_with_judge_simple_agent", {"general": {}}, ["judges.general"]),
    ("math_with_judge_simple_agent", {}, []),
    ("equivalence_llm_judge_simple_agent", {}, ["judges.general"]),
    ("equivalence_llm_judge_simple_agent", {"general": {"url": "http://127.0.0.1:9/v1"}}, []),
    ("swe_agents_train", {"general": {}, "genrm": {}}, []),
])  # fmt: skip
def test_judges_are_missing_if_rows_need_them_and_nothing_provides_them(
    agent, judges, lacks, monkeypatch
):
    for name in ("JUDGES_FILE", "JUDGES", "JUDGE_NODES"):
        monkeypatch.delenv(name, raising=False)
    found = list(host.missing_judges(Counter([agent]), judges))
    assert [line.split()[2].strip(":") for line in found] == lacks
    monkeypatch.setenv("JUDGES", "general org/model 8 x2")
    monkeypatch.setenv("JUDGE_NODES", "2")
    assert not list(host.missing_judges(Counter([agent]), judges))
