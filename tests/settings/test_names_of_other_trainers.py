"""Names of other programs on the command line and in files, and the pages that translate them."""

import ast
import importlib.util
import re
from pathlib import Path

import pytest
import yaml

import dpo
import mopd
from core import errors
from grpo_async import Config
from runtime.startup import preflight
from settings import conflicts, names_of_other_trainers, reader

LISTS = sorted((Path(__file__).resolve().parents[1] / "data/keys").glob("*.yaml"))
# A group of NeMo-RL's whose line says that the names are Megatron's or vLLM's, the classes that
# have these names, and the names among them that a run sets itself.
PASSED_ON = {
    "policy.megatron_cfg": (
        {
            "core/transformer/transformer_config.py": "TransformerConfig",
            "core/model_parallel_config.py": "ModelParallelConfig",
        },
        conflicts.OWN_MEGATRON_ARGS["model"],
    ),
    "policy.megatron_cfg.optimizer": (
        {"core/optimizer/optimizer_config.py": "OptimizerConfig"},
        conflicts.OWN_MEGATRON_ARGS["optimizer"],
    ),
    "policy.megatron_cfg.distributed_data_parallel_config": (
        {"core/distributed/distributed_data_parallel_config.py": "DistributedDataParallelConfig"},
        conflicts.OWN_MEGATRON_ARGS["ddp"],
    ),
    "policy.generation.vllm_cfg": (
        {"engine/arg_utils.py": "EngineArgs"},
        conflicts.OWN_ENGINE_ARGS,
    ),
    "policy.generation.vllm_kwargs": (
        {"engine/arg_utils.py": "EngineArgs"},
        conflicts.OWN_ENGINE_ARGS,
    ),
}
ROWS = {
    page: [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in (names_of_other_trainers.DOCS / page).read_text(encoding="utf-8").splitlines()
        if line.startswith("| `")
    ]
    for page in names_of_other_trainers.PAGES
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
    ("grpo.reward_scaling.enabled=true", "none: asynchronous NeMo-RL ignores them"),
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
    (["--num_generations_per_prompt", "8"], "grpo.num_generations_per_prompt is a key of NeMo"),
    (["--max_num_steps=8"], "grpo.max_num_steps is a key of NeMo-RL; here: steps: "),
    (["--logger.wandb.group=a"], "a key of NeMo-RL; here: wandb: W&B's own variables WANDB"),
    (["--data.input_key", "q"], "a key of NeMo-RL; here: none: options of data_prep.py rows"),
    (["env.nemo_gym.config_paths=[]"], "a key of NeMo-RL; here: services.nemo_gym: launch/gym.sh"),
    (["custom_reward_function.path=x.py"], "a key of verl; here: none: a reward is the func"),
])  # fmt: skip
def test_a_name_of_trl_or_verl_is_refused_with_ours(flags, here):
    assert f"error: {flags[0]}: {here}" in refused(*flags)


@pytest.mark.parametrize(("flag", "nearest"), [
    ("grpo.num_prompt_per_step=1", "grpo.num_prompts_per_step, a key of NeMo-RL; here: prompts"),
    ("--grpo.max_steps=5", "grpo.max_num_steps, a key of NeMo-RL; here: steps: "),
    ("policy.generation.max_tokens=3", "policy.generation.max_new_tokens, a key of NeMo-RL; h"),
])  # fmt: skip
def test_a_key_that_no_page_has_is_not_said_to_be_one(flag, nearest):
    told = f"error: {flag}: docs/from_nemo_rl.md has no line about it; the nearest is {nearest}"
    assert told in refused(flag)


