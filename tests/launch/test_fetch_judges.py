"""launch/fetch_judges.py against a local stand-in of the Hugging Face hub."""

import http.server
import json
import os
import sys
import threading

import pytest

from launch import judges
from support.program import ROOT, ran

SHA = "0123456789abcdef0123456789abcdef01234567"
FILES = {
    "config.json": b"{}",
    "model.safetensors": b"weights",
    "tokenizer.json": b"{}",
    "README.md": b"not needed",
}


class Hub(http.server.BaseHTTPRequestHandler):
    """Has one model, org/judge, for those who send the token."""

    protocol_version = "HTTP/1.1"
    asked: list[str]

    def reply(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def do_GET(self) -> None:
        self.asked.append(f"{self.command} {self.path}")
        path = self.path.partition("?")[0]
        if self.headers.get("Authorization") != "Bearer hf_secret":
            self.reply(401, b"", X_Error_Code="GatedRepo")
        elif path.startswith("/api/models/org/judge/tree/"):
            tree = [{"type": "file", "path": n, "size": len(b), "oid": n} for n, b in FILES.items()]
            self.reply(200, json.dumps(tree).encode(), Content_Type="application/json")
        elif path.startswith("/api/models/org/judge"):
            files = [{"rfilename": name} for name in FILES]
            about = {"id": "org/judge", "sha": SHA, "siblings": files}
            self.reply(200, json.dumps(about).encode(), Content_Type="application/json")
        elif path.startswith("/org/judge/resolve/"):
            name = path.rpartition("/")[2]
            self.reply(200, FILES[name], ETag=f'"{name}"', X_Repo_Commit=SHA)
        else:
            self.reply(404, b"", X_Error_Code="RepoNotFound")

    do_HEAD = do_GET

    def log_message(self, *_: object) -> None:
        """Prints nothing."""


@pytest.fixture
def hub():
    """The address of the hub; what it was asked is in Hub.asked."""
    Hub.asked = []
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def fetch(hub: str, folder, text: str, **variables: str):
    (folder / "judges.txt").write_text(text)
    left_out = ("HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "HF_TOKEN")
    env = {name: value for name, value in os.environ.items() if name not in left_out}
    env |= {"HF_ENDPOINT": hub, "PERSISTENT_CACHE": str(folder), "HF_TOKEN": "hf_secret"}
    words = (ROOT / "launch/fetch_judges.py", "judges.txt")
    return ran(sys.executable, *words, root=folder, env=env | variables)


def test_models_of_judges_are_downloaded_once_to_where_jobs_look(hub, tmp_path, monkeypatch):
    text = "a org/judge 8 x2\nb org/judge 1 x8\n"
    done = fetch(hub, tmp_path, text)
    folder = tmp_path / f"hf/hub/models--org--judge/snapshots/{SHA}"
    assert done.stdout == f"a: org/judge: 0.0 GB in {folder}\n", done.stdout + done.stderr
    assert {path.name for path in folder.iterdir()} == FILES.keys() - {"README.md"}
    assert (folder / "model.safetensors").read_bytes() == b"weights"
    count = sum(line.startswith("GET /org/judge/resolve/") for line in Hub.asked)
    again = fetch(hub, tmp_path, text)
    assert again.stdout == done.stdout
    assert count == sum(line.startswith("GET /org/judge/resolve/") for line in Hub.asked) == 3

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.delenv("HF_HOME", raising=False)
    monkeypatch.setenv("PERSISTENT_CACHE", str(tmp_path))
    judges.check_weights(judges.read(text, 8))
    (tmp_path / "local").mkdir()
    judges.check_weights(judges.read(f"a {tmp_path}/local 8 x2", 8))
    with pytest.raises(ValueError, match="b: HF_HUB_OFFLINE is set, and org/other is neither"):
        judges.check_weights(judges.read("a org/judge 8 x2\nb org/other 8 x2", 8))
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    judges.check_weights(judges.read("b org/other 8 x2", 8))


@pytest.mark.parametrize(("text", "variables", "told"), [
    ("a org/other 8 x2", {}, "error: a = 'org/other': there is no folder"),
    ("a org/judge 8 x2", {"HF_TOKEN": "hf_wrong"}, "error: a = 'org/judge': there is no folder"),
    ("a org/judge", {}, "error: judges.txt: 'a org/judge': expected NAME MODEL GPUS"),
])  # fmt: skip
def test_a_model_that_cannot_be_had_is_named(hub, tmp_path, text, variables, told):
    done = fetch(hub, tmp_path, text, **variables)
    assert done.returncode == 1 and told in done.stderr and "Traceback" not in done.stderr


def test_a_judge_that_jobs_could_not_load_is_refused_at_submission(tmp_path):
    env = {"JUDGES": "a org/judge 8 x2", "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    done = ran(sys.executable, ROOT / "launch/judges.py", "8", env=os.environ | env)
    told = "error: JUDGES: a: HF_HUB_OFFLINE is set, and org/judge is neither a folder nor in"
    assert done.returncode == 1 and f"{told} {tmp_path}" in done.stderr
