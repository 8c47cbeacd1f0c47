"""Prompts as the model sees them, and data files with bad rows in them."""

import importlib
import json
import random
import re
import sys
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import save_tokenizer, spelling_rows
from transformers import AutoTokenizer

import envs
from core.errors import InputError
from envs import check_rows, registry
from envs.check_rows import load_rows, read_rows, render
from rollout import rows
from rollout.rows import quarantine
from rollout.sampler import sampling_of
from settings.config import Sampling
from settings.environment_services import Services
from support.data import HERE, template
from support.verifiers import replaced

MUTANTS = 20_000


def test_a_conversation_ends_where_the_answer_begins(tokenizer):
    ids = render(tokenizer, spelling_rows(1)[0], {})
    word = spelling_rows(1)[0]["metadata"]["word"]
    assert tokenizer.decode(ids) == f"<user>{word}<bot>"


def test_parts_of_the_responses_api_are_joined(tokenizer):
    row = spelling_rows(1)[0]
    parts = [{"type": "input_text", "text": "spell "}, {"type": "input_text", "text": "this"}]
    row["responses_create_params"]["input"] = [{"role": "user", "content": parts}]
    assert tokenizer.decode(render(tokenizer, row, {})) == "<user>spell this<bot>"


THOUGHTFUL = [{"role": "user", "content": "1 + 1?"}]
THOUGHTFUL += [{"role": "assistant", "content": "<think>one and one</think>2"}]
THOUGHTFUL += [{"role": "user", "content": "And 2 + 2?"}]


