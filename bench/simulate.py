"""Simulates a run on a cluster before it is rented: the real driver on a virtual clock.

    python bench/simulate.py [CONFIG] [OVERRIDES] [OPTIONS]

    python bench/simulate.py configs/rlvr1.py                           what binds, what to change
    python bench/simulate.py configs/rlvr1.py --max_lag 2 --gpu h100
    python bench/simulate.py configs/rlvr1.py --judge 30 --faults engine=1,worker=0.5

The buffer, the two loops, the choice and replacement of engines, the packing plan and the order of
a weight update are the product's own code. Engines, trainers, transfers, environments, judges and
faults are simulated; their speeds are those of --dry_run. CONFIG and OVERRIDES are as for
grpo_async.py. The last line says what binds a step, and names the best of some simulated changes.
docs/scale.md has the assumptions, and the results for the stages of Nemotron 3 Super.
"""

import argparse
import contextlib
import dataclasses
import gc
import math
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
import dry_run  # noqa: E402
import mopd  # noqa: E402
from bench.simulation import findings, validation, world  # noqa: E402
from bench.simulation.faults import KINDS, Faults  # noqa: E402
from bench.simulation.findings import Findings  # noqa: E402
from bench.simulation.hardware import Hardware, Measured, Modelled  # noqa: E402
from bench.simulation.workload import Latency, Lengths, Workload  # noqa: E402
from bench.simulation.world import Trace  # noqa: E402
from core.errors import InputError  # noqa: E402
from core.outputs import output_file  # noqa: E402
from dry_run import pace  # noqa: E402
from grpo_async import Config  # noqa: E402
from policy import gpus, model_shape  # noqa: E402
from policy.gpus import Gpu  # noqa: E402
from policy.model_shape import Model  # noqa: E402
from settings import reader  # noqa: E402
from support import shapes  # noqa: E402

STEPS = 24
ROUND = 200_000  # objects created before Python looks for garbage, of which a run creates little
TRIED = 14  # steps that a tried change is simulated for, in addition to max_lag
WORTH = 0.95  # share of a step's time: a change that leaves more than this is not reported
BIG = 60e9  # parameters: models this large belong to the recipe's stages
AGENT = "swe2"  # part of the name of a configuration whose answers are an agent's episodes
USUAL = {"turns": 1, "tool": 0.0, "judge": 0.0}
# Assumed for agent episodes: the number of answers, and the seconds that a command and a fresh box
# with its tests take.
AGENTS = {"turns": 50, "tool": 5.0, "judge": 120.0}
MTP = 1.5  # assumed if drafts are tried: tokens per step of a nearly empty engine


