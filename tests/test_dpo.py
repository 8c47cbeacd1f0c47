"""dpo.py: its loss against hand cases, its packing, its layouts, its rows, and one whole run."""

import ast
import json
import math
import os
import random
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import write_rows
from test_docs import first_cells
from test_resume import contents, timeless
from torch import tensor

import dry_run
from core.errors import InputError
from dpo import Batch, Config, Scored, dpo_loss, mean_metrics, pack, plan_pairs
from policy import model_shape
from policy.packing import plan_rows
from rollout.messages import load_tokenizer
from rollout.preference_rows import Pair, Tokens, load_pairs, render_all, tokenize
from runtime.checkpoints.row_scores import Scores
from runtime.reporting.metrics import reduce_stats
from settings import reader
from settings.merging import flatten
from support import forks, shapes
from support.configs import changed
from support.megatron_jobs import compute
from support.program import ROOT, Program
from support.tables import refused


def word_pairs(count: int, seed: int = 0) -> list[dict]:
    """Rows whose chosen answers spell a word backward, and whose rejected ones do not."""
    draw = random.Random(seed)
    words = ["".join(draw.choices("abcdefgh", k=draw.randint(3, 9))) for _ in range(count)]
    return [{"prompt": w, "chosen": w[::-1], "rejected": w[::-1] + "x"} for w in words]


@pytest.fixture
def make(chat_model, tmp_path):
    """A function that makes a small Config, of these rows."""

    def made(rows=None, **fields) -> Config:
        train = write_rows(tmp_path / "pairs.jsonl", rows or word_pairs(32))
        usual = {"run_dir": str(tmp_path / "run"), "model": chat_model, "data": {"train": train}}
        usual |= {"timeouts": {"start": 180.0, "train": 60.0}, "pairs_per_step": 4, "steps": 3}
        usual |= {"lr": 1e-3, "warmup_lr": 1e-3, "warmup_steps": 0, "row_tokens": 64}
        return changed(changed(Config(), activation_checkpointing=False, **usual), **fields)

    return made


def sequence(length: int, start: int, seed: int = 0) -> Tokens:
    ids_T = np.random.default_rng(seed).integers(5, 100, length).astype(np.int32)
    return Tokens(ids_T, start)


def some_pairs(count: int) -> list[Scored]:
    """Pairs of unequal lengths, and what a reference may have said of them."""
    found = []
    for i in range(count):
        pair = Pair(sequence(5 + i, 2, i), sequence(9 - i % 4, 3, 100 + i))
        found.append(Scored(i, pair, (-3.0 - i, -4.0 + i / 7)))
    return found


def batch(lengths: list[int], ref_logps: list[float], planned: int = 1) -> Batch:
    """A row of sequences of so many trained tokens, each behind one of a prompt."""
    seq_T = torch.cat([torch.full((n + 1,), i) for i, n in enumerate(lengths)])
    positions_T = torch.cat([torch.arange(n + 1) for n in lengths])
    ref_logp_S = tensor(ref_logps, dtype=torch.float64)
    return Batch(seq_T + 5, positions_T, seq_T, positions_T > 0, ref_logp_S, planned)


# --- the loss -------------------------------------------------------------------------------------


def test_a_policy_that_is_the_reference_loses_log_2():
    row = batch([2, 3], [-2.0, -3.0])
    loss, stats = dpo_loss(-row.mask_T.float(), row, changed(Config(), sft_weight=0.0))
    assert float(loss) == pytest.approx(0.693147, abs=1e-6)
    assert stats["accuracy"] == stats["rewards_margin_mean"] == 0


def test_two_pairs_by_hand():
    """Gaps of 3 and -1 nats at beta 0.5; chosen answers of -1 and -2 nats a token."""
    row = batch([2, 1, 1, 2], [-4.0, -1.0, -3.0, -6.0], planned=4)
    logp_T = tensor([0, -1, -1, 0, -2.0, 0, -2, 0, -2, -2])
    cfg = changed(Config(), beta=0.5, preference_weight=2.0, sft_weight=0.1)
    loss, stats = dpo_loss(logp_T, row, cfg)
    preference = [math.log1p(math.exp(-1.5)), math.log1p(math.exp(0.5))]
    expected = (2 * sum(preference) + 0.1 * (1 + 2)) / 4
    assert float(loss) == pytest.approx(expected, rel=1e-12)
    found = mean_metrics(reduce_stats([stats]))
    assert found == {
        "loss": pytest.approx(2 * expected),  # a mean over the two pairs that are here
        "preference_loss": pytest.approx(sum(preference) / 2),
        "sft_loss": pytest.approx(1.5),
        "accuracy": 0.5,
        "rewards_chosen_mean": pytest.approx(1.5),
        "rewards_rejected_mean": pytest.approx(0.5),
        "rewards_margin_mean": pytest.approx(1.0),
        "num_valid_samples": 2,
        "train_tokens": 10,
        "train_keys": 3 + 1 + 1 + 3,
    }