@pytest.mark.parametrize(("name", "variables", "keeps", "end"), [
    ("nemotron_3_super", {}, False, "<think>\n"),
    ("nemotron_3_super", {"truncate_history_thinking": False}, True, "<think>\n"),
    ("nemotron_3_super", {"enable_thinking": False}, False, "<think></think>"),
    ("qwen3", {"enable_thinking": True}, False, "<|im_start|>assistant\n"),
    ("qwen3", {"enable_thinking": False}, False, "<think>\n\n</think>\n\n"),
])  # fmt: skip
def test_variables_reach_the_chat_template(tmp_path, name, variables, keeps, end):
    """Super trains with the thoughts of earlier turns left in."""
    save_tokenizer(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    tokenizer.chat_template = template(name)
    row = {"responses_create_params": {"input": THOUGHTFUL}}
    prompt = tokenizer.decode(render(tokenizer, row, variables))
    assert ("one and one" in prompt) == keeps and prompt.endswith(end)


def test_the_checksum_is_of_the_first_rows(tmp_path):
    """Whatever stands between or behind them."""
    first, second, third = (dump(row) for row in spelling_rows(3))
    read = [
        read_rows(write_lines(tmp_path / "x.jsonl", lines), 1)[0].checksum(2)
        for lines in ([first, second], [b"", first, b"{", second, third], [second, first, third])
    ]
    assert read[0] == read[1] != read[2]


# --- bad rows -------------------------------------------------------------------------------------


@pytest.fixture
def cfg(tmp_path_factory, tmp_path, monkeypatch):
    """What `load_rows` wants to know, for a model of one token per character."""
    folder = tmp_path_factory.mktemp("model")
    save_tokenizer(folder)
    (tmp_path / "run").mkdir()
    monkeypatch.setattr(rows, "BAD", {})
    return SimpleNamespace(
        command=SimpleNamespace(eval_only=False, export=0),
        run_dir=str(tmp_path / "run"),
        model=str(folder),
        data=SimpleNamespace(max_bad_rows=0, train="train.jsonl", val="", val_samples=1),
        group_size=2,
        services=Services(),
        sampling=Sampling(max_model_len=1 << 20, chat_template_kwargs={}),
    )


def write_lines(path: Path, lines: list[bytes]) -> str:
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    return str(path)


def dump(row) -> bytes:
    return json.dumps(row).encode()


def quarantined(cfg) -> list[dict]:
    quarantine(cfg)
    path = Path(cfg.run_dir) / "quarantine.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


GOOD = dump(spelling_rows(1)[0])


def test_bad_rows_are_set_aside_up_to_a_number(cfg, tmp_path, capsys):
    lines = [GOOD, b"{", b"", b'{"question": "\xff"}', GOOD]
    lines += [dump(spelling_rows(1)[0] | {"answer": 5})]
    path = write_lines(tmp_path / "train.jsonl", lines)
    for allowed in (0, 1, 2):
        cfg.data.max_bad_rows = allowed
        with pytest.raises(InputError, match=r"train\.jsonl:2: expected JSON: .*char") as error:
            load_rows(path, cfg)
        more = f" ({allowed + 1} bad rows: lines {', '.join(['2', '4', '6'][: allowed + 1])})"
        more += f", more than data.max_bad_rows = {allowed}"
        assert str(error.value).endswith(more) == bool(allowed)
    assert not quarantined(cfg) and capsys.readouterr().out == ""
    cfg.data.max_bad_rows = 3
    assert [row["_line"] for row in load_rows(path, cfg)] == [1, 5]
    bad = quarantined(cfg)
    assert [row["line"] for row in bad] == [2, 4, 6] and {row["file"] for row in bad} == {path}
    assert bad[1]["reason"] == "expected UTF-8: byte 0xff at character 14"
    assert bad[2]["reason"].startswith("answer is 5, expected ")
    assert bad[0]["text"] == "{" and bad[1]["text"].encode(errors="surrogateescape") == lines[3]
    (told,) = capsys.readouterr().out.splitlines()
    assert f"{path}: 3 bad rows go to {cfg.run_dir}" in told
    assert told.endswith(": expected JSON 1, expected UTF-8 1, answer 1")
    other = write_lines(tmp_path / "val.jsonl", [GOOD, b"{"])
    for start in (path, other, path):  # resumed, it tells the same once more
        load_rows(start, cfg)
    assert sorted(row["line"] for row in quarantined(cfg)) == [2, 2, 4, 6]
    write_lines(tmp_path / "train.jsonl", [GOOD])
    load_rows(path, cfg)
    assert [row["file"] for row in quarantined(cfg)] == [other], "it was mended"


def test_a_file_of_bad_rows_is_refused(cfg, tmp_path):
    cfg.data.max_bad_rows = 100
    path = write_lines(tmp_path / "train.jsonl", [b"", b"{", b"}"])
    told = r"holds no good rows.*; .*jsonl:2: expected JSON: .* lines 2, 3\)$"
    with pytest.raises(InputError, match=told):
        load_rows(path, cfg)


@pytest.mark.parametrize(("line", "reason"), [
    (b"\xef\xbb\xbf" + GOOD, "expected JSON: Unexpected UTF-8 BOM"),
    (GOOD[:-1] + b', "x": NaN}', "expected JSON: 'NaN' is not finite"),
    (GOOD[:-1] + b', "x": -1e999}', "expected JSON: '-1e999' is not finite"),
    (GOOD[:-1] + b', "x": ' + b"9" * 5000 + b"}", "expected JSON: Exceeds the limit"),
    (GOOD[:-1] + b', "answer": "cba"}', "expected JSON: the key 'answer' appears twice"),
    (GOOD[:-1] + b', "x": {"y": 1, "y": 1}}', "expected JSON: the key 'y' appears twice"),
    (GOOD[:-1] + b', "x": "\\ud800"}', r"expected UTF-8: a lone surrogate, \ud800,"),
    (GOOD[:-1] + b', "x": "\x00"}', "expected JSON: Invalid control character"),
    (b"[" * 100_000, "expected JSON: maximum recursion depth"),
    (GOOD + GOOD, "expected JSON: Extra data"),
    (b"[]", "the row is [], expected an object that contains responses_create_params"),
    (b"{}", "responses_create_params.input is missing or null, expected a list of messages"),
    (b'{"question": "1 + 1?", "answer": "2"}',
     "responses_create_params.input is missing or null, expected a list of messages; the "
     "row has ['question', 'answer']: docs/own_data.md shows how to convert it"),
], ids=lambda value: value[:40] if isinstance(value, str) else "")  # fmt: skip
def test_each_kind_of_bad_row_is_named(cfg, tmp_path, line, reason):
    path = write_lines(tmp_path / "train.jsonl", [GOOD, line])
    with pytest.raises(InputError, match=re.escape(f"{path}:2: {reason}")) as error:
        load_rows(path, cfg)
    assert "\n" not in str(error.value)


def test_a_missing_file_is_named_by_where_it_was_looked_for(cfg, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=f"error: {tmp_path}/no.jsonl: .* No such file"):
        load_rows("no.jsonl", cfg)


@pytest.fixture
def environment(tmp_path, monkeypatch):
    """Puts an environment's module into a folder of its own; returns its path."""
    written = []

    def environment(text: str, name: str = "mine") -> Path:
        folder = tmp_path / "more_envs"
        folder.mkdir(exist_ok=True)
        path = folder / f"{name}.py"
        path.write_text(f'AGENTS = ("{name}",)\n{text}\n')
        written.append(name)
        monkeypatch.setattr(envs, "__path__", [str(folder)])
        registry.served.cache_clear()
        importlib.invalidate_caches()
        return path

    yield environment
    for name in written:
        sys.modules.pop(f"envs.{name}", None)
    registry.served.cache_clear()


def row_of(name: str, **fields) -> bytes:
    return dump(spelling_rows(1)[0] | {"agent_ref": {"name": name}} | fields)


def test_rows_that_only_compare_are_left_out_where_an_answer_is_alone(
    environment, cfg, tmp_path, capsys
):
    environment("async def score_group(rows, responses): ...", "compare")
    environment("def verify(row, response): return 0", "judged_alone")
    lines = [row_of("compare"), row_of("judged_alone"), row_of("compare")]
    cfg.data.val = write_lines(tmp_path / "val.jsonl", lines)
    assert [row["_line"] for row in load_rows(cfg.data.val, cfg)] == [2]
    left = f"{cfg.data.val}: rows need answers to compare (2 of compare), but data.val_samples = 1"
    assert capsys.readouterr().out == f"{left}: they are not evaluated\n"
    for both in (cfg.data.val, "another.jsonl"):
        cfg.data.train = both
        cfg.data.val_samples = 2
        assert len(load_rows(cfg.data.val, cfg)) == 3
        cfg.data.val_samples = 1
    cfg.data.val = write_lines(tmp_path / "val.jsonl", lines[::2])
    with pytest.raises(InputError, match=re.escape(f"{left}, expected 2 or more")):
        load_rows(cfg.data.val, cfg)


@pytest.mark.parametrize("setting", ["group_size", "data.val_samples"])
def test_rows_that_only_compare_are_not_trained_on_one_answer(environment, cfg, tmp_path, setting):
    """Nor left out of training because the same file validates."""
    environment("async def score_group(rows, responses): ...", "compare")
    cfg.data.train = write_lines(tmp_path / "train.jsonl", [row_of("compare")] * 3)
    if setting == "group_size":
        cfg.group_size = 1
    else:
        cfg.data.val = cfg.data.train
    told = rf"train.jsonl: rows need answers to compare \(3 of compare\), but {setting} = 1"
    with pytest.raises(InputError, match=told):
        load_rows(cfg.data.train, cfg)


@pytest.mark.parametrize(("text", "problem"), [
    ("\nimport no_such_library", r"{path}:3: ModuleNotFoundError: No module named 'no_such_l"),
    ("LIMIT = 1 / 0", r"{path}:2: ZeroDivisionError: division by zero"),
    ("return 5", r"{path}:2: SyntaxError: 'return' outside function"),
    ("def verify(:", r"{path} cannot be read as Python: invalid syntax \(mine.py, line 2\)"),
    ("from envs import Rewards", r"{path}:2: ImportError: cannot import name 'Rewards'"),
    ("raise ValueError('two\\nlines')", r"{path}:2: ValueError: two lines"),
    ("def verfy(row, response): ...", r"{path} defines no reward, expected a function verify\("),
    ("def verify(completions, **_): ...", r"{path} defines verify\(completions, .*, expected v"),
    ("def verify(prompts, completions, a): ...", r"{path} defines verify\(prompts, .*reward for"),
    ("async def verify(completions, a, **_): ...", r"{path} .* expected verify\(row, response\)"),
])  # fmt: skip
def test_a_broken_environment_is_one_line_with_its_place(environment, cfg, tmp_path, text, problem):
    """However many bad rows are allowed: no row is to blame."""
    path = environment(text)
    cfg.data.max_bad_rows = 5
    file = write_lines(tmp_path / "train.jsonl", [row_of("mine")])
    with pytest.raises(InputError, match=f"^error: {problem.format(path=re.escape(str(path)))}"):
        load_rows(file, cfg)
    assert not quarantined(cfg)


def test_a_check_that_raises_names_the_row_and_its_own_line(environment, cfg, tmp_path):
    path = environment("def verify(row, response): ...\ndef check(row):\n    row['level'] + 1")
    lines = [row_of("mine", level=1), row_of("mine"), row_of("mine", level="x")]
    file = write_lines(tmp_path / "train.jsonl", lines)
    with pytest.raises(InputError, match=f"train.jsonl:2: {path}:4: KeyError: 'level'$"):
        load_rows(file, cfg)
    cfg.data.max_bad_rows = 2
    assert [row["_line"] for row in load_rows(file, cfg)] == [1]
    assert [row["line"] for row in quarantined(cfg)] == [2, 3]


def test_only_environments_that_rows_name_are_imported(environment, cfg, tmp_path):
    environment("raise RuntimeError('nobody asked for me')", "unused")
    environment("def verify(row, response): return 1", "used")
    assert len(load_rows(write_lines(tmp_path / "train.jsonl", [row_of("used")]), cfg)) == 1
    assert "envs.used" in sys.modules and "envs.unused" not in sys.modules


def measured(path: str, cfg) -> tuple:
    """Rows, the bytes that they keep, and the most that were held at once."""
    tracemalloc.start()
    try:
        return load_rows(path, cfg), *tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()


def test_a_line_of_50_mb_is_held_three_times_at_most(cfg, tmp_path):
    size = 50_000_000
    path = write_lines(tmp_path / "train.jsonl", [GOOD[:-1] + b', "x": "' + b"x" * size + b'"}'])
    cfg.sampling = Sampling(max_model_len=1 << 26, chat_template_kwargs={})
    (row,), _, peak = measured(path, cfg)
    assert len(row["x"]) == size and peak < 3.2 * size


def test_only_where_rows_begin_is_kept(cfg, tmp_path):
    """500,000 rows of 10 KB take 8 MB; a row is read when it is asked for."""
    every = [row | {"note": "x" * 10_000} for row in spelling_rows(2_000)]
    path = write_lines(tmp_path / "train.jsonl", [b"", *map(dump, every)])
    found, kept, peak = measured(path, cfg)
    assert kept < 200_000 and peak < 2_000_000
    for i in (-1, 0, 7):
        assert found[i] == every[i] | {"_line": i % 2000 + 2}
    assert [row["_line"] for row in found] == list(range(2, 2_002))


def test_a_file_that_changes_under_a_run_is_named(cfg, tmp_path):
    every = [dump(row | {"note": "x" * 10_000}) for row in spelling_rows(3)]
    path = write_lines(tmp_path / "train.jsonl", every)
    found = load_rows(path, cfg)
    other = Path(path).read_bytes().replace(b"spell", b"write")
    Path(path).write_bytes(other)
    with pytest.raises(InputError, match=rf"{path}:3: the file was changed while it was in use"):
        found[2]


def test_a_row_has_the_temperature_of_the_run(cfg, tmp_path):
    """The trainer divides its logits by one temperature."""
    (row,) = spelling_rows(1)
    row["responses_create_params"] |= {"temperature": 1.0}
    assert len(load_rows(write_lines(tmp_path / "good.jsonl", [dump(row)]), cfg)) == 1
    row["responses_create_params"]["temperature"] = 0.6
    told = r":1: responses_create_params\.temperature is 0.6, expected sampling.temperature = 1.0"
    with pytest.raises(InputError, match=told):
        load_rows(write_lines(tmp_path / "hot.jsonl", [dump(row)]), cfg)


def test_a_row_that_asks_for_another_top_p_is_sampled_with_the_run_s_and_counted(
    cfg, tmp_path, capsys
):
    """As in NeMo-RL; rows of its SWE data ask for 0.95."""
    rows = spelling_rows(3)
    rows[0]["responses_create_params"] |= {"top_p": 0.95}
    rows[1]["responses_create_params"] |= {"top_p": 1.0, "top_k": 20}
    path = write_lines(tmp_path / "asking.jsonl", [dump(row) for row in rows])
    assert len(load_rows(path, cfg)) == 3
    printed = capsys.readouterr().out
    assert f"{path}: rows that ask for another top_p: 1; sampling.top_p = 1.0 is used" in printed
    assert "rows that ask for another top_k: 1; sampling.top_k = 0 is used" in printed


def test_a_row_changes_template_variables_and_length_of_answers(tokenizer):
    (row,) = spelling_rows(1)
    own = Sampling(max_response_tokens=100, chat_template_kwargs={"a": 1, "b": 2})
    assert sampling_of(row, own) == own
    variables = {"metadata": {"chat_template_kwargs": '{"b": 3, "c": null}'}}
    row["responses_create_params"] |= variables | {"max_output_tokens": 7}
    merged = {"a": 1, "b": 3, "c": None}
    assert sampling_of(row, own) == Sampling(max_response_tokens=7, chat_template_kwargs=merged)
    row["responses_create_params"]["max_output_tokens"] = 900
    assert sampling_of(row, own).max_response_tokens == 100


def test_a_prompt_of_50_mb_is_refused_before_it_is_tokenised(cfg, tmp_path, monkeypatch):
    monkeypatch.setattr(check_rows, "render", lambda *args: pytest.fail("it was tokenised"))
    row = spelling_rows(1)[0]
    row["responses_create_params"]["input"][0]["content"] = "x" * 50_000_000
    path = write_lines(tmp_path / "train.jsonl", [dump(row)])
    with pytest.raises(InputError, match=r":1: responses_create_params\.input is 500000\d\d char"):
        load_rows(path, cfg)


def test_a_file_without_line_breaks_is_cut(cfg, tmp_path, monkeypatch):
    monkeypatch.setattr(rows, "LONGEST_LINE", 1000)
    cfg.data.max_bad_rows = 5
    fits = GOOD.ljust(999)
    lines = [fits, b"[" * 1001, fits, b"[" * 5005, b"[" * 2002, fits, b"]" * 1_000_000]
    assert [row["_line"] for row in load_rows(write_lines(tmp_path / "a", lines), cfg)] == [1, 3, 6]
    assert [row["line"] for row in quarantined(cfg)] == [2, 4, 5, 7]
    assert {row["reason"] for row in quarantined(cfg)} == {"the line is longer than 1,000 bytes"}


def test_a_prompt_that_the_chat_template_refuses_is_named(cfg, tmp_path):
    template = Path(cfg.model) / "chat_template.jinja"
    template.write_text("{{ raise_exception('roles must alternate') }}")
    cfg.sampling = Sampling(max_model_len=64, chat_template_kwargs={})
    path = write_lines(tmp_path / "train.jsonl", [GOOD])
    with pytest.raises(InputError, match="refused by the chat template: roles must alternate"):
        load_rows(path, cfg)


# --- mutated rows ---------------------------------------------------------------------------------

CONTENT = ("responses_create_params", "input", 0, "content")
WRONG = [None, True, 5, {"x": []}]  # wherever on the way to the content
ODD = [None, True, -1.5, 5, "", "x", [], {}, [[]], {"x": []}, 10**30, ["\x00", {"text": None}]]


def places(value, path=()) -> Iterator[tuple]:
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in items:
        yield (*path, key)
        if isinstance(inner, dict | list):
            yield from places(inner, (*path, key))


def insert(line: bytes, at: int, what: bytes) -> bytes:
    return line[:at] + what + line[at:]


def spoilt(n: random.Random, row: dict, line: bytes) -> bytes:
    """A line that is no row any more."""
    at, end = n.randrange(1, len(line)), line[:-1] + b', "x": '
    kinds = [
        lambda: line[:at],
        lambda: b"\xef\xbb\xbf" + line,
        lambda: insert(line, at, b"\x00"),
        lambda: insert(line, at, n.choice([b"\xff", b"\xc3", b"\xed\xa0\x80", b"\xf8\x88"])),
        lambda: end + n.choice([b"9" * 5000, b"1e999", b"NaN", b"-Infinity", b'"\\udfff"']) + b"}",
        lambda: end + n.choice([b"[", b'{"x":']) * n.choice([20_000] * 19 + [100_000]),
        lambda: b"{" + dump(n.choice(list(row))) + b": 1, " + line[1:],
        lambda: line + n.choice([b",", b" {}", line]),
        lambda: dump(n.choice([*ODD, row["responses_create_params"], [row]])),
        lambda: dump(replaced(row, CONTENT[: n.randint(1, 4)], n.choice(WRONG))),
        lambda: dump(replaced(row, ("agent_ref", "name"), n.choice([*ODD, "maths"]))),
    ]
    return n.choice(kinds)()


def changed(n: random.Random, row: dict, line: bytes) -> bytes:
    """A line that is as good as before."""
    content = n.choice(["x", "\x00\r\t\\\"'", "\U0001f600é", [{"type": "input_text", "text": "x"}]])
    kinds = [
        lambda: line,
        lambda: b" \t" + line + b" \r",
        lambda: json.dumps(row, ensure_ascii=False, indent=None, separators=(",", ":")).encode(),
        lambda: dump(dict(n.sample(list(row.items()), len(row)))),
        lambda: dump(row | {n.choice(["", "x", "_x", "é"]): n.choice(ODD)}),
        lambda: dump(replaced(row, CONTENT, content)),
        lambda: line[:-1] + b', "x": ' + b"[" * 50 + b"]" * 50 + b"}",
        lambda: line[:-1] + b', "x": ' + b"9" * 4000 + b"}",
    ]
    return n.choice(kinds)()


def unsure(n: random.Random, row: dict, line: bytes) -> bytes:
    """A line of which only the reader can tell."""
    at, byte = n.randrange(len(line)), bytes([n.choice([*range(10), *range(11, 256)])])
    path = n.choice(list(places(row)))
    kinds = [
        lambda: dump(replaced(row, path, n.choice(ODD))),
        lambda: line[:at] + byte + line[at + 1 :],
        lambda: line[:at] + line[at + n.randint(1, 9) :],
        lambda: insert(
            line, at, n.choice([b"{", b"]", b'"', b"\\", b",", b"\\u0000", b"\xc2\xa0"])
        ),
    ]
    return n.choice(kinds)()


def real_rows(folder: Path, cfg, tmp_path: Path) -> list[dict]:
    """NeMo-Gym's example rows, as rows of the environments that are here."""
    rows = []
    for path in sorted(folder.glob("*.jsonl")):
        ours = {"agent_ref": {"name": "math"}, "expected_answer": "2"}
        if path.stem == "reasoning_gym":
            ours = {"agent_ref": {"name": "reasoning_gym"}}
        rows += [json.loads(line) | ours for line in path.read_bytes().split(b"\n") if line]
    path = write_lines(tmp_path / "real.jsonl", [dump(row) for row in rows])
    good, _ = read_rows(path, len(rows), cfg)
    assert len(good) > 0.8 * len(rows)
    return [rows[row["_line"] - 1] for row in good]


def test_no_mutated_row_crashes_or_slips_through(cfg, tmp_path):
    n, mutants, expected = random.Random(0), [], []
    bases = real_rows(HERE / "gym_rows", cfg, tmp_path)
    bases += spelling_rows(3 * len(bases))
    for _ in range(MUTANTS):
        kind, row = n.choices([spoilt, changed, unsure, None], [5, 2, 5, 1])[0], n.choice(bases)
        mutants.append(kind(n, row, dump(row)) if kind else n.choice([b"", b" \t", b"\r"]))
        expected.append(kind)
    cfg.data.max_bad_rows = MUTANTS
    began = time.process_time()
    good = load_rows(write_lines(tmp_path / "mutants.jsonl", mutants), cfg)
    seconds = time.process_time() - began
    bad = quarantined(cfg)
    print(f"{MUTANTS} lines: {len(good)} rows, {len(bad)} set aside, {seconds:.1f} s")
    found = {row["_line"]: True for row in good} | {row["line"]: False for row in bad}
    blank = {i for i, line in enumerate(mutants, 1) if not line.decode(errors="replace").strip()}
    assert len(good) + len(bad) + len(blank) == MUTANTS == len(found.keys() | blank)
    for i, kind in enumerate(expected, 1):
        wanted = {spoilt: False, changed: True}.get(kind)
        assert wanted in (None, found.get(i)), (i, mutants[i - 1][:200])
    for row in good:
        assert row == json.loads(mutants[row["_line"] - 1]) | {"_line": row["_line"]}
    for row in bad:
        assert row["file"] == str(tmp_path / "mutants.jsonl") and "\n" not in row["reason"]
        start = mutants[row["line"] - 1].decode(errors="surrogateescape")[:200]
        assert row["text"] == start and 5 < len(row["reason"]) < 400
    assert seconds < 30