def options(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Parses the simulation's own options; returns them and the words for the configuration."""
    about, _, usage = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=about,
        epilog=usage,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("config", nargs="?", default="configs/rlvr1.py", help="a file of overrides")
    add("--steps", type=int, default=STEPS, help="steps to simulate")
    faults = "; ".join(f"{kind}: {what}" for kind, what in KINDS.items())
    add("--faults", default="", metavar="KIND=N", help=f"N faults of a kind per hour ({faults})")
    add("--mean", type=float, default=0, help="a response's mean tokens (a quarter of the longest)")
    add("--spread", type=float, default=1.0, help="spread of the logarithm of a response's tokens")
    add("--lengths", default="", metavar="FILE", help="rollouts.jsonl from which lengths are drawn")
    add("--prompt", type=int, default=1000, help="tokens of a prompt")
    add("--turns", type=int, help="turns into which a response is cut (1; SWE 2: 50)")
    add("--tool", type=float, help="seconds per tool call between two turns (0; SWE 2: 5)")
    add("--environment", type=float, default=0, help="environment seconds per answer")
    add("--judge", type=float, help="judge seconds per answer (0; SWE 2: 120)")
    add("--judged_at_once", type=int, default=10**9, help="answers that judges take at once")
    add("--mfu", type=float, default=pace.MFU, help="share of their peak that trainers reach")
    add("--drafts", type=float, default=1, help="tokens per engine step in the tail, by MTP")
    add("--table", default="", metavar="FILE", help="JSON: [[batch, context, seconds], ...]")
    add("--page", default="", metavar="FILE", help="page (.html) with a picture of some steps")
    add("--splits", type=int, default=0, help="try this many splits of the same GPUs")
    known = "compare with closed forms, with real runs on this machine (minutes), or with both"
    kinds = ("forms", "runs", "all")
    add("--validate", nargs="?", const="all", choices=kinds, help=known)
    add("--alone", action="store_true", help="try no changes")
    given, words = parser.parse_known_args(argv)
    assumed = USUAL | (AGENTS if AGENT in Path(given.config).stem else {})
    for name, value in assumed.items():
        if getattr(given, name) is None:
            setattr(given, name, value)
    return given, words


@contextlib.contextmanager
def with_model(cfg: Config) -> Iterator[Config]:
    """Yields `cfg` with a model folder that contains config.json.

    If its own folder has none, the folder contains that of Nemotron 3 Super or Nano, chosen by the
    configuration's name.
    """
    if (Path(cfg.model) / "config.json").is_file():
        yield cfg
        return
    known = "models/nano_sft" if "nano" in cfg.command.config else "models/super_sft"
    if not cfg.model.startswith(("models/super", "models/nano", "runs/")):
        expected = "expected a folder that holds config.json; nothing else of it is read"
        raise InputError(f"model = {cfg.model!r}: {expected}")
    with tempfile.TemporaryDirectory() as folder:
        name = Path(folder, Path(known).name)
        yield dataclasses.replace(cfg, model=shapes.write(known, name))


def read(path: str, words: list[str], steps: int) -> Config:
    """Reads the configuration, without looking for its data."""
    file = Path(path) if Path(path).is_file() else ROOT / path
    base = reader.read(mopd.Config if file.stem.endswith("mopd") else Config, file)
    named = dataclasses.replace(base.command, config=path)
    data = dataclasses.replace(base.data, val="")
    base = dataclasses.replace(base, command=named, steps=steps, val_period=0, data=data)
    return reader.with_entries(base, reader.overridden(base, words)) if words else base


def chosen(model: Model, cfg: Config) -> Gpu:
    """Returns the GPU that --gpu names, or the recipe's: H100 below configs/h100, else B200."""
    if cfg.command.gpu != "auto" or model.params < BIG:
        return gpus.planned(cfg.command.gpu)
    return gpus.H100 if "h100" in Path(cfg.command.config).parts else gpus.B200


def check(given: argparse.Namespace) -> None:
    """Raises InputError for a number that no run can have, or a page that cannot be written."""
    least = {"steps": 1, "turns": 1, "drafts": 1, "judged_at_once": 1}
    if not 0 < given.mfu <= 1:
        raise InputError(f"--mfu {given.mfu}: expected a share above 0, at most 1")
    least |= dict.fromkeys(("mean", "spread", "prompt", "tool", "environment", "judge"), 0)
    for name, low in least.items():
        value = getattr(given, name)
        if not low <= value < math.inf:
            raise InputError(f"--{name} {value}: expected at least {low}")
    if given.page and not output_file(given.page).parent.is_dir():
        raise InputError(f"--page {given.page}: {Path(given.page).parent} is not a folder")


def work_of(cfg: Config, given: argparse.Namespace, model: Model) -> Workload:
    """Builds the workload from the options. Raises InputError for a value that does not fit."""
    limit = min(cfg.sampling.max_response_tokens, cfg.sampling.max_model_len - given.prompt)
    if limit < 2:
        raise InputError(f"--prompt {given.prompt} leaves {limit} tokens for a response")
    mean = given.mean or pace.MEAN_SHARE * limit
    caching = cfg.engine.args.get("enable_prefix_caching", not model.state)
    drawn = Lengths.of_run(given.lengths, limit) if given.lengths else None
    lengths = drawn or Lengths.with_mean(mean, limit, given.spread)
    parts = {name: getattr(given, name) for name in ("prompt", "turns", "judged_at_once")}
    parts |= {n: Latency(getattr(given, n)) for n in ("environment", "tool", "judge")}
    return Workload(lengths, reuses_prompts=bool(caching), seed=cfg.seed, **parts)


class Plan:
    """A configuration and everything that is assumed about its world."""

    def __init__(self, cfg: Config, given: argparse.Namespace):
        self.cfg = cfg
        self.given = given
        self.model = model_shape.read_model(cfg.model)
        self.gpu = chosen(self.model, cfg)
        self.work = work_of(cfg, given, self.model)

    def run(self, cfg: Config, drafts: float = 0, picture: range = range(0)) -> Trace:
        """Simulates this configuration or a change of it."""
        given = self.given
        parts = (self.model, cfg, self.gpu, drafts or given.drafts)
        hardware: Hardware = Measured(*parts, given.table) if given.table else Modelled(*parts)
        return world.run(cfg, hardware, self.work, Faults.read(given.faults), picture)

    def changes(self, found: Findings) -> dict[str, Config]:
        """Returns changes that may relieve what binds, by the text that names them."""
        cfg, engine = self.cfg, self.cfg.engine
        lag = cfg.max_lag + 1
        every = {f"max_lag = {lag}": dataclasses.replace(cfg, max_lag=lag)}
        tp, count = 2 * engine.tensor_parallel, engine.count // 2
        same_gpus = engine.count % 2 == 0 and tp <= pace.NODE_GPUS
        if found.binds == "longest rollout" and same_gpus:
            wide = dataclasses.replace(engine, tensor_parallel=tp, count=count)
            name = f"engine.tensor_parallel = {tp}, engine.count = {count}"
            every[name] = dataclasses.replace(cfg, engine=wide)
        best = pace.balance(self.model, cfg, self.gpu)
        for other in [*([best] if best else []), *self.splits()]:
            name = f"engine.count = {other.engine.count}, policy.ranks = {other.policy.ranks}"
            if other.engine.count != engine.count:
                every[name] = other
        return {
            name: dataclasses.replace(other, steps=trial(lag))
            for name, other in every.items()
            if not self.unfit(other)
        }

    def splits(self) -> list[Config]:
        """Returns the requested number of splits of the same GPUs, evenly spread."""
        every = pace.splits(self.model, self.cfg, self.gpu)
        n = min(self.given.splits, len(every))
        return [every[(2 * i + 1) * len(every) // (2 * n)] for i in range(n)]

    def unfit(self, cfg: Config) -> list[str]:
        """Returns what does not fit, leaving out files that are missing here."""
        found = dry_run.problems(self.model, cfg, self.gpu)
        return [problem for problem in found if "no such file" not in problem]


def first_of(error: Exception) -> Exception:
    """Returns the first error of a group, which may contain nested groups."""
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error


def verdict(plan: Plan, found: Findings) -> str:
    """Prints what limits the step, and which of several changes helps most."""
    lag = plan.cfg.max_lag
    said = f"{shown(found.seconds)} a step, bound by "
    if found.binds == "longest rollout":
        what = "the last part's training" if plan.cfg.train_parts > 1 else "training"
        both = f"{shown(found.longest.seconds)} + {what} and update "
        both += shown(found.last_part + found.update)
        said += f"the longest rollout: ({both}) / (max_lag + 1 = {lag + 1})"
        said += f" = {shown(found.bound)} at least"
    elif found.binds == "training":
        said += f"training: {shown(found.training)} and {shown(found.update)} of weight update"
    else:
        said += f"generation: full engines need {shown(found.bound)}"
    if plan.given.alone:
        return said
    changes = plan.changes(found)
    tried = {name: findings.find(plan.run(cfg)).seconds for name, cfg in changes.items()}
    for name, seconds in tried.items():
        print(f"  tried: {name}: {shown(seconds)}")
    if plan.given.splits and len(plan.splits()) < 2:
        print("  no other split of the same GPUs holds the trainer")
    if found.binds == "longest rollout":
        drafted = dataclasses.replace(plan.cfg, steps=trial(lag))
        faster = findings.find(plan.run(drafted, MTP)).seconds
        what = f"drafts that make the tail {MTP} times as fast (no setting of ours)"
        print(f"  tried: {what}: {shown(faster)}")
    best = sorted(tried, key=tried.__getitem__)[:2]
    saves = [name for name in best if tried[name] <= WORTH * found.seconds]
    if not saves:
        return f"{said}; no change that was tried saves 5 %"
    older = {name: " (older samples)" if name.startswith("max_lag") else "" for name in saves}
    advice = "; or ".join(f"{name}{older[name]}: {shown(tried[name])}" for name in saves)
    return f"{said}; change {advice} (simulated)"


def trial(lag: int) -> int:
    """Returns the number of steps for trying a change at this max_lag: enough to be counted."""
    return max(TRIED + lag, findings.fewest(lag))


def shown(seconds: float) -> str:
    """Formats seconds, with a decimal for small models."""
    return f"{seconds:,.1f} s" if seconds < 100 else f"{seconds:,.0f} s"


def validate(what: str) -> None:
    """Compares the simulation with closed forms ("forms"), real runs ("runs"), or both."""
    if what != "runs":
        print("\n".join(validation.table()), flush=True)
    if what != "forms":
        from bench.simulation import real

        with tempfile.TemporaryDirectory() as folder:
            for line in real.table(Path(folder)):
                print(line, flush=True)


def main() -> None:
    """Prints what a run does, and in the last line what binds it."""
    gc.freeze()
    gc.set_threshold(ROUND)
    given, words = options(sys.argv[1:])
    if given.validate:
        validate(given.validate)
        return
    check(given)
    pace.MFU = given.mfu
    named = read(given.config, words, given.steps)
    with with_model(named) as cfg:
        plan = Plan(cfg, given)
        began = time.process_time()
        cycle = cfg.max_lag + 1
        first = min(2 * cycle, max(1, given.steps - 2 * cycle))
        try:
            trace = plan.run(cfg, picture=range(first, first + 2 * cycle))
        except ExceptionGroup as group:
            raise InputError(f"the run ended: {first_of(group)}") from None
        spent = time.process_time() - began
        try:
            found = findings.find(trace)
        except ValueError as error:
            raise InputError(f"--steps {given.steps}: {error}") from None
        engine = cfg.engine
        gpus_of = f"{engine.count * engine.tensor_parallel} + {cfg.policy.ranks} GPUs"
        samples = f"{cfg.prompts_per_step} x {cfg.group_size} samples a step"
        print(f"{given.config}: {gpus_of} ({plan.gpu.name}), {samples}, max_lag {cfg.max_lag}")
        print("\n".join(findings.table(trace, found)))
        if given.turns > 1:
            each = f"{given.turns} turns, {given.tool:g} s between two, {given.judge:g} s of judge"
            print(f"  episodes: {each}")
        if cfg.model != named.model:
            shape = "Nemotron 3 " + ("Nano" if "nano" in Path(cfg.model).name else "Super")
            print(f"  {named.model} is missing here; the shape is that of {shape}")
        wrong = findings.conserved(trace)
        print("\n".join(f"WRONG: {problem}" for problem in wrong[:5]), end="\n" * bool(wrong))
        for problem in plan.unfit(cfg):
            print(f"  PROBLEM, as --dry_run says: {problem}")
        if given.page:
            from bench.simulation import page

            page.write(trace, found, given.page)
            print(f"  page: {given.page}")
        print(f"  {spent:.1f} s of CPU for {len(trace.steps)} steps")
        print(verdict(plan, found))


if __name__ == "__main__":
    main()
