"""What config.json says of the code that made a run."""

import importlib.metadata
import subprocess

from runtime.reporting import config_json


def test_commit_changes_and_new_files_of_the_repository(tmp_path, monkeypatch):
    def git(*words: str) -> str:
        settings = ("-c", "user.name=a", "-c", "user.email=a@b.example")
        command = ["git", "-C", str(tmp_path), *settings, *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    (tmp_path / "a.py").write_text("x = 1\n")
    git("init", "-q")
    git("add", "a.py")
    git("commit", "-qm", "first")
    (tmp_path / "a.py").write_text("x = 2\n")
    (tmp_path / "mine.py").write_text("y = 1\nz = 2\n")
    (tmp_path / "weights.bin").write_text("0")
    monkeypatch.setattr(config_json, "ROOT", tmp_path)
    found = config_json.provenance()
    assert found["commit"] == git("rev-parse", "HEAD").strip()
    assert "-x = 1\n+x = 2\n" in found["diff"]
    assert found["untracked"] == ["mine.py", "weights.bin"]
    (tmp_path / "mine.py").unlink()
    git("checkout", "-q", "a.py")
    (tmp_path / "saved").write_text(found["diff"])
    git("apply", str(tmp_path / "saved"))  # the fork that ran is there again
    assert (tmp_path / "mine.py").read_text() == "y = 1\nz = 2\n"
    assert (tmp_path / "a.py").read_text() == "x = 2\n"
    assert found["versions"]["torch"] == importlib.metadata.version("torch")
    assert {"python", "ray", "transformers"} <= found["versions"].keys()


def test_a_folder_that_is_no_repository_has_no_commit(tmp_path, monkeypatch):
    monkeypatch.setattr(config_json, "ROOT", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    found = config_json.provenance()
    assert (found["commit"], found["diff"], found["untracked"]) == ("", "", [])
    assert "not a git repository" in found["git_error"]


def test_a_diff_that_is_missing_or_cut_is_no_clean_tree(monkeypatch):
    monkeypatch.setattr(config_json, "DIFF", ("diff", "no-such-commit"))
    found = config_json.provenance()
    assert found["commit"] and "no-such-commit" in found["git_error"]
    monkeypatch.setattr(config_json, "git", lambda *words: "x" * 100)
    monkeypatch.setattr(config_json, "added", lambda name: "")
    monkeypatch.setattr(config_json, "LONGEST_DIFF", 10)
    assert config_json.provenance()["diff"] == "x" * 10 + "\n[cut off: 100 characters]"
