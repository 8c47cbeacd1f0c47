"""mopd.py: its loss against a plain loop and an enumeration, its step, its settings."""

import dataclasses
import math
import random

import numpy as np
import pytest
import torch
from test_algorithm import EarlierStage, TablePolicy, sample

import mopd
from grpo_async import Correction
from mopd import Batch, Config, Loss, Run, Trainer, distillation_loss, keep_score, pack
from policy.packing import Update
from policy.sync.weight_sync import Sender
from runtime.reporting.metrics import reduce_stats, step_metrics
from settings.config import Timeouts
from support.configs import changed
from support.examples import tries
from support.megatron_jobs import compute

TEACHERS = {"teachers": {"one": "a", "two": "b"}, "default_teacher": "one"}
TEACHERS |= {"routes": {"math": "two"}}
SMALL = {"prompts_per_step": 4}


def config(**fields) -> Config:
    return changed(Config(**TEACHERS), **SMALL | fields)


# --- the loss -------------------------------------------------------------------------------------


def single(x: float) -> float:
    """The nearest float32: a sample has no better."""
    return float(np.float32(x))


class Case:
    """Random sequences: for each token the logprobs of student, engine, teacher, and whether it is
    trained; for each sequence the advantage of its reward."""

    def __init__(self, dice: random.Random):
        self.lengths = [dice.randint(1, 6) for _ in range(dice.randint(1, 5))]
        self.student = [[-3 * dice.random() for _ in range(n)] for n in self.lengths]
        wide = dice.choice([0.1, 1.0, 2.5])
        self.engine = [[single(x + wide * dice.gauss(0, 1)) for x in s] for s in self.student]
        if dice.random() < 0.2:
            self.engine[0][0] = dice.choice([math.nan, -math.inf])
        self.teacher = [[single(-4 * dice.random()) for _ in s] for s in self.student]
        self.mask = [[dice.random() < 0.8 for _ in s] for s in self.student]
        self.A = [single(dice.gauss(0, 1)) for _ in self.lengths]
        low, high = dice.choice([(0.2, 5.0), (0.5, 5.0), (0.999, 1.002), (0.0, math.inf)])
        level, action = dice.choice(["token", "sequence"]), dice.choice(["truncate", "mask"])
        rule = Correction(level, action, low, high, dice.choice([1.2, 2.0, math.inf]))
        weights = {
            "distill": dice.choice([0.0, 1.0, 0.75]),
            "reward": dice.choice([0.0, 1.0, 0.25]),
        }
        weights = weights if any(weights.values()) else {"distill": 1.0}
        clip = dice.choice([(-20.0, 20.0), (-1.0, 0.5)])
        group = {"group_size": 2, "advantage": {"clip": clip}}
        self.cfg = config(correction=rule, loss=Loss(**weights), **group)
        self.planned = dice.randint(1, 40)
        self.kept = 0  # tokens that the loop has summed

    def row(self) -> tuple[torch.Tensor, Batch]:
        """(logp_T with gradient, the row), in float64; each sequence begins with a prompt token."""

        def join(parts, first, dtype=torch.float64):
            return torch.tensor([x for part in parts for x in (first, *part)], dtype=dtype)

        count = [1 + n for n in self.lengths]
        advantages = [[a] * n for a, n in zip(self.A, self.lengths, strict=True)]
        batch = Batch(
            tokens_T=torch.zeros(sum(count), dtype=torch.int64),
            positions_T=torch.cat([torch.arange(n) for n in count]),
            seq_T=torch.arange(len(count)).repeat_interleave(torch.tensor(count)),
            mask_T=join(self.mask, False, torch.bool),
            engine_logp_T=join(self.engine, math.nan),
            advantage_T=join(advantages, 77.0),
            score_N=torch.zeros(len(count)),
            planned_tokens=self.planned,
            planned_sequences=1,
            teacher_logp_T=join(self.teacher, -55.0),
        )
        return join(self.student, 0.0).requires_grad_(), batch

    def by_loop(self) -> tuple[float, list[list[float]]]:
        """The loss and its slope at each token, token by token."""
        rule, loss = self.cfg.correction, self.cfg.loss
        total, slopes, self.kept = 0.0, [], 0
        for i, n in enumerate(self.lengths):
            used = [t for t in range(n) if self.mask[i][t] and math.isfinite(self.engine[i][t])]
            gap = {t: self.student[i][t] - self.engine[i][t] for t in used}
            error = sum(math.exp(abs(g)) for g in gap.values()) / max(len(used), 1)
            mean = sum(gap.values()) / max(len(used), 1)
            slopes.append([0.0] * n)
            if used and not error <= rule.sequence_error_limit:
                continue
            for t in used:
                judged = math.exp(mean if rule.level == "sequence" else gap[t])
                inside = rule.low <= judged <= rule.high
                w = min(max(judged, rule.low), rule.high)
                if rule.action == "mask":
                    w = math.exp(gap[t]) if inside else 0.0
                a_mopd = self.teacher[i][t] - self.student[i][t]
                A = loss.distill * a_mopd + loss.reward * self.A[i]
                A = min(max(A, self.cfg.advantage.clip[0]), self.cfg.advantage.clip[1])
                total -= w * A * self.student[i][t] / self.planned
                slopes[i][t] = -w * A / self.planned
                self.kept += 1
        return total, slopes


