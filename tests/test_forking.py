"""The commands of forking.md and dpo.md: their diffs apply to a scratch copy, and it runs."""

import ast
import asyncio
import importlib.util
import itertools
import json
import math
import re
import shutil
import sys
from collections import defaultdict
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import make_config, save_tokenizer, write_rows
from test_algorithm import TablePolicy, make, sample

import envs
import grpo_async
from core import waits
from envs import check_rows, registry
from policy.sync.weight_sync import Sender
from rollout.answer_markup import FLAWS
from rollout.episode import Group, Sample, SampleInfo, Turn, stitch
from rollout.preference_rows import Tokens
from rollout.sampler import Sampler
from runtime.reporting.log import Log
from runtime.rollouts import dispatch
from runtime.rollouts.dispatch import Slot
from settings.config import Sampling, Timeouts
from support import forks
from support.actors import Actor
from support.configs import changed
from support.program import ROOT, Program, ran
from support.samples import asking

FORKING_PAGES = ("forking", "variants", "dpo", "mopd")
WORDS = "strawberry banana committee possessed mississippi"


@pytest.fixture(scope="module")
def fork(tmp_path_factory) -> Path:
    """A scratch copy of the repository with all forks in it, made by the documented commands."""
    folder = forks.copied(tmp_path_factory.mktemp("fork") / "repo")
    commands = forks.commands("forking", "dpo", "mopd")
    assert len(commands) == 11
    forks.run_in(folder, *commands)
    return folder


