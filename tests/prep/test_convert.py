"""Data sets of questions and answers, in every format, become rows."""

import csv
import itertools
import json
import re
from pathlib import Path

import pyarrow as pa
import pytest
from huggingface_hub import constants
from pyarrow import ipc, parquet

import data_prep
from core.errors import InputError
from envs import check_rows
from envs.following.instructions import RULES
from prep import tables
from support.tables import table

ROOT = Path(__file__).resolve().parents[2]
CASES = table(Path(__file__).with_name("cases.txt"))
QUESTIONS = [f'Wie viel ist {i} + {i}, "genau"?\nBitte.' for i in range(50)]
RECORDS = [{"q": question, "a": str(2 * i)} for i, question in enumerate(QUESTIONS)]
WORDS = ("--prompt", "q", "--answer", "a", "--agent", "math")


def write(path: Path, records: list[dict]) -> Path:
    """Records in the format that the name of the file says."""
    if path.suffix == ".csv":
        with open(path, "w", newline="") as file:
            writer = csv.DictWriter(file, list(records[0]))
            writer.writeheader()
            writer.writerows(records)
    elif path.suffix == ".parquet":
        parquet.write_table(pa.Table.from_pylist(records), path, row_group_size=7)
    elif path.suffix == ".arrow":
        table = pa.Table.from_pylist(records)
        with ipc.new_stream(str(path), table.schema) as stream:
            stream.write_table(table, max_chunksize=7)
    elif path.suffix == ".json":
        path.write_text(json.dumps(records, indent=1, ensure_ascii=False))
    else:
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def convert(source: Path, out: Path, *words: str) -> list[dict]:
    assert data_prep.main(["rows", str(source), str(out), *words]) == 0
    return [json.loads(line) for line in out.read_text().splitlines()]


