"""Teachers' queues against actors that a test controls, and what is checked before they start."""

import asyncio
import shutil
import time
from types import SimpleNamespace

import pytest
from conftest import save_tokenizer
from test_algorithm import sample

from core.errors import InputError, RunError
from mopd import Config
from rollout.episode import Group
from runtime.rollouts import teachers
from runtime.rollouts.teachers import Teachers, plan_scoring
from runtime.startup import check_teachers
from support.actors import Actor, Answer
from support.configs import changed

NAMES = {"teachers": {"one": "a", "two": "b"}, "routes": {"math": "two"}, "default_teacher": "one"}


def group(slot: int, *lengths: int, env: str = "any") -> Group:
    """A group whose samples have these lengths."""
    samples = [sample([1] * (n - 1), [-1.0] * (n - 1)) for n in lengths]
    for one in samples:
        one.env = env
    infos = [one.info() for one in samples]
    for info in infos:
        info.judging = 2.5
    return Group(slot, 3, 7, infos, samples)


class House:
    """Teachers whose ranks are actors of the test: `made` by host, `killed` in their order."""

    def __init__(self, monkeypatch, **fields):
        self.cfg = changed(Config(**NAMES), **{"timeouts": {"train": 60}} | fields)
        self.made: dict[str, list[list[Actor]]] = {host: [] for host in self.cfg.hosts}
        self.killed: list[Actor] = []
        self.deaths: dict[Actor, Answer] = {}
        self.answers: dict[str, list] = {host: [] for host in self.cfg.hosts}
        self.starts: list = []  # errors of the next starts
        places = SimpleNamespace(beside=[["n"] * r for r, _ in self.cfg.teacher_ranks])
        cluster = SimpleNamespace(places=places, start_ranks=self.start, watch=self.watch)
        monkeypatch.setattr(teachers, "kill", self.kill)
        monkeypatch.setattr(teachers, "PAUSE", 0.01)
        self.teachers = Teachers(self.cfg, cluster, object)

    async def start(self, cls, cfg, gpus, homes):
        if self.starts and (error := self.starts.pop(0)):
            raise error
        host = next(h for h in self.cfg.hosts if self.cfg.teachers[h] == cfg.model)
        ranks = [Actor(score=self.scores(host, rank, cfg)) for rank in range(len(homes))]
        self.deaths |= {rank: Answer(...) for rank in ranks}
        self.made[host].append(ranks)
        return ranks, homes, [None] * len(ranks)

    async def watch(self, rank):
        await self.deaths[rank]

    def kill(self, rank):
        self.killed.append(rank)

    def scores(self, host, rank, cfg):
        """What a rank returns: by default its groups, with the model in each sample's env."""

        def score(model, rows, *groups):
            if rank == 0 and self.answers[host] and (given := self.answers[host].pop(0)):
                return given
            reports = rank % (cfg.policy.tp * cfg.policy.cp) == 0
            infos = [[s.info() for s in samples] for samples in groups] if reports else []
            return 0.25, infos, *([f"{model}:{len(samples)}"] for samples in groups)

        return score

    def batches(self, host: str) -> list[list[int]]:
        """The lengths of the groups of each batch, of rank 0 of the ranks that live now."""
        calls = self.made[host][-1][0].called("score")
        return [[len(s.tokens_T) for g in groups for s in g] for _, _, *groups in calls]


@pytest.fixture
def house(monkeypatch):
    return lambda **fields: House(monkeypatch, **fields)


async def test_each_group_gets_the_score_of_its_route(house):
    made = house()
    await made.teachers.start()
    found = await asyncio.gather(*map(made.teachers.score, [
        group(0, 3), group(1, 4, env="math"), group(2, 5, 2),
    ]))  # fmt: skip
    samples = [(await one.samples)[0] for one in found]
    assert samples == ["a:1", "b:1", "a:2"]
    assert [(one.slot, one.version, one.line) for one in found] == [(i, 3, 7) for i in range(3)]
    assert all(i.judging == 2.5 and i.has_gradient for one in found for i in one.infos)
    meters = made.teachers.meters()
    assert meters["teacher_seconds/two"] == 0.25 and meters["teacher_wait/one"] > 0
    assert set(made.teachers.meters().values()) == {0.0}


async def test_what_waits_is_scored_together_up_to_a_row(house):
    made = house(teacher_policy={"row_tokens": 10})
    await made.teachers.start()
    first = Answer(...)
    made.answers["one"] = [(first, [], [])]
    tasks = [asyncio.create_task(made.teachers.score(group(0, 3)))]
    await asyncio.sleep(0.01)
    tasks += [
        asyncio.create_task(made.teachers.score(group(i, n))) for i, n in enumerate((4, 6, 1, 30))
    ]
    await asyncio.sleep(0.01)
    assert "5 groups wait for one" in made.teachers.census()
    first.give(RuntimeError("died"))  # the first batch is scored again, together with the others
    await asyncio.gather(*tasks)
    assert list(map(sorted, made.batches("one"))) == [[3, 4], [1, 6], [30]]


