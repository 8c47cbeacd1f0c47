"""Turns: even to the last one, whatever the weights."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.errors import InputError
from prep import mix

WEIGHTS = st.lists(st.one_of(st.integers(1, 10**6), st.floats(0.001, 10)), min_size=1, max_size=40)


@settings(max_examples=50, deadline=None)
@given(WEIGHTS)
def test_no_prefix_is_off_by_more_than_a_turn(weights):
    turns_N = np.fromiter(itertools.islice(mix.turns(weights), 500), int)
    given_N = (turns_N[:, None] == np.arange(len(weights))).cumsum(0)
    due_N = np.arange(1, 501)[:, None] * np.array(weights, float) / sum(weights)
    assert abs(given_N - due_N).max() < 1 + 1e-9


def test_as_many_turns_as_the_weights_add_up_to_are_exact():
    weights = [7, 1, 300, 45, 45, 45]
    turns = list(itertools.islice(mix.turns(weights), sum(weights)))
    assert [turns.count(i) for i in range(len(weights))] == weights


def test_an_order_ends_where_one_has_none_left():
    assert list(mix.order([2, 9], [0.5, 0.5])) == [0, 1, 0, 1]
    assert list(mix.order([3], [1.0])) == [0, 0, 0]


@pytest.mark.parametrize("spec", ["", "a", "a:", ":1", "a:0", "a:-1", "a:nan", "a:1,,b:1", "a:1e3"])
def test_a_spec_of_another_form_is_refused(spec):
    with pytest.raises(InputError, match="expected FILE:WEIGHT"):
        mix.parts(spec)


def test_a_spec_names_files_and_weights():
    found = [(str(path), weight) for path, weight in mix.parts("x/a.jsonl:0.7, b:3")]
    assert found == [("x/a.jsonl", 0.7), ("b", 3.0)]
