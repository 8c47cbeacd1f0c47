"""launch/judges.sh on nodes of eight GPUs: which judge each serves. vLLM is a stand-in."""

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from launch import judges
from runtime.processes.cluster import ROOT
from support.program import ran
from support.tables import table

CASES = table(Path(__file__).with_name("cases.txt"))
pytestmark = pytest.mark.slow

# Serves /v1/models; the model `absent` ends at once, and `other` is one that nobody asked for.
SERVER = """\
import http.server, sys
words = sys.argv[sys.argv.index("--host"):]
given = dict(zip(words[::2], words[1::2]))
if given["--served-model-name"] == "absent":
    sys.exit("no such model")
class Health(http.server.SimpleHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        name = given["--served-model-name"].replace("other", "something")
        self.wfile.write(b'{"id": "%s"}' % name.encode())
http.server.HTTPServer((given["--host"], int(given["--port"])), Health).serve_forever()
"""
# Ten ports for each node, of which no other worker of pytest and no node before has one.
PORTS = itertools.count(5000 + 200 * int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]), 10)
RLVR = "genrm models/a 8 --max-model-len 60000\n\ngeneral models/b 8\nsafety models/c 1\n"


@contextlib.contextmanager
def node(folder: Path, rank: int, text: str, gpus: int | str = 8, **variables: str):
    """judges.sh of one node, and what it announces in folder/judges."""
    (folder / "vllm.py").write_text(SERVER)
    real = sys.executable  # which asks for /v1/models
    script = f'case $1 in -m) set -- {folder}/vllm.py "$@" ;; esac; exec {real} "$@"'
    (folder / "python").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "python").chmod(0o755)
    given = {"JUDGES": text, "SLURM_PROCID": rank, "SLURM_GPUS_ON_NODE": gpus}
    given |= {"JUDGES_FILE": folder / "judges", "NODE_IP": "127.0.0.1", "JUDGE_SECONDS": 30}
    given |= {"GRPO_PYTHON": folder / "python", "JUDGE_PORT": next(PORTS)}
    env = os.environ | {name: str(value) for name, value in (given | variables).items()}
    how = {"cwd": ROOT, "env": env, "stderr": subprocess.STDOUT, "start_new_session": True}
    command = ["bash", "launch/judges.sh", str(folder)]
    process = subprocess.Popen(command, stdout=(folder / "told").open("w"), **how)
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def served(folder: Path, rank: int, count: int, text: str = RLVR, gpus: int | str = 8) -> Counter:
    """The models that a node serves, by the addresses that it announced; their ports differ."""
    with node(folder, rank, text, gpus):
        deadline = time.monotonic() + 30
        file = folder / "judges"
        while not file.exists() or len(file.read_text().splitlines()) < count:
            assert time.monotonic() < deadline, "no answer"
            time.sleep(0.1)
        time.sleep(0.5)
        words = [line.split() for line in file.read_text().splitlines()]
    assert len({address for _, address in words}) == len(words)
    return Counter(name for name, _ in words)


@pytest.mark.parametrize("rank", [0, 1, 2, 3])
def test_nodes_take_the_judges_in_turn(tmp_path, rank):
    """Five nodes of RLVR: two serve GenRM, two the general judge, one eight copies of safety."""
    expected = [{"genrm": 1}, {"general": 1}, {"safety": 8}, {"genrm": 1}][rank]
    assert served(tmp_path, rank, sum(expected.values())) == expected


def test_small_judges_share_a_node_and_one_without_gpus_is_served_once(tmp_path):
    text = "a models/a 2\nb models/b 4\nc models/c 0"
    assert served(tmp_path, 0, 4, text) == {"a": 2, "b": 1, "c": 1}


FILE = ROOT / "launch/judges/rlvr_h100.txt"


def test_a_node_serves_what_a_file_gives_it(tmp_path):
    """The fifth of the seven nodes of RLVR on H100 is the first of the general judge."""
    assert served(tmp_path, 4, 1, str(FILE)) == {"general": 1}


@pytest.mark.parametrize(("lines", "gpus", "given", "expected"), CASES["judge nodes"])
def test_nodes_follow_from_counts(lines, gpus, given, expected):
    """How many they are, and what each serves; or why not."""
    if isinstance(expected, str):
        with pytest.raises(ValueError, match=expected):
            every = judges.read(lines, gpus)
            judges.nodes_of(every, gpus, given)
        return
    every = judges.read(lines, gpus)
    count = judges.nodes_of(every, gpus, given)
    nodes = [judges.servers(every, gpus, str(count), i) for i in range(count)]
    assert [" ".join(one.name for one in node) for node in nodes] == expected


def test_quoted_flags_reach_the_server_whole_and_comments_do_not(monkeypatch, capsys):
    """As launch/judges.sh reads the line: its shell takes the quotes off."""
    monkeypatch.setenv("JUDGES", """\ufeffa m/a 8 x1 --hf-overrides '{"a": "b c"}'  # a comment""")
    judges.main("8", "0")
    name, model, gpus, first, flags = capsys.readouterr().out.strip().split(" ", 4)
    shell = 'eval "options=($1)"; printf "%s\\n" "${options[@]}"'
    words = ran("bash", "-c", shell, "bash", flags).stdout.splitlines()
    assert (name, model, gpus, first) == ("a", "m/a", "8", "0")
    assert words == ["--hf-overrides", '{"a": "b c"}']


@pytest.mark.parametrize(("text", "expected"), CASES["judges"])
def test_a_judge_that_cannot_be_served_ends_the_node(tmp_path, text, expected):
    with node(tmp_path, 0, text, JUDGE_SECONDS="8") as process:
        assert process.wait(60)
    told = (tmp_path / "told").read_text()
    assert expected in told
    assert expected != "judge absent" or "no such model" in told


def test_a_node_without_gpus_and_without_nvidia_smi_serves_what_needs_none(tmp_path):
    assert served(tmp_path, 0, 1, "a models/a 0", gpus="") == {"a": 1}
