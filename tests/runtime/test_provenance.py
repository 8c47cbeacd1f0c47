"""What config.json says of the code that made a run."""

import importlib.metadata
import subprocess

from runtime import provenance


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
    (tmp_path / "mine.py").write_text("")
    monkeypatch.setattr(provenance, "ROOT", tmp_path)
    found = provenance.provenance()
    assert found["commit"] == git("rev-parse", "HEAD").strip()
    assert "-x = 1\n+x = 2\n" in found["diff"]
    assert found["untracked"] == ["mine.py"]
    assert found["versions"]["torch"] == importlib.metadata.version("torch")
    assert {"python", "ray", "transformers"} <= found["versions"].keys()


def test_a_folder_that_is_no_repository_has_no_commit(tmp_path, monkeypatch):
    monkeypatch.setattr(provenance, "ROOT", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    found = provenance.provenance()
    assert (found["commit"], found["diff"], found["untracked"]) == ("", "", [])