@pytest.mark.parametrize("kind", [*tables.KINDS, "_lines.json"])
def test_any_format_becomes_the_same_rows(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(tables, "CHUNK", 64)  # so that objects lie across its borders
    source = tmp_path / f"data{kind}"
    write(source.with_suffix(".jsonl") if "_" in kind else source, RECORDS)
    if "_" in kind:
        source.with_suffix(".jsonl").rename(source)
    rows = convert(source, tmp_path / "out.jsonl", *WORDS)
    assert [row["question"] for row in rows] == QUESTIONS
    assert [row["expected_answer"] for row in rows] == [record["a"] for record in RECORDS]
    asked = {"role": "user", "content": QUESTIONS[0]}
    assert rows[0]["responses_create_params"]["input"] == [asked]
    for row in rows:
        check_rows.check_row(row)


def test_rows_of_rules_of_form_need_no_answers(tmp_path, capsys):
    """The page's own record and command."""
    page = (ROOT / "docs/environments.md").read_text(encoding="utf-8").replace("\\\n", " ")
    (record,) = re.findall(r"```json\n(.*\n)```", page)
    (words,) = re.findall(r"data_prep\.py rows prompts\.jsonl train\.jsonl (.*)", page)
    (tmp_path / "prompts.jsonl").write_text(record)
    (row,) = convert(tmp_path / "prompts.jsonl", tmp_path / "train.jsonl", *words.split())
    assert "expected_answer" not in row and "not copied" not in capsys.readouterr().out
    check_rows.check_row(row)
    names = row["instruction_id_list"]
    answer = "Rome is the capital of Italy and very old."
    rules = zip(names, row["kwargs"], strict=True)
    assert len(names) == 3 and all(RULES[name](answer, **given) for name, given in rules)
    assert not RULES[names[1]]("Rome.", **row["kwargs"][1])


def test_the_number_that_ends_a_solution_is_the_answer(tmp_path, capsys):
    """As in GSM8K; a heading within a text is none."""
    solutions = {"2 x 600 = <<2*600=1200>>1200\n#### 1,200": "1200", "half\n#### -0.5": "-0.5"}
    solutions |= {"so much\n#### $12": "12", "#### 1.000.5": "#### 1.000.5"}
    solutions |= {"#### Title\nand text": "#### Title\nand text", "7": "7"}
    records = [{"q": "How many?", "a": text} for text in solutions]
    source = write(tmp_path / "d.jsonl", records)
    rows = convert(source, tmp_path / "out.jsonl", *WORDS)
    assert [row["expected_answer"] for row in rows] == list(solutions.values())
    assert "3 answers are the numbers after ####" in capsys.readouterr().out


def test_options_shape_the_row(tmp_path):
    record = {"chat": [{"content": {"text": "1 + 1?"}}], "meta": {"label": 2}}
    source = write(tmp_path / "d.jsonl", [record])
    words = ("--prompt", "chat.0.content.text", "--answer", "meta.label", "--agent", "math")
    template = ("--template", "Hello. {question} {x}", "--dataset", "own")
    (row,) = convert(source, tmp_path / "out.jsonl", *words, *template)
    assert row["responses_create_params"]["input"][0]["content"] == "Hello. 1 + 1? {x}"
    assert (row["expected_answer"], row["dataset"], row["question"]) == ("2", "own", "1 + 1?")


def test_a_cell_of_a_table_may_be_long(tmp_path):
    source = write(tmp_path / "d.csv", [{"q": "x" * 200_000, "a": "1"}])
    assert len(convert(source, tmp_path / "o", *WORDS)[0]["question"]) == 200_000


def test_a_column_of_messages_is_the_prompt(tmp_path):
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 1?"}]
    source = write(tmp_path / "d.parquet", [{"messages": chat, "a": "2"}])
    (row,) = convert(source, tmp_path / "o", "--prompt", "messages", *WORDS[2:])
    assert row["responses_create_params"]["input"] == chat


def test_of_a_folder_the_split_is_read_in_order_without_what_datasets_writes_beside(tmp_path):
    for split, part in (("train", RECORDS[:30]), ("test", RECORDS[30:])):
        folder = tmp_path / "d" / split
        folder.mkdir(parents=True)
        write(folder / "data-00000-of-00002.arrow", part[:3])
        write(folder / "data-00001-of-00002.arrow", part[3:])
        (folder / "dataset_info.json").write_text("{}")
        (folder / "state.json").write_text("{}")
    rows = convert(tmp_path / "d", tmp_path / "o", *WORDS)
    assert [row["question"] for row in rows] == QUESTIONS[:30]
    rows = convert(tmp_path / "d", tmp_path / "o", *WORDS, "--split", "test")
    assert [row["question"] for row in rows] == QUESTIONS[30:]


def test_a_data_set_of_the_hub_is_taken_from_its_cache_without_network(tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    folder = tmp_path / "datasets--someone--sums"
    data = folder / "snapshots/abc/data"
    data.mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs/main").write_text("abc")
    write(data / "train-00000-of-00001.parquet", RECORDS)
    monkeypatch.chdir(tmp_path)
    assert len(convert(Path("someone/sums"), tmp_path / "o", *WORDS)) == len(RECORDS)
    with pytest.raises(InputError, match="SOURCE = 'someone/other': neither a folder nor on"):
        convert(Path("someone/other"), tmp_path / "o", *WORDS)


@pytest.mark.parametrize(("name", "text", "words", "message"), CASES["rows"])
def test_bad_input_is_named_and_leaves_nothing(tmp_path, name, text, words, message):
    (tmp_path / name).write_text(text)
    flags = dict(zip(WORDS[::2], WORDS[1::2], strict=True)) | dict([words] if words else [])
    with pytest.raises(InputError, match=message):
        convert(tmp_path / name, tmp_path / "out.jsonl", *itertools.chain(*flags.items()))
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_source_that_is_absent_and_one_that_would_be_overwritten_are_refused(tmp_path):
    with pytest.raises(InputError, match="SOURCE = '.*absent': there is no such file or folder"):
        convert(tmp_path / "absent", tmp_path / "o", *WORDS)
    source = write(tmp_path / "d.jsonl", RECORDS)
    with pytest.raises(InputError, match="is both the input and the output, expected two files"):
        convert(source, source, *WORDS)
    assert len(source.read_text().splitlines()) == len(RECORDS)
