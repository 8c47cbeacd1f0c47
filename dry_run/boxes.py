"""What the boxes of agents that repair repositories take of a node (envs/boxes/box.py)."""

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

ROWS = b'"swe_agents'  # in a line that is a row of one
SIZE = Size()


class Boxes(NamedTuple):
    """How many boxes a run has at once: one for each episode."""

    episodes: int
    nodes: int  # that have rollout workers
    here: int  # on the fullest of them


def uses(cfg: RunSettings) -> bool:
    """Whether a file of rows that is there has some whose agents work in boxes."""
    files = [path for path in (cfg.data.train, cfg.data.val) if os.path.isfile(path)]
    found = (ROWS in line for path in files for _, line in raw_lines(path))
    return bool(cfg.services.images) and any(found)


def count(cfg: RunSettings) -> Boxes:
    """The boxes at once: groups go to the workers in turn, workers are spread over the nodes."""
    groups = (cfg.max_lag + 1) * cfg.prompts_per_step
    workers = cfg.rollout_workers
    nodes = min(workers, math.ceil(len(placement.gpus(cfg)) / pace.NODE_GPUS) or 1)
    here = math.ceil(workers / nodes) * math.ceil(groups / workers) * cfg.group_size
    episodes = groups * cfg.group_size
    return Boxes(episodes, nodes, min(here, episodes))


def sizes(cfg: RunSettings) -> list[int]:
    """The bytes of the .sif files that the rows name and that are there."""
    services.configure(cfg.services)
    files = [path for path in (cfg.data.train, cfg.data.val) if os.path.isfile(path)]
    named = {name for path in files for name in image_names.named(path)}
    folders = map(image_names.folder_of, named)
    found = [folder.with_name(f"{folder.name}.sif") for folder in folders]
    return [path.stat().st_size for path in found if path.is_file()]


def rows(cfg: RunSettings) -> list[tuple[str, str, str]]:
    """Label, number and note of each line for the dry run; none for a run without boxes."""
    if not uses(cfg):
        return []
    boxes, files = count(cfg), sizes(cfg)
    groups = f"{cfg.max_lag + 1} x {cfg.prompts_per_step} prompts x {cfg.group_size}"
    workers = f"rollout_workers {cfg.rollout_workers} on {boxes.nodes} nodes"
    half = f"of files that they change: {box_budget.SHARE:.0%} of a node's memory"
    each = f"the processes of one box: {SIZE.memory / GIB:g} at most"
    found = [
        ("episodes at once", f"{boxes.episodes:,}", f"{groups}; {workers}"),
        (
            "boxes of a node",
            f"{boxes.here:,}",
            f"as many at once where {box_budget.VARIABLE} says so",
        ),
        ("GiB of memory", f"{boxes.here * SIZE.disk / GIB:,.0f}", f"{half}; {each}"),
    ]
    if files:
        largest = f"{len(files):,} of them here; the largest {max(files) / GIB:,.2f}"
        found += [("GiB of images", f"{sum(files) / GIB:,.2f}", largest)]
    return found


def problems(cfg: RunSettings) -> Iterator[str]:
    """What this node lacks for its boxes. Prints what makes some of them wait."""
    if why := box_budget.problem(SIZE.disk) or image_cache.problem():
        yield why
        return
    here, most = count(cfg).here, box_budget.boxes(SIZE.disk)
    if here > most:
        waits = f"{box_budget.WAIT * cfg.timeouts.rollout:,.0f} s at most"
        more = (
            f"raise rollout_workers or {box_budget.VARIABLE}, or lower prompts_per_step or max_lag"
        )
        print(f"note: a node has {here:,} episodes at once, and {most:,} boxes: ", end="")
        print(f"the others wait, {waits}: {more}")
    files, folder = sizes(cfg), os.environ.get(image_cache.FOLDER)
    if files and folder:
        limit, largest = image_cache.limit(Path(folder)), max(files)
        if largest > limit:
            holds = f"{image_cache.FOLDER} = {folder!r} holds {limit / GIB:,.2f} GiB"
            remedy = f"raise {image_cache.MOST}, or take another disk"
            yield f"{holds}, the largest image has {largest / GIB:,.2f}: {remedy}"
