"""Small models, rows and configurations that the tests share."""

import asyncio
import contextlib
import inspect
import itertools
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import quick_start  # noqa: F401

from envs import services
from support import data, forked_python
from support.configs import changed
from support.program import ROOT

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
os.environ.setdefault("GRPO_BOXES_AS_ROOT", "1")  # their images are folders
os.environ.setdefault("PYTHONPATH", f"{ROOT}/tests/support/quick")

DURATIONS = Path(__file__).parents[1] / "durations.txt"
CHAT_TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}"
    "{% if m.role == 'assistant' %}<bot>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}[{{ c.function.name }}]{% endfor %}<eos>"
    "{% else %}<user>{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<bot>{% endif %}"
)


def pytest_configure(config: pytest.Config) -> None:
    """Lets pytest-randomly shuffle, and not seed `random`: two workers must not draw alike."""
    config.option.randomly_reset_seed = False


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Counts properties as long ones in `tests/run.sh long`, which tries all their examples."""
    if "GRPO_LONG" in os.environ:
        for item in items:
            if getattr(item.obj, "is_hypothesis_test", False):
                item.add_marker(pytest.mark.long)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    """Tests with whole programs come first, so that no long one is left over at the end.

    The tests of a file that is marked `in_order` keep the order of the file.
    """
    session.items.sort(key=lambda item: not item.get_closest_marker("e2e"))
    places = defaultdict(list)
    for i, item in enumerate(session.items):
        if item.get_closest_marker("in_order"):
            places[item.path].append(i)
    for indices in places.values():
        tests = [session.items[i] for i in indices]
        tests.sort(key=lambda item: item.reportinfo()[1])
        for i, test in zip(indices, tests, strict=True):
            session.items[i] = test


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> None:
    """Tests that are coroutines run in an event loop of their own."""
    test = pyfuncitem.obj
    if inspect.iscoroutinefunction(test):
        pyfuncitem.obj = lambda **fixtures: asyncio.run(test(**fixtures))


def pytest_terminal_summary(terminalreporter) -> None:
    """Lists what was skipped for lack of data, prints the seed, and writes durations.txt.

    That file has the longest test first. A test's seconds include those of its fixtures.
    """
    if lines := data.skipped(terminalreporter.stats.get("skipped", [])):
        terminalreporter.section(f"{len(lines)} tests were skipped: ../shared/data is absent")
        terminalreporter.write_line("\n".join(lines))
    if seed := terminalreporter.config.getoption("randomly_seed", None):
        terminalreporter.write_line(f"random order: -p randomly --randomly-seed={seed}")
    seconds: Counter = Counter()
    for report in itertools.chain(*terminalreporter.stats.values()):
        if isinstance(report, pytest.TestReport):
            seconds[report.nodeid] += report.duration
    if seconds:
        lines = [f"{took:8.2f} {name[:200]}\n" for name, took in seconds.most_common()]
        DURATIONS.write_text("".join(lines))


def save_tokenizer(folder: Path):
    """A character-level tokenizer with a two-role chat template."""
    from launch import tiny_model

    tokenizer = tiny_model.make_tokenizer(
        tags=[],
        characters="".join(map(chr, range(32, 127))) + "\n",
        template="{% for m in messages %}<user>{{ m['content'] }}{% endfor %}<bot>",
        special=["<pad>", "<eos>", "<user>", "<bot>", "<unk>"],
        additional_special_tokens=["<user>", "<bot>"],
        padding_side="right",
        model_max_length=None,
    )
    tokenizer.save_pretrained(folder)
    return tokenizer


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory):
    """The character tokenizer, as a run loads it."""
    from rollout.messages import load_tokenizer

    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(folder)
    return load_tokenizer(str(folder))


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> str:
    """A random Qwen3 of 0.2M parameters with tied embeddings, the harder case for weight sync."""
    import torch

    from launch import tiny_model

    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    model = tiny_model.make_model(
        save_tokenizer(folder),
        hidden_size=64,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=128,
        num_hidden_layers=2,
        max_position_embeddings=2048,
        initializer_range=0.2,
    )
    model.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def warm_python(tmp_path_factory) -> Iterator[str]:
    """A Python for commands that has imported their libraries, with this process's variables."""
    path = tmp_path_factory.mktemp("warm") / "python"
    with forked_python.python(path, os.environ):
        yield str(path)


@pytest.fixture(scope="session")
def parsers_python(tmp_path_factory) -> Iterator[str]:
    """A Python that has imported vLLM's parsers, which takes ten seconds."""
    path = tmp_path_factory.mktemp("parsers") / "python"
    own = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    libraries = ("vllm.entrypoints.openai.chat_completion.protocol", "vllm.parser")
    with forked_python.python(path, os.environ | own, (*libraries, "vllm.tokenizers.hf")):
        yield str(path)


