"""Buckets on the wire, without an engine."""

import os
import pickle
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from unittest import mock

import psutil
import pytest
import torch
import torch.distributed as dist

from policy import OWNER, WeightMeta
from policy.sync import receiver, weight_sync
from policy.sync.receiver import WeightReceiver
from runtime.processes.cluster import ROOT
from settings.config import Timeouts
from support.host_waits import HostWaits
from support.program import is_alive, survivors


class Network:
    """A process group that keeps what is broadcast, and breaks at the given broadcast."""

    def __init__(self, breaks_at: int = -1):
        self.sent, self.breaks_at = [], breaks_at

    def broadcast(self, buffer, root):
        """What torch's process groups offer, as far as `send` uses it."""
        if len(self.sent) == self.breaks_at:
            raise RuntimeError("connection closed by peer")
        self.sent.append(buffer.clone())
        return SimpleNamespace(wait=lambda: None, is_completed=lambda: True)


class Silent:
    """A group like NCCL's, an engine of which is lost: `wait` returns, and nothing is ever sent.

    Aborted, its broadcasts count as completed and still raise nothing.
    """

    def __init__(self):
        self.sent, self.ended = 0, False

    def broadcast(self, buffer, root):
        self.sent += 1
        return SimpleNamespace(wait=lambda: None, is_completed=lambda: self.ended)

    def abort(self):
        self.ended = True


def weights() -> dict[str, torch.Tensor]:
    """Tensors of odd sizes and mixed dtypes, so that alignment matters."""
    shapes = {"a": (3,), "b": (5, 7), "c": (1,), "d": (64, 9), "e": (2, 3)}
    dtypes = [torch.float32, torch.bfloat16, torch.float32, torch.bfloat16, torch.float32]
    torch.manual_seed(0)
    return {n: torch.randn(s).to(d) for (n, s), d in zip(shapes.items(), dtypes, strict=True)}


class Weights:
    """Stands for a policy: it announces `tensors` and yields `given`; `gathered` are the names."""

    def __init__(self, tensors: dict, given: dict | None = None):
        self.tensors, self.given, self.gathered = tensors, given or tensors, []

    def weight_metas(self) -> list[WeightMeta]:
        of = {
            name: (tuple(t.shape), str(t.dtype).split(".")[1]) for name, t in self.tensors.items()
        }
        return [WeightMeta(name, *form) for name, form in of.items()]

    def named_weights(self):
        for name, tensor in self.given.items():
            self.gathered.append(name)
            yield name, tensor


def sender(policy: Weights, network: Network | None = None) -> weight_sync.Sender:
    """A trainer rank's; buckets lie on the CPU, whatever the machine, as on a shared GPU."""
    made = weight_sync.Sender(policy, Timeouts(), shares_gpu=True)
    made.group = network
    return made


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("limit", [1, 64, 200, 1 << 20])
def test_what_arrives_is_what_was_sent(monkeypatch, limit, staged):
    monkeypatch.setattr(weight_sync.buckets, "__defaults__", (limit,))
    tensors, network = weights(), Network()
    sending = sender(Weights(tensors), network)
    if staged:
        sending.stage()
        assert sending.policy.gathered == list(tensors)[: len(sending.policy.gathered)]
        assert sending.policy.gathered and not network.sent
    with HostWaits() as waits:
        sent = sending.send(verify=True)
    assert waits.count == 1, "one number is read, whatever is sent"
    receiver = WeightReceiver()
    receiver.sync_wire = pickle.loads(pickle.dumps(sending.wire))  # as it reaches an engine
    incoming = iter(network.sent)

    def receive(buffer, root):
        buffer.copy_(next(incoming))
        return SimpleNamespace(wait=lambda: None)

    receiver.sync_group = SimpleNamespace(broadcast=receive)
    arrived = dict(receiver.incoming(digests := [], verify=True))
    assert weight_sync.checksum(digests) == sent != 0
    assert list(arrived) == list(tensors)
    assert all(torch.equal(arrived[name], tensors[name]) for name in tensors)
    buckets = len(list(weight_sync.buckets(sending.metas)))
    assert len(network.sent) == buckets and (limit < 1 << 10 or buckets == 1)


def test_a_second_update_gathers_again():
    tensors, network = weights(), Network()
    sending = sender(Weights(tensors), network)
    sending.stage()
    assert sending.send(verify=False) == 0
    tensors["a"] += 1
    sending.send(verify=True)
    assert sending.policy.gathered == [*tensors, *tensors]
    assert not torch.equal(*network.sent)


def test_a_rank_that_joined_nobody_only_gathers():
    sending = sender(Weights(weights()))
    assert sending.send(verify=True) == 0
    assert sending.policy.gathered == list(weights())


