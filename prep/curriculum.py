"""`curriculum`: writes rows in training order, from easy to hard.

Nemotron 3 Nano's report, section 3.2.2: rows that are always solved are dropped; every batch holds
the same share of each domain; within a domain, rows are drawn by a Gaussian over their pass rate,
and the Gaussian's mean falls linearly over training. Its width and end points are not published.

Here each row appears exactly once. Then batch b holds the pass rate v in proportion to
c(v) exp(-(v - mean_b)^2 / (2 width^2)), where c(v) makes the batches use up all rows with pass rate
v. If the square is expanded, the width only sets the scale of mean_b, because c(v) absorbs the
factor that depends on v alone. So one number is left to choose, the fall of the measured mean; the
middle is the rows' mean. The report's figure shows batches that fall from about 0.7 to about 0.4.
"""

import json
import math
from array import array
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Literal, NamedTuple

import numpy as np
import tyro
from tqdm import tqdm

from core.errors import InputError
from prep import files, mix

FALL = 0.3  # read off the figure in the report
STEEPEST = 0.9  # share of the fall of sorted rows; beyond it, a batch has few pass rates
SWEEPS = 2000  # maximum number of sweeps to find the plan
TOLERANCE = 1e-3  # error of a batch's mean pass rate, plus that of the rows used at a rate


@dataclass
class Domain:
    """A domain's kept rows: the byte offset of each in the file, and its pass rate."""

    starts: array = field(default_factory=lambda: array("Q"))
    rates: array = field(default_factory=lambda: array("d"))


class Profiled(NamedTuple):
    """The domains of a file, and how many rows are always solved or have no pass rate."""

    domains: list[Domain]
    solved: int
    unknown: int


@dataclass(frozen=True)
class Curriculum:
    """Orders rows from easy to hard by pass rate, with the same mix of domains in each batch."""

    file: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="FILE")]
    """JSONL file of rows with `pass_rate`, such as `profile` writes."""
    out: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="OUT")]
    """JSONL file to write, in training order."""
    prompts_per_step: int
    """Rows per batch, as in the run."""
    fall: float = FALL
    """Fall of the mean pass rate from the first batch to the last."""
    by: Literal["dataset", "agent"] = "dataset"
    """A row's domain: its `dataset`, or its agent if it has no `dataset`; or always the agent."""

    def run(self) -> int:
        """Writes the rows and prints the number dropped. Raises InputError for a bad pass rate."""
        if self.prompts_per_step < 1:
            raise InputError(f"--prompts_per_step {self.prompts_per_step}: expected 1 or more")
        if not 0 <= self.fall < math.inf:
            raise InputError(f"--fall {self.fall}: expected 0 or more, such as {FALL}")
        domains, solved, unknown = read(self.file, self.by)
        with files.rewriting(self.file, self.out) as output, open(self.file, "rb") as source:
            total = sum(len(domain.starts) for domain in domains)
            order = arranged(domains, self.prompts_per_step, self.fall)
            for which, i in tqdm(order, self.out, total, unit="row", delay=2, disable=None):
                source.seek(domains[which].starts[i])
                text = source.readline().decode()
                output.write(json.loads(text), text)
        print(f"  {-(-total // self.prompts_per_step):,} batches of {len(domains)} domains")
        print(f"  dropped: {solved:,} rows always solved, {unknown:,} without a pass rate")
        return 0


def read(path: str, by: str) -> Profiled:
    """Returns a file's domains.

    Raises InputError for a bad pass rate, and if no row is left.
    """
    domains: dict[str, Domain] = defaultdict(Domain)
    solved = unknown = 0
    for line in files.lines(path):
        row = line.row()
        rate = row.get("pass_rate")
        if rate is None:
            unknown += 1
            continue
        if type(rate) not in (int, float) or not 0 <= rate <= 1:
            raise InputError(f"{line.place}: pass_rate is {rate!r}, expected 0 to 1")
        if rate == 1:
            solved += 1
            continue
        tag = row.get("dataset") if by == "dataset" else None
        name = str(tag or files.agent(row))
        domains[name].starts.append(line.start)
        domains[name].rates.append(rate)
    if not domains:
        raise InputError(
            f"{path}: {unknown:,} of its rows have no pass_rate and {solved:,} are always solved, "
            "expected rows that are sometimes solved"
        )
    return Profiled(list(domains.values()), solved, unknown)


