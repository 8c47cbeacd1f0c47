"""Trainer ranks and engine workers of a weight update, a process each, over gloo.

The trainer ranks gather their tensors from each other as well, as those of a sharded policy do.
"""

import os
import pickle
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace

import torch
import torch.distributed as dist

from policy import WeightMeta
from policy.sync import weight_sync
from policy.sync.receiver import WeightReceiver
from policy.sync.weight_sync import Sender, Wire
from settings.config import Timeouts
from support.ranks import SERVER

BUCKET_BYTES = 1 << 20
TENSORS = 12
MIDDLE = 6  # the tensor at which something happens
ANSWER = 40.0  # seconds after which a test gives a process up

HOST = "127.0.0.1"


def weights(version: int) -> dict[str, torch.Tensor]:
    """Tensors of two types, most of them alone in their bucket, whose rows 1 to 4 ranks share."""
    draw = torch.Generator().manual_seed(version)
    made = {}
    for i in range(TENSORS):
        tensor = torch.randn((12, 7 if i % 4 == 3 else 20_000), generator=draw)
        made[f"w{i}"] = tensor.bfloat16() if i % 2 else tensor
    return made


class Sharded:
    """A policy whose ranks have some rows of each tensor; `whole`: every rank gets all of them."""

    def __init__(self, whole: bool):
        self.whole = whole
        self.version = 0
        self.gathered = 0
        self.stalls = False

    def weight_metas(self) -> list[WeightMeta]:
        of = {n: (tuple(t.shape), str(t.dtype).split(".")[1]) for n, t in weights(0).items()}
        return [WeightMeta(name, *form) for name, form in of.items()]

    def named_weights(self):
        rank, world = dist.get_rank(), dist.get_world_size()
        for i, (name, tensor) in enumerate(weights(self.version).items()):
            if self.stalls and i == MIDDLE:
                time.sleep(1000)
            mine = tensor.chunk(world)[rank].clone()
            shards = [torch.empty_like(mine) for _ in range(world)]
            dist.all_gather(shards, mine)
            self.gathered += 1
            yield name, torch.cat(shards) if self.whole or rank == 0 else None


class Trainer:
    """A trainer rank."""

    def __init__(self, seconds: float, whole: bool):
        self.sender = Sender(Sharded(whole), Timeouts(sync=seconds), shares_gpu=True)
        self.seconds = seconds

    def listen(self) -> int:
        """The port of a store, of as many processes as will come."""
        deadline = timedelta(seconds=20)
        self.store = dist.TCPStore(HOST, 0, 9, True, deadline, wait_for_workers=False)
        return self.store.port

    def start(self, port: int, rank: int, world: int) -> Wire:
        """Joins the other trainer ranks."""
        store = self.store if rank == 0 else self.sender.wire.store(HOST, port, world)
        deadline = timedelta(seconds=self.seconds)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=deadline)
        return self.sender.wire

    def join(self, port: int, rank: int, world: int) -> None:
        """As Trainer.join_sync_group of grpo_async."""
        store = self.store if rank == 0 else self.sender.wire.store(HOST, port, world)
        self.sender.join(store, rank, world)

    def send(self, version: int, stalls: bool) -> tuple[int, int]:
        """The checksum, and how many tensors this rank helped to gather."""
        policy = self.sender.policy
        policy.version, policy.gathered, policy.stalls = version, 0, stalls
        try:
            return self.sender.send(verify=True), policy.gathered
        except RuntimeError as error:
            raise RuntimeError(f"gathered {policy.gathered}: {error}") from None


class Receiver(WeightReceiver):
    """A receiver that compares what comes, and loads nothing."""

    right: dict[str, torch.Tensor]  # by name
    dies = False  # in the middle
    restored = 0  # times

    def take_weights(self, verify: bool) -> tuple[int, int]:
        """The checksum of what came, and how many tensors are right to the bit."""
        digests: list[torch.Tensor] = []
        same = 0
        for i, (name, tensor) in enumerate(self.incoming(digests, verify)):
            if self.dies and i == MIDDLE:
                os.kill(os.getpid(), signal.SIGKILL)
            same += torch.equal(tensor, self.right[name])
        return weight_sync.checksum(digests), same

    def restore_layers(self) -> None:
        """Counts."""
        self.restored += 1


class Engine:
    """A worker of an engine."""

    receiver: Receiver | None = None

    def join(self, wire: Wire, port: int, rank: int, world: int) -> None:
        """Joins the senders."""
        self.receiver = self.receiver or Receiver()
        self.receiver.vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(rank=0))
        self.receiver.join_sync_group(pickle.dumps(wire), HOST, port, rank, world)

    def receive(self, version: int, dies: bool) -> tuple[int, int] | None:
        """What came: checksum, right tensors. None where it was cut off."""
        self.receiver.right, self.receiver.dies = weights(version), dies
        return self.receiver.receive_weights(verify=True)

    def restored(self) -> int:
        """How often its layers got their tensors back."""
        return self.receiver.restored


def serve(pipe, kind: type, args: tuple) -> None:
    """Does in a thread what the test asks for; ends an update as it says so."""
    torch.set_num_threads(1)
    weight_sync.buckets.__defaults__ = (BUCKET_BYTES,)
    home = kind(*args)

    def work(method, given):
        try:
            pipe.send(getattr(home, method)(*given))
        except Exception as error:
            pipe.send(error)

    with ThreadPoolExecutor(1) as pool:
        while asked := pipe.recv():
            if asked[0] == "abort":
                Sender.abort()
            else:
                pool.submit(work, asked[0], asked[1:])


class Process:
    """One of them, from outside."""

    def __init__(self, kind: type, *args):
        self.pipe, theirs = SERVER.Pipe()
        self.process = SERVER.Process(target=serve, args=(theirs, kind, args), daemon=True)
        self.process.start()
        theirs.close()

    def ask(self, method: str, *args) -> None:
        """Begins a call."""
        self.pipe.send((method, *args))

    def answer(self):
        """What it returned or raised; EOFError where the process has ended."""
        assert self.pipe.poll(ANSWER), "neither an answer nor an error"
        try:
            return self.pipe.recv()
        except (EOFError, ConnectionResetError) as error:
            return error

    def __call__(self, method: str, *args):
        """A call and its answer."""
        self.ask(method, *args)
        return self.answer()

    def kill(self) -> None:
        """Ends it, whatever it does."""
        self.process.kill()
        self.process.join()