def test_gradients_are_those_of_finite_differences():
    row = pack(some_pairs(3), 5)
    draw = torch.Generator().manual_seed(0)
    logp_T = -torch.rand(len(row.tokens_T), generator=draw, dtype=torch.float64)
    cfg = changed(Config(), beta=0.3, preference_weight=0.7, sft_weight=0.2)

    def loss(x_T):
        return dpo_loss(x_T, row, cfg).loss

    assert torch.autograd.gradcheck(loss, logp_T.requires_grad_(), eps=1e-6, atol=1e-9)
    loss(logp_T).backward()
    assert bool((logp_T.grad[~row.mask_T] == 0).all()) and bool((logp_T.grad != 0).any())


def test_thousands_of_nats_leave_a_gap_of_one():
    """Sums in float32 would be off by more than what the answers differ in."""
    n = 100_000
    logp_T = torch.cat([torch.zeros(1), torch.full((n,), -1.1)] * 2)
    total = float(logp_T[1 : n + 1].double().sum())
    stats = dpo_loss(logp_T, batch([n, n], [total - 1.0, total]), Config()).stats
    assert float(stats["rewards_margin_mean"]) == pytest.approx(1.0, abs=1e-9)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_seen(value):
    stats = dpo_loss(torch.zeros(4), batch([1, 1], [value, value]), Config()).stats
    assert not math.isfinite(reduce_stats([stats])["loss"])


# --- packing --------------------------------------------------------------------------------------


def test_a_row_of_pairs_and_an_empty_one():
    scored = some_pairs(2)
    row = pack(scored, 7)
    lengths = [len(of.ids_T) for one in scored for of in one.pair]
    assert torch.bincount(row.seq_T).tolist() == lengths
    assert row.positions_T.tolist() == [i for n in lengths for i in range(n)]
    assert row.mask_T.sum() == sum(n - s for n, s in zip(lengths, (2, 3, 2, 3), strict=True))
    assert not row.mask_T[row.positions_T == 0].any()
    assert row.ref_logp_S.tolist() == [value for one in scored for value in one.ref_logps]
    empty = pack([], 7)
    logp_T = torch.zeros(1, requires_grad=True)
    loss, stats = dpo_loss(logp_T, empty, Config())
    loss.backward()
    assert loss.item() == 0 and stats["num_valid_samples"] == 0 and not logp_T.grad.any()


def test_a_pair_is_in_one_row_and_all_replicas_have_as_many(make, monkeypatch):
    pairs = [one.pair for one in some_pairs(13)]
    monkeypatch.setattr(model_shape, "even_length", lambda model, frozen: 20)
    plan = plan_pairs(pairs, make(row_tokens=32, ranks=3))
    assert plan == plan_rows([pair.tokens for pair in pairs], 32, 3, 40)
    assert sorted(i for of in plan for row in of for i in row) == list(range(13))
    assert len({len(of) for of in plan}) == 1
    assert all(sum(pairs[i].tokens for i in row) <= 32 for of in plan for row in of)


def test_packing_changes_neither_loss_nor_metrics():
    scored = some_pairs(6)
    logps = {i: -torch.rand(one.pair.tokens) for i, one in enumerate(scored)}

    def total(rows: list[list[int]]) -> dict[str, float]:
        stats = []
        for row in rows:
            found = pack([scored[i] for i in row], 6)
            stats.append(dpo_loss(torch.cat([logps[i] for i in row]), found, Config()).stats)
        return reduce_stats(stats)

    one = total([[0, 1, 2, 3, 4, 5]])
    for rows in ([[0], [1], [2], [3], [4], [5]], [[5, 0], [3, 1, 2], [4]]):
        assert total(rows) == pytest.approx(one, rel=1e-12)


# --- layouts --------------------------------------------------------------------------------------

MEGATRON = {"kind": "megatron"}
LAYOUTS = {
    "one": (1, {}),
    "short rows": (1, {"row_tokens": 64}),
    "megatron": (1, MEGATRON),
    "two": (2, {"ranks": 2}),
    "tp2": (2, MEGATRON | {"ranks": 2, "tp": 2}),
    "cp2": (2, MEGATRON | {"ranks": 2, "cp": 2}),
    "pp2": (2, MEGATRON | {"ranks": 2, "pp": 2}),
    "dp2": (2, MEGATRON | {"ranks": 2}),
    "nan": (2, {"ranks": 2}),
}
together = pytest.mark.xdist_group("layouts of DPO")
LOSSES = ("loss", "sft_loss", "preference_loss", "accuracy", "rewards_margin_mean")