def load(fork: Path, name: str, monkeypatch) -> ModuleType:
    """A forked trainer as a module."""
    spec = importlib.util.spec_from_file_location(name, fork / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


def forked(name: str):
    """A fixture: the forked trainer of a name as a module."""
    return pytest.fixture(lambda fork, monkeypatch: load(fork, name, monkeypatch))


my_grpo = forked("my_grpo")  # OPO's advantages
dr_grpo = forked("dr_grpo")  # Dr. GRPO's advantages and divisor
dapo_refill = forked("dapo_refill")  # DAPO's dynamic sampling
ipo = forked("ipo")
topk_kl = forked("topk_kl")


@pytest.fixture
def count_letters(fork, monkeypatch):
    """The new environment, registered."""
    monkeypatch.setattr(envs, "__path__", [str(fork / "envs")])
    registry.served.cache_clear()
    yield registry.environment("count_letters")
    sys.modules.pop("envs.count_letters")
    registry.served.cache_clear()


def example_row() -> dict:
    """The row of count_letters that the guide shows."""
    return json.loads(blocks("json")[1])


def blocks(language: str) -> list[str]:
    """The guide's examples in a language."""
    guide = (ROOT / "docs/forking.md").read_text()
    return re.findall(rf"```{language}\n(.*?)```", guide, re.S)


@pytest.mark.parametrize(
    ("name", "most"),
    [
        ("opo", 45),
        ("dr_grpo", 40),
        ("dapo_refill", 40),
        ("difficulty_band", 50),
        ("ipo", 40),
        ("count_letters", 50),
        ("topk_kl", 80),
    ],
)
def test_diffs_are_short(name, most):
    lines = (ROOT / f"docs/forks/{name}.diff").read_text().splitlines()
    assert sum(line[0] in "+-" for line in lines[2:]) < most
    assert all(len(line) <= 101 for line in lines)


WHICH_CLASSES = """
import runpy, sys
import bare

def main():
    print(bare.Run.__module__, bare.Trainer.__module__, "grpo_async" in sys.modules)

bare.main = main
runpy.run_path("bare.py", run_name="__main__")
"""


@pytest.mark.slow
def test_a_bare_copy_runs_its_own_classes(fork, warm_python):
    """No line of the copy names the file: neither its classes nor its usage are grpo_async's."""
    shutil.copy(ROOT / "grpo_async.py", fork / "bare.py")
    done = ran(warm_python, "-c", WHICH_CLASSES, root=fork)
    assert done.stdout.split() == ["bare", "bare", "False"], done.stderr
    done = ran(warm_python, "bare.py", "--help", root=fork)
    assert done.stdout.startswith("usage: bare.py "), done.stderr


# --- a variant of DPO -----------------------------------------------------------------------------


def test_ipo_wants_a_gap_and_not_more(ipo):
    """At beta 0.05 of 10 nats a token: a loss of 0 there, of 100 at the reference and at 20."""
    cfg = changed(ipo.Config(), sft_weight=0.0)
    ids_T = np.arange(5, 8, dtype=np.int32)
    pair = ipo.Pair(Tokens(ids_T, 1), Tokens(ids_T, 1))
    for gap, expected in ((0.0, 100.0), (10.0, 0.0), (20.0, 100.0)):
        row = ipo.pack([ipo.Scored(0, pair, (-2 * gap, 0.0))], 2)  # summed over two tokens
        loss, stats = ipo.dpo_loss(torch.zeros(6), row, cfg)
        assert loss.item() == pytest.approx(expected / 2)
        assert stats["preference_loss"] == pytest.approx(expected)


# --- a variant of distillation --------------------------------------------------------------------


class Bigrams:
    """A network whose logits depend on the token before alone, with the fork's way to pick tokens.

    Each token before has a hidden state of its own, so the head is the table of logits.
    """

    reports = True
    temperature = 1.0

    def __init__(self, logits_VV: torch.Tensor, over):
        self.logits_VV = logits_VV
        self.over = over  # of PackedModel

    def before(self, row) -> torch.Tensor:
        """The token before each trained one [N]."""
        return row.tokens_T[row.mask_T.nonzero().squeeze(1) - 1]

    def picked_of(self, row, picks) -> tuple[torch.Tensor, torch.Tensor]:
        """Logprobs and ids [N, K] of picks, or of so many of the likeliest tokens."""
        h_NH = torch.eye(len(self.logits_VV))[self.before(row)]
        at_N = row.mask_T.nonzero().squeeze(1)
        return self.over(self, h_NH, self.logits_VV.T, at_N, picks)

    def logp(self, row) -> torch.Tensor:
        """Logprobs [T] of the row's trained tokens, 0 elsewhere."""
        logp_NV = self.logits_VV[self.before(row)].log_softmax(1)
        logp_N = logp_NV.gather(1, row.tokens_T[row.mask_T][:, None]).squeeze(1)
        return torch.zeros(len(row.tokens_T)).masked_scatter(row.mask_T, logp_N)

    @torch.no_grad()
    def logprobs(self, rows) -> list[torch.Tensor]:
        """As FSDPPolicy in the fork."""
        self.picked = [self.picked_of(row, row.top_k) for row in rows]
        return [self.logp(row) for row in rows]


@pytest.mark.parametrize("K", [3, 64])
def test_the_likeliest_tokens_and_the_rest_have_the_gradient_of_their_reverse_kl(
    topk_kl, fork, monkeypatch, K
):
    """From the teacher's picks to gradients, over 3 tokens of 5 and the rest, or over all 5.

    Weights are not 1. The second of three sequences is dropped, a token of the third is not
    trained, rewards count as well, and more tokens are planned than there are.
    """
    over = load(fork, "policy/fsdp", monkeypatch).PackedModel.over
    cfg = changed(topk_kl.Config(), prompts_per_step=1, group_size=2)
    cfg = changed(cfg, loss={"top_k": K, "distill": 0.75, "reward": 0.5})
    draw = torch.Generator().manual_seed(0)
    student = Bigrams(torch.randn(5, 5, generator=draw).requires_grad_(), over)
    teacher = Bigrams(torch.randn(5, 5, generator=draw), over)
    samples = []
    logp_VV = student.logits_VV.detach().log_softmax(1)
    for ids, gap in (([1, 2, 4], 0.3), ([3, 3], 3.0), ([2, 1, 4, 4, 0], -0.4)):
        engine = [float(logp_VV[a, b]) - gap for a, b in itertools.pairwise([0, *ids])]
        samples.append(sample(ids, engine, advantage=0.5 - gap))
    samples[2].mask_T[2] = False
    scoring = topk_kl.Teacher(cfg)
    scoring.networks = {"a": teacher}
    _, _, scored = scoring.score("a", [[], [(0, 0), (0, 1), (0, 2)]], samples)

    batch = topk_kl.pack(scored, topk_kl.Update(40, 1, []), cfg)
    batch.picked_logp_NK, _ = student.picked_of(batch, batch.picks_TK)
    loss, stats = topk_kl.distillation_loss(student.logp(batch), batch, cfg)
    assert stats["kept_tokens"] == 7 and stats["num_masked_seqs"] == 1

    p_VV = student.logits_VV.double().log_softmax(1)
    q_VV = teacher.logits_VV.double().log_softmax(1)
    expected = 0.0
    for one in (samples[0], samples[2]):
        for t in one.mask_T.nonzero()[0]:
            before, token = one.tokens_T[t - 1], one.tokens_T[t]
            p_V, q_V = p_VV[before], q_VV[before]
            weight = (p_V[token].detach() - one.engine_logp_T[t]).exp()
            picks = q_V.argsort(descending=True)[:K]
            p_K, q_K = p_V[picks].exp(), q_V[picks].exp()
            if K < 5:
                p_K = torch.cat([p_K, 1 - p_K.sum(0, keepdim=True)])
                q_K = torch.cat([q_K, 1 - q_K.sum(0, keepdim=True)])
            kl = (p_K * (p_K / q_K).log()).sum()
            expected += weight * (0.75 * kl - 0.5 * one.advantage * p_V[token]) / 40
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    (found_VV,) = torch.autograd.grad(loss, student.logits_VV, retain_graph=True)
    (slopes_VV,) = torch.autograd.grad(expected, student.logits_VV)
    torch.testing.assert_close(found_VV, slopes_VV, rtol=1e-4, atol=1e-6)


# --- a new estimator ------------------------------------------------------------------------------


def test_advantages_are_over_the_length_weighted_mean(my_grpo):
    """By hand: rewards 1, 0, 0, 1 at lengths 10, 30, 40, 20 have the baseline 30 / 100."""
    lengths_G = torch.tensor([10, 30, 40, 20])
    rule = my_grpo.Advantage()
    advantages_G = my_grpo.group_advantages(torch.tensor([1.0, 0, 0, 1]), lengths_G, rule)
    torch.testing.assert_close(advantages_G, torch.tensor([0.7, -0.3, -0.3, 0.7]))
    assert (advantages_G * lengths_G).sum().abs() < 1e-5


def test_a_group_that_agrees_has_no_advantage(my_grpo):
    generator = torch.Generator().manual_seed(0)
    rule = my_grpo.Advantage()
    for reward in (0.9, 1 / 3, 1e-3, 123.4):
        lengths_G = torch.randint(1, 65536, (16,), generator=generator)
        advantages_G = my_grpo.group_advantages(torch.full((16,), reward), lengths_G, rule)
        assert advantages_G.tolist() == [0.0] * 16
    assert my_grpo.group_advantages(torch.ones(1), torch.tensor([7]), rule).tolist() == [0.0]


def test_the_forks_rollouts_use_it_and_its_loss_is_the_policy_gradient(my_grpo, tmp_path):
    """From rewards to gradients: d loss / d logp = -A / T where trainer and engine agree."""
    save_tokenizer(tmp_path)
    cfg = my_grpo.Config(run_dir=str(tmp_path), model=str(tmp_path))
    worker = my_grpo.RolloutWorker(cfg)
    turns = [Turn([7, 8], [9] * n, [-0.5] * n, [0] * n, "stop") for n in (1, 3)]
    rewards = (envs.Reward(1.0), envs.Reward(0.0))
    episodes = [my_grpo.Episode([t], r) for t, r in zip(turns, rewards, strict=True)]
    samples = worker.finish(asking("?", _line=1), Slot(0), episodes).samples
    assert [s.advantage for s in samples] == [0.75, -0.25]

    batch = my_grpo.pack(samples, my_grpo.Update(4, 2, []), cfg)
    logp_T = torch.where(batch.mask_T, -0.5, 0.0).requires_grad_()
    loss, stats = my_grpo.policy_loss(logp_T, batch, cfg)
    loss.backward()
    expected_T = torch.tensor([0, 0, -0.75, 0, 0, 0.25, 0.25, 0.25]) / 4
    torch.testing.assert_close(logp_T.grad, expected_T)
    assert stats["kept_tokens"] == 4 and loss.item() == pytest.approx(0.0)


# --- a new divisor --------------------------------------------------------------------------------

REWARDS = [1.0, 0.0, 0.0, 1.0, 0.5]
ANSWERS = [[1, 2], [2, 3, 3], [1], [3, 1, 2, 2], [2, 2]]
TABLE = [0.0, -1.0, -1.5, -0.7]


@pytest.mark.parametrize("dropped", [False, True])
def test_dr_grpo_divides_by_a_constant_whatever_the_filter_drops(dr_grpo, dropped):
    """By hand: d loss / d logp(v) = -sum w A / (1 * 5 * 7), of the sequences that are kept."""
    cfg = changed(dr_grpo.Config(), prompts_per_step=1, group_size=5, max_response_tokens=7)
    advantages_G = dr_grpo.group_advantages(torch.tensor(REWARDS), cfg.advantage)
    torch.testing.assert_close(advantages_G, torch.tensor(REWARDS) - 0.5)
    samples = []
    expected_V = torch.zeros(4)
    for j, (ids, advantage) in enumerate(zip(ANSWERS, advantages_G.tolist(), strict=True)):
        gap = -3.0 if dropped and j == 1 else 0.2  # trainer - engine; exp(3) is above the limit, 2
        samples.append(sample(ids, [TABLE[v] - gap for v in ids], advantage))
        for v in ids if gap > 0 else []:
            expected_V[v] -= math.exp(gap) * advantage / (1 * 5 * 7)

    (share,) = dr_grpo.plan_step([dr_grpo.Group(0, 0, 1, [s.info() for s in samples], None)], cfg)
    trainer = dr_grpo.Trainer(cfg)
    trainer.policy = TablePolicy(TABLE)
    (update,) = share.updates
    rows = [[samples[j] for _, j in row] for row in update.rows]
    packed = [dr_grpo.PackedRow(of_row, dr_grpo.pack(of_row, update, cfg)) for of_row in rows]
    trainer.add_gradients(update, packed)
    metrics = trainer.optimizer_step()
    torch.testing.assert_close(trainer.policy.grads[0], expected_V)
    assert metrics["num_masked_seqs"] == dropped


def test_dr_grpo_has_no_advantage_where_a_group_agrees(dr_grpo):
    for reward in (0.9, 1 / 3, 1e-3, 123.4):
        rewards_G = torch.full((16,), reward)
        assert dr_grpo.group_advantages(rewards_G, dr_grpo.Advantage()).tolist() == [0.0] * 16


# --- another way to fill a batch ------------------------------------------------------------------


def info(reward: float, advantage: float = 0.0, trained: bool = True, flaw: int = 0) -> SampleInfo:
    """Of a sample of two tokens."""
    made = sample([1, 2], [-1.0, -1.0], advantage)
    made.reward = reward
    made.flaw_T[made.mask_T] = flaw
    made.mask_T &= trained
    return made.info()


AGREES = [info(1.0), info(1.0)]
DIFFERS = [info(1.0, 0.5), info(0.0, -0.5)]


class Filling:
    """A run of P = 2 on the prompts of lines 1 to 20; the lines `agreeing` have no gradient."""

    def __init__(self, module: ModuleType, agreeing: set[int], **fields):
        fields = {"prompts_per_step": 2, "group_size": 2, "steps": 2} | fields
        rows = [{"_line": line, "agent_ref": {"name": "any"}} for line in range(1, 21)]
        self.run = module.Run(changed(module.Config(), **fields), rows, [])
        self.agreeing = agreeing
        self.held: dict[int, asyncio.Event] = {}  # line -> when its answer may come
        self.trained: list[list[tuple[int, int, int]]] = []  # slot, line and version, by step
        self.metrics: list[dict] = []
        self.given_up: list[dict] = []

        async def nothing(*_):
            return {}

        async def train(step, groups):
            self.trained.append([(group.slot, group.line, group.version) for group in groups])
            return {}

        run = self.run
        run.train = train
        run.engines.sync = nothing
        run.checkpoints.save = nothing
        run.dispatcher.roll_out = self.roll_out
        run.log = SimpleNamespace(
            line=lambda _, content: self.given_up.append(content),
            step=lambda step, groups, stats: self.metrics.append(stats),
            show_ready=lambda ready: None,
        )

    async def roll_out(self, row: dict, slot: Slot, n: int, version: int) -> Group:
        """Answers a tick later, or when the test lets it."""
        await asyncio.sleep(0)
        if row["_line"] in self.held:
            await self.held[row["_line"]].wait()
        infos = AGREES if row["_line"] in self.agreeing else DIFFERS
        return Group(slot.number, version, row["_line"], infos, None)

    async def both_loops(self) -> None:
        """Generates and trains until the last step, or the first error."""
        async with asyncio.TaskGroup() as self.run.tasks:
            self.run.tasks.create_task(self.run.generate_forever())
            await self.run.train_forever()

    def lines(self) -> list[int]:
        """The lines that were trained or given up."""
        trained = [line for step in self.trained for _, line, _ in step]
        return sorted(trained + [int(entry["row"].split(":")[1]) for entry in self.given_up])


async def test_a_group_that_agrees_gives_way_to_the_next_prompt(dapo_refill):
    """By hand, lag 1: line 3 agrees at version 0, after step 1 its slot gets line 7 at version 1.

    Slots 0 to 3 have lines 1 to 4. Slot 1's line 2 gives way to 5, and that to 6.
    """
    filling = Filling(dapo_refill, {2, 3, 5}, max_lag=1)
    filling.held[3] = asyncio.Event()
    run = filling.run
    running = asyncio.create_task(filling.both_loops())
    await run.buffer.until(lambda: run.buffer.version == 1)
    assert run.progress.agreed == {} and run.progress.next_prompt == 6
    filling.held[3].set()
    await running
    assert filling.trained == [[(0, 1, 0), (1, 6, 0)], [(2, 7, 1), (3, 4, 0)]]
    assert [metrics["agreed_groups"] for metrics in filling.metrics] == [2, 1]
    assert run.progress == dapo_refill.Progress(4, 7, {}, {})
    assert filling.lines() == [1, 2, 3, 4, 5, 6, 7]
    place = {"slot": 1, "evaluation": None, "prompt": 1, "row": "data/tiny/train.jsonl:2"}
    why = {"reason": "agreed", "error": "no gradient, rewards [1.0]"}
    assert filling.given_up[0] == place | why
    assert not run.buffer.dropped, "an agreement is no failure"


@pytest.mark.parametrize("max_lag", [0, 1, 3])
def test_batches_are_full_whatever_agrees(dapo_refill, max_lag):
    """Every prompt up to the last one once, in slots of its step, within the lag."""
    filling = Filling(dapo_refill, {1, 2, 5, 7, 8, 10, 13}, max_lag=max_lag, steps=5)
    asyncio.run(filling.both_loops())
    slots = [[slot for slot, _, _ in step] for step in filling.trained]
    assert slots == [[2 * i, 2 * i + 1] for i in range(5)]
    for i, step in enumerate(filling.trained):
        assert all(0 <= i - version <= max_lag for _, _, version in step)
    assert filling.lines() == list(range(1, filling.run.progress.next_prompt + 1))
    assert sum(m["agreed_groups"] for m in filling.metrics) == len(filling.given_up)


async def test_a_resumed_run_goes_on_in_the_middle_of_a_chain_of_refills(dapo_refill):
    """Slot 1 waits for line 5 when the checkpoint is made; the run after it ends the same."""
    filling, resumed = (Filling(dapo_refill, {2, 3, 5}, max_lag=1) for _ in range(2))
    filling.held[5] = asyncio.Event()
    running = asyncio.create_task(filling.both_loops())
    await filling.run.buffer.until(lambda: len(filling.run.buffer.ready) == 3)
    state = json.loads(json.dumps(filling.run.state())) | {"evaluated": -1}
    progress = {"next_slot": 4, "next_prompt": 6, "in_flight": {"1": 4}}
    assert state["progress"] == progress | {"agreed": {"0": 1, "1": 1}}
    resumed.run.restore(state, list(filling.run.buffer.ready.values()))
    await resumed.both_loops()
    filling.held[5].set()
    await running
    assert filling.trained == [[(0, 1, 0), (1, 7, 0)], [(2, 6, 0), (3, 4, 0)]]
    assert resumed.trained == filling.trained
    for of_run in (filling, resumed):
        assert [metrics["agreed_groups"] for metrics in of_run.metrics] == [2, 1]
    assert [entry["prompt"] for entry in filling.given_up] == [1, 2, 4]
    assert [entry["prompt"] for entry in resumed.given_up] == [4]


@pytest.mark.parametrize("agreeing", [4, 5])
def test_a_step_gives_up_no_more_groups_than_it_may(dapo_refill, agreeing):
    """Three times P = 2 groups may be generated: two are trained, four may agree."""
    filling = Filling(dapo_refill, set(range(1, agreeing + 1)), max_gen_batches=3, steps=1)
    if agreeing == 4:
        asyncio.run(filling.both_loops())
        assert filling.lines() == [1, 2, 3, 4, 5, 6]
        return
    with pytest.raises(ExceptionGroup) as errors:
        asyncio.run(filling.both_loops())
    (error,) = errors.value.exceptions[0].exceptions
    assert str(error) == (
        "5 groups of step 1 have no gradient, max_gen_batches = 3 are used up; "
        "the last: no gradient, rewards [1.0]"
    )


def test_a_run_whose_groups_all_agree_ends(dapo_refill):
    filling = Filling(dapo_refill, set(range(1, 21)))
    with pytest.raises(ExceptionGroup) as errors:
        asyncio.run(filling.both_loops())
    assert "19 groups of step" in str(errors.value.exceptions[0].exceptions)


@pytest.mark.parametrize(("infos", "refilled"), [
    (DIFFERS, False),
    (AGREES, True),
    ([info(1.0), info(1.0, flaw=1)], False),  # a penalty has a gradient
    ([info(1.0, 0.5, trained=False), info(0.0, 0.0)], True),  # overlong filtering masked it
])  # fmt: skip
def test_what_counts_is_a_gradient(dapo_refill, monkeypatch, infos, refilled):
    filling = Filling(dapo_refill, {1}, steps=1)
    monkeypatch.setattr(sys.modules[__name__], "AGREES", infos)
    asyncio.run(filling.both_loops())
    assert bool(filling.given_up) == refilled


async def test_failures_in_a_row_are_counted_between_answers(dapo_refill):
    """Fails, agrees, fails, agrees: an answer that agrees is an answer."""
    filling = Filling(dapo_refill, {2, 4, 6}, steps=1)
    run = filling.run
    run.MAX_DROPPED = 1
    run.log.drop = lambda *_: None

    async def roll_out(row, *place):
        if row["_line"] in (1, 3, 5):
            raise ValueError("the judge is down")
        return await filling.roll_out(row, *place)

    run.dispatcher.roll_out = roll_out
    run.buffer.start(0)
    run.assign(0)
    await run.fill(0)
    assert run.buffer.ready[0].line == 7 and run.buffer.dropped == {"ValueError": 3}


def test_a_chain_of_refills_has_time(dapo_refill, monkeypatch):
    """Nine prompts of 0.02 s, where a prompt and the next have 0.1 s; a step that hangs ends."""
    monkeypatch.setattr(waits, "ANSWER_SECONDS", 0.01)
    monkeypatch.setattr(dispatch, "ATTEMPTS", 1)
    times = {"timeouts": {"rollout": 0.04}, "steps": 1}
    filling = Filling(dapo_refill, set(range(3, 11)), **times)
    prompt = filling.roll_out

    async def roll_out(*place):
        await asyncio.sleep(0.02)
        return await prompt(*place)

    filling.run.dispatcher.roll_out = roll_out
    filling.agreeing.add(2)
    asyncio.run(filling.both_loops())
    assert len(filling.given_up) == 9

    hangs = Filling(dapo_refill, set(), max_gen_batches=2, **times)
    with pytest.raises(TimeoutError, match=r"waited 0 s for the groups of step 1\. version 0"):
        asyncio.run(hangs.run.take(0))


# --- published variants ---------------------------------------------------------------------------

PAGE = (ROOT / "docs/variants.md").read_text()
TABLE_ROWS = re.findall(r"^\| (?!variant|---)(.*)", PAGE, re.M)
DIFF = re.compile(r"^### ([^\n]*)\n([^#]*?)\n\[(\w+)\.diff\]\(forks/\3\.diff\)$", re.M | re.S)
DIFFS = {title: (text, name) for title, text, name in DIFF.findall(PAGE)}
GUIDED = ("my_grpo", "dr_grpo", "dapo_refill")  # of forking.md


def settings_in(text: str) -> dict:
    """What `group.field = value` in backticks sets, for `changed`."""
    found = defaultdict(dict)
    for group, name, value in re.findall(r"`(\w+)\.(\w+) = ([^`]+)`", text):
        found[group][name] = ast.literal_eval(value.replace('float("inf")', "1e999"))
    return dict(found)


@pytest.fixture
def variant(tmp_path, monkeypatch):
    """A function that makes the trainer with a diff of the page, and its settings."""
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))

    def make_variant(title: str):
        text, name = DIFFS[title]
        shutil.copy(ROOT / "grpo_async.py", tmp_path / f"{name}.py")
        done = ran("git", "apply", ROOT / f"docs/forks/{name}.diff", root=tmp_path)
        assert done.returncode == 0, done.stderr
        module = load(tmp_path, name, monkeypatch)
        return module, changed(module.Config(), **settings_in(text))

    return make_variant


