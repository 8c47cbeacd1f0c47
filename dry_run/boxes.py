"""Counts the boxes of agents that repair repositories, and what they need (envs/boxes/box.py)."""

import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from dry_run import pace
from envs import services
from envs.boxes import box_budget, image_cache, image_names
from envs.boxes.box import Size
from policy.gpus import GIB
from rollout.rows import raw_lines
from runtime.processes import placement
from settings.config import RunSettings

ROWS = b'"swe_agents'  # in the line of a row whose agent works in a box
SIZE = Size()


class Boxes(NamedTuple):
    """The number of boxes that a run has at once: one per episode."""

    episodes: int
    nodes: int  # nodes that have rollout workers
    here: int  # boxes on the fullest of them


def uses(cfg: RunSettings) -> bool:
    """Returns True if an existing data file has rows whose agents work in boxes."""
    if not cfg.services.images:
        return False
    files = [path for path in (cfg.data.train, cfg.data.val) if os.path.isfile(path)]
    return any(ROWS in line for path in files for _, line in raw_lines(path))


def count(cfg: RunSettings) -> Boxes:
    """Counts boxes: workers take groups in turn, and are spread over the nodes."""
    groups = (cfg.max_lag + 1) * cfg.prompts_per_step
    workers = cfg.rollout_workers
    nodes = min(workers, math.ceil(len(placement.gpus(cfg)) / pace.NODE_GPUS) or 1)
    here = math.ceil(workers / nodes) * math.ceil(groups / workers) * cfg.group_size
    episodes = groups * cfg.group_size
    return Boxes(episodes, nodes, min(here, episodes))


def sizes(cfg: RunSettings) -> list[int]:
    """Returns the bytes of the existing .sif files that the rows name."""
    services.configure(cfg.services)
    files = [path for path in (cfg.data.train, cfg.data.val) if os.path.isfile(path)]
    named = {name for path in files for name in image_names.named(path)}
    folders = map(image_names.folder_of, named)
    found = [folder.with_name(f"{folder.name}.sif") for folder in folders]
    return [path.stat().st_size for path in found if path.is_file()]


def rows(cfg: RunSettings) -> list[tuple[str, str, str]]:
    """Returns the label, number and note of each line of the dry run; empty without boxes."""
    if not uses(cfg):
        return []
    boxes = count(cfg)
    files = sizes(cfg)
    groups = f"{cfg.max_lag + 1} x {cfg.prompts_per_step} prompts x {cfg.group_size}"
    workers = f"rollout_workers {cfg.rollout_workers} on {boxes.nodes} nodes"
    half = f"of files that they change: {box_budget.SHARE:.0%} of a node's memory"
    each = f"the processes of one box: {SIZE.memory / GIB:g} at most"
    found = [
        ("episodes at once", f"{boxes.episodes:,}", f"{groups}; {workers}"),
        ("boxes of a node", f"{boxes.here:,}", f"all at once if {box_budget.VARIABLE} allows it"),
        ("GiB of memory", f"{boxes.here * SIZE.disk / GIB:,.0f}", f"{half}; {each}"),
    ]
    if files:
        largest = f"{len(files):,} of them here; the largest {max(files) / GIB:,.2f}"
        found += [("GiB of images", f"{sum(files) / GIB:,.2f}", largest)]
    return found


def problems(cfg: RunSettings) -> Iterator[str]:
    """Yields what this node lacks for its boxes. Prints a note if some boxes will have to wait."""
    if why := box_budget.problem(SIZE.disk) or image_cache.problem():
        yield why
        return
    here = count(cfg).here
    most = box_budget.boxes(SIZE.disk)
    if here > most:
        print(
            f"note: a node has {here:,} episodes at once, but room for {most:,} boxes: "
            f"the others wait for {box_budget.WAIT * cfg.timeouts.rollout:,.0f} s at most: "
            f"raise rollout_workers or {box_budget.VARIABLE}, or lower prompts_per_step or max_lag"
        )
    files = sizes(cfg)
    folder = os.environ.get(image_cache.FOLDER)
    if files and folder:
        limit = image_cache.limit(Path(folder))
        largest = max(files)
        if largest > limit:
            yield (
                f"{image_cache.FOLDER} = {folder!r} holds {limit / GIB:,.2f} GiB, but the largest "
                f"image takes {largest / GIB:,.2f}: raise {image_cache.MOST}, or use another disk"
            )
