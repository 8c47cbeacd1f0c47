"""The way from a group's rollout to the engine: each hop is there, and they are few."""

import pytest
from walks import HOPS, called


@pytest.mark.parametrize("n", range(len(HOPS) - 1))
def test_each_hop_calls_the_next(n):
    file, function = HOPS[n]
    _, target = HOPS[n + 1]
    assert target.rpartition(".")[2] in called(file, function)


def test_the_engine_is_eight_hops_away():
    assert len(HOPS) - 1 <= 8
