"""Checkpoint folders, run folders, saved groups: whole or not there, one owner, nothing twice."""

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envs.episode import Sample, Turn, describe, stitch
from grpo_async import Config, Run
from runtime import checkpoints, metrics, modes
from runtime.archive import read_groups, write_groups
from runtime.config import InputError
from runtime.log import append_to
from runtime.metrics import mean_metrics, mismatch_rows, mismatch_table, validation_metrics
from runtime.waits import within

ROOT = Path(__file__).resolve().parents[2]


def write_checkpoint(run_dir: Path, step: int) -> Path:
    """A small complete checkpoint."""
    aside = run_dir / f"step_{step:06d}.partial"
    (aside / "policy").mkdir(parents=True)
    (aside / "hf").mkdir()
    (aside / "policy" / "__0_0.distcp").write_bytes(os.urandom(5000))
    (aside / "hf" / "model.safetensors").write_bytes(b"weights")
    (aside / "state.json").write_text(json.dumps({"version": step}))
    folder = run_dir / f"step_{step:06d}"
    files = checkpoints.sums(str(aside), 0, 2) | checkpoints.sums(str(aside), 1, 2)
    checkpoints.commit(str(aside), str(folder), files)
    return folder


def damaged(folder: Path) -> list[str]:
    """What two ranks find together."""
    return [d for r in range(2) if (d := checkpoints.damage(str(folder), r, 2))]


def test_a_whole_checkpoint_is_whole(tmp_path):
    folder = write_checkpoint(tmp_path, 3)
    assert not damaged(folder) and not list(tmp_path.glob("*.partial"))
    assert checkpoints.newest_first(str(tmp_path)) == [folder]


