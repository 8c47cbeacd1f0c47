"""Pages without network: of a run, and of the curves of several.

    python report.py RUN_DIR           -> RUN_DIR/report.html
    python report.py RUN_DIR OTHER ... -> RUN_DIR/compare.html

All but the tokenizer comes from the run's folder, and the run may still be going: lines and
archives that are half written are left out, and so are the parts of the page that need a missing
file.
"""

import bisect
import itertools
import json
import math
import os
import re
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from core.errors import InputError, shown
from core.jsonl import METRICS, parse, place, read
from rollout.answer_markup import FLAWS
from runtime.checkpoints.archive import listed
from runtime.reporting.health import health
from runtime.reporting.log import in_one_line
from runtime.reporting.summary import summary
from settings.config import TrainingSettings

# Limits of one page: a browser stays quick up to some 50 MB, and long runs write far more.
LIMITS = {"mismatch": 1000, "rollouts": 2000, "characters": 30_000_000, "pairs": 8}
RESTATED = ("command_line", "untracked")  # by other lines of what differs
LAST = "step reward validation_reward validation_exact preference_loss accuracy response_tokens"
LAST += " tokens_per_second"
INFO = re.compile("(validation_)?info/")
LIMITS |= {"samples": 256, "samples_per_step": 64, "tokens": 500_000}
# The fields that the page needs of a line: types, [type of the items], {name: type}. Others are
# left out.
CONFIG: dict[str, Any] = {"prompts_per_step": int | None, "steps": int | None, "model": str | None}
ROW: dict[str, Any] = {"by": str, "key": str, "tokens": int | float}
ROW |= dict.fromkeys(("mean", "max", "k3", "kept"), int | float | None)
MISMATCH: dict[str, Any] = {"step": int, "rows": [ROW]}
ROLLOUT: dict[str, Any] = {"step": int | None, "slot": int, "evaluation": int | None, "row": int}
ROLLOUT |= {
    "env": str,
    "dataset": str | None,
    "prompt": str,
    "response": [str],
    "versions": [[int]],
}
ROLLOUT |= {"reward": int | float | None, "advantage": int | float | None}


def finish(cfg: TrainingSettings) -> None:
    """Draws the pages of a run that has ended, and prints what came out of it."""
    try:
        draw(cfg.writes_to)
        page = f"report: {shown(write(cfg.writes_to))}"
    except Exception as error:  # the run was good, and this program can be called again
        page = f"no report: {in_one_line(error)}"
    print("\n".join([*summary(cfg), page]), flush=True)


def write(run_dir: str) -> Path:
    """Writes the page of a run; returns its path. Raises InputError where there is no folder."""
    run = Run.read(Path(run_dir))
    archives = sorted((Path(run_dir) / "samples").glob("step_*.npz"))
    data = {
        "name": run.name,
        "config": run.config,
        "health": health(run.series, run.mismatch, run.config),
        "columns": run.series,
        "mismatch": run.mismatch,
        "rollouts": rollouts(Path(run_dir) / "rollouts.jsonl"),
        "samples": samples(archives, run.config.get("model", "")),
    }
    return page(Path(run_dir) / "report.html", data)


def compare(run_dirs: list[str]) -> Path:
    """Writes a page with the curves of several runs, and the settings in which they differ.

    Returns its path, in the folder of the first. Raises InputError where one is no folder, or there
    twice.
    """
    runs = [Run.read(Path(folder)) for folder in run_dirs]
    folders = [Path(folder).resolve() for folder in run_dirs]
    if len(set(folders)) < len(folders):
        raise InputError(f"{' '.join(run_dirs)}: expected the folders of different runs")
    above = os.path.commonpath([folder.parent for folder in folders])
    names = [str(folder.relative_to(above)).replace("/", ":") for folder in folders]
    every = [flat(run.config) for run in runs]
    differing = {
        name: " | ".join(str(config.get(name)) for config in every)
        for name in dict.fromkeys(name for config in every for name in config)
        if len({str(config.get(name)) for config in every}) > 1
    }
    for name in RESTATED:
        differing.pop(name, None)
    ends = {
        f"{name}, last": " | ".join(last(run.series, name) for run in runs) for name in LAST.split()
    }
    ends = {name: text for name, text in ends.items() if text.strip("– |")}
    models = {run.config.get("model") for run in runs}
    data = {
        "name": " and ".join(names),
        "config": {
            "differs": {"runs": " | ".join(names), **ends, **differing},
            "model": models.pop() if len(models) == 1 else None,
        },
        "health": [
            (level, f"{name}: {text}")
            for name, run in zip(names, runs, strict=True)
            for level, text in health(run.series, run.mismatch, run.config)
        ],
        "columns": beside([run.series for run in runs], names),
        "mismatch": [],
        "rollouts": {"rows": [], "total": 0, "pairs": []},
        "samples": samples([], ""),
    }
    return page(Path(run_dirs[0]) / "compare.html", data)


