"""Runs Lean on a file and decides whether its output can be trusted.

Not an environment: envs/proofs/lean.py uses it.
"""

import re

from envs.proofs import lean_source
from envs.proofs.lean_source import folders
from envs.sandbox import sandbox, service
from envs.services import CheckerError

LIMITS = sandbox.Limits(seconds=30, memory=16 << 30, output=200_000)
ENDED = {"completed": "", "failed": "", "timeout": "time"}  # the service's status -> Ran.ended
ERROR = re.compile(r":(\d{1,9}):\d+: error")  # as in FILE:LINE:COLUMN: error: unknown identifier
# The proof is at fault if one of these appears; else Lean was killed, or lacked memory or disk.
SAYS_WHY = re.compile(rf"{ERROR.pattern}|stack overflow|deep recursion", re.IGNORECASE)
# The machine is at fault, because a proof can neither do IO nor start a thread.
MACHINE = re.compile(r"error: (?:IO error|failed to create thread)")
COMPILES: set[str] = set()  # headers that compiled in this process
REFUSES: set[str] = set()  # headers with which a false proof was refused in this process


async def compile_lean(source: str) -> sandbox.Ran:
    """Compiles a file with Lean. Raises CheckerError if Lean cannot run."""
    source = source.encode("utf-8", "replace").decode()
    if url := lean_source.url():
        return await compiled_there(url, source)
    command = [*lean_source.command(), "proof.lean"]
    files = {"proof.lean": source}
    return await sandbox.run(command, files=files, reads=folders(command), limits=LIMITS)


async def compiled_there(url: str, source: str) -> sandbox.Ran:
    """Compiles a file in the sandbox service at `url`. Raises CheckerError if Lean cannot run."""
    reply = await service.execute(url, source, "lean4", "", LIMITS)
    status, out, err = (reply[key] for key in service.FIELDS)
    unsaid = not SAYS_WHY.search(out + err) or MACHINE.search(out + err)
    if status not in ENDED or (status == "failed" and unsaid):
        raise CheckerError(f"the sandbox service at {url}: {status}: {err[:300]}")
    ended = "output" if out.endswith("<output cut>") else ENDED[status]
    return sandbox.Ran(out, err, int(status == "failed"), ended, 0.0)


def failure(ran: sandbox.Ran) -> str:
    """Returns why Lean did not accept a file; "" if it did.

    A reason is "timeout", "output", "memory", "failed" or "sorry".
    """
    output = ran.stdout + ran.stderr
    if ran.ended == "time":
        return "timeout"
    if ran.ended:
        return ran.ended
    if ran.code != 0 or ERROR.search(output):
        return "failed"
    return "sorry" if re.search(r"\bsorry\b", output.lower()) else ""


async def is_doubtful(header: str, ran: sandbox.Ran) -> bool:
    """Returns whether to compile a proof again, because Lean refused it but named no line of it.

    Raises CheckerError if the header alone does not compile either.
    """
    output = ran.stdout + ran.stderr
    length = header.count("\n")
    if any(int(line) > length for line in ERROR.findall(output)):
        return False
    if header in COMPILES and (ran.ended or not output.strip()):
        return is_unsaid(ran)
    await must_compile(header)
    return True


def is_unsaid(ran: sandbox.Ran) -> bool:
    """Returns whether Lean ended without output, as it does if killed, or at a service's deadline.

    That deadline counts wall-clock time: the service may have been busy.
    """
    silent = not ran.ended and not (ran.stdout + ran.stderr).strip()
    return silent or (ran.ended == "time" and bool(lean_source.url()))


async def must_compile(header: str) -> None:
    """Raises CheckerError if a header alone does not compile."""
    probe = await compile_lean(header + "example : True := trivial\n")
    if reason := failure(probe):
        shown = " ".join((probe.stdout + probe.stderr).split())[:300]
        raise CheckerError(f"Lean cannot compile the header {header[:100]!r}: {reason}: {shown}")
    COMPILES.add(header)


async def must_refuse(header: str) -> None:
    """Raises CheckerError if a false proof is accepted: then the compiler cannot be Lean."""
    if header in REFUSES:
        return
    probe = await compile_lean(header + "example : False := trivial\n")
    output = probe.stdout + probe.stderr
    if failure(probe) != "failed" or not ERROR.search(output):
        shown = " ".join(output.split())[:300]
        raise CheckerError(f"Lean does not refuse a false proof, code {probe.code}: {shown}")
    REFUSES.add(header)
