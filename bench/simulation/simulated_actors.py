"""Replaces Ray's actors: engines, trainer ranks and rollout workers that only take time."""

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from bench.simulation.hardware import Hardware
from bench.simulation.simulated_engine import Engine
from bench.simulation.simulated_engine import Sequence as Written
from bench.simulation.workload import Judges, Workload
from core.waits import Idle
from envs.services import Report
from policy.sync.weight_sync import Sender
from rollout.drafts import DRAFT_SECONDS
from rollout.episode import SampleInfo
from runtime.engines.fleet import Received
from runtime.engines.probe import ANSWER, LENGTH, PROMPTS
from runtime.rollouts.dispatch import Slot

if TYPE_CHECKING:
    from grpo_async import Config
    from policy.packing import Place, Update
    from rollout.episode import Request
    from settings.config import TrainingSettings

HEALTHY = Report({}, Counter())


class Lost(Exception):
    """Raised if an actor has died."""


class Answer(asyncio.Future):
    """The result of a call: awaited like Ray's references, or like the future of one."""

    owner: "Group | None" = None  # stops if the call is cancelled

    def future(self) -> "Answer":
        """Returns itself: asyncio.wrap_future leaves a future of asyncio as it is."""
        return self

    def give(self, value: Any) -> None:
        """Sets the value; an exception is raised when the answer is awaited."""
        if self.done():
            return
        if isinstance(value, Exception):
            self.set_exception(value)
            self.exception()  # marks it as retrieved
        else:
            self.set_result(value)


class Method:
    """An actor's method, which is called through `remote`."""

    __slots__ = ("remote",)

    def __init__(self, remote: "Callable[..., Answer | Sequence[Answer] | Actor | None]"):
        self.remote = remote

    def options(self, **_: Any) -> "Method":
        """Returns itself: Ray's options change nothing here."""
        return self


def answered(value: Any = None) -> Answer:
    """Returns the answer of a call that takes no time."""
    answer = Answer()
    answer.give(value)
    return answer


def after(seconds: float, value: Any = None) -> Answer:
    """Returns the answer of a call that takes this many seconds."""
    answer = Answer()
    asyncio.get_running_loop().call_later(seconds, answer.give, value)
    return answer


class Stage:
    """The state that all actors of a run share: clock, hardware, work, and the living actors."""

    def __init__(self, cfg: "Config", hardware: Hardware, workload: Workload):
        self.cfg = cfg
        self.hardware = hardware
        self.workload = workload
        self.loop = asyncio.get_running_loop()
        self.judges = Judges(workload.judge, workload.judged_at_once, workload.seed)
        self.numbers = random.Random(workload.seed)
        self.engines: list[EngineActor] = []  # engines that live or start
        self.gone: list[Engine] = []
        self.trainers: list[TrainerActor] = []
        self.workers: list[WorkerActor] = []
        self.teachers: list[TeacherActor] = []
        self.transfer: Transfer | None = None
        self.traced = False  # True while engines keep their history
        self.histories: dict[int, list[tuple[float, int]]] = {}  # histories of engines, by place
        self.spans: list[Span] = []  # groups that were rolled out
        self.trainings: list[Training] = []
        self.planned: list[Update] | None = None  # the updates that a rank was given last
        self.seconds = 0.0  # seconds that they take
        self.lost_tokens = 0.0  # tokens that a lost engine had written and that no draft holds
        self.deaths: Counter[str] = Counter()

    def make(self, kind: type, *_: Any, **__: Any) -> Method:
        """Replaces `runtime.processes.cluster.actor`."""
        made = {"Generator": EngineActor, "Trainer": TrainerActor, "RolloutWorker": WorkerActor}
        if kind.__name__ == "Teacher":
            return Method(lambda cfg: TeacherActor(self, cfg))
        return Method(lambda cfg: made[kind.__name__](self))

    def kill(self, actor: "EngineActor | TeacherActor | WorkerActor") -> None:
        """Replaces ray.kill."""
        actor.die(Lost("it was killed"))


