"""Where the processes of a run listen: read from /proc while it runs."""

import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from envs.sandbox.sandbox import family

LISTENS = "0A"  # TCP_LISTEN of the kernel
EVERYWHERE = {"00000000", "0" * 32}
LOOPBACK = re.compile("[0-9A-F]{6}7F|0{24}01000000|0{16}FFFF0000[0-9A-F]{6}7F")  # as /proc has it
# Processes that have not set their names yet, by what stands in their commands.
UNNAMED = {"default_worker.py": "IDLE", "runtime_env/agent": "RuntimeEnvAgent"}
UNNAMED |= {"multiprocessing": "EngineCore"}
RAY = {"gcs_server", "raylet", "monitor"}  # its processes that are no actors


class Listener(NamedTuple):
    """A socket that listens."""

    place: str  # at loopback, at one address or at all
    port: int


def sockets() -> dict[str, Listener]:
    """The sockets that listen, by inode."""
    found = {}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTENS:
                address, _, port = fields[1].partition(":")
                place = "all addresses" if address in EVERYWHERE else "one address"
                place = "loopback" if LOOPBACK.fullmatch(address) else place
                found[fields[9]] = Listener(place, int(port, 16))
    return found


def name_of(pid: int) -> str:
    """What a process is called in docs/cluster.md; "" for one that is ending."""
    words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    if not words[0]:
        return ""
    if found := re.match(r"ray::(\w+)", words[0]):
        is_actor = found[1][0].isupper() and not found[1].startswith("IDLE")
        return found[1] if is_actor else "IDLE"  # it may run a function, or spill objects
    if Path(words[0]).name in RAY:  # whose arguments name the commands of others
        return Path(words[0]).name
    for part, name in UNNAMED.items():
        if part in " ".join(words):
            return name
    if words[0].startswith("VLLM::"):
        return words[0].removeprefix("VLLM::")
    files = [Path(word).stem for word in words if "/" in word or word.endswith(".py")]
    return next((name for name in files if name in RAY), "driver")


def listening(pid: int) -> Iterator[tuple[str, Listener]]:
    """Name and socket of each process that listens, of those that came from one, and that one."""
    every = sockets()
    for process in family(pid):
        try:
            links = [str(path.readlink()) for path in Path(f"/proc/{process}/fd").iterdir()]
            name = name_of(process)
        except OSError:  # it ended
            continue
        for link in links if name else ():
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
            self.seen |= {(name, found.place) for name, found in listening(self.pid)}
            time.sleep(0.2)

    def is_running(self) -> bool:
        """Whether the process is there and no zombie."""
        try:
            return " Z " not in Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2][:4]
        except OSError:
            return False