# Lengths and advantages of sequences.
SEQUENCES = ((20, 0.7), (15, -1.1), (2, 0.4), (9, -0.6), (32, 0.9), (3, -0.8), (4, 0.5), (6, 0.0))
SEQUENCES += ((12, 1.3),)


def check_gradient(module: ModuleType, cfg, old: bool, formula) -> None:
    """By nine sequences' logprobs: that of `policy_loss` is that of the losses of their tokens.

    Two sequences are near those that they are compared with, two tokens of one are far off, and the
    last one is dropped if the filter is on. Every third token of one is not trained, one has no
    advantage, and more tokens and sequences are planned than there are.
    """
    assert (cfg.loss.updates_per_batch > 1) == old
    random = torch.Generator().manual_seed(3)
    sequences = []
    for n, advantage in SEQUENCES:
        curr_T = -torch.rand(n, generator=random) - 0.5
        far_T = torch.zeros(n)
        if n == 32:
            far_T[:2] = torch.tensor([2.3, -1.0])
        gap = 5e-4 if n in (3, 4) else 0.3
        near = [curr_T - far_T + gap * torch.randn(n, generator=random) for _ in range(3)]
        made = {"curr": curr_T, "gen": near[0], "ref": near[1]} | ({"old": near[2]} if old else {})
        if n == 12:
            made["gen"] = made["gen"] - 3
        of_row = {k: v.tolist() for k, v in made.items()} | {"A": [advantage] * n}
        sequences.append(of_row | {"mask": [float(n != 9 or t % 3 > 0) for t in range(n)]})
    logp_T, batch = make(*sequences, tokens=200, count=17)
    loss, stats = module.policy_loss(logp_T, batch, cfg)
    (ours_T,) = torch.autograd.grad(loss, logp_T)
    total = 0.0
    dropped = 0
    for i in range(len(sequences)):
        at_T = (batch.seq_T == i) & batch.mask_T
        s = SimpleNamespace(curr=logp_T[at_T], gen=batch.engine_logp_T[at_T])
        s.ref, s.A = batch.ref_logp_T[at_T], batch.advantage_T[at_T]
        s.old = batch.old_logp_T[at_T] if old else s.curr.detach()
        if is_dropped(s, cfg):
            dropped += 1
        else:
            total += reduced(formula, s, cfg)
    assert stats["num_masked_seqs"] == dropped
    assert dropped == (cfg.correction.sequence_error_limit == 2)
    by_token = cfg.loss.reduction == "token"
    (theirs_T,) = torch.autograd.grad(total / (200 if by_token else 17), logp_T)
    moved = torch.unique(batch.seq_T[theirs_T != 0])
    assert len(moved) >= 2, "nothing compared"
    torch.testing.assert_close(ours_T, theirs_T, rtol=1e-4, atol=1e-7)


