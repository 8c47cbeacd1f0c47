"""What a command writes becomes a file, or is refused by name; a link stays, its target is new."""

import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

import data_prep
import report
from bench.simulation import page
from core import outputs
from core.errors import InputError
from launch import make_gsm8k, tiny_model
from prep import swe_check
from runtime.startup import modes
from support.program import ROOT, ran

QUESTIONS = [{"q": f"Wie viel ist {i} + {i}?", "a": str(2 * i)} for i in range(4)]
WORDS = ("--prompt", "q", "--answer", "a", "--agent", "math")


def lines(*rows: dict) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def rows_of(folder: Path, out: Path) -> None:
    (folder / "questions.jsonl").write_text(lines(*QUESTIONS))
    data_prep.main(["rows", str(folder / "questions.jsonl"), str(out), *WORDS])


def blend_of(folder: Path, out: Path) -> None:
    rows_of(folder, folder / "in" / f"{out.parent.name}.jsonl")
    data_prep.main(["blend", str(folder / "in"), "--out", str(out.parents[1])])


def report_of(folder: Path, out: Path) -> None:
    report.write(str(out.parent))


def compare_of(folder: Path, out: Path) -> None:
    (folder / "other").mkdir()
    report.compare([str(out.parent), str(folder / "other")])


def picture_of(folder: Path, out: Path) -> None:
    report.draw(str(out.parent))


def gsm8k_of(folder: Path, out: Path) -> None:
    (folder / "gsm8k.jsonl").write_text(lines({"question": "1 + 1?", "answer": "#### 2"}))
    make_gsm8k.main([str(out), f"gsm8k={folder / 'gsm8k.jsonl'}"])


def tiny_of(folder: Path, out: Path) -> None:
    tiny_model.write_rows(out, QUESTIONS)


def simulation_of(folder: Path, out: Path) -> None:
    trace = SimpleNamespace(cfg=SimpleNamespace(command=SimpleNamespace(config="a")), histories={})
    found = SimpleNamespace(seconds=1.0, binds="nothing")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(page, "table", lambda *_: [])
        page.write(trace, found, str(out))


def squash_of(folder: Path, out: Path) -> None:
    (folder / "enroot").write_text('#!/bin/bash\n[ "$1" = import ] && echo image >"$3"\n')
    (folder / "enroot").chmod(0o755)
    env = os.environ | {"PATH": f"{folder}:{os.environ['PATH']}"}
    done = ran("bash", "launch/containers/image.sh", "--force", "name", out, root=ROOT, env=env)
    if done.returncode:
        raise InputError(done.stderr.removeprefix("error: "))


COMMANDS: dict[str, Callable[[Path, Path], None]] = {  # by the name of a file that they write
    "rows.jsonl": rows_of,
    "train-split.jsonl": blend_of,
    "manifest.json": blend_of,
    "report.html": report_of,
    "compare.html": compare_of,
    "reward.png": picture_of,
    "gsm8k.jsonl": gsm8k_of,
    "tiny.jsonl": tiny_of,
    "page.html": simulation_of,
    "image.sqsh": squash_of,
}


@pytest.fixture
def out(tmp_path) -> Path:
    folder = tmp_path / "out" / "of_it"
    folder.mkdir(parents=True)
    return folder


@pytest.mark.parametrize("name", COMMANDS)
def test_a_link_stays_and_its_target_is_written(name, tmp_path, out):
    (tmp_path / "target").write_text("old")
    (out / name).symlink_to("../../target")
    COMMANDS[name](tmp_path, out / name)
    assert os.readlink(out / name) == "../../target"
    written = (tmp_path / "target").read_bytes()
    assert written and not written.startswith(b"old")
    assert not list(tmp_path.rglob("*.partial"))


@pytest.mark.parametrize("name", COMMANDS)
def test_a_pipe_is_refused_and_gets_nothing(name, tmp_path, out):
    os.mkfifo(out / name)
    reader = os.open(out / name, os.O_RDONLY | os.O_NONBLOCK)  # a writer would wait for one
    with pytest.raises(InputError, match=f"{out / name}.*expected a file, or a path where none is"):
        COMMANDS[name](tmp_path, out / name)
    assert stat.S_ISFIFO(os.stat(out / name).st_mode)
    assert os.read(reader, 1) == b""
    os.close(reader)


@pytest.mark.parametrize(("kind", "told"), [
    (stat.S_IFCHR, "a device"), (stat.S_IFBLK, "a device"), (stat.S_IFSOCK, "a socket"),
    (stat.S_IFDIR, "a folder"), (stat.S_IFREG, ""),
])  # fmt: skip
def test_anything_but_a_file_is_refused_by_what_it_is(tmp_path, monkeypatch, kind, told):
    """As root, the name of a device would become a file for all processes of the machine."""
    path = tmp_path / "full"
    monkeypatch.setattr(outputs.os, "stat", lambda path: SimpleNamespace(st_mode=kind | 0o666))
    if not told:
        assert outputs.output_file(path) == path
        return
    with pytest.raises(InputError, match=f"^error: {path}: is {told}, expected a file"):
        outputs.output_file(path)


def test_a_link_to_nothing_names_what_is_to_be(tmp_path):
    (tmp_path / "link").symlink_to("there/rows.jsonl")
    assert outputs.output_file(tmp_path / "link") == tmp_path / "there/rows.jsonl"
    (tmp_path / "circle").symlink_to("circle")
    with pytest.raises(InputError, match="circle: Too many levels of symbolic links, expected"):
        outputs.output_file(tmp_path / "circle")


def test_folders_are_written_behind_links_as_well(tmp_path):
    (tmp_path / "link").symlink_to("models")
    assert outputs.output_folder(tmp_path / "link") == tmp_path / "models"
    (tmp_path / "models").write_text("")
    with pytest.raises(InputError, match="link: is a file, expected a folder, or a path where"):
        outputs.output_folder(tmp_path / "link")


def test_an_output_is_refused_before_hours_of_work(tmp_path, monkeypatch):
    """Of a check of repairs, and of an export."""
    os.mkfifo(tmp_path / "rows.jsonl")
    monkeypatch.setattr(swe_check, "Checked", lambda *_: pytest.fail("it began"))
    words = ["swe", str(tmp_path / "source.jsonl"), str(tmp_path / "rows.jsonl"), "--check"]
    with pytest.raises(InputError, match="rows.jsonl: is a pipe"):
        data_prep.main(words)
    folder = tmp_path / "step_000003"
    folder.mkdir()
    (folder / "complete.json").touch()
    (folder / "hf").touch()
    command = SimpleNamespace(export=3)
    with pytest.raises(InputError, match="hf: is a file, expected a folder"):
        modes.of_export(SimpleNamespace(command=command, run_dir=str(tmp_path)))
