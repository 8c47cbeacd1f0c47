"""Writes a run's page, or one that compares several runs' curves; neither needs a network.

    python report.py RUN_DIR           -> RUN_DIR/report.html
    python report.py RUN_DIR OTHER ... -> RUN_DIR/compare.html

Everything but the tokenizer is read from the run's folder, and the run may still be in progress:
half-written lines and archives are left out, and so are parts of the page whose file is missing.
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
from types import UnionType
from typing import TYPE_CHECKING, NamedTuple, TypedDict, TypeVar, Unpack

import numpy as np

from core.errors import InputError, in_one_line, reader_may_leave, shown
from core.jsonl import METRICS, parse, place, read
from core.outputs import output_file
from rollout.answer_markup import FLAWS
from runtime.checkpoints.archive import listed
from runtime.reporting.health import Finding, Series, health
from runtime.reporting.summary import in_a_line, summary
from settings.config import TrainingSettings

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Limits for one page: a browser stays responsive up to some 50 MB, but long runs write far more.
LIMITS = {
    "mismatch": 1000,
    "rollouts": 2000,
    "characters": 30_000_000,
    "pairs": 8,
    "samples": 256,
    "samples_per_step": 64,
    "tokens": 500_000,
}
RESTATED = ("command_line", "untracked")  # settings that other lines of a comparison restate
LAST = (
    "step",
    "reward",
    "validation_reward",
    "validation_exact",
    "preference_loss",
    "accuracy",
    "response_tokens",
    "tokens_per_second",
)
INFO = re.compile("(validation_)?info/")
Item = TypeVar("Item")
Json = bool | int | float | str | list["Json"] | dict[str, "Json"] | None
# The fields that the page needs from a line: types, [type of the items], {name: type}. A line that
# lacks a field is left out.
Form = type | UnionType | list["Form"] | dict[str, "Form"]
CONFIG: dict[str, Form] = {"prompts_per_step": int | None, "steps": int | None, "model": str | None}
ROW: dict[str, Form] = {
    "by": str,
    "key": str,
    "tokens": int | float,
    "mean": int | float | None,
    "max": int | float | None,
    "k3": int | float | None,
    "kept": int | float | None,
}
MISMATCH: dict[str, Form] = {"step": int, "rows": [ROW]}
ROLLOUT: dict[str, Form] = {
    "step": int | None,
    "slot": int,
    "evaluation": int | None,
    "row": int,
    "env": str,
    "dataset": str | None,
    "prompt": str,
    "response": [str],
    "versions": [[int]],
    "reward": int | float | None,
    "advantage": int | float | None,
}


class Page(TypedDict):
    """A page's data, as its script reads it."""

    name: str
    config: dict
    health: list[Finding]
    columns: Series
    mismatch: list[dict]
    rollouts: dict
    samples: dict


def finish(cfg: TrainingSettings) -> None:
    """Draws the pages of a run that has ended, and prints its results."""
    try:
        draw(cfg.writes_to)
        page = f"report: {shown(write(cfg.writes_to))}"
    # The run succeeded, and this program can be called again.
    except (Exception, InputError) as error:
        page = f"no report: {in_one_line(error)}"
    print("\n".join([*summary(cfg), page]), flush=True)


def write(run_dir: str) -> Path:
    """Writes a run's page; returns its path. Raises InputError if there is no such folder."""
    run = Run.read(Path(run_dir))
    archives = sorted((Path(run_dir) / "samples").glob("step_*.npz"))
    shown_rollouts = rollouts(Path(run_dir) / "rollouts.jsonl")
    answers = newest_answers(shown_rollouts["rows"])
    data: Page = {
        "name": run.name,
        "config": run.config,
        "health": health(run.series, run.mismatch, run.config, answers),
        "columns": run.series,
        "mismatch": run.mismatch,
        "rollouts": shown_rollouts,
        "samples": samples(archives, run.model),
    }
    return page(Path(run_dir) / "report.html", data)


