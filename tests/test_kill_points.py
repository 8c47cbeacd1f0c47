"""The points at which tests/kills.py ends processes are places that the product still has."""

import errno
import functools
import importlib
import inspect
from types import SimpleNamespace

import pytest

from support.kill_points.sitecustomize import MODULES, POINTS, between

PLACES = sorted({place for points in POINTS.values() for place in points.values()})


@pytest.mark.parametrize("place", PLACES)
def test_a_point_is_a_function_of_a_module_that_is_watched(place):
    module = next(name for name in MODULES if place.startswith(f"{name}."))
    names = place.removeprefix(f"{module}.").split(".")
    function = functools.reduce(getattr, names, importlib.import_module(module))
    assert inspect.isfunction(function) and function.__qualname__ == ".".join(names)


def test_no_point_is_lost():
    assert sum(map(len, POINTS.values())) == 34
    assert len(POINTS) == 6


def test_only_the_armed_point_takes_the_signal(tmp_path, monkeypatch):
    killed = []
    armed = tmp_path / "armed"
    monkeypatch.setattr("support.kill_points.sitecustomize.FILE", str(armed))
    monkeypatch.setattr("os.kill", lambda pid, number: killed.append(number.name))
    armed.write_text("worker after it wrote a group down SIGSTOP")
    with between(["worker before it asks for a group"], []):
        assert not killed
    with between([], ["worker after it wrote a group down"]):
        assert not killed
    with between([], ["worker after it wrote a group down"]):
        pass
    assert killed == ["SIGSTOP"] and not armed.exists()


def test_an_armed_error_is_raised_once(tmp_path, monkeypatch):
    armed = tmp_path / "armed"
    monkeypatch.setattr("support.kill_points.sitecustomize.FILE", str(armed))
    armed.write_text("disk before a checkpoint is written ENOSPC")
    with pytest.raises(OSError) as raised, between(["disk before a checkpoint is written"], []):
        pass
    assert raised.value.errno == errno.ENOSPC and not armed.exists()
    with between(["disk before a checkpoint is written"], []):
        pass


@pytest.mark.parametrize(("evaluation", "strikes"), [(None, False), (3, True)])
def test_a_point_of_an_evaluation_needs_an_evaluation(tmp_path, monkeypatch, evaluation, strikes):
    armed = tmp_path / "armed"
    monkeypatch.setattr("support.kill_points.sitecustomize.FILE", str(armed))
    monkeypatch.setattr("os.kill", lambda pid, number: None)
    armed.write_text("worker while an evaluation runs SIGKILL")
    slot = SimpleNamespace(evaluation=evaluation)
    with between(["worker while an evaluation runs"], [], None, {}, slot, []):
        assert armed.exists() is not strikes
