"""How weights travel: trainer rank 0 broadcasts buckets, the engines' workers load them.

There is one code path for CPU and GPU; only the backend differs (gloo or nccl). vLLM's own transfer
engines cannot end an update that has lost an engine: docs/grpo_async.md, detail 26.

Under NCCL the trainer ranks on rank 0's node, its node-mates, are in the group as well. They only
pass on what comes: so NCCL's rings leave the node by the network cards of all of its GPUs.
"""

import functools
import itertools
import math
import time
from collections import deque
from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from core import waits
from policy import WeightMeta

if TYPE_CHECKING:
    from policy.sync.adapter_sync import Base
    from settings.config import Timeouts

BUCKET_BYTES = 256 << 20
AHEAD = 3  # broadcasts that a GPU may still have to do when the next bucket is asked for
WORDS = 1 << 18  # that are digested at once, as int64: they fit into a core's cache
GPU_WORDS = 1 << 22  # 32 MiB: few kernels, and little memory beside the KV
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
CUT = "cut"  # in the store of a group whose update was ended
ROW_BYTES = 1 << 14  # that a digest adds up at once, of which a bucket is a multiple


class CutOff(RuntimeError):
    """An update ended before all of it had come. The next one can repeat it."""


class Wire(NamedTuple):
    """What both sides of a weight update know before it. It is pickled to the engines."""

    metas: list[WeightMeta]  # of all tensors, in the order in which they are sent
    join_seconds: float  # deadline of meeting
    seconds: float  # deadline of a broadcast
    shares_gpu: bool  # whether an engine and a trainer rank may have the same GPU
    base: "Base | None" = None  # what engines add the tensors to; None: they are the weights

    def store(self, host: str, port: int, world: int) -> dist.TCPStore:
        """The store at which rank 0 of the group listens."""
        return dist.TCPStore(host, port, world, False, timedelta(seconds=self.join_seconds))

    @property
    def device(self) -> str:
        """Where buckets lie. NCCL refuses two ranks on one GPU: a shared GPU syncs through gloo."""
        return "cuda" if torch.cuda.is_available() and not self.shares_gpu else "cpu"

    def group(
        self, store: dist.Store, rank: int, world: int
    ) -> "dist.ProcessGroupGloo | dist.ProcessGroupNCCL":
        """A process group beside torch's default one: senders, then every engine worker."""
        prefixed = dist.PrefixStore("weights", store)
        deadline = timedelta(seconds=self.seconds)
        if self.device == "cpu":
            meeting = timedelta(seconds=self.join_seconds)
            group = dist.ProcessGroupGloo(prefixed, rank, world, meeting)
            group._set_default_timeout(deadline)
            return group
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = deadline
        return dist.ProcessGroupNCCL(prefixed, rank, world, options)


class Slice(NamedTuple):
    """Where a tensor lies in a bucket."""

    meta: WeightMeta
    start: int  # byte
    stop: int


class Bucket(NamedTuple):
    """The tensors of one broadcast."""

    slices: list[Slice]
    size: int  # bytes


def buckets(metas: Iterable[WeightMeta], limit: int = BUCKET_BYTES) -> Iterator[Bucket]:
    """Cuts tensors into broadcasts of at most `limit` bytes, alike on both sides.

    A larger tensor travels alone.
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
    """Bytes of a bucket whose tensors take `size`."""
    return -(-size // ROW_BYTES) * ROW_BYTES


def tensor_in(buffer: Tensor, place: Slice) -> Tensor:
    """A view of one tensor of a bucket."""
    flat = buffer[place.start : place.stop].view(getattr(torch, place.meta.dtype))
    return flat.view(place.meta.shape)


def gathered(weights: Iterator[tuple[str, Tensor | None]], wire: Wire) -> Iterator[Tensor]:
    """Gathers named weights into the buffers to broadcast, empty ones where the policy has none.

    Raises ValueError unless they are those that `wire` announces.
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
    """A number for a bucket's bytes and their places, int64 [1]; waits for no device."""
    return row_digests(row_digests(buffer.view(-1, ROW_BYTES))[None])


def checksum(digests: list[Tensor]) -> int:
    """One number for the digests of all buckets, in order; 0 for none."""
    return int(row_digests(torch.cat(digests)[None])) if digests else 0


