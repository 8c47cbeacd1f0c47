"""Writes checkpoints: folders that are complete or absent. resume.py chooses one to load.

A checkpoint is written aside, flushed to the disk, renamed, and marked last. The marker holds the
size and CRC-32 of every file, so a truncated, half-written or bit-flipped checkpoint is recognised
and the previous one is used.

    step_000100/policy/         shards of weights and AdamW moments (torch.distributed.checkpoint)
    step_000100/groups.npz      finished groups that no step has taken yet
    step_000100/state.json      the driver's state
    step_000100/hf/             the same policy for transformers and vLLM, with its own marker
    step_000100/complete.json   the marker
"""

import asyncio
import dataclasses
import itertools
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from tqdm import tqdm

from core.jsonl import WriteError
from core.waits import Ref, within
from core.write_errors import FULL, system_error
from policy.packing import Place
from rollout.episode import Group
from runtime.checkpoints import archive, folders, lineage, resume
from runtime.checkpoints.folders import checksums, commit, listing, newest_first, split
from settings.config import TrainingSettings

if TYPE_CHECKING:
    from rollout.episode import Group
    from runtime.processes.cluster import Cluster


RETRY_SECONDS = 60.0  # from an attempt to write a checkpoint to the next, which is the last


class ScoredShare(NamedTuple):
    """A rank's logprobs for the samples that it trained, and the samples' places in the batch."""

    places: list[Place]  # (group in the batch, place in the group), in the order of the logprobs
    logps: Ref[np.ndarray]  # float32 [T] for all their tokens


def not_saved(folder: str, reason: OSError) -> str:
    """Says in one sentence which file kept a checkpoint from being saved, and why."""
    told = f"{folder} was not saved: {reason.filename or folder}: {reason.strerror}"
    if reason.errno in FULL:
        free = shutil.disk_usage(Path(folder).parent).free >> 20
        told += f"; {free} MiB are free there"
    return told


