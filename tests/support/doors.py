"""Where the processes of a run listen: read from /proc while it runs."""

import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from envs.sandbox.sandbox import family

LISTENS = "0A"  # TCP_LISTEN of the kernel
EVERYWHERE = {"00000000", "0" * 32}
RAY = {"gcs_server", "raylet", "monitor"}  # its processes that are no actors


def sockets() -> dict[str, str]:
    """The sockets that listen, by inode: whether at one address or at all."""
    found = {}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTENS:
                everywhere = fields[1].partition(":")[0] in EVERYWHERE
                found[fields[9]] = "all addresses" if everywhere else "one address"
    return found


def name_of(pid: int) -> str:
    """What a process is called in docs/cluster.md."""
    words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    if found := re.match(r"ray::(\w+)", words[0]):
        return found[1] if found[1][0].isupper() else "IDLE"  # which runs a function for a moment
    if words[1:2] == ["-c"] and "multiprocessing" in words[2]:
        return "EngineCore"  # before it has its name
    if words[0].startswith("VLLM::"):
        return words[0].removeprefix("VLLM::")
    files = [Path(word).stem for word in words if "/" in word or word.endswith(".py")]
    return next((name for name in files if name in RAY), "driver")


def listening(pid: int) -> Iterator[tuple[str, str]]:
    """Process and address of each socket at which a process, or one that came from it, listens."""
    every = sockets()
    for process in family(pid):
        try:
            links = [str(path.readlink()) for path in Path(f"/proc/{process}/fd").iterdir()]
            name = name_of(process)
        except OSError:  # it ended
            continue
        for link in links:
            inode = re.fullmatch(r"socket:\[(\d+)\]", link)
            if inode and inode[1] in every:
                yield name, every[inode[1]]


class Doors(threading.Thread):
    """Looks again and again, until the process ends."""

    def __init__(self, pid: int):
        super().__init__(daemon=True)
        self.pid = pid
        self.seen: set[tuple[str, str]] = set()
        self.start()

    def run(self) -> None:
        while Path(f"/proc/{self.pid}/fd").exists() and self.is_running():
            self.seen |= set(listening(self.pid))
            time.sleep(0.2)

    def is_running(self) -> bool:
        """Whether the process is there and no zombie."""
        try:
            return " Z " not in Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2][:4]
        except OSError:
            return False