def test_a_lost_receiver_does_not_stop_the_gathers_that_other_ranks_join(monkeypatch):
    monkeypatch.setattr(weight_sync.buckets, "__defaults__", (64,))
    sending = sender(Weights(weights()), Network(breaks_at=1))
    with pytest.raises(RuntimeError, match="connection closed"):
        sending.send(verify=False)
    assert sending.policy.gathered == list(weights())


@pytest.mark.parametrize("limit", [64, 1 << 20])
def test_a_send_that_nothing_would_ever_end_is_ended_from_another_thread(monkeypatch, limit):
    """All gathers are done, and no more was on its way than may be."""
    monkeypatch.setattr(weight_sync.buckets, "__defaults__", (limit,))
    sending = weight_sync.Sender(Weights(weights()), Timeouts(sync=10), shares_gpu=True)
    monkeypatch.setattr(weight_sync.Sender, "joined", sending)
    sending.group = Silent()
    with ThreadPoolExecutor(1) as rank:
        sent = rank.submit(sending.send, False)
        with pytest.raises(TimeoutError):
            sent.result(0.2)
        assert 1 <= sending.group.sent <= weight_sync.AHEAD + 1
        weight_sync.Sender.abort()
        with pytest.raises(RuntimeError, match="an engine is lost, or 10 s have passed"):
            sent.result(5)
    assert sending.policy.gathered == list(weights())


def test_a_send_that_nothing_would_ever_end_has_a_deadline(monkeypatch):
    sending = weight_sync.Sender(Weights(weights()), Timeouts(sync=0.1), shares_gpu=True)
    monkeypatch.setattr(weight_sync.Sender, "joined", sending)
    sending.group = Silent()
    with pytest.raises(RuntimeError, match="the broadcast of weights was ended"):
        sending.send(verify=False)
    assert sending.group.ended and sending.policy.gathered == list(weights())


def test_a_process_that_sends_nothing_has_nothing_to_abort(monkeypatch):
    monkeypatch.setattr(weight_sync.Sender, "joined", None)
    weight_sync.Sender.abort()


class Kernels(WeightReceiver):
    """A worker whose update waits in kernels of NCCL until its group is aborted."""

    def __init__(self, then):
        self.then, self.restored, self.aborted = then, 0, threading.Event()
        self.sync_wire = SimpleNamespace(device="cuda")
        self.sync_group = SimpleNamespace(abort=self.aborted.set)
        self.sync_store = dist.HashStore()

    def take_weights(self, verify):
        if isinstance(self.then, ValueError):
            raise self.then
        assert self.aborted.wait(10)
        if isinstance(self.then, Exception):
            raise self.then
        return self.then

    def restore_layers(self):
        self.restored += 1


@pytest.mark.parametrize("then", [7, RuntimeError("w does not hold row 0 as it was sent")])
def test_an_update_that_waits_in_kernels_is_cut_off_by_aborting_them(monkeypatch, then):
    """What they leave behind is garbage, whether reading back finds it or not."""
    monkeypatch.setattr(receiver, "CHECK_SECONDS", 0.01)
    worker = Kernels(then)
    with ThreadPoolExecutor(1) as engine:
        update = engine.submit(worker.receive_weights)
        with pytest.raises(TimeoutError):
            update.result(0.1)
        assert not worker.aborted.is_set()
        sending = weight_sync.Sender(Weights(weights()), Timeouts(), shares_gpu=True)
        sending.group, sending.store = Silent(), worker.sync_store
        monkeypatch.setattr(weight_sync.Sender, "joined", sending)
        weight_sync.Sender.abort()
        assert update.result(5) is None and worker.restored == 1


def test_a_look_that_ends_late_cuts_off_no_later_update(monkeypatch):
    """The store of the group before is gone, and a look at it takes its time to notice."""
    monkeypatch.setattr(receiver, "CHECK_SECONDS", 0.01)
    looked, gone = threading.Event(), threading.Event()

    def check(keys):
        looked.set()
        gone.wait(10)
        raise dist.DistNetworkError("connection reset")

    worker = Kernels(7)
    worker.sync_store = SimpleNamespace(check=check)
    worker.take_weights = lambda verify: 7 if looked.wait(10) else None
    assert worker.receive_weights() == 7
    worker.sync_store = dist.HashStore()

    def second(verify):
        gone.set()
        assert not worker.aborted.wait(0.2)
        return 8

    worker.take_weights = second
    assert worker.receive_weights() == 8 and not worker.cut.is_set()


def test_an_update_that_fails_by_itself_costs_its_engine():
    worker = Kernels(ValueError("w has another shape"))
    with pytest.raises(ValueError, match="another shape"):
        worker.receive_weights()
    assert not worker.restored and not worker.aborted.is_set()


