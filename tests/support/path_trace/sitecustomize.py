"""With this folder and tests/cpu on PYTHONPATH a run writes down which files its walks enter.

WALK_FOLDER=FOLDER; each process appends "WALK FILE FUNCTION CALLER HANDED" lines to FOLDER/PID, a
line for each first time; HANDED is 1 where an argument is a group or a part of one. A walk is all
that its entries do in their process, in tasks and threads that they start too. Test support:
nothing of it is imported by the product.
"""

import contextlib
import contextvars
import functools
import inspect
import os
import sys
import threading
from pathlib import Path

ROOT = f"{Path(__file__).resolve().parents[3]}/"
FOLDER = os.environ.get("WALK_FOLDER", "")
WALK: contextvars.ContextVar[str] = contextvars.ContextVar("walk", default="")
SEEN: set[tuple[str, ...]] = set()

# Types of what a group is on its way, beside its row.
CARRIERS = {"Slot", "Request", "Turn", "Response", "Episode", "Sample", "SampleInfo", "Rollouts"}
CARRIERS |= {"Group", "Share", "Update", "Batch"}
# walk: the functions at which it begins in each process, and a condition on their arguments
ENTRIES = {
    "group": {
        "grpo_async.Run.fill": None,
        "grpo_async.Run.take": None,
        "grpo_async.Run.train": None,
        "grpo_async.RolloutWorker.rollout_group": None,
        "grpo_async.Generator.generate": None,
        "grpo_async.Trainer.train_step": None,
    },
    "update": {
        "grpo_async.Engines.sync": lambda engines, version: version > 1,
        "grpo_async.Generator.update_weights": lambda engine, version, verify: not verify,
        "runtime.processes.trainer_rank.SendingRank.send_weights": lambda rank, verify: not verify,
        "policy.sync.receiver.WeightReceiver.receive_weights": lambda worker, verify: not verify,
    },
    "death": {
        "runtime.engines.fleet.Fleet.discard": None,
        "runtime.engines.repair.replace": None,
        "grpo_async.Engines.sync": lambda engines, version: engines.fleet.missing.is_set(),
    },
}
MODULES = ("grpo_async", "runtime.engines.fleet", "runtime.engines.repair")
MODULES += ("runtime.processes.trainer_rank", "policy.sync.receiver")


def ours(frame) -> str:
    """The file of a frame, below the root; "" for a file of a library or a test."""
    name = frame.f_code.co_filename
    own = name.startswith(ROOT) and "site-packages" not in name
    path = name.removeprefix(ROOT) if own else ""
    return "" if path.startswith(("tests/", ".venv")) else path


def loads(frame) -> bool:
    """Whether a frame runs while a module is imported."""
    while frame:
        if frame.f_code.co_name == "<module>" and ours(frame) not in ("", "grpo_async.py"):
            return True
        frame = frame.f_back
    return False


def is_group(value, depth: int = 3) -> bool:
    """Whether a value is a group or a part of one, or a list of such."""
    if isinstance(value, list | tuple) and value and depth and is_group(value[0], depth - 1):
        return True
    return type(value).__name__ in CARRIERS or isinstance(value, dict) and "agent_ref" in value


def handed(frame) -> str:
    """Whether an argument of a call is a group or a part of one."""
    code = frame.f_code
    count = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & inspect.CO_VARARGS)
    return str(int(any(is_group(frame.f_locals.get(name)) for name in code.co_varnames[:count])))


def note(frame, event: str, _) -> None:
    """Writes down a call, if it belongs to a walk and was not seen before."""
    walk = WALK.get() if event == "call" else ""
    if not walk or not (file := ours(frame)) or loads(frame):
        return
    caller = frame.f_back
    while caller and not ours(caller):
        caller = caller.f_back
    name = frame.f_code.co_qualname
    line = (walk, file, name, ours(caller) if caller else "-", handed(frame))
    if line not in SEEN:
        SEEN.add(line)
        with open(f"{FOLDER}/{os.getpid()}", "a") as lines:
            lines.write(" ".join(line) + "\n")


@contextlib.contextmanager
def entered(walk: str, holds, *args):
    """A call with which a walk begins."""
    sys.setprofile(note)
    threading.setprofile(note)
    token = WALK.set(walk if not holds or holds(*args) else WALK.get())
    try:
        yield
    finally:
        WALK.reset(token)


def mend(module) -> None:
    """Wraps the entries of a module that has just been imported."""
    for walk, entries in ENTRIES.items():
        for place, holds in entries.items():
            surround(module, place, functools.partial(entered, walk, holds))


if FOLDER:
    from import_hooks import after_import, surround

    after_import(dict.fromkeys(MODULES, mend))