class Checkpoints:
    """Saves, finds and loads a run's checkpoints; the cluster's trainers and workers do the work.

    A checkpoint's state is a dictionary of JSON values. The run chooses its entries; `load` returns
    it with `folder` and `evaluated` added. `rows` are the `Rows` that the run trains on.
    """

    def __init__(self, cfg: TrainingSettings, cluster: "Cluster", rows: Any):
        self.cfg = cfg
        self.cluster = cluster
        self.rows = rows
        self.saving: asyncio.Task | None = None  # the checkpoint that is being written
        self.has_samples = False  # once this process has written samples of a step

    def exist(self) -> bool:
        """Returns whether the run folder holds a checkpoint."""
        return bool(newest_first(self.cfg.run_dir))

    async def save(
        self, state: dict, groups: "list[Group] | None", tasks: asyncio.TaskGroup
    ) -> None:
        """Copies the current state while the caller waits, and writes it as one of `tasks`.

        Raises the error with which writing the previous checkpoint failed.
        """
        await self.written()
        folder = f"{self.cfg.run_dir}/step_{state['version']:06d}"
        state = state | {"config": dataclasses.asdict(self.cfg)}
        state["rows"] = [len(self.rows), self.rows.checksum(len(self.rows))]
        state["ready"] = [group.slot for group in groups or ()]
        copies = (t.save.remote(f"{folder}.partial") for t in self.cluster.trainers)
        limit = self.cfg.timeouts.train
        await within(limit, "the trainers to copy their state", asyncio.gather(*copies))
        self.saving = tasks.create_task(self.write_or_explain(folder, state, groups))

    async def written(self) -> None:
        """Waits until no checkpoint is being written. Raises the error if the writing fails."""
        if self.saving:
            await self.saving

    async def write_or_explain(
        self, folder: str, state: dict, groups: "list[Group] | None"
    ) -> None:
        """Writes a checkpoint; if a file cannot be written, tries once more, RETRY_SECONDS later.

        Raises WriteError, with the file and the reason in one sentence, if that fails too.
        """
        problem = ""
        for is_second in (False, True):
            try:
                if is_second:
                    await self.remove(f"{folder}.partial")
                await self.write(folder, state, groups)
                return
            except Exception as error:
                reason = system_error(error)
                if reason is None:
                    error.add_note(f"{folder} was not saved")
                    raise
                problem = not_saved(folder, reason)
            if not is_second:
                tqdm.write(f"{problem}; it is tried again in {RETRY_SECONDS:.0f} s")
                await asyncio.sleep(RETRY_SECONDS)
        raise WriteError(problem)

    async def remove(self, folder: str) -> None:
        """Deletes what an attempt to write a checkpoint has left."""
        call = self.cluster.trainers[0].call.options(concurrency_group="io").remote
        removing = call(folders.remove, Path(folder))
        await within(self.cfg.timeouts.train, f"{folder} to be deleted", removing)

    async def write(self, folder: str, state: dict, groups: "list[Group] | None") -> None:
        """Writes a checkpoint of the copied state."""
        aside = f"{folder}.partial"
        limit = self.cfg.timeouts.train
        trainers = self.cluster.trainers
        parts = (t.saved.options(concurrency_group="io").remote() for t in trainers)
        await within(limit, f"{aside} to be written", asyncio.gather(*parts))
        Path(aside, "state.json").write_text(json.dumps(state, indent=1))
        own = ["state.json", *lineage.mark(self.cfg, aside, state["version"])]
        if groups is not None:
            await self.write_groups(f"{aside}/groups.npz", groups)
            own.append("groups.npz")
        # Not in the driver, because a thread that hangs in a file system would keep it from ending.
        calls = [t.call.options(concurrency_group="io").remote for t in trainers]
        asked = asyncio.gather(*(call(listing, aside) for call in calls))
        listings = await within(limit, f"{aside} to be listed", asked)
        listings[0] = [*listings[0], *own]
        flushes = []
        for call, names in zip(calls, split(listings), strict=True):
            flushes.append(call(checksums, aside, names))
        flushed = await within(limit, f"{aside} to be flushed", asyncio.gather(*flushes))
        files = dict(itertools.chain(*(part.items() for part in flushed)))
        await within(limit, f"{folder} to be committed", calls[0](commit, aside, folder, files))
        kept = self.cfg.keep_last, self.cfg.keep_exports
        deleted = calls[0](folders.prune, self.cfg.run_dir, *kept)
        for problem in await within(limit, "old checkpoints to be deleted", deleted):
            print(f"kept the checkpoint around a damaged export: {problem}")

    async def write_groups(
        self, path: str, groups: list[Group], scores: Sequence[ScoredShare] = ()
    ) -> None:
        """Writes groups, and the logprobs that the trainers computed for them."""
        heads = [(group.slot, group.version, group.line) for group in groups]
        places = [share.places for share in scores]
        logps = [share.logps for share in scores]
        samples = [group.samples for group in groups]
        writing = self.cluster.task(archive.write_groups, path, heads, places, *logps, *samples)
        await within(self.cfg.timeouts.train, f"{path} to be written", writing)

    async def write_samples(
        self, step: int, groups: list[Group], scores: Sequence[ScoredShare] = ()
    ) -> None:
        """Writes a step's groups below samples/, for report and --replay.

        Prints a line if somebody has deleted that folder since the last time.
        """
        folder = Path(self.cfg.run_dir, "samples")
        if self.has_samples and not folder.exists():
            tqdm.write(f"{folder} was deleted: the samples of earlier steps are lost")
        await self.write_groups(f"{folder}/step_{step:06d}.npz", groups, scores)
        self.has_samples = True  # not before: the next step's samples may overtake the first ones

    async def read_groups(self, path: str, count: int) -> list[Group]:
        """Reads what `write_groups` wrote: `count` groups, their samples by reference."""
        reading, *samples = self.cluster.task(archive.read_groups, path, returns=1 + count)
        heads = await within(self.cfg.timeouts.start, f"{path} to be read", reading)
        groups = []
        for (slot, version, line, infos), ref in zip(heads, samples, strict=True):
            groups.append(Group(slot, version, line, infos, ref))
        return groups

    async def read_ready(self, state: dict) -> list[Group]:
        """Reads the finished groups of the checkpoint whose state is `state`."""
        count = len(state["ready"])
        if not count:
            return []
        return await self.read_groups(f"{state['folder']}/groups.npz", count)

    async def load(
        self, must_match: Sequence[str] | None = None, fresh: dict | None = None
    ) -> dict:
        """Restores trainers and run folder to the state of the checkpoint that the command names.

        Returns its state, {} if there is no checkpoint. If `must_match` is None, training is not
        resumed: the run folder stays as it is, and any stream of prompts is accepted. Raises
        InputError if there are checkpoints but all are damaged; if the checkpoint has another
        stream of prompts, another value of a setting in `must_match`, or other fields than `fresh`,
        the state of a run that starts; and if one is to be evaluated and none exists.
        """
        suffixes = {path.suffix for path in Path(self.cfg.run_dir).glob("*")}
        remains = {".jsonl", ".kept", ".partial"} & suffixes  # left by a run that died in step 1
        if not self.cfg.command.resume and not remains:
            return {}
        return await resume.load(self, must_match, fresh)