async def test_batches_of_one_host_follow_each_other_and_those_of_two_do_not(house):
    made = house()
    await made.teachers.start()
    held = Answer(...)
    made.answers["one"] = [(held, [[group(0, 3).infos[0]]], ["x"])]
    slow = asyncio.create_task(made.teachers.score(group(0, 3)))
    await asyncio.sleep(0.01)
    other = asyncio.create_task(made.teachers.score(group(1, 3)))
    await asyncio.wait_for(made.teachers.score(group(2, 3, env="math")), 5)
    assert len(made.made["one"][0][0].called("score")) == 1
    held.give(1.0)
    await asyncio.gather(slow, other)
    assert len(made.made["one"][0][0].called("score")) == 2


async def test_teachers_on_the_same_ranks_score_in_turn(house):
    made = house(teacher_beside={"two": "one"})
    await made.teachers.start()
    groups = [group(0, 3), group(1, 3, env="math"), group(2, 3)]
    found = await asyncio.gather(*map(made.teachers.score, groups))
    assert [(await one.samples)[0] for one in found] == ["a:1", "b:1", "a:1"]
    models = [model for model, *_ in made.made["one"][0][0].called("score")]
    assert models == ["a", "b"] and list(made.made) == ["one"]


async def test_a_teacher_that_dies_is_replaced_and_the_others_go_on(house):
    made = house()
    await made.teachers.start()
    made.answers["one"] = [RuntimeError("actor died")]
    lost = asyncio.create_task(made.teachers.score(group(0, 3)))
    await asyncio.wait_for(made.teachers.score(group(1, 3, env="math")), 5)
    assert (await lost).slot == 0
    assert [len(of) for of in made.made.values()] == [2, 1]
    assert made.killed == made.made["one"][0]


async def test_a_teacher_that_hangs_is_replaced(house):
    made = house(timeouts={"train": 0.05})
    await made.teachers.start()
    made.answers["one"] = [(Answer(...), [], [])]
    assert (await asyncio.wait_for(made.teachers.score(group(0, 3)), 5)).slot == 0
    assert made.killed == made.made["one"][0]


async def test_a_teacher_that_dies_idle_is_replaced_before_it_is_needed(house):
    made = house()
    await made.teachers.start()
    (rank,) = made.made["one"][0]
    made.deaths[rank].give(RuntimeError("actor died"))
    deadline = time.monotonic() + 5
    while len(made.made["one"]) < 2 and time.monotonic() < deadline:
        await asyncio.sleep(0.01)
    assert made.killed == [rank] and len(made.made["one"]) == 2


async def test_a_death_counts_once_though_two_notice_it(house):
    """The batch in flight fails, and so does the watch: that is one failure of three."""
    made = house()
    await made.teachers.start()
    for _ in range(2):
        held = Answer(...)
        made.answers["one"] = [(held, [], [])]
        task = asyncio.create_task(made.teachers.score(group(0, 3)))
        await asyncio.sleep(0.01)
        (rank,) = made.made["one"][-1]
        made.deaths[rank].give(RuntimeError("actor died"))
        await asyncio.sleep(0.01)
        held.give(RuntimeError("actor died"))
        assert (await asyncio.wait_for(task, 5)).slot == 0
    assert len(made.made["one"]) == 3


@pytest.mark.parametrize("where", ["score", "start"])
async def test_three_failures_in_turn_end_the_run_by_name(house, where):
    made = house()
    await made.teachers.start()
    error = RuntimeError("CUDA out of memory")
    made.answers["one"] = [error] * 3 if where == "score" else [error]
    made.starts = [None, None] if where == "score" else [error, error]
    waiting = [asyncio.create_task(made.teachers.score(group(i, 3))) for i in range(2)]
    for task in waiting:
        with pytest.raises(
            RunError, match="the teacher one failed 3 times in a row: .*CUDA"
        ) as caught:
            await asyncio.wait_for(task, 5)
        assert "out of memory" in str(caught.value.__cause__)
    with pytest.raises(RunError, match="the teacher one failed"):
        await made.teachers.score(group(3, 3))


async def test_a_score_that_is_not_finite_ends_the_run_at_once(house):
    made = house()
    await made.teachers.start()
    made.answers["one"] = [
        FloatingPointError("the teacher a gives a token of math the logprob nan")
    ]
    with pytest.raises(RunError) as caught:
        await asyncio.wait_for(made.teachers.score(group(0, 3)), 5)
    assert "gives a token of math the logprob nan" in str(caught.value.__cause__)