class Sender:
    """The trainer's side of weight updates. Every rank has one.

    Only rank 0 joins the engines, and under NCCL its node-mates. On all of them gathers and
    broadcasts follow each other in one order, so none waits for another in a circle.
    """

    joined: ClassVar["Sender | None"] = None  # this process's

    def __init__(self, policy: Any, timeouts: "Timeouts", shares_gpu: bool):
        self.policy = policy  # or what it sends
        base = getattr(policy, "base", None)
        metas = policy.weight_metas()
        self.wire = Wire(metas, waits.ANSWER_SECONDS, timeouts.sync, shares_gpu, base)
        self.group: Any = None  # of rank 0, its node-mates and the engines' workers
        self.rank = 0  # in that group
        self.store: dist.Store | None = None  # where they met
        self.aborted = False
        self.staged: Iterator[Tensor] | None = None  # buffers, the first of them gathered

    @property
    def metas(self) -> list[WeightMeta]:
        """What the policy's tensors look like, in the order in which they are sent."""
        return self.wire.metas

    def join(self, store: dist.Store, rank: int, world: int) -> None:
        """Meets the engines' workers at a store; rank 0 of the trainer and its node-mates do."""
        self.group = self.wire.group(store, rank, world)
        self.store = store
        self.rank = rank
        self.aborted = False
        Sender.joined = self

    @classmethod
    def abort(cls) -> None:
        """Ends the update that this process sends; called in another thread than `send`.

        Under NCCL nothing else does: a lost engine leaves the others waiting in their kernels.
        Gloo's own abort does nothing, and `finish` only stops waiting. Engines see CUT.
        """
        if cls.joined:
            cls.joined.aborted = True
            if cls.joined.store:
                cls.joined.store.set(CUT, "")
            cls.joined.group.abort()

    def stage(self) -> None:
        """Gathers the first bucket while the engines still generate; collective over the ranks."""
        packed = gathered(self.policy.named_weights(), self.wire)
        self.staged = itertools.chain([next(packed)], packed)

    def send(self, verify: bool) -> int:
        """Gathers all weights; rank 0 broadcasts them, node-mates pass them on. Collective.

        Rank 0 returns a checksum of them if `verify`, else 0. Raises RuntimeError where a receiver
        is gone or the deadline is over, after the last gather.
        """
        packed = self.staged or gathered(self.policy.named_weights(), self.wire)
        self.staged = None
        digests: list[Tensor] = []
        on_their_way: deque = deque()
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
            deque(packed, maxlen=0)  # the other ranks take part in the gathering
            raise
        return checksum(digests)

    def passed_on(self) -> int:
        """Bytes of the largest bucket on a node-mate, else 0: room for what it did not gather."""
        return max(bucket.size for bucket in buckets(self.metas)) if self.rank else 0

    def finish(self, broadcasts: deque, left: int) -> None:
        """Waits until at most `left` broadcasts are on their way. Raises RuntimeError.

        `wait()` of NCCL only orders streams: that an engine is gone shows nowhere. Gloo's would
        wait for a sender that has given up.
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
            why = f"an engine is lost, or {self.wire.seconds:.0f} s are over"
            raise RuntimeError(f"the broadcast of weights was ended: {why}")


@functools.cache
def keys(count: int, device: torch.device) -> Tensor:
    """Odd random numbers, int64: whatever changes in a word changes its product with one."""
    draw = torch.Generator().manual_seed(count)
    return (torch.randint(-(1 << 62), 1 << 62, (count,), generator=draw) * 2 + 1).to(device)


def row_digests(rows_RC: Tensor) -> Tensor:
    """A number for the bits of each row and their places, int64 [R]."""
    size = rows_RC.element_size()
    narrow = size < 4 and rows_RC.shape[1] * size % 4 == 0
    words_RC = rows_RC.contiguous().view(torch.int32 if narrow else INTEGERS[size])
    keys_C = keys(words_RC.shape[1], words_RC.device)
    parts = words_RC.split(1 + words_at_once(rows_RC.device) // (1 + len(keys_C)))
    return torch.cat([(part.long() * keys_C).sum(1) for part in parts])


def words_at_once(device: torch.device) -> int:
    """How many words a device digests at once."""
    return WORDS if device.type == "cpu" else GPU_WORDS
