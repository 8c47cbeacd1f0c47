"""The page of a run: `python report.py RUN_DIR` -> RUN_DIR/report.html, one file without network.

All but the tokenizer comes from the run's folder, and the run may still be going: lines and
archives that are half written are left out, and so is what a missing file would have shown.
"""

import itertools
import json
import math
import sys
import time
import zipfile
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np

from envs.shared.markup import FLAWS
from runtime.config import InputError

# What one page holds: a browser stays quick up to some 50 MB, and long runs write far more.
LIMITS = {
    "mismatch": 1000,
    "rollouts": 2000,
    "characters": 30_000_000,
    "samples": 256,
    "samples_per_step": 64,
    "tokens": 500_000,
}


def write(run_dir: str) -> Path:
    """Writes the page of a run; returns its path. Raises InputError where there is no folder."""
    run = Path(run_dir)
    if not run.is_dir():
        raise InputError(f"{run_dir}: expected the folder of a run")
    config = {}
    with suppress(OSError, ValueError):  # it may be half written
        config = json.loads((run / "config.json").read_text(), parse_constant=str)
    data = {
        "name": run.resolve().name,
        "written": time.strftime("%Y-%m-%d %H:%M"),
        "limits": LIMITS,
        "config": config,
        "columns": columns(read(run / "metrics.jsonl")),
        "mismatch": list(read(run / "mismatch.jsonl"))[-LIMITS["mismatch"] :],
        "rollouts": rollouts(sorted(run.glob("rollouts*.jsonl"))),
        "samples": samples(sorted((run / "samples").glob("step_*.npz")), config.get("model", "")),
    }
    template = (Path(__file__).parent / "runtime/report_page.html").read_text()
    # Rollouts are untrusted text: without "<" nothing in them can end the script element.
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    page = run / "report.html"
    page.write_text(template.replace("{{data}}", text, 1))
    return page


def parse(lines: Iterable[str]) -> Iterator[dict]:
    """The lines that are whole; NaN and the infinities, which browsers cannot read, become None."""
    for line in lines:
        with suppress(ValueError):
            yield json.loads(line, parse_constant=lambda name: None)


def read(path: Path) -> Iterator[dict]:
    """The lines of a JSONL file; none if it is missing."""
    if path.exists():
        with open(path, errors="replace") as file:
            yield from parse(file)


def columns(lines: Iterable[dict]) -> dict[str, list]:
    """Every numeric metric, and `step`, as one value for each step; None where it has none."""
    rows: dict[int, dict[str, float]] = defaultdict(dict)
    for line in lines:
        rows[line["step"]] |= {k: v for k, v in line.items() if type(v) in (int, float)}
    steps = sorted(rows)
    names = dict.fromkeys(name for step in steps for name in rows[step])
    return {name: [short(rows[step].get(name), 8) for step in steps] for name in names}


def short(value: float | None, digits: int) -> float | None:
    """A number without the digits that nobody reads; None where it is not finite."""
    if value is None or not math.isfinite(value):
        return None
    return float(f"{value:.{digits}g}") if isinstance(value, float) else value


def rollouts(paths: list[Path]) -> dict:
    """The newest lines of all workers' files together, newest first, and how many there are."""
    kept: list[dict] = []
    total = 0
    for path in paths:
        with open(path, errors="replace") as file:
            last = newest(file, len(paths))
        kept += parse(last.lines)
        total += last.total
    return {"rows": sorted(kept, key=age), "total": total}


class Newest(NamedTuple):
    """The last lines of a file, and how many lines it has."""

    lines: deque[str]
    total: int


def newest(lines: Iterable[str], share: int) -> Newest:
    """As many of the last lines as one of `share` files may bring to a page."""
    kept: deque[str] = deque()
    size = 0
    total = 0
    for line in lines:
        total += 1
        size += len(line)
        kept.append(line)
        while len(kept) > LIMITS["rollouts"] // share or size > LIMITS["characters"] // share:
            size -= len(kept.popleft())
    return Newest(kept, total)


def age(rollout: dict) -> tuple[int, int, int]:
    """Sorts newest steps first; a validation rollout comes before the step after it."""
    if rollout["step"] is not None:
        return -rollout["step"], 1, rollout["slot"]
    return -rollout["evaluation"], 0, rollout["slot"]


