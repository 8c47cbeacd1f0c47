"""Teachers on ranks of their own: a queue each, one batch at a time, replaced where they die.

A batch is what came first of the groups that wait, up to a row for each replica. So what a batch
costs is bounded, and a teacher that is slower than the rest scores full rows.
"""

import asyncio
import time
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

from tqdm import tqdm

from core.errors import RunError, brief
from core.waits import together, within
from policy.packing import Place, plan_rows
from rollout.episode import Group, SampleInfo
from runtime.processes.actors import kill
from runtime.processes.cluster import Cluster
from runtime.reporting.console import phase

if TYPE_CHECKING:
    from settings.config import TrainingSettings


ATTEMPTS = 3  # failures of a teacher in a row, to start or to score, that end the run
PAUSE = 1.0  # seconds, for each failure, until memory of the lost ranks is free


class Waiting(NamedTuple):
    """A group that waits for its teacher."""

    group: Group
    model: str
    since: float
    scored: "asyncio.Future[Group]"


class Station:
    """The ranks of one teacher, or of several in turn, and the groups that wait for them."""

    def __init__(self, name: str, cfg: "TrainingSettings", cluster: Cluster, Teacher: type):
        self.name = name
        self.cfg = cfg  # whose model and policy are those of these ranks
        self.cluster = cluster
        self.Teacher = Teacher
        self.homes: list[str] = []
        self.ranks: list[Any] = []  # none while it is not there
        self.queue: deque[Waiting] = deque()
        self.working: asyncio.Task | None = None
        self.watching: asyncio.Task | None = None
        self.failures = 0  # in a row
        self.error: RunError | None = None  # once it is given up
        self.longest = 0.0  # seconds from a group's end to its score, since the last `take`
        self.busy = 0.0  # seconds of scoring since then

    async def start(self) -> None:
        """Starts the ranks, which load their checkpoints."""
        self.ranks, *_ = await self.cluster.start_ranks(self.Teacher, self.cfg, 1, self.homes)
        self.watching = asyncio.create_task(self.watch(self.ranks))

    async def score(self, group: Group, model: str) -> Group:
        """A group with the logprobs of one of the checkpoints. Raises RunError if given up."""
        if self.error:
            raise self.error
        scored = asyncio.get_running_loop().create_future()
        self.queue.append(Waiting(group, model, time.monotonic(), scored))
        self.wake()
        return await scored

    def wake(self) -> None:
        """Begins to score, unless that goes on already."""
        if self.working is None or self.working.done():
            self.working = asyncio.create_task(self.work_off())

    async def work_off(self) -> None:
        """Scores batch after batch. Lost ranks are started again, even where no group waits."""
        while (self.queue or not self.ranks) and not self.error:
            ranks = self.ranks
            try:
                if ranks:
                    await self.score_batch(ranks)
                    self.failures = 0
                else:
                    await asyncio.sleep(PAUSE * self.failures)
                    await self.start()
            except Exception as error:
                self.lose(ranks, error)

    async def score_batch(self, ranks: list[Any]) -> None:
        """Scores what came first; those groups are in the queue until that is done."""
        batch = self.next_batch()
        if not batch:
            self.queue.clear()  # cancelled ones
            return

        layout = self.cfg.policy
        shares = plan_scoring([waiting.group.infos for waiting in batch], self.cfg)
        of_ranks = [shares[layout.replica_of(rank)] for rank in range(layout.ranks)]
        calls = []
        for rank, share in zip(ranks, of_ranks, strict=True):
            samples = (batch[g].group.samples for g in share.groups)
            score = rank.score.options(num_returns=2 + len(share.groups))
            calls.append(score.remote(batch[0].model, share.rows, *samples))
        both = asyncio.gather(*(asyncio.gather(*call[:2]) for call in calls))
        what = f"the teacher {self.name} to score {len(batch)} groups"
        found = await within(self.cfg.timeouts.train, what, both, self.census)
        self.busy += max(seconds for seconds, _ in found)
        for share, (_, infos), (_, _, *refs) in zip(of_ranks, found, calls, strict=True):
            if infos:  # of this replica's ranks the one that reports
                for g, of_group, ref in zip(share.groups, infos, refs, strict=True):
                    self.hand_back(batch[g], of_group, ref)

    def next_batch(self) -> list[Waiting]:
        """Of those that wait for the same checkpoint as the first one, a row for each replica."""
        waiting = [one for one in self.queue if not one.scored.done()]
        room = self.cfg.policy.row_tokens * self.cfg.policy.replicas
        batch: list[Waiting] = []
        for one in waiting:
            if one.model != waiting[0].model:
                continue
            room -= sum(info.tokens for info in one.group.infos)
            if batch and room < 0:
                break
            batch.append(one)
        return batch

    def hand_back(self, waiting: Waiting, infos: list[SampleInfo], samples: Any) -> None:
        """Ends the wait for a group."""
        self.queue.remove(waiting)
        self.longest = max(self.longest, time.monotonic() - waiting.since)
        for before, info in zip(waiting.group.infos, infos, strict=True):
            info.judging = before.judging
            info.has_gradient = info.trained_tokens > 0
        group = waiting.group
        scored = Group(group.slot, group.version, group.line, infos, samples)
        if not waiting.scored.done():
            waiting.scored.set_result(scored)

    def lose(self, ranks: list[Any], error: BaseException) -> None:
        """Ends the ranks, so that others start; gives up after ATTEMPTS in a row, with RunError.

        At once where a score is not finite: the same network would find the same.
        """
        if self.ranks is not ranks:
            return
        for rank in ranks:
            kill(rank)
        self.ranks = []
        self.failures += 1
        tqdm.write(f"the teacher {self.name} is lost: {brief(error)}")
        if self.failures < ATTEMPTS and not isinstance(error, FloatingPointError):
            return
        often = f"failed {self.failures} times in a row: {brief(error)}"
        self.error = RunError(f"the teacher {self.name} {often}")
        self.error.__cause__ = error
        for waiting in self.queue:
            if not waiting.scored.done():
                waiting.scored.set_exception(self.error)

    async def watch(self, ranks: list[Any]) -> None:
        """Notices that a rank dies, also while none scores."""
        try:
            await together(map(self.cluster.watch, ranks))
        except Exception as error:
            self.lose(ranks, error)
            self.wake()

    def census(self) -> str:
        """For error messages: how many groups wait, and for how long."""
        oldest = time.monotonic() - self.queue[0].since if self.queue else 0.0
        state = "" if self.ranks else ", no rank lives"
        return f"{len(self.queue)} groups wait for {self.name} (oldest {oldest:.0f} s{state})"

    def take(self) -> tuple[float, float]:
        """The longest wait and the seconds of scoring since the last call."""
        found = self.longest, self.busy
        self.longest = self.busy = 0.0
        return found