def is_dropped(s, cfg) -> bool:
    """Whether the filter drops a sequence."""
    error = (s.old - s.gen).abs().exp().mean()
    return bool(error > cfg.correction.sequence_error_limit)


def reduced(formula, s, cfg) -> torch.Tensor:
    """The loss of a sequence's tokens, summed or averaged; `s.w` is w of each token."""
    rule = cfg.correction
    s.w = (s.old - s.gen).exp()
    if rule.action == "truncate":
        s.w = s.w.clamp(rule.low, rule.high)
    else:
        s.w = torch.where((rule.low <= s.w) & (s.w <= rule.high), s.w, 0.0)
    loss_T = formula(s)
    assert loss_T.shape == s.curr.shape
    return loss_T.sum() if cfg.loss.reduction == "token" else loss_T.mean()


def clipped(s, low: float, high: float) -> torch.Tensor:
    """PPO's objective of each token, to be minimised."""
    rho_T = (s.curr - s.old).exp()
    return -torch.minimum(rho_T * s.A, rho_T.clamp(1 - low, 1 + high) * s.A)


def ratio(s) -> torch.Tensor:
    """w of each token, before the correction."""
    return (s.old - s.gen).exp()


def grpo(s):
    x_T = s.ref - s.curr
    k3_T = (s.curr.detach() - s.gen).exp() * (x_T.exp() - 1 - x_T)
    return ratio(s).clamp(max=5) * -s.A * s.curr + 0.04 * k3_T


def sequence_mask(s):
    inside = 0.999 <= (s.old - s.gen).mean().exp() <= 1.002
    return inside * ratio(s) * -s.A * s.curr


def icepop(s):
    w_T = ratio(s)
    return torch.where((w_T >= 0.5) & (w_T <= 5), w_T, 0.0) * -s.A * s.curr


def usual(s):
    """The loss of grpo_async.py, which variants of advantages and batches keep."""
    return s.w * clipped(s, 0.2, 0.28)


def gspo(s):
    ratio = (s.curr - s.old).mean().exp()
    A = s.A[0]
    return s.w * -torch.minimum(ratio * A, ratio.clamp(1 - 3e-4, 1 + 4e-4) * A)


def cispo(s):
    return s.w * -(s.curr - s.old).exp().clamp(0, 5).detach() * s.A * s.curr


def dual_clip(s):
    low_T = clipped(s, 0.2, 0.28)
    return s.w * torch.where(s.A < 0, torch.minimum(low_T, -3 * s.A), low_T)