def samples(paths: list[Path], model: str) -> dict:
    """Samples token by token, newest steps first, and the text of each token id in them."""
    every = itertools.chain.from_iterable(map(unpack, reversed(paths)))
    kept: list[dict] = []
    tokens = 0
    for sample in itertools.islice(every, LIMITS["samples"]):
        tokens += len(sample["tokens"])
        if kept and tokens > LIMITS["tokens"]:
            break
        kept.append(sample)
    ids = {i for sample in kept for i in sample["tokens"]}
    decoded = texts(model, ids) if kept else Texts({}, "")
    return {"rows": kept, "files": len(paths), **decoded._asdict()}


def unpack(path: Path) -> Iterator[dict]:
    """The first samples of one step's archive; none of an archive that is half written."""
    with suppress(OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        with np.load(path) as archive:
            a = dict(archive)
        ends = np.cumsum(a["length"])
        for i, end in enumerate(ends[: LIMITS["samples_per_step"]]):
            cut = slice(end - a["length"][i], end)
            group = a["group"][i]
            sampled = a["version_T"][cut] >= 0
            engine = np.where(sampled, a["engine_logp_T"][cut], np.nan)
            yield {
                "step": int(path.stem.removeprefix("step_")),
                "of": len(ends),
                "slot": int(a["slot"][group]),
                "line": int(a["line"][group]),
                "dispatched": int(a["version"][group]),
                "env": str(a["env"][i]),
                "reward": short(float(a["reward"][i]), 6),
                "advantage": short(float(a["advantage"][i]), 6),
                "truncated": bool(a["truncated"][i]),
                "tokens": a["tokens_T"][cut].tolist(),
                "versions": runs(a["version_T"][cut].tolist()),
                "mask": runs(a["mask_T"][cut].tolist()),
                "flaws": runs([FLAWS[i] for i in a["flaw_T"][cut].tolist()]),
                "engine": [short(x, 5) for x in engine.tolist()],
                # The two agree to many digits: their difference is kept, not the second number.
                "gap": [short(x, 3) for x in (a["logp_T"][cut] - engine).tolist()],
            }


def runs(values: list) -> list[list]:
    """Equal neighbours as [value, count]."""
    return [[value, len(list(run))] for value, run in itertools.groupby(values)]


class Texts(NamedTuple):
    """The text of each token alone; without the model's tokenizer none, and the reason."""

    text: dict[int, str]
    problem: str


def texts(model: str, ids: set[int]) -> Texts:
    """The text of each token id, from the tokenizer in the folder `model`."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
    except Exception as error:  # whatever a foreign folder provokes, ids can still be shown
        return Texts({}, f"{type(error).__name__}: the tokenizer of {model!r} cannot be loaded")
    return Texts({i: tokenizer.decode([i]) for i in sorted(ids)}, "")


def draw(run_dir: str) -> Path:
    """Draws reward, validation reward and policy lag over the steps; returns the picture's path."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    lines = list(read(Path(run_dir) / "metrics.jsonl"))
    trained = [line for line in lines if "reward" in line]
    validated = [line for line in lines if "validation_reward" in line]
    figure, (top, bottom) = pyplot.subplots(
        2, 1, sharex=True, figsize=(7, 5), height_ratios=(3, 1), layout="constrained"
    )
    steps = [line["step"] for line in trained]
    top.plot(steps, [line["reward"] for line in trained], color="0.75", label="training batch")
    if validated:
        top.plot(
            [line["step"] for line in validated],
            [line["validation_reward"] for line in validated],
            "o-",
            color="C0",
            label="validation, sampled as in training",
        )
    top.set(ylabel="mean reward", title=Path(run_dir).name)
    top.legend(loc="lower right")
    top.grid(alpha=0.3)
    bottom.plot(steps, [line["lag_mean"] for line in trained], color="C1", label="mean lag (steps)")
    mixed = [line["mixed_version_samples"] for line in trained]
    bottom.plot(steps, mixed, color="C2", label="samples with two or more versions (share)")
    bottom.set(xlabel="step")
    bottom.legend(loc="center right", fontsize="small")
    bottom.grid(alpha=0.3)
    picture = Path(run_dir) / "reward.png"
    figure.savefig(picture, dpi=120)
    pyplot.close(figure)
    return picture


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python report.py RUN_DIR")
    print(write(sys.argv[1]))