class Training(NamedTuple):
    """A rank's work in a step."""

    step: int
    rank: int
    began: float
    seconds: float


class Span(NamedTuple):
    """The time and the place of one group's rollouts."""

    slot: int
    engine: int
    tokens: int  # tokens of the longest answer
    began: float
    queued: float  # seconds, as in Group.queued
    written: float  # time of the last token
    ended: float


class EngineActor:
    """A vLLM engine."""

    def __init__(self, stage: Stage):
        self.stage = stage
        self.engine = Engine(stage.hardware, stage.loop)
        places = {other.place for other in stage.engines}
        self.place = next(i for i in range(len(places) + 1) if i not in places)
        self.version = -1
        self.updates = 0
        self.groups: dict[Group, None] = {}  # in arrival order
        self.idle = Idle()
        self.open: set[Answer] = set()  # calls that are not answered yet
        self.hangs = False
        self.error: Exception | None = None
        stage.engines.append(self)
        self.observe(stage.traced)
        self.start = Method(lambda: self.keep(after(stage.hardware.start)))
        self.join_sync_group = Method(lambda *_: self.keep(after(stage.hardware.connect, [1])))
        self.check_health = Method(self._check_health)
        self.generate = Method(self._answer_probe)
        self.update_weights = Method(self._update_weights)

    def observe(self, traced: bool) -> None:
        """Starts or stops recording this engine's history."""
        history = self.stage.histories.setdefault(self.place, [])
        self.engine.history = history if traced else None
        if traced:
            history.append((self.stage.loop.time(), self.engine.batch))

    def keep(self, answer: Answer) -> Answer:
        """Returns an answer that fails if the engine dies before it arrives."""
        if self.error:
            return answered(self.error)
        if not answer.done():
            self.open.add(answer)
            answer.add_done_callback(self.open.discard)
        return answer

    def die(self, error: Exception) -> None:
        """Makes all calls fail, including future ones."""
        if self.error:
            return
        self.error = error
        if self in self.stage.engines:
            self.stage.engines.remove(self)
            self.stage.gone.append(self.engine)
        for group in list(self.groups):
            group.lose(error)
        self.engine.stop()
        for answer in list(self.open):
            answer.give(error)
        if self.stage.transfer:
            self.stage.transfer.lose(self)

    def hang(self) -> None:
        """Stops work and answers from now on."""
        self.hangs = True
        self.engine.set_paused(True)

    def _answer_probe(self, request: "Request") -> Answer:
        """Answers all prompts of the probe at once: a new engine gets them before any group.

        Later probes take no time: the dry run counts them.
        """
        if self.updates > 1:
            return self.keep(answered([None]))
        context = PROMPTS * (LENGTH + ANSWER / 2)
        return self.keep(after(ANSWER * self.stage.hardware.decode(PROMPTS, context), [None]))

    def _check_health(self) -> Answer:
        if self.hangs and not self.error:
            return self.keep(Answer())
        return answered(self.error)

    def _update_weights(self, version: int, verify: bool) -> Answer:
        answer = self.keep(Answer())
        if not answer.done():
            self.engine.set_paused(True)
            self.stage.transfer.join(self, version, answer)  # type: ignore[union-attr]
        return answer