def gmpo(s):
    """The paper's algorithm 1."""
    sign_T = s.A.sign()
    diff_T = sign_T * (s.curr - s.old)
    least_T = sign_T * torch.minimum(diff_T, diff_T.clamp(-0.4, 0.4))
    return s.w * -s.A[0] * least_T.mean().exp()


def sapo(s):
    tau = 1.0 if s.A[0] > 0 else 1.05
    gate_T = 4 / tau / (1 + (-tau * ((s.curr - s.old).exp() - 1)).exp())
    return s.w * -gate_T * s.A


def bonus(s):
    """rho sg(log pi) log pi, which has the gradient of -entropy."""
    entropy_T = ((s.curr - s.old).exp() * s.curr).detach() * s.curr
    return s.w * (clipped(s, 0.2, 0.28) + 0.01 * entropy_T)


def topr(s):
    weight = 1.0 if s.A[0] >= 0 else min(1.0, math.prod((s.old - s.gen).exp().tolist()))
    return -weight * s.A * s.curr


def kl_in_reward(s):
    return s.w * -(s.A - 0.01 * (s.old - s.ref).sum()) * s.curr


# By the start of their row or title: whether there are old logprobs, and the loss of each token.
ROWS = {
    "GRPO": (False, grpo),
    "TIS": (False, lambda s: ratio(s).clamp(max=2) * -s.A * s.curr),
    "IcePop": (False, icepop),
    "sequence-mask TIS": (False, sequence_mask),
    "decoupled PPO": (True, lambda s: ratio(s) * clipped(s, 0.2, 0.2)),
    "CISPO against the engine": (
        False,
        lambda s: (s.curr - s.gen).exp().clamp(max=5).detach() * -s.A * s.curr,
    ),
    "DAPO, [2503": (True, lambda s: ratio(s).clamp(max=5) * clipped(s, 0.2, 0.28)),
}
LOSSES = {
    "GSPO": (True, gspo),
    "CISPO": (True, cispo),
    "Dual clip": (True, dual_clip),
    "GMPO": (True, gmpo),
    "SAPO": (True, sapo),
    "TOPR": (False, topr),
    "Entropy bonus": (True, bonus),
    "KL in the reward": (False, kl_in_reward),
}
CORRECTIONS = (
    {"low": 1.0, "high": 1.0, "sequence_error_limit": math.inf},
    {"low": 0.8, "high": 1.1, "sequence_error_limit": 2.0},
    {"action": "mask", "low": 0.8, "high": 1.1, "sequence_error_limit": 2.0},
)
OTHERS = {"DAPO's soft overlong punishment", "MaxRL", "Pass@k training"}
OTHERS |= {"REINFORCE++ with baseline", "The best half of a batch", "Prompts of some difficulty"}


def test_all_variants_of_the_page_are_tested():
    assert set(DIFFS) == set(LOSSES) | OTHERS
    told = {name for _, name in DIFFS.values()} | {"opo", "dr_grpo", "dapo_refill", "topk_kl"}
    assert told | {"ipo", "count_letters"} == {p.stem for p in (ROOT / "docs/forks").iterdir()}
    with_settings = [row for row in TABLE_ROWS if "`" in row]
    assert len(with_settings) == len(ROWS) + 1, "those and RLOO"
    assert all(settings_in(row) for row in with_settings)


@pytest.mark.parametrize("start", ROWS)
def test_settings_of_a_variant_give_its_gradient(start):
    (row,) = [row for row in TABLE_ROWS if row.startswith(start)]
    cfg = changed(grpo_async.Config(), **settings_in(row))
    check_gradient(grpo_async, cfg, *ROWS[start])


@pytest.mark.parametrize("title", LOSSES)
def test_lines_of_a_variant_give_its_gradient(variant, title):
    module, cfg = variant(title)
    if title == "Entropy bonus":  # its page has one update, where rho is 1
        cfg = changed(cfg, updates_per_batch=4)
    for correction in CORRECTIONS:
        check_gradient(module, changed(cfg, **correction), *LOSSES[title])


def one_step(module: ModuleType, cfg, groups: list) -> TablePolicy:
    """The policy after a step as the driver trains it, on one rank."""
    trainer = module.Trainer(cfg)
    trainer.policy = TablePolicy(TABLE)
    trainer.reference = TablePolicy([-1.0] * len(TABLE)) if cfg.has_reference else None
    trainer.sender = Sender(trainer.policy, Timeouts(), False)
    run = module.Run(cfg, [{}], [])
    run.cluster.trainers = [Actor(train_step=lambda *a: tuple(trainer.train_step(*a)))]
    run.log = SimpleNamespace(mismatch=lambda *_: None)
    run.buffer.next_step = 1  # all groups of the first step are taken
    asyncio.run(run.train(0, groups))
    return trainer.policy