def test_loss_and_gradients_against_a_loop():
    """Cases with masks, both levels and actions, filter, blend, broken engine logprobs."""
    dice = random.Random(0)
    cases = tries(3000)
    filtered = blended = 0
    for _ in range(cases):
        case = Case(dice)
        logp_T, batch = case.row()
        loss, stats = distillation_loss(logp_T, batch, case.cfg)
        loss.backward()
        expected, slopes = case.by_loop()
        assert loss.item() == pytest.approx(expected, rel=1e-9, abs=1e-12)
        flat = [x for part in slopes for x in (0.0, *part)]
        assert logp_T.grad.tolist() == pytest.approx(flat, rel=1e-9, abs=1e-12)
        filtered += int(stats["num_masked_seqs"]) > 0
        blended += bool(case.cfg.loss.reward and case.cfg.loss.distill)
    assert filtered > cases // 10 and blended > cases // 10


@pytest.mark.slow
def test_gradients_of_two_ranks_against_the_loop(tmp_path):
    """The trainer's step, whose samples are dealt over two processes, parts and rows."""
    cases = tries(1000)
    job = {"name": "two", "world": 2, "seed": 1, "cases": cases}
    found = compute([job], tmp_path, "distilling_ranks.py")("two")["gradients"]
    dice = random.Random(job["seed"])
    filtered = 0
    for gradient in found:
        case = Case(dice)
        _, slopes = case.by_loop()
        parts = dice.choice([1, 2, 3])  # as the ranks draw
        for _ in case.lengths:
            dice.randrange(parts * 4)
        scale = case.planned / max(case.kept, 1)
        flat = [scale * x for part in slopes for x in (0.0, *part)]
        assert gradient == pytest.approx(flat, rel=1e-9, abs=1e-12)
        filtered += case.kept < sum(map(sum, case.mask))
    assert len(found) == cases and filtered > cases // 10


def test_a_teacher_that_is_the_student_teaches_nothing():
    case = Case(random.Random(1))
    case.teacher = case.student
    case.cfg = config()
    logp_T, batch = case.row()
    loss, stats = distillation_loss(logp_T, batch, case.cfg)
    loss.backward()
    assert loss.item() == 0 and not logp_T.grad.any()
    assert stats["tokens/reverse_kl"] == 0 and stats["tokens/student_prefers"] == 0


def test_a_tokens_advantage_is_clamped_to_20():
    """Log-ratios of -35, 35 and 2: NeMo-RL's mopd.yaml has advantage_clip_low: -20, _high: 20."""
    student, teacher = [-1.0, -36.0, -3.0], [-36.0, -1.0, -1.0]
    logp_T = torch.tensor([0.0, *student], requires_grad=True)
    batch = pack([scored([1, 2, 3], student, teacher)], Update(3, 1, []), config())
    loss, stats = distillation_loss(logp_T, batch, config())
    loss.backward()
    assert (-3 * logp_T.grad).tolist() == pytest.approx([0.0, -20.0, 20.0, 2.0])
    assert stats["tokens/advantage_clip_fraction"] == 2
    assert stats["tokens/reverse_kl"] == pytest.approx(-2.0)
    unclamped = config(advantage={"clip": (-math.inf, math.inf)})
    logp_T.grad = None
    distillation_loss(logp_T, batch, unclamped).loss.backward()
    assert (-3 * logp_T.grad).tolist() == pytest.approx([0.0, -35.0, 35.0, 2.0])


