"""What a weight update costs an engine that is busy: 200 updates in flight, one after the other.

    python bench/sync.py [UPDATES]

One engine and one trainer in one process, on the tiny model; streams run all the time. Printed: the
phases of an update, tokens not generated because of updates, requests lost, prompts prefilled
twice, and how time and memory of the last updates compare with the first.
"""

import asyncio
import os
import pickle
import statistics
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
os.environ |= {"OMP_NUM_THREADS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "TORCH_COMPILE_DISABLE": "1"}
os.environ |= {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}

PROMPT, ANSWER = 16, 64  # tokens
RESPONSE = 19  # mean tokens of a response in the tiny job
BETWEEN = 0.25  # seconds of decoding between two updates


def memory(pid: int) -> float:
    """Resident MB of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def counter(name: str) -> float:
    """One of vLLM's own Prometheus counters, over the whole engine."""
    from prometheus_client import REGISTRY

    return sum(
        sample.value
        for metric in REGISTRY.collect()
        for sample in metric.samples
        if sample.name == name
    )


class Load:
    """Streams that restart as soon as they end, each with a prompt of its own."""

    def __init__(self, generator):
        self.generator, self.tokens, self.started, self.finished = generator, 0, 0, 0
        self.running = True

    async def stream(self, i: int) -> None:
        """Answers one prompt after the other until told to stop."""
        while self.running:
            self.started += 1
            prompt = [7 + (self.started * 31 + 5 * j * j + i) % 30 for j in range(PROMPT)]
            (turn,) = await self.generator.generate(prompt, 1, seed=self.started)
            self.tokens += len(turn.token_ids)
            self.finished += 1


async def pair(cfg):
    """A trainer and a generator that hold version 0."""
    from grpo_async import Generator, Trainer

    trainer, generator = Trainer(cfg, 0), Generator(cfg)
    metas = trainer.start(*trainer.open_store(1))
    await generator.start()
    host, port = trainer.open_store(2)
    await asyncio.gather(
        asyncio.to_thread(trainer.join_sync_group, 2),
        generator.join_sync_group(pickle.dumps(cfg), host, port, 1, 2, metas),
    )
    return trainer, generator


async def main() -> None:
    """Measures decoding with and without updates, and prints one table."""
    import configs
    from grpo_async import Config

    updates = int(sys.argv[1]) if len(sys.argv) > 1 else 200
    with tempfile.TemporaryDirectory() as folder:
        flags = ["--run_dir", folder, "--max_response_tokens", str(ANSWER)]
        cfg = configs.load(Config, flags, default="configs/tiny.py")
    trainer, generator = await pair(cfg)
    engine_pid = generator.engine.engine_core.resources.engine_manager.processes[0].pid

    async def update(version: int) -> dict:
        send = asyncio.to_thread(trainer.send_weights)
        _, phases = await asyncio.gather(send, generator.update_weights(version))
        return phases | {"memory": memory(engine_pid), "sender_memory": memory(os.getpid())}

    await update(0)
    load = Load(generator)
    streams = [asyncio.ensure_future(load.stream(i)) for i in range(cfg.max_num_seqs)]
    await asyncio.sleep(2)  # warm
    began, before = time.perf_counter(), load.tokens
    await asyncio.sleep(max(10.0, updates * BETWEEN / 4))
    undisturbed = (load.tokens - before) / (time.perf_counter() - began)
    began, before, rows = time.perf_counter(), load.tokens, []
    for version in range(1, updates + 1):
        await asyncio.sleep(BETWEEN)
        rows.append(await update(version))
    disturbed = (load.tokens - before) / (time.perf_counter() - began)
    load.running = False
    await asyncio.gather(*streams)
    step_tokens = cfg.prompts_per_step * cfg.group_size * RESPONSE
    report(rows, (undisturbed, disturbed), step_tokens, load)
    generator.engine.shutdown()


def report(rows: list[dict], rates: tuple[float, float], step_tokens: int, load: Load) -> None:
    """The table: phases, tokens, requests, and the last tenth of updates against the first."""
    seconds = [r["sync_pause"] + r["sync_transfer"] + r["sync_resume"] for r in rows]
    tenth = max(1, len(rows) // 10)
    first, last = rows[tenth : 2 * tenth] or rows, rows[-tenth:]  # the very first fill caches
    print(f"{len(rows)} updates in flight, median ms of each phase:")
    for phase in ("sync_pause", "sync_transfer", "sync_resume"):
        print(f"  {phase:16} {1e3 * statistics.median(r[phase] for r in rows):8.1f}")
    lost = statistics.median(seconds) * rates[0]
    print(f"tokens/s undisturbed {rates[0]:8.0f}")
    print(f"tokens/s at {1 / BETWEEN:.0f} updates/s {rates[1]:7.0f}")
    print(f"tokens not generated per update {lost:8.0f}")
    print(f"  of a step's {step_tokens:6} tokens      {lost / step_tokens:8.2%}   (goal 3 %)")
    prompts = counter("vllm:prompt_tokens_total") / PROMPT
    print(f"requests lost                {load.started - load.finished:8d}")
    print(f"requests prefilled twice     {prompts - load.started:8.0f}")
    print(f"preemptions                  {counter('vllm:num_preemptions_total'):8.0f}")

    def slope(key: str) -> float:
        return statistics.median(r[key] for r in last) / statistics.median(r[key] for r in first)

    print(f"last tenth / second tenth: transfer time {slope('sync_transfer'):.2f}, ", end="")
    print(f"engine memory {slope('memory'):.3f}, sender memory {slope('sender_memory'):.3f}")


if __name__ == "__main__":
    asyncio.run(main())