def compare(run_dirs: list[str]) -> Path:
    """Writes a page with the curves of several runs, and the settings in which they differ.

    Returns the page's path, in the first run's folder. Raises InputError if one of `run_dirs` is
    not a folder, or if two are the same folder.
    """
    runs = [Run.read(Path(folder)) for folder in run_dirs]
    folders = [Path(folder).resolve() for folder in run_dirs]
    if len(set(folders)) < len(folders):
        raise InputError(f"{' '.join(run_dirs)}: expected the folders of different runs")
    above = os.path.commonpath([folder.parent for folder in folders])
    names = [str(folder.relative_to(above)).replace("/", ":") for folder in folders]
    differs = {"runs": " | ".join(names)} | last_values(runs) | differing([r.config for r in runs])
    models = {run.model for run in runs}
    findings: list[Finding] = []
    for name, run in zip(names, runs, strict=True):
        for level, text in health(run.series, run.mismatch, run.config):
            findings.append(Finding(level, f"{name}: {text}"))
    data: Page = {
        "name": " and ".join(names),
        "config": {"differs": differs, "model": models.pop() if len(models) == 1 else None},
        "health": findings,
        "columns": side_by_side([run.series for run in runs], names),
        "mismatch": [],
        "rollouts": {"rows": [], "total": 0, "pairs": []},
        "samples": samples([], ""),
    }
    return page(Path(run_dirs[0]) / "compare.html", data)


def differing(configs: list[dict[str, Json]]) -> dict[str, str]:
    """Returns the settings in which runs differ, by dotted name, with the values of all runs."""
    every = [flat(config) for config in configs]
    found = {}
    for name in dict.fromkeys(name for config in every for name in config):
        values = [str(config.get(name)) for config in every]
        if len(set(values)) > 1 and name not in RESTATED:
            found[name] = " | ".join(values)
    return found


def last_values(runs: "list[Run]") -> dict[str, str]:
    """Returns the last values of the metrics in LAST that at least one run has."""
    found = {}
    for name in LAST:
        text = " | ".join(last(run.series, name) for run in runs)
        if text.strip("– |"):
            found[f"{name}, last"] = text
    return found


def last(series: Series, name: str) -> str:
    """Formats the last value of a metric; a dash if it has no value."""
    values = [value for value in series.get(name, []) if isinstance(value, int | float)]
    return f"{values[-1]:.4g}" if values else "–"


class Run(NamedTuple):
    """The part of a run that its page shows in addition to rollouts and samples."""

    name: str
    config: dict[str, Json]
    series: Series
    mismatch: list[dict]

    @property
    def model(self) -> str | None:
        """The folder of the model; "" if config.json is missing."""
        model = self.config.get("model", "")
        return model if isinstance(model, str) else None

    @classmethod
    def read(cls, folder: Path) -> "Run":
        """Reads a run's folder. Raises InputError if there is no such folder."""
        if not folder.is_dir():
            raise InputError(f"{folder}: expected the folder of a run")
        config: dict[str, Json] = {}
        with suppress(OSError):
            text = (folder / "config.json").read_text(errors="replace")
            config = next(parse([text], CONFIG), {})
        if changes := config.get("diff"):  # it may be longer than everything else
            config["diff"] = f"{str(changes).count(chr(10))} lines, in config.json"
        series = columns(read(folder / "metrics.jsonl", METRICS))
        mismatch = list(read(folder / "mismatch.jsonl", MISMATCH))[-LIMITS["mismatch"] :]
        return cls(folder.resolve().name, config, series, mismatch)


def page(path: Path, data: Page) -> Path:
    """Writes a page: the template with the data, the limits and the time.

    Raises InputError if its place is taken by anything but a file.
    """
    whole = {**data, "written": time.strftime("%Y-%m-%d %H:%M"), "limits": LIMITS}
    template = (Path(__file__).parent / "runtime/reporting/report_page.html").read_text()
    # Rollouts are untrusted text: without "<" nothing in them can end the script element.
    text = json.dumps(whole, separators=(",", ":")).replace("<", "\\u003c")
    output_file(path).write_text(template.replace("{{data}}", text, 1))
    return path


