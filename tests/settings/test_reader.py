"""Configuration files and flags, and what is reported of wrong input before Ray starts."""

import ast
import dataclasses
import functools
import inspect
import itertools
import json
import math
import os
import re
import shutil
import socket
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

import dpo
import mopd
from core.errors import InputError
from grpo_async import Config
from runtime.engines.engine import engine_arguments
from settings import merging, reader
from settings.conflicts import OWN_ENGINE_ARGS
from settings.hub import fetched, missing_weights
from support import forked_python
from support.program import ROOT, ran, unboxed

TINY = "configs/tiny.py"


@pytest.fixture
def write(tmp_path):
    def write(text: str, name: str = "mine.py") -> Path:
        path = tmp_path / name
        path.write_text(text)
        return path

    return write


def load(*flags) -> Config:
    """The configuration, whether or not this checkout has made models/tiny."""
    return reader.load(Config, [str(flag) for flag in flags], default=TINY)


# --- reading --------------------------------------------------------------------------------------


def test_an_empty_file_is_the_defaults(write):
    assert reader.read(Config, write("")) == Config()


def test_without_arguments_the_default_file_is_read():
    cfg = load()
    assert cfg.model.endswith("/models/tiny") and "{" not in cfg.run_dir
    assert re.fullmatch(r".*/runs/tiny-1-\d{8}-\d{6}", cfg.run_dir)
    assert "/runs/tiny-7-" in load("--seed", 7).run_dir


def test_a_file_inherits_overrides_and_computes(write):
    imports = "import math\nfrom pathlib import Path\nfrom configs.tiny import *\n"
    path = write(imports + "_half = steps // 2\nsteps = _half\ncorrection = {'high': 2.0}\n")
    cfg = reader.read(Config, path)
    parent = reader.read(Config, ROOT / TINY)
    changed = {k for k, v in vars(parent).items() if getattr(cfg, k) != v}
    assert changed == {"steps", "correction"} and cfg.steps == parent.steps // 2
    assert (cfg.correction.high, cfg.correction.action) == (2.0, "truncate")


def test_groups_that_are_assigned_again_are_merged_at_any_depth(write):
    """A file that inherits a group and assigns one leaf of it keeps the others."""
    write(
        'policy = {"kind": "megatron", "ranks": 4, "tp": 4}\nengine = {"args": {"a": 1, "b": 2}}\n'
    )
    path = write(
        "exec(open(__file__.replace('child', 'mine')).read())\n"
        'policy = {"lr": 1e-6}\n'
        'engine = {"count": 2, "args": {"b": 3, "c": 4}}\n',
        "child.py",
    )
    cfg = reader.read(Config, path)
    policy = cfg.policy
    assert (policy.kind, policy.ranks, policy.tp, policy.lr) == ("megatron", 4, 4, 1e-6)
    assert cfg.engine.count == 2 and cfg.engine.args == {"a": 1, "b": 3, "c": 4}


def test_an_inherited_group_keeps_the_leaves_that_are_not_assigned(write):
    """The same by `import *`."""
    parent = reader.read(Config, ROOT / TINY)
    text = "from configs.tiny import *\npolicy = {'weight_decay': 0.1}\ndata = {'val_samples': 4}\n"
    cfg = reader.read(Config, write(text))
    assert cfg.policy == dataclasses.replace(parent.policy, weight_decay=0.1)
    assert cfg.data == dataclasses.replace(parent.data, val_samples=4)
    assert parent == reader.read(Config, ROOT / TINY), "the parent's own dictionaries are untouched"


@pytest.mark.parametrize("path", sorted((ROOT / "configs").rglob("[!_]*.py")), ids=str)
def test_every_config_file_is_valid(path):
    programs = {"dpo": dpo, "mopd": mopd}
    Settings = getattr(programs.get(path.stem.rpartition("_")[2]), "Config", Config)
    assert reader.read(Settings, path) != Settings()


