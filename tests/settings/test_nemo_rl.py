"""Keys of NeMo-RL on the command line, and the page that says what they are called here."""

import re

import pytest

from grpo_async import Config
from runtime import preflight
from settings import errors, nemo_rl, reader

ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in nemo_rl.PAGE.read_text(encoding="utf-8").splitlines()
    if line.startswith("| `")
]


def refused(*flags: str) -> str:
    """What `load` says of a command line."""
    with pytest.raises(errors.InputError) as error:
        preflight.load(Config, list(flags), default="configs/tiny.py")
    return str(error.value)


@pytest.mark.parametrize("flags", [
    ["grpo.num_prompts_per_step=256"],
    ["+grpo.num_prompts_per_step=256"],
    ["++grpo.num_prompts_per_step=256"],
    ["--grpo.num_prompts_per_step=256"],
    ["--grpo.num-prompts-per-step", "256"],
    ["~grpo.num_prompts_per_step"],
    ["--steps", "3", "grpo.num_prompts_per_step=256", "--help"],
    ["--dry_run", "--config", "no/such.py", "grpo.num_prompts_per_step=256"],
])  # fmt: skip
def test_a_key_of_nemo_rl_is_refused_with_our_name_before_anything_else(flags):
    told = refused(*flags)
    (word,) = (flag for flag in flags if "grpo" in flag)
    expected = "a key of NeMo-RL; here: prompts_per_step (docs/from_nemo_rl.md)"
    assert told == f"error: {word}: {expected}"


@pytest.mark.parametrize(("flag", "here"), [
    ("policy.model_name=m", "model: a folder of"),
    ("policy.generation.vllm_kwargs.max_num_seqs=4", "engine.args: vLLM's engine arguments"),
    ("policy.max_grad_norm=2", "policy.max_grad_norm ("),
    ("grpo.reward_scaling.enabled=true", "none: asynchronous NeMo-RL ignores them"),
    ("grpo.never_heard_of=1", "none: no setting takes its place"),
    ("env.nemo_gym.x.y=1", "none: no setting takes its place"),
    ("cluster.num_nodes=2", "policy.ranks: "),
])  # fmt: skip
def test_a_key_is_what_its_nearest_listed_parent_is(flag, here):
    assert f"error: {flag}: a key of NeMo-RL; here: {here}" in refused(flag)


def test_our_own_settings_are_no_keys_of_nemo_rl():
    """policy.max_grad_norm is the name of both."""
    ours = [f"--{name}" for name in reader.leaves(Config)]
    reader.check_names(Config, [*ours, *(f"{name}=1" for name in ours)])
    values = ["runs/a=b", "x=1", "{}", '{"grpo.seed": 1}', "a b.c=1", "", "=", "policy.lr=3", "env"]
    reader.check_names(Config, values)


def test_without_its_page_a_key_is_an_unknown_flag(monkeypatch, tmp_path):
    monkeypatch.setattr(nemo_rl, "PAGE", tmp_path / "absent.md")
    assert nemo_rl.meaning("grpo.num_prompts_per_step") == ""


def test_the_page_names_each_key_once_and_only_settings_that_exist():
    keys = [key for row in ROWS for key in re.findall(r"`([\w.]+)`", row[0])]
    assert len(keys) == len(set(keys)) >= 150
    assert all(len(row) == 3 for row in ROWS)
    known = set(reader.leaves(Config)) | {"advantage.low_effort"}
    named = {row[1].strip("`") for row in ROWS} - {"none"}
    assert named <= known and len(named) >= 40
    assert all(row[2] for row in ROWS if row[1] == "none"), "what has no setting says why"