def last(series: dict[str, list], name: str) -> str:
    """The last value of a metric, as text; a dash for none."""
    values = [value for value in series.get(name, []) if isinstance(value, int | float)]
    return f"{values[-1]:.4g}" if values else "–"


class Run(NamedTuple):
    """What the page shows of a run beside rollouts and samples."""

    name: str
    config: dict[str, Any]
    series: dict[str, list]
    mismatch: list[dict]

    @classmethod
    def read(cls, folder: Path) -> "Run":
        """Raises InputError where there is no folder."""
        if not folder.is_dir():
            raise InputError(f"{folder}: expected the folder of a run")
        config: dict[str, Any] = {}
        with suppress(OSError):
            text = (folder / "config.json").read_text(errors="replace")
            config = next(parse([text], CONFIG), {})
        if changes := config.get("diff"):  # it may be as long as all the rest
            config["diff"] = f"{str(changes).count(chr(10))} lines, in config.json"
        series = columns(read(folder / "metrics.jsonl", METRICS))
        mismatch = list(read(folder / "mismatch.jsonl", MISMATCH))[-LIMITS["mismatch"] :]
        return cls(folder.resolve().name, config, series, mismatch)


def page(path: Path, data: dict[str, Any]) -> Path:
    """Writes the data into the template."""
    data |= {"written": time.strftime("%Y-%m-%d %H:%M"), "limits": LIMITS}
    template = (Path(__file__).parent / "runtime/reporting/report_page.html").read_text()
    # Rollouts are untrusted text: without "<" nothing in them can end the script element.
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    path.write_text(template.replace("{{data}}", text, 1))
    return path


def flat(config: dict[str, Any], above: str = "") -> dict[str, Any]:
    """The settings of a config.json by their dotted names."""
    found: dict[str, Any] = {}
    for name, value in config.items():
        inner = flat(value, f"{above}{name}.") if isinstance(value, dict) else {}
        found |= inner or {above + name: value}
    return found


def beside(runs: list[dict[str, list]], names: list[str]) -> dict[str, list]:
    """The whole batches' metrics of several runs, as METRIC/NAME, on the steps of all."""
    steps = sorted({step for run in runs for step in run.get("step", [])})
    found: dict[str, list] = {"step": steps}
    for name, run in zip(names, runs, strict=True):
        for metric, values in run.items():
            parts = 3 if INFO.match(metric) else 1  # an info is of an environment
            if metric != "step" and len(metric.split("/")) == parts:
                of_step = dict(zip(run["step"], values, strict=True))
                found[f"{metric}/{name}"] = [of_step.get(step) for step in steps]
    return found


def columns(lines: Iterable[dict]) -> dict[str, list]:
    """Every numeric metric, and `step`, as one value for each step; None where it has none."""
    rows: dict[int, dict[str, float]] = defaultdict(dict)
    for line in lines:
        rows[line["step"]] |= {k: v for k, v in line.items() if type(v) in (int, float)}
    steps = sorted(rows)
    names = dict.fromkeys(name for step in steps for name in rows[step])
    return {name: [short(rows[step].get(name), 8) for step in steps] for name in names}


def short(value: float | None, digits: int) -> float | None:
    """A number rounded for reading; None where it is not finite."""
    if value is None or not math.isfinite(value):
        return None
    return float(f"{value:.{digits}g}") if isinstance(value, float) else value


class Group(NamedTuple):
    """The place of the neighbouring lines of one group in a file."""

    step: int  # that trains on it, or the policy version that is evaluated
    trained: bool
    slot: int
    path: Path
    start: int
    end: int
    lines: int

    def read(self) -> list[dict]:
        """The rollouts of the group."""
        with open(self.path, "rb") as file:
            file.seek(self.start)
            text = file.read(self.end - self.start)
        return list(parse(text.decode(errors="replace").split("\n"), ROLLOUT))


def groups(path: Path) -> Iterator[Group]:
    """The groups of a file, which may be larger than the memory."""
    for _, found in itertools.groupby(places(path), key=lambda line: line[:3]):
        lines = list(found)
        yield lines[0]._replace(end=lines[-1].end, lines=len(lines))


def places(path: Path) -> Iterator[Group]:
    """A group for each line that begins with the known fields."""
    end = 0
    with open(path, "rb") as file:
        for line in file:
            end += len(line)
            at: dict[str, Any] = place(line) or {"step": None, "evaluation": None}
            when = at["evaluation"] if at["step"] is None else at["step"]
            if when is not None:
                trained = at["step"] is not None
                yield Group(when, trained, at["slot"], path, end - len(line), end, 1)


def evenly(items: list, count: int) -> list:
    """`count` of the items, evenly spread, with the first and the last."""
    count = min(count, len(items))
    return [items[round(i * (len(items) - 1) / max(1, count - 1))] for i in range(count)]


