"""What launch/ refuses before anything is submitted, and what its scripts look like to a linter."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import spelling_rows, write_rows

from core.secret_variables import is_secret
from grpo_async import Config
from settings import reader
from settings.merging import assigned
from support.program import ROOT, ran
from support.tables import table
from support.tiny_models import make

CASES = table(Path(__file__).with_name("cases.txt"))
SCRIPTS = sorted([*(ROOT / "launch").rglob("*.sh"), *(ROOT / "launch").rglob("*.sbatch")])
PROFILES = """
default = "short"
[cluster]
cpus_per_task = 4
mem = "200G"
executor = "slurm"
account = "me"
partition = "batch"
mounts = ["/a:/a", "/b:/b"]
[cluster.env_vars]
NCCL_DEBUG = "WARN"
TOKEN = "it's"

[short]
extends = "cluster"
partition = "debug"
time = "00:30:00"
[short.env_vars]
NCCL_DEBUG = "INFO"

[cloud]
executor = "lepton"
[far]
tunnel = "ssh"
[odd]
walltime = "1"
[timed]
time = 12:00:00.5
[tabled]
env_vars = "A=1"
[named]
env_vars = { "A B" = "1" }
[listed]
env_vars = { A = ["1"] }
[truth]
nodes = true
[a]
extends = "b"
[b]
extends = "a"
[wandb]
project = "x"
"""
MTP = {"ENABLE_MTP_INFERENCE": "1"}


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_clean(script):
    subprocess.run(["bash", "-n", script], check=True)
    linter = Path(sys.executable).with_name("shellcheck")
    done = ran(linter, script)
    assert done.returncode == 0, done.stdout
    lines = script.read_text().splitlines()
    assert max(map(len, lines)) <= 100


@pytest.fixture
def given(tmp_path, warm_python):
    """The variables of a run that could be submitted."""
    rows = write_rows(tmp_path / "rows.jsonl", spelling_rows(4))
    of_job = {"EXP_NAME": "one", "SLURM_PARTITION": "batch", "SLURM_ACCOUNT": "me"}
    of_job |= {"CONFIG_PATH": "configs/tiny.py", "MODEL_PATH": "models/tiny"}
    return of_job | {"TRAIN_PATH": rows, "VAL_PATH": rows, "GRPO_PYTHON": warm_python}


def submit(variables: dict[str, str], *flags: str) -> subprocess.CompletedProcess:
    """Runs launch/submit.sh with these variables and no others of its own."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "SBATCH"))}
    return ran("bash", "launch/submit.sh", *flags, env=kept | variables)


@pytest.mark.parametrize(("changes", "flags", "told"), CASES["submit"])
def test_what_is_wrong_is_named_before_anything_is_submitted(given, tmp_path, changes, flags, told):
    (tmp_path / "env.toml").write_text(PROFILES)
    done = submit(given | {"GRPO_ENV_FILE": str(tmp_path / "env.toml")} | changes, *flags)
    assert done.returncode == 1 and done.stderr.startswith(f"error: {told}"), done.stderr


def test_what_is_wrong_with_variables_is_named_at_once(given):
    wrong = {"EXP_NAME": "a b", "JOBS": "0", "CPU_NODES": "x", "TRAIN_PATH": "/none"}
    lines = submit(given | wrong | {"MODEL_PATH": ""}).stderr.splitlines()
    named = ["these variables", "EXP_NAME", "JOBS", "CPU_NODES", "TRAIN_PATH"]
    assert all(line.startswith(f"error: {name}") for line, name in zip(lines, named, strict=True))


def test_help_is_no_run(given):
    done = submit(given, "--help")
    assert done.returncode == 0 and "docs/cluster.md" in done.stdout and not done.stderr


@pytest.mark.slow
def test_the_command_of_sbatch_can_be_seen(given, tiny_model, monkeypatch):
    """Nodes of engines, judges and environments; the warning reaches the batch script alone."""
    more = {"DRY_RUN": "true", "CPU_NODES": "1", "MODEL_PATH": tiny_model, "JOBS": "auto"}
    more["JUDGES"] = "general models/judge 8 x2"
    done = submit(given | more, "--steps", "7", "--max_lag", "0")
    assert done.returncode == 0, done.stderr
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("sbatch "))
    words = line.split()
    expected = {"--job-name=one", "--dependency=singleton", "--nodes=4", "--time=4:00:00"}
    assert expected | {"--account=me", "--partition=batch", "--gres=gpu:1"} <= set(words)
    (signal,) = (word for word in words if word.startswith("--signal=B:USR1@"))
    left = ["--resume", "auto", "--save_before", signal.partition("@")[2]]
    assert words[-8:] == ["--steps", "7", "--max_lag", "0", *left]
    assert "#SBATCH --no-kill" in done.stdout
    assert "--jobs=1 of 4 h" in done.stdout and "# 1 times; nothing was" in done.stdout
    assert not (ROOT / "code_snapshots/one").exists()


