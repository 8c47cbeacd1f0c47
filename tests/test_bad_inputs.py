"""Wrong inputs by their place: each ends in one line before any actor, and nothing is lost."""

import dataclasses
import fcntl
import functools
import gzip
import json
import os
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import ray
from conftest import spelling_rows, write_rows

import grpo_async
from envs.rollout.rows import fingerprint, load_tokenizer
from runtime import checkpoints, cluster
from runtime.archive import write_groups
from runtime.placement import Node, plan
from settings.reader import InputError
from support.configs import changed
from support.samples import make_sample

ROOT = Path(__file__).parent.parent
ROWS = spelling_rows(8)
GOOD = json.dumps(ROWS[0])


class Started(Exception):
    """What stands for the first actor."""


@dataclass
class Home:
    """A folder with all that a run needs, for a case to spoil."""

    folder: Path

    @property
    def model(self) -> Path:
        """A random model of 0.2M parameters that reads 2,048 tokens."""
        return self.folder / "model"

    @property
    def run(self) -> Path:
        """Where the run would write."""
        return self.folder / "run"

    @property
    def train(self) -> Path:
        """Eight good rows."""
        return self.folder / "train.jsonl"

    def config(self, **fields) -> grpo_async.Config:
        """The configuration of the file, for what an earlier run would have left."""
        data = {"train": str(self.train)}
        base = {"run_dir": str(self.run), "model": str(self.model), "data": data}
        base |= {"steps": 3, "prompts_per_step": 2, "group_size": 2, "max_model_len": 128}
        return changed(grpo_async.Config(), **base | fields)

    def write(self, text: str) -> Path:
        """The config file: what a run needs, then a case's own lines."""
        path = self.folder / "mine.py"
        names = ("run_dir", "model", "steps", "prompts_per_step", "group_size")
        lines = [f"{name} = {getattr(self.config(), name)!r}\n" for name in names]
        lines += [f"data = {{'train': {str(self.train)!r}}}\n", "sampling = "]
        path.write_text("".join(lines) + "{'max_model_len': 128}\n" + text)
        return path

    def checkpoint(self, step: int, rows: list[dict] = ROWS, **fields) -> Path:
        """What a run leaves at a step, but for the shards' content."""
        folder = self.run / f"step_{step:06d}"
        aside = folder.with_suffix(".partial")
        (aside / "policy").mkdir(parents=True)
        (aside / "hf").mkdir()
        (aside / "hf/config.json").write_text("{}")
        (aside / "policy/__0_0.distcp").write_bytes(bytes(5000))
        numbered = [row | {"_line": i} for i, row in enumerate(rows, 1)]
        progress = {"next_slot": 2 * step, "next_prompt": 2 * step, "in_flight": {}}
        state = {"version": step, "progress": progress, "ready": [], "dropped": {}}
        state["prompt"] = fingerprint(numbered, 2 * step)
        state["config"] = dataclasses.asdict(self.config(**fields))
        (aside / "state.json").write_text(json.dumps(state))
        checkpoints.commit(str(aside), str(folder), checkpoints.checksums(str(aside)))
        return folder

    def samples(self, name: str = "other", groups: int = 2) -> Path:
        """A run folder with a step's samples; returns their file."""
        path = self.folder / name / "samples/step_000001.npz"
        made = [[make_sample(np.random.default_rng(i), 400)] for i in range(groups)]
        write_groups(str(path), [(i, 0, i + 1) for i in range(groups)], [], *made)
        return path

    def edit(self, name: str, **fields) -> None:
        """Changes fields of a JSON file of the model; ... deletes one."""
        path = self.model / name
        content = json.loads(path.read_text()) | fields
        path.write_text(json.dumps({k: v for k, v in content.items() if v is not ...}))

    def template(self, text: str) -> None:
        """Gives the model another chat template."""
        (self.model / "chat_template.jinja").write_text(text)


@dataclass(frozen=True)
class Case:
    """An input: lines of the config file, flags, or what `spoil` does; and what is said of it."""

    says: str
    config: str = ""
    flags: tuple[str, ...] = ()
    spoil: Callable[[Home], object] = lambda home: None
    env: dict[str, str] = field(default_factory=dict)


def flag(says: str, *flags: str, config: str = "") -> Case:
    return Case(says, config, flags)


def spoilt(says: str, spoil: Callable[[Home], object], *flags: str, config: str = "") -> Case:
    return Case(says, config, flags, spoil)