@pytest.mark.parametrize("name", ["policy/__0_0.distcp", "state.json", "complete.json"])
@pytest.mark.parametrize("kind", ["truncated", "flipped", "absent", "empty"])
def test_damage_is_found_and_names_the_file(tmp_path, name, kind):
    folder = write_checkpoint(tmp_path, 3)
    path = folder / name
    content = path.read_bytes()
    if kind == "absent":
        path.unlink()
    elif kind == "flipped":
        middle = len(content) // 2
        path.write_bytes(content[:middle] + bytes([content[middle] ^ 4]) + content[middle + 1 :])
    else:
        path.write_bytes(content[: len(content) // 2] if kind == "truncated" else b"")
    told = " ".join(damaged(folder))
    assert told and (Path(name).name in told or name == "complete.json")


def test_one_that_was_being_written_is_not_seen(tmp_path):
    write_checkpoint(tmp_path, 3)
    (tmp_path / "step_000004.partial").mkdir()
    (tmp_path / "step_000005").mkdir()  # renamed, not yet marked
    assert [f.name for f in checkpoints.newest_first(str(tmp_path))] == ["step_000003"]


def test_the_newest_by_number_comes_first(tmp_path):
    for step in (9, 1_000_001, 10):
        write_checkpoint(tmp_path, step)
    found = [checkpoints.step_of(f) for f in checkpoints.newest_first(str(tmp_path))]
    assert found == [1_000_001, 10, 9]


def test_pruning_keeps_the_newest_and_all_exports(tmp_path):
    for step in range(1, 5):
        write_checkpoint(tmp_path, step)
    checkpoints.prune(str(tmp_path), 2)
    assert [checkpoints.step_of(f) for f in checkpoints.newest_first(str(tmp_path))] == [4, 3]
    assert [p.name for p in (tmp_path / "step_000001").iterdir()] == ["hf"]
    assert (tmp_path / "step_000001" / "hf" / "model.safetensors").read_bytes() == b"weights"


def ask(run_dir: Path, **fields) -> SimpleNamespace:
    asked = {"resume": "", "export": 0, "eval_only": False, "replay": ""}
    return SimpleNamespace(run_dir=str(run_dir), **asked | fields)


@pytest.mark.slow
def test_two_runs_never_share_a_folder(tmp_path):
    program = (
        "import sys; sys.path.insert(0, '.')\n"
        "from runtime import checkpoints; import time; from types import SimpleNamespace\n"
        f"c = SimpleNamespace(run_dir={str(tmp_path)!r}, replay='', resume='', export=0)\n"
        "lock = checkpoints.claim(c); print('mine', flush=True); time.sleep(60)"
    )
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as first:
        try:
            assert first.stdout.readline() == "mine\n"
            with pytest.raises(InputError, match=f"in use by process {first.pid} on "):
                checkpoints.claim(ask(tmp_path))
            with pytest.raises(InputError, match="in use"):
                checkpoints.claim(ask(tmp_path, resume="auto"))
        finally:
            first.kill()
    checkpoints.claim(ask(tmp_path)).close()  # a dead owner holds nothing


def test_a_folder_with_a_run_is_not_taken_for_an_empty_one(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(InputError, match="--resume auto"):
        checkpoints.claim(ask(tmp_path))
    checkpoints.claim(ask(tmp_path, resume="auto")).close()


def test_a_folder_that_holds_but_a_checkpoint_is_not_empty(tmp_path):
    write_checkpoint(tmp_path, 3)
    with pytest.raises(InputError, match="--resume auto"):
        checkpoints.claim(ask(tmp_path))
    checkpoints.claim(ask(tmp_path, resume="auto")).close()


def test_the_checkpoint_that_is_asked_for_must_be_one(tmp_path):
    with pytest.raises(InputError, match="complete.json"):
        checkpoints.candidates(ask(tmp_path, resume=str(tmp_path)))
    folder = write_checkpoint(tmp_path, 7)
    assert checkpoints.candidates(ask(tmp_path, resume=str(folder))) == [str(folder)]
    assert checkpoints.candidates(ask(tmp_path, resume="auto")) == [str(folder)]
    assert checkpoints.candidates(ask(tmp_path)) == []


def test_a_checkpoint_of_another_folder_does_not_overwrite_a_run(tmp_path):
    other, folder = tmp_path / "a", tmp_path / "b"
    folder.mkdir()
    (folder / "metrics.jsonl").write_text('{"step": 1}\n')
    saved = write_checkpoint(other, 100)
    with pytest.raises(InputError, match="holds a run already"):
        checkpoints.claim(ask(folder, resume=str(saved)))
    (other / "metrics.jsonl").write_text('{"step": 1}\n')
    checkpoints.claim(ask(other, resume=str(saved))).close()


ROWS = [{"_line": i + 1, "question": i} for i in range(10)]


def resumable(position: int = 4, **fields) -> tuple[dict, SimpleNamespace]:
    """What a run has saved that gave out so many of ROWS, and that run."""
    saved = {"prompts_per_step": 8, "group_size": 16, "train_data": "a.jsonl", "max_lag": 1}
    saved |= {"replay_routing": False, "replay": ""}
    run = SimpleNamespace(cfg=SimpleNamespace(**saved | fields), rows=ROWS)
    prompt = checkpoints.fingerprint(run, position)
    return {"config": saved, "folder": "x", "position": position, "prompt": prompt}, run


def test_another_schedule_is_refused():
    checkpoints.compare(*resumable())
    changes = {"prompts_per_step": 4, "group_size": 8, "train_data": "b.jsonl", "max_lag": 0}
    changes |= {"replay_routing": True, "replay": "collected"}
    for name, value in changes.items():
        with pytest.raises(InputError, match=name):
            checkpoints.compare(*resumable(**{name: value}))


@pytest.mark.parametrize(
    ("rows", "position", "goes_on"),
    [
        (ROWS, 23, True),
        ([row | {"_line": row["_line"] + 1} for row in ROWS], 4, True),  # after a blank line
        (ROWS + ROWS[:1], 4, True),  # behind what was used
        (ROWS + ROWS[:1], 23, False),  # it was read twice: what came third is another row now
        (ROWS[:2] + ROWS[3:], 4, False),
        (ROWS[:1] * 2 + ROWS[1:], 4, False),
        (ROWS[::-1], 4, False),
    ],
)
def test_a_data_file_that_has_shifted_is_refused(rows, position, goes_on):
    state, run = resumable(position)
    run.rows = rows
    if goes_on:
        return checkpoints.compare(state, run)
    with pytest.raises(InputError, match=f"'a.jsonl': prompt {position} is another one than x was"):
        checkpoints.compare(state, run)
    return None


def test_rewinding_takes_back_what_came_after(tmp_path):
    """Of each file what the checkpoint's time has left, and evaluations that ended, whole."""

    def text(name: str, values: list) -> str:
        return "".join(json.dumps({name: value}) + "\n" for value in values)

    def told(name: str) -> str:
        return (tmp_path / f"{name}.jsonl").read_text()

    evaluated = '{"step": 2, "validation_reward": 0.5}\n'
    for name, line in (("metrics", evaluated), ("mismatch", "")):
        content = text("step", [1, 2]) + line + text("step", [3, 4]) + '{"step": 5, "cu'
        (tmp_path / f"{name}.jsonl").write_text(content)
    order = ["val-0-1", 0, 1, 3, 2, 5, "val-2-0", 4, 6, "val-3-0"]
    (tmp_path / "rollouts.0.jsonl").write_text(text("slot", order) + '{"slot": 7, "cut')
    drops = [(5, 3), (5, 5), (6, 7), (5, 6), (7, 8), ("val-2-1", 1), ("val-3-1", 1)]
    drops = [json.dumps({"slot": slot, "prompt": prompt}) + "\n" for slot, prompt in drops]
    (tmp_path / "dropped.jsonl").write_text("".join(drops))
    (tmp_path / "samples").mkdir()
    for step in (2, 3):
        (tmp_path / f"samples/step_{step:06d}.npz").touch()
    state = {"version": 2, "ready": [4], "position": 8, "in_flight": [[5, 6], [6, 7]]}
    state["config"] = {"prompts_per_step": 2}
    for _ in range(2):  # it may be killed and do it again
        assert checkpoints.rewind(str(tmp_path), state) == 2
        assert told("metrics") == told("mismatch") + evaluated == text("step", [1, 2]) + evaluated
        kept = ["val-0-1", 0, 1, 3, 2, "val-2-0", 4]
        assert told("rollouts.0") == text("slot", kept)
        assert told("dropped") == drops[0] + drops[1] + drops[5]
        assert [path.name for path in tmp_path.glob("samples/*")] == ["step_000002.npz"]
    (tmp_path / "metrics.jsonl").write_text(text("step", [1, 2]))  # killed as it evaluated 2
    assert checkpoints.rewind(str(tmp_path), state) == -1
    assert told("rollouts.0") == text("slot", [0, 1, 3, 2, 4])
    assert checkpoints.rewind(str(tmp_path), {}) == -1  # from the start again
    assert told("rollouts.0") == told("dropped") == told("metrics") == ""


@pytest.fixture
def small_disk(tmp_path):
    """A file system of half a megabyte."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("only root may mount a small file system")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk_is_told_and_leaves_the_last_checkpoint(small_disk):
    folder = write_checkpoint(small_disk, 1)
    sample = make_sample(np.random.default_rng(0), 20_000)
    with pytest.raises(OSError, match="No space left"):
        write_groups(str(small_disk / "groups.npz"), [(0, 0, 1)], [], [sample] * 4)
    assert not (small_disk / "groups.npz").exists() and not damaged(folder)


# --- saved groups ---------------------------------------------------------------------------------


def make_sample(random, tokens: int, env: str = "", **fields) -> Sample:
    return Sample(
        random.integers(0, 1000, tokens).astype(np.int32),
        random.random(tokens) < 0.5,
        -random.random(tokens).astype(np.float32),
        random.integers(-1, 9, tokens).astype(np.int32),
        random.random(tokens) < 0.1,
        **{"truncated": False, "reward": float(random.normal()), "env": env} | fields,
    )


@settings(max_examples=40, deadline=None)
@given(sizes=st.lists(st.lists(st.integers(0, 9), max_size=4), max_size=4), seed=st.integers(0, 99))
def test_groups_survive_a_file_bitwise(tmp_path_factory, sizes, seed):
    random = np.random.default_rng(seed)
    path = str(tmp_path_factory.mktemp("groups") / "deep" / "groups.npz")
    groups = [[make_sample(random, n, f"env{n}", truncated=n > 5) for n in g] for g in sizes]
    heads = [(10 + g, g // 2, 3 * g) for g in range(len(groups))]
    places = [[(g, j) for g, group in enumerate(groups) for j in range(len(group))][::2]]
    logps = [np.full(len(groups[g][j].tokens_T), g + j, np.float32) for g, j in places[0]]
    write_groups(path, heads, places, logps, *groups)
    told, *read = read_groups(path)
    assert [head[:3] for head in told] == heads and len(read) == len(groups)
    for (*_, infos), old, new in zip(told, groups, read, strict=True):
        assert infos == [describe(sample) for sample in old]
        for a, b in zip(old, new, strict=True):
            for name, value in vars(a).items():
                assert np.array_equal(getattr(b, name), value) and type(value) is type(
                    getattr(b, name)
                )
    with np.load(path) as file:
        computed = np.isfinite(file["logp_T"]).sum()
    assert computed == sum(map(len, logps))


def test_experts_that_are_unknown_for_some_are_written_as_such(tmp_path):
    random, path = np.random.default_rng(0), str(tmp_path / "groups.npz")
    routes_T = random.integers(0, 99, (4, 2, 3)).astype(np.int16)
    group = [make_sample(random, 5), make_sample(random, 4, routes_T=routes_T)]
    write_groups(path, [(0, 0, 1)], [], group)
    _, (without, known) = read_groups(path)
    assert (without.routes_T == -1).all() and without.routes_T.shape == (5, 2, 3)
    assert (known.routes_T == routes_T).all()


def test_experts_survive_a_file(tmp_path):
    random, path = np.random.default_rng(0), str(tmp_path / "groups.npz")
    group = [
        make_sample(random, n, routes_T=random.integers(-1, 99, (n, 2, 3)).astype(np.int16))
        for n in (4, 1, 7)
    ]
    write_groups(path, [(0, 0, 1)], [], group)
    _, read = read_groups(path)
    for old, new in zip(group, read, strict=True):
        assert np.array_equal(new.routes_T, old.routes_T) and new.routes_T.dtype == np.int16


@pytest.mark.parametrize("content", [b"", b"PK", b"not an archive at all", b"\0" * 5000])
def test_a_file_that_holds_no_groups_is_named(tmp_path, content):
    path = tmp_path / "groups.npz"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="groups.npz: expected groups"):
        read_groups(str(path))


# --- what is reported -----------------------------------------------------------------------------


def test_the_mismatch_table_is_what_a_loop_over_tokens_finds():
    random, step, limit = np.random.default_rng(0), 9, 1.3
    samples = [make_sample(random, n, env) for n, env in ((70, "a"), (5, "b"), (30, "a"), (1, "b"))]
    samples[0].engine_logp_T[3] = np.nan
    logps = [s.engine_logp_T + random.normal(0, 0.3, len(s.mask_T)) for s in samples]
    expected = {}
    for sample, logp_T in zip(samples, logps, strict=True):
        used = [t for t in range(len(logp_T)) if sample.mask_T[t]]
        used = [t for t in used if np.isfinite(sample.engine_logp_T[t])]
        gaps = [float(logp_T[t] - sample.engine_logp_T[t]) for t in used]
        trusted = bool(gaps) and np.mean([np.exp(abs(g)) for g in gaps]) <= limit
        for place, (t, gap) in enumerate(zip(used, gaps, strict=True), 1):
            edges = next((4**p, 4 ** (p + 1) - 1) for p in range(9) if place < 4 ** (p + 1))
            lag = str(step - sample.version_T[t])
            keys = {"all": "", "env": sample.env, "lag": lag, "position": f"{edges[0]}-{edges[1]}"}
            for at in keys.items():
                row = (abs(gap), np.exp(gap) - 1 - gap, trusted)
                expected.setdefault(at, []).append(row)
    half = mismatch_table(samples[:2], logps[:2], step, limit)
    rows = mismatch_rows([half, mismatch_table(samples[2:], logps[2:], step, limit), {}])
    assert {(row["by"], row["key"]) for row in rows} == set(expected)
    for row in rows:
        values = np.array(expected[row["by"], row["key"]])
        assert row["tokens"] == len(values)
        assert row["max"] == pytest.approx(values[:, 0].max(), rel=1e-5)
        for column, name in enumerate(("mean", "k3", "kept")):
            assert row[name] == pytest.approx(values[:, column].mean(), rel=1e-4, abs=1e-9)


def test_metrics_of_several_updates_known_answers():
    first = {"probs_ratio_max": 9.0, "probs_ratio_min": 0.5, "num_masked_seqs": 4.0, "loss": 1.0}
    second = {"probs_ratio_max": 1.0, "probs_ratio_min": 0.9, "num_masked_seqs": 0.0, "kl": 2.0}
    merged = {"probs_ratio_max": 9.0, "probs_ratio_min": 0.5, "num_masked_seqs": 4.0}
    assert mean_metrics([first, second]) == merged | {"loss": 1.0, "kl": 2.0}
    assert mean_metrics([{"loss": 1.0}, {"loss": 2.0}]) == {"loss": 1.5}


def test_validation_known_answers():
    found = validation_metrics({"a": [[1.0, 0.0], [0.5, 0.0]], "b": [[1.0, 1.0]]}, 2)
    assert found == {
        "validation_reward": pytest.approx(3.5 / 6),
        "validation_pass@2": pytest.approx(2 / 3),
        "validation_reward/a": pytest.approx(1.5 / 4),
        "validation_pass@2/a": 0.5,
        "validation_reward/b": 1.0,
        "validation_pass@2/b": 1.0,
    }
    assert "validation_pass@1" not in validation_metrics({"a": [[1.0]]}, 1)


# --- waits ----------------------------------------------------------------------------------------


def test_a_wait_warns_halfway_and_ends_with_its_name_and_the_state(capsys):
    async def wait():
        await within(0.2, "the groups of step 7", asyncio.sleep(5), lambda: "3 groups ready")

    began = time.monotonic()
    with pytest.raises(TimeoutError, match=r"for the groups of step 7\. 3 groups ready"):
        asyncio.run(wait())
    assert time.monotonic() - began < 2
    assert "waiting for the groups of step 7" in capsys.readouterr().out


def test_a_wait_that_ends_in_time_says_nothing(capsys):
    async def wait():
        return await within(5, "nothing", asyncio.sleep(0, "done"))

    assert asyncio.run(wait()) == "done"
    assert capsys.readouterr().out == ""


def test_going_back_gives_up_the_checkpoints_after(tmp_path):
    for step in (1, 2, 3):
        write_checkpoint(tmp_path, step)
    checkpoints.rewind(str(tmp_path), {"version": 2, "config": {"prompts_per_step": 1}})
    assert [checkpoints.step_of(f) for f in checkpoints.newest_first(str(tmp_path))] == [2, 1]
    write_checkpoint(tmp_path, 4)
    checkpoints.prune(str(tmp_path), 2)
    left = {path.parent.name for path in tmp_path.glob("step_*/policy")}
    assert left == {"step_000002", "step_000004"}, "the third must not fill the disk for ever"


def test_a_damaged_export_does_not_spoil_its_checkpoint(tmp_path):
    folder = write_checkpoint(tmp_path, 1)
    (folder / "hf" / "model.safetensors").write_bytes(b"")
    assert not damaged(folder)


@pytest.mark.slow
def test_stores_bind_a_free_port_before_anybody_is_told(tiny_config):
    """Many ranks that start at once on one machine never take each other's port."""
    from concurrent.futures import ThreadPoolExecutor

    from grpo_async import Trainer

    trainers = [Trainer(tiny_config(), 0) for _ in range(30)]
    with ThreadPoolExecutor(20) as pool:
        addresses = list(pool.map(lambda trainer: trainer.open_store(2), trainers))
    assert len({port for _, port in addresses}) == 30
    for host, port in addresses:
        socket.create_connection((host, port), timeout=5).close()


@pytest.mark.parametrize(
    ("before", "after"),
    [("", ""), ("a\n", "a\n"), ("a\nb", "a\n"), ("b", ""), ("a\nb\n", "a\nb\n")],
)
def test_half_a_line_of_a_killed_writer_is_cut_off(before, after, tmp_path):
    path = tmp_path / "rollouts.jsonl"
    path.write_text(before)
    with append_to(path) as file:
        file.write(b"c\n")
    assert path.read_text() == after + "c\n"


def test_answers_count_once_in_how_many_sequences_they_lie():
    """One of three sequences at reward 1, one of a single one at reward 0: the mean is a half."""
    turns = [Turn(ids, [3], [-1.0], [4], "stop") for ids in ([1, 2], [9, 9], [8, 8])]
    long, short = stitch(turns), stitch(turns[:1])
    for sample in long:
        sample.reward = 1.0
    short[0].reward = 0.0
    infos = [describe(sample) for sample in long + short]
    found = metrics.rollout_metrics([SimpleNamespace(infos=infos)], 5)
    assert (found["reward"], found["broken_prefixes"], found["lag_max"]) == (0.5, 2, 1)
    whole = metrics.rollout_metrics([SimpleNamespace(infos=infos[:1])], 5)
    assert "broken_prefixes" not in whole


def test_an_answer_without_tokens_has_no_lag():
    samples = stitch([Turn([1, 2], [], [], [], "stop")]) + stitch([Turn([1], [3], [-1.0], [4], "")])
    infos = [describe(sample) for sample in samples]
    for info in infos:
        info.reward = 0.0
    found = metrics.rollout_metrics([SimpleNamespace(infos=infos)], 5)
    assert (found["lag_mean"], found["lag_max"]) == (1.0, 1)


@pytest.mark.parametrize(
    "change",
    [
        {"length": np.array([-1])},
        {"length": np.array([100])},
        {"length": np.array([2.5])},
        {"group": np.array([-1])},
        {"group": np.array([7])},
        {"tokens_T": np.arange(1)},
        {"slot": np.array(3)},
    ],
)
def test_groups_that_are_no_groups_are_refused_by_file(tmp_path, change):
    path = str(tmp_path / "step_000001.npz")
    write_groups(path, [(0, 0, 1)], [], [make_sample(np.random.default_rng(0), 5)])
    np.savez(path, **dict(np.load(path)) | change)
    with pytest.raises(ValueError, match=f"{path}: expected groups of samples"):
        read_groups(path)


def test_a_file_that_is_being_written_is_not_replayed(tmp_path):
    write_groups(str(tmp_path / "samples/step_000001.npz"), [(0, 0, 1)], [], [])
    (tmp_path / "samples/step_000002.npz.partial.npz").write_bytes(b"half")
    cfg = Config(replay=str(tmp_path), prompts_per_step=1)
    assert [path.name for path in modes.of(cfg, Run)(cfg, [], []).files] == ["step_000001.npz"]


def test_files_that_cannot_be_replayed_are_named_at_once(tmp_path):
    path = tmp_path / "samples/step_000001.npz"
    write_groups(str(path), [(0, 0, 1)], [], [make_sample(np.random.default_rng(0), 5)])
    cfg = Config(replay=str(tmp_path), prompts_per_step=2)
    with pytest.raises(InputError, match=f"{path} holds 1 groups, not prompts_per_step = 2"):
        modes.of(cfg, Run)(cfg, [], [])
    path.write_bytes(b"PK")
    with pytest.raises(InputError, match=f"{path}: expected groups"):
        modes.of(cfg, Run)(cfg, [], [])


@pytest.mark.parametrize("marker", ["{}", "[]", "5", '{"a": 1}', '{"a": [1]}'])
def test_a_marker_that_is_none_is_damage(tmp_path, marker):
    (tmp_path / "complete.json").write_text(marker)
    assert "complete.json" in checkpoints.damage(str(tmp_path))