def flat(config: dict[str, Json], above: str = "") -> dict[str, Json]:
    """Returns the settings of a config.json by their dotted names."""
    found: dict[str, Json] = {}
    for name, value in config.items():
        inner = flat(value, f"{above}{name}.") if isinstance(value, dict) else {}
        found |= inner or {above + name: value}
    return found


def side_by_side(runs: list[Series], names: list[str]) -> Series:
    """Returns the whole-batch metrics of several runs, as METRIC/NAME, at the steps of all runs."""
    steps = sorted({step for run in runs for step in run.get("step", [])})
    found: Series = {"step": steps}
    for name, run in zip(names, runs, strict=True):
        for metric, values in run.items():
            parts = 3 if INFO.match(metric) else 1  # an info names its environment
            if metric != "step" and len(metric.split("/")) == parts:
                of_step = dict(zip(run["step"], values, strict=True))
                found[f"{metric}/{name}"] = [of_step.get(step) for step in steps]
    return found


def columns(lines: Iterable[dict]) -> Series:
    """Returns every numeric metric, and `step`, as one value per step, None if there is none."""
    rows: dict[int, dict[str, float]] = defaultdict(dict)
    for line in lines:
        rows[line["step"]] |= {k: v for k, v in line.items() if type(v) in (int, float)}
    steps = sorted(rows)
    names = dict.fromkeys(name for step in steps for name in rows[step])
    return {name: [short(rows[step].get(name), 8) for step in steps] for name in names}


def short(value: float | None, digits: int) -> float | None:
    """Rounds a number for reading; None if it is not finite."""
    if value is None or not math.isfinite(value):
        return None
    return float(f"{value:.{digits}g}") if isinstance(value, float) else value


class Group(NamedTuple):
    """The place in a file of one group's lines, which are adjacent."""

    step: int  # the step that trains on it, or the policy version that is evaluated
    trained: bool
    slot: int
    path: Path
    start: int
    end: int
    lines: int

    def read(self) -> list[dict]:
        """Reads the group's rollouts."""
        with open(self.path, "rb") as file:
            file.seek(self.start)
            text = file.read(self.end - self.start)
        return list(parse(text.decode(errors="replace").split("\n"), ROLLOUT))


def groups(path: Path) -> Iterator[Group]:
    """Yields the groups of a file, which may be larger than memory."""
    for _, found in itertools.groupby(places(path), key=lambda line: line[:3]):
        lines = list(found)
        yield lines[0]._replace(end=lines[-1].end, lines=len(lines))


def places(path: Path) -> Iterator[Group]:
    """Yields a group for each line that begins with the known fields."""
    end = 0
    with open(path, "rb") as file:
        for line in file:
            end += len(line)
            at = place(line)
            if at is None:
                continue
            trained = at["step"] is not None
            when = at["step"] if trained else at["evaluation"]
            if when is not None:
                yield Group(when, trained, at["slot"], path, end - len(line), end, 1)


def evenly(items: list[Item], count: int) -> list[Item]:
    """Picks `count` of the items, evenly spread, including the first and the last."""
    count = min(count, len(items))
    return [items[round(i * (len(items) - 1) / max(1, count - 1))] for i in range(count)]


def rollouts(path: Path) -> dict:
    """Picks whole groups from the whole run, newest first; adds the rollout count and `pairs`."""
    # A validation follows the step that produced its policy, so it precedes that step here.
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


def newest_answers(rows: list[dict]) -> list[str]:
    """Returns the start of the newest answers to three prompts; `rows` begin with the newest."""
    found: dict[str, str] = {}
    for row in rows:
        if len(found) < 3:
            found.setdefault(row["prompt"], in_a_line(" ".join(row["response"]))[:80])
    return list(found.values())


