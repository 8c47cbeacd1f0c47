"""Writes one self-contained page: a simulated run, and a picture of some of its steps."""

import html
import json
import statistics
from pathlib import Path

from bench.simulation.findings import Findings, seconds, slowest, table
from bench.simulation.world import Step, Trace
from core.outputs import output_file

SHOWN = 24  # engines in the picture, spread evenly over all
BINS = 400  # parts into which the shown time is divided
TEMPLATE = Path(__file__).parent / "page.html"
REPORT = Path(__file__).parents[2] / "runtime/reporting/report_page.html"  # shares its look


def write(trace: Trace, found: Findings, path: str) -> None:
    """Writes the page."""
    style = REPORT.read_text(encoding="utf-8").partition("<style>")[2].partition("</style>")[0]
    text = TEMPLATE.read_text(encoding="utf-8").replace("__STYLE__", style.strip())
    title = f"simulated: {trace.cfg.command.config or 'a run'}"
    verdict = f"{found.seconds:,.0f} s a step, bound by {found.binds}"
    text = text.replace("__TITLE__", html.escape(title)).replace("__VERDICT__", verdict)
    text = text.replace("__TABLE__", html.escape("\n".join(table(trace, found))))
    content = json.dumps(drawing(trace, found)).replace("<", "\\u003c")
    output_file(path).write_text(text.replace("__DATA__", content), encoding="utf-8")


def drawing(trace: Trace, found: Findings) -> dict:
    """Returns the data of the picture, in seconds from its left edge."""
    engines = {place: history for place, history in trace.histories.items() if len(history) > 1}
    if not engines:
        return {"steps": [], "engines": [], "trainers": [], "longest": [], "seconds": 0}
    start = min(history[0][0] for history in engines.values())
    end = max(history[-1][0] for history in engines.values())
    steps = [step for step in trace.steps if start < step.ended <= end]
    every = sorted(engines)
    places = every[:: -(-len(every) // SHOWN)]
    numbers = {step.number - 1 for step in steps}
    ranks = {one.step: one.rank for one in slowest(trace.trainings) if one.step in numbers}
    spent = [one for one in trace.trainings if ranks.get(one.step) == one.rank]
    return {
        "seconds": end - start,
        "room": max(found.room, found.batch),
        "steps": [{"number": step.number, "at": step.ended - start} for step in steps],
        "engines": [
            {"place": place, "batch": binned(engines[place], start, end)} for place in places
        ],
        "trainers": [
            {"step": t.step + 1, "from": t.began - start, "to": t.began - start + t.seconds}
            for t in spent
        ],
        "syncs": [
            {"from": step.ended - start - step.stats["sync_transfer"], "to": step.ended - start}
            for step in steps
        ],
        "longest": [one for step in steps if (one := longest(trace, step, start))],
    }


def binned(history: list[tuple[float, int]], start: float, end: float) -> list[float]:
    """Returns the mean number of sequences in each part of the time."""
    width = (end - start) / BINS
    area = [0.0] * BINS
    for (t0, batch), (t1, _) in zip(history, [*history[1:], (end, 0)], strict=True):
        first = (t0 - start) / width
        last = (t1 - start) / width
        for i in range(max(0, int(first)), min(BINS, int(last) + 1)):
            area[i] += batch * max(0.0, min(last, i + 1) - max(first, i))
    return [round(value, 2) for value in area]


def longest(trace: Trace, step: Step, start: float) -> dict | None:
    """Returns the slowest group of a step."""
    P = trace.cfg.prompts_per_step
    spans = [span for span in trace.spans if span.slot // P == step.number - 1]
    span = max(spans, key=seconds, default=None)
    if span is None:
        return None
    middle = statistics.median(map(seconds, spans))
    return {
        "step": step.number,
        "from": span.began - start,
        "to": span.ended - start,
        "tokens": span.tokens,
        "median": round(middle, 1),
        "engine": span.engine,
    }
