"""Settings that are read from their sources, against those of the imported classes."""

import dataclasses
from pathlib import Path

import pydantic
import pytest

import dpo
import grpo_async
import mopd
from core import errors
from settings import declared, merging, reader

PROGRAMS = {"grpo_async": grpo_async, "mopd": mopd, "dpo": dpo}
# A setting, and values that pydantic takes or refuses.
VALUES = [
    ("steps", [1, 7.0, "3", 0, -1, 2.5, "x", None, [1]]),
    ("seed", [0, 2**31 - 1, 2**31, -1]),
    ("gpu_share", [1, 0.5, 0.0, 1.1, float("nan"), "0.5"]),
    ("save_before", [0, -1, "1e3"]),
    ("policy.kind", ["fsdp", "megatron", "ddp", 5]),
    ("policy.betas", [(0.9, 0.999), [0.9, 0.9], (0.9, 1.0), (0.9,), 0.9]),
    ("policy.activation_checkpointing", [True, "auto", "maybe"]),
    ("policy.lora_targets", [(), ("q_proj",), [5]]),
    ("engine.args", [{}, {"a": 1}, [1], "x"]),
    ("advantage.clip", [(-1, 1), (-float("inf"), float("inf")), (1,), "x"]),
    ("advantage.zero_rewards", [("empty_answer",), ("empty",)]),
    ("correction.high", [float("inf"), 0.0, 1]),
    ("services.sandbox", ["http", "docker"]),
    ("wandb", [True, False, "x"]),
    ("model", ["a", 5, None]),
]


@pytest.mark.parametrize("name", PROGRAMS)
def test_all_settings_are_read_with_their_defaults(name):
    program = PROGRAMS[name]
    found = declared.declared(Path(program.__file__))
    defaults = reader.leaves(program.Config)
    assert found.keys() == defaults.keys()
    for setting, (kind, default) in ((n, (s.kind, s.default)) for n, s in found.items()):
        assert kind.name != "any", setting
        assert kind.holds(defaults[setting]), setting
        groups = ("correction.low", "advantage.clip")  # mopd.py gives these groups as a whole
        assert default == defaults[setting] or (name == "mopd" and setting in groups), setting


@pytest.mark.parametrize(("name", "values"), VALUES, ids=[name for name, _ in VALUES])
def test_a_value_is_taken_if_pydantic_takes_it(name, values):
    known = declared.declared(Path(grpo_async.__file__))
    group, _, leaf = name.rpartition(".")
    kind = type(getattr(grpo_async.Config(), group)) if group else grpo_async.Config
    annotation = {field.name: field.type for field in dataclasses.fields(kind)}[leaf]
    adapter = pydantic.TypeAdapter(annotation, config=None)
    for value in values:
        try:
            adapter.validate_python(value)
        except pydantic.ValidationError:
            taken = False
        else:
            taken = value == value  # nan is refused by the groups' configuration
        assert known[name].kind.holds(value) == taken, value


def test_every_configuration_fits_its_declarations():
    for path in sorted((declared.ROOT / "configs").glob("**/[!_]*.py")):
        program = PROGRAMS.get(path.stem.rpartition("_")[2], grpo_async)
        known = declared.declared(Path(program.__file__))
        for name, value in merging.written(path).items():
            if name in known:
                assert known[name].kind.holds(value), (path, name)


def test_a_program_without_settings_is_named(tmp_path):
    (tmp_path / "own.py").write_text("import os\n")
    with pytest.raises(errors.InputError, match="own.py: expected a class Config"):
        declared.declared(tmp_path / "own.py")


def test_a_fork_s_own_settings_are_read_too(tmp_path):
    fork = """
from grpo_async import CHECKED, Config as Base, Loss, checked_dataclass
import dataclasses

@checked_dataclass(frozen=True, config=CHECKED)
class MyLoss(Loss):
    tau: float = 0.5

@checked_dataclass(frozen=True, config=CHECKED)
class Config(Base):
    loss: MyLoss = dataclasses.field(default_factory=MyLoss)
"""
    (tmp_path / "own.py").write_text(fork)
    found = declared.declared(tmp_path / "own.py")
    assert found["loss.tau"].default == 0.5 and found["loss.kl_coef"].default == 0.0
    assert found.keys() - {"loss.tau"} == declared.declared(Path(grpo_async.__file__)).keys()
