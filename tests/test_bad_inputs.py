"""Wrong inputs by their place: each ends in one line before any actor, and nothing is lost."""

import builtins
import contextlib
import dataclasses
import fcntl
import functools
import gzip
import json
import math
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import ray
from conftest import spelling_rows, write_rows

import data_prep
import grpo_async
import mopd
import report
from core.errors import InputError
from envs.parsers import parsers
from rollout.messages import load_tokenizer
from runtime.checkpoints import folders
from runtime.checkpoints.archive import write_groups
from runtime.processes import cluster, ray_start
from runtime.processes.placement import Node, plan
from runtime.startup import modes
from settings import merging
from support.configs import changed
from support.program import ROOT, ran, unboxed
from support.samples import make_sample, stream
from support.tables import table

ROWS = spelling_rows(8)
GOOD = json.dumps(ROWS[0])


class Started(Exception):
    """What stands for the first actor."""


class Home:
    """A folder with all that a run needs; below `lines`, the steps by which a case spoils it."""

    def __init__(self, folder: Path, model: str):
        self.folder = folder
        self.model = folder / "model"  # 0.2M random parameters; reads 2,048 tokens
        self.run = folder / "run"
        self.train = folder / "train.jsonl"
        self.held = None
        shutil.copytree(model, self.model)
        write_rows(self.train, ROWS)

    def config(self, **fields) -> grpo_async.Config:
        """The configuration of the file, for what an earlier run would have left."""
        data = {"train": str(self.train)}
        base = {"run_dir": str(self.run), "model": str(self.model), "data": data}
        base |= {"steps": 3, "prompts_per_step": 2, "group_size": 2, "max_model_len": 128}
        return changed(grpo_async.Config(), **base | fields)

    def lines(self, text: str) -> Path:
        """The config file: what a run needs, then a case's own lines."""
        path = self.folder / "mine.py"
        names = ("run_dir", "model", "steps", "prompts_per_step", "group_size")
        lines = [f"{name} = {getattr(self.config(), name)!r}\n" for name in names]
        lines += [f"data = {{'train': {str(self.train)!r}}}\n", "sampling = "]
        path.write_text("".join(lines) + "{'max_model_len': 128}\n" + f"{text}\n")
        return path

    def put(self, name: str, content: str | bytes, times: int = 1) -> None:
        """Writes a file, whose content may stand in it many times."""
        path = self.folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes((content if isinstance(content, bytes) else content.encode()) * times)

    def remove(self, name: str) -> None:
        path = self.folder / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()

    def move(self, name: str, other: str) -> None:
        (self.folder / name).rename(self.folder / other)

    def mkdir(self, name: str) -> None:
        (self.folder / name).mkdir()

    def mkfifo(self, name: str) -> None:
        os.mkfifo(self.folder / name)

    def cut(self, name: str) -> None:
        content = (self.folder / name).read_bytes()
        (self.folder / name).write_bytes(content[: len(content) // 2])

    def flip(self, name: str) -> None:
        content = bytearray((self.folder / name).read_bytes())
        content[len(content) // 2] ^= 4
        (self.folder / name).write_bytes(content)

    def checkpoint(self, step: int, fields: dict | None = None, order: int = 1) -> None:
        """What a run of other fields or rows leaves at a step, except the shards' content."""
        folder = self.run / f"step_{step:06d}"
        aside = folder.with_suffix(".partial")
        (aside / "policy").mkdir(parents=True)
        (aside / "hf").mkdir()
        (aside / "hf/config.json").write_text("{}")
        (aside / "policy/__0_0.distcp").write_bytes(bytes(5000))
        progress = {"next_slot": 2 * step, "next_prompt": 2 * step, "in_flight": {}}
        state = {"version": step, "progress": progress, "ready": [], "dropped": {}}
        rows = ROWS[::order]
        state["rows"] = [len(rows), stream(rows).checksum(len(rows))]
        state["config"] = dataclasses.asdict(self.config(**fields or {}))
        (aside / "state.json").write_text(json.dumps(state))
        files = folders.checksums(str(aside), folders.listing(str(aside)))
        folders.commit(str(aside), str(folder), files)

    def state(self, step: int, fields: dict) -> None:
        """Changes fields of a checkpoint's state, also nested ones; ... deletes one."""
        folder = self.run / f"step_{step:06d}"
        path = folder / "state.json"
        state = json.loads(path.read_text())
        for name, value in fields.items():
            *above, leaf = name.split(".")
            inner = functools.reduce(dict.__getitem__, above, state)
            inner.pop(leaf, None) if value is ... else inner.update({leaf: value})
        path.write_text(json.dumps(state))
        names = json.loads((folder / "complete.json").read_text())
        folders.mark(str(folder), folders.checksums(str(folder), list(names)))

    def seal(self) -> None:
        """The model is marked, as a run marks what it exports."""
        modes.seal(str(self.model))

    def integers(self, name: str) -> None:
        self.tensors(lambda state: state.update({name: state[name].int()}))

    def prune(self, keep: int) -> None:
        """Of the older checkpoints only the models are left."""
        folders.prune(str(self.run), keep)

    def finished(self) -> None:
        self.checkpoint(3)
        self.put("run/metrics.jsonl", '{"step": 3, "validation_reward": 0.5}\n')

    def take(self) -> None:
        """Lives in the run folder, as another run would, with files of its own."""
        self.put("run/quarantine.jsonl", '{"file": "theirs", "line": 1}\n')
        self.put("run/config.json", "{}")
        self.data("GOOD\n{\n")
        self.held = open(self.run / "lock", "a+")  # noqa: SIM115
        fcntl.flock(self.held, fcntl.LOCK_EX)
        self.held.write("process 1 on elsewhere")
        self.held.flush()

    def samples(self, name: str, groups: int = 2, columns: tuple[str, ...] = ()) -> None:
        """A run folder with a step's samples, or with these columns instead."""
        path = self.folder / name / "samples/step_000001.npz"
        made = [[make_sample(np.random.default_rng(i), 400)] for i in range(groups)]
        write_groups(str(path), [(i, 0, i + 1) for i in range(groups)], [], *made)
        if columns:
            np.savez(path, **dict.fromkeys(columns, np.zeros(2)))

    def edit(self, fields: dict) -> None:
        """Changes fields of the model's config.json; ... deletes one."""
        path = self.model / "config.json"
        path.write_text(json.dumps(without(json.loads(path.read_text()) | fields)))

    def template(self, text: str) -> None:
        self.put("model/chat_template.jinja", text)

    def tensors(self, change: Callable[[dict], object]) -> None:
        from safetensors.torch import load_file, save_file

        path = self.model / "model.safetensors"
        state = load_file(path)
        change(state)
        save_file(state, path, metadata={"format": "pt"})

    def header(self, tensors: dict) -> None:
        """Weights of zeros, by this header."""
        text = json.dumps(tensors).encode()
        end = max(tensor["data_offsets"][1] for tensor in tensors.values())
        self.put("model/model.safetensors", len(text).to_bytes(8, "little") + text + bytes(end))

    def reverse_vocabulary(self) -> None:
        path = self.model / "tokenizer.json"
        content = json.loads(path.read_text())
        words = content["model"]["vocab"]
        content["model"]["vocab"] = dict(zip(words, reversed(words.values()), strict=True))
        path.write_text(json.dumps(content))

    def nan(self, name: str) -> None:
        self.edit({name: math.nan})

    def narrow(self, name: str) -> None:
        self.tensors(lambda state: state.update({name: state[name][:, :32].contiguous()}))

    def drop(self, name: str) -> None:
        self.tensors(lambda state: state.pop(name))

    def embed(self, count: int) -> None:
        self.tensors(
            lambda state: state.update({k: v[:count] for k, v in state.items() if "embed" in k})
        )

    def index(self, content: object) -> None:
        self.move("model/model.safetensors", "model/part-1.safetensors")
        self.put("model/model.safetensors.index.json", json.dumps(content))

    def gpt_neox(self) -> None:
        from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

        sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
        small = GPTNeoXConfig(vocab_size=101, intermediate_size=32, **sizes)
        GPTNeoXForCausalLM(small).save_pretrained(self.model)

    def data(self, content: str | bytes, times: int = 1) -> None:
        """Training data; GOOD is a good row, OPEN one without its }, HALF 50 characters of it."""
        if isinstance(content, str):
            content = content.replace("GOOD", GOOD).replace("OPEN", GOOD[:-1])
            content = content.replace("HALF", GOOD[:50])
        self.put("train.jsonl", content, times)

    def binary(self) -> None:
        self.data(bytes(range(128, 256)))

    def loop(self, name: str) -> None:
        (self.folder / name).symlink_to(name)

    def gzip(self) -> None:
        self.data(gzip.compress(GOOD.encode()))

    def rows(self, *every: dict) -> None:
        """Good rows with other fields; ... deletes one."""
        write_rows(self.train, [without(ROWS[0] | fields) for fields in every])

    def issue(self, fields: dict) -> None:
        """A row of a repository's issue, but for these fields."""
        good = {"agent_ref": {"name": "swe_agents"}, "instance_id": "a__b-1", "image": "b"}
        good |= {"workdir": "/b", "problem_statement": "p", "base_commit": 40 * "0"}
        good |= {"log_parser": "r2e", "tests": {"kind": "r2e", "expected": {"t": "PASSED"}}}
        good |= {"patch": "diff --git a/b b/b\n", "test_patch": ""}
        self.rows(good | dict.fromkeys(("FAIL_TO_PASS", "PASS_TO_PASS"), []) | fields)

    def ask(self, *messages: dict) -> None:
        self.rows({"responses_create_params": {"input": list(messages)}})

    def long(self, *sizes: int) -> None:
        """Good rows with prompts of so many characters, or as they are for 0."""
        asked = {size: [{"role": "user", "content": "a" * size}] for size in sizes}
        self.rows(*({"responses_create_params": {"input": asked[n]}} if n else {} for n in sizes))


def without(fields: dict) -> dict:
    return {name: value for name, value in fields.items() if value is not ...}


@dataclass(frozen=True)
class Case:
    """An input: flags and the steps that spoil a home; and what the program's line holds."""

    says: str
    flags: str = ""
    steps: tuple[tuple, ...] = ()
    program: str = "grpo_async"

    def spoil(self, home: Home) -> list[str]:
        """Takes the steps; returns the flags of the command line."""
        home.lines("")
        for name, *given in self.steps:
            getattr(home, name)(*given)
        flags = self.flags.replace("HOME", str(home.folder)).replace("X300", "x" * 300)
        words = shlex.split(flags)
        is_named = "--config HOME" in self.flags or self.program in ("data_prep", "report")
        own = [] if is_named else ["--config", str(home.folder / "mine.py")]
        return [*own, *words]


PROGRAMS = {
    "grpo_async": grpo_async.main,
    "mopd": mopd.main,
    "data_prep": lambda: data_prep.main(sys.argv[1:]),
    "report": lambda: report.main(sys.argv[1:]),
}


def case(place: str, says: str, own: str = "", *steps: tuple) -> Case:
    if place == "config":
        return Case(says, "", (("lines", own), *steps))
    if place == "mopd":
        return Case(says, "", (("lines", own), *steps), place)
    if place in PROGRAMS:
        return Case(says, own, steps, place)
    if place == "toml":
        return Case(says, "--config HOME/mine.toml", (("put", "mine.toml", own), *steps))
    if place == "json":
        return Case(says, "--config HOME/mine.json", (("put", "mine.json", own), *steps))
    return Case(says, own, steps)


AUTO = "--resume auto"
EVAL = "--eval_only --data.val HOME/train.jsonl"
TABLE = {
    f"{place}: {name}": case(place, *columns)
    for place, cases in table(Path(__file__).with_name("bad_inputs.txt")).items()
    for name, *columns in cases
}


def run(home: Home, case: Case, monkeypatch) -> None:
    """Spoils what a run needs, and gives `main` the case's flags."""
    monkeypatch.setattr(sys, "argv", ["grpo_async.py", *case.spoil(home)])
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(ray_start, "connect", started)
    monkeypatch.setattr(parsers.Server, "start", started)  # which imports vLLM
    monkeypatch.setattr(merging, "SECONDS", 0.5)
    load_tokenizer.cache_clear()


def started(*args, **options) -> None:
    raise Started


CONNECT = ray_start.connect


def contents(folder: Path) -> dict[str, bytes]:
    """The files and folders of a folder, but for the files that locks are written to."""
    found = [path for path in folder.rglob("*") if path.name != "lock"]
    return {str(path): path.read_bytes() if path.is_file() else b"" for path in found}


@contextlib.contextmanager
def importing() -> Iterator[set[str]]:
    """The packages that import statements name in a block, also those that are loaded already."""
    names: set[str] = set()
    real = builtins.__import__

    def noted(name, *args, **kwargs):
        names.add(name.partition(".")[0])
        return real(name, *args, **kwargs)

    with mock.patch.object(builtins, "__import__", noted):
        yield names


@pytest.mark.parametrize("name", TABLE)
def test_a_wrong_input_ends_in_one_line_before_any_actor(
    name, tmp_path, tiny_model, monkeypatch, capfd
):
    """Without vLLM and Ray, and nothing of the user's is another than before."""
    case = TABLE[name]
    home = Home(tmp_path, tiny_model)  # which holds the lock of another run
    run(home, case, monkeypatch)
    before = contents(tmp_path)
    capfd.readouterr()
    began = time.perf_counter()
    with pytest.raises(SystemExit) as stop, importing() as imported:
        PROGRAMS[case.program]()
    seconds = time.perf_counter() - began
    assert not imported & {"ray", "vllm"}
    told = capfd.readouterr()
    if stop.value.code == 2:  # what tyro says of flags
        text = unboxed(told.err)
    else:
        text = stop.value.code or told.out.splitlines()[-1]
        assert "\n" not in text and told.err == "" and text.startswith(("error: ", "nothing to"))
    assert re.search(case.says, text), text
    assert seconds < 60 and contents(tmp_path) == before and not ray.is_initialized()


@pytest.mark.parametrize("flags", ["", EVAL, "--rollout_only", AUTO])
def test_the_same_inputs_unspoilt_start_a_run(flags, tmp_path, tiny_model, monkeypatch):
    run(Home(tmp_path, tiny_model), Case("", flags), monkeypatch)
    with pytest.raises(Started):
        grpo_async.main()


@pytest.mark.parametrize(("nodes", "flags", "says"), [
    ([1], "--policy.ranks 2", r"policy\.ranks = 2, .* need 3 GPUs, but the cluster has 1: lo"),
    ([8, 8], "--engine.count 16", r"engine\.count = 16, .* need 17 GPUs, .* has 16"),
    ([1], "--gpu_share 0.6", r"gpu_share = 0\.6 need 2 GPUs, but the cluster has 1"),
    ([1], "--gpu_share 0.5 --policy.ranks 2",
     r"policy\.ranks = 2, .* need 2 GPUs, .* has 1 \(no two trainer ranks share one\)"),
    ([4, 4], "--engine.tensor_parallel 2 --engine.count 4",
     r"engine\.count = 4, engine\.tensor_parallel = 2 .* need 9 GPUs, but the cluster has 8"),
    ([1, 1, 1], "--engine.tensor_parallel 2",
     r"engine\.tensor_parallel = 2, .* on one node; the nodes have 3 x 1 GPUs"),
    ([], "--policy.attention flash_attention_2", r"needs a GPU, but the cluster has none"),
    ([0], "--policy.attention varlen", r"needs a GPU, but the cluster has none: expected auto"),
])  # fmt: skip
def test_too_small_a_cluster_is_named_before_any_actor(
    nodes, flags, says, tmp_path, tiny_model, monkeypatch
):
    """What is needed, by what, and what there is."""
    run(Home(tmp_path, tiny_model), Case("", flags), monkeypatch)
    monkeypatch.setattr(ray_start, "connect", CONNECT)
    monkeypatch.setattr(cluster, "actor", started)
    monkeypatch.setattr(ray, "init", lambda **options: None)
    node = {"Alive": True, "NodeID": "n", "NodeManagerHostname": "host"}
    alive = [node | {"Resources": {"GPU": count} if count else {}} for count in nodes]
    gone = {"Alive": False, "Resources": {"GPU": 99}}
    monkeypatch.setattr(ray, "nodes", lambda: [*alive, gone])
    with pytest.raises(InputError, match=says):
        grpo_async.main()


@pytest.mark.parametrize(("nodes", "fields"), [
    ([], {"ranks": 4, "count": 4}),  # on CPUs
    ([2], {}),
    ([1], {"gpu_share": 0.5}),
    ([1], {"gpu_share": 0.25, "count": 2}),
    ([2], {"gpu_share": 0.5, "ranks": 2, "count": 2}),
    ([1], {"replay": "elsewhere"}),
    ([1], {"export": 3, "run_dir": "x"}),
    ([4, 2], {"tensor_parallel": 2, "count": 2, "ranks": 2}),
    ([1], {"gpu_share": 0.5, "attention": "flash_attention_2"}),
])  # fmt: skip
def test_a_cluster_that_is_large_enough_is_taken(nodes, fields):
    plan(changed(grpo_async.Config(), **fields), [Node(str(i), n) for i, n in enumerate(nodes)])


def test_a_cluster_that_is_not_there_is_named_at_once(tmp_path, tiny_model, monkeypatch):
    run(Home(tmp_path, tiny_model), Case(""), monkeypatch)
    monkeypatch.setattr(ray_start, "connect", CONNECT)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    monkeypatch.setenv("RAY_ADDRESS", address)
    began = time.perf_counter()
    with pytest.raises(InputError, match=f"RAY_ADDRESS = '{address}': .*refused: expected a Ray"):
        grpo_async.main()
    assert time.perf_counter() - began < 60 and not ray.is_initialized()


@pytest.mark.parametrize("folder", ["/proc/nowhere", "/tmp/" + 120 * "x"])
def test_a_ray_that_does_not_start_names_its_logs_and_the_variable(
    folder, tmp_path, tiny_model, monkeypatch
):
    run(Home(tmp_path, tiny_model), Case(""), monkeypatch)
    monkeypatch.setattr(ray_start, "connect", CONNECT)
    monkeypatch.setenv("RAY_TMPDIR", folder)
    says = (
        f"Ray did not start on this machine: .*; its logs are in {folder}/ray/session_latest/logs"
    )
    with pytest.raises(InputError, match=f"{says}, or elsewhere if RAY_TMPDIR=FOLDER is set$"):
        grpo_async.main()
    shutil.rmtree(folder, ignore_errors=True)


LOADED = """
import atexit, runpy, sys
heavy = {"ray", "vllm", "transformers"}
atexit.register(lambda: print("loaded:", *sorted(heavy & set(sys.modules))))
sys.argv = sys.argv[1:]
sys.path.insert(0, ".")
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.slow
@pytest.mark.parametrize(("name", "loaded"), [
    ("config: True for a count", ""),
    ("command: evaluation without a checkpoint", ""),
    ("model: an unknown tool parser", " transformers"),
    ("data: a temperature of its own", " transformers"),
])  # fmt: skip
def test_the_program_ends_within_seconds_of_its_start(name, loaded, tmp_path, tiny_model):
    """Imports included, of what has to be asked alone; Ray makes no folder of its own."""
    case = TABLE[name]
    home = Home(tmp_path, tiny_model)
    flags = case.spoil(home)
    (tmp_path / "ray").mkdir()
    env = os.environ | {"RAY_TMPDIR": str(tmp_path / "ray")}
    began = time.monotonic()
    before = os.times()
    program = [sys.executable, "-c", LOADED, "grpo_async.py"]
    done = ran(*program, *flags, env=env, seconds=600)
    after = os.times()
    seconds = after.children_user + after.children_system - before[2] - before[3]
    print(f"{name}: {time.monotonic() - began:.1f} s, {seconds:.1f} s of them on the processor")
    expected = rf"(run folder: \S+\n)?(note: .*\n)?loaded:{loaded}\n"
    assert done.returncode == 1 and re.fullmatch(expected, done.stdout), done
    assert re.fullmatch(f"error: .*{case.says}.*\n", done.stderr), done.stderr
    assert seconds < 30  # 4 to 5, most of it imports, where nobody else runs
    assert not list((tmp_path / "ray").iterdir()) and not home.run.exists()


@pytest.mark.slow
def test_ctrl_c_ends_the_start_in_one_line(tmp_path, tiny_model):
    """While Ray starts, of which nothing is needed here but that it takes long."""
    config = str(Home(tmp_path, tiny_model).lines(""))
    code = (
        "import sys, time, ray, grpo_async\n"
        "ray.init = lambda **options: time.sleep(60)\n"
        f"sys.argv = ['grpo_async.py', '--config', {config!r}]\n"
        "grpo_async.main()\n"
    )
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    listen = functools.partial(signal.signal, signal.SIGINT, signal.default_int_handler)
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, cwd=ROOT, preexec_fn=listen, **pipes) as program:
        try:
            assert any("starting Ray" in line for line in program.stdout)
            time.sleep(0.5)
            program.send_signal(signal.SIGINT)
            _, told = program.communicate(timeout=30)
        finally:
            program.kill()
    assert told == "interrupted; --resume auto continues from the last checkpoint\n"
    assert program.returncode == 1
