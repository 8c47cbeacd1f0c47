"""Measures what a weight update costs a busy engine: 200 updates in flight, one after the other.

    python bench/sync.py [UPDATES] [--flag value ...]
    python bench/sync.py traffic [RANKS [MATES [WORKERS]]] [--flag value ...]

One engine and one trainer, each in its own process, use the tiny model; streams run all the time.
Prints the phases of an update, the tokens not generated because of it (from pairs of windows of
equal length, with and without an update), requests lost, prompts prefilled twice, and how the time
and memory of the last updates compare with those of the first.

`traffic` counts what each process receives in one update, against the minimum: RANKS trainer ranks
(4), MATES of them in the group next to rank 0 (0), and engine WORKERS (2) that load nothing.

Flags are grpo_async.py's: with --policy.lora_rank 8, updates carry only adapters.
"""

import asyncio
import functools
import math
import multiprocessing
import os
import pickle
import statistics
import sys
import tempfile
import time
from collections import deque
from collections.abc import Awaitable, Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
os.environ |= {"OMP_NUM_THREADS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "TORCH_COMPILE_DISABLE": "1"}
os.environ |= {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}

import psutil  # noqa: E402  # installed with vLLM
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from policy.sync.receiver import WeightReceiver  # noqa: E402
from policy.sync.weight_sync import Group, buckets  # noqa: E402
from rollout.episode import Request  # noqa: E402

if TYPE_CHECKING:
    from grpo_async import Config

Done = TypeVar("Done")
PROMPT = 16  # tokens
ANSWER = 64
RESPONSE = 22  # mean tokens of a response in the tiny job
WINDOW = 0.25  # seconds of decoding, with an update or without


def counter(name: str) -> float:
    """Reads one of vLLM's own Prometheus counters, over the whole engine."""
    from prometheus_client import REGISTRY

    return sum(
        sample.value
        for metric in REGISTRY.collect()
        for sample in metric.samples
        if sample.name == name
    )


class Load:
    """Streams that restart as soon as they end, each with its own prompt."""

    def __init__(self, generator):
        self.generator = generator
        self.tokens = 0
        self.started = 0
        self.finished = 0
        self.running = True

    async def stream(self, i: int) -> None:
        """Answers one prompt after the other while `running`."""
        while self.running:
            self.started += 1
            prompt = [7 + (self.started * 31 + 5 * j * j + i) % 30 for j in range(PROMPT)]
            request = Request(f"{self.started}", prompt, 1, self.started, [], 65536)
            (turn,) = await self.generator.generate(request)
            self.tokens += len(turn.token_ids)
            self.finished += 1


def trainer(method: str, *args):
    """Calls this process's trainer, which the first call ("start") creates."""
    if method == "start":
        from grpo_async import Trainer

        trainer.rank = Trainer(*args)
        return trainer.rank.start(0, trainer.rank.open_store(1))
    if method == "stage":
        return trainer.rank.sender.stage()
    return getattr(trainer.rank, method)(*args)


async def pair(cfg, call):
    """Starts a generator that holds version 0 of the trainer that `call` reaches."""
    from grpo_async import Generator

    generator = Generator(cfg)
    await call("start", cfg)
    await generator.start()
    meeting = await call("open_sync_group", 2)
    join = generator.join_sync_group(*meeting, 1, 2)
    await asyncio.gather(call("join_sync_group", meeting, 0, 2), join)
    return generator


def words() -> tuple[list[str], list[str]]:
    """Splits the command line before its first flag."""
    given = sys.argv[1:]
    first = next((i for i, word in enumerate(given) if word.startswith("--")), len(given))
    return given[:first], given[first:]


async def main() -> None:
    """Measures decoding with and without updates, and prints one table."""
    from grpo_async import Config
    from runtime.startup import preflight

    numbers, given = words()
    updates = int(numbers[0]) if numbers else 200
    with tempfile.TemporaryDirectory() as folder:
        flags = ["--run_dir", folder, "--sampling.max_response_tokens", str(ANSWER), *given]
        cfg = preflight.load(Config, flags, default="configs/tiny.py")
    process = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
    call = functools.partial(asyncio.get_running_loop().run_in_executor, process, trainer)
    generator = await pair(cfg, call)
    manager = generator.engine.engine_core.resources.engine_manager
    engine, sender = (psutil.Process(p) for p in (manager.processes[0].pid, *process._processes))

    async def update(version: int) -> dict:
        send = call("send_weights", False)
        _, received = await asyncio.gather(send, generator.update_weights(version, False))
        held = {"memory": engine.memory_info().rss, "sender_memory": sender.memory_info().rss}
        return received[0] | held

    await update(0)
    load = Load(generator)
    streams = [
        asyncio.ensure_future(load.stream(i)) for i in range(cfg.engine.arguments["max_num_seqs"])
    ]
    await asyncio.sleep(2)  # warm-up

    async def window(work: Awaitable[Done]) -> tuple[float, Done]:
        began = time.perf_counter()
        before = counter("vllm:generation_tokens_total")
        done = await work
        await asyncio.sleep(WINDOW - (time.perf_counter() - began))
        made = counter("vllm:generation_tokens_total") - before
        return made / (time.perf_counter() - began) * WINDOW, done

    rows = []
    for version in range(1, updates + 1):
        undisturbed, _ = await window(asyncio.sleep(0))
        await call("stage")  # as at the end of a training step
        disturbed, row = await window(update(version))
        rows.append(row | {"undisturbed": undisturbed, "lost": undisturbed - disturbed})
    load.running = False
    await asyncio.gather(*streams)
    step_tokens = cfg.prompts_per_step * cfg.group_size * RESPONSE
    report(rows, step_tokens, load)
    generator.engine.shutdown()


def report(rows: list[dict], step_tokens: int, load: Load) -> None:
    """Prints phases, tokens, requests, and how the last updates compare with the first ones."""
    tenth = max(1, len(rows) // 10)
    first = rows[tenth : 2 * tenth] or rows  # the very first ones fill caches
    last = rows[-tenth:]
    print(f"{len(rows)} updates in flight, median ms of each phase:")
    for phase in ("sync_pause", "sync_transfer", "sync_resume"):
        print(f"  {phase:16} {1e3 * statistics.median(r[phase] for r in rows):8.1f}")
    lost = statistics.fmean(r["lost"] for r in rows)
    error = statistics.stdev(r["lost"] for r in rows) / len(rows) ** 0.5
    rate = statistics.fmean(r["undisturbed"] for r in rows) / WINDOW
    print(f"tokens/s undisturbed {rate:20.0f}")
    print(f"tokens not generated per update {lost:9.0f} +- {error:.0f}")
    print(f"  of a step's {step_tokens:6} tokens      {lost / step_tokens:8.2%}   (goal 3 %)")
    prompts = counter("vllm:prompt_tokens_total") / PROMPT
    print(f"requests lost                {load.started - load.finished:8d}")
    print(f"requests prefilled twice     {prompts - load.started:8.0f}")
    print(f"preemptions                  {counter('vllm:num_preemptions_total'):8.0f}")

    def slope(key: str) -> float:
        return statistics.median(r[key] for r in last) / statistics.median(r[key] for r in first)

    print(f"last tenth / second tenth: transfer time {slope('sync_transfer'):.2f}, ", end="")
    print(f"engine memory {slope('memory'):.3f}, sender memory {slope('sender_memory'):.3f}")


class Counted:
    """A process group that counts what it broadcasts."""

    def __init__(self, group: Group):
        self.group = group
        self.sizes: list[int] = []

    def broadcast(self, buffer: torch.Tensor, root: int) -> dist.Work:
        """Broadcasts as torch's process groups do."""
        self.sizes.append(buffer.nbytes)
        return self.group.broadcast(buffer, root)


class Gathers(TorchDispatchMode):
    """Counts what FSDP gathers from other ranks."""

    def __init__(self):
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        """Calls the function."""
        found = function(*args, **(kwargs or {}))
        if "all_gather" in str(function):
            ranks = dist.get_world_size()
            self.sizes.append(found.nbytes * (ranks - 1) // ranks)
        return found


def of_trainer(pipe: Connection, cfg: "Config", rank: int, senders: int, world: int) -> None:
    """Runs a trainer rank that sends one update; addresses and counts pass through `pipe`."""
    from grpo_async import Trainer

    made = Trainer(cfg)
    if rank == 0:
        pipe.send(made.open_store(cfg.policy.ranks))
    made.start(rank, pipe.recv())
    if rank == 0:
        pipe.send(made.open_sync_group(world))
    meeting = pipe.recv()
    if rank < senders:
        made.join_sync_group(meeting, rank, world)
        made.sender.group = Counted(made.sender.group)
    with Gathers() as gathers:
        made.send_weights(False)
    sent = made.sender.group.sizes if rank < senders else []
    pipe.send((len(gathers.sizes), sum(gathers.sizes), len(sent), sum(sent)))


def of_worker(pipe: Connection, meeting: tuple[bytes, str, int], rank: int, world: int) -> None:
    """Runs a worker of an engine that receives one update and discards it."""
    receiver = WeightReceiver()
    receiver.vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(rank=0))
    receiver.join_sync_group(*meeting, rank, world)
    receiver.sync_group = Counted(receiver.sync_group)
    deque(receiver.incoming([], False), maxlen=0)
    pipe.send((0, 0, len(receiver.sync_group.sizes), sum(receiver.sync_group.sizes)))


def traffic(flags: list[str], ranks: int = 4, mates: int = 0, workers: int = 2) -> None:
    """Sends one update between processes without engines; prints what each of them received."""
    from grpo_async import Config
    from runtime.startup import preflight

    context = multiprocessing.get_context("spawn")
    senders, world = 1 + mates, 1 + mates + workers
    with tempfile.TemporaryDirectory() as folder:
        flags = ["--run_dir", folder, "--policy.ranks", str(ranks), *flags]
        cfg = preflight.load(Config, flags, default="configs/tiny.py")

    def begin(function: Callable[..., None], *args: Any) -> Connection:
        ours, theirs = context.Pipe()
        context.Process(target=function, args=(theirs, *args), daemon=True).start()
        return ours

    trainers = [begin(of_trainer, cfg, rank, senders, world) for rank in range(ranks)]
    for _ in ("the trainers' store", "the group of the update"):
        meeting = trainers[0].recv()
        for pipe in trainers:
            pipe.send(meeting)
    engines = [begin(of_worker, meeting, rank, world) for rank in range(senders, world)]
    wire = pickle.loads(meeting[0])
    whole = sum(math.prod(m.shape) * getattr(torch, m.dtype).itemsize for m in wire.metas)
    print(f"{'':18}{'gathers':>9}{'bytes':>12}{'broadcasts':>12}{'bytes':>12}")
    least = (len(wire.metas), whole * (ranks - 1) // ranks, len(list(buckets(wire.metas))), whole)
    names = [f"trainer rank {rank}" for rank in range(ranks)]
    names += [f"engine worker {i}" for i in range(workers)]
    found = [pipe.recv() for pipe in trainers + engines]
    for name, got in [("least", least), *zip(names, found, strict=True)]:
        print(f"{name:18}{got[0]:9,}{got[1]:12,}{got[2]:12,}{got[3]:12,}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["traffic"]:
        numbers, flags = words()
        traffic(flags, *map(int, numbers[1:]))
    else:
        asyncio.run(main())