CONFIG = {
    "unknown name": Case(r"mine\.py:8: unknown field 'stepz'; did you mean steps\?", "stepz = 3"),
    "unknown leaf": Case(
        r"mine\.py:8: unknown field 'policy\.leraning_rate'", "policy = {'leraning_rate': 1}"
    ),
    "unknown leaf of a leaf": Case(
        r"unknown field 'advantage\.low_effort\.weigth'; did you mean advantage\.low_effort\.weigh",
        "advantage = {'low_effort': {'weigth': 1}}",
    ),
    "leaf as a name": Case(r"py:8: unknown field 'lr'; did you mean policy\.lr\?", "lr = 1e-4"),
    "text for a number": Case(r"mine\.py:8: steps = 'many': .*integer", "steps = 'many'"),
    "fraction for a count": Case(r"mine\.py:8: steps = 1\.5: .*integer", "steps = 1.5"),
    "nothing for a number": Case(r"py:8: policy\.lr = None: .*number", "policy = {'lr': None}"),
    "True for a count": Case(r"py:8: steps = True: expected a number", "steps = True"),
    "True in a group": Case(
        r"py:9: policy\.lr = False: expected a number",
        "policy = {\n    'lr': False,\n}".replace("'", '"'),
    ),
    "zero steps": Case(r"mine\.py:8: steps = 0: .*greater than 0", "steps = 0"),
    "negative lag": Case(r"mine\.py:8: max_lag = -1: .*greater than or equal", "max_lag = -1"),
    "not a number": Case(r"policy\.lr = nan: .*finite", "policy = {'lr': float('nan')}"),
    "infinity": Case(r"policy\.lr = inf: .*finite", "policy = {'lr': float('inf')}"),
    "list for a group": Case(r"mine\.py:8: policy = \[1\]: ", "policy = [1]"),
    "number for a group": Case(r"mine\.py:8: policy = 5: ", "policy = 5"),
    "dictionary for a number": Case(r"py:8: steps = \{'a': 1\}: .*integer", "steps = {'a': 1}"),
    "choice": Case(r"policy\.kind = 'fsdp2': .*'fsdp' or 'megatron'", "policy = {'kind': 'fsdp2'}"),
    "syntax": Case(r"mine\.py:8: SyntaxError: ", "steps = = 3"),
    "exception": Case(r"mine\.py:9: ZeroDivisionError: ", "steps = 3\nsteps = 3 / 0"),
    "unknown variable": Case(r"mine\.py:8: NameError: .*'policy'", "policy.lr = 1"),
    "sys.exit()": Case(r"mine\.py:8: SystemExit:", "import sys; sys.exit()"),
    "sys.exit(0)": Case(r"mine\.py:8: SystemExit: 0", "raise SystemExit(0)"),
    "import of nothing": Case(r"mine\.py:8: ModuleNotFoundError: .*nowhere", "import nowhere"),
    "inherits nothing": Case(
        r"mine\.py:8: ModuleNotFoundError: .*tyny", "from configs.tyny import *"
    ),
    "command in a file": Case(r"py:8: command: expected on the command", "command = {'resume': 1}"),
    "word of the command": Case(
        r"'resume'; --resume is a word of the command line", "resume = 'auto'"
    ),
    "not UTF-8": spoilt(
        r"mine\.py: .*codec can't decode",
        lambda home: home.write("").write_bytes(b"steps = '\xff'"),
        config="same",
    ),
    "NUL in the file": spoilt(
        r"mine\.py: .*null byte",
        lambda home: home.write("").write_bytes(b"steps = 1\0"),
        config="same",
    ),
    "pair of one": Case(r"advantage\.clip.*: Field required", "advantage = {'clip': (1.0,)}"),
    "clip upside down": Case(r"advantage\.clip = \(1", "advantage = {'clip': (1.0, 2.0)}"),
    "bounds upside down": Case(r"correction\.low = 9", "correction = {'low': 9.0, 'high': 1.0}"),
    "parts of a batch": Case(
        r"prompts_per_step = 2 is no multiple of loss\.updates", "loss = {'updates_per_batch': 3}"
    ),
    "group of one": Case(r"group_size = 1: expected 2 or more", "group_size = 1"),
    "KL that skips": Case(r"loss\.kl_coef = 0\.1 needs loss\.skip", "loss = {'kl_coef': 0.1}"),
    "layout of fsdp": Case(r"policy: tp \* pp \* cp = 2 .*'megatron'", "policy = {'tp': 2}"),
    "layout of megatron": Case(
        r"policy: ranks = 3 is no multiple of",
        "policy = {'kind': 'megatron', 'ranks': 3, 'tp': 2}",
    ),
    "rows that cp cannot cut": Case(
        r"policy: row_tokens = 65535 is no multiple of .*try 65532",
        "policy = {'kind': 'megatron', 'ranks': 2, 'cp': 2, 'row_tokens': 65535}",
    ),
    "a mask of more than 2^32 elements": Case(
        r"attention = 'sdpa' and policy\.row_tokens = 65537: above 65536 a GPU .* expected 'auto'",
        "policy = {'attention': 'sdpa', 'row_tokens': 65537}",
    ),
    "a sample with such a mask": Case(
        r"attention = 'sdpa' and sampling\.max_model_len = 131072: above",
        "policy = {'attention': 'sdpa'}\nsampling = {'max_model_len': 131072}",
    ),
    "engine argument of the run": Case(
        r"engine\.args sets 'seed', which the run itself sets", "engine = {'args': {'seed': 1}}"
    ),
    "engine argument unknown": Case(
        r"engine\.args sets 'max_num_sequences', .*did you mean 'max_num_",
        "engine = {'args': {'max_num_sequences': 4}}",
    ),
    "Megatron's argument of the run": Case(
        r"policy\.megatron\.model sets 'bf16', which the run itself sets",
        "policy = {'kind': 'megatron', 'megatron': {'model': {'bf16': True}}}",
    ),
    "Megatron's argument unknown": Case(
        r"policy\.megatron\.ddp sets 'grad_reduce_fp32', .* have; did you mean 'grad_reduce_in_",
        "policy = {'kind': 'megatron', 'megatron': {'ddp': {'grad_reduce_fp32': True}}}",
    ),
    "Megatron's dictionary unknown": Case(
        r"unknown field 'policy\.megatron\.adam'",
        "policy = {'kind': 'megatron', 'megatron': {'adam': {'lr': 1}}}",
    ),
    "Megatron's arguments for fsdp": Case(
        r"policy: megatron needs policy\.kind = 'megatron'",
        "policy = {'megatron': {'ddp': {'grad_reduce_in_fp32': False}}}",
    ),
    "more memory than there is": Case(
        r"gpu_memory_utilization = 85: expected above 0, at most 1",
        "engine = {'args': {'gpu_memory_utilization': 85}}",
    ),
    "no sequences": Case(r"max_num_seqs = 0: expected", "engine = {'args': {'max_num_seqs': 0}}"),
    "no engines": Case(r"py:8: engine\.count = 0: .*greater", "engine = {'count': 0}"),
    "share above 1": Case(r"gpu_share = 2: .*less than or equal to 1", "gpu_share = 2"),
    "share of parallel engines": Case(
        r"gpu_share = 0\.5: engine\.tensor_parallel = 2 needs 1",
        "gpu_share = 0.5\nengine = {'tensor_parallel': 2}",
    ),
    "validation top_k": Case(
        r"top_k = 2\.5, expected", "sampling = {'validation': {'top_k': 2.5}}"
    ),
    "validation top_p": Case(r"top_p = 2, expected", "sampling = {'validation': {'top_p': 2}}"),
    "validation min_p": Case(r"min_p = -1, expected", "sampling = {'validation': {'min_p': -1}}"),
    "validation temperature": Case(
        r"sets temperature = -1, expected 0 or more",
        "sampling = {'validation': {'temperature': -1}}",
    ),
    "validation unknown": Case(
        r"sampling\.validation\.beam", "sampling = {'validation': {'beam': 2}}"
    ),
    "temperature 0": Case(r"sampling\.temperature = 0: ", "sampling = {'temperature': 0}"),
    "validation never": Case(
        r"val_period = 0 and data\.val = 'v': expected both or neither", "data = {'val': 'v'}"
    ),
    "validation of nothing": Case(r"val_period = 5 and data\.val = '': ", "val_period = 5"),
    "seed below 0": Case(r"mine\.py:8: seed = -1: .*greater than or equal", "seed = -1"),
    "seed of 2^70": Case(r"py:8: seed = 1180591620717411303424: .*less", "seed = 2**70"),
    "seed of 2^40": Case(r"py:8: seed = 1099511627776: .*less", "seed = 2**40"),
    "timeout of a millisecond": Case(
        r"timeouts\.rollout = 0\.001: expected 1 s or more", "timeouts = {'rollout': 0.001}"
    ),
    "timeout of 0": Case(r"timeouts\.sync = 0: .*greater than 0", "timeouts = {'sync': 0}"),
    "no training data": Case(r"data\.train = '': expected a JSONL", "data = {'train': ''}"),
    "no run_dir": Case(r"run_dir = '': expected a folder", "run_dir = ''"),
    "no model": Case(r"model = '': expected a folder", "model = ''"),
    "NUL in run_dir": Case(r"run_dir = 'a\\x00b': expected text without", "run_dir = 'a\\0b'"),
    "NUL in model": Case(r"model = 'a\\x00b': expected text without", "model = 'a\\0b'"),
    "NUL in data": Case(r"data\.train = '\\x00': expected text", "data = {'train': '\\0'}"),
    "wandb that is not there": Case(r"wandb = True: it is not installed; pip", "wandb = True"),
}
FLAGS = {
    "unknown flag": flag(r"Perhaps you meant: --steps", "--stepz", "3"),
    "flag of a group alone": flag(r"--lr.*--policy\.lr", "--lr", "3"),
    "text for a number": flag(r"--steps: invalid literal for int\(\)", "--steps", "many"),
    "flag without a value": flag(r"--steps", "--steps"),
    "choice": flag(r"'tokn' for argument '--correction\.level'", "--correction.level", "tokn"),
    "word too many": flag(r"[Uu]nrecognized.*many", "many"),
    "zero": flag(r"^error: steps = 0: Input should be greater than 0$", "--steps", "0"),
    "negative in a group": flag(r"^error: policy\.lr = -1\.0: .*greater", "--policy.lr", "-1"),
    "negative, deeper": flag(
        r"^error: advantage\.low_effort\.weight = -1\.0: ", "--advantage.low_effort.weight=-1"
    ),
    "not a number": flag(r"^error: policy\.lr = nan: .*finite", "--policy.lr", "nan"),
    "negative export": flag(r"^error: export = -1: .*greater", "--export", "-1"),
    "contradiction": flag(
        r"^error: prompts_per_step = 2 is no multiple of", "--loss.updates-per-batch", "3"
    ),
    "layout": flag(
        r"^error: policy: ranks = 1 is no multiple of",
        "--policy.tp",
        "2",
        config="policy = {'kind': 'megatron'}",
    ),
    "validation taken away": flag(
        r"^error: val_period = 40 and data\.val = '': expected both or neither",
        *("--data.val", ""),
        config="val_period = 40\ndata = {'val': 'v'}",
    ),
    "seed": flag(r"^error: seed = -5: .*greater", "--seed", "-5"),
    "timeout": flag(r"^error: timeouts\.start = 0\.5: expected 1 s", "--timeouts.start", "0.5"),
    "twice": flag(r"^error: --steps is given 2 times", "--steps", "3", "--steps", "4"),
    "twice with =": flag(r"^error: --seed is given 2 times", "--seed=3", "--seed", "4"),
    "twice by another name": flag(
        r"^error: --run-dir is given 2 times", "--run_dir", "a", "--run-dir", "b"
    ),
    "config twice": flag(r"^error: --config is given 2 times", "--config", "configs/tiny.py"),
    "broken JSON": flag(r"--engine\.args", "--engine.args", "{max_num_seqs: 4}"),
    "JSON of a list": flag(r"engine\.args = \[1\]: .*dictionary", "--engine.args", "[1]"),
    "no run_dir": flag(r"^error: run_dir = '': expected a folder$", "--run_dir", ""),
    "no training data": flag(r"^error: data\.train = '': expected", "--data.train", ""),
}


