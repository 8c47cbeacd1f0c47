"""grpo_async as a process of its own, that a test watches, disturbs and ends."""

import contextlib
import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


class Program:
    """`python grpo_async.py --config ... [flags]`; `script` may stand for grpo_async.py.

    A script of the shell is called as the pages call it: `bash launch/local.sh CONFIG [flags]`.
    """

    def __init__(self, cfg, *flags: str, script: str = "grpo_async.py", root: Path = ROOT):
        self.folder = Path(cfg.run_dir)
        config = self.folder.with_suffix(".py")
        values = dataclasses.asdict(cfg)
        del values["command"]  # belongs on the command line: `flags`
        text = "".join(f"{name} = {value!r}\n" for name, value in values.items())
        config.write_text(re.sub(r"(?<=[ (-])inf(?=[,)}])", "float('inf')", text))
        command = [sys.executable, script, "--config", str(config), *flags]
        if script.endswith(".sh"):
            command = ["bash", script, str(config), *flags]
        self.output = open(self.folder.with_suffix(".out"), "a+")  # noqa: SIM115
        self.started = time.time()
        how = {"cwd": root, "env": os.environ | {"PYTHONFAULTHANDLER": "1"}}
        how |= {"stdout": self.output, "stderr": self.output, "start_new_session": True}
        # A shell's background job ignores Ctrl-C, and so would its children.
        how["preexec_fn"] = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)
        self.process = subprocess.Popen(command, **how)

    def told(self) -> str:
        """All that this and earlier programs of the folder printed."""
        self.output.seek(0)
        return self.output.read()

    def wait_until(self, holds: Callable[[], bool], seconds: float = 420) -> float:
        """Waits for a condition while the program runs; returns the seconds that it took."""
        began = time.monotonic()
        while not holds():
            assert self.process.poll() is None, self.told()[-4000:]
            assert time.monotonic() - began < seconds, self.told()[-4000:]
            time.sleep(0.05)
        return time.monotonic() - began

    def ends(self, seconds: float = 420) -> int:
        """Waits for the program's end; returns its exit status. Fails, with stacks, if it hangs."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.signal(signal.SIGABRT)
            self.process.wait(10)
            raise AssertionError(f"no end in {seconds:.0f} s: {self.told()[-8000:]}") from None
        finally:
            self.stop()

    def succeeds(self, seconds: float = 420) -> "Program":
        """Itself, once it has ended well."""
        assert self.ends(seconds) == 0, self.told()[-4000:]
        return self

    def stop(self) -> None:
        """Ends the program, whatever it does."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def signal(self, number: signal.Signals) -> None:
        """Sends the driver a signal."""
        self.process.send_signal(number)

    def pids(self, role: str) -> list[int]:
        """Living actors of this program, by the name of their class."""
        logs = self.folder.glob(f"logs/{role}-*.log")
        new = (p for p in logs if p.stat().st_ctime >= self.started - 1)
        pids = sorted(int(path.stem.rsplit("-", 1)[1]) for path in new)
        return [pid for pid in pids if is_alive(pid)]

    def engine_cores(self) -> list[int]:
        """vLLM's own processes, the children of the Generators."""
        parents = set(self.pids("Generator"))
        found = []
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                short, fields = stat.read_text().rsplit(")", 1)
                name = (stat.parent / "cmdline").read_bytes()
            except OSError:
                continue
            is_core = b"EngineCore" in name or short.endswith("(EngineCore")  # started, or forked
            if int(fields.split()[1]) in parents and is_core:
                found.append(int(stat.parent.name))
        return sorted(found)

    def family(self) -> dict[int, bytes]:
        """Command lines of all living processes that descend from the program, by pid."""
        parents = {}
        found = {}
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                parents[int(stat.parent.name)] = int(stat.read_text().rsplit(")", 1)[1].split()[1])
        fresh = {self.process.pid}
        while fresh:
            fresh = {child for child, parent in parents.items() if parent in fresh} - set(found)
            for pid in fresh:
                with contextlib.suppress(OSError):
                    found[pid] = Path(f"/proc/{pid}/cmdline").read_bytes()
        return found

    def lines(self, name: str) -> list[dict]:
        """The whole lines of a JSONL file of the run."""
        path = self.folder / name
        text = path.read_text() if path.exists() else ""
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]

    def steps(self) -> list[dict]:
        """The metrics of the steps so far."""
        return [line for line in self.lines("metrics.jsonl") if "loss" in line]

    def check_slots(self, cfg, rows: int, steps: int = 0) -> None:
        """Every step once, every slot once, its prompt the next of the file, or dropped by name.

        `steps` are those of a run that left early.
        """
        steps = steps or cfg.steps
        assert [m["step"] for m in self.steps()] == list(range(1, steps + 1))
        seen = {}
        for line in self.lines("rollouts.jsonl"):
            if line["evaluation"] is None and line["slot"] < steps * cfg.prompts_per_step:
                seen.setdefault(line["slot"], []).append(line["row"])
        assert sorted(seen) == list(range(steps * cfg.prompts_per_step))
        dropped = {line["slot"] for line in self.lines("dropped.jsonl")}
        for slot, used in seen.items():
            assert len(used) == cfg.group_size and len(set(used)) == 1, (slot, used)
            assert dropped or used[0] == slot % rows + 1


def ran(*command, root: Path = ROOT, env=None, seconds: float = 120):
    """A program that has ended, with its exit status and what it printed."""
    words = [str(word) for word in command]
    how = {"cwd": root, "env": env, "timeout": seconds}
    return subprocess.run(words, capture_output=True, text=True, **how)


def copy(folder: Path) -> Path:
    """Copies the project into a folder."""
    listed = subprocess.check_output(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT)
    for name in listed.decode().split():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    return folder


def unboxed(text: str) -> str:
    """tyro's output without colours, frames and line breaks."""
    return " ".join(re.sub(r"\x1b\[[0-9;]*m|[─-╿]", " ", text).split())


def is_alive(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


def survivors(family: dict[int, bytes], seconds: float = 30) -> dict[int, bytes]:
    """Which processes are still there after so long."""
    deadline = time.monotonic() + seconds
    while any(map(is_alive, family)) and time.monotonic() < deadline:
        time.sleep(0.2)
    return {pid: name for pid, name in family.items() if is_alive(pid)}


def end(pid: int) -> None:
    """SIGKILL, as the kernel's out-of-memory killer would."""
    os.kill(pid, signal.SIGKILL)
