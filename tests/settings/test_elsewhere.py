"""Names of other programs on the command line and in files, and the pages that translate them."""

import re

import pytest

import dpo
from grpo_async import Config
from runtime import preflight
from settings import elsewhere, errors, reader

ROWS = {
    page: [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in (elsewhere.DOCS / page).read_text(encoding="utf-8").splitlines()
        if line.startswith("| `")
    ]
    for page in elsewhere.PAGES
}


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


@pytest.mark.parametrize(("flags", "here"), [
    (["--learning_rate", "1e-6"], "a key of TRL; here: policy.lr (docs/from_trl.md)"),
    (["--learning-rate=1e-6"], "a key of TRL; here: policy.lr ("),
    (["--num_generations", "8"], "a key of TRL; here: group_size ("),
    (["--vllm_gpu_memory_utilization", "0.5"], "a key of TRL; here: engine.args: {"),
    (["actor_rollout_ref.rollout.n=8"], "a key of verl; here: group_size ("),
    (["+trainer.total_epochs=3"], "a key of verl; here: steps ("),
    (["actor_rollout_ref.rollout.val_kwargs.top_p=0.9"], "a key of verl; here: sampling.valid"),
    (["custom_reward_function.path=x.py"], "a key of verl; here: none: a reward is verify of"),
])  # fmt: skip
def test_a_name_of_trl_or_verl_is_refused_with_ours(flags, here):
    assert f"error: {flags[0]}: {here}" in refused(*flags)


def test_a_name_that_a_group_has_here_is_that_groups(capsys):
    """DPO has loss.beta, GRPO has not: there TRL's beta is the weight of the KL."""
    with pytest.raises(SystemExit):
        preflight.load(dpo.Config, ["--beta", "0.1"], default="configs/tiny_dpo.py")
    assert "--loss.beta" in capsys.readouterr().err
    assert "a key of TRL; here: loss.kl_coef" in refused("--beta", "0.1")
    with pytest.raises(SystemExit):
        preflight.load(dpo.Config, ["--num_generations", "8"], default="configs/tiny_dpo.py")
    assert "group_size" not in capsys.readouterr().err, "DPO has none"


@pytest.mark.parametrize(("line", "told"), [
    ("learning_rate = 1e-6", "unknown field 'learning_rate': a key of TRL; here: policy.lr ("),
    ("policy = {'learning_rate': 1}", "'policy.learning_rate': a key of TRL; here: policy.lr ("),
    ("num_generations = 8", "unknown field 'num_generations': a key of TRL; here: group_size"),
    ("temperature = 1.0", "unknown field 'temperature'; did you mean sampling.temperature?"),
])  # fmt: skip
def test_a_file_that_assigns_such_a_name_is_refused_alike(line, told, tmp_path):
    (tmp_path / "mine.py").write_text(f"{line}\n")
    assert told in refused("--config", str(tmp_path / "mine.py"))


def test_our_own_settings_are_no_keys_of_others():
    """policy.max_grad_norm is a name here and of NeMo-RL."""
    ours = [f"--{name}" for name in reader.leaves(Config)]
    reader.check_names(Config, [*ours, *(f"{name}=1" for name in ours)])
    values = ["runs/a=b", "x=1", "{}", '{"grpo.seed": 1}', "a b.c=1", "", "=", "policy.lr=3", "env"]
    reader.check_names(Config, values)


def test_without_its_page_a_key_is_an_unknown_flag(monkeypatch, tmp_path):
    monkeypatch.setattr(elsewhere, "DOCS", tmp_path)
    elsewhere.listed.cache_clear()
    assert elsewhere.meaning("grpo.num_prompts_per_step", reader.leaves(Config)) == ""
    elsewhere.listed.cache_clear()


@pytest.mark.parametrize(("page", "least"), [("from_nemo_rl.md", 150), ("from_trl.md", 100)])
def test_a_page_names_each_key_once_and_only_settings_that_exist(page, least):
    keys = [key for row in ROWS[page] for key in re.findall(r"`([\w.]+)`", row[0])]
    assert len(keys) == len(set(keys)) >= least
    assert all(len(row) == 3 for row in ROWS[page])
    known = set(reader.leaves(Config)) | {"advantage.low_effort"}
    named = {row[1].strip("`") for row in ROWS[page]} - {"none"}
    assert named <= known and len(named) >= 30
    assert all(row[2] for row in ROWS[page] if row[1] == "none"), "what has no setting says why"
