"""The training order of a curriculum, measured on pass rates that are made up."""

import collections
import json
from pathlib import Path

import numpy as np
import pytest
from conftest import write_rows

import data_prep
from core.errors import InputError
from support.blends import math_row
from support.tables import table

CASES = table(Path(__file__).with_name("cases.txt"))

BATCH = 128


def made_up(domains: dict[str, tuple[int, float, float]]) -> list[dict]:
    """Rows whose chances are beta distributed and whose pass rates are of eight samples."""
    random = np.random.default_rng(0)
    rows = []
    for name, (count, a, b) in domains.items():
        for rate in random.binomial(8, random.beta(a, b, count)) / 8:
            rows.append(math_row(len(rows), dataset=name, pass_rate=float(rate)))
    return [rows[i] for i in random.permutation(len(rows))]


def arranged(folder: Path, rows: list[dict], *words: str) -> list[dict]:
    source = write_rows(folder / "in.jsonl", rows)
    size = ("--prompts_per_step", str(BATCH))
    data_prep.main(["curriculum", source, str(folder / "out.jsonl"), *size, *words])
    return [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]


def line(rows: list[dict]) -> tuple[float, float, float]:
    """First and last value of the line through the batches' mean pass rates, and its R2."""
    whole = len(rows) // BATCH
    mean_B = np.array([row["pass_rate"] for row in rows[: whole * BATCH]])
    mean_B = mean_B.reshape(whole, BATCH).mean(1)
    x = np.arange(whole)
    slope, start = np.polyfit(x, mean_B, 1)
    r2 = 1 - ((mean_B - start - slope * x) ** 2).sum() / ((mean_B - mean_B.mean()) ** 2).sum()
    return start, start + slope * (whole - 1), r2


DOMAINS = {
    "even": {"a": (12_000, 1, 1)},
    "all or nothing": {"a": (12_000, 0.3, 0.3)},
    "hard": {"a": (12_000, 0.5, 2)},
    "three": {"a": (7_000, 1, 1), "b": (4_000, 0.5, 1), "c": (1_000, 3, 2)},
    "many": {f"d{i}": (4_000 * 3 // (i + 4), 1, 1 + i % 3) for i in range(37)},
}


@pytest.mark.parametrize("name", DOMAINS)
def test_the_mean_pass_rate_falls_linearly_and_the_mix_stays(tmp_path, name):
    rows = made_up(DOMAINS[name])
    kept = [row for row in rows if row["pass_rate"] < 1]
    out = arranged(tmp_path, rows)
    assert sorted(map(json.dumps, out)) == sorted(map(json.dumps, kept)), "each row exactly once"
    first, last, r2 = line(out)
    mean = np.mean([row["pass_rate"] for row in kept])
    shares = collections.Counter(row["dataset"] for row in kept)
    batches = [out[i : i + BATCH] for i in range(0, len(out) - BATCH + 1, BATCH)]
    off = max(
        abs(sum(row["dataset"] == domain for row in batch) - BATCH * count / len(kept))
        for domain, count in shares.items()
        for batch in batches
    )
    print(f"{name}: {first:.3f} to {last:.3f}, R2 {r2:.4f}, off by {off:.2f} of {BATCH} rows")
    assert first - last == pytest.approx(0.3, abs=0.01)
    assert first == pytest.approx(mean + 0.15, abs=0.01)
    assert r2 > (0.95 if len(shares) > 9 else 0.99) and off < 2
    for domain in shares:
        own = [row for row in out if row["dataset"] == domain]
        if len(own) > 30 * BATCH:
            start, end, r2 = line(own)
            assert r2 > 0.98 and start - end == pytest.approx(0.3, abs=0.02)


def test_each_batch_holds_many_pass_rates_around_its_mean(tmp_path):
    """A Gaussian, no sorting: the last batches hold easy rows, the first ones hard rows."""
    out = arranged(tmp_path, made_up({"a": (12_000, 1, 1)}))
    rates = np.array([row["pass_rate"] for row in out])
    for batch in (rates[:BATCH], rates[-BATCH:]):
        assert len(set(batch)) == 8 and batch.std() > 0.2


def test_rows_that_cannot_fall_as_far_fall_as_far_as_they_can(tmp_path):
    domains = {"narrow": (6_000, 60, 60), "never": (600, 1e-9, 1), "rare": (3, 1, 1)}
    rows = [row for row in made_up(domains) if row["pass_rate"] < 1]
    out = arranged(tmp_path, rows)
    assert len(out) == len(rows)
    first, last, _ = line([row for row in out if row["dataset"] == "narrow"])
    whole = sorted((row["pass_rate"] for row in rows if row["dataset"] == "narrow"), reverse=True)
    most = np.mean(whole[:BATCH]) - np.mean(whole[-BATCH:])
    assert 0.25 < first - last < most


@pytest.mark.parametrize("fall", [0.0, 0.1])
def test_the_fall_is_chosen(tmp_path, fall):
    out = arranged(tmp_path, made_up({"a": (8_000, 1, 1)}), "--fall", str(fall))
    first, last, _ = line(out)
    assert first - last == pytest.approx(fall, abs=0.01)


def test_the_same_input_gives_the_same_bytes_and_lines_stay_as_they_are(tmp_path):
    rows = made_up({"a": (400, 1, 1), "b": (100, 1, 1)})
    arranged(tmp_path, rows)
    before = (tmp_path / "out.jsonl").read_bytes()
    arranged(tmp_path, rows)
    assert (tmp_path / "out.jsonl").read_bytes() == before
    lines = (tmp_path / "in.jsonl").read_text().splitlines()
    assert set(before.decode().splitlines()) <= set(lines)


def test_rows_always_solved_and_without_a_pass_rate_are_dropped_and_counted(tmp_path, capsys):
    rows = [math_row(i, pass_rate=rate) for i, rate in enumerate([0, 1, 0.5, 1.0, None, 0.25])]
    del rows[-1]["dataset"]
    path = tmp_path / "in.jsonl"
    write_rows(path, rows)
    path.write_text("\n\n" + path.read_text() + " \n")
    out = tmp_path / "out.jsonl"
    data_prep.main(["curriculum", str(path), str(out), "--prompts_per_step", "2"])
    kept = [json.loads(row)["pass_rate"] for row in out.read_text().split("\n") if row]
    assert sorted(kept) == [0, 0.25, 0.5]
    text = capsys.readouterr().out
    assert "dropped: 2 rows always solved, 1 without a pass rate" in text
    assert "2 batches of 2 domains" in text


@pytest.mark.parametrize(("words", "rates", "message"), CASES["curriculum"])
def test_bad_input_is_named_and_leaves_nothing(tmp_path, rates, words, message):
    with pytest.raises(InputError, match=message):
        arranged(tmp_path, [math_row(i, pass_rate=rate) for i, rate in enumerate(rates)], *words)
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]
