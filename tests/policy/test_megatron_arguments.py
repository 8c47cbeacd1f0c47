"""policy/megatron/arguments.py as data: what a run sets, what its configuration sets after it.

That AdamW takes the precision-aware arguments shows on a GPU alone, with Transformer Engine.
"""

import dataclasses

import pytest
import torch

from runtime.startup import preflight
from settings.conflicts import OWN_MEGATRON_ARGS
from settings.network import PolicySettings

pytestmark = pytest.mark.slow  # Megatron takes seconds to import
FIELDS = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4}


def configs(dtype=torch.float32, **megatron) -> dict:
    """What each of the dictionaries is merged into."""
    from policy.megatron import arguments

    settings = PolicySettings(kind="megatron", ranks=2, tp=2, lr=2e-6, megatron=megatron)
    return {
        "model": arguments.transformer_config(settings, FIELDS, dtype),
        "ddp": arguments.ddp_config(settings),
        "optimizer": arguments.optimizer_config(settings, dtype),
    }


def values(made: dict) -> dict[str, dict]:
    """The fields of each, except its functions."""
    return {
        part: {f.name: v for f in dataclasses.fields(c) if not callable(v := getattr(c, f.name))}
        for part, c in made.items()
    }


def test_without_them_gradients_are_float32_and_sums_no_means():
    made = configs(torch.bfloat16)
    assert made["ddp"].grad_reduce_in_fp32 and made["ddp"].use_distributed_optimizer
    assert made["model"].calculate_per_token_loss and made["model"].sequence_parallel
    assert (made["optimizer"].lr, made["optimizer"].bf16) == (2e-6, True)


GIVEN = {
    "ddp": {"grad_reduce_in_fp32": False, "overlap_param_gather": True},
    "model": {"moe_router_dtype": "fp64", "hidden_dropout": 0.1},
    "optimizer": {"log_num_zeros_in_grad": True, "adam_eps": 1e-15},
}


@pytest.mark.parametrize("part", GIVEN)
def test_they_are_merged_last_and_change_nothing_else(part):
    usual, given = values(configs()), GIVEN[part]
    assert values(configs(**{part: given})) == usual | {part: usual[part] | given}


def test_types_are_text_in_a_configuration():
    from policy.megatron import arguments

    given = arguments.with_dtypes({"exp_avg_dtype": "bfloat16", "moe_router_dtype": "fp32"})
    assert given == {"exp_avg_dtype": torch.bfloat16, "moe_router_dtype": "fp32"}
    with pytest.raises(AssertionError, match="exp_avg_dtype can only be fp32 when not using prec"):
        configs(optimizer={"exp_avg_dtype": "bfloat16"})


@pytest.mark.parametrize("part", OWN_MEGATRON_ARGS)
def test_megatron_declares_what_is_known_and_what_is_refused(part):
    """Were its source to change its form, every argument would be taken."""
    known = preflight.arguments(f"policy.megatron.{part}")
    assert known.keys() == {field.name for field in dataclasses.fields(configs()[part])}
    assert known.keys() > set(OWN_MEGATRON_ARGS[part])


@pytest.mark.parametrize("part", OWN_MEGATRON_ARGS)
def test_what_the_run_sets_is_refused(part):
    for name in OWN_MEGATRON_ARGS[part]:
        own = f"policy.megatron.{part} sets '{name}', which the run itself sets"
        with pytest.raises(ValueError, match=own):
            configs(**{part: {name: 1}})