@pytest.fixture
def warm_parsers(parsers_python, monkeypatch) -> None:
    """Servers of envs/parsers start as forks of a process that has imported vLLM's parsers."""
    monkeypatch.setattr(sys, "executable", parsers_python)


@pytest.fixture(scope="session")
def chat_model(tiny_model, tmp_path_factory) -> str:
    """The tiny model with a template that shows what the assistant said and called."""
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp("chat") / "model"
    shutil.copytree(tiny_model, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def models(tmp_path_factory, tiny_model) -> dict[str, str]:
    """A folder for every family that policy/megatron trains."""
    from support.tiny_models import FAMILIES, make

    folder = tmp_path_factory.mktemp("families")
    return {family: make(family, folder / family, tiny_model) for family in FAMILIES}


def spelling_rows(count: int, seed: int = 0) -> list[dict]:
    """Rows of reasoning-gym's spell_backward, as NeMo-Gym writes them."""
    generator = random.Random(seed)
    rows = []
    for i in range(count):
        word = "".join(generator.choices("abcdefgh", k=generator.randint(3, 6)))
        row = {"responses_create_params": {"input": [{"role": "user", "content": word}]}}
        row["agent_ref"] = {"type": "responses_api_agents", "name": "reasoning_gym_simple_agent"}
        row["question"] = f"Spell this word backward (example: sun -> nus): {word}"
        row["answer"] = word[::-1]
        row["metadata"] = {"source_dataset": "spell_backward", "source_index": i, "word": word}
        rows.append(row)
    return rows


def write_rows(path: Path, rows: list[dict]) -> str:
    """Writes a JSONL file and returns its name."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture(autouse=True)
def own_services(monkeypatch):
    """What a test tells `services.configure`, and what it counts there, holds for that test."""
    monkeypatch.setattr(services, "_current", services._current.copy())
    monkeypatch.setattr(services, "_limits", services._limits.copy())
    monkeypatch.setattr(services, "_starved", Counter())


@pytest.fixture
def tiny_config(tiny_model, tmp_path):
    """A function that makes a small Config for a run in the test's folder."""
    base = make_config(tiny_model, tmp_path)
    return lambda **fields: changed(base, **fields)


def make_config(model: str, folder: Path, Config=None, group_size: int = 4):
    """A small Config, or one of a fork's class, for a run in a folder."""
    if Config is None:
        from grpo_async import Config

    return changed(
        Config(),
        run_dir=str(folder / "run"),
        model=model,
        data={"train": write_rows(folder / "train.jsonl", spelling_rows(64))},
        engine={"args": {"max_num_seqs": 16}},
        timeouts={"start": 180.0, "rollout": 60.0, "train": 60.0, "sync": 30.0},
        steps=3,
        prompts_per_step=4,
        group_size=group_size,
        max_model_len=96,
        max_response_tokens=16,
        lr=1e-3,
        warmup_lr=1e-3,
        warmup_steps=0,
        row_tokens=128,
        activation_checkpointing=False,
    )


@pytest.fixture
def default_signals() -> Iterator[None]:
    """A process that nohup or a script's `&` has started ignores these, and so do its children."""
    kept = {n: signal.signal(n, signal.SIG_DFL) for n in (signal.SIGHUP, signal.SIGQUIT)}
    kept[signal.SIGINT] = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, before in kept.items():
        signal.signal(number, before)


@contextlib.contextmanager
def serving_judge(name: str, model: str, folder: Path, length: int) -> Iterator[subprocess.Popen]:
    """launch/judges.sh with one judge on this CPU, and the variables of a run beside it."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    flags = f"--max-model-len {length} --enforce-eager --dtype float32"
    of_run = {"JUDGES": f"{name} {model} 0 {flags}", "JUDGES_FILE": str(folder / "judges")}
    given = {"NODE_IP": "127.0.0.1", "JUDGE_PORT": str(port), "SLURM_GPUS_ON_NODE": "0"}
    given |= {"GRPO_PYTHON": sys.executable, "VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1"}
    how = {"cwd": ROOT, "env": os.environ | of_run | given, "start_new_session": True}
    process = subprocess.Popen(["bash", "launch/judges.sh", str(folder)], **how)
    try:
        with mock.patch.dict(os.environ, of_run):
            yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.fixture
def lean():
    """A command that stands in for Lean, in a folder that the sandbox's user can read."""
    from envs.sandbox import sandbox

    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        program = shutil.copy(Path(__file__).parent / "support/lean_stand_in.py", folder)
        yield f"{sandbox.python()[0]} {program}"


@pytest.fixture
def small_disk(tmp_path):
    """A file system of half a megabyte."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("only root may mount a small file system")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)