class Transfer:
    """One broadcast of the weights. If a member dies, the others wait in vain."""

    def __init__(self, stage: Stage):
        self.stage = stage
        self.sends: list[Answer] = []
        self.members: dict[EngineActor, tuple[int, Answer]] = {}
        self.end = stage.loop.call_later(stage.hardware.sync, self.arrive)
        self.began = stage.loop.time()

    def send(self) -> Answer:
        """Adds a trainer rank."""
        self.sends.append(Answer())
        return self.sends[-1]

    def join(self, engine: EngineActor, version: int, answer: Answer) -> None:
        """Adds an engine."""
        self.members[engine] = (version, answer)

    def arrive(self) -> None:
        """Ends the broadcast: all members have all weights, unless one hangs."""
        if any(engine.hangs for engine in self.members):
            return
        self.stage.transfer = None
        seconds = self.stage.loop.time() - self.began
        phases = {"sync_pause": 0.0, "sync_transfer": seconds, "sync_resume": 0.0}
        for engine, (version, answer) in self.members.items():
            engine.version = version
            engine.updates += 1
            engine.engine.set_paused(False)
            answer.give(Received(phases, [0], {"wait_for_training": engine.idle.take()}))
        for send in self.sends:
            send.give(0)

    def lose(self, engine: EngineActor) -> None:
        """Loses a member: what is being sent never arrives."""
        if engine in self.members:
            self.end.cancel()

    def abort(self) -> None:
        """Gives up: all sends fail."""
        self.end.cancel()
        self.stage.transfer = None
        for send in self.sends:
            send.give(Lost("the transfer was aborted"))


class TrainerActor:
    """One trainer rank."""

    def __init__(self, stage: Stage):
        self.stage = stage
        self.rank = len(stage.trainers)
        stage.trainers.append(self)
        self.start = Method(lambda rank, address: answered([]))
        self.open_store = Method(lambda world: answered(("host", 1)))
        self.close_store = Method(lambda: answered(None))
        self.open_sync_group = Method(lambda world: answered((b"", "host", 1)))
        self.join_sync_group = Method(lambda *_: after(stage.hardware.connect))
        self.call = Method(self._call)
        self.watch = Method(Answer)
        self.probe_gaps = Method(lambda answers: answered([0.0] * len(answers)))
        self.train_step = Method(self._train)
        self.send_weights = Method(self._send)
        self.save = Method(lambda folder: after(stage.hardware.copy))

    def _call(self, function: Callable, *args: Any) -> Answer:
        if function == Sender.abort and self.stage.transfer:
            self.stage.transfer.abort()
        return answered(("node", [self.rank]))

    def _send(self, verify: bool) -> Answer:
        if self.stage.transfer is None:
            self.stage.transfer = Transfer(self.stage)
        return self.stage.transfer.send()

    def _train(self, step: int, updates: "list[Update]", *groups: Answer) -> list[Answer]:
        stage = self.stage
        if stage.planned is not updates:  # ranks of a replica have the same rows
            infos = [group.result() for group in groups]
            rows = [
                [infos[g][j].tokens for g, j in row] for update in updates for row in update.rows
            ]
            stage.planned = updates
            stage.seconds = stage.hardware.train(rows)
        seconds = stage.seconds
        stage.trainings.append(Training(step, self.rank, stage.loop.time(), seconds))
        return [after(seconds, {"train_seconds": seconds}), after(seconds, {}), answered()]


class TeacherActor:
    """One rank of a teacher."""

    def __init__(self, stage: Stage, cfg: "TrainingSettings"):
        self.stage = stage
        self.cfg = cfg  # settings of the teacher's ranks
        self.error: Exception | None = None
        self.open: set[Answer] = set()
        stage.teachers.append(self)
        self.start = Method(self._start)
        self.open_store = Method(lambda world: answered(self.error or ("host", 1)))
        self.close_store = Method(lambda: answered(self.error))
        self.call = Method(lambda function, *args: answered(self.error or ("node", [id(self)])))
        self.watch = Method(lambda: self.keep(Answer()))
        self.score = Method(self._score)

    def keep(self, answer: Answer) -> Answer:
        """Returns an answer that fails if the rank dies before it arrives."""
        self.open.add(answer)
        return answered(self.error) if self.error else answer

    def die(self, error: Exception) -> None:
        """Makes all calls fail, including future ones."""
        self.error = self.error or error
        if self in self.stage.teachers:
            self.stage.teachers.remove(self)
        for answer in self.open:
            answer.give(error)

    def _start(self, rank: int, address: tuple) -> Answer:
        self.rank = rank
        return self.keep(after(self.stage.hardware.connect))

    def _score(self, model: str, rows: "list[list[Place]]", *groups: Answer) -> list[Answer]:
        layout = self.cfg.policy
        infos = [group.result() for group in groups]
        packed = [[infos[g][j].tokens for g, j in row] for row in rows]
        seconds = self.stage.hardware.score(model, layout, packed)
        reports = self.rank % (layout.tp * layout.cp) == 0
        values = [seconds, infos if reports else [], *infos]
        return [self.keep(after(seconds, value)) for value in values]