@pytest.mark.parametrize(("flags", "expected"), [
    (["steps=5"], "steps=5: expected --steps 5"),
    (["policy.lr=1e-6", "--seed", "3"], "policy.lr=1e-6: expected --policy.lr 1e-6"),
    (["--wandb", "true"], "wandb = true: expected --wandb, without a value"),
    (["--wandb=False"], "wandb = False: expected --no-wandb, without a value"),
    (["--advantage.normalize", "false"], "false: expected --advantage.no-normalize, without a val"),
    (["--max_grad_norm", "1"], "--max_grad_norm: expected --policy.max_grad_norm"),
    (["--kl_coef=0.1"], "--kl_coef=0.1: expected --loss.kl_coef"),
    (["--policy.learning_rate", "1e-6"], "a key of TRL; here: policy.lr ("),
    (["--dry_run", "true"], "dry_run = true: expected --dry_run, without a value"),
])  # fmt: skip
def test_a_setting_in_the_form_of_another_program_is_shown_in_ours(flags, expected):
    assert expected in refused(*flags)


@pytest.mark.parametrize(("flags", "here"), [
    (["--dpo.max_num_steps", "5"], "a key of NeMo-RL's DPO; here: steps"),
    (["dpo.reference_policy_kl_penalty=0.1"], "a key of NeMo-RL's DPO; here: loss.beta"),
    (["--max_steps", "8"], "a key of TRL's DPO; here: steps: batches"),
    (["--dataset_name", "x"], "a key of TRL's DPO; here: data.train: a JSONL file of pairs"),
    (["--learning_rate", "1"], "a key of TRL; here: policy.lr ("),
    (["--policy.train_global_batch_size", "8"], "a key of NeMo-RL's DPO; here: pairs_per_step: "),
])  # fmt: skip
def test_a_key_of_dpo_has_its_name_in_dpo(flags, here):
    with pytest.raises(errors.InputError) as error:
        preflight.load(dpo.Config, flags, default="configs/tiny_dpo.py")
    assert f"error: {flags[0]}: {here}" in str(error.value)


def test_a_name_that_a_group_has_here_is_that_groups(capsys):
    """DPO has loss.beta, GRPO has not: there TRL's beta is the weight of the KL."""
    with pytest.raises(errors.InputError, match="--beta: expected --loss.beta"):
        preflight.load(dpo.Config, ["--beta", "0.1"], default="configs/tiny_dpo.py")
    assert "a key of TRL; here: loss.kl_coef" in refused("--beta", "0.1")
    with pytest.raises(SystemExit):
        preflight.load(dpo.Config, ["--num_generations", "8"], default="configs/tiny_dpo.py")
    assert "group_size" not in capsys.readouterr().err, "DPO has none"


@pytest.mark.parametrize(("line", "told"), [
    ("learning_rate = 1e-6", "unknown field 'learning_rate': a key of TRL; here: policy.lr ("),
    ("policy = {'learning_rate': 1}", "'policy.learning_rate': a key of TRL; here: policy.lr ("),
    ("num_generations = 8", "unknown field 'num_generations': a key of TRL; here: group_size"),
    ("grpo = {'num_prompts_per_step': 8, 'seed': 1}", "unknown field 'grpo': grpo.num_prompts_per_"
     "step: a key of NeMo-RL; here: prompts_per_step (docs/from_nemo_rl.md); grpo.seed: a key of"),
    ("loss_fn = {'ratio_clip_min': 0.2}", "loss_fn.ratio_clip_min: a key of NeMo-RL; here: loss."),
    ("policy = {'max_total_sequence_length': 8}", "length': a key of NeMo-RL; here: sampling.m"),
    ("policy = {'megatron_cfg': {'tensor_model_parallel_size': 2}}", "'policy.megatron_cfg': policy"
     ".megatron_cfg.tensor_model_parallel_size: a key of NeMo-RL; here: policy.tp: "),
    ("grpo = {'max_steps': 8}", "grpo.max_steps: docs/from_nemo_rl.md has no line"),
    ("temperature = 1.0", "unknown field 'temperature'; did you mean sampling.temperature?"),
])  # fmt: skip
def test_a_file_that_assigns_such_a_name_is_refused_alike(line, told, tmp_path):
    (tmp_path / "mine.py").write_text(f"{line}\n")
    assert told in refused("--config", str(tmp_path / "mine.py"))


