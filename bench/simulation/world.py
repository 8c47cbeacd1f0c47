"""Simulates one run: the product's `Run` among actors that only take time."""

import asyncio
import contextlib
import dataclasses
import io
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import ray

import grpo_async
import mopd
from bench.simulation import clock
from bench.simulation.faults import Faults
from bench.simulation.hardware import Hardware
from bench.simulation.simulated_actors import Answer, Lost, Span, Stage, Training
from bench.simulation.workload import Workload
from core.errors import InputError
from dry_run import teacher_costs as teachers_of
from grpo_async import Config, Group, Run
from runtime.engines import fleet
from runtime.processes import cluster
from runtime.processes.placement import Places
from runtime.rollouts import teachers
from runtime.startup import modes


class Rows(Sequence):
    """An endless list of prompts, for these agents in turn."""

    def __init__(self, agents: Sequence[str] = ("simulated",)):
        self.agents = agents

    def checksum(self, count: int) -> int:
        """Returns a number that is the same for the same count."""
        return count

    def __len__(self) -> int:
        return 1 << 40

    def __getitem__(self, place: int) -> dict:
        return {"_line": place + 1, "agent_ref": {"name": self.agents[place % len(self.agents)]}}


class Totals(NamedTuple):
    """Sums over all engines, lost ones included, since the run began."""

    busy: float  # engine-seconds with a sequence
    filled: float  # sequence-seconds
    tokens: float
    reread: float


class Step(NamedTuple):
    """One training step, as the driver logs it; `ended` in seconds since the run began."""

    number: int
    ended: float
    stats: dict[str, float]
    slots: list[int]
    versions: list[int]
    totals: Totals


@dataclasses.dataclass
class Trace:
    """The record of a run."""

    cfg: Config
    hardware: Hardware
    workload: Workload
    began: float = 0.0  # time at which all actors had started
    steps: list[Step] = dataclasses.field(default_factory=list)
    spans: list[Span] = dataclasses.field(default_factory=list)
    trainings: list[Training] = dataclasses.field(default_factory=list)
    histories: dict[int, list[tuple[float, int]]] = dataclasses.field(default_factory=dict)
    lost_tokens: float = 0.0
    faults: dict[str, int] = dataclasses.field(default_factory=dict)
    replaced: int = 0  # engines that were replaced


class Log:
    """A stand-in for the run's log: keeps its steps, and watches engines during plotted steps."""

    def __init__(self, trace: Trace, picture: range, stage: Stage):
        self.trace = trace
        self.picture = picture
        self.stage = stage

    def ignore(self, *_: Any) -> None:
        """Does nothing."""

    open = close = show_ready = note = mismatch = drop = ignore

    async def rollouts(self, lines: bytes) -> None:
        """Writes no line."""

    def step(self, step: int, groups: list[Group], stats: dict[str, float]) -> None:
        """Keeps a step."""
        stage = self.stage
        slots = [group.slot for group in groups]
        versions = [group.version for group in groups]
        now = stage.loop.time()
        self.trace.steps.append(Step(step, now, dict(stats), slots, versions, totals(stage)))
        traced = step in self.picture
        if traced != stage.traced:
            stage.traced = traced
            for engine in stage.engines:
                engine.observe(traced)


def totals(stage: Stage) -> Totals:
    """Sums up what all engines have done up to now."""
    every = [actor.engine for actor in stage.engines] + stage.gone
    for engine in every:
        engine.settle()
    return Totals(
        busy=sum(engine.busy for engine in every),
        filled=sum(engine.filled for engine in every),
        tokens=sum(engine.tokens for engine in every),
        reread=sum(engine.reread for engine in every),
    )