def take(home: Home) -> object:
    """Lives in the run folder, as another run would, with files of its own."""
    home.run.mkdir()
    (home.run / "quarantine.jsonl").write_text('{"file": "theirs", "line": 1}\n')
    (home.run / "config.json").write_text("{}")
    home.train.write_text(f"{GOOD}\n{{\n")
    lock = open(home.run / "lock", "a+")  # noqa: SIM115
    fcntl.flock(lock, fcntl.LOCK_EX)
    lock.write("process 1 on elsewhere")
    lock.flush()
    return lock


FOLDERS = {
    "under a file": spoilt(
        r"run_dir = .*: \S+/file is a file, expected a folder",
        lambda home: (home.folder / "file").write_text(""),
        *("--run_dir", "HOME/file/run"),
    ),
    "is a file": spoilt(
        r"run_dir = .*: \S+/file is a file, expected a folder",
        lambda home: (home.folder / "file").write_text("mine"),
        *("--run_dir", "HOME/file"),
    ),
    "where nobody can write": flag(
        r"run_dir = '/proc/run': (/proc cannot be written to, )?expected a folder",
        *("--run_dir", "/proc/run"),
    ),
    "too long a name": flag(r"run_dir = .*: File name too long", "--run_dir", f"HOME/{'x' * 300}"),
    "in use": spoilt(
        r"run_dir = .* is in use by process 1 on elsewhere",
        take,
        config="data['max_bad_rows'] = 9",
    ),
    "in use, to go on": spoilt(
        r"run_dir = .* is in use by process 1",
        take,
        *("--resume", "auto"),
        config="data['max_bad_rows'] = 9",
    ),
    "holds a run": spoilt(
        r"run_dir = .* holds a run already: .*--resume auto",
        lambda home: [home.run.mkdir(), (home.run / "metrics.jsonl").write_text('{"step": 1}\n')],
    ),
    "holds a checkpoint": spoilt(
        r"run_dir = .* holds a run already: .*--resume auto", lambda home: home.checkpoint(1)
    ),
    "to evaluate beside a run": spoilt(
        r"holds a run already",
        lambda home: home.checkpoint(1),
        *("--eval_only", "--data.val", "HOME/train.jsonl"),
    ),
}