def bigrams(random_state: np.random.Generator, V: int) -> np.ndarray:
    """Logprobs [V, V] of the next token."""
    x = random_state.normal(size=(V, V))
    return x - np.log(np.exp(x).sum(1, keepdims=True))


def test_the_mean_gradient_is_that_of_the_reverse_kl():
    """10^5 samples of a bigram model, against the sum over all states and tokens."""
    draw = np.random.default_rng(0)
    V, L, n = 4, 3, 100_000
    student, teacher = bigrams(draw, V), bigrams(draw, V)
    pi = np.exp(student)
    states = np.zeros((n, L + 1), int)  # all begin with token 0
    for t in range(L):
        u = draw.random((n, 1))
        states[:, t + 1] = (u > pi[states[:, t]].cumsum(1)).sum(1).clip(max=V - 1)
    logits = torch.tensor(student, requires_grad=True)
    before, after = torch.tensor(states[:, :-1]), torch.tensor(states[:, 1:])
    first = torch.zeros(n, 1, dtype=torch.float64)

    def row_of(values: torch.Tensor) -> torch.Tensor:
        return torch.cat([first.to(values.dtype), values], 1).flatten()

    logp_T = row_of(logits.log_softmax(1)[before, after])
    teacher_T = row_of(torch.tensor(teacher)[before, after])
    tokens_T = torch.tensor(states).flatten()
    positions_T = torch.arange(L + 1).repeat(n)
    seq_T = torch.arange(n).repeat_interleave(L + 1)
    batch = Batch(
        tokens_T, positions_T, seq_T, positions_T > 0, logp_T.detach(), torch.zeros(n * (L + 1)),
        torch.zeros(n), n, n, teacher_logp_T=teacher_T,
    )  # fmt: skip
    distillation_loss(logp_T, batch, config()).loss.backward()

    # By enumeration: how often each state is visited, times the gradient of its KL.
    visits, at = np.zeros(V), np.eye(V)[0]
    for _ in range(L):
        visits += at
        at = at @ pi
    gap = student - teacher
    kl = (pi * gap).sum(1, keepdims=True)
    expected = visits[:, None] * pi * (gap - kl)
    # The standard error, from the samples' own gradients.
    one_hot = np.eye(V)[states[:, 1:]] - pi[states[:, :-1]]  # of log pi, in its own state
    own = gap[states[:, :-1], states[:, 1:]][..., None] * one_hot
    per_state = np.stack([(own * (states[:, :-1] == s)[..., None]).sum(1) for s in range(V)], 1)
    error = per_state.std(0) / math.sqrt(n)
    found = logits.grad.numpy()
    np.testing.assert_allclose(found, per_state.mean(0), rtol=1e-7, atol=1e-12)
    assert (np.abs(found - expected) <= 3 * error + 1e-12).all()
    assert np.abs(expected).max() > 20 * error.max()


# --- the step -------------------------------------------------------------------------------------


def scored(tokens, engine, teacher, advantage=0.0):
    """A sample of the table policy that its teacher has scored."""
    made = sample(tokens, engine, advantage)
    keep_score(made, np.array([0.0, *teacher], np.float32), "a")
    return made


SAMPLES = [
    scored([1, 2], [-1.1, -1.3], [-0.5, -2.0], 0.5),
    scored([3, 3, 1], [-0.6, -0.8, -0.9], [-0.1, -0.2, -3.0], -2.0),
    scored([2] * 4, [-4.0] * 4, [-1.0] * 4, 7.0),  # which the filter drops
    scored([1], [-1.0], [-1.5], 0.0),
]
TABLE = [0.0, -1.0, -1.2, -0.7]


def trainer(policy: TablePolicy, **fields) -> Trainer:
    made = Trainer(config(**fields))
    made.policy = policy
    made.sender = Sender(policy, Timeouts(), False)
    return made


