"""Sends weights: trainer rank 0 broadcasts buckets, and the engines' workers load them.

There is one code path for CPU and GPU; only the backend differs (gloo or nccl). vLLM's own transfer
engines cannot end an update that has lost an engine: docs/grpo_async.md, detail 26.

Under NCCL, the other trainer ranks on rank 0's node are in the group as well. They only pass on
what they receive, so that NCCL's rings leave the node through the network cards of all its GPUs.
"""

import functools
import itertools
import math
import time
from collections import deque
from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor

from core import waits
from policy import WeightMeta

if TYPE_CHECKING:
    from policy.sync.adapter_sync import Base
    from settings.config import Timeouts

BUCKET_BYTES = 256 << 20
AHEAD = 3  # broadcasts that may be pending on a GPU before the next bucket is gathered
WORDS = 1 << 18  # words digested at once, as int64: they fit into a core's cache
GPU_WORDS = 1 << 22  # 32 MiB: few kernels, and little memory next to the KV
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
CUT = "cut"  # this key in a group's store marks an update that was ended
ROW_BYTES = 1 << 14  # bytes that a digest adds up at once; the size of a bucket is a multiple of it


class CutOff(RuntimeError):
    """Raised if an update ends before all of it has arrived. The next update can repeat it."""


class Group(Protocol):
    """A process group of gloo or NCCL; torch's stubs do not list its collectives."""

    def broadcast(self, tensor: Tensor, root: int, /) -> dist.Work:
        """Starts to broadcast a tensor from a rank of the group."""

    def abort(self) -> None:
        """Ends pending operations."""


class Source(Protocol):
    """The tensors of weight updates: a `Policy`, or its adapters (policy/sync/adapter_sync.py).

    A source that has `base` sends tensors that engines add to that base.
    """

    def weight_metas(self) -> list[WeightMeta]:
        """Describes the tensors that `named_weights` yields, in its order."""

    def named_weights(self) -> Iterator[tuple[str, Tensor | None]]:
        """Yields names and, on rank 0, tensors, else None; collective over the trainer ranks."""


class Wire(NamedTuple):
    """The terms of weight updates, known to both sides. They are sent to the engines, pickled."""

    metas: list[WeightMeta]  # describe all tensors, in sending order
    join_seconds: float  # deadline for joining the group
    seconds: float  # deadline for a broadcast
    shares_gpu: bool  # True: an engine and a trainer rank may have the same GPU
    base: "Base | None" = None  # engines add the tensors to this; None: tensors are the weights

    def store(self, host: str, port: int, world: int) -> dist.TCPStore:
        """Connects to the store on which rank 0 of the group listens."""
        return dist.TCPStore(host, port, world, False, timedelta(seconds=self.join_seconds))

    @property
    def device(self) -> str:
        """Device of the buckets: "cpu" if GPUs are shared, as NCCL refuses two ranks on one GPU."""
        return "cuda" if torch.cuda.is_available() and not self.shares_gpu else "cpu"

    def group(self, store: dist.Store, rank: int, world: int) -> Group:
        """Creates a separate process group of the senders, followed by every engine worker."""
        prefixed = dist.PrefixStore("weights", store)
        deadline = timedelta(seconds=self.seconds)
        group: dist.ProcessGroupGloo | dist.ProcessGroupNCCL
        if self.device == "cpu":
            meeting = timedelta(seconds=self.join_seconds)
            group = dist.ProcessGroupGloo(prefixed, rank, world, meeting)
            group._set_default_timeout(deadline)
        else:
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = deadline
            group = dist.ProcessGroupNCCL(prefixed, rank, world, options)
        return cast(Group, group)


class Slice(NamedTuple):
    """The place of a tensor in a bucket."""

    meta: WeightMeta
    start: int  # first byte
    stop: int


class Bucket(NamedTuple):
    """The tensors of one broadcast."""

    slices: list[Slice]
    size: int  # bytes