def damage(path: Path, cut: bool = False) -> None:
    """Half of a file, or the whole with one bit flipped in the middle."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content[: len(content) // 2] if cut else content)


def finished(home: Home, evaluated: bool = True) -> None:
    """A run that is at its end."""
    home.checkpoint(3)
    line = {"step": 3, "validation_reward": 0.5}
    (home.run / "metrics.jsonl").write_text(json.dumps(line) + "\n" if evaluated else "")


AUTO = ("--resume", "auto")
EVAL = ("--eval_only", "--data.val", "HOME/train.jsonl")
COMMANDS = {
    "two modes": flag(r"eval_only and export exclude each", "--eval_only", "--export", "3"),
    "replay of rollouts": flag(r"exclude each other", "--rollout_only", "--replay", "x"),
    "rollouts that go on": flag(r"resume excludes rollout_only", *AUTO, "--rollout_only"),
    "export that goes on": flag(r"resume excludes export", *AUTO, "--export", "3"),
    "go on in a new folder": flag(
        r"resume = 'auto': run_dir has \{time\}", *AUTO, "--run_dir", "runs/{time}"
    ),
    "export of a new folder": flag(
        r"export: run_dir has \{time\}", "--export", "3", "--run_dir", "runs/{time}"
    ),
    "evaluation of nothing": flag(r"eval_only = True and data\.val = '': no rows", "--eval_only"),
    "export of nothing": flag(
        r"export = 99: run_dir = .* has checkpoints of no steps", "--export", "99"
    ),
    "export of another step": spoilt(
        r"export = 99: .* has checkpoints of \[1, 2\], expected one of them$",
        lambda home: [home.checkpoint(1), home.checkpoint(2)],
        *("--export", "99"),
    ),
    "export of one that is pruned": spoilt(
        r"export = 1: .* of \[2, 3\], .*its model is in .*step_000001/hf",
        lambda home: (
            [home.checkpoint(s) for s in (1, 2, 3)] and checkpoints.prune(str(home.run), 2)
        ),
        *("--export", "1"),
    ),
    "export of a damaged one": spoilt(
        r"no checkpoint is whole: .*__0_0\.distcp: 2500 bytes, expected 5000",
        lambda home: damage(home.checkpoint(1) / "policy/__0_0.distcp", cut=True),
        *("--export", "1"),
    ),
    "resume of nothing": flag(
        r"resume = .*nowhere': expected auto or a folder with complete\.json",
        *("--resume", "HOME/nowhere"),
    ),
    "resume of too long a name": flag(r"resume = .*: expected auto", "--resume", "x" * 300),
    "resume without a marker": spoilt(
        r"resume = .*step_000001': expected auto or a folder with complete\.json",
        lambda home: (home.checkpoint(1) / "complete.json").unlink(),
        *("--resume", "HOME/run/step_000001"),
    ),
    "resume of a broken marker": spoilt(
        r"no checkpoint is whole: .*complete\.json: ",
        lambda home: (home.checkpoint(1) / "complete.json").write_text("{"),
        *("--resume", "HOME/run/step_000001"),
    ),
    "resume of a cut shard": spoilt(
        r"no checkpoint is whole: .*distcp: 2500 bytes, expected 5000",
        lambda home: damage(home.checkpoint(1) / "policy/__0_0.distcp", cut=True),
        *AUTO,
    ),
    "resume of a flipped bit": spoilt(
        r"no checkpoint is whole: .*its CRC-32 is not",
        lambda home: damage(home.checkpoint(1) / "policy/__0_0.distcp"),
        *AUTO,
    ),
    "resume of a damaged state": spoilt(
        r"no checkpoint is whole: .*state\.json: its CRC-32",
        lambda home: damage(home.checkpoint(1) / "state.json"),
        *AUTO,
    ),
    "resume of all damaged": spoilt(
        r"no checkpoint is whole: .*step_000002.*; .*step_000001",
        lambda home: [damage(home.checkpoint(s) / "state.json", cut=True) for s in (1, 2)],
        *AUTO,
    ),
    "resume with other groups": spoilt(
        r"saved with group_size = 4, not 2", lambda home: home.checkpoint(1, group_size=4), *AUTO
    ),
    "resume with other prompts": spoilt(
        r"saved with prompts_per_step = 4, not 2",
        lambda home: home.checkpoint(1, prompts_per_step=4),
        *AUTO,
    ),
    "resume with other data": spoilt(
        r"saved with data\.train = 'other\.jsonl', not ",
        lambda home: home.checkpoint(1, data={"train": "other.jsonl"}),
        *AUTO,
    ),
    "resume with less lag": spoilt(
        r"saved with max_lag = 3: not less", lambda home: home.checkpoint(1, max_lag=3), *AUTO
    ),
    "resume with shifted rows": spoilt(
        r"prompt 2 is another one than .*were rows added or removed",
        lambda home: home.checkpoint(1, rows=ROWS[::-1]),
        *AUTO,
    ),
    "resume of another run's folder": spoilt(
        r"saved with group_size = 4, not 2",
        lambda home: home.checkpoint(1, group_size=4).rename(home.folder / "step_000001"),
        *("--resume", "HOME/step_000001"),
    ),
    "evaluation without a checkpoint": flag(
        r"run_dir = .* holds no checkpoint, expected one", *EVAL, *AUTO
    ),
    "evaluation of a damaged one": spoilt(
        r"no checkpoint is whole: .*state\.json",
        lambda home: damage(home.checkpoint(1) / "state.json"),
        *(*EVAL, *AUTO),
    ),
    "a run that is finished": spoilt(
        r"^nothing to do: step 3 of steps = 3 is trained; raise steps to go on$", finished, *AUTO
    ),
    "a run beyond its end": spoilt(
        r"^nothing to do: step 3 of steps = 2 is trained", finished, *AUTO, "--steps", "2"
    ),
    "replay of nothing": flag(
        r"replay = .*nowhere': expected a folder with samples/step_\*\.npz",
        *("--replay", "HOME/nowhere"),
    ),
    "replay without samples": flag(r"replay = .*: expected a folder with", "--replay", "HOME"),
    "replay of a cut file": spoilt(
        r"step_000001\.npz: expected groups of samples: ",
        lambda home: damage(home.samples(), cut=True),
        *("--replay", "HOME/other"),
    ),
    "replay of a flipped bit": spoilt(
        r"step_000001\.npz: expected groups of samples: .*CRC-32",
        lambda home: damage(home.samples()),
        *("--replay", "HOME/other"),
    ),
    "replay of text": spoilt(
        r"step_000001\.npz: expected groups of samples: ",
        lambda home: home.samples().write_text("PK?"),
        *("--replay", "HOME/other"),
    ),
    "replay of other columns": spoilt(
        r"step_000001\.npz: expected groups of samples: .*",
        lambda home: np.savez(home.samples(), slot=np.zeros(2)),
        *("--replay", "HOME/other"),
    ),
    "replay of smaller steps": spoilt(
        r"step_000001\.npz holds 1 groups, expected prompts_per_step = 2",
        lambda home: home.samples(groups=1),
        *("--replay", "HOME/other"),
    ),
    "replay into its own folder": spoilt(
        r"replay = run_dir = .*: expected another run_dir",
        lambda home: home.samples("run"),
        *("--replay", "HOME/run"),
    ),
}


def tensors(home: Home, change: Callable[[dict], object]) -> None:
    """Writes the model's tensors again, changed."""
    from safetensors.torch import load_file, save_file

    path = home.model / "model.safetensors"
    state = load_file(path)
    change(state)
    save_file(state, path, metadata={"format": "pt"})


