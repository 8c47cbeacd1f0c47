"""Buckets on the wire, without an engine."""

from types import SimpleNamespace

import pytest
import torch

from policy import weight_sync

CFG = SimpleNamespace(trainer_gpus=0.5)  # buckets on the CPU, whatever the machine


class Wire:
    """A process group that keeps what is broadcast, and breaks at the given broadcast."""

    def __init__(self, breaks_at: int = -1):
        self.sent, self.breaks_at = [], breaks_at

    def broadcast(self, buffer, root):
        """What torch's process groups offer, as far as `send` uses it."""
        if len(self.sent) == self.breaks_at:
            raise RuntimeError("connection closed by peer")
        self.sent.append(buffer.clone())
        return SimpleNamespace(wait=lambda: None)


def weights() -> dict[str, torch.Tensor]:
    """Tensors of odd sizes and mixed dtypes, so that alignment matters."""
    shapes = {"a": (3,), "b": (5, 7), "c": (1,), "d": (64, 9), "e": (2, 3)}
    dtypes = [torch.float32, torch.bfloat16, torch.float32, torch.bfloat16, torch.float32]
    torch.manual_seed(0)
    return {n: torch.randn(s).to(d) for (n, s), d in zip(shapes.items(), dtypes, strict=True)}


def metas(tensors) -> list:
    """What `weight_metas` says of them."""
    return [(n, tuple(t.shape), str(t.dtype).split(".")[1]) for n, t in tensors.items()]


@pytest.mark.parametrize("limit", [1, 64, 200, 1 << 20])
def test_what_arrives_is_what_was_sent(monkeypatch, limit):
    monkeypatch.setattr(weight_sync.buckets, "__defaults__", (limit,))
    tensors, wire = weights(), Wire()
    packed = weight_sync.pack(iter(tensors.items()), metas(tensors), CFG)
    sent_sums = weight_sync.send(packed, metas(tensors), wire, verify=True)
    receiver = weight_sync.WeightReceiver()
    receiver.sync_cfg, receiver.sync_metas = CFG, metas(tensors)
    sent = iter(wire.sent)

    def receive(buffer, root):
        buffer.copy_(next(sent))
        return SimpleNamespace(wait=lambda: None)

    receiver.sync_group = SimpleNamespace(broadcast=receive)
    arrived = dict(receiver.incoming(sums := {}, verify=True))
    assert sums == sent_sums and list(sums) == list(tensors)
    assert list(arrived) == list(tensors)
    assert all(torch.equal(arrived[name], tensors[name]) for name in tensors)
    assert len(wire.sent) == (
        1 if limit > 1 << 10 else len(list(weight_sync.buckets(metas(tensors))))
    )


def test_a_lost_receiver_does_not_stop_the_gathers_that_other_ranks_join(monkeypatch):
    monkeypatch.setattr(weight_sync.buckets, "__defaults__", (64,))
    tensors, gathered = weights(), []

    def gather():
        for name, tensor in tensors.items():
            gathered.append(name)
            yield name, tensor

    with pytest.raises(RuntimeError, match="connection closed"):
        packed = weight_sync.pack(gather(), metas(tensors), CFG)
        weight_sync.send(packed, metas(tensors), Wire(breaks_at=1), verify=False)
    assert gathered == list(tensors)


@pytest.mark.parametrize("drop", ["a", "c", "e"])
def test_weights_that_were_not_announced_are_refused(drop):
    tensors = weights()
    given = {name: tensor for name, tensor in tensors.items() if name != drop}
    with pytest.raises(ValueError, match=f"where {drop} was announced"):
        list(weight_sync.pack(iter(given.items()), metas(tensors), CFG))


def test_a_checksum_sees_a_flipped_bit_and_swapped_bytes():
    torch.manual_seed(0)
    bytes_B = torch.randint(0, 256, (200_000,), dtype=torch.uint8)
    right = weight_sync.checksum(bytes_B)
    assert weight_sync.checksum(bytes_B.clone()) == right
    for place in (0, 65_520, 65_521, 199_999):
        flipped = bytes_B.clone()
        flipped[place] ^= 1
        assert weight_sync.checksum(flipped) != right
    for a, b in ((0, 1), (5, 65_526), (1, 65_521), (1, 65_537), (70_000, 199_999)):
        swapped = bytes_B.clone()
        swapped[a], swapped[b] = bytes_B[b], bytes_B[a]
        assert bytes_B[a] == bytes_B[b] or weight_sync.checksum(swapped) != right