def rollouts(path: Path) -> dict:
    """Whole groups from all of the run, newest first; how many rollouts there are; and `pairs`."""
    # A validation comes after the step that made its policy, so before it where newest is first.
    every = sorted(
        groups(path) if path.exists() else (),
        key=lambda group: (-group.step, group.trained, group.slot, group.start),
    )

    def is_full(count: int) -> bool:
        kept = evenly(every, count)
        size = sum(group.end - group.start for group in kept)
        lines = sum(group.lines for group in kept)
        return lines > LIMITS["rollouts"] or size > LIMITS["characters"]

    most = min(len(every), LIMITS["rollouts"])
    count = max(1, bisect.bisect_left(range(1, most + 1), True, key=is_full))
    rows = [row for group in evenly(every, count) for row in group.read()]
    return {"rows": rows, "total": sum(group.lines for group in every), "pairs": pairs(every)}


def pairs(every: list[Group]) -> list[list[dict]]:
    """Some validation prompts, each as [first, last] answer: of the oldest and newest policy."""
    validated = [group for group in every if not group.trained]
    if not validated or validated[0].step == validated[-1].step:
        return []
    ends = validated[-1].step, validated[0].step
    first, last = ({g.slot: g for g in validated if g.step == end} for end in ends)
    slots = evenly(sorted(first.keys() & last.keys()), LIMITS["pairs"])
    found = [[*first[slot].read()[:1], *last[slot].read()[:1]] for slot in slots]
    # A resumed run may have got other validation rows.
    return [pair for pair in found if len(pair) == 2 and pair[0]["prompt"] == pair[1]["prompt"]]


def samples(paths: list[Path], model: str) -> dict:
    """Samples token by token of some steps, newest first; the text of each token id in them."""
    picked = evenly(paths[::-1], LIMITS["samples"] // LIMITS["samples_per_step"])
    kept: list[dict] = []
    for path in picked:
        tokens = 0
        for i, sample in enumerate(unpack(path)):
            tokens += len(sample["tokens"])
            if i and tokens > LIMITS["tokens"] // len(picked):
                break
            kept.append(sample)
    ids = {i for sample in kept for i in sample["tokens"]}
    decoded = texts(model, ids) if kept else Texts({}, "")
    return {"rows": kept, "files": len(paths), **decoded._asdict()}


def unpack(path: Path) -> Iterator[dict]:
    """The first samples of one step's archive; none of an archive that is half written."""
    with suppress(Exception):  # broken bytes raise errors of many types
        with np.load(path) as archive:
            a = dict(archive)
        envs = listed(a["env"])
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
                "env": envs[i],
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
        return Texts({i: tokenizer.decode([i]) for i in sorted(ids)}, "")
    except Exception as error:  # of any type from a foreign folder; ids can still be shown
        return Texts({}, f"{type(error).__name__}: the tokenizer of {model!r} cannot be loaded")


def draw(run_dir: str) -> Path:
    """Draws reward, validation reward and policy lag over the steps; returns the picture's path."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    series = columns(read(Path(run_dir) / "metrics.jsonl", METRICS))
    figure, (top, bottom) = pyplot.subplots(
        2, 1, sharex=True, figsize=(7, 5), height_ratios=(3, 1), layout="constrained"
    )

    def plot(axes: Any, name: str, label: str, form: str = "-", **look: Any) -> None:
        every = zip(series.get("step", []), series.get(name, []), strict=False)
        points = [(step, value) for step, value in every if value is not None]
        if points:
            axes.plot(*zip(*points, strict=True), form, label=label, **look)

    plot(top, "reward", "training batch, mean reward", color="0.75")
    exact = "validation_exact"
    if series.get(exact) != series.get("validation_reward"):  # they are the same for 0 and 1
        plot(top, "validation_reward", "validation, mean reward", "o-", color="C0", alpha=0.45)
    plot(top, exact, "validation, exactly right answers", "o-", color="C0", lw=2)
    plot(top, "accuracy", "training batch, pairs told apart", color="0.75")
    plot(top, "validation_accuracy", "validation, pairs told apart", "o-", color="C0", lw=2)
    top.set(ylabel="reward, share", title=Path(run_dir).name)
    top.grid(alpha=0.3)
    plot(bottom, "lag_mean", "mean lag (steps)", color="C1")
    plot(bottom, "preference_loss", "preference loss (nats)", color="C1")
    mixed = "samples with two or more versions (share)"
    plot(bottom, "mixed_version_samples", mixed, color="C2")
    bottom.set(xlabel="step")
    above = {"loc": "lower center", "bbox_to_anchor": (0.5, 0.97), "ncols": 2, "frameon": False}
    for axes, where in ((top, {"loc": "lower right"}), (bottom, above | {"fontsize": "small"})):
        if axes.lines:
            axes.legend(**where)
    bottom.grid(alpha=0.3)
    picture = Path(run_dir) / "reward.png"
    figure.savefig(picture, dpi=150)
    pyplot.close(figure)
    return picture


if __name__ == "__main__":
    folders = sys.argv[1:]
    if not folders or {"-h", "--help"} & {*folders}:
        print("usage: python report.py RUN_DIR [OTHER_RUN_DIR ...]")
        sys.exit(not folders)
    print(compare(folders) if folders[1:] else write(folders[0]))
