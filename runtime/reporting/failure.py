"""Says in one sentence why a run failed, and keeps its traceback in a file."""

import contextlib
import os
import re
import shutil
import tempfile
import traceback
from collections.abc import Iterator
from pathlib import Path

from core.errors import RunError, in_one_line, shown
from settings.config import TrainingSettings

TAIL = 1 << 16  # bytes at the end of a log that are read
FULL = 1 << 20  # a disk with fewer free bytes is called full
LONGEST = 600  # characters of an error or of a log's line in a sentence
NEAR_END = 20  # lines at the end of a log, among which the error is that ended the process
# What a machine ran out of, and how libraries word it.
EXHAUSTED = {
    "the limit of open files (ulimit -n) is too low": re.compile(r"Too many open files"),
    "a disk is full": re.compile(r"No space left on device"),
    "a disk quota is used up": re.compile(r"Disk quota exceeded"),
    "memory ran out": re.compile(
        r"MemoryError|error: out of memory|'out of memory'|[Cc]an(no|')t allocate memory"
        r"|std::bad_alloc|running low on memory"
    ),
}
WITH_ERROR = re.compile(r"error\b|exception\b|fatal|terminate called", re.IGNORECASE)
# Lines of faulthandler's dump, and of a native stack.
OF_DUMP = re.compile(
    r'(Current thread|Thread) 0x|  File ".*", line \d+ in |  <no Python frame>'
    r"|Extension modules: |.*@ +0x[0-9a-f]+"
)
PID = re.compile(r"\bpid[:=] ?(\d+)")  # of the process at fault, in Ray's errors
NO_REASON = re.compile(r"class_name: |root cause")  # Ray's dead actor, vLLM's dead engine


def ending(cfg: TrainingSettings, error: Exception) -> str:
    """Keeps the traceback of the error that ends a run; returns the last line to print.

    launch/grpo.sbatch recognises a run that failed, and may be started again, by that line.
    """
    told = " ".join(reason(cfg, error).split())
    return f"error: {told}; traceback: {keep(cfg, error) or 'it cannot be written'}"


def keep(cfg: TrainingSettings, error: Exception) -> str:
    """Writes an error's traceback to the run's logs/, or to a temporary file if that fails.

    Returns the path; "" if neither can be written.
    """
    text = "".join(traceback.format_exception(error))
    path = Path(cfg.writes_to, "logs", f"traceback-{os.uname().nodename}-{os.getpid()}.txt")
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8", errors="replace")
        return shown(path)
    with contextlib.suppress(OSError):
        descriptor, name = tempfile.mkstemp(prefix="traceback-", suffix=".txt")
        with open(descriptor, "w", encoding="utf-8", errors="replace") as file:
            file.write(text)
        return name
    return ""


def reason(cfg: TrainingSettings, error: Exception) -> str:
    """Says in one line why a run failed: first what its machine ran out of, if that was it."""
    errors = list(causes(error))
    told = described(errors[0])
    for each in errors:
        for line in str(each).splitlines():
            lack = "" if line.startswith(" ") else exhausted(line)  # " ": a frame of a traceback
            if lack:
                return f"{lack}: {told}" if line in told else f"{lack}: {told}: {line}"
    for folder in (cfg.run_dir, ray_folder()):
        if is_full(folder):
            return f"the disk of {folder} is full: {told}"
    if any(map(gives_no_reason, errors)):
        return reason_in_logs(cfg, errors, told)
    return told


def reason_in_logs(cfg: TrainingSettings, errors: list[BaseException], told: str) -> str:
    """Says why a process ended, did not start or did not answer, of which the errors `told`.

    Reads the logs of the processes that the errors name, or else all logs.
    """
    own = [path for error in errors for path in logs_of(cfg, error)]
    for path in own or recent_logs(cfg):
        for line in reversed(tail(path)):
            if lack := exhausted(line):
                return f"{lack}: {told}: {path.name}: {line[:LONGEST]}"
    if not own:
        return told
    for line in reversed(tail(own[0])[-NEAR_END:]):
        if WITH_ERROR.search(line):
            return f"{told}: {own[0].name}: {line[:LONGEST]}"
    return (
        f"{told}: {own[0].name} ends without an error: "
        "something else ended the process, often because memory ran out"
    )


