"""Data of tests: small, each file's licence named, and what is skipped without the rest listed."""

import re
from types import SimpleNamespace

import pytest

from support import data

PAGE = (data.HERE / "README.md").read_text(encoding="utf-8")
FILES = [path for path in data.HERE.rglob("*") if path.is_file() and path.parent != data.HERE]


def test_the_licence_of_each_file_is_named():
    rows = re.findall(r"^\| (.*) \| .+ \| (.+) \|$", PAGE, re.M)[1:]
    stated = set()
    for names, licences in rows:
        stated |= set(re.findall(r"`([^`]+)`", names))
        assert set(licences.split(", ")) <= {"Apache-2.0", "MIT", "CC-BY-4.0"}
    files = {str(path.relative_to(data.HERE)) for path in FILES}
    for name in stated:
        assert [file for file in files if file.startswith(name)], f"{name} has no file"
    for file in files:
        assert [name for name in stated if file.startswith(name)], f"{file} has no licence"


def test_the_files_are_small():
    assert sum(path.stat().st_size for path in FILES) < 840_000


def test_a_test_that_lacks_data_is_skipped_and_listed(monkeypatch, tmp_path):
    monkeypatch.setattr(data, "SHARED", tmp_path)
    with pytest.raises(pytest.skip.Exception) as lacking:
        data.template("llama3_1")
    reasons = {"b": f"Skipped: {lacking.value}", "a": "Skipped: only root may mount"}
    reports = [SimpleNamespace(nodeid=i, longrepr=("x.py", 1, r)) for i, r in reasons.items()]
    found = data.skipped([*reports, SimpleNamespace(nodeid="c", longrepr="xfailed")])
    assert found == ["b lacks ../shared/data/chat_templates/llama3_1.jinja"]


def test_lines_are_in_one_place_each(monkeypatch, tmp_path):
    for place in ("HERE", "SHARED"):
        monkeypatch.setattr(data, place, tmp_path / place)
        (tmp_path / place).mkdir()
    (data.HERE / "a").write_text("1\n2\n")
    (data.SHARED / "a").write_text("1\n2\n3\n")
    assert (data.texts("a", data.HERE), data.texts("a", data.SHARED)) == (["1", "2"], ["3"])
