"""What the driver costs at the size of Nemotron 3 Super: 256 x 16 samples a step, 144 engines.

    python bench/controller.py [STEPS] [BYTES of rollouts.jsonl a group]

The real `Run`, `Engines`, `Dispatcher`, `RolloutBuffer`, `plan_step` and `Log` run against actors
that do nothing and answer after a few milliseconds, in any order. Seconds are CPU seconds of this
process, so the stubs count as well; what Ray itself spends on a call does not, as none is made.
"""

import asyncio
import concurrent.futures
import contextlib
import os
import pickle
import random
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import ray

sys.path.insert(0, str(Path(__file__).parent.parent))
import grpo_async  # noqa: E402
from envs.episode import SampleInfo  # noqa: E402
from runtime import cluster, fleet, modes  # noqa: E402
from runtime.fleet import Received  # noqa: E402
from runtime.placement import Places  # noqa: E402

PROMPTS = 256
SAMPLES = 16
LONGEST = 65536
PHASES = {"sync_pause": 0.0, "sync_transfer": 0.0, "sync_resume": 0.0}
EDGE = 3  # steps at either end, in which the pipeline fills and drains
ANSWERS = {
    "open_store": ("127.0.0.1", 0),
    "call": ("node", [0]),
    "start": [],
    "generate": [None],
    "probe_gaps": [0.0] * 144,
    "send_weights": 0,
    "update_weights": Received(PHASES, []),
}
TABLE = {("position", str(i)): [1e6, 1e6, 1e4, 1e3, 0.1] for i in range(12)}
STEP = {f"metric_{i}": 1.0 for i in range(21)}, TABLE, []


def infos(numbers: np.random.Generator) -> bytes:
    """A group's SampleInfos, as they come over the wire."""
    lengths = numbers.lognormal(9, 1, SAMPLES).clip(64, LONGEST).astype(int).tolist()
    return pickle.dumps([info(length) for length in lengths])


def info(tokens: int) -> SampleInfo:
    """What the driver knows of a sample."""
    return SampleInfo(
        tokens=tokens,
        trained_tokens=tokens - 9,
        reward=tokens % 2,
        score=tokens % 2,
        has_gradient=True,
        response_tokens=tokens - 9,
        oldest_version=0,
        newest_version=0,
        truncated=False,
        env="math",
    )


TEXT = int(sys.argv[2]) if len(sys.argv) > 2 else 0
GROUPS = [infos(np.random.default_rng(i)) for i in range(500)]


class Answer:
    """What a call returns: awaited as an ObjectRef would be, or turned into a future."""

    def __init__(self, value: bytes, seconds: float = 0.0):
        self.value = value
        self.seconds = seconds

    def __await__(self):
        if self.seconds:
            yield from asyncio.sleep(self.seconds).__await__()
        return pickle.loads(self.value)

    def future(self) -> concurrent.futures.Future:
        """The answer for those who wait with a timeout."""
        future = concurrent.futures.Future()
        future.set_result(pickle.loads(self.value))
        return future


class Actor:
    """Answers every method at once, and `rollout_group` after a while."""

    def __getattr__(self, name: str):
        answer = Answer(pickle.dumps(ANSWERS.get(name)))
        method = SimpleNamespace(remote=lambda *args: answer)
        several = {"rollout_group": self.roll_out, "train_step": self.train}
        with_options = SimpleNamespace(remote=several.get(name, method.remote))
        method.options = lambda **_: with_options
        return method

    def train(self, *args) -> list[Answer]:
        """Metrics, mismatch table and logprobs of a rank."""
        return [Answer(pickle.dumps(part)) for part in STEP]

    def roll_out(self, *args) -> tuple[Answer, None, Answer]:
        """Infos of a group, the reference to its samples, and its lines."""
        infos = Answer(random.choice(GROUPS), random.uniform(0.001, 0.02))
        return infos, None, Answer(pickle.dumps(b"x" * TEXT))


def measure(steps: int) -> tuple[np.ndarray, dict[str, float]]:
    """One run; for each step, when it is planned: CPU seconds, those of its plan, and bytes.

    Also the bytes a step of the files that grow.
    """
    marks = []
    plan_step = grpo_async.plan_step

    def plan(groups, cfg):
        began = time.process_time()
        planned = plan_step(groups, cfg)
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        marks.append((began, time.process_time() - began, pages * os.sysconf("SC_PAGE_SIZE")))
        return planned

    grpo_async.plan_step = plan
    ray.cluster_resources = dict
    handle = SimpleNamespace(remote=lambda *args: Actor())
    cluster.actor = fleet.actor = lambda cls, gpus, cfg, **options: handle
    with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as nowhere:
        cfg = grpo_async.Config(
            run_dir=folder,
            steps=steps + 2 * EDGE + 1,
            prompts_per_step=PROMPTS,
            group_size=SAMPLES,
            rollout_workers=32,
            save_period=0,
            engine={"count": 144},
            policy={"ranks": 128},
        )
        run = grpo_async.Run(cfg, [{"_line": 1}], [])
        run.cluster.places = Places([], [""] * 144, [""] * 128)
        run.cluster.shares_gpus = lambda: False
        run.save = lambda: asyncio.sleep(0)
        with contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
            asyncio.run(run.run(modes.loops(run)))
        files = [path for path in Path(folder).iterdir() if path.stem != "starts"]
        grown = [path for path in files if path.suffix == ".jsonl" or "tfevents" in path.name]
        sizes = {path.name.split(".")[0]: path.stat().st_size / cfg.steps for path in grown}
    return np.array(marks), sizes


def main() -> None:
    """Prints one table."""
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 40
    marks, files = measure(steps)
    seconds, plans, size = marks[EDGE:-EDGE].T
    ends = [steps // 4, steps // 2, steps]
    cost = np.diff(seconds[[0, *ends]]) / np.diff([0, *ends])
    print(f"{'groups trained':24}", *(f"{end * PROMPTS:9,}" for end in ends))
    print(f"{'driver ms a group':24}", *(f"{1e3 * c / PROMPTS:9.3f}" for c in cost))
    print(f"{'driver s a step':24}", *(f"{c:9.3f}" for c in cost))
    print(f"{'share of a 60 s step':24}", *(f"{c / 60:9.3%}" for c in cost), "  (goal 0.5%)")
    print(f"{'last over first':24} {cost[-1] / cost[0]:9.2f}   (linear: 1)")
    share = plans[1:].sum() / (seconds[-1] - seconds[0])
    print(f"{'packing plan':24} {plans.mean():9.4f} s a step, {share:.0%} of the driver")
    growth = 100 * np.polyfit(np.arange(steps + 1), size, 1)[0] / size[-1]
    print(f"{'resident memory':24} {size[-1] / 2**20:9.0f} MiB, {growth:+.2%} in 100 steps")
    print(f"{'bytes a step':24}", ", ".join(f"{n} {b:,.0f}" for n, b in sorted(files.items()) if b))


if __name__ == "__main__":
    main()