def test_a_file_may_have_functions_of_its_own(write):
    text = "import math\ndef reward(n):\n    return math.ceil(n)\nsteps = reward(4.5)\n"
    assert reader.read(Config, Path(write(text))).steps == 5


def test_flags_override_the_file(write):
    text = "steps = 5\npolicy = {'lr': 1e-4}\nloss = {'skip_zero_advantage': True}\nwandb = False\n"
    path = write(text)
    flags = ["--correction.high", 2, "--loss.no-skip-zero-advantage"]
    cfg = load("--steps", 7, "--config", path, *flags)
    assert (cfg.steps, cfg.policy.lr, cfg.correction.high) == (7, 1e-4, 2.0)
    assert (cfg.loss.skip_zero_advantage, cfg.wandb) == (False, False)
    cfg = load(f"--config={path}", "--correction.low", 3, "--correction.level", "sequence")
    assert (cfg.correction.low, cfg.correction.level, cfg.correction.high) == (3.0, "sequence", 5.0)
    assert cfg.steps == 5


def test_a_file_of_json_is_read_as_such(tmp_path):
    """Lists become pairs, groups keep what the file does not name, and flags override it."""
    path = tmp_path / "mine.json"
    path.write_text('{"steps": 5, "policy": {"lr": 1e-4}, "advantage": {"clip": [-2, 3]}}')
    cfg = load("--config", path, "--steps", 6)
    assert (cfg.steps, cfg.policy.lr, cfg.advantage.clip) == (6, 1e-4, (-2.0, 3.0))
    assert cfg.policy.warmup_steps == Config().policy.warmup_steps


def test_a_name_that_stands_twice_is_refused_in_json_as_well(tmp_path):
    path = tmp_path / "mine.json"
    path.write_text('{"steps": 5, "policy": {"lr": 1e-6, "lr": 1e-5}}')
    with pytest.raises(InputError, match="expected JSON: 'lr' appears 2 times in an object"):
        reader.read(Config, path)


def test_flags_of_a_command_have_no_prefix(write):
    cfg = load("--config", write("run_dir = 'x'\n"), "--resume", "auto")
    assert (cfg.command.resume, cfg.command.modes) == ("auto", [])
    cfg = load("--replay", "elsewhere")
    assert cfg.command.replay == str(Path("elsewhere").resolve())
    assert cfg.command.modes == ["replay"]


def test_the_file_is_written_into_the_configuration(write):
    assert load().command.config == TINY
    path = write("steps = 5\n")
    assert load("--config", path).command.config == str(path)


def test_dictionaries_on_the_command_line_are_json_and_are_merged_into_those_of_the_file():
    cfg = load("--engine.args", '{"max_num_seqs": 3, "kv_cache_dtype": "fp8"}')
    assert cfg.engine.args == {"max_num_seqs": 3, "kv_cache_dtype": "fp8"}
    assert cfg.engine.arguments == {"gpu_memory_utilization": 0.85} | cfg.engine.args
    cfg = load("--sampling.chat-template-kwargs", '{"truncate_history_thinking": false}')
    both = {"enable_thinking": True, "truncate_history_thinking": False}
    assert cfg.sampling.chat_template_kwargs == both
    assert load("--advantage.penalties", '{"thinking": -5}').advantage.penalties == {"thinking": -5}
    assert Config().engine.arguments == {"max_num_seqs": 256, "gpu_memory_utilization": 0.85}