def buckets(metas: Iterable[WeightMeta], limit: int = BUCKET_BYTES) -> Iterator[Bucket]:
    """Groups tensors into broadcasts of at most `limit` bytes, the same on both sides.

    A larger tensor is sent alone.
    """
    slices: list[Slice] = []
    used = 0
    for meta in metas:
        size = math.prod(meta.shape) * getattr(torch, meta.dtype).itemsize
        if slices and used + size > limit:
            yield Bucket(slices, padded(used))
            slices = []
            used = 0
        slices.append(Slice(meta, used, used + size))
        used += -(-size // 16) * 16  # a view as another dtype needs an aligned start
    yield Bucket(slices, padded(used))


def padded(size: int) -> int:
    """Returns the size in bytes of a bucket whose tensors take `size` bytes."""
    return -(-size // ROW_BYTES) * ROW_BYTES


def tensor_in(buffer: Tensor, place: Slice) -> Tensor:
    """Returns a view of one tensor in a bucket."""
    flat = buffer[place.start : place.stop].view(getattr(torch, place.meta.dtype))
    return flat.view(place.meta.shape)


def gathered(weights: Iterator[tuple[str, Tensor | None]], wire: Wire) -> Iterator[Tensor]:
    """Gathers named weights into buffers to broadcast, which are empty if all tensors are None.

    Raises ValueError unless the names match what `wire` announces.
    """
    for bucket in buckets(wire.metas):
        buffer = torch.empty(0, dtype=torch.uint8, device=wire.device)
        for place in bucket.slices:
            name, tensor = next(weights, ("nothing", None))
            if name != place.meta.name:
                raise ValueError(f"the policy sends {name} where {place.meta.name} was announced")
            if tensor is not None:
                buffer = buffer if len(buffer) else buffer.new_empty(bucket.size)
                tensor_in(buffer, place).copy_(tensor)
        yield buffer


def digest(buffer: Tensor) -> Tensor:
    """Digests a bucket's bytes and their places, int64 [1]; does not wait for the device."""
    return row_digests(row_digests(buffer.view(-1, ROW_BYTES))[None])


def checksum(digests: list[Tensor]) -> int:
    """Combines the digests of all buckets, in order, into one number; 0 without digests."""
    return int(row_digests(torch.cat(digests)[None])) if digests else 0


class Sender:
    """The trainer's side of weight updates. Every rank has a sender.

    Rank 0 joins the engines; under NCCL, the other ranks on its node do so too. All of them gather
    and broadcast in the same order, so ranks never wait for each other in a circle.
    """

    joined: ClassVar["Sender | None"] = None  # this process's sender

    def __init__(self, policy: Source, timeouts: "Timeouts", shares_gpu: bool):
        self.policy = policy
        base = getattr(policy, "base", None)
        metas = policy.weight_metas()
        self.wire = Wire(metas, waits.ANSWER_SECONDS, timeouts.sync, shares_gpu, base)
        self.group: Group | None = None  # ranks on rank 0's node, and the engines' workers
        self.rank = 0  # this rank's number in that group
        self.store: dist.Store | None = None  # the store where they met
        self.aborted = False
        self.staged: Iterator[Tensor] | None = None  # buffers, the first of them gathered

    @property
    def metas(self) -> list[WeightMeta]:
        """Names, shapes and types of the tensors, in the order in which they are sent."""
        return self.wire.metas

    def join(self, store: dist.Store, rank: int, world: int) -> None:
        """Joins the engines' workers, which meet at `store`; called only on rank 0's node."""
        self.group = self.wire.group(store, rank, world)
        self.store = store
        self.rank = rank
        self.aborted = False
        Sender.joined = self

    @classmethod
    def abort(cls) -> None:
        """Ends the update that this process sends; called from a different thread than `send`.

        Under NCCL, nothing else ends it: a lost engine leaves the others waiting in their kernels.
        Gloo's own abort does nothing, so `finish` only stops waiting. Engines see CUT.
        """
        if cls.joined:
            cls.joined.aborted = True
            if cls.joined.store:
                cls.joined.store.set(CUT, "")
            if cls.joined.group:
                cls.joined.group.abort()

    def stage(self) -> None:
        """Gathers the first bucket while the engines still generate; collective over the ranks."""
        packed = gathered(self.policy.named_weights(), self.wire)
        self.staged = itertools.chain([next(packed)], packed)

    def send(self, verify: bool) -> int:
        """Gathers all weights. Rank 0 broadcasts them; others on its node pass them on. Collective.

        Rank 0 returns their checksum if `verify`, else 0. Raises RuntimeError, after the last
        gather, if a receiver is gone or the deadline has passed.
        """
        packed = self.staged or gathered(self.policy.named_weights(), self.wire)
        self.staged = None
        digests: list[Tensor] = []
        on_their_way: deque[dist.Work] = deque()
        streams = self.wire.device == "cuda"
        spare = torch.empty(self.passed_on(), dtype=torch.uint8, device=self.wire.device)
        try:
            for buffer, bucket in zip(packed, buckets(self.metas), strict=True):
                if not self.group:
                    continue
                if verify and self.rank == 0:
                    digests.append(digest(buffer))
                if self.rank and not len(buffer):
                    buffer = spare[: bucket.size]
                on_their_way.append(self.group.broadcast(buffer, 0))
                if streams:  # kernels of two groups need one order on all GPUs (nccl#195)
                    on_their_way[-1].wait()
                self.finish(on_their_way, AHEAD if streams else 0)
            self.finish(on_their_way, 0)
        except RuntimeError:
            deque(packed, maxlen=0)  # the other ranks still take part in the gathering
            raise
        return checksum(digests)

    def passed_on(self) -> int:
        """Returns the bytes of the largest bucket if this rank only passes buckets on, else 0."""
        return max(bucket.size for bucket in buckets(self.metas)) if self.rank else 0

    def finish(self, broadcasts: deque[dist.Work], left: int) -> None:
        """Waits until at most `left` broadcasts are pending.

        Raises RuntimeError if the update was ended or the deadline has passed. NCCL's `wait()` only
        orders streams and does not notice a lost engine; gloo's would wait for a sender that has
        given up.
        """
        deadline = time.monotonic() + self.wire.seconds
        for _ in range(len(broadcasts) - left):
            work = broadcasts.popleft()
            while not work.is_completed() and not self.aborted:
                if time.monotonic() > deadline:
                    self.abort()
                time.sleep(1e-3)
            if not self.aborted:
                work.wait()
        if self.aborted:
            raise RuntimeError(
                "the broadcast of weights was ended: an engine is lost, or "
                f"{self.wire.seconds:.0f} s have passed"
            )


@functools.cache
def keys(count: int, device: torch.device) -> Tensor:
    """Draws odd numbers, int64: any change to a word changes its product with an odd number."""
    draw = torch.Generator().manual_seed(count)
    return (torch.randint(-(1 << 62), 1 << 62, (count,), generator=draw) * 2 + 1).to(device)


def row_digests(rows_RC: Tensor) -> Tensor:
    """Digests the bits of each row and their places, int64 [R]."""
    size = rows_RC.element_size()
    narrow = size < 4 and rows_RC.shape[1] * size % 4 == 0
    words_RC = rows_RC.contiguous().view(torch.int32 if narrow else INTEGERS[size])
    keys_C = keys(words_RC.shape[1], words_RC.device)
    parts = words_RC.split(1 + words_at_once(rows_RC.device) // (1 + len(keys_C)))
    return torch.cat([(part.long() * keys_C).sum(1) for part in parts])


def words_at_once(device: torch.device) -> int:
    """Returns the number of words that a device digests at once."""
    return WORDS if device.type == "cpu" else GPU_WORDS