def test_an_update_whose_store_is_gone_is_cut_off(monkeypatch):
    """As where trainer rank 0 has died."""
    monkeypatch.setattr(receiver, "CHECK_SECONDS", 0.01)
    worker = Kernels(7)
    gone = mock.Mock(side_effect=dist.DistNetworkError("connection reset"))
    worker.sync_store = SimpleNamespace(check=gone)
    assert worker.receive_weights() is None and worker.aborted.is_set()


@pytest.mark.parametrize("drop", ["a", "c", "e"])
def test_weights_that_were_not_announced_are_refused(drop):
    tensors = weights()
    given = {name: tensor for name, tensor in tensors.items() if name != drop}
    with pytest.raises(ValueError, match=f"where {drop} was announced"):
        sender(Weights(tensors, given)).send(verify=False)


@pytest.mark.slow
def test_both_sides_meet_at_a_store(monkeypatch):
    store = dist.TCPStore("127.0.0.1", 0, 2, True, timedelta(seconds=30), wait_for_workers=False)
    tensors = weights()
    sending = sender(Weights(tensors))
    monkeypatch.setattr(weight_sync.Sender, "joined", None)
    receiver = WeightReceiver()
    receiver.available_kv_cache_memory_bytes = 7.0
    receiver.vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(rank=0))
    wire = pickle.dumps(sending.wire)
    with ThreadPoolExecutor(1) as engine:
        joined = engine.submit(receiver.join_sync_group, wire, "127.0.0.1", store.port, 1, 2)
        sending.join(store, 0, 2)
        assert joined.result() == 7
        arrived = engine.submit(lambda: dict(receiver.incoming([], verify=False)))
        sending.send(verify=False)
        assert all(torch.equal(arrived.result()[name], tensors[name]) for name in tensors)


WORKER = """
import os, threading
from policy.sync.receiver import WeightReceiver
WeightReceiver()
print("watches", os.getpid(), sep="\\n", flush=True)
threading.Event().wait()
"""


# An actor, what it starts, which a signal does not end, and a worker of that.
FAMILY = """
import os, signal, subprocess, sys, time
if sys.argv[1] == "actor":
    os.environ["%s"] = str(os.getpid())
else:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print(os.getpid(), flush=True)
subprocess.run([sys.executable, "-c", *sys.argv[2:]])
time.sleep(60)
"""


@pytest.mark.slow
def test_an_engine_s_processes_end_with_the_actor_around_them():
    """A killed actor can tell none of them; they wait, as for a kernel, or for each other."""
    family = FAMILY % OWNER
    command = [sys.executable, "-c", family, "actor", family, "engine", WORKER]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as actor:
        try:
            engine = int(actor.stdout.readline())
            assert actor.stdout.readline() == "watches\n" and is_alive(engine)
            worker = int(actor.stdout.readline())
        finally:
            actor.kill()
        assert not survivors({engine: b"engine", worker: b"worker"}, 10)


def test_a_hidden_process_of_another_user_keeps_no_engine_from_starting(monkeypatch):
    """Above the actor are processes of root, and with hidepid=1 psutil may not look at them."""

    def hidden(process):
        raise psutil.AccessDenied(process.pid)

    monkeypatch.setattr(psutil.Process, "parent", hidden)
    monkeypatch.setattr(threading, "Thread", mock.Mock())
    receiver.end_with(os.getppid())


def test_outside_an_engine_nothing_is_watched(monkeypatch):
    monkeypatch.setattr(receiver, "end_with", None)
    monkeypatch.delenv(OWNER, raising=False)
    WeightReceiver()
    monkeypatch.setenv(OWNER, str(os.getpid()))
    WeightReceiver()


def test_a_checksum_sees_a_flipped_bit_and_swapped_bytes_and_buckets():
    torch.manual_seed(0)
    bytes_B = torch.randint(0, 256, (13 * weight_sync.ROW_BYTES,), dtype=torch.uint8)

    def checksum(*buckets):
        return weight_sync.checksum([weight_sync.digest(bucket) for bucket in buckets])

    right = checksum(bytes_B)
    assert checksum(bytes_B.clone()) == right
    for place in (0, 65_520, 65_521, 199_999):
        flipped = bytes_B.clone()
        flipped[place] ^= 1
        assert checksum(flipped) != right
    assert checksum(bytes_B, flipped) != checksum(flipped, bytes_B)
    for a, b in ((0, 1), (5, 65_526), (1, 65_521), (1, 65_537), (70_000, 199_999)):
        swapped = bytes_B.clone()
        swapped[a], swapped[b] = bytes_B[b], bytes_B[a]
        assert bytes_B[a] == bytes_B[b] or checksum(swapped) != right
