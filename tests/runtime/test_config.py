"""Configuration files and flags, and what a user is told about wrong input before Ray starts."""

import ast
import json
import math
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import ray
from tokenizers import Tokenizer, models, pre_tokenizers

import grpo_async
from grpo_async import Config
from runtime import config
from runtime.config import InputError

ROOT = Path(__file__).resolve().parents[2]
TINY = "configs/tiny.py"


@pytest.fixture
def write(tmp_path):
    """Writes a config file and returns its path."""

    def write(text: str, name: str = "mine.py") -> Path:
        path = tmp_path / name
        path.write_text(text)
        return path

    return write


def load(*flags) -> Config:
    return config.load(Config, [str(flag) for flag in flags], default=TINY)


# --- reading --------------------------------------------------------------------------------------


def test_an_empty_file_is_the_defaults(write):
    assert config.read(Config, write("")) == Config()


def test_without_arguments_the_default_file_is_read():
    cfg = load()
    assert cfg.model.endswith("/models/tiny") and "{" not in cfg.run_dir
    assert re.fullmatch(r".*/runs/tiny-1-\d{8}-\d{6}", cfg.run_dir)
    assert "/runs/tiny-7-" in load("--seed", 7).run_dir


def test_a_file_inherits_overrides_and_computes(write):
    path = write(
        "import math\n"
        "from pathlib import Path\n"
        "from configs.tiny import *\n"
        "_half = steps // 2\n"
        "steps = _half\n"
        "correction = {'high': 2.0}\n"
    )
    cfg, parent = config.read(Config, path), config.read(Config, ROOT / TINY)
    changed = {k for k, v in vars(parent).items() if getattr(cfg, k) != v}
    assert changed == {"steps", "correction"} and cfg.steps == parent.steps // 2
    assert (cfg.correction.high, cfg.correction.action) == (2.0, "truncate")


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("[!_]*.py")), ids=lambda p: p.name)
def test_every_config_file_is_valid(path):
    assert config.read(Config, path) != Config()


def test_flags_override_the_file(write):
    path = write("steps = 5\nlr = 1e-4\nskip_zero_advantage = True\nwandb = False\n")
    cfg = load("--steps", 7, "--config", path, "--correction.high", 2, "--no-skip-zero-advantage")
    assert (cfg.steps, cfg.lr, cfg.correction.high) == (7, 1e-4, 2.0)
    assert (cfg.skip_zero_advantage, cfg.wandb) == (False, False)
    cfg = load("--config", path, "--dual-clip", 3, "--correction.level", "sequence")
    assert (cfg.dual_clip, cfg.correction.level, cfg.correction.high) == (3.0, "sequence", 5.0)


# --- refusing -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lr = 1e-4\nstep = 3\n", r"mine\.py:2: unknown field 'step'; did you mean steps\?$"),
        ("from configs.tiny import *\nmax_lagg = 3\n", r"py:2: .*'max_lagg'; did you mean max_lag"),
        ("zzzzzz = 3\n", r"mine\.py:1: unknown field 'zzzzzz'$"),
        ("\nsteps = 'many'\n", r"mine\.py:2: steps = 'many': .*integer"),
        ("steps = 0\n", r"mine\.py:1: steps = 0: .*greater than 0"),
        ("steps: int = -1\n", r"mine\.py:1: steps = -1"),
        ("steps = 1\nsteps = 1.5\n", r"mine\.py:2: steps = 1\.5: .*integer"),
        ("max_lag = -1\n", r"mine\.py:1: max_lag = -1: .*greater than or equal to 0"),
        ("temperature = 0\n", r"mine\.py:1: temperature = 0"),
        ("reduction = 'mean'\n", r"mine\.py:1: reduction = 'mean': .*'token' or 'sequence'"),
        ("lr = None\n", r"mine\.py:1: lr = None: .*valid number"),
        ("correction = {'action': 'drop'}\n", r"mine\.py:1: correction\.action = 'drop': .*'mask'"),
        ("correction = {'upper': 2}\n", r"mine\.py:1: correction\.upper = 2: "),
        ("steps = = 3\n", r"mine\.py: SyntaxError: .*line 1"),
        ("from configs.tyny import *\n", r"mine\.py: ModuleNotFoundError: .*tyny"),
        ("steps = 3 / 0\n", r"mine\.py: ZeroDivisionError"),
    ],
)
def test_a_wrong_file_is_refused_by_place_and_value(write, text, message):
    with pytest.raises(InputError, match=message) as error:
        config.read(Config, write(text))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompts_per_step": 5, "updates_per_batch": 2}, "is no multiple of"),
        ({"val_period": 5, "val_data": ""}, "expected both or neither"),
        ({"val_period": 0, "val_data": "some.jsonl"}, "expected both or neither"),
        ({"kl_coef": 0.1, "skip_zero_advantage": True}, "needs skip_zero_advantage = False"),
        ({"dual_clip": 0.5}, "more than 1"),
        ({"sequence_error_limit": 0.9}, "sequence_error_limit = 0.9: Input should be greater"),
        ({"group_size": 1}, "group_size = 1: expected 2"),
        ({"advantage_clip": -1.0}, "advantage_clip"),
        ({"warmup_lr": math.nan}, "warmup_lr = nan: Input should be"),
        ({"lr": math.inf}, "lr = inf: Input should be a finite number"),
        ({"kl_coef": -0.1}, "kl_coef = -0.1: Input should be greater"),
        ({"trainer_gpus": -3.0}, "trainer_gpus = -3.0: Input should be greater"),
        ({"clip_low": 2.0}, "clip_low = 2.0: Input should be less"),
        ({"gpu_memory_utilization": 7.0}, "gpu_memory_utilization = 7.0: Input should be less"),
        ({"low_effort": {"weight": math.nan}}, "low_effort.weight = nan: Input should be"),
        ({"correction": {"low": -2, "high": -1}}, "correction.low = -2: Input should be greater"),
        ({"correction": {"low": 3, "high": 2}}, "correction.low = 3.0 > correction.high = 2.0"),
    ],
)
def test_contradictory_fields_are_named_with_their_values(write, fields, message):
    lines = "".join(f"{name} = {value!r}\n" for name, value in fields.items())
    path = write(re.sub(r"\b(nan|inf)\b", r"float('\1')", lines))
    with pytest.raises(InputError, match=re.escape(message)) as error:
        config.read(Config, path)
    told = str(error.value)
    assert str(path) in told and "\n" not in told
    for name, value in fields.items():
        assert name in told and (isinstance(value, dict) or str(value) in told)