class WorkerActor:
    """One rollout worker."""

    def __init__(self, stage: Stage):
        self.stage = stage
        self.groups: dict[Group, None] = {}
        self.drafts: dict[tuple[Slot, int], list[float]] = {}  # tokens of each sample
        self.error: Exception | None = None
        stage.workers.append(self)
        self.call = Method(lambda function: answered(self.error or HEALTHY))
        self.forget = Method(lambda slot, line: self.drafts.pop((slot, line), None))
        self.rollout_group = Method(self._roll_out)

    def _roll_out(self, engine: EngineActor, row: dict, slot: Slot, n: int) -> Sequence[Answer]:
        if error := self.error or engine.error:
            return [answered(error) for _ in range(3)]
        line = row["_line"]
        totals = self.stage.workload.of_group(line, n)
        answers = [Answer() for _ in range(3)]
        answers[0].owner = group = Group(self, engine, slot, line, totals, answers)
        group.env = row["agent_ref"]["name"]
        return answers

    def die(self, error: Exception) -> None:
        """Loses its groups and drafts."""
        if self.error:
            return
        self.error = error
        if self in self.stage.workers:
            self.stage.workers.remove(self)
        for group in list(self.groups):
            group.stop()
            group.fail(error)


Actor = EngineActor | TrainerActor | TeacherActor | WorkerActor


class Group:
    """An attempt at a prompt's rollouts, which continues from the drafts of an earlier one."""

    env = ""

    def __init__(
        self,
        worker: WorkerActor,
        engine: EngineActor,
        slot: Slot,
        line: int,
        totals: list[int],
        answers: list[Answer],
    ):
        self.worker = worker
        self.stage = worker.stage
        self.engine = engine
        self.slot = slot
        self.line = line
        self.answers = answers
        self.began = self.stage.loop.time()
        self.oldest = engine.version
        self.totals = totals
        self.left = len(totals)
        self.written = 0.0  # time of the last token so far
        self.queued = 0.0  # seconds in which that token's rollout waited for a place in its engine
        worker.groups[self] = engine.groups[self] = None
        engine.idle.change(1)
        drafts = worker.drafts.pop((slot, line), [0.0] * self.left)
        work = self.stage.workload
        self.rollouts: list[Rollout] = []
        for j, (total, draft) in enumerate(zip(totals, drafts, strict=True)):
            shared = work.prompt if j and work.reuses_prompts else 0
            self.rollouts.append(Rollout(self, total, draft, shared))

    def lose(self, error: Exception) -> None:
        """Ends the group because its engine has died; keeps drafts as they were last copied."""
        kept = []
        for rollout in self.rollouts:
            written, draft = rollout.written(), rollout.draft()
            self.stage.lost_tokens += written - draft
            kept.append(draft)
        self.worker.drafts[self.slot, self.line] = kept
        self.stop()
        self.fail(error)

    def stop(self) -> None:
        """Stops all rollouts of the group."""
        self.leave()
        for rollout in self.rollouts:
            rollout.stop()

    def leave(self) -> None:
        """Takes the group out of its worker and its engine."""
        self.worker.groups.pop(self, None)
        if self in self.engine.groups:
            del self.engine.groups[self]
            self.engine.idle.change(-1)

    def fail(self, error: Exception) -> None:
        """Makes the call raise."""
        for answer in self.answers:
            answer.give(error)

    def one_done(self) -> None:
        """Counts a sample that has its reward; the last one ends the group."""
        self.left -= 1
        if self.left:
            return
        self.leave()
        span = Span(
            slot=self.slot.number,
            engine=self.engine.place,
            tokens=max(self.totals),
            began=self.began,
            queued=self.queued,
            written=self.written,
            ended=self.stage.loop.time(),
        )
        self.stage.spans.append(span)
        limit = self.stage.workload.lengths.limit
        prompt = self.stage.workload.prompt
        infos = [
            SampleInfo(
                prompt + n,
                n,
                response_tokens=n,
                truncated=n >= limit,
                reward=0.0,
                score=0.0,
                has_gradient=True,
                oldest_version=self.oldest,
                newest_version=self.engine.version,
                env=self.env,
            )
            for n in self.totals
        ]
        infos_answer, samples, lines = self.answers
        infos_answer.give(infos)
        samples.give(infos)
        lines.give(b"")