class Checkpoints:
    """A stand-in for the run's checkpoints: they take time, and the run starts without one."""

    def __init__(self, run: Run, hardware: Hardware):
        self.run = run
        self.hardware = hardware
        self.saving: asyncio.Task | None = None

    def exist(self) -> bool:
        """Returns False."""
        return False

    async def load(
        self, names: Sequence[str] = (), fresh: Callable[..., dict] | None = None
    ) -> dict:
        """Loads nothing."""
        return {}

    async def save(self, state: dict, ready: list, tasks: asyncio.TaskGroup) -> None:
        """Has the trainers copy their state, and then write it while they train."""
        await self.written()
        await asyncio.gather(*(trainer.save.remote("") for trainer in self.run.cluster.trainers))
        self.saving = tasks.create_task(asyncio.sleep(self.hardware.write))

    async def written(self) -> None:
        """Returns when nothing is being written."""
        if self.saving:
            await self.saving


def run(
    cfg: Config,
    hardware: Hardware,
    workload: Workload,
    faults: Faults | None = None,
    picture: range = range(0),
) -> Trace:
    """Simulates `cfg.steps` steps. `picture` contains the steps at whose ends engines are watched.

    Raises InputError if trainers and engines share GPUs, and passes on what the driver raises.
    """
    if cfg.gpu_share < 1:
        raise InputError(f"gpu_share = {cfg.gpu_share}: only runs with --gpu_share 1 are simulated")
    trace = Trace(cfg, hardware, workload)
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        clock.run(lambda: main(trace, faults or Faults(), picture), grpo_async)
    return trace


async def main(trace: Trace, faults: Faults, picture: range) -> None:
    """Simulates the run, on the loop that has the virtual clock."""
    cfg = trace.cfg
    stage = Stage(cfg, trace.hardware, trace.workload)
    distils = isinstance(cfg, mopd.Config)
    rows = Rows(agents_of(cfg)) if distils else Rows()
    simulated = (mopd.Run if distils else Run)(cfg, rows, [])
    beside = [[""] * ranks for ranks, _ in cfg.demand.beside]
    trainers = [""] * cfg.policy.ranks
    simulated.cluster.places = Places([], [""] * cfg.engine.count, trainers, beside)
    simulated.cluster.shares_gpus = lambda: False  # type: ignore[method-assign]
    simulated.cluster.on_signal = lambda leave: None  # type: ignore[method-assign]
    simulated.checkpoints = Checkpoints(simulated, trace.hardware)  # type: ignore[assignment]
    log = Log(trace, picture, stage)
    simulated.log = log  # type: ignore[assignment]
    simulated.dispatcher.write = log.rollouts
    loops = modes.Loops(simulated.start, simulated.generate_forever, simulated.train_forever)

    async def train() -> None:
        trace.began = stage.loop.time()
        tasks = faults.start(stage)
        try:
            await loops.train()
        finally:
            for task in tasks:
                task.cancel()

    with clock.replaced(
        (cluster, "actor", stage.make),
        (fleet, "actor", stage.make),
        (teachers, "kill", stage.kill),
        (ray, "kill", stage.kill),
        (ray, "cancel", cancel),
        (ray, "cluster_resources", lambda: {"CPU": 64.0}),
    ):
        await simulated.run(loops._replace(train=train))
    trace.spans = stage.spans
    trace.trainings = stage.trainings
    trace.histories = stage.histories
    trace.lost_tokens = stage.lost_tokens
    trace.faults = dict(stage.deaths)
    trace.replaced = simulated.engines.fleet.discarded


def agents_of(cfg: mopd.Config) -> list[str]:
    """Returns agents by which each teacher gets its share of the rows, as --dry_run counts them."""
    shares = teachers_of.shares(cfg)
    of_host = {cfg.host_of(name): agent for agent, name in cfg.routes.items()}
    if cfg.default_teacher:
        of_host.setdefault(cfg.host_of(cfg.default_teacher), "simulated")
    counts = {of_host[host]: max(1, round(20 * share)) for host, share in shares.items()}
    mixed = [((i + 0.5) / n, agent) for agent, n in counts.items() for i in range(n)]
    return [agent.partition("/")[0] for _, agent in sorted(mixed)]


def cancel(answer: Answer) -> None:
    """Replaces ray.cancel."""
    if answer.owner:
        answer.owner.stop()
        answer.owner.fail(Lost("it was cancelled"))
