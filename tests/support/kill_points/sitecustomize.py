"""With this folder and tests/cpu on PYTHONPATH a process of a run ends itself at an armed point.

KILL_FILE=FILE; FILE holds "POINT SIGNAL": the first process at that point removes the file and
sends itself that signal. For EIO and ENOSPC the call at that point raises an OSError instead.
Test support: nothing of it is imported by the product.
"""

import contextlib
import errno
import functools
import os
import signal
from pathlib import Path

# role: what it is about to do, or has just done -> the function that does it
POINTS = {
    "engine": {
        "before it answers": "grpo_async.Generator.answer",
        "before it pauses for an update": "grpo_async.Generator.update_weights",
        "after it was resumed": "grpo_async.Generator.update_weights",
        "before it reports its health": "grpo_async.Generator.check_health",
        "before it joins": "grpo_async.Generator.join_sync_group",
    },
    "engine core": {
        "while it serves": "vllm.v1.engine.core.EngineCore.step",
        "before it joins": "policy.sync.receiver.WeightReceiver.join_sync_group",
        "before it receives weights": "policy.sync.receiver.WeightReceiver.receive_weights",
        "before it takes the first bucket": "policy.sync.receiver.WeightReceiver.incoming",
        "after it loaded them": "policy.sync.receiver.WeightReceiver.receive_weights",
    },
    "worker": {
        "before it asks for a group": "grpo_async.RolloutWorker.rollout_group",
        "before it compares a group": "grpo_async.RolloutWorker.finish",
        "after it wrote a group down": "grpo_async.RolloutWorker.finish",
        "while an evaluation runs": "grpo_async.RolloutWorker.finish",
    },
    "trainer": {
        "before it joins": "runtime.processes.trainer_rank.SendingRank.join_sync_group",
        "before a step": "grpo_async.Trainer.train_step",
        "while a part is trained": "grpo_async.GradientSum.add",
        "after the optimizer": "grpo_async.Trainer.optimizer_step",
        "after a step": "grpo_async.Trainer.train_step",
        "before it sends weights": "runtime.processes.trainer_rank.SendingRank.send_weights",
        "after it sent them": "runtime.processes.trainer_rank.SendingRank.send_weights",
        "before it scores a probe": "grpo_async.Trainer.probe_gaps",
        "before it copies a checkpoint": "runtime.processes.trainer_rank.Rank.save",
        "before it writes one": "runtime.processes.trainer_rank.Rank.saved",
        "after it wrote one": "runtime.processes.trainer_rank.Rank.saved",
        "before it renames a checkpoint": "runtime.checkpoints.folders.commit",
        "after a checkpoint is there": "runtime.checkpoints.folders.commit",
        "before it deletes an old one": "runtime.checkpoints.folders.prune",
    },
    "driver": {
        "before it takes a step's groups": "grpo_async.RolloutBuffer.take",
        "after it planned a step": "grpo_async.plan_step",
        "after a step was trained": "grpo_async.Run.train",
        "after the engines were synced": "grpo_async.Engines.sync",
    },
    "disk": {
        "before a checkpoint is written": "runtime.processes.trainer_rank.Rank.saved",
        "before a checkpoint is renamed": "runtime.checkpoints.folders.commit",
    },
}
# Points that some calls of their function do not reach: a condition on the call's arguments.
CONDITIONS = {
    "worker while an evaluation runs": lambda worker, row, slot, episodes: (
        slot.evaluation is not None
    ),
    "trainer while a part is trained": lambda gradients, policy, update, rows, loss: update.more,
}
MODULES = (
    "grpo_async",
    "runtime.processes.trainer_rank",
    "runtime.checkpoints.folders",
    "policy.sync.receiver",
    "vllm.v1.engine.core",
)
FILE = os.environ.get("KILL_FILE", "")


def taken(point: str) -> str:
    """Returns the armed signal or error if it is this point's and no other process came first."""
    try:
        armed, name = Path(FILE).read_text().rsplit(" ", 1)
        if armed != point:
            return ""
        os.rename(FILE, f"{FILE}.{os.getpid()}")
    except (OSError, ValueError):
        return ""
    return name


def strike(point: str, arguments: tuple) -> None:
    """Ends or stops this process, or raises an OSError, if the point is armed."""
    if point in CONDITIONS and not CONDITIONS[point](*arguments):
        return
    name = taken(point)
    if name in ("EIO", "ENOSPC"):
        number = getattr(errno, name)
        raise OSError(number, os.strerror(number), point)
    if name:
        os.kill(os.getpid(), getattr(signal, name))


@contextlib.contextmanager
def between(before: list[str], after: list[str], *arguments):
    """Strikes at the points before and after a call."""
    for point in before:
        strike(point, arguments)
    yield
    for point in after:
        strike(point, arguments)


def mend(module) -> None:
    """Puts the points into a module that has just been imported."""
    places = {}
    for role, points in POINTS.items():
        for what, place in points.items():
            when = 1 if what.startswith("after") else 0
            places.setdefault(place, ([], []))[when].append(f"{role} {what}")
    for place, points in places.items():
        surround(module, place, functools.partial(between, *points))


def draft(_) -> None:
    """As tests/cpu/sitecustomize.py, which this one hides."""
    __import__("vllm_drafts").install()


def unlimited(repair) -> None:
    """Replaces engines however often they are killed in an hour."""
    repair.MAX_RESTARTS = 10**6


if FILE:
    from import_hooks import after_import, surround

    others = {"runtime.engines.repair": unlimited, "vllm.utils.cpu_triton_utils": draft}
    after_import(dict.fromkeys(MODULES, mend) | others)
