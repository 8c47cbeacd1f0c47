"""Scores groups with teachers: each has a queue, and ranks that are replaced when they die.

A teacher scores one batch at a time. A batch holds the groups that have waited longest, up to one
row per replica. So the cost of a batch is bounded, and a teacher that is slower than the
others scores full rows.
"""

import asyncio
import time
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from tqdm import tqdm

from core.errors import RunError, brief
from core.waits import Ref, together, within
from policy.packing import Place, plan_rows
from rollout.episode import Group, Sample, SampleInfo
from runtime.processes.actors import kill
from runtime.processes.cluster import Cluster
from runtime.reporting.console import phase

if TYPE_CHECKING:
    from ray.actor import ActorHandle

    from settings.config import TrainingSettings
    from settings.distillation import TeacherSettings


ATTEMPTS = 3  # consecutive failures of a teacher, to start or to score, that end the run
PAUSE = 1.0  # seconds to wait per failure, so that the memory of lost ranks becomes free


class Waiting(NamedTuple):
    """A group that waits for its teacher."""

    group: Group
    model: str
    since: float
    scored: "asyncio.Future[Group]"


class ScoreCall(NamedTuple):
    """A rank's call to `score`. Ray keeps the samples; the driver fetches the rest."""

    share: "Scoring"
    seconds: Ref[float]
    infos: Ref[list[list[SampleInfo]]]  # infos of each group; [] from a rank that does not report
    samples: list[Ref[list[Sample]]]  # samples of each group, with the teacher's logprobs


class Station:
    """The ranks of one teacher, or of several in turn, and the groups that wait for them."""

    def __init__(self, name: str, cfg: "TrainingSettings", cluster: Cluster, Teacher: type):
        self.name = name
        self.cfg = cfg  # settings with the model and the policy of these ranks
        self.cluster = cluster
        self.Teacher = Teacher
        self.homes: list[str] = []
        self.ranks: list[ActorHandle] = []  # empty until they have started, and once they are lost
        self.queue: deque[Waiting] = deque()
        self.working: asyncio.Task | None = None
        self.watching: asyncio.Task | None = None
        self.failures = 0  # number of consecutive failures
        self.error: RunError | None = None  # set once the teacher is abandoned
        self.longest = 0.0  # most seconds from a group's end to its score, since the last `take`
        self.busy = 0.0  # seconds of scoring since then

    async def start(self) -> None:
        """Starts the ranks, which load their checkpoints."""
        self.ranks, *_ = await self.cluster.start_ranks(self.Teacher, self.cfg, 1, self.homes)
        self.watching = asyncio.create_task(self.watch(self.ranks))

    async def score(self, group: Group, model: str) -> Group:
        """Returns a group with the logprobs of one of the checkpoints.

        Raises RunError if the teacher is abandoned.
        """
        if self.error:
            raise self.error
        scored = asyncio.get_running_loop().create_future()
        self.queue.append(Waiting(group, model, time.monotonic(), scored))
        self.wake()
        return await scored

    def wake(self) -> None:
        """Begins to score, unless scoring is under way."""
        if self.working is None or self.working.done():
            self.working = asyncio.create_task(self.work_off())

    async def work_off(self) -> None:
        """Scores batch after batch. Restarts lost ranks, even if no group waits."""
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

    async def score_batch(self, ranks: "list[ActorHandle]") -> None:
        """Scores the groups that have waited longest; they stay in the queue until that is done."""
        batch = self.next_batch()
        if not batch:
            self.queue.clear()  # all of them were cancelled
            return

        shares = plan_scoring([waiting.group.infos for waiting in batch], self.cfg)
        calls: list[ScoreCall] = []
        for number, rank in enumerate(ranks):
            share = shares[self.cfg.policy.replica_of(number)]
            groups = [batch[g].group.samples for g in share.groups]
            score = rank.score.options(num_returns=2 + len(groups))
            seconds, infos, *samples = score.remote(batch[0].model, share.rows, *groups)
            calls.append(ScoreCall(share, seconds, infos, samples))
        what = f"the teacher {self.name} to score {len(batch)} groups"
        scored = asyncio.gather(
            asyncio.gather(*(call.seconds for call in calls)),
            asyncio.gather(*(call.infos for call in calls)),
        )
        seconds_of, infos_of = await within(self.cfg.timeouts.train, what, scored, self.census)
        self.busy += max(seconds_of)
        for call, of_groups in zip(calls, infos_of, strict=True):
            if not of_groups:  # another rank of this replica reports
                continue
            reported = zip(call.share.groups, of_groups, call.samples, strict=True)
            for g, of_group, samples in reported:
                self.hand_back(batch[g], of_group, samples)

    def next_batch(self) -> list[Waiting]:
        """Returns groups that wait for the first one's checkpoint, up to a row per replica."""
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

    def hand_back(
        self, waiting: Waiting, infos: list[SampleInfo], samples: Ref[list[Sample]]
    ) -> None:
        """Ends the wait of a group, with its scored samples and their infos."""
        self.queue.remove(waiting)
        self.longest = max(self.longest, time.monotonic() - waiting.since)
        for before, info in zip(waiting.group.infos, infos, strict=True):
            info.judging = before.judging
            info.has_gradient = info.trained_tokens > 0
        group = waiting.group
        scored = Group(group.slot, group.version, group.line, infos, samples)
        if not waiting.scored.done():
            waiting.scored.set_result(scored)

    def lose(self, ranks: "list[ActorHandle]", error: BaseException) -> None:
        """Kills the ranks, so that new ones start.

        Gives up after ATTEMPTS failures in a row: groups that wait, and groups to come, get a
        RunError. Gives up at once if a score is not finite, because the same network would compute
        it again.
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
        self.error = RunError(
            f"the teacher {self.name} failed {self.failures} times in a row: {brief(error)}"
        )
        self.error.__cause__ = error
        for waiting in self.queue:
            if not waiting.scored.done():
                waiting.scored.set_exception(self.error)

    async def watch(self, ranks: "list[ActorHandle]") -> None:
        """Notices when a rank dies, even while no batch is scored."""
        try:
            await together(map(self.cluster.watch, ranks))
        except Exception as error:
            self.lose(ranks, error)
            self.wake()

    def census(self) -> str:
        """Returns how many groups wait, and for how long, for error messages."""
        oldest = time.monotonic() - self.queue[0].since if self.queue else 0.0
        state = "" if self.ranks else ", no rank lives"
        return f"{len(self.queue)} groups wait for {self.name} (oldest {oldest:.0f} s{state})"

    def take(self) -> tuple[float, float]:
        """Returns the longest wait and the seconds of scoring since the last call."""
        longest = self.longest
        busy = self.busy
        self.longest = 0.0
        self.busy = 0.0
        return longest, busy


class Teachers:
    """All teachers of a run."""

    def __init__(self, cfg: "TeacherSettings", cluster: Cluster, Teacher: type):
        self.cfg = cfg
        self.cluster = cluster
        self.stations: dict[str, Station] = {}
        for host in cfg.hosts:
            self.stations[host] = Station(host, cfg.of_host(host), cluster, Teacher)

    async def start(self) -> None:
        """Starts all teachers. Raises the error of the first one that does not start."""
        phase(f"loading teachers ({', '.join(self.stations)})")
        homes_of = self.cluster.places.beside
        for station, homes in zip(self.stations.values(), homes_of, strict=True):
            station.homes = homes
        await together(station.start() for station in self.stations.values())

    async def score(self, group: Group) -> Group:
        """Returns a group whose samples have their teacher's logprobs.

        Raises RunError if the teacher is abandoned.
        """
        info = group.infos[0]
        name = self.cfg.teacher_of(info.env, info.dataset)
        station = self.stations[self.cfg.host_of(name)]
        return await station.score(group, self.cfg.teachers[name])

    def census(self) -> str:
        """Returns how many groups wait for each teacher, for error messages."""
        return "; ".join(station.census() for station in self.stations.values())

    def meters(self) -> dict[str, float]:
        """Returns each host's longest wait and seconds of scoring since the last call."""
        found: dict[str, float] = {}
        for name, station in self.stations.items():
            longest, busy = station.take()
            found[f"teacher_wait/{name}"] = longest
            found[f"teacher_seconds/{name}"] = busy
        return found