def index(home: Home, content: object) -> None:
    """Puts an index in place of the one file of weights."""
    (home.model / "model.safetensors").rename(home.model / "part-1.safetensors")
    (home.model / "model.safetensors.index.json").write_text(json.dumps(content))


def weights(content: bytes) -> Callable[[Home], object]:
    return lambda home: (home.model / "model.safetensors").write_bytes(content)


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
HEADER = b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}'
LAYER = "model.layers.1.mlp.up_proj.weight"
SHARDS = {"weight_map": {LAYER: "part-1.safetensors", "b": "part-2.safetensors"}}
CAPITALS = "{% for m in messages %}{{ raise_exception('no ' ~ m.role) if m.role == 'system' }}"
MODELS = {
    "missing": spoilt(
        r"model = '.*/model': expected a folder that holds config\.json",
        lambda home: shutil.rmtree(home.model),
    ),
    "a file": spoilt(
        r"model = '.*/file': expected a folder that holds config\.json",
        lambda home: (home.folder / "file").write_text(""),
        *("--model", "HOME/file"),
    ),
    "too long a name": flag(r"model = '.*/x+': expected a folder", "--model", "x" * 300),
    "no config.json": spoilt(
        r"expected a folder that holds config\.json",
        lambda home: (home.model / "config.json").unlink(),
    ),
    "empty config.json": spoilt(
        r"model = '.*': config\.json describes no model: ",
        lambda home: (home.model / "config.json").write_text("{}"),
    ),
    "broken config.json": spoilt(
        r"model = '.*': config\.json describes no model: ",
        lambda home: (home.model / "config.json").write_text("{"),
    ),
    "a list as config.json": spoilt(
        r"model = '.*': config\.json describes no model: ",
        lambda home: (home.model / "config.json").write_text("[]"),
    ),
    "unknown model_type": spoilt(
        r"config\.json describes no model: .*granite9",
        lambda home: home.edit("config.json", model_type="granite9"),
    ),
    "no language model": spoilt(
        r"config\.json describes no model: ",
        lambda home: (home.model / "config.json").write_text('{"model_type": "t5"}'),
    ),
    "no weights": spoilt(
        r"expected model\.safetensors, or an index",
        lambda home: (home.model / "model.safetensors").unlink(),
    ),
    "empty weights": spoilt(r"model\.safetensors: 0 bytes are no safetensors", weights(b"")),
    "truncated weights": spoilt(
        r"model\.safetensors: [\d,]+ bytes, expected [\d,]+: download",
        lambda home: damage(home.model / "model.safetensors", cut=True),
    ),
    "truncated header": spoilt(
        r"model\.safetensors: 40 bytes are no safetensors file",
        weights(struct.pack("<Q", 200) + HEADER[:32]),
    ),
    "longer weights": spoilt(
        r"model\.safetensors: 80 bytes, expected 77",
        weights(struct.pack("<Q", len(HEADER)) + HEADER + bytes(11)),
    ),
    "pointer of LFS": spoilt(r"model\.safetensors: .*git lfs pull", weights(POINTER)),
    "garbage as weights": spoilt(
        r"model\.safetensors: 3,000 bytes are no safetensors", weights(b"\xff\x17\x03" * 1000)
    ),
    "weights of a list": spoilt(
        r"model\.safetensors: 10 bytes are no safetensors", weights(struct.pack("<Q", 2) + b"[]")
    ),
    "index without a shard": spoilt(
        r"index\.json names part-2\.safetensors, which is not there",
        lambda home: index(home, SHARDS),
    ),
    "index of nothing": spoilt(r"index\.json: expected an index", lambda home: index(home, {})),
    "index of a list": spoilt(r"index\.json: expected an index", lambda home: index(home, [])),
    "another shape": spoilt(
        rf"{LAYER} is \[128, 32\], \[128, 64\] expected by Qwen3ForCausalLM",
        lambda home: tensors(home, lambda s: s.update({LAYER: s[LAYER][:, :32].contiguous()})),
    ),
    "other sizes in config.json": spoilt(
        r"is \[64, 128\], \[64, 96\] expected",
        lambda home: home.edit("config.json", intermediate_size=96),
    ),
    "a tensor less": spoilt(
        rf"no tensor {LAYER}, expected by Qwen3ForCausalLM",
        lambda home: tensors(home, lambda state: state.pop(LAYER)),
    ),
    "a layer more in config.json": spoilt(
        r"no tensor model\.layers\.2\.",
        lambda home: home.edit("config.json", num_hidden_layers=3, layer_types=...),
    ),
    "no tokenizer_config.json": spoilt(
        r"expected a folder that holds tokenizer_config\.json",
        lambda home: (home.model / "tokenizer_config.json").unlink(),
    ),
    "no tokenizer": spoilt(
        r"model = .*: its tokenizer ", lambda home: (home.model / "tokenizer.json").unlink()
    ),
    "corrupt tokenizer": spoilt(
        r"model = .*: its tokenizer cannot be read: ",
        lambda home: damage(home.model / "tokenizer.json", cut=True),
    ),
    "empty tokenizer": spoilt(
        r"model = .*: its tokenizer cannot be read: ",
        lambda home: (home.model / "tokenizer.json").write_text("{}"),
    ),
    "corrupt tokenizer_config.json": spoilt(
        r"model = .*: its tokenizer cannot be read: ",
        lambda home: (home.model / "tokenizer_config.json").write_text("{"),
    ),
    "no template": spoilt(
        r"model = .*: its tokenizer has no chat_template, expected one",
        lambda home: (home.model / "chat_template.jinja").unlink(),
    ),
    "empty template": spoilt(r"model = .*: its chat template ", lambda home: home.template("")),
    "template of broken syntax": spoilt(
        r"model = .*: its chat template refuses a question.*Syntax",
        lambda home: home.template("{% for m in messages %}{{ m.content }"),
    ),
    "template of an unknown filter": spoilt(
        r"model = .*: its chat template refuses a question",
        lambda home: home.template("{% for m in messages %}{{ m.content | nofilter }}{% endfor %}"),
    ),
    "template that ignores the messages": spoilt(
        r"model = .*: its chat template ignores the messages: '<user>hello<bot>'",
        lambda home: home.template("<user>hello<bot>"),
    ),
    "template that reads other fields": spoilt(
        r"model = .*: its chat template ignores the messages",
        lambda home: home.template("{% for m in messages %}<user>{{ m.text }}{% endfor %}"),
    ),
    "template that raises": spoilt(
        r"model = .*: its chat template refuses a question.*: not today",
        lambda home: home.template("{{ raise_exception('not today') }}"),
    ),
    "variables that clash": Case(
        r"sampling\.chat_template_kwargs = \{.*'tools'",
        "sampling['chat_template_kwargs'] = {'tools': []}",
    ),
    "template that refuses the first row": spoilt(
        r"train\.jsonl:1: .*refused by the chat template: no system",
        lambda home: [
            home.template(CAPITALS + "<user>{{ m.content }}{% endfor %}<bot>"),
            write_rows(home.train, [asking({"role": "system", "content": "x"})]),
        ],
    ),
    "ids beyond the embedding": spoilt(
        r"its tokenizer makes id 36, its embedding has 30",
        lambda home: [
            home.edit("config.json", vocab_size=30),
            tensors(home, lambda s: s.update({k: v[:30] for k, v in s.items() if "embed" in k})),
        ],
    ),
    "attention": flag(
        r"policy\.attention = 'bogus': expected one of auto, eager, .*sdpa.*varlen",
        *("--policy.attention", "bogus"),
    ),
    "longer than the model": Case(
        r"sampling\.max_model_len = 2049: .*max_position_embeddings = 2048",
        "sampling['max_model_len'] = 2049",
    ),
    "heads over GPUs": flag(
        r"engine\.tensor_parallel = 3 must divide num_attention_heads = 2",
        *("--engine.tensor_parallel", "3"),
    ),
    "a family of Megatron": spoilt(
        r"policy\.kind = 'megatron' knows .*, not gpt_neox",
        lambda home: gpt_neox(home),
        *("--policy.kind", "megatron"),
    ),
}


