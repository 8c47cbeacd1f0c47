"""Measures the driver at the size of Nemotron 3 Super: 256 x 16 samples per step, 144 engines.

    python bench/controller.py [STEPS] [BYTES of rollouts.jsonl per group] [TIMES this size]

The real `Run`, `Engines`, `Dispatcher`, `RolloutBuffer`, `plan_step` and `Log` run against actors
that do nothing and answer after a few milliseconds, in any order. Seconds are CPU seconds of this
process. They include the time that the stubs take to make calls and unpickle replies, which a
separate line states, but no sleep. Ray's own cost per call is not included, because no Ray call is
made. If the machine is busy with other work, the first decile of the steps is the most reliable
figure.
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
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import ray

sys.path.insert(0, str(Path(__file__).parent.parent))
import grpo_async  # noqa: E402
from envs import services  # noqa: E402
from rollout.episode import SampleInfo  # noqa: E402
from runtime.engines import fleet  # noqa: E402
from runtime.engines.fleet import Received  # noqa: E402
from runtime.processes import cluster  # noqa: E402
from runtime.processes.placement import Places  # noqa: E402
from runtime.startup import modes  # noqa: E402

TIMES = int(sys.argv[3]) if len(sys.argv) > 3 else 1
PROMPTS = 256 * TIMES
ENGINES = 144 * TIMES
RANKS = 128 * TIMES
WORKERS = 32 * TIMES
GOAL = {1: 0.001, 10: 0.01}  # share of a 60 s step
SAMPLES = 16
LONGEST = 65536
PHASES = {"sync_pause": 0.0, "sync_transfer": 0.0, "sync_resume": 0.0}
EDGE = 3  # steps at either end, during which the pipeline fills and drains
ANSWERS = {"open_store": ("127.0.0.1", 0), "open_sync_group": (b"", "127.0.0.1", 0), "start": []}
ANSWERS |= {"join_sync_group": [1], "generate": [None], "probe_gaps": [0.0] * ENGINES}
ANSWERS |= {"send_weights": 0, "update_weights": Received(PHASES, [], {"wait_for_training": 0.0})}
TABLE = {("position", str(i)): [1e6, 1e6, 1e4, 1e3, 0.1] for i in range(12)}
MEASURED = dict.fromkeys((f"metric_{i}" for i in range(20)), 1.0)
STEP = MEASURED | {"train_seconds": 1.0, "train_tokens": 1.0}, TABLE, []


def infos(numbers: np.random.Generator) -> bytes:
    """Builds a group's SampleInfos, as they arrive over the wire."""
    lengths = numbers.lognormal(9, 1, SAMPLES).clip(64, LONGEST).astype(int).tolist()
    same = {"has_gradient": True, "oldest_version": 0, "newest_version": 0, "truncated": False}
    return pickle.dumps(
        [
            SampleInfo(n, n - 9, n % 2, n % 2, response_tokens=n - 9, env="math", **same)
            for n in lengths
        ]
    )


TEXT = int(sys.argv[2]) if len(sys.argv) > 2 else 20_000
GROUPS = [infos(np.random.default_rng(i)) for i in range(500)]


class Stubs:
    """CPU seconds of the stand-ins for Ray and the actors."""

    seconds = 0.0

    @classmethod
    def load(cls, value: bytes) -> Any:
        """Unpickles the answer of an actor."""
        began = time.thread_time()
        loaded = pickle.loads(value)
        cls.seconds += time.thread_time() - began
        return loaded

    @classmethod
    def timed(cls, method: Callable) -> Callable:
        """Wraps an actor's method so that its CPU seconds are counted."""

        def call(*args):
            began = time.thread_time()
            answer = method(*args)
            cls.seconds += time.thread_time() - began
            return answer

        return call


class Answer:
    """The result of a call: awaited like an ObjectRef, or turned into a future."""

    def __init__(self, value: bytes, seconds: float = 0.0):
        self.value = value
        self.seconds = seconds

    def __await__(self):
        if self.seconds:
            yield from asyncio.sleep(self.seconds).__await__()
        return Stubs.load(self.value)

    def future(self) -> concurrent.futures.Future:
        """Returns the answer as a future, to be awaited with a timeout."""
        future = concurrent.futures.Future()
        future.set_result(Stubs.load(self.value))
        return future