@pytest.mark.slow
@pytest.mark.parametrize("variables, tokens, batched", [
    (MTP, 5, 8480),
    (MTP | {"NUM_SPECULATIVE_TOKENS": "3", "MAX_NUM_BATCHED_TOKENS": "9000"}, 3, 9000),
    ({"ENABLE_MTP_INFERENCE": "0", "NUM_SPECULATIVE_TOKENS": "3"}, 0, 0),
])  # fmt: skip
def test_mtp_heads_draft_where_a_variable_of_nemo_rl_says_so(
    given, tiny_model, tmp_path, variables, tokens, batched
):
    """The entries reach a job's arguments in one piece, and those of the configuration stay."""
    model = make("nemotron_mtp", tmp_path / "model", tiny_model)
    more = {"DRY_RUN": "true", "MODEL_PATH": model, "SKIP_CODE_SNAPSHOT": "true"}
    done = submit(given | variables | more)
    assert done.returncode == 0, done.stderr
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("sbatch "))
    words = shlex.split(line)
    assert ("--engine.args" in words) == bool(tokens)
    if tokens:
        flags = words[words.index("--config") :]
        cfg = reader.load(Config, flags, default="configs/tiny.py")
        drafts = {"method": "mtp", "num_speculative_tokens": tokens}
        expected = {"speculative_config": drafts, "max_num_batched_tokens": batched}
        assert cfg.engine.args == assigned(ROOT / "configs/tiny.py")["engine"]["args"] | expected


def test_a_step_of_a_job_gets_the_secrets_that_it_needs_alone():
    """As runtime/processes/ray_start.py has it on one machine."""
    text = (ROOT / "launch/grpo.sbatch").read_text()
    (function,) = re.findall(r"^keeping\(\) \{\n.*?^\}\n", text, re.M | re.S)
    script = f"set -euo pipefail\n{function}keeping 'HF_TOKEN RAY_AUTH_TOKEN' env &\nwait $!"
    secrets = dict.fromkeys(("HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY"), "private")
    secrets |= {"My_Password": "private", "GOOGLE_APPLICATION_CREDENTIALS": "private"}
    others = {"RAY_AUTH_TOKEN": "0", "SLURM_JOB_ID": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = ran("bash", "-c", script, env={"PATH": os.environ["PATH"]} | secrets | others)
    assert done.returncode == 0, done.stderr
    found = {line.partition("=")[0] for line in done.stdout.splitlines()}
    assert found - {"PATH", "PWD", "SHLVL", "_", "OLDPWD"} == {"HF_TOKEN", *others}
    assert [name for name in (*secrets, *others) if is_secret(name)] == list(secrets)


@pytest.mark.slow
def test_a_configuration_of_dpo_is_submitted_with_its_program(given, chat_model, tmp_path):
    pairs = write_rows(tmp_path / "p.jsonl", [{"prompt": "ab", "chosen": "ba", "rejected": "a"}])
    data = {"TRAIN_PATH": pairs, "VAL_PATH": pairs, "MODEL_PATH": chat_model, "DRY_RUN": "true"}
    config = {"CONFIG_PATH": "configs/tiny_dpo.py"}
    done = submit(given | data | config, "--pairs_per_step", "1")
    assert done.returncode == 0, done.stderr
    assert "1 pairs" in done.stdout and "ok: configs/tiny_dpo.py" in done.stdout
    assert " --nodes=1 " in done.stdout and "engine" not in done.stdout.partition("sbatch ")[0]


def test_a_problem_of_the_dry_run_is_an_error(given, tiny_model):
    done = submit(given | {"MODEL_PATH": tiny_model}, "--prompts_per_step", "0")
    assert done.returncode == 1 and "prompts_per_step" in done.stdout + done.stderr


def variables(tmp_path: Path, name: str, **set_already: str) -> subprocess.CompletedProcess:
    (tmp_path / "env.toml").write_text(PROFILES)
    env = os.environ | {"NEMOTRON_ENV_FILE": str(tmp_path / "env.toml")} | set_already
    return ran(sys.executable, "launch/profiles.py", name, env=env)


def test_a_profile_becomes_variables_and_those_that_are_set_win(tmp_path):
    found = variables(tmp_path, "short", SLURM_ACCOUNT="other").stdout.splitlines()
    assert sorted(found) == [
        "export EXTRA_MOUNTS=/a:/a,/b:/b",
        "export GRPO_EXECUTOR=slurm",
        "export NCCL_DEBUG=INFO",
        "export SBATCH_CPUS_PER_TASK=4",
        "export SBATCH_MEM_PER_NODE=200G",
        "export SLURM_PARTITION=debug",
        "export SLURM_TIME_LIMIT=00:30:00",
        "export TOKEN='it'\"'\"'s'",
        "export WANDB_PROJECT=x",
    ]


@pytest.mark.parametrize(("name", "told"), CASES["profiles"])
def test_a_profile_that_cannot_be_used_is_named(tmp_path, name, told):
    done = variables(tmp_path, name)
    assert done.returncode == 1 and done.stderr.startswith(f"error: {told}")


def test_the_table_of_wandb_has_a_project_and_an_entity(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "PROFILES", PROFILES + 'mode = "offline"\n')
    done = variables(tmp_path, "short")
    assert done.stderr == "error: [wandb] in env.toml has mode: expected project, entity\n"


def test_the_example_of_profiles_can_be_read(tmp_path, monkeypatch):
    example = (ROOT / "launch/env.example.toml").read_text()
    monkeypatch.setattr(sys.modules[__name__], "PROFILES", example)
    assert "export CONTAINER=" in variables(tmp_path, "short").stdout