def gpt_neox(home: Home) -> None:
    """Another architecture in the same folder."""
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    small = GPTNeoXConfig(vocab_size=101, intermediate_size=32, **sizes)
    GPTNeoXForCausalLM(small).save_pretrained(home.model)


def asking(*messages: dict, **fields) -> dict:
    """A row of these messages."""
    return ROWS[0] | {"responses_create_params": {"input": list(messages)}} | fields


def data(content: str | bytes) -> Callable[[Home], object]:
    return lambda home: home.train.write_bytes(
        content if isinstance(content, bytes) else content.encode()
    )


def rows(*every: dict) -> Callable[[Home], object]:
    return lambda home: write_rows(home.train, list(every))


def replaced(make: Callable[[Path], object]) -> Callable[[Home], object]:
    def spoil(home: Home) -> None:
        home.train.unlink()
        make(home.train)

    return spoil


LONG = asking({"role": "user", "content": "a" * 200})
HUGE = asking({"role": "user", "content": "a" * 9000})
DATA = {
    "missing": spoilt(r"train\.jsonl: expected a JSONL file: No such", replaced(lambda path: None)),
    "a folder": spoilt(r"train\.jsonl: expected a JSONL file", replaced(Path.mkdir)),
    "a pipe": spoilt(r"train\.jsonl: expected a JSONL file, not", replaced(os.mkfifo)),
    "a device": flag(r"/dev/zero: expected a JSONL file, not", "--data.train", "/dev/zero"),
    "too long a name": flag(r": File name too long", "--data.train", "x" * 300),
    "empty": spoilt(r"train\.jsonl: holds no good rows", data("")),
    "blank": spoilt(r"train\.jsonl: holds no good rows", data("\n \n")),
    "binary": spoilt(r"train\.jsonl:1: expected UTF-8", data(bytes(range(128, 256)))),
    "compressed": spoilt(r"train\.jsonl:1: expected UTF-8", data(gzip.compress(GOOD.encode()))),
    "parquet": spoilt(r"train\.jsonl:1: expected ", data(b"PAR1\x15\x04\x15\x80\x00")),
    "no JSON": spoilt(r"train\.jsonl:2: expected JSON: ", data(f"{GOOD}\n{{'a': 1}}\n")),
    "half a line": spoilt(r"train\.jsonl:2: expected JSON: ", data(f"{GOOD}\n{GOOD[:50]}")),
    "one array": spoilt(r"train\.jsonl:1: expected JSON: ", data("[\n" + GOOD + "\n]")),
    "a list": spoilt(r"train\.jsonl:1: responses_create_params\.input is missing", data("[1]\n")),
    "another format": spoilt(
        r"train\.jsonl:1: .*docs/own_data\.md shows how",
        data('{"question": "1 + 1?", "answer": "2"}\n'),
    ),
    "NaN": spoilt(r"train\.jsonl:1: expected JSON: 'NaN' is not", data(GOOD[:-1] + ', "x": NaN}')),
    "a key twice": spoilt(r"the key 'answer' appears twice", data(GOOD[:-1] + ', "answer": "x"}')),
    "a byte order mark": spoilt(r"train\.jsonl:1: expected JSON: .*BOM", data("\ufeff" + GOOD)),
    "half a pair": spoilt(r"train\.jsonl:1: .*half a pair", data(GOOD[:-1] + ', "x": "\\ud800"}')),
    "deep": spoilt(r"train\.jsonl:1: expected JSON: .*recursion", data("[" * 99_999)),
    "no messages": spoilt(r"input is \[\], expected at least one message", rows(asking())),
    "number for messages": spoilt(
        r"responses_create_params\.input is 7, expected a list",
        rows(ROWS[0] | {"responses_create_params": {"input": 7}}),
    ),
    "a role": spoilt(
        r"input\[0\]\.role is 'human', expected one of", rows(asking({"role": "human"}))
    ),
    "no content": spoilt(
        r"input\[0\]\.content is missing or null, expected text", rows(asking({"role": "user"}))
    ),
    "a part without text": spoilt(
        r"content\[0\]\.text is missing",
        rows(asking({"role": "user", "content": [{"type": "input_image"}]})),
    ),
    "tools": spoilt(
        r"responses_create_params\.tools is 5, expected a list",
        rows(ROWS[0] | {"responses_create_params": {"input": "hi", "tools": 5}}),
    ),
    "unknown agent": spoilt(
        r"agent_ref\.name is 'maths', expected one of \d+ agents .*such as math, ",
        rows(ROWS[0] | {"agent_ref": {"name": "maths"}}),
    ),
    "no agent": spoilt(
        r"agent_ref\.name is missing", rows({k: v for k, v in ROWS[0].items() if k != "agent_ref"})
    ),
    "what its environment refuses": spoilt(
        r"train\.jsonl:2: answer is 5, expected", rows(ROWS[0], ROWS[0] | {"answer": 5})
    ),
    "too long for the model": spoilt(
        r"train\.jsonl:2: .* is 202 tokens long, expected less than .*max_model_len = 128",
        rows(ROWS[0], LONG),
    ),
    "far too long": spoilt(r"train\.jsonl:1: .* is 90\d\d characters long", rows(HUGE)),
    "more bad rows than allowed": spoilt(
        r"train\.jsonl:2: .* \(2 bad rows: lines 2, 3\), more than data\.max_bad_rows = 1",
        data(f"{GOOD}\n{{\n{{\n"),
        *("--data.max_bad_rows", "1"),
    ),
    "bad rows alone": spoilt(
        r"train\.jsonl: holds no good rows, .*lines 1, 2",
        data("{\n{\n"),
        *("--data.max_bad_rows", "9"),
    ),
    "validation": spoilt(
        r"val\.jsonl:1: expected JSON",
        lambda home: (home.folder / "val.jsonl").write_text("{"),
        *("--data.val", "HOME/val.jsonl", "--val_period", "5"),
    ),
    "validation missing": flag(
        r"val\.jsonl: expected a JSONL file: No such",
        *("--data.val", "HOME/val.jsonl", "--val_period", "5"),
    ),
}
TABLE = {
    f"{place}: {name}": case
    for place, cases in {
        "config": CONFIG,
        "flag": FLAGS,
        "run_dir": FOLDERS,
        "command": COMMANDS,
        "model": MODELS,
        "data": DATA,
    }.items()
    for name, case in cases.items()
}


