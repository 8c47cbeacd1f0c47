"""What launch/preflight.py says of a run before it starts."""

import resource

import pytest
from conftest import spelling_rows, write_rows

import grpo_async
from launch import preflight
from runtime.claim import claim
from settings import errors, reader
from support.configs import changed


@pytest.fixture
def argv(tiny_model, tmp_path):
    """The arguments of a run that may start."""
    rows = write_rows(tmp_path / "rows.jsonl", spelling_rows(4))
    flags = ["--config", "configs/tiny.py", "--model", tiny_model, "--data.train", rows]
    flags += ["--data.val", rows, "--prompts_per_step", "2", "--resume", "auto"]
    return [*flags, "--run_dir", str(tmp_path / "run")]


def test_a_line_for_each_check_and_its_problems_are_counted(argv, tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("PERSISTENT_CACHE", raising=False)
    assert preflight.main(argv) == 0
    told = capsys.readouterr().out
    assert told.count("ok: ") == 6 and "4 rows" in told
    monkeypatch.setenv("PERSISTENT_CACHE", str(tmp_path / "none"))
    assert preflight.main(argv) == 1
    assert f"PROBLEM: PERSISTENT_CACHE = '{tmp_path}/none'" in capsys.readouterr().out


def test_pairs_are_looked_at_by_their_own_program(chat_model, tmp_path, monkeypatch, capsys):
    pair = {"prompt": "ab", "chosen": "ba", "rejected": "ab"}
    rows = write_rows(tmp_path / "pairs.jsonl", [pair] * 3)
    argv = ["--config", "configs/tiny_dpo.py", "--model", chat_model, "--data.train", rows]
    argv += ["--data.val", rows, "--pairs_per_step", "2", "--run_dir", str(tmp_path / "run")]
    monkeypatch.setenv("GRPO_PROGRAM", "dpo.py")
    assert preflight.main(argv) == 0
    assert "3 rows, 3 for evaluation" in capsys.readouterr().out
    write_rows(tmp_path / "pairs.jsonl", [{"prompt": "ab", "chosen": "ba"}])
    with pytest.raises(errors.InputError, match="pairs.jsonl:1: rejected is missing"):
        preflight.main(argv)
    for name in ("ppo.py", "launch/preflight.py"):
        monkeypatch.setenv("GRPO_PROGRAM", name)
        with pytest.raises(errors.InputError, match=f"'{name}': expected a file beside grpo"):
            preflight.main(argv)


def test_a_limit_of_open_files_that_is_too_low_for_the_world_is_named(monkeypatch):
    """Super has 256 trainer ranks and 144 engines of 4; rank 0 meets all of them."""
    large = changed(grpo_async.Config(), ranks=256, count=144, tensor_parallel=4)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 8192))
    (said,) = preflight.files(large)
    assert said.startswith("ulimit -Hn is 8192, 832 ranks and engine workers need 57344: raise")
    assert not list(preflight.files(grpo_async.Config()))
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, -1))
    assert not list(preflight.files(large))


def test_a_run_that_is_alive_is_waited_for_and_in_a_job_refused(argv, monkeypatch, capsys):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    with claim(reader.load(grpo_async.Config, argv, default="")):
        with pytest.raises(SystemExit) as stop:
            preflight.main(argv)
        assert stop.value.code is None
        assert "in use by process" in capsys.readouterr().out
        monkeypatch.setenv("SLURM_JOB_ID", "1")
        with pytest.raises(errors.InputError, match="is in use by"):
            preflight.main(argv)