async def test_a_group_that_is_no_longer_awaited_holds_nothing_up(house):
    made = house()
    await made.teachers.start()
    held = Answer(...)
    made.answers["one"] = [(held, [], [])]
    given_up = asyncio.create_task(made.teachers.score(group(0, 3)))
    await asyncio.sleep(0.01)
    given_up.cancel()
    held.give(RuntimeError("died"))
    assert (await asyncio.wait_for(made.teachers.score(group(1, 3)), 5)).slot == 1
    await asyncio.sleep(0.01)
    assert "0 groups wait for one" in made.teachers.census()


async def test_of_a_replicas_ranks_the_one_that_reports_counts(house):
    layout = {"kind": "megatron", "ranks": 4, "tp": 2}
    made = house(teacher_layouts={"one": layout})
    await made.teachers.start()
    found = await asyncio.gather(*(made.teachers.score(group(i, 3, 4)) for i in range(4)))
    assert [(await one.samples)[0] for one in found] == ["a:2"] * 4
    ranks = made.made["one"][0]
    seen = [sum(len(groups) for _, _, *groups in rank.called("score")) for rank in ranks]
    assert seen[0] == seen[1] and seen[2] == seen[3] and seen[0] + seen[2] == 4


# --- what each replica scores ---------------------------------------------------------------------


def test_replicas_score_whole_groups_and_equal_numbers_of_rows(tmp_path):
    layout = {"ranks": 3, "row_tokens": 20}
    cfg = changed(Config(**NAMES), model=str(tmp_path), policy=layout)
    lengths = [(9, 9), (30,), (4,), (5, 6, 7), (3,)]
    groups = [group(i, *of) for i, of in enumerate(lengths)]
    for info in groups[4].infos:
        info.trained_tokens = 0  # it is handed back, and in no row
    plan = plan_scoring([one.infos for one in groups], cfg)
    assert sorted(g for of, _ in plan for g in of) == [0, 1, 2, 3, 4]
    assert len({len(rows) for _, rows in plan}) == 1
    for of, rows in plan:
        scored = sorted((of[k], j) for row in rows for k, j in row)
        assert scored == sorted((g, j) for g in of if g != 4 for j in range(len(groups[g].infos)))
        for row in rows:
            lengths = [groups[of[k]].infos[j].tokens for k, j in row]
            assert sum(lengths) <= 20 or len(lengths) == 1
    assert plan[0].groups == [1]  # the longest has a replica of its own


# --- before anything starts -----------------------------------------------------------------------


@pytest.fixture
def checked(tiny_config, tiny_model, tmp_path):
    """A configuration whose teachers are the tiny model, and a row of an agent."""

    def made(**fields):
        names = {"teachers": {"one": tiny_model, "two": tiny_model}, "default_teacher": "one"}
        names |= {"routes": {"math": "two"}}
        cfg = Config(**names | {k: v for k, v in fields.items() if k in names})
        small = tiny_config()
        same = {name: getattr(small, name) for name in ("model", "data", "sampling", "run_dir")}
        return changed(cfg, **same | {k: v for k, v in fields.items() if k not in names})

    return made


ROWS = [{"_line": 4, "agent_ref": {"name": "mathy"}, "dataset": "x"}]


def refusal(cfg, rows=ROWS) -> str:
    with pytest.raises(InputError) as caught:
        check_teachers.check_teachers(cfg, rows)
    return str(caught.value)


def test_good_teachers_pass(checked):
    check_teachers.check_teachers(checked(), ROWS)


def test_a_run_without_teachers_is_refused(checked):
    said = refusal(checked(teachers={}, routes={}, default_teacher=""))
    assert said == "error: teachers = {}: expected a name and a model, such as {'math': 'MODEL'}"


def test_a_missing_checkpoint_is_named_with_its_teacher(checked, tiny_model, tmp_path):
    said = refusal(checked(teachers={"one": tiny_model, "two": str(tmp_path / "none")}))
    assert said.startswith("error: teachers['two']: model = ") and "holds config.json" in said


def test_another_tokenizer_is_refused(checked, tiny_model, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(tiny_model, other)
    tokenizer = save_tokenizer(other)
    tokenizer.add_tokens(["<think>"])
    tokenizer.save_pretrained(other)
    said = refusal(checked(teachers={"one": tiny_model, "two": str(other)}))
    assert f"teachers['two'] = {str(other)!r}: its tokenizer differs from that of model" in said
    assert "'<think>' is None for the student, " in said


def test_another_end_of_sequence_is_refused(checked, tiny_model, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(tiny_model, other)
    tokenizer = save_tokenizer(other)
    tokenizer.eos_token = "<pad>"
    tokenizer.save_pretrained(other)
    said = refusal(checked(teachers={"one": tiny_model, "two": str(other)}))
    assert "eos_token_id is 1 for the student, 0 for this teacher" in said


def test_a_row_without_a_teacher_is_named_by_its_line(checked):
    cfg = checked(default_teacher="", routes={"math": "two", "code": "one"})
    said = refusal(cfg)
    expected = f"error: {cfg.data.train}:4: agent_ref.name = 'mathy' has no route, and "
    assert said == expected + "default_teacher is not set; routes has math"