def causes(error: BaseException) -> Iterator[BaseException]:
    """Yields an error and those from which it was raised; of a group, those of each member."""
    if isinstance(error, BaseExceptionGroup):
        for member in error.exceptions:
            yield from causes(member)
        return
    yield error
    earlier = error.__cause__
    if earlier is None and not error.__suppress_context__:
        earlier = error.__context__
    if earlier is not None:
        yield from causes(earlier)


def described(error: BaseException) -> str:
    """Returns an error in one line with its notes; if it is of this process, its type is first."""
    line = in_one_line(error)[:LONGEST]
    if not type(error).__module__.startswith("ray."):
        line = f"{type(error).__name__}: {line}"
    return "; ".join([line, *getattr(error, "__notes__", ())])


def exhausted(line: str) -> str:
    """Returns what a machine ran out of, according to an error message; "" if it does not say."""
    for lack, words in EXHAUSTED.items():
        if words.search(line):
            return lack
    return ""


def gives_no_reason(error: BaseException) -> bool:
    """Returns whether an error only says that a process died, did not start or did not answer."""
    return type(error) in (TimeoutError, RunError) or bool(NO_REASON.search(str(error)))


def is_full(folder: str) -> bool:
    """Returns whether the disk of a folder is full; False if there is no such folder."""
    with contextlib.suppress(OSError):
        return shutil.disk_usage(folder).free < FULL
    return False


def ray_folder() -> str:
    """Returns the folder of Ray's sessions on this machine, without which no actor starts."""
    return os.path.join(os.environ.get("RAY_TMPDIR", "/tmp"), "ray")


def last_lines(cfg: TrainingSettings, lines: int = 8) -> str:
    """Returns the most telling lines of the six latest logs, latest log first."""
    found = []
    for path in latest(Path(cfg.run_dir).glob("**/logs/*.log"))[:6]:
        text = telling(tail(path), lines)
        if text:
            found += [f"--- {path.name}", *text]
    return "\n".join(found)


def telling(lines: list[str], count: int) -> list[str]:
    """Chooses `count` lines of a log: the last ones with an error, then the last ones without."""
    worth = [(bool(WITH_ERROR.search(line)), number) for number, line in enumerate(lines)]
    chosen = sorted(worth)[-count:]
    return [lines[number] for number in sorted(number for _, number in chosen)]


def tail(path: Path) -> list[str]:
    """Returns the lines at the end of a log, without dumps of stacks; [] if it cannot be read."""
    with contextlib.suppress(OSError), open(path, "rb") as file:
        file.seek(max(0, path.stat().st_size - TAIL))
        text = file.read().decode(errors="replace")
        return [line for line in text.splitlines() if line.strip() and not OF_DUMP.match(line)]
    return []


def logs_of(cfg: TrainingSettings, error: BaseException) -> list[Path]:
    """Returns the logs of the processes that one of Ray's errors names."""
    found: list[Path] = []
    for pid in PID.findall(str(error)):
        found += latest(Path(cfg.writes_to).glob(f"logs/*-{pid}.log"))
    return found


def recent_logs(cfg: TrainingSettings) -> list[Path]:
    """Returns the logs that were written to since the run started, latest first."""
    lock = Path(cfg.run_dir, "lock")  # written when the run started
    since = lock.stat().st_mtime if lock.exists() else 0.0
    paths = Path(cfg.writes_to).glob("logs/*.log")
    return latest(path for path in paths if os.path.getmtime(path) >= since)


def latest(paths: Iterator[Path]) -> list[Path]:
    """Returns files, the most recently written one first; [] if they cannot be looked at."""
    with contextlib.suppress(OSError):
        return sorted(paths, key=os.path.getmtime, reverse=True)
    return []