@pytest.mark.parametrize("title", DIFFS)
def test_a_variant_trains_a_step(variant, title):
    """From rewards to gradients of one or two updates: those of the formula, over what is kept.

    Groups are of unlike sizes, and the rewards of one agree. The first episode of each has two
    sequences. The filter drops two sequences.
    """
    module, cfg = variant(title)
    updates = 2 if cfg.loss.updates_per_batch > 1 else 1
    cfg = changed(cfg, prompts_per_step=4, group_size=5, low=0.8, high=1.2)
    cfg = changed(cfg, updates_per_batch=updates, sequence_error_limit=2.0)
    groups = []
    gaps = []
    for slot in range(4):
        rewards_G = torch.tensor([1.0, 0, 0, slot / 4, 0]) * (slot != 2)
        gaps.append(rewards_G - rewards_G.mean())
        advantages_G = module.group_advantages(rewards_G, cfg.advantage)
        made = []
        for j, answer in enumerate([*ANSWERS, [2, 3]]):
            ids = answer * (1 + slot)
            wrong = (0.3, -0.4)[j % 2]  # nats by which the engine is off
            if (slot, j) in ((1, 5), (3, 0)):
                wrong = -2.0
            made.append(sample(ids, [TABLE[v] + wrong for v in ids], float(advantages_G[j % 5])))
            made[-1].reward = float(rewards_G[j % 5])
            made[-1].continues = j == 5
        groups.append(module.Group(slot, 0, 1, [s.info() for s in made], made))
    spread = float(torch.cat(gaps).std(correction=0)) if title.startswith("REINFORCE") else 1.0
    advantages = {id(s): s.advantage / spread for group in groups for s in group.samples}
    grads = one_step(module, cfg, groups).grads

    formula = LOSSES.get(title, (False, usual))[1]
    before_V = torch.tensor(TABLE)
    table_V = before_V.clone().requires_grad_()
    assert len(grads) == updates
    for u, grad_V in enumerate(grads):
        total = torch.zeros(())
        tokens = sequences = 0
        for group in groups[u * 4 // updates : (u + 1) * 4 // updates]:
            for one in group.samples:
                ids_T = torch.from_numpy(one.tokens_T[one.mask_T]).long()
                s = SimpleNamespace(curr=table_V[ids_T], old=before_V[ids_T])
                s.gen = torch.from_numpy(one.engine_logp_T[one.mask_T])
                s.ref = torch.full_like(s.gen, -1.0)
                s.A = torch.full_like(s.gen, advantages[id(one)])
                if not is_dropped(s, cfg):
                    tokens += len(ids_T)
                    sequences += 1
                    total = total + reduced(formula, s, cfg)
        kept = tokens if cfg.loss.reduction == "token" else sequences
        (expected_V,) = torch.autograd.grad(total / kept, table_V)
        assert expected_V.any()
        torch.testing.assert_close(grad_V, expected_V, rtol=1e-4, atol=1e-6)
        table_V = (table_V - expected_V).detach().requires_grad_()


def two_sequences(module: ModuleType, reward: float, tokens: int = 1):
    """An episode whose second prompt does not hold the first answer."""
    ids = [9] * tokens
    turns = [Turn([5], [8], [-0.5], [0], "stop"), Turn([6], ids, [-0.5] * tokens, [0] * tokens, "")]
    return module.Episode(turns, envs.Reward(reward))


@pytest.mark.parametrize("title", [*DIFFS, *GUIDED])
def test_validation_may_have_any_number_of_answers(variant, fork, title, monkeypatch, tmp_path):
    """1 to 4 answers of two sequences each, with rewards below zero, in each fork."""
    save_tokenizer(tmp_path)
    module = variant(title)[0] if title in DIFFS else load(fork, title, monkeypatch)
    worker = module.RolloutWorker(module.Config(run_dir=str(tmp_path), model=str(tmp_path)))
    lowest = 0.0 if title == "MaxRL" else -1.0  # it refuses others
    for n in range(1, 5):
        rewards = [lowest, 0.5, 1.0, 0.25][:n]
        episodes = [two_sequences(module, reward) for reward in rewards]
        made = worker.finish(asking("?", _line=1), Slot(0, evaluation=7), episodes)
        assert [info.reward for info in made.infos if not info.continues] == rewards
        assert np.isfinite([s.advantage for s in made.samples]).all()
        assert len(made.samples) == 2 * n and len(made.lines.splitlines()) == n


def test_the_bonus_has_the_gradient_of_entropy(variant):
    """Each of five tokens once, drawn evenly, so that its weight is 5 pi."""
    module, cfg = variant("Entropy bonus")
    with pytest.raises(ValueError, match="entropy needs loss.skip_zero_advantage = False"):
        changed(cfg, skip_zero_advantage=True)
    cfg = changed(cfg, high=math.inf, sequence_error_limit=math.inf)
    logits_V = torch.tensor([0.3, -0.2, 0.9, 0.1, -0.7], requires_grad=True)
    logp_V = logits_V.log_softmax(0)
    even = math.log(1 / 5)
    parts = [{"curr": [x], "gen": [even], "A": [0.0]} for x in logp_V.tolist()]
    leaf_T, batch = make(*parts)
    (d_T,) = torch.autograd.grad(module.policy_loss(leaf_T, batch, cfg).loss, leaf_T)
    (ours_V,) = torch.autograd.grad(logp_V @ d_T[batch.mask_T], logits_V, retain_graph=True)
    entropy = -(logp_V.exp() * logp_V).sum()
    (expected_V,) = torch.autograd.grad(-cfg.loss.entropy_coef * entropy, logits_V)
    torch.testing.assert_close(ours_V, expected_V)


async def test_the_half_whose_rewards_differ_most_is_trained(variant):
    """Of slots 0 to 3 those of the lines 2 and 4; of slots 4 to 7, that all agree, the first.

    Line 3's rewards differ less than those of line 2, where one episode has three sequences.
    """
    module, _ = variant("The best half of a batch")
    tail = info(1.0)
    tail.continues = True
    of_line = {2: [info(1.0), tail, tail, info(0.0)], 3: [info(0.9), info(0.0)], 4: DIFFERS}
    filling = Filling(module, set(), prompts_per_step=4)

    async def roll_out(row, slot, n, version):
        infos = of_line.get(row["_line"], AGREES)
        return Group(slot.number, version, row["_line"], infos, None)

    filling.run.dispatcher.roll_out = roll_out
    await filling.both_loops()
    assert [[slot for slot, _, _ in step] for step in filling.trained] == [[1, 3], [4, 5]]


def test_a_step_of_other_slots_is_refused_where_it_is_logged(tmp_path):
    """Else rollouts.jsonl, console and report would show its groups under other steps."""
    log = Log()
    log.cfg = changed(grpo_async.Config(), prompts_per_step=2)
    of_slot = [SimpleNamespace(slot=slot, infos=DIFFERS) for slot in range(6)]
    for step, groups in ((1, of_slot[:4]), (2, of_slot[:2]), (1, of_slot[2:4])):
        with pytest.raises(
            RuntimeError, match=f"step {step} trains slots that Slot.record assigns to"
        ):
            log.step(step, groups, {})


def test_dual_clip_bounds_the_loss_of_a_bad_answer(variant):
    """The known answer of A = 1, -1, -4 and ratios 0.5, 1, 10: the last term is 12, not 40."""
    module, cfg = variant("Dual clip")
    cfg = changed(cfg, low=1.0, high=1.0, sequence_error_limit=math.inf)
    old = [-1.0, -1.0, -3.0]
    curr = [-1.69315, -1.0, -0.69741]
    logp_T, batch = make({"curr": curr, "old": old, "gen": old, "ref": old, "A": [1.0, -1.0, -4.0]})
    assert module.policy_loss(logp_T, batch, cfg).loss.item() == pytest.approx(4.166667, abs=1e-5)


def test_rloo_and_grpo_have_their_advantages():
    rewards_G = torch.tensor([1.0, 0.0, 0.0, 1.0])
    for start, expected in (("RLOO", 2 / 3), ("GRPO", 0.5 / (math.sqrt(1 / 3) + 1e-6))):
        (row,) = [row for row in TABLE_ROWS if row.startswith(start)]
        rule = changed(grpo_async.Config(), **settings_in(row)).advantage
        advantages_G = grpo_async.group_advantages(rewards_G, rule)
        torch.testing.assert_close(advantages_G, expected * torch.tensor([1.0, -1, -1, 1]))


@pytest.mark.parametrize(("limit", "share", "penalties"), [
    (20480, 0.2, {10: 0, 16384: 0, 18432: -0.5, 20480: -1, 30000: -1}),  # as in the paper
    (100, 0.5, {50: 0, 60: -0.2, 100: -1}),
])  # fmt: skip
def test_the_last_tokens_below_the_limit_cost_up_to_one(variant, tmp_path, limit, share, penalties):
    """The last answer of an episode counts."""
    module, cfg = variant("DAPO's soft overlong punishment")
    save_tokenizer(tmp_path)
    cfg = changed(cfg, run_dir=str(tmp_path), model=str(tmp_path))
    cfg = changed(cfg, max_response_tokens=limit, overlong_share=share)
    episodes = [two_sequences(module, 0.25, tokens) for tokens in penalties]
    infos = module.RolloutWorker(cfg).finish(asking("?", _line=1), Slot(0), episodes).infos
    found = [info.reward - 0.25 for info in infos if info.continues]
    assert found == pytest.approx([*penalties.values()], abs=1e-6)


def test_rewards_that_a_kl_is_subtracted_from_are_not_divided(variant):
    """So beta is the same in each group: r_i - mean_{j != i} r_j."""
    module, cfg = variant("KL in the reward")
    advantages_G = module.group_advantages(torch.tensor([3.0, 0.0, 1.5]), cfg.advantage)
    assert advantages_G.tolist() == [2.25, -2.25, 0.0]


def test_maxrl_divides_by_the_mean(variant):
    module, cfg = variant("MaxRL")
    advantages = partial(module.group_advantages, rule=cfg.advantage)
    assert advantages(torch.tensor([1.0, 0, 0, 0])).tolist() == [3, -1, -1, -1]
    assert advantages(torch.zeros(5)).tolist() == advantages(torch.ones(5)).tolist() == [0] * 5
    with pytest.raises(ValueError, match=r"MaxRL needs rewards of 0 or more, got \[-1.0, 1.0\]"):
        advantages(torch.tensor([-1.0, 1.0]))


def test_a_group_of_pass_at_k_holds_several_sets(variant):
    """A set as large as the group has one reward, from which no sample differs."""
    module, cfg = variant("Pass@k training")
    with pytest.raises(ValueError, match="group_size is below 5, one more than a set"):
        changed(cfg, group_size=4)


@pytest.mark.parametrize("right", range(9))
def test_pass_at_k_is_the_mean_over_all_sets(variant, right):
    """Each set of 4 of the 8 samples has the reward of its best."""
    module, cfg = variant("Pass@k training")
    rewards = [1.0] * right + [0.0] * (8 - right)
    sets = list(itertools.combinations(range(8), 4))
    best = torch.tensor([max(rewards[i] for i in chosen) for chosen in sets])
    std = float(best.std(correction=0))
    of_set = (best - best.mean()) / std if std else torch.zeros(len(sets))
    expected = [float(of_set[[i in chosen for chosen in sets]].mean()) for i in range(8)]
    advantages_G = module.group_advantages(torch.tensor(rewards), cfg.advantage)
    torch.testing.assert_close(advantages_G, torch.tensor(expected), atol=1e-5, rtol=1e-5)
    if not std:
        assert advantages_G.tolist() == [0.0] * 8


def test_reinforce_plus_plus_divides_by_the_std_of_the_batch(variant):
    """By hand: r - mean r is 1/2, -1/2; 0, 0; 1/4, -1/4, of variance 0.625 / 6.

    The first episode has three sequences. The last answer is flawed: its penalty is its advantage
    as it is.
    """
    module, cfg = variant("REINFORCE++ with baseline")
    cfg = changed(cfg, prompts_per_step=3, group_size=2, penalties={"tool_call": -5.0})
    groups = []
    expected_V = torch.zeros(4)
    for slot, rewards in enumerate(((1.0, 0.0), (1.0, 1.0), (0.5, 0.0))):
        advantages_G = module.group_advantages(torch.tensor(rewards), cfg.advantage)
        of_group = []
        pieces = [0, 0, 0, 1] if slot == 0 else [0, 1]
        for n, j in enumerate(pieces):
            ids, advantage, reward = ANSWERS[j], float(advantages_G[j]), rewards[j]
            of_group.append(sample(ids, [TABLE[v] for v in ids], advantage))
            of_group[-1].reward = reward
            of_group[-1].continues = n > 0 and pieces[n - 1] == j
            scaled = advantage / math.sqrt(0.625 / 6)
            if (slot, reward) == (2, 0.0):
                of_group[-1].flaw_T[of_group[-1].mask_T] = FLAWS.index("tool_call")
                scaled = -5.0
            for v in ids:
                expected_V[v] -= scaled / (3 * (2 + 3) + 2 * 2)
        groups.append(module.Group(slot, 0, 1, [s.info() for s in of_group], of_group))
    torch.testing.assert_close(one_step(module, cfg, groups).grads[0], expected_V)


# --- a new environment ----------------------------------------------------------------------------


def test_the_environment_is_registered_and_checks_its_rows(count_letters):
    row = example_row()
    check_rows.check_row(row)
    for field, value in (("word", 3), ("letter", "rr"), ("letter", None)):
        with pytest.raises(ValueError, match=field):
            check_rows.check_row(row | {field: value})


@pytest.mark.parametrize(("response", "reward"), [
    ("3", 1.0),
    ("2, no: 3.", 1.0),
    ("<think>2 or 4</think>3", 1.0),
    ("3 or 2", 0.0),
    ("three", 0.0),
    ("", 0.0),
    ("9" * 5000, 0.0),
])  # fmt: skip
def test_the_environment_verifies(count_letters, response, reward):
    assert asyncio.run(registry.verify(example_row(), response)).value == reward


class ScriptedEngine:
    """An engine with given answers; each call must continue what was said before."""

    def __init__(self, tokenizer, *answers):
        self.tokenizer = tokenizer
        self.answers = list(answers)
        self.generate = SimpleNamespace(remote=self.answer)

    async def answer(self, request):
        """One Turn for each call."""
        text, reason = self.answers.pop(0)
        ids = self.tokenizer.encode(text) + [1] * (reason == "stop")
        return [Turn(request.prompt_ids, ids, [-1.0] * len(ids), [0] * len(ids), reason)]


@pytest.mark.parametrize(("answers", "reward", "turns"), [
    ([("3", "stop")], 1.0, 1),
    ([("2", "stop"), ("3", "stop")], 0.5, 2),
    ([("2", "stop"), ("4", "stop")], 0.0, 2),
    ([("2", "length")], 0.0, 1),
])  # fmt: skip
def test_the_environment_gives_a_second_try(count_letters, tokenizer, answers, reward, turns):
    """Both turns are one sample, the hint masked out: no id is tokenised again."""
    engine = ScriptedEngine(tokenizer, *answers)
    sampler = Sampler(engine, tokenizer, Sampling(max_model_len=512), 0, [], False)
    episode = asyncio.run(count_letters.rollout(example_row(), sampler))
    assert episode.reward.value == reward and len(episode.turns) == turns
    (joined,) = stitch(episode.turns)
    assert isinstance(joined, Sample)
    trained = tokenizer.decode(joined.tokens_T[joined.mask_T], skip_special_tokens=True)
    assert trained == "".join(text for text, _ in answers)
    whole = tokenizer.decode(joined.tokens_T)
    assert ("Count again" in whole) == (turns == 2)


def test_the_environment_of_one_turn_works_as_it_stands_in_the_guide(tmp_path, monkeypatch):
    (code,) = [block for block in blocks("python") if "AGENTS" in block]
    (tmp_path / "vowels.py").write_text(code)
    monkeypatch.setattr(envs, "__path__", [*envs.__path__, str(tmp_path)])
    monkeypatch.setattr(registry, "served", lambda: {"vowels": "vowels"})
    row = json.loads(blocks("json")[0])
    check_rows.check_row(row)
    assert asyncio.run(registry.verify(row, "abc")).value == pytest.approx(1 / 3)
    assert asyncio.run(registry.verify(row, "<think>hm</think>")).value == 0
    sys.modules.pop("envs.vowels")


# --- together, through the command line -----------------------------------------------------------


def launched(fork: Path, name: str, base, val_samples: int, lowest: float = -1.0) -> Program:
    """A fork after three steps with `launch/local.sh`, validated at its start and its end.

    Episodes of the validation rows have two sequences, and rewards from `lowest` on.
    """
    val = Path(base.run_dir).with_name("val.jsonl")
    data = {"val": write_rows(val, forks.forgetful_rows(2, lowest=lowest))}
    cfg = changed(base, data=data | {"val_samples": val_samples}, steps=3, val_period=3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRPO_PROGRAM", f"{name}.py")
        program = Program(cfg, script="launch/local.sh", root=fork)
    program.succeeds()
    steps = program.steps()
    assert [m["step"] for m in steps] == [1, 2, 3]
    assert all(np.isfinite(m["loss"]) and np.isfinite(m["grad_norm"]) for m in steps)
    assert max(m["grad_norm"] for m in steps) > 0
    lines = program.lines("rollouts.jsonl")
    assert sum(line["evaluation"] is not None for line in lines) == 2 * 2 * val_samples
    assert all(len(line["response"]) == 2 for line in lines if line["env"] == "forgetful")
    assert any(line["reward"] < 0 for line in lines) == (lowest < 0)
    return program


@pytest.mark.e2e
def test_a_forked_trainer_trains_on_the_new_environment(fork, tiny_model, tmp_path, monkeypatch):
    """OPO's advantages, with DAPO's refilling and GSPO's ratio on top, of two environments.

    Advantages add up to zero over the tokens of each group, and no trained group agrees.
    """
    shutil.copy(fork / "my_grpo.py", fork / "both.py")
    diffs = ("dapo_refill", "gspo")
    forks.run_in(fork, *(f"patch both.py docs/forks/{name}.diff" for name in diffs))
    rows = []
    for word in WORDS.split():
        for letter in sorted(set(word)):
            asked = asking(f"How many {letter} are in {word}?", word=word, letter=letter)
            rows.append(asked | {"agent_ref": example_row()["agent_ref"]})
    pairs = zip(rows, forks.forgetful_rows(len(rows)), strict=True)
    base = make_config(tiny_model, tmp_path, load(fork, "both", monkeypatch).Config)
    data = {"train": write_rows(tmp_path / "mixed.jsonl", itertools.chain(*pairs))}
    sizes = {"max_model_len": 192, "max_response_tokens": 24, "row_tokens": 192}
    of_gspo = {"reduction": "sequence", "ratio_clip": (3e-4, 4e-4), "updates_per_batch": 2}
    base = changed(base, data=data, max_gen_batches=20, **sizes, **of_gspo)
    program = launched(fork, "both", base, val_samples=3)
    steps = program.steps()
    assert abs(steps[0]["token_mult_prob_error"] - 1) < 1e-5
    assert [m["zero_variance_groups"] for m in steps] == [0, 0, 0]
    assert min(m["probs_ratio_min"] for m in steps) < 1, "the second update has another ratio"

    lines = [line for line in program.lines("rollouts.jsonl") if line["evaluation"] is None]
    assert {line["env"] for line in lines} == {"count_letters", "forgetful"}
    counted = {len(line["response"]) for line in lines if line["env"] == "count_letters"}
    assert counted == {1, 2}, "some answers got a second try"
    groups = defaultdict(list)
    for line in lines:
        tokens = sum(count for _, count in line["versions"])
        groups[line["slot"], line["row"]].append(tokens * line["advantage"])
    assert all(len(group) == 4 and abs(sum(group)) < 1e-3 for group in groups.values())
    trained = [slot for (slot, _), group in groups.items() if any(group)]
    assert sorted(trained) == list(range(12))
    dropped = program.lines("dropped.jsonl")
    given_up = [(line["slot"], int(line["row"].split(":")[1])) for line in dropped]
    assert sorted(given_up) == sorted(at for at, group in groups.items() if not any(group))
    assert given_up and sum(m["agreed_groups"] for m in steps) == len(given_up)


@pytest.mark.e2e
@pytest.mark.long
@pytest.mark.parametrize(("i", "title"), [*enumerate([*DIFFS, *GUIDED])])
def test_each_fork_trains_through_the_launcher(fork, tiny_model, tmp_path, monkeypatch, i, title):
    """Episodes of two sequences, rewards below zero, and validation of 1, 2 or 3 answers."""
    text, name = DIFFS.get(title, ("", title))
    if text:
        forks.run_in(fork, f"cp grpo_async.py {name}.py", f"git apply docs/forks/{name}.diff")
    lowest = 0.0 if title == "MaxRL" else -1.0  # it refuses rewards below zero
    right = 0.5 if title == "Pass@k training" else 1.0  # its answers are right or wrong
    rows = forks.forgetful_rows(64, lowest=lowest, right=right)
    train = write_rows(tmp_path / "forgetful.jsonl", rows)
    Config = load(fork, name, monkeypatch).Config
    base = make_config(tiny_model, tmp_path, Config, 8 if title == "Pass@k training" else 4)
    base = changed(base, data={"train": train}, **settings_in(text))
    if title == "Prompts of some difficulty":
        base = changed(base, band=(-1.0, 1.0))
    launched(fork, name, base, val_samples=1 + i % 3, lowest=lowest)


@pytest.mark.e2e
@pytest.mark.long
def test_each_command_of_the_pages_trains_a_tiny_model(fork):
    """As the pages write them, for three steps; the models are made first, in minutes."""
    forks.run_in(fork, "cp grpo_async.py gspo.py", "git apply docs/forks/gspo.diff")
    for script in ("make_tiny_mopd", "make_tiny_tools"):
        ran(fork / ".venv/bin/python", f"launch/{script}.py", root=fork, seconds=900)
    pages = "".join((ROOT / f"docs/{page}.md").read_text() for page in FORKING_PAGES)
    found = re.findall(r"^(\.venv/bin/python \w+\.py --config configs/tiny.*)", pages, re.M)
    found += re.findall(r"`(GRPO_PROGRAM=\S+ bash launch/local.sh configs/tiny.*)`", pages)
    assert len(found) == 6
    for n, command in enumerate(found):
        flags = f"--run_dir runs/{n} --steps 3 --val_period 0"
        done = ran("bash", "-c", f"{command} {flags}", root=fork, seconds=300)
        assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
        lines = (fork / f"runs/{n}/metrics.jsonl").read_text().splitlines()
        assert sum("grad_norm" in json.loads(line) for line in lines) == 3, command


# --- prompts of some difficulty ------------------------------------------------------------------


@pytest.fixture
def difficulty_band(variant) -> ModuleType:
    """The forked trainer."""
    return variant("Prompts of some difficulty")[0]


class Band(Filling):
    """A run whose groups have the pass rates of `rates`, by line; the others have one half."""

    def __init__(self, module: ModuleType, rates: dict[int, float], **fields):
        super().__init__(module, set(), group_size=4, **fields)
        self.rates = rates

    async def roll_out(self, row: dict, slot: Slot, n: int, version: int) -> Group:
        """Four answers, and a second sequence of the first one, which is no answer."""
        await asyncio.sleep(0)
        passed = round(4 * self.rates.get(row["_line"], 0.5))
        infos = [info(float(i < passed)) for i in range(4)]
        tail = info(1.0)
        tail.continues = True
        return Group(slot.number, version, row["_line"], [*infos, tail], None)


def test_groups_outside_the_band_give_way_and_are_counted(difficulty_band):
    """Step 1: line 2 is too easy, 3 too hard, so slots 0, 1 have lines 1, 4. Step 2: 5 is easy."""
    rates = {1: 0.25, 2: 1.0, 3: 0.0, 4: 0.75, 5: 1.0}
    band = Band(difficulty_band, rates, max_lag=0)
    asyncio.run(band.both_loops())
    assert [sorted(line for _, line, _ in step) for step in band.trained] == [[1, 4], [6, 7]]
    assert [m["too_hard_groups"] for m in band.metrics] == [1, 0]
    assert [m["too_easy_groups"] for m in band.metrics] == [1, 1]
    assert [e["reason"] for e in band.given_up] == ["too easy", "too hard", "too easy"]
    assert band.given_up[1]["error"] == "mean reward 0, band (0.2, 0.8)"
    assert band.lines() == [1, 2, 3, 4, 5, 6, 7]


def test_the_ends_of_the_band_belong_to_it(difficulty_band):
    band = Band(difficulty_band, {1: 0.25, 2: 0.75, 3: 0.0, 4: 1.0}, band=(0.25, 0.75), steps=1)
    asyncio.run(band.both_loops())
    assert band.lines()[:2] == [1, 2] and not band.given_up
    with pytest.raises(ValueError, match=r"band = \(0.8, 0.2\): expected the lower end first"):
        difficulty_band.Config(band=(0.8, 0.2))


def test_a_step_discards_no_more_groups_than_it_may(difficulty_band):
    band = Band(difficulty_band, dict.fromkeys(range(1, 21), 1.0), max_gen_batches=3, steps=1)
    with pytest.raises(ExceptionGroup) as errors:
        asyncio.run(band.both_loops())
    error = errors.value.exceptions[0].exceptions[0]
    assert "0 groups of step 1 are too hard and 5 too easy, max_gen_batches = 3" in str(error)


def test_a_resumed_run_has_the_counts_of_its_checkpoint(difficulty_band):
    band = Band(difficulty_band, {}, steps=1)
    band.run.progress.outside = {0: [1, 2]}
    state = json.loads(json.dumps(band.run.state())) | {"evaluated": -1}
    resumed = Band(difficulty_band, {}, steps=1)
    resumed.run.restore(state, [])
    assert resumed.run.progress.outside == {0: [1, 2]}