def test_our_own_settings_are_no_keys_of_others():
    """policy.max_grad_norm is a name here and of NeMo-RL."""
    ours = [f"--{name}" for name in reader.leaves(Config)]
    reader.check_names(Config, [*ours, *(f"{name}=x" for name in ours)])
    values = ["runs/a=b", "x=1", "{}", '{"grpo.seed": 1}', "a b.c=1", "", "=", "env"]
    reader.check_names(Config, [*values, "--run_dir", "policy.lr=3"])


def test_without_its_page_a_key_is_an_unknown_flag(monkeypatch, tmp_path):
    monkeypatch.setattr(names_of_other_trainers, "DOCS", tmp_path)
    names_of_other_trainers.listed.cache_clear()
    assert names_of_other_trainers.meaning("grpo.num_prompts_per_step", reader.leaves(Config)) == ""
    names_of_other_trainers.listed.cache_clear()


def keys_of(path: Path) -> list[str]:
    """The dotted keys of a list; its first lines say where they come from."""
    groups = yaml.safe_load(path.read_text(encoding="utf-8"))
    return [
        key for name, value in groups.items() for key in names_of_other_trainers.within(name, value)
    ]


def answering(key: str) -> str:
    """The listed key whose line answers for a key: itself, or the nearest of its parents."""
    while key not in names_of_other_trainers.listed() and "." in key:
        key = key.rpartition(".")[0]
    return key


def fields(path: Path, name: str) -> set[str]:
    """The fields of a class of an installed package, without importing it."""
    (found,) = (
        node
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef) and node.name == name
    )
    return {node.target.id for node in found.body if isinstance(node, ast.AnnAssign)}


def unanswered(keys: list[str], Program: type) -> set[str]:
    """The keys about which the pages say nothing to a user of a program."""
    ours = reader.leaves(Program)
    said = {key: names_of_other_trainers.meaning(key, ours) for key in keys}
    return {key for key, here in said.items() if not here or "has no line" in here}


@pytest.mark.parametrize("path", LISTS, ids=lambda path: path.stem)
def test_every_key_of_another_programs_examples_is_answered(path):
    """With our setting, the nearest one or a reason: "no line about it" is no answer."""
    first = path.read_text(encoding="utf-8").partition("\n")[0]
    assert re.search(r"([0-9a-f]{40}|[0-9.]+) \(.*\d{4}-\d\d-\d\d\)", first), "commit and date"
    keys = keys_of(path)
    assert unanswered(keys, Config) <= {"seed"}, "TRL's seed is a setting here too"
    distillation = [key for key in keys if key.startswith("on_policy_distillation")]
    assert unanswered(distillation, mopd.Config) == set()


@pytest.mark.parametrize("group", PASSED_ON)
def test_a_group_answers_only_for_names_that_one_may_set_in_it(group):
    """A key that Megatron or vLLM does not have, or that a run sets itself, has its own line."""
    classes, own = PASSED_ON[group]
    package = "megatron" if "megatron" in group else "vllm"
    (folder,) = importlib.util.find_spec(package).submodule_search_locations
    has = set.union(*(fields(Path(folder) / file, name) for file, name in classes.items()))
    keys = {key for path in LISTS for key in keys_of(path)}
    passed_on = {key for key in keys if key != group and answering(key) == group}
    assert passed_on, "the group's line is needed"
    assert {key.removeprefix(f"{group}.").partition(".")[0] for key in passed_on} <= has - {*own}


@pytest.mark.parametrize(("page", "least"), [("from_nemo_rl.md", 150), ("from_trl.md", 100)])
def test_a_page_names_each_key_once_and_only_settings_that_exist(page, least):
    pages = names_of_other_trainers.listed().values()
    lines = [(name.program, name.key) for names in pages for name in names if name.page == page]
    assert len(lines) == len(set(lines)) >= least
    assert all(len(row) == 3 for row in ROWS[page])
    known = {*reader.leaves(Config), *reader.leaves(dpo.Config), *reader.leaves(mopd.Config)}
    known |= {"advantage.low_effort", "timeouts"}
    named = {row[1].strip("`") for row in ROWS[page]} - {"none"}
    assert named <= known and len(named) >= 30
    assert all(row[2] for row in ROWS[page] if row[1] == "none"), "what has no setting says why"