def make_home(folder: Path, model: str) -> Home:
    """All that a run needs, in a folder."""
    shutil.copytree(model, folder / "model")
    home = Home(folder)
    write_rows(home.train, ROWS)
    return home


def run(home: Home, case: Case, monkeypatch) -> object:
    """Spoils what a run needs, and calls `main` with the case's flags; returns what it leaves."""
    left = case.spoil(home)
    config = home.folder / "mine.py" if case.config == "same" else home.write(f"{case.config}\n")
    flags = [word.replace("HOME", str(home.folder)) for word in case.flags]
    monkeypatch.setattr(sys, "argv", ["grpo_async.py", "--config", str(config), *flags])
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(cluster, "connect", started)
    load_tokenizer.cache_clear()
    return left


def started(*args, **options) -> None:
    raise Started


CONNECT = cluster.connect


def contents(folder: Path) -> dict[str, bytes]:
    """The files of a folder, but for those that locks and bad rows are written to."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path): path.read_bytes() for path in files if path.name != "lock"}


def unboxed(text: str) -> str:
    """tyro's output without colours, frames and line breaks."""
    return " ".join(re.sub(r"\x1b\[[0-9;]*m|[─-╿]", " ", text).split())


@pytest.mark.parametrize("name", TABLE)
def test_a_wrong_input_ends_in_one_line_before_any_actor(
    name, tmp_path, tiny_model, monkeypatch, capfd
):
    """Within 5 s, and nothing of the user's is another than before."""
    case = TABLE[name]
    home = make_home(tmp_path, tiny_model)
    left = run(home, case, monkeypatch)
    before = contents(tmp_path)
    capfd.readouterr()
    began = time.perf_counter()
    with pytest.raises(SystemExit) as stop:
        grpo_async.main()
    seconds = time.perf_counter() - began
    told = capfd.readouterr()
    if stop.value.code == 2:  # what tyro says of flags
        text = unboxed(told.err)
    else:
        text = stop.value.code or told.out.splitlines()[-1]
        assert "\n" not in text and told.err == "" and text.startswith(("error: ", "nothing to"))
    assert re.search(case.says, text), text
    assert seconds < 5 and contents(tmp_path) == before and not ray.is_initialized()
    del left


