"""Learning rates and weight decay against torch's and Megatron's own classes."""

import pytest
import torch
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch import nn
from torch.optim import lr_scheduler as of_torch

from policy.optimizer import adamw, learning_rate
from settings.network import PolicySettings

STEPS = 50
COURSE = {"lr": 3e-4, "warmup_lr": 1e-5, "warmup_steps": 7, "min_lr": 2e-5, "lr_decay_steps": 40}
SCHEDULES = {
    "constant": {"lr": 3e-4, "warmup_lr": 1e-5, "warmup_steps": 7},
    "no warm-up": {"lr": 3e-4, "warmup_steps": 0},
    "linear": COURSE | {"lr_schedule": "linear"},
    "cosine": COURSE | {"lr_schedule": "cosine"},
    "wsd": COURSE | {"lr_schedule": "wsd", "wsd_decay_steps": 12},
    "cosine to 0": COURSE | {"lr_schedule": "cosine", "min_lr": 0.0, "warmup_steps": 0},
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_learning_rate_is_megatrons(name):
    settings = PolicySettings(**SCHEDULES[name])
    kind = settings.lr_schedule
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    theirs = OptimizerParamScheduler(
        optimizer,
        init_lr=settings.warmup_lr,
        max_lr=settings.lr,
        min_lr=settings.min_lr,
        lr_warmup_steps=settings.warmup_steps,
        lr_decay_steps=settings.lr_decay_steps or STEPS,
        lr_decay_style="WSD" if kind == "wsd" else kind,
        start_wd=0.0,
        end_wd=0.0,
        wd_incr_steps=0,
        wd_incr_style="constant",
        wsd_decay_steps=settings.wsd_decay_steps or None,
        lr_wsd_decay_style="linear",
    )
    for update in range(STEPS):
        found = learning_rate(update, settings)
        assert found == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-6), update
        theirs.step(1)


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_learning_rate_is_torchs(name):
    """Linear parts and cosines one after the other; the last learning rate stays."""
    s = PolicySettings(**SCHEDULES[name])
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=s.lr)
    floor, left = s.min_lr / s.lr, s.lr_decay_steps - s.warmup_steps
    flat = left - s.wsd_decay_steps if s.lr_schedule == "wsd" else 0
    falls = {
        "constant": lambda: of_torch.ConstantLR(optimizer, 1.0, STEPS),
        "linear": lambda: of_torch.LinearLR(optimizer, 1.0, floor, left),
        "cosine": lambda: of_torch.CosineAnnealingLR(optimizer, left, s.min_lr),
        "wsd": lambda: of_torch.LinearLR(optimizer, 1.0, floor, s.wsd_decay_steps),
    }
    parts, ends = [], []
    if s.warmup_steps:
        start = s.warmup_lr / s.lr
        parts.append(of_torch.LinearLR(optimizer, start, 1.0, s.warmup_steps))
        ends.append(s.warmup_steps)
    if flat:
        parts.append(of_torch.ConstantLR(optimizer, 1.0, flat))
        ends.append(s.warmup_steps + flat)
    parts.append(falls[s.lr_schedule]())
    theirs = of_torch.SequentialLR(optimizer, parts, ends)
    last = s.lr_decay_steps or STEPS  # torch's cosine rises again behind its end
    for update in range(min(STEPS, last + 1)):
        expected = optimizer.param_groups[0]["lr"]
        assert learning_rate(update, s) == pytest.approx(expected, rel=1e-6), update
        optimizer.step()
        theirs.step()
    assert learning_rate(10 * STEPS, s) == (s.min_lr if s.lr_decay_steps else s.lr)


def test_what_has_one_axis_does_not_decay():
    """50 steps of a layer and a norm, against torch's own with groups made by hand."""
    torch.manual_seed(0)
    settings = PolicySettings(lr=1e-2, weight_decay=0.3, betas=(0.8, 0.95))
    ours, theirs = (nn.Sequential(nn.Linear(5, 4), nn.LayerNorm(4)).double() for _ in range(2))
    theirs.load_state_dict(ours.state_dict())
    weight, *others = theirs.parameters()
    groups = [{"params": [weight], "weight_decay": 0.3}, {"params": others, "weight_decay": 0.0}]
    expected = torch.optim.AdamW(groups, lr=1e-2, betas=(0.8, 0.95))
    optimizer = adamw(ours.parameters(), settings)
    start = [p.detach().clone() for p in ours.parameters()]
    for _ in range(STEPS):
        x = torch.randn(3, 5, dtype=torch.float64)
        for model, stepping in ((ours, optimizer), (theirs, expected)):
            model(x).square().sum().backward()
            stepping.step()
            stepping.zero_grad()
    for a, b, before in zip(ours.parameters(), theirs.parameters(), start, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
        assert not torch.equal(a, before)


@pytest.mark.parametrize(("fields", "says"), [
    ({"lr_schedule": "cosine"}, "lr_decay_steps = 0: expected more than warmup_steps = 10"),
    ({"lr_schedule": "linear", "lr_decay_steps": 10}, "lr_decay_steps = 10: expected more than"),
    ({"lr_decay_steps": 100}, "need an lr_schedule that is not constant"),
    ({"min_lr": 1e-7}, "need an lr_schedule that is not constant"),
    (COURSE | {"lr_schedule": "wsd"}, "wsd_decay_steps = 0: expected 0 without wsd, or with wsd 1"),
    (COURSE | {"lr_schedule": "wsd", "wsd_decay_steps": 34}, "lr_decay_steps - warmup_steps = 33"),
    (COURSE | {"lr_schedule": "linear", "wsd_decay_steps": 3}, "expected 0 without wsd"),
    (COURSE | {"lr_schedule": "linear", "min_lr": 1e-3}, "min_lr = 0.001 > lr = 0.0003"),
    ({"lora_targets": ("q_proj",)}, "lora_alpha and lora_targets need lora_rank above 0"),
    ({"betas": (0.9, 1.0)}, "less than 1"),
])  # fmt: skip
def test_a_course_that_cannot_be_is_refused(fields, says):
    with pytest.raises(ValueError, match=says):
        PolicySettings(**fields)