class Scoring(NamedTuple):
    """A replica's share of the groups that a teacher scores."""

    groups: list[int]  # indices of whole groups in the batch
    rows: list[list[Place]]  # packed rows, which refer to a group by its index in `groups`


def plan_scoring(groups: "list[list[SampleInfo]]", cfg: "TrainingSettings") -> list[Scoring]:
    """Spreads whole groups over the replicas of a teacher: the heaviest first, to the least busy.

    A replica returns whole groups, so they need not be joined afterwards. Samples without trained
    tokens are in no row. All replicas have equally many rows, some of which may be empty.
    """
    from policy.model_shape import even_length  # also imports transformers, which takes seconds

    layout = cfg.policy
    even = even_length(cfg.model, False)
    works = [sum(info.tokens * (info.tokens + even) for info in infos) for infos in groups]
    shares: list[list[int]] = [[] for _ in range(layout.replicas)]
    busy = [0] * layout.replicas
    for g in sorted(range(len(groups)), key=lambda g: -works[g]):
        least = busy.index(min(busy))
        shares[least].append(g)
        busy[least] += works[g]
    found = []
    for share in shares:
        places: list[Place] = []
        lengths: list[int] = []
        for k, g in enumerate(share):
            for j, info in enumerate(groups[g]):
                if info.trained_tokens:
                    places.append((k, j))
                    lengths.append(info.tokens)
        (rows,) = plan_rows(lengths, layout.row_tokens, 1, even)
        found.append(Scoring(share, [[places[i] for i in row] for row in rows]))
    most = max(len(scoring.rows) for scoring in found)
    return [filled_up(scoring, most) for scoring in found]


def filled_up(scoring: Scoring, rows: int) -> Scoring:
    """Returns a share with empty rows added, until it has `rows` of them."""
    missing = rows - len(scoring.rows)
    return scoring._replace(rows=scoring.rows + [[]] * missing)