@pytest.fixture(scope="module")
def layouts(chat_model, tmp_path_factory) -> dict[str, dict]:
    """Three steps on twelve pairs under every layout."""
    folder = tmp_path_factory.mktemp("layouts")
    pairs = write_rows(folder / "pairs.jsonl", word_pairs(12))
    # A step proportional to its gradient does not blow up what is rounding.
    usual = {"lr": 1e-2, "warmup_lr": 1e-2, "warmup_steps": 0, "max_grad_norm": 1e-7}
    usual |= {"row_tokens": 128, "activation_checkpointing": False}
    jobs = [
        {"name": name, "world": world, "model": chat_model, "pairs": pairs, "fields": usual | more}
        | ({"poison": math.nan} if name == "nan" else {})
        for name, (world, more) in LAYOUTS.items()
    ]
    found = compute(jobs, folder, "dpo_ranks.py")
    return {name: found(name) for name in LAYOUTS}


@pytest.mark.slow
@together
@pytest.mark.parametrize("name", [name for name in LAYOUTS if name not in ("one", "nan")])
def test_layouts_and_packing_train_the_same(layouts, name):
    found, plain = layouts[name], layouts["one"]
    assert np.allclose(found["scores"], plain["scores"], rtol=0, atol=1e-4)
    for ours, theirs in zip(found["steps"], plain["steps"], strict=True):
        for key in LOSSES:
            assert ours[key] == pytest.approx(theirs[key], abs=1e-5), key
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-5)
    for key in LOSSES:
        means = [mean_metrics(one["evaluation"])[key] for one in (found, plain)]
        assert means[0] == pytest.approx(means[1], abs=1e-5), key
    assert found["weights"].keys() == plain["weights"].keys() and not found["unchanged"]
    for key, value in found.get("gradients", {}).items():
        assert torch.allclose(value, plain["gradients"][key], rtol=1e-4, atol=1e-6), key
    for key, value in plain["weights"].items():
        assert torch.allclose(found["weights"][key], value, rtol=0, atol=1e-5), key


