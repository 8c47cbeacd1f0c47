"""Injected faults against what finds them, with real vLLM engines: what the weight check proves.

In float32. The probe of a bf16 engine allows 0.02 nats at least and finds less; reading back
compares bits there as well.
"""

import functools
import json
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from policy import WeightMeta
from runtime.engines.probe import Probe
from support.megatron_jobs import run
from support.weight_faults import DENSE, HYBRID, MOE

pytestmark = [pytest.mark.e2e, pytest.mark.xdist_group("weight faults")]
ALWAYS = ["bucket used again", "loaded by load_weights alone"]
SENT = ["doubled q_norm", "two layers swapped", "k and v swapped", "two embedding rows swapped"]
FAULTS = {  # the first one of each is also left in updates that are not verified
    "qwen3": [*DENSE, "tied head not refreshed", *ALWAYS, *(f"sent: {fault}" for fault in SENT)],
    "qwen3_moe": [*MOE, *ALWAYS, "sent: two experts swapped"],
    "nemotron_dense": [*HYBRID, *ALWAYS],
}
# Reading back sees what differs from what was sent, and a CPU's kernel hides its experts' order.
UNREAD = {"w1 and w3 of an expert swapped"}
# They change too little for the probe.
UNSEEN = {"one element 1 % larger", "one element of an expert", "stale A_log", "stale dt_bias"}


FAMILIES = ["qwen3", *(pytest.param(name, marks=pytest.mark.long) for name in list(FAULTS)[1:])]


@pytest.fixture(scope="module")
def checked(models, tiny_model) -> Callable[[str], dict]:
    """What tests/support/check_weights.py prints of a family, which it checks once."""
    folders = models | {"qwen3": tiny_model}

    @functools.cache
    def of_family(family: str) -> dict:
        lines = run("check_weights.py", folders[family], ",".join(FAULTS[family])).splitlines()
        (printed,) = (json.loads(line) for line in lines if line.startswith("{"))
        return printed

    return of_family


def is_near(gap: float, first: float) -> bool:
    """Whether the probe accepts a gap if it was `first` at version 0."""
    probe = Probe(None, SimpleNamespace(metas=[WeightMeta("w", (1,), "float32")]))
    probe.first = first
    return gap <= probe.limit


# Tensors and layers of each that need no loader of vLLM's: the embedding and the head have padding,
# and A_log becomes A.
COPIED = {"qwen3": (23, 17), "qwen3_moe": (43, 17), "nemotron_dense": (18, 15)}


@pytest.mark.parametrize("family", FAMILIES)
def test_copies_make_the_bits_that_vllm_s_loaders_make(checked, family):
    copies = checked(family)["copies"]
    assert tuple(copies["known"]) == COPIED[family]
    assert copies["copied"] == copies["loaded"]


@pytest.mark.parametrize("family", FAMILIES)
def test_an_update_that_is_cut_off_pauses_the_engine_until_a_whole_one(checked, family):
    cut = checked(family)["cut"]
    for found in cut["cuts"]:
        *ended, whole = found["said"]
        assert all("was cut off before all of it arrived" in said for said in ended) and whole == ""
        assert not found["went_on"] and found["tokens"] == 256
        assert found["versions"] == 2, "no token is of an update that was cut off"
    assert is_near(cut["gap"], checked(family)["found"][""][1])


@pytest.mark.parametrize("family", FAMILIES)
def test_every_fault_is_found(checked, family):
    """Printed: the probe's gap in nats, whether it is too large, and what reading back says."""
    told = checked(family)
    said, first = told["found"][""]
    assert said == "", "a sound engine is refused"
    print(f"\n{family}: {first:.1e} nats without a fault")
    wrong = []
    for fault, (said, gap) in list(told["found"].items())[1:]:
        by_probe = not is_near(gap, first)
        print(f"{fault:32} {gap:8.1e} {'probe' if by_probe else '':6} {said.split(': ')[-1]}")
        is_unread = fault in UNREAD or fault.startswith("sent: ")
        if bool(said) == is_unread or not (by_probe or fault in UNSEEN):
            wrong.append(fault)
    assert not wrong and list(told["found"]) == ["", *FAULTS[family]]
    said, gap = told["mended"]
    assert said == "" and is_near(gap, first), "a whole update mends all of them"
    some = [said for said in told["some"] if said]
    assert len(some) == 1 and "as it was sent" in some[0], "one in SHARE is looked at each time"
