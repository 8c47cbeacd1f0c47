"""Blends: filled, split, mixed, and the same bytes each time."""

import collections
import hashlib
import json
import os
import shutil
from pathlib import Path

import pytest
from conftest import write_rows

import data_prep
from core.errors import InputError
from envs import registry
from prep import files
from prep.placeholders import bare
from support.blends import DAPO, math_row, placeholder, placeholders, released, write_sources
from support.tables import gives, table
from support.verifiers import of_blend

CASES = table(Path(__file__).with_name("cases.txt"))


@pytest.fixture
def blend(tmp_path, monkeypatch):
    """Runs the command in the test's folder; rows of one file, or of several by name."""
    monkeypatch.chdir(tmp_path)

    def run(rows: list | dict | None = None, *words: str) -> Path:
        if rows is not None:
            Path("in").mkdir(exist_ok=True)
            for name, part in (rows if isinstance(rows, dict) else {"b": rows}).items():
                write_rows(Path("in", f"{name}.jsonl"), part)
        assert data_prep.main(["blend", "in", *words]) == 0
        return Path("data")

    return run


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.fixture
def served(monkeypatch):
    """Every agent of the released rows has an environment."""

    def serve(rows: list[dict]) -> None:
        names = {row["agent_ref"]["name"] for row in rows}
        monkeypatch.setattr(registry, "served", lambda: dict.fromkeys(names, "math"))

    return serve


def test_a_released_blend_keeps_its_rows_and_their_order(blend, served, tmp_path):
    """Real rows of two dozen environments, with placeholders in between."""
    rows = released()
    rows[10:10] = placeholders()
    served(rows)
    sources = write_sources(tmp_path / "sources")
    words = ("--sources", str(sources), "--val_holdout", "20")
    folder = blend(rows, *words) / "b"
    train, val = read(folder / "train-split.jsonl"), read(folder / "val-split.jsonl")
    assert (len(train), len(val)) == (len(rows) - 20, 20)
    plain = [row for row in rows if "_hf_placeholder" not in row]
    assert train[:10] + (train + val)[15:] == plain
    lines = (tmp_path / "in/b.jsonl").read_text().splitlines()
    assert (folder / "train-split.jsonl").read_text().splitlines()[:10] == lines[:10]
    before = contents(tmp_path / "data")
    shutil.rmtree(folder)
    blend(None, *words)
    assert contents(tmp_path / "data") == before
    blend(None, *words, "--force")
    assert contents(tmp_path / "data") == before


def test_placeholders_of_every_form_are_filled(blend, tmp_path):
    sources = write_sources(tmp_path / "sources")
    folder = blend(placeholders(), "--sources", str(sources)) / "b"
    rows = read(folder / "train-split.jsonl")
    asked = [row["responses_create_params"]["input"][0]["content"] for row in rows]
    boxed = "Put the answer into \\boxed{}."
    of_dapo = [f"{boxed}\n\nDAPO 17?", f"\n\nDAPO 3?\n\n{boxed}", "Answer this: DAPO 8? Thank you."]
    assert asked == [*of_dapo, "Solve Sky 19?, boxed.", "Boxed, please: Sky 0?"]
    assert [row["expected_answer"] for row in rows] == ["17", "3", "8", "19", "0"]
    assert [row["question"] for row in rows] == [*asked[:3], "Sky 19?", "Sky 0?"]
    assert all("_hf_placeholder" not in row and row["pass_rate"] == 0.5 for row in rows)
    manifest = json.loads((folder / "manifest.json").read_text())
    dapo, skywork = "BytedTsinghua-SIA/DAPO-Math-17k", "Skywork/Skywork-OR1-RL-Data"
    used = {dapo: sorted(sources.glob("DAPO-*/data/*"))}
    used[skywork] = [sources / skywork / "data/math-0.parquet"]
    hashes = {name: list(map(hash_of, paths)) for name, paths in used.items()}
    assert manifest["placeholders"] == hashes


def hash_of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


test_of_an_answer_in_a_list_the_first_counts = gives(
    bare,
    *(("34", "34"), ('["34", "35"]', "34"), (["3"], "3"), ('{"a": 7}', "7"), (" 5 ", "5")),
    *(("[1, 2)", "[1, 2)"), ("[x]", "[x]"), ("[]", ""), ("{1, 2}", "{1, 2}"), (5, "5")),
)


def test_the_manifest_says_what_is_there(blend, tmp_path):
    rows = [math_row(i, dataset=f"set{i % 3}") for i in range(30)]
    folder = blend(rows, "--val_holdout", "6") / "b"
    manifest = json.loads((folder / "manifest.json").read_text())
    agent = "math_with_judge_simple_agent"
    source = {"file": "b.jsonl", "weight": 1.0, "rows": 30}
    assert manifest["sources"] == [source | {"sha256": hash_of(tmp_path / "in/b.jsonl")}]
    assert (manifest["blend"], manifest["layout"]) == ("b", "super")
    assert manifest["held_out"] == "the last 6 rows, order kept"
    train, val = manifest["splits"]["train"], manifest["splits"]["val"]
    assert (train["rows"], train["environments"]) == (24, {agent: 24})
    assert train["datasets"] == {"set0": 8, "set1": 8, "set2": 8} and val["datasets"]["set0"] == 2
    for split in (train, val):
        assert split["sha256"] == hash_of(folder / split["file"])
        assert split["bytes"] == (folder / split["file"]).stat().st_size
    assert str(tmp_path) not in json.dumps(manifest)