class Actor:
    """A stand-in that answers every method at once, and `rollout_group` after a while."""

    def __getattr__(self, name: str):
        answer = Answer(pickle.dumps(ANSWERS.get(name)))
        method = SimpleNamespace(remote=lambda *args: answer)
        own = {"rollout_group": self.roll_out, "train_step": self.train, "call": self.answer_call}
        method.remote = Stubs.timed(own.get(name, method.remote))
        method.options = lambda **_: method
        if name == "watch":
            method.remote = lambda: asyncio.get_running_loop().create_future()
        setattr(self, name, method)
        return method

    def answer_call(self, function, *args) -> Answer:
        """Answers with a worker's report on judges, or a trainer rank's place."""
        report = services.Report({}, Counter())
        return Answer(pickle.dumps(report if function is services.report else ("node", [0])))

    def train(self, *args) -> list[Answer]:
        """Answers with a rank's metrics, mismatch table and logprobs."""
        return [Answer(pickle.dumps(part)) for part in STEP]

    def roll_out(self, *args) -> tuple[Answer, None, Answer]:
        """Answers with a group's infos, the reference to its samples, and its lines."""
        infos = Answer(random.choice(GROUPS), random.uniform(0.001, 0.02))
        return infos, None, Answer(pickle.dumps(b"x" * TEXT))


def measure(steps: int) -> tuple[np.ndarray, dict[str, float]]:
    """Measures one run.

    Returns, for each step at the time it is planned, the CPU seconds so far, those of its plan and
    of the stubs, and the bytes in memory. Also returns the bytes per step by which files grow.
    """
    marks = []
    plan_step = grpo_async.plan_step

    def plan(groups, cfg, more):
        began = time.process_time()
        of_thread = time.thread_time()  # the loop runs in another thread
        planned = plan_step(groups, cfg, more)
        of_thread = time.thread_time() - of_thread
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        marks.append((began, of_thread, Stubs.seconds, pages * os.sysconf("SC_PAGE_SIZE")))
        return planned

    grpo_async.plan_step = plan
    ray.cluster_resources = dict
    handle = SimpleNamespace(remote=lambda *args: Actor())
    cluster.actor = fleet.actor = lambda cls, gpus, cfg, **options: handle
    with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as nowhere:
        sizes = {"prompts_per_step": PROMPTS, "group_size": SAMPLES, "rollout_workers": WORKERS}
        sizes |= {"engine": {"count": ENGINES}, "policy": {"ranks": RANKS}}
        count = steps + 2 * EDGE + 1
        cfg = grpo_async.Config(run_dir=folder, steps=count, save_period=0, **sizes)
        run = grpo_async.Run(cfg, [{"_line": 1}], [])
        run.cluster.places = Places([], [""] * ENGINES, [""] * RANKS)
        run.cluster.shares_gpus = lambda: False
        run.save = lambda: asyncio.sleep(0)
        cluster.search_rarely()  # as Cluster does on entry
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
    seconds, plans, stubs, size = marks[EDGE:-EDGE].T
    ends = [steps // 4, steps // 2, steps]
    cost = np.diff(seconds[[0, *ends]]) / np.diff([0, *ends])
    print(f"{'groups trained':24}", *(f"{end * PROMPTS:9,}" for end in ends))
    print(f"{'driver ms a group':24}", *(f"{1e3 * c / PROMPTS:9.3f}" for c in cost))
    print(f"{'driver s a step':24}", *(f"{c:9.3f}" for c in cost))
    goal = f"  (goal {GOAL.get(TIMES, 0.01):.1%})"
    print(f"{'share of a 60 s step':24}", *(f"{c / 60:9.3%}" for c in cost), goal)
    quiet = np.percentile(np.diff(seconds), 10)
    told = f"{1e3 * quiet / PROMPTS:9.3f} ms a group, {quiet / 60:.3%} of a 60 s step"
    print(f"{'first decile of steps':24}{told}")
    share = (stubs[-1] - stubs[0]) / (seconds[-1] - seconds[0])
    print(f"{'of which the stubs':24} {1e3 * share * quiet / PROMPTS:8.3f} ms a group, {share:.0%}")
    print(f"{'last over first':24} {cost[-1] / cost[0]:9.2f}   (linear: 1)")
    share = plans[1:].sum() / (seconds[-1] - seconds[0])
    print(f"{'packing plan':24} {plans.mean():9.4f} s a step, {share:.0%} of the driver")
    growth = 100 * np.polyfit(np.arange(steps + 1), size, 1)[0] / size[-1]
    print(f"{'resident memory':24} {size[-1] / 2**20:9.0f} MiB, {growth:+.2%} in 100 steps")
    print(f"{'bytes a step':24}", ", ".join(f"{n} {b:,.0f}" for n, b in sorted(files.items()) if b))


if __name__ == "__main__":
    main()
