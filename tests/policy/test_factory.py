"""What is set before a trainer's network is opened."""

import os

import pytest

from policy import factory, fsdp
from settings.network import PolicySettings


@pytest.mark.parametrize(("given", "found"), [
    ({}, {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}),
    ({"PYTORCH_ALLOC_CONF": "x:1"}, {"PYTORCH_ALLOC_CONF": "x:1"}),
    ({"PYTORCH_CUDA_ALLOC_CONF": "x:1"}, {"PYTORCH_CUDA_ALLOC_CONF": "x:1"}),
])  # fmt: skip
def test_a_trainers_allocator_grows_what_it_has_unless_the_user_says_otherwise(
    monkeypatch, given, found
):
    """torch reads the variable at its first allocation, which is the policy's."""
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    seen = {}
    monkeypatch.setattr(fsdp, "FSDPPolicy", lambda *_: seen.update(os.environ))
    factory.open_policy("models/none", PolicySettings())
    assert {name: value for name, value in seen.items() if name.endswith("ALLOC_CONF")} == found
