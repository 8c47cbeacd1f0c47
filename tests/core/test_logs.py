"""A process's log, which somebody may delete while the process and its children write to it."""

import sys

from core import logs
from support.program import ran

# A child prints before and after it renews its log; its parent does so in a thread.
PARENT = """
import os, subprocess, sys, time
from pathlib import Path
from core import logs

path = Path(sys.argv[1])
logs.SECONDS = 0.01
logs.begin(path)
print("parent", flush=True)
child = subprocess.Popen([sys.executable, "-c", sys.argv[2]], stdin=subprocess.PIPE, text=True)
while "child" not in path.read_text():
    time.sleep(0.01)
path.unlink()
while not path.exists() or not path.stat().st_size:
    time.sleep(0.01)
print("parent again", flush=True)
child.communicate("go")
"""
CHILD = """
import sys
from core import logs

print("child", flush=True)
sys.stdin.read()
logs.renew()
print("child again", flush=True)
"""
NOTE = "this log was deleted or replaced: its lines so far may be lost"


def test_a_log_that_is_deleted_begins_again_for_a_process_and_its_child(tmp_path):
    path = tmp_path / "logs" / "Generator-host-1.log"
    done = ran(sys.executable, "-c", PARENT, path, CHILD)
    assert done.returncode == 0, done.stderr
    assert path.read_text().splitlines() == [NOTE, "parent again", NOTE, "child again"]
    assert not done.stdout, "all of it went to the log"


def test_a_process_without_a_log_renews_none(monkeypatch, capfd):
    monkeypatch.delenv(logs.VARIABLE, raising=False)
    logs.renew()
    print("still here")
    assert capfd.readouterr().out == "still here\n"