class Rollout:
    """One sample: its turns, the tools between them, its judge."""

    __slots__ = ("asked", "group", "is_over", "queued", "sequence", "total", "turn")

    def __init__(self, group: Group, total: int, draft: float, shared: int):
        self.group = group
        self.total = total
        self.is_over = False
        self.sequence: Written | None = None
        self.asked = 0.0
        self.queued = 0.0
        turns = group.stage.workload.turns
        self.turn = min(turns - 1, int(draft * turns / total + 1e-9))
        self.ask(draft, shared)

    def ask(self, draft: float, shared: int) -> None:
        """Asks the engine to continue this turn from a draft; `shared` tokens are already read."""
        work = self.group.stage.workload
        engine = self.group.engine
        end = self.total * (self.turn + 1) / work.turns
        context = work.prompt + int(draft)
        if end - draft < 1e-9:  # a lost engine had written all of it
            self.group.stage.loop.call_soon(self.turn_done)
            return
        self.asked = self.group.stage.loop.time()
        self.sequence = Written(context, end - draft, shared, self.turn_done)
        engine.engine.add(self.sequence)

    def turn_done(self) -> None:
        """Ends a turn: the tool answers, or after the last turn the environment and its judge."""
        stage = self.group.stage
        work = stage.workload
        if self.sequence:
            self.queued += self.sequence.began - self.asked
        self.sequence = None
        self.group.written = stage.loop.time()
        self.group.queued = self.queued
        self.turn += 1
        if self.turn < work.turns:
            stage.loop.call_later(work.tool.draw(stage.numbers), self.next_turn)
        elif work.environment.mean:
            stage.loop.call_later(work.environment.draw(stage.numbers), self.judge)
        else:
            self.judge()

    def next_turn(self) -> None:
        """Continues the conversation."""
        if not self.is_over:
            work = self.group.stage.workload
            written = self.total * self.turn / work.turns
            self.ask(written, work.prompt + int(written) if work.reuses_prompts else 0)

    def judge(self) -> None:
        """Asks the judge, if the workload has one."""
        stage = self.group.stage
        if stage.workload.judge.mean:
            stage.judges.ask(self.end)
        else:
            self.end()

    def end(self) -> None:
        """Ends the rollout: the sample has its reward."""
        if not self.is_over:
            self.is_over = True
            self.group.one_done()

    def written(self) -> float:
        """Returns the number of tokens written so far."""
        work = self.group.stage.workload
        sequence = self.sequence
        if sequence is None:
            return self.total * self.turn / work.turns
        engine = self.group.engine.engine
        engine.settle()
        left = sequence.ends - engine.steps if sequence.is_running else sequence.left
        return self.total * (self.turn + 1) / work.turns - max(0.0, left)

    def draft(self) -> float:
        """Returns the number of tokens that the worker has copied: it asks every few seconds."""
        written = self.written()
        sequence = self.sequence
        if written >= self.total or sequence is None or not sequence.is_running:
            return written
        engine = self.group.engine.engine
        since = (engine.since - self.group.began) % DRAFT_SECONDS
        speed = engine.hardware.decode(engine.batch, engine.context)
        return max(0.0, written - since / speed) if speed else written

    def stop(self) -> None:
        """Makes its engine stop writing it."""
        self.is_over = True
        if self.sequence and not self.group.engine.error:
            self.group.engine.engine.drop(self.sequence)