def test_flags_that_contradict_the_file_are_refused(capfd, write):
    with pytest.raises((SystemExit, InputError)) as stop:
        load("--config", write("prompts_per_step = 5\n"), "--updates-per-batch", 2)
    told = unboxed(f"{capfd.readouterr().err} {stop.value}")
    assert "prompts_per_step = 5 is no multiple of updates_per_batch = 2" in told


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--stepz", "3"], "Perhaps you meant: --steps"),
        (["--steps", "many"], "--steps: invalid literal for int() with base 10: 'many'"),
        (["--correction.level", "tokn"], "'tokn' for argument '--correction.level'"),
    ],
)
def test_a_wrong_flag_is_refused_by_name(capfd, flags, message):
    with pytest.raises(SystemExit) as stop:
        load(*flags)
    assert stop.value.code == 2 and message in unboxed(capfd.readouterr().err)


def test_a_missing_file_lists_the_existing_ones(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    with pytest.raises(InputError, match=r"no/such\.py: no such config file; .*configs/tiny\.py"):
        load("--config", "no/such.py")
    with pytest.raises(InputError, match="--config: expected the path of a file"):
        load("--steps", 3, "--config")


def unboxed(text: str) -> str:
    """tyro's output without colours, frames and line breaks."""
    return " ".join(re.sub(r"\x1b\[[0-9;]*m|[─-╿]", " ", text).split())


def test_help_explains_every_field(capfd):
    with pytest.raises(SystemExit) as stop:
        load("--help")
    told = unboxed(capfd.readouterr().out)
    classes = [n for n in ast.parse(Path(grpo_async.__file__).read_text()).body if is_config(n)]
    docs = [doc for node in classes for doc in field_docs(node)]
    assert stop.value.code == 0 and len(docs) == 4 + len(vars(Config()))
    assert [
        d for d in docs if " ".join(d.split()).replace("`", "") not in told.replace("`", "")
    ] == []


def is_config(node) -> bool:
    return isinstance(node, ast.ClassDef) and node.name in ("Config", "Correction")


def field_docs(node: ast.ClassDef) -> list[str]:
    values = [e.value for e in node.body[1:] if isinstance(e, ast.Expr)]
    return [v.value for v in values if isinstance(v, ast.Constant)]


# --- as a user meets it ---------------------------------------------------------------------------

ROW = {
    "responses_create_params": {"input": [{"role": "user", "content": "1 + 1?"}]},
    "agent_ref": {"type": "responses_api_agents", "name": "math_with_judge_simple_agent"},
    "question": "1 + 1?",
    "expected_answer": "2",
}
LONG = ROW | {"responses_create_params": {"input": [{"role": "user", "content": "a " * 200}]}}
UNANSWERED = {k: v for k, v in ROW.items() if k != "expected_answer"}
STRANGE = ROW | {"agent_ref": {"name": "maths"}}


def lines(*rows) -> str:
    return "".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows)