# --- refusing -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("text", "message"), [
    ("from configs.tiny import *\nmax_lagg = 3\n", r"py:2: .*'max_lagg'; did you mean max_lag"),
    ("zzzzzz = 3\n", r"mine\.py:1: unknown field 'zzzzzz'$"),
    ("steps: int = -1\n", r"mine\.py:1: steps = -1"),
    ("loss = {'reduction': 'mean'}\n", r"py:1: loss\.reduction = 'mean': .*'token' or 'sequence'"),
    ("correction = {'action': 'drop'}\n", r"mine\.py:1: correction\.action = 'drop': .*'mask'"),
    ("correction = {'upper': 2}\n", r"mine\.py:1: unknown field 'correction\.upper'"),
    ('policy = {\n    "lr": 1e-4,\n    "warmup_step": 3,\n}\n',
     r"py:3: unknown field 'policy\.warmup_step'; did you mean policy\.warmup_steps\?$"),
    ('steps = 3\nengine = {\n    "count": 0,\n}\n',
     r"mine\.py:3: engine\.count = 0: .*greater than 0"),
    ("train = 'a'\n", r"mine\.py:1: unknown field 'train'; did you mean data\.train\b"),
    ("policy = {'count': 2}\n", r"unknown field 'policy\.count'; did you mean engine\.count\?$"),
])  # fmt: skip
def test_a_wrong_file_is_refused_by_place_and_value(write, text, message):
    """And tests/bad_inputs.txt has more of them."""
    with pytest.raises(InputError, match=message) as error:
        reader.read(Config, write(text))
    assert "\n" not in str(error.value)


def test_megatron_s_arguments_on_the_command_line_are_merged_into_those_of_the_file():
    given = '{"overlap_param_gather": false, "bucket_size": 1000}'
    cfg = load("--config", "configs/rlvr1.py", "--policy.megatron.ddp", given)
    own = {"grad_reduce_in_fp32": False, "overlap_param_gather": False, "bucket_size": 1000}
    assert cfg.policy.megatron.ddp == own
    assert cfg.policy.megatron.model == {"moe_permute_fusion": True}
    assert cfg.policy.tp == 4


def test_all_engine_arguments_that_the_run_sets_are_refused():
    """But for the few that may be overridden."""
    names = engine_arguments(Config(), on_cpu=False).keys() - OWN_ENGINE_ARGS
    few = {"enforce_eager", "enable_chunked_prefill", "hf_overrides"}
    few |= {"distributed_executor_backend"}
    assert names - Config().engine.arguments.keys() == few


@pytest.mark.parametrize(("fields", "message"), [
    ({"prompts_per_step": 5, "loss": {"updates_per_batch": 2}}, "is no multiple of"),
    ({"group_size": 1}, "group_size = 1: expected 2"),
    ({"correction": {"high": 0.0}}, "correction.high = 0.0: Input should be greater than 0"),
    ({"correction": {"sequence_error_limit": 0.9}},
     "correction.sequence_error_limit = 0.9: Input should be greater"),
    ({"advantage": {"penalties": {"rude": -5.0}}}, "Input should be 'tool_call' or 'thinking'"),
    ({"policy": {"warmup_lr": math.nan}}, "policy.warmup_lr = nan: Input should be"),
    ({"loss": {"kl_coef": -0.1}}, "loss.kl_coef = -0.1: Input should be greater"),
    ({"gpu_share": -3.0}, "gpu_share = -3.0: Input should be greater"),
    ({"loss": {"ratio_clip": (2.0, 0.2)}}, "Input should be less"),
    ({"advantage": {"low_effort": {"weight": math.nan}}},
     "advantage.low_effort.weight = nan: Input should be"),
    ({"correction": {"low": -2, "high": -1}}, "correction.low = -2: Input should be greater"),
])  # fmt: skip
def test_contradictory_fields_are_named_with_their_values(write, fields, message):
    lines = "".join(f"{name} = {value!r}\n" for name, value in fields.items())
    path = write(re.sub(r"\b(nan|inf)\b", r"float('\1')", lines))
    with pytest.raises(InputError, match=re.escape(message)) as error:
        reader.read(Config, path)
    text = str(error.value)
    assert str(path) in text and "\n" not in text
    for name, value in fields.items():
        assert name in text and (isinstance(value, dict) or str(value) in text)