def gradient(parts: list[list[list[int]]], **fields) -> tuple[torch.Tensor, dict]:
    """The scaled gradient and metrics of a step whose parts are rows of these samples."""
    policy = TablePolicy(TABLE)
    made = trainer(policy, **fields)
    for k, rows in enumerate(parts, 1):
        used = [i for row in rows for i in row]
        tokens = sum(int(SAMPLES[i].mask_T.sum()) for i in used)
        places = [[(i, 0) for i in row] for row in rows]
        part = Update(tokens, len(used), places, more=k < len(parts))
        found = made.train_step(0, [part], *([s] for s in SAMPLES))
        assert len(found.logps) == sum(len(SAMPLES[i].tokens_T) for i in used)
    return policy.grads[0], found.metrics


def test_a_stage_that_computes_no_loss_steps_and_reports_nothing():
    cfg = config()
    policy = EarlierStage(TABLE, lambda logp_T, batch: distillation_loss(logp_T, batch, cfg))
    found = trainer(policy).train_step(0, [Update(2, 1, [[(0, 0)]])], SAMPLES[:1])
    assert len(policy.grads) == 1 and found.metrics["num_valid_samples"] == 1
    assert not found.mismatch and len(found.logps) == 0


@pytest.mark.parametrize("blend", [{}, {"loss": {"reward": 0.5}, "group_size": 2}])
def test_packing_parts_and_the_filter_leave_one_divisor(blend):
    """6 tokens are kept of 10; the slope of each is -w A / 6, whatever the rows and parts."""
    whole, metrics = gradient([[[0, 1, 2, 3]]], **blend)
    b = blend.get("loss", {}).get("reward", 0.0)
    expected = np.zeros(4)
    for made in (SAMPLES[0], SAMPLES[1], SAMPLES[3]):
        columns = zip(made.tokens_T, made.engine_logp_T, made.teacher_logp_T, strict=True)
        for token, engine, teacher in list(columns)[1:]:
            w = min(max(math.exp(TABLE[token] - engine), 0.2), 5)
            expected[token] -= w * (teacher - TABLE[token] + b * made.advantage) / 6
    assert whole.tolist() == pytest.approx(expected.tolist(), rel=1e-5)
    assert metrics["num_masked_seqs"] == 1 and metrics["global_valid_toks"] == 6
    for parts in ([[[0], [1, 2], [3]]], [[[2]], [[0, 1]], [[3]]], [[[3], []], [[2, 0], [1]]]):
        found, again = gradient(parts, **blend)
        torch.testing.assert_close(found, whole, rtol=1e-5, atol=1e-7)
        assert again["reverse_kl"] == pytest.approx(metrics["reverse_kl"], rel=1e-5)


def test_metrics_by_hand():
    logp_T = torch.tensor([0.0, -1.0, -2.0, -0.5])
    made = scored([1, 1, 1], [-1.0, -2.0, -0.5], [-0.5, -2.5, -0.5])
    batch = pack([made], Update(3, 1, []), config())
    stats = distillation_loss(logp_T, batch, config()).stats
    found = step_metrics(reduce_stats([stats]), 3, 1.0)
    assert found["advantage"] == pytest.approx(0.0) and found["reverse_kl"] == pytest.approx(0.0)
    assert found["student_prefers"] == pytest.approx(1 / 3)
    assert not any("ratio_min" in name for name in found) and "clip_fraction" not in found


def test_a_sample_without_a_score_is_refused():
    with pytest.raises(RuntimeError, match="lacks finite teacher logprobs"):
        pack([sample([1], [-1.0])], Update(1, 1, []), config())


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_score_that_is_not_finite_is_refused(bad):
    with pytest.raises(FloatingPointError, match="the teacher a gives a token of math"):
        made = dataclasses.replace(sample([1, 2], [-1.0, -1.0]), env="math")
        keep_score(made, np.array([0.0, -1.0, bad], np.float32), "a")


def test_a_row_without_samples_fills_up_a_teachers_share():
    """As where one of two replicas has nothing to score."""
    made = mopd.Teacher(config())
    made.networks = {"a": TablePolicy(TABLE)}
    seconds, infos, group = made.score("a", [[], [(0, 0)]], [sample([1, 2], [-1.0, -1.5])])
    assert group[0].teacher_logp_T.tolist() == pytest.approx([0.0, -1.0, -1.2])
    assert infos[0][0].components["reverse_kl"] == pytest.approx((0.0 - 0.3) / 2)