BAD_DATA = {
    "empty": ("", r"train\.jsonl: holds no rows"),
    "malformed_json": (lines(ROW, '{"a": 1,}'), r"train\.jsonl:2: .*"),
    "missing_field": (lines(ROW, "", UNANSWERED), r"train\.jsonl:3: expected_answer is missing"),
    "unknown_environment": (lines(STRANGE), r"jsonl:1: agent_ref\.name is 'maths', .*one of: math"),
    "no_row": (lines([1]), r"train\.jsonl:1: responses_create_params\.input is missing"),
    "not_utf8": (b'{"a": "\xff"}', r"train\.jsonl:1: expected UTF-8: byte 0xff"),
    "long_prompt": (lines(ROW, LONG), r"jsonl:2: .* is 200 tokens long, .*max_model_len = 128"),
}
BAD_CONFIG = {
    "missing_config": (None, r"mine\.py: no such config file; there are: "),
    "syntax_error": ("steps = = 1\n", r"mine\.py: SyntaxError: .*line 1"),
    "wrong_type": ("steps = 'many'\n", r"mine\.py:1: steps = 'many': .*integer"),
    "unknown_field": ("lr = 1.0\nstep = 1\n", r"mine\.py:2: unknown field 'step'; .* steps\?"),
    "missing_model": (
        "model = 'no/model'\n",
        r"model = '.*no/model': .* folder .*config\.json",
    ),
    "missing_data": ("model = {model!r}\ntrain_data = 'no.jsonl'\n", r"no\.jsonl: .*No such file"),
    "contradiction": ("dual_clip = 0.5\n", r"mine\.py.*dual_clip = 0\.5: expected more than 1"),
}


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
def bad(write, model, tmp_path):
    """Writes the input of a case; returns the config's path and what must be said about it."""

    def bad(case: str) -> tuple[Path, str]:
        if case in BAD_CONFIG:
            text, message = BAD_CONFIG[case]
            path = write(text.format(model=str(model))) if text else tmp_path / "mine.py"
            return path, message
        content, message = BAD_DATA[case]
        data = tmp_path / "train.jsonl"
        data.write_bytes(content if isinstance(content, bytes) else content.encode())
        fields = {"model": str(model), "train_data": str(data), "max_model_len": 128}
        return write("".join(f"{k} = {v!r}\n" for k, v in fields.items())), message

    return bad


@pytest.mark.parametrize("case", [*BAD_CONFIG, *BAD_DATA])
def test_bad_input_ends_main_with_one_line(bad, case, monkeypatch, capfd):
    path, message = bad(case)
    monkeypatch.setattr(sys, "argv", ["grpo_async.py", "--config", str(path)])
    monkeypatch.setattr(grpo_async.cluster, "connect", lambda cfg: pytest.fail("Ray was started"))
    with pytest.raises(SystemExit) as stop:
        grpo_async.main()
    assert re.search(f"^error: .*{message}", stop.value.code), stop.value.code
    assert "\n" not in stop.value.code and not ray.is_initialized()
    assert capfd.readouterr().err == ""


def test_good_input_reaches_ray(bad, monkeypatch):
    class Reached(Exception):
        pass

    def connect(cfg):
        assert cfg.max_model_len == 128
        raise Reached

    path, _ = bad("long_prompt")
    (path.parent / "train.jsonl").write_text(lines(ROW, ROW))
    monkeypatch.setattr(sys, "argv", ["grpo_async.py", "--config", str(path)])
    monkeypatch.setattr(grpo_async.cluster, "connect", connect)
    with pytest.raises(Reached):
        grpo_async.main()


@pytest.mark.slow
@pytest.mark.parametrize("case", ["unknown_field", "malformed_json", "long_prompt"])
def test_bad_input_ends_the_program_within_seconds(bad, case, tmp_path):
    path, message = bad(case)
    folder = tmp_path / "ray"
    folder.mkdir()
    command = [sys.executable, str(ROOT / "grpo_async.py"), "--config", str(path)]
    began, before = time.monotonic(), os.times()
    env = os.environ | {"RAY_TMPDIR": str(folder)}
    done = subprocess.run(
        command, capture_output=True, text=True, env=env, cwd=tmp_path, timeout=60
    )
    after = os.times()
    seconds = after.children_user + after.children_system - before[2] - before[3]
    print(f"{case}: {time.monotonic() - began:.1f} s, {seconds:.1f} s of them on the processor")
    assert done.returncode == 1 and done.stdout == ""
    assert re.fullmatch(f"error: .*{message}.*\n", done.stderr), done.stderr
    assert seconds < 8  # 2 to 4, most of it imports; by the clock it depends on who else runs
    assert list(folder.iterdir()) == []