@pytest.mark.slow
@together
def test_the_first_loss_is_that_of_the_reference_and_falls(layouts):
    steps = layouts["one"]["steps"]
    assert steps[0]["preference_loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert steps[2]["loss"] < steps[1]["loss"] < steps[0]["loss"]


@pytest.mark.slow
@together
def test_a_loss_that_is_not_finite_ends_all_ranks_before_any_weight_changes(layouts):
    assert layouts["nan"]["errors"] == ["the loss of 12 pairs is nan"] * 2
    assert layouts["nan"]["unchanged"]


# --- rows -----------------------------------------------------------------------------------------

USER = {"role": "user", "content": "hi"}
SYSTEM = {"role": "system", "content": "be"}


def bot(text: str) -> dict:
    return {"role": "assistant", "content": text}


def shown(tokens: Tokens, cfg: Config) -> list[str]:
    """What is asked and what is trained, as text."""
    cut = tokens.ids_T[: tokens.start], tokens.ids_T[tokens.start :]
    return [load_tokenizer(cfg.model).decode(part) for part in cut]


@pytest.mark.parametrize("row", [
    {"prompt": "hi", "chosen": "a", "rejected": "b"},
    {"prompt": [USER], "chosen": [bot("a")], "rejected": [bot("b")]},
    {"chosen": [USER, bot("a")], "rejected": [USER, bot("b")], "score_chosen": 9},
    {"prompt": "hi", "chosen": [USER, bot("a")], "rejected": [USER, bot("b")]},
])  # fmt: skip
def test_all_forms_of_a_row_are_the_same_pair(make, row):
    cfg = make([row])
    (pair,) = render_all(load_pairs(cfg.data.train, cfg), [0], cfg)
    assert [shown(of, cfg) for of in pair] == [
        ["<user>hi<bot>", "a<eos>"],
        ["<user>hi<bot>", "b<eos>"],
    ]


def test_the_prompt_is_all_that_both_conversations_begin_with(make):
    turns = [SYSTEM, USER, bot("a"), USER]
    cfg = make()
    pair = tokenize({"chosen": [*turns, bot("b")], "rejected": [*turns, bot("c")]}, cfg)
    asked = "<user>be<user>hi<bot>a<eos><user>hi<bot>"
    assert [shown(of, cfg) for of in pair] == [[asked, "b<eos>"], [asked, "c<eos>"]]


def test_tools_are_shown_and_calls_are_answers(make):
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    call = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
    rejected = [{"role": "assistant", "content": None, "tool_calls": [call]}]
    cfg = make(row_tokens=512)
    row = {"prompt": "hi", "chosen": "a", "rejected": rejected}
    plain, given = tokenize(row, cfg), tokenize(row | {"tools": [tool]}, cfg)
    assert shown(plain.rejected, cfg)[1] == shown(given.rejected, cfg)[1] == "[f]<eos>"
    assert '"name": "f"' in shown(given.chosen, cfg)[0]
    assert "name" not in shown(plain.chosen, cfg)[0]


GOOD = {"prompt": "hi", "chosen": "a", "rejected": "b"}
BAD = {
    "the row is [], expected a JSON object": [],
    "rejected is missing or null, expected text or a list": {"prompt": "hi", "chosen": "a"},
    "chosen is 5, expected text or a list of messages": GOOD | {"chosen": 5},
    "chosen is '', expected text or a list of messages, not empty": GOOD | {"chosen": ""},
    "chosen[0].role is 'bot', expected one of: ": GOOD | {"chosen": [bot("a") | {"role": "bot"}]},
    "chosen[0].content is 5, expected text": GOOD | {"chosen": [bot(5)]},
    "prompt is missing or null, expected a question": {"chosen": "a", "rejected": "b"},
    "rejected is 'a', expected an answer other than chosen": GOOD | {"rejected": "a"},
    "chosen has assistant, user, expected one assistant message after": GOOD
    | {"chosen": [bot("a"), USER]},
    "rejected has user, assistant, expected one assistant message after the common": {
        "chosen": [SYSTEM, bot("a")],
        "rejected": [SYSTEM, USER, bot("b")],
    },
    "tools[0].type is 'tool', expected 'function'": GOOD | {"tools": [{"type": "tool"}]},
    "chosen and rejected are 91 tokens long, expected at most policy.row_tokens = 64": GOOD
    | {"chosen": "a" * 80},
}


@pytest.mark.parametrize("message", BAD)
def test_bad_rows_are_refused_by_file_line_and_field(make, message, capsys):
    cfg = make([GOOD, BAD[message]])
    with pytest.raises(InputError) as stop:
        load_pairs(cfg.data.train, cfg)
    assert str(stop.value).startswith(f"error: {cfg.data.train}:2: {message}")
    rows = load_pairs(cfg.data.train, changed(cfg, max_bad_rows=1))
    assert len(rows) == 1 and "1 bad rows go to" in capsys.readouterr().out


def test_a_file_without_pairs_is_refused(make, tmp_path):
    for text in ("", "\n", "{}\n"):
        cfg = make(max_bad_rows=1)
        Path(cfg.data.train).write_text(text)
        with pytest.raises(InputError, match="holds no good rows, expected at least one"):
            load_pairs(cfg.data.train, cfg)


test_settings_that_cannot_work_are_refused = refused(
    lambda fields: changed(Config(), **fields),
    ({"preference_weight": 0.0, "sft_weight": 0.0}, "nothing to learn"),
    ({"kind": "megatron", "replay_routing": True}, "needs an engine"),
)


# --- the reference --------------------------------------------------------------------------------


def test_scores_are_kept_by_model_and_rows(make, tmp_path):
    cfg = make()
    Path(cfg.run_dir).mkdir()
    rows = load_pairs(cfg.data.train, cfg)
    values = [[-1.0 / 3, -2e-9], [-3.0, -4.0]]
    Scores(cfg, rows).add(4, values)
    again = Scores(cfg, rows)
    assert again.values == {4: values[0], 5: values[1]}
    assert again.lacks(range(4, 7)) and not again.lacks(range(4, 6))
    other = changed(cfg, chat_template_kwargs={"enable_thinking": False})
    assert Scores(other, rows).values == {}
    rows.checksums[0] ^= 1
    assert Scores(cfg, rows).values == {}


def test_a_reference_that_is_not_finite_is_named_by_its_row(make):
    cfg = make()
    rows = load_pairs(cfg.data.train, cfg)
    with pytest.raises(FloatingPointError, match=r"pairs.jsonl:3: .* are \[nan, 0.0\]"):
        Scores(cfg, rows).add(1, [[0.0, 0.0], [math.nan, 0.0]])
    assert not (Path(cfg.run_dir) / "reference.jsonl").exists()


# --- a whole run ----------------------------------------------------------------------------------


KILLS = int(os.environ.get("GRPO_KILLS", 1))


@pytest.fixture
def calm(make, tmp_path) -> Program:
    """A finished run that nothing disturbed, started as the page says."""
    val = write_rows(tmp_path / "val.jsonl", word_pairs(6, seed=1))
    fields = {"steps": 2 + KILLS, "save_period": 1, "keep_last": 99, "val_period": 2}
    fields |= {"data": {"val": val}, "row_tokens": 128}
    cfg = make(run_dir=str(tmp_path / "calm_dpo"), **fields)
    program = Program(cfg, script="launch/local.sh", root=forks.copied(tmp_path / "repo"))
    program.cfg = cfg
    return program.succeeds()


@pytest.mark.e2e
@pytest.mark.smoke
def test_a_run_writes_the_metrics_of_the_page_and_its_report(calm):
    lines = [timeless(json.loads(line)) for line in (calm.folder / "metrics.jsonl").open()]
    assert lines[0]["validation_preference_loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert metric_names(lines) == glossary()
    assert (calm.folder / "report.html").is_file() and "accuracy" in calm.told()


@pytest.mark.e2e
@pytest.mark.long
def test_a_run_killed_after_its_steps_equals_the_undisturbed_run(calm, tmp_path):
    """SIGKILL after a checkpoint: weights, moments and metrics are the same. GRPO_KILLS=5: more."""
    cfg = changed(calm.cfg, run_dir=str(tmp_path / "killed"))
    scores = Path(cfg.run_dir) / "reference.jsonl"
    for k in range(1, 1 + KILLS):
        program = Program(cfg, "--resume", "auto", script="dpo.py")
        program.wait_until((program.folder / f"step_{k:06d}" / "complete.json").exists)
        program.stop()
    known = scores.read_bytes()
    program = Program(cfg, "--resume", "auto", script="dpo.py").succeeds()
    assert scores.read_bytes() == known == (calm.folder / "reference.jsonl").read_bytes()
    for step in range(1, 3 + KILLS):
        ours, theirs = (contents(f.folder / f"step_{step:06d}") for f in (program, calm))
        assert ours.keys() == theirs.keys() and int(ours["/updates"]) == step
        assert [key for key, value in theirs.items() if not torch.equal(ours[key], value)] == []
    lines = [
        [timeless(json.loads(line)) for line in (f.folder / "metrics.jsonl").open()]
        for f in (program, calm)
    ]
    assert [strip(line) for line in lines[0]] == [strip(line) for line in lines[1]]


def strip(line: dict) -> dict:
    return {k: v for k, v in line.items() if not k.endswith(("_seconds", "_per_second"))}


CLOCKS = ("second", "seconds", "per_gpu", "mfu")


def metric_names(lines: list[dict]) -> set[str]:
    """Those of a run's lines, but for what a clock says; validation has the same names."""
    names = {name.removeprefix("validation_") for line in lines for name in line}
    return {n for n in names if n != "step" and not n.endswith(CLOCKS)}


def glossary() -> set[str]:
    """The metrics that docs/dpo.md explains, but for what a clock says."""
    text = (ROOT / "docs/dpo.md").read_text()
    (section,) = re.findall(r"^## Metrics$([\s\S]*?)^## ", text, re.M)
    return {name for name in first_cells(section) if not name.endswith(CLOCKS)}


def test_the_dry_run_counts_pairs_and_finds_what_is_wrong(make):
    cfg = make()
    text = dry_run.explain(cfg, Config)
    assert "32 pairs" in text and "engine" not in text and "everything fits" in text
    Path(cfg.data.train).write_text("{}\n")
    text = dry_run.explain(cfg, Config)
    assert f"PROBLEM: {cfg.data.train}:1: chosen is missing or null" in text


def test_the_published_run_is_that_of_the_page_and_fits_its_gpus(tmp_path, monkeypatch):
    cfg = reader.read(Config, ROOT / "configs/nano_dpo.py")
    section = (ROOT / "docs/dpo.md").read_text().partition("| setting | `nano_dpo` |")[2]
    values = dict(re.findall(r"^\| `([\w.]+)` \| `([^`]+)` \| report \|$", section, re.M))
    assert len(values) == 6
    for name, value in values.items():
        assert flatten(cfg)[name] == ast.literal_eval(value), name
    monkeypatch.setattr(dry_run, "isfile", lambda path: True)
    model = shapes.write("models/nano_sft", tmp_path / "nano")
    told = dry_run.explain(changed(cfg, model=model, command={"gpu": "h100"}), Config)
    assert "PROBLEM" not in told and "everything fits" in told, told
    assert "nodes of 8: 4" in told