def test_the_reverse_kl_of_a_sample_is_a_mean_over_what_is_trained():
    made = sample([1, 2, 3], [-1.0, math.nan, -2.0])
    made.components = {"exact": 1.0}
    keep_score(made, np.array([0.0, -1.5, -9.0, -4.0], np.float32), "a")
    assert made.components == {"exact": 1.0, "reverse_kl": pytest.approx((0.5 + 2.0) / 2)}


# --- settings -------------------------------------------------------------------------------------

LAYOUT = {"kind": "megatron", "ranks": 4, "tp": 2}


@pytest.mark.parametrize(("fields", "message"), [
    ({"routes": {"math": "three"}}, r"routes\['math'\] names 'three', .*: one, two"),
    ({"default_teacher": "three"}, "default_teacher names 'three'"),
    ({"teachers": {"one": "a", "two": "b", "idle": "c"}}, "teachers has 'idle', to which no route"),
    ({"teacher_layouts": {"three": {}}}, r"teacher_layouts\['three'\] names 'three'"),
    ({"teacher_layouts": {"two": {"ranks": 3, "tp": 2, "kind": "megatron"}}}, "is no multiple of"),
    ({"teacher_layouts": {"two": {"rank": 3}}}, "sets 'rank', expected one of kind, ranks"),
    ({"teacher_beside": {"two": "three"}}, "names 'three'"),
    ({"teacher_beside": {"two": "two"}}, r"teacher_beside\['two'\] = 'two', which is itself"),
    ({"teacher_beside": {"two": "one"}, "teacher_layouts": {"two": {}}}, "has the layout of 'one'"),
    ({"teachers": {"one": "a", "two": "a"}, "teacher_layouts": {"two": {}}}, "the layout of 'one'"),
    ({"teachers": {"one": "a", "two": "b", "too": "a"}, "routes": {"x": "two", "y": "too"},
      "teacher_beside": {"too": "two"}}, "teacher_beside has 'too', another name of 'one'"),
    ({"teacher_policy": {"kind": "megatron", "replay_routing": True}}, "replay_routing = True"),
    ({"loss": {"reward": 1.0}}, "loss.reward = 1.0 and group_size = 1: expected 2 or more"),
    ({"loss": {"distill": 0.0}}, "nothing to learn"),
    ({"loss": {"reward": 1.0}, "group_size": 2, "verify": False}, "needs verify = True"),
    ({"train_parts": 3}, "no multiple of train_parts = 3"),
])  # fmt: skip
def test_settings_that_cannot_work_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        config(**fields)


def test_a_dataset_goes_before_its_agent_and_both_before_the_default():
    cfg = config(routes={"math": "two", "math/easy": "one"})
    assert cfg.teacher_of("math", "hard") == cfg.teacher_of("math") == "two"
    assert cfg.teacher_of("math", "easy") == cfg.teacher_of("code", "easy") == "one"
    assert Config().teacher_of("math") == ""


def test_one_checkpoint_has_ranks_once_however_it_is_named():
    four = {"one": "a", "alias": "a", "two": "b", "three": "c"}
    routes = {"w": "alias", "x": "two", "y": "three", "z": "one"}
    where = {"teacher_beside": {"three": "two"}, "teacher_layouts": {"one": LAYOUT}}
    cfg = config(teachers=four, routes=routes, **where)
    assert cfg.hosts == ["one", "two"]
    assert [cfg.host_of(name) for name in four] == ["one", "one", "two", "two"]
    assert cfg.models_of_host("b") == ["b", "c"] and cfg.models_of_host("a") == ["a"]
    assert cfg.demand.beside == ((4, 2), (1, 1))
    assert cfg.of_host("one").policy.tp == 2 and cfg.of_host("one").model == "a"
    assert not cfg.of_host("two").policy.recomputes
    beside = config(teachers=four, routes=routes, teacher_beside={"one": "two"})
    assert (
        beside.host_of("alias") == "two"
        and beside.hosts == ["two", "three"]
        and beside.models_of_host("b") == ["b", "a"]
    )


def test_what_is_shared_with_grpo_async_is_named():
    assert issubclass(Run, mopd.grpo_async.Run)
    assert Run.train_forever is mopd.grpo_async.Run.train_forever
    assert Run.generate_forever is mopd.grpo_async.Run.generate_forever
