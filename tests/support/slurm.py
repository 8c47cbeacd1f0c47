"""A real Slurm on this machine: munge, slurmctld, and a slurmd for each of several nodes."""

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from support.program import ran

CONF = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.sock
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SchedulerParameters=sched_interval=2,bf_interval=2,batch_sched_delay=1
KillWait=30
OverTimeLimit=1
SlurmdTimeout=30
NodeName={nodes} NodeHostname={host} NodeAddr=127.0.0.1 Port=[{first}-{last}] CPUs=2
PartitionName=batch Nodes={nodes} Default=YES MaxTime=INFINITE State=UP
"""


class Slurm:
    """A cluster of `count` nodes n1, n2, ... whose files are in a folder that all may read."""

    def __init__(self, folder: Path, count: int):
        port = 16800 + os.getpid() % 100 * 10  # another test may have a cluster here
        self.folder = folder
        self.names = [f"n{i}" for i in range(1, count + 1)]
        ports = {"port": port, "first": port + 1, "last": port + count}
        host, nodes = socket.gethostname(), f"n[1-{count}]"
        text = CONF.format(folder=folder, host=host, nodes=nodes, **ports)
        (folder / "slurm.conf").write_text(text)
        self.env = os.environ | {"SLURM_CONF": str(folder / "slurm.conf")}

    def start(self) -> None:
        """Starts all daemons and waits until the nodes are idle."""
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o600)
        files = {"socket": "munge.sock", "key-file": "munge.key", "pid-file": "munge.pid"}
        files |= {"log-file": "munge.log", "seed-file": "munge.seed"}
        flags = [f"--{flag}={self.folder / name}" for flag, name in files.items()]
        subprocess.run(["munged", *flags], check=True, timeout=60)
        self.run("slurmctld", "-i")
        for name in self.names:
            self.run("slurmd", "-N", name)
        self.wait(lambda: self.run("sinfo", "-h", "-o", "%t %D") == f"idle {len(self.names)}", 60)

    def run(self, *command: str) -> str:
        """What a command of Slurm prints."""
        done = ran(*command, env=self.env)
        assert done.returncode == 0, (command, done.stdout, done.stderr)
        return done.stdout.strip()

    def wait(self, holds, seconds: float) -> None:
        """Waits until something holds. Raises AssertionError with the queue."""
        deadline = time.monotonic() + seconds
        while not holds():
            assert time.monotonic() < deadline, self.run("squeue") + self.run("sinfo")
            time.sleep(0.5)

    def jobs(self) -> list[str]:
        """The ids of the jobs that wait or run."""
        return self.run("squeue", "-h", "-o", "%i").split()

    def stop(self) -> None:
        """Ends all jobs and daemons."""
        with contextlib.suppress(AssertionError):
            for job in self.jobs():
                self.run("scancel", job)
            self.wait(lambda: not self.jobs(), 60)
        for name in [*self.names, "slurmctld", "munge"]:
            with contextlib.suppress(OSError, ValueError):
                os.kill(int((self.folder / f"{name}.pid").read_text()), signal.SIGTERM)


@contextlib.contextmanager
def slurm(folder: Path, count: int) -> Iterator[Slurm]:
    """A cluster that is there while the block runs."""
    made = Slurm(folder, count)
    try:
        made.start()
        yield made
    finally:
        made.stop()