def test_nothing_is_written_again_unless_input_options_or_output_changed(blend, tmp_path, capsys):
    rows = [math_row(i) for i in range(10)]
    folder = blend(rows, "--val_holdout", "2") / "b"
    train = folder / "train-split.jsonl"

    def written(*words: str, rows: list | None = None) -> bool:
        os.utime(train, ns=(0, 0))
        blend(rows, *words)
        return train.stat().st_mtime_ns > 0

    same = ("--val_holdout", "2")
    assert not written(*same) and "nothing to do" in capsys.readouterr().out
    os.utime(tmp_path / "in/b.jsonl")
    assert not written(*same), "the time of a file is no content"
    assert written(*same, "--force")
    assert written("--val_holdout", "3") and written(*same)
    train.write_text(train.read_text() + "\n")
    assert written(*same), "somebody has edited the output"
    assert written(*same, rows=[math_row(i + 1) for i in range(10)])
    (folder / "val-split.jsonl").unlink()
    assert written(*same)


def test_a_blend_that_is_no_longer_than_what_is_held_out_is_all_for_training(blend, capsys):
    folder = blend([math_row(i) for i in range(101)]) / "b"
    assert len(read(folder / "val-split.jsonl")) == 100
    blend([math_row(i) for i in range(100)])
    assert len(read(folder / "train-split.jsonl")) == 100
    assert "no validation rows" in capsys.readouterr().out
    assert not (folder / "val-split.jsonl").exists(), "it is of an earlier time"


def test_nothing_held_out_means_all_for_training(blend):
    folder = blend([math_row(i) for i in range(5)], "--val_holdout", "0") / "b"
    assert len(read(folder / "train-split.jsonl")) == 5
    assert not (folder / "val-split.jsonl").exists()


def test_the_layout_of_nano_has_three_parts(blend):
    rows = [math_row(i) for i in range(1003)]
    folder = blend(rows, "--layout", "nano") / "b"
    train, val, test = (read(folder / f"{name}/data.jsonl") for name in ("train", "val", "test"))
    assert train + val + test == rows and (len(train), len(val), len(test)) == (3, 500, 500)
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["splits"]["test"]["file"] == "test/data.jsonl"