@pytest.mark.parametrize("policy", [
    {"attention": "sdpa", "row_tokens": 65536},
    {"attention": "auto", "row_tokens": 131072},
    {"attention": "flash_attention_2", "row_tokens": 131072},
    {"attention": "sdpa", "row_tokens": 131072, "kind": "megatron"},
])  # fmt: skip
def test_long_rows_are_taken_where_no_mask_is_made(policy):
    assert Config(policy=policy).policy.row_tokens == policy["row_tokens"]


def test_paths_of_services_are_those_of_the_folder_in_which_a_run_starts(
    write, tmp_path, monkeypatch
):
    """Workers have other folders. A command and what is not there stay as they are written."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data/images").mkdir(parents=True)
    services = {"images": "data/images", "workplace": "data/none", "lean": "env lean"}
    services["judges"] = {"genrm": {"model": "m", "prompts": "own.txt"}, "general": {"model": "g"}}
    cfg = reader.load(Config, ["--config", str(write(f"services = {services}"))], default=TINY)
    found = cfg.services
    assert found.images == str(tmp_path / "data/images")
    assert (found.workplace, found.lean) == ("data/none", "env lean")
    assert found.judges["genrm"] == {"model": "m", "prompts": str(tmp_path / "own.txt")}
    assert found.judges["general"] == {"model": "g"}


def test_a_missing_file_lists_the_existing_ones(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    known = r"no/such\.py: no such config.*h100/rlhf\.py, .*s/tiny\.py"
    with pytest.raises(InputError, match=known):
        load("--config", "no/such.py")
    with pytest.raises(InputError, match="--config: expected the path of a file"):
        load("--steps", 3, "--config")


@pytest.fixture
def shown_help(capfd, monkeypatch) -> str:
    """What --help prints of a script with the name mine.py."""
    monkeypatch.setattr(sys, "argv", ["somewhere/mine.py"])
    with pytest.raises(SystemExit) as stop:
        load("--help")
    assert stop.value.code == 0
    return unboxed(capfd.readouterr().out)


def test_help_explains_every_field(shown_help):
    docs = [doc for Group in groups(Config) for doc in field_docs(Group)]
    assert len(docs) == len(reader.leaves(Config)) + len(list(groups(Config))) - 1
    shown = shown_help.replace("`", "")
    assert [doc for doc in docs if " ".join(doc.split()).replace("`", "") not in shown] == []


def test_help_names_the_script_its_groups_and_its_file(shown_help):
    assert shown_help.startswith("usage: mine.py [-h] [OPTIONS]")
    assert f"The defaults below are those of {TINY}." in shown_help
    for flag in ("--config", "--resume", "--policy.lr", "--advantage.low-effort.weight"):
        assert f" {flag} " in shown_help
    for name in ("policy", "engine", "sampling", "data", "timeouts", "advantage", "loss"):
        assert f" {name} options " in shown_help


def groups(Config: type) -> Iterator[type]:
    """The class of the settings, and those of its groups at any depth."""
    yield Config
    settings = Config()
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if dataclasses.is_dataclass(value):
            yield from groups(type(value))


def field_docs(Group: type) -> list[str]:
    """The texts below the fields of a class; of a field that is declared again, the last one's."""
    docs: dict[str, str] = {}
    for cls in reversed(Group.__mro__):
        if not dataclasses.is_dataclass(cls):
            continue
        (node,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
        for field, text in itertools.pairwise(node.body):
            value = getattr(text, "value", None)
            if isinstance(field, ast.AnnAssign) and isinstance(value, ast.Constant):
                docs[field.target.id] = value.value
    return [docs[field.name] for field in dataclasses.fields(Group)]


def test_a_file_may_use_its_own_names_in_functions_and_comprehensions(write):
    names = "import math\n_n = 4\ndef _f(): return math.ceil(_n / 3)\n"
    used = "steps = sum(_n for _ in range(2))\nmax_lag = _f()\n"
    cfg = reader.read(Config, write(names + used))
    assert (cfg.steps, cfg.max_lag) == (8, 2)


def test_an_empty_dictionary_takes_the_place_of_an_inherited_one():
    assert merging.merge({"tool_call": -5.0}, {}) == {}
    assert merging.merge({"a": 1}, {"b": {"c": 2}}) == {"a": 1, "b": {"c": 2}}


# --- models of the hub ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """A model folder without weights: a config, and a tokenizer of one token per word."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = Tokenizer(models.WordLevel({"?": 0, "a": 1}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    template = "{% for message in messages %}{{ message.content }} {% endfor %}"
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text('{"model_type": "llama"}')
    return folder


@pytest.fixture
def hub(model, tmp_path) -> Path:
    """A folder for HF_HOME whose cache holds acme/small, by links to blobs as the hub writes it."""
    cached = tmp_path / "hf/hub/models--acme--small"
    snapshot = cached / "snapshots/0a1b2c"
    snapshot.mkdir(parents=True)
    (cached / "blobs").mkdir()
    (cached / "refs").mkdir()
    (cached / "refs/main").write_text("0a1b2c")
    for content in [*model.iterdir(), model / "model.safetensors"]:
        blob = cached / "blobs" / content.name
        blob.write_bytes(content.read_bytes() if content.exists() else b"")
        (snapshot / content.name).symlink_to(Path("../../blobs") / content.name)
    return tmp_path / "hf"


UNCHECKED = "from runtime.startup import preflight; preflight.check = lambda cfg: None"


@pytest.fixture(scope="module")
def load_model(tmp_path_factory) -> Iterator[Callable]:
    """The function `loaded` with a Python whose libraries are imported, but for the hub's."""
    path = tmp_path_factory.mktemp("python") / "python"
    with forked_python.python(path, os.environ, ("torch", "ray", "tyro")):
        yield functools.partial(loaded, str(path))


def loaded(python: str, hub: Path, text: str, *flags: str, before: str = UNCHECKED, **env: str):
    """What a process says that loads a config file with the real huggingface_hub."""
    path = hub.parent / "mine.py"
    path.write_text(text)
    code = f"""
import sys
from runtime.startup import preflight
from settings import hub
from settings.config import RunSettings
{before}
print(preflight.load(RunSettings, sys.argv[1:], "").model)
"""
    env = os.environ | {"PYTHONPATH": str(ROOT), "HF_HOME": str(hub)} | env
    env.pop("HF_HUB_CACHE", None)
    command = (python, "-c", code, "--config", path, *flags)
    return ran(*command, root=hub.parent, env=env)


SMALL = "model = 'acme/small'\n"
OTHER = "model = 'acme/other'\n"


@pytest.mark.slow
def test_a_model_of_the_hub_is_its_local_snapshot(hub, load_model):
    """Without network, through huggingface_hub itself; what it found is checked."""
    snapshot = hub / "hub/models--acme--small/snapshots/0a1b2c"
    done = load_model(hub, SMALL, HF_HUB_OFFLINE="1")
    assert done.stdout.splitlines()[-1:] == [str(snapshot)], done.stderr
    (snapshot / "tokenizer_config.json").unlink()
    done = load_model(hub, SMALL, before="", HF_HUB_OFFLINE="1")
    expected = "expected a folder that holds tokenizer_config.json"
    assert done.stderr == f"error: model = {str(snapshot)!r}: {expected}\n"


@pytest.mark.slow
def test_a_folder_goes_before_the_hub(hub, model, load_model):
    shutil.copytree(model, hub.parent / "acme/small")
    done = load_model(hub, SMALL, HF_HUB_OFFLINE="1")
    assert done.stdout.splitlines()[-1] == str(hub.parent / "acme/small"), done.stderr


@pytest.mark.slow
def test_weights_that_the_cache_lacks_matter_to_a_run_but_not_to_a_dry_run(hub, load_model):
    snapshot = hub / "hub/models--acme--small/snapshots/0a1b2c"
    (snapshot / "model.safetensors").unlink()
    done = load_model(hub, SMALL, HF_HUB_OFFLINE="1")
    assert done.returncode == 1 and f"no *.safetensors in {snapshot}. " in done.stderr
    before = "preflight.prepare = lambda cfg: None"
    done = load_model(hub, SMALL, "--dry_run", before=before, HF_HUB_OFFLINE="1")
    assert done.stdout.splitlines()[-1] == str(snapshot), done.stderr


def test_every_file_that_an_index_names_must_be_there(tmp_path):
    """A download that was interrupted leaves some of them."""
    assert missing_weights(tmp_path) == ["*.safetensors"]
    weight_map = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    (tmp_path / "model-1.safetensors").touch()
    assert missing_weights(tmp_path) == ["model-2.safetensors"]
    (tmp_path / "model-2.safetensors").touch()
    assert missing_weights(tmp_path) == []


@pytest.mark.slow
def test_a_model_that_cannot_be_had_is_an_error_that_says_what_was_tried(hub, load_model):
    done = load_model(hub, OTHER, HF_HUB_OFFLINE="1")
    (line,) = done.stderr.splitlines()
    folder = hub.parent / "acme/other"
    start = f"error: model = 'acme/other': there is no folder {folder} that holds config.json"
    assert done.returncode == 1 and line.startswith(start)
    assert "OfflineModeIsEnabled: " in line and f"the cache {hub / 'hub'} does not hold it" in line
    assert line.endswith("(hf download acme/other) and set model to the folder")


@pytest.mark.slow
def test_a_hub_that_does_not_answer_is_waited_for_with_a_deadline(hub, load_model):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        env = {"HF_ENDPOINT": f"http://127.0.0.1:{silent.getsockname()[1]}"}
        short = f"hub.HUB_SECONDS = 0.5\n{UNCHECKED}"
        done = load_model(hub, OTHER, before=short, **env)
        assert "did not provide such a model: ReadTimeout: " in done.stderr
        done = load_model(hub, SMALL, before=short, **env)
        assert done.stdout.splitlines()[-1].endswith("/0a1b2c"), done.stderr


@pytest.mark.slow
def test_a_drafter_is_looked_for_as_a_model_is_and_named_by_its_setting(hub, load_model):
    flag = "--engine.args"
    drafts = {"model": "acme/none", "num_speculative_tokens": 3}
    done = load_model(
        hub, SMALL, flag, json.dumps({"speculative_config": drafts}), HF_HUB_OFFLINE="1"
    )
    said = "engine.args['speculative_config']['model'] = 'acme/none': there is no folder"
    assert said in done.stderr and "hf download acme/none" in done.stderr


def test_the_folder_of_a_drafter_becomes_absolute(tmp_path, monkeypatch):
    """Engines have working folders of their own."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small").mkdir()
    for given, found in (
        ("small", str(tmp_path / "small")),
        ("ngram", "ngram"),
        ("pkg.Drafter", "pkg.Drafter"),
        (None, None),
    ):
        args = {"speculative_config": {"model": given}}
        assert reader.with_drafter(args, weights=True)["speculative_config"]["model"] == found
    assert reader.with_drafter({"seed": 1}, weights=True) == {"seed": 1}


@pytest.mark.parametrize(
    "name",
    ["./acme/x", "/acme/x", "../x", "acme", "a/b/c", "here/x", "models/tinny", "~acme/x", "a/b--c"],
)
def test_a_local_path_is_never_looked_up(name, tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)  # importing it raises
    assert fetched(name, weights=True) == str(Path(name).resolve())
    with pytest.raises(ImportError):
        fetched("acme/x", weights=True)