class Teachers:
    """All teachers of a run."""

    def __init__(self, cfg: Any, cluster: Cluster, Teacher: type):
        self.cfg = cfg
        self.stations = {
            host: Station(host, cfg.of_host(host), cluster, Teacher) for host in cfg.hosts
        }
        self.cluster = cluster

    async def start(self) -> None:
        """Starts all of them. Raises what the first that does not start raises."""
        phase(f"loading teachers ({', '.join(self.stations)})")
        pairs = zip(self.stations.values(), self.cluster.places.beside, strict=True)
        for station, homes in pairs:
            station.homes = homes
        await together(station.start() for station in self.stations.values())

    async def score(self, group: Group) -> Group:
        """A group whose samples have their teacher's logprobs. Raises RunError if it is lost."""
        info = group.infos[0]
        name = self.cfg.teacher_of(info.env, info.dataset)
        station = self.stations[self.cfg.host_of(name)]
        return await station.score(group, self.cfg.teachers[name])

    def census(self) -> str:
        """For error messages."""
        return "; ".join(station.census() for station in self.stations.values())

    def meters(self) -> dict[str, float]:
        """Of each host since the last call: the longest wait, and the seconds of scoring."""
        found = {}
        for name, station in self.stations.items():
            found[f"teacher_wait/{name}"], found[f"teacher_seconds/{name}"] = station.take()
        return found


class Scoring(NamedTuple):
    """What a replica of a teacher scores of a batch."""

    groups: list[int]  # of the batch, whole ones
    rows: list[list[Place]]  # which name a group by its place in `groups`


def plan_scoring(groups: "list[list[SampleInfo]]", cfg: "TrainingSettings") -> list[Scoring]:
    """Spreads whole groups over the replicas of a teacher, the heaviest first to the least busy.

    A replica returns whole groups, so they need not be joined afterwards. What trains nothing is in
    no row. All have equally many rows, of which some may be empty.
    """
    from policy.model_shape import even_length  # and transformers, which takes seconds

    layout = cfg.policy
    even = even_length(cfg.model, False)
    works = [sum(i.tokens * (i.tokens + even) for i in infos) for infos in groups]
    shares: list[list[int]] = [[] for _ in range(layout.replicas)]
    busy = [0] * layout.replicas
    for g in sorted(range(len(groups)), key=lambda g: -works[g]):
        least = busy.index(min(busy))
        shares[least].append(g)
        busy[least] += works[g]
    found = []
    for share in shares:
        infos = ((k, groups[g]) for k, g in enumerate(share))
        scored = {(k, j): i.tokens for k, of in infos for j, i in enumerate(of) if i.trained_tokens}
        places = list(scored)
        (rows,) = plan_rows(list(scored.values()), layout.row_tokens, 1, even)
        found.append(Scoring(share, [[places[i] for i in row] for row in rows]))
    most = max(len(scoring.rows) for scoring in found)
    return [Scoring(of, rows + [[]] * (most - len(rows))) for of, rows in found]