def test_a_sample_is_spread_evenly_and_lies_elsewhere(blend):
    rows = [math_row(i) for i in range(1000)]
    folder = blend(rows, "--sample", "10", "--val_holdout", "2") / "b/sample-10"
    taken = read(folder / "train-split.jsonl") + read(folder / "val-split.jsonl")
    assert [int(row["expected_answer"]) // 2 for row in taken] == list(range(99, 1000, 100))
    assert len(taken) == 10


def test_each_file_of_a_folder_is_a_blend_and_only_some_may_be_asked_for(blend):
    parts = {name: [math_row(i, dataset=name) for i in range(3)] for name in ("r1", "r2", "r3")}
    data = blend(parts, "--only", "r1", "r3")
    assert sorted(path.name for path in data.iterdir()) == ["r1", "r3"]
    assert {row["dataset"] for row in read(data / "r3/train-split.jsonl")} == {"r3"}
    with pytest.raises(InputError, match="expected r4.jsonl there"):
        blend(None, "--only", "r4")
    with pytest.raises(InputError, match="--name nano: in holds 3 blends: choose one with --only"):
        blend(None, "--name", "nano")
    blend(None, "--name", "nano", "--only", "r2", "--layout", "nano")
    assert {row["dataset"] for row in read(data / "nano/train/data.jsonl")} == {"r2"}


def test_a_mixture_is_even_keeps_orders_and_ends_with_the_first_file(blend):
    sizes = {"a": 90, "c": 50}
    parts = {name: [math_row(i, dataset=name) for i in range(n)] for name, n in sizes.items()}
    spec = ("--mix", "a.jsonl:0.75,c.jsonl:0.25", "--val_holdout", "0")
    path = blend(parts, *spec) / "mix/train-split.jsonl"
    rows = read(path)
    names = [row["dataset"] for row in rows]
    for name in "ac":
        own = [row for row in rows if row["dataset"] == name]
        assert own == parts[name][: len(own)]
    assert names.count("a") == 90, "a ends first, and none of it is left"
    for n in range(1, len(names) + 1):
        assert abs(names[:n].count("c") - n / 4) <= 1
    before = path.read_bytes()
    blend(None, *spec, "--force")
    assert path.read_bytes() == before


def test_rows_of_an_agent_may_be_left_out(blend, tmp_path, capsys):
    other = {"agent_ref": {"name": "lean_agent"}}
    folder = blend([math_row(1), math_row(2, **other), math_row(3)], "--leave_out", "lean_agent")
    assert len(read(folder / "b/train-split.jsonl")) == 2
    assert "left out: 1 rows of lean_agent" in capsys.readouterr().out
    assert json.loads((folder / "b/manifest.json").read_text())["left_out"] == {"lean_agent": 1}


# Rows of agents that no environment serves.
UNSERVED = [math_row(i, agent_ref={"name": name}) for i, name in enumerate(("lost_a", "lost_b"))]


def test_a_blend_that_nobody_serves_is_passed_over(blend, capsys):
    """Only a command that names the blend ends there."""
    folder = blend({"rlhf": [math_row(1)], "lost": UNSERVED, "tool": [math_row(2)]})
    assert {path.name for path in folder.iterdir()} == {"rlhf", "tool"}
    why = "because no environment serves its 2 rows (lost_a, lost_b)"
    assert f"in/lost.jsonl: not written, {why}\n" in capsys.readouterr().out
    for words in (("--only", "lost"), ("--only", "rlhf", "lost", "--force")):
        with pytest.raises(InputError, match="lost.jsonl:1: agent_ref.name is 'lost_a'"):
            blend(None, *words)
    left = [word for row in UNSERVED for word in ("--leave_out", row["agent_ref"]["name"])]
    blend(None, *left, "--force")
    assert "no environment serves its 2 rows (lost_a, lost_b)" in capsys.readouterr().out
    blend({"lost": [*UNSERVED, math_row(3)]}, "--nemo_gym", "--force")
    assert len(read(folder / "lost/train-split.jsonl")) == 3
    with pytest.raises(InputError, match="agent_ref.name is 'lost_a'"):
        blend({"lost": [*UNSERVED, math_row(3)]})


def test_the_blend_of_swe_2_is_written_as_published(blend):
    """`data_prep.py swe` makes rows of it that can be judged."""
    folder = blend({"swe2": of_blend("swe2")})
    assert len(read(folder / "swe2/train-split.jsonl")) == 2


def test_blends_without_any_environment_are_an_error(blend):
    with pytest.raises(InputError, match="b.jsonl:1: agent_ref.name is 'lost_a'"):
        blend({"b": UNSERVED, "c": UNSERVED})


def test_rows_of_an_agent_of_nemo_gym_may_be_kept(blend):
    other = {"agent_ref": {"name": "lean_agent"}}
    folder = blend([math_row(1), math_row(2, **other)], "--nemo_gym")
    assert len(read(folder / "b/train-split.jsonl")) == 2
    with pytest.raises(InputError, match="agent_ref.name is ''"):
        blend([math_row(1, agent_ref=None)], "--nemo_gym")


GOOD = math_row(1)


@pytest.mark.parametrize(("words", "rows", "message"), CASES["blend"])
def test_bad_input_is_named_and_leaves_nothing(blend, tmp_path, rows, words, message):
    made = {dict: lambda row: GOOD | row, list: list, tuple: lambda row: placeholder(*row)}
    rows = [made[type(row)](row) for row in rows]
    sources = ("--sources", str(write_sources(tmp_path / "sources")))
    with pytest.raises(InputError, match=message):
        blend(rows, *words, *sources)
    assert contents(tmp_path / "data") == {}


def test_a_line_that_is_no_json_leaves_the_blend_of_before(blend, tmp_path):
    blend([math_row(i) for i in range(3)])
    before = contents(tmp_path / "data")
    for line in (b"{", b'{"a": "\xff"}', b"5"):
        (tmp_path / "in/b.jsonl").write_bytes(json.dumps(GOOD).encode() + b"\n\n" + line + b"\n")
        with pytest.raises(InputError, match=r"in/b.jsonl:3: "):
            blend()
        assert contents(tmp_path / "data") == before


def test_a_disk_that_is_full_leaves_nothing_half_written(small_disk, tmp_path):
    source = write_rows(tmp_path / "b.jsonl", [math_row(i, text="x" * 1000) for i in range(2000)])
    with pytest.raises(InputError, match="No space left"):
        data_prep.main(["blend", source, "--out", str(small_disk)])
    assert contents(small_disk) == {}


def test_sources_that_are_absent_are_named(blend, tmp_path):
    rows = [placeholder(0, DAPO, "{question}")]
    with pytest.raises(InputError, match=r"--sources .*: expected .*DAPO-Math-17k there"):
        blend(rows, "--sources", str(tmp_path))


def test_memory_does_not_grow_with_the_file(tmp_path, monkeypatch):
    """Held at once are the rows that are held out and the one in hand."""
    held = collections.Counter()
    row = files.Line.row

    class Counted(dict):
        def __init__(self, *args):
            super().__init__(*args)
            held["now"] += 1
            held["most"] = max(held["most"], held["now"])

        def __del__(self):
            held["now"] -= 1

    monkeypatch.setattr(files.Line, "row", lambda line: Counted(row(line)))
    source = write_rows(tmp_path / "b.jsonl", [math_row(i) for i in range(3000)])
    data_prep.main(["blend", source, "--out", str(tmp_path / "data")])
    assert held["most"] <= 105