def pairs(every: list[Group]) -> list[list[dict]]:
    """Picks validation prompts, each with the oldest policy's answer and the newest policy's."""
    validated = [group for group in every if not group.trained]
    if not validated or validated[0].step == validated[-1].step:
        return []
    oldest = validated[-1].step
    newest = validated[0].step
    first = {group.slot: group for group in validated if group.step == oldest}
    last = {group.slot: group for group in validated if group.step == newest}
    slots = evenly(sorted(first.keys() & last.keys()), LIMITS["pairs"])
    found = [[*first[slot].read()[:1], *last[slot].read()[:1]] for slot in slots]
    # A resumed run may have different validation rows.
    return [pair for pair in found if len(pair) == 2 and pair[0]["prompt"] == pair[1]["prompt"]]


def samples(paths: list[Path], model: str | None) -> dict:
    """Picks samples from some steps, newest first, by token; adds the text of each token id."""
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
    """Yields the first samples of one step's archive; nothing if it was only partly written."""
    with suppress(Exception):  # corrupt data raises errors of many types
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
                # Engine and trainer agree to many digits, so their difference is stored instead.
                "gap": [short(x, 3) for x in (a["logp_T"][cut] - engine).tolist()],
            }


def runs(values: list) -> list[list]:
    """Returns the runs of equal values as [value, count]."""
    return [[value, len(list(run))] for value, run in itertools.groupby(values)]


class Texts(NamedTuple):
    """The text of each token by itself, or the problem if the tokenizer cannot be loaded."""

    text: dict[int, str]
    problem: str


def texts(model: str | None, ids: set[int]) -> Texts:
    """Returns the text of each token id, from the tokenizer in the folder `model`."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
        return Texts({i: tokenizer.decode([i]) for i in sorted(ids)}, "")
    except Exception as error:  # loading may raise anything; ids can still be shown
        return Texts({}, f"{type(error).__name__}: the tokenizer of {model!r} cannot be loaded")


class Look(TypedDict, total=False):
    """The look of a curve, as matplotlib names it."""

    color: str
    alpha: float
    lw: float


def draw(run_dir: str) -> Path:
    """Draws reward, validation reward and policy lag over the steps; returns the picture's path."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    series = columns(read(Path(run_dir) / "metrics.jsonl", METRICS))
    figure, (top, bottom) = pyplot.subplots(
        2, 1, sharex=True, figsize=(7, 5), height_ratios=(3, 1), layout="constrained"
    )

    def plot(axes: "Axes", name: str, label: str, form: str = "-", **look: Unpack[Look]) -> None:
        every = zip(series.get("step", []), series.get(name, []), strict=False)
        points = [(step, value) for step, value in every if value is not None]
        if points:
            steps = [step for step, _ in points]
            values = [value for _, value in points]
            axes.plot(steps, values, form, label=label, **look)

    plot(top, "reward", "training batch, mean reward", color="0.75")
    exact = "validation_exact"
    if series.get(exact) != series.get("validation_reward"):  # equal if rewards are 0 or 1
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
    if top.lines:
        top.legend(loc="lower right")
    if bottom.lines:
        bottom.legend(
            loc="lower center",
            bbox_to_anchor=(0.5, 0.97),
            ncols=2,
            frameon=False,
            fontsize="small",
        )
    bottom.grid(alpha=0.3)
    picture = Path(run_dir) / "reward.png"
    figure.savefig(output_file(picture), dpi=150, format="png")
    pyplot.close(figure)
    return picture


def main(argv: list[str]) -> None:
    """Writes the page of one run, or of several. Raises InputError if that is impossible."""
    if not argv or {"-h", "--help"} & {*argv}:
        print("usage: python report.py RUN_DIR [OTHER_RUN_DIR ...]")
        raise SystemExit(not argv)
    try:
        print(compare(argv) if argv[1:] else write(argv[0]))
    except BrokenPipeError:
        raise
    except OSError as error:  # a full disk, a read-only folder
        raise InputError(f"{error.filename or argv[0]}: {error.strerror}") from None


if __name__ == "__main__":
    with reader_may_leave():
        main(sys.argv[1:])