@pytest.mark.parametrize("flags", [(), EVAL, ("--rollout_only",), AUTO])
def test_the_same_inputs_unspoilt_start_a_run(flags, tmp_path, tiny_model, monkeypatch):
    home = make_home(tmp_path, tiny_model)
    run(home, Case("", "", flags), monkeypatch)
    with pytest.raises(Started):
        grpo_async.main()


@pytest.mark.parametrize(
    ("nodes", "flags", "says"),
    [
        ([1], ["--policy.ranks", "2"], r"policy\.ranks = 2, .* need 3 GPUs, the cluster has 1: lo"),
        ([8, 8], ["--engine.count", "16"], r"engine\.count = 16, .* need 17 GPUs, .* has 16"),
        ([1], ["--gpu_share", "0.6"], r"gpu_share = 0\.6 need 2 GPUs, the cluster has 1"),
        (
            [1],
            ["--gpu_share", "0.5", "--policy.ranks", "2"],
            r"policy\.ranks = 2, .* need 2 GPUs, .* has 1 \(no two trainer ranks share one\)",
        ),
        (
            [4, 4],
            ["--engine.tensor_parallel", "2", "--engine.count", "4"],
            r"engine\.count = 4, engine\.tensor_parallel = 2 .* need 9 GPUs, the cluster has 8",
        ),
        (
            [1, 1, 1],
            ["--engine.tensor_parallel", "2"],
            r"engine\.tensor_parallel = 2, .* on one node; the nodes have 3 x 1 GPUs",
        ),
        ([], ["--policy.attention", "flash_attention_2"], r"needs a GPU, the cluster has none"),
        (
            [0],
            ["--policy.attention", "varlen"],
            r"needs a GPU, the cluster has none: expected auto",
        ),
    ],
)
def test_too_small_a_cluster_is_named_before_any_actor(
    nodes, flags, says, tmp_path, tiny_model, monkeypatch
):
    """What is needed, by what, and what there is."""
    run(make_home(tmp_path, tiny_model), flag("", *flags), monkeypatch)
    monkeypatch.setattr(cluster, "connect", CONNECT)
    monkeypatch.setattr(cluster, "actor", started)
    monkeypatch.setattr(ray, "init", lambda **options: None)
    node = {"Alive": True, "NodeID": "n", "NodeManagerHostname": "host"}
    alive = [node | {"Resources": {"GPU": count} if count else {}} for count in nodes]
    gone = {"Alive": False, "Resources": {"GPU": 99}}
    monkeypatch.setattr(ray, "nodes", lambda: [*alive, gone])
    with pytest.raises(InputError, match=says):
        grpo_async.main()


@pytest.mark.parametrize(
    ("nodes", "fields"),
    [
        ([], {"ranks": 4, "count": 4}),  # on CPUs
        ([2], {}),
        ([1], {"gpu_share": 0.5}),
        ([1], {"gpu_share": 0.25, "count": 2}),
        ([2], {"gpu_share": 0.5, "ranks": 2, "count": 2}),
        ([1], {"replay": "elsewhere"}),
        ([1], {"export": 3, "run_dir": "x"}),
        ([4, 2], {"tensor_parallel": 2, "count": 2, "ranks": 2}),
        ([1], {"gpu_share": 0.5, "attention": "flash_attention_2"}),
    ],
)
def test_a_cluster_that_is_large_enough_is_taken(nodes, fields):
    plan(changed(grpo_async.Config(), **fields), [Node(str(i), n) for i, n in enumerate(nodes)])


def test_a_cluster_that_is_not_there_is_named_at_once(tmp_path, tiny_model, monkeypatch):
    run(make_home(tmp_path, tiny_model), flag(""), monkeypatch)
    monkeypatch.setattr(cluster, "connect", CONNECT)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    monkeypatch.setenv("RAY_ADDRESS", address)
    began = time.perf_counter()
    with pytest.raises(InputError, match=f"RAY_ADDRESS = '{address}': .*refused: expected a Ray"):
        grpo_async.main()
    assert time.perf_counter() - began < 5 and not ray.is_initialized()


PROGRAMS = {
    "config: True for a count": "",
    "model: a tensor less": "run folder",
    "command: evaluation without a checkpoint": "",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_program_ends_within_seconds_of_its_start(name, tmp_path, tiny_model):
    """Imports included; Ray makes no folder of its own."""
    case = TABLE[name]
    home = make_home(tmp_path, tiny_model)
    case.spoil(home)
    flags = [word.replace("HOME", str(home.folder)) for word in case.flags]
    (tmp_path / "ray").mkdir()
    command = [sys.executable, str(ROOT / "grpo_async.py"), "--config"]
    command += [str(home.write(f"{case.config}\n")), *flags]
    env = os.environ | {"RAY_TMPDIR": str(tmp_path / "ray")}
    began = time.monotonic()
    before = os.times()
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=60)
    after = os.times()
    seconds = after.children_user + after.children_system - before[2] - before[3]
    print(f"{name}: {time.monotonic() - began:.1f} s, {seconds:.1f} s of them on the processor")
    assert done.returncode == 1 and re.fullmatch(r"(run folder: \S+\n)?", done.stdout), done
    assert re.fullmatch(f"error: .*{case.says}.*\n", done.stderr), done.stderr
    assert seconds < 30  # 4 to 5, most of it imports, where nobody else runs
    assert not list((tmp_path / "ray").iterdir()) and not home.run.exists()


@pytest.mark.slow
def test_ctrl_c_ends_the_start_in_one_line(tmp_path, tiny_model):
    """While Ray starts, of which nothing is needed here but that it takes long."""
    config = str(make_home(tmp_path, tiny_model).write(""))
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
    assert told == "interrupted; --resume auto goes on from the last checkpoint\n"
    assert program.returncode == 1