def arranged(domains: list[Domain], batch: int, fall: float) -> Iterator[tuple[int, int]]:
    """Returns the training order: each row once, as its domain's index and its index there."""
    sizes = [len(domain.starts) for domain in domains]
    order = np.fromiter(mix.turns(sizes), np.int32, sum(sizes))  # uses up all rows
    batches = np.arange(len(order)) // batch
    orders = []
    for i, domain in enumerate(domains):
        quota_B = np.bincount(batches[order == i], minlength=batches[-1] + 1)
        orders.append(drawn(np.array(domain.rates), quota_B, fall))
    return ((int(i), next(orders[i])) for i in order)


def drawn(rates_N: np.ndarray, quota_B: np.ndarray, fall: float) -> Iterator[int]:
    """Yields the rows of a domain in order, quota_B per batch; rows of equal rate in file order."""
    values_V, kind_N = np.unique(rates_N, return_inverse=True)
    rows = [iter(np.flatnonzero(kind_N == kind)) for kind in range(len(values_V))]
    counts_V = np.bincount(kind_N)
    due_V = np.zeros(len(values_V))
    quota_B = quota_B[quota_B > 0]  # a small domain is not in every batch
    for quota, plan_V in zip(quota_B, plan(values_V, counts_V, quota_B, fall), strict=True):
        due_V += plan_V
        for _ in range(quota):
            kind = int(np.where(counts_V > 0, due_V, -np.inf).argmax())
            due_V[kind] -= 1
            counts_V[kind] -= 1
            yield int(next(rows[kind]))


def plan(
    values_V: np.ndarray, counts_V: np.ndarray, quota_B: np.ndarray, fall: float
) -> np.ndarray:
    """Returns the number of rows [B, V] of each pass rate in each batch.

    The sums are quota_B and counts_V.

    The means of the batches lie on a line that falls by `fall`, or as steeply as the rows allow.
    """
    total = counts_V.sum()
    mean = (counts_V * values_V).sum() / total
    line_B = 0.5 - (np.cumsum(quota_B) - quota_B / 2) / total  # from 1/2 to -1/2
    target_B = mean + min(fall, STEEPEST * steepest(values_V, counts_V, quota_B, line_B)) * line_B
    weights_V, tilt_B = np.log(counts_V), np.zeros(len(quota_B))
    for _ in range(SWEEPS):
        power_BV = weights_V + tilt_B[:, None] * values_V
        share_BV = np.exp(power_BV - power_BV.max(1, keepdims=True))
        share_BV /= share_BV.sum(1, keepdims=True)
        mean_B = share_BV @ values_V
        used_V = quota_B @ share_BV
        if abs(mean_B - target_B).max() + abs(used_V / counts_V - 1).max() < TOLERANCE:
            break
        spread_B = share_BV @ values_V**2 - mean_B**2
        tilt_B += np.clip((target_B - mean_B) / np.maximum(spread_B, 1e-6), -2, 2)
        weights_V += np.log(counts_V / used_V)
    return quota_B[:, None] * share_BV


def steepest(
    values_V: np.ndarray, counts_V: np.ndarray, quota_B: np.ndarray, line_B: np.ndarray
) -> float:
    """Returns the largest fall of a line of means that any order of the rows can have.

    The pass rates of the first k batches sum to at most those of the same number of easiest rows.
    """
    easiest_N = np.cumsum(np.repeat(values_V[::-1], counts_V[::-1]))
    ends_B = np.cumsum(quota_B)[:-1]
    more_B = easiest_N[ends_B - 1] - easiest_N[-1] * ends_B / len(easiest_N)
    return float(min(more_B / np.cumsum(quota_B * line_B)[:-1], default=0.0))
