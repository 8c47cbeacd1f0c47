"""Compares trained samples per second with TRL's asynchronous GRPO; both trainers only sleep.

    python bench/vs_trl_async.py [REPETITIONS]   each takes twelve minutes; other work spoils it

What is compared is the system around the trainer: who starts a rollout when, who waits, what is
thrown away. A batch is "trained" by sleeping about as long as its generation takes, so learning
rates do not matter, and samples whose advantage is zero are trained on as well.

TRL's side is vLLM's unmodified server (the CPU build has no `vllm` command, so its module is
started) and TRL's unmodified AsyncRolloutWorker, RolloutQueueDataset and VLLMClient, in the virtual
environment of bench/vs_trl.py. A harness stands in for its trainer: it drains the queue, sleeps,
pauses, resumes and increments the version, as AsyncGRPOTrainer does. No weights travel, which costs
TRL nothing. Ours is the driver, engine, rollout worker and weight sync as shipped, in a copy of
this folder, with a `train_step` that sleeps.

Both engines have the same settings and the same logits processor, `Paced`. It ends each answer at a
length drawn from one log-normal distribution, half of whose variance belongs to the prompt, as hard
questions tend to get long answers. It lets no engine step take less than 12 ms, so that the engine
and not this machine is the limit, as with an accelerator. TRL is measured with one request in
flight per engine seat, and with its default, max_staleness * batch, of which many wait in the
server's queue and age there. Lag is counted from a group's dispatch, the only time that TRL
records; our lag counted from the first token is in brackets.
"""

import contextlib
import itertools
import json
import math
import os
import random
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench import vs_trl  # noqa: E402

try:
    from vllm.v1.sample.logits_processor import LogitsProcessor
    from vllm.v1.sample.logits_processor.builtin import process_dict_updates
except ImportError:  # TRL's environment has no vLLM
    LogitsProcessor = object

FOLDER = Path(os.environ.get("BENCH_FOLDER", "."))  # holds the inputs and what a run writes
LAGS = (1, 4)  # TRL's max_staleness, our max_lag
STEPS = 12  # measured
P = 8
G = 8
SEATS = 16  # requests that the engine runs at once
PACE = 0.012  # minimum seconds per engine step
MEDIAN = 16  # tokens of an answer; the mean is 26
SPREAD = math.sqrt(0.5)  # standard deviation of the log of a length, of prompts and of samples
LONGEST = 192  # every 150th answer is cut off here
TRAIN = 1.25  # seconds for 64 samples, the same as generation: 64 / 16 seats * 26 tokens * 12 ms
STILL = 0.1  # seconds without an engine step, from which on an engine counts as idle
EOS = 1  # id in launch/tiny_model.py's tokenizer
FAULTS = {8: "request", 12: "reward"}  # step -> what fails once, in a run with faults
ENGINE = {  # vLLM's arguments on both sides
    "max_num_seqs": SEATS,
    "enable_chunked_prefill": False,
    "enable_prefix_caching": True,
    "logits_processors": ["bench.vs_trl_async:Paced"],
}
CONFIG = vs_trl.CONFIG.format(P=P, G=G, longest=LONGEST, args=ENGINE)
CONFIG += 'timeouts = {"start": 180.0, "rollout": 600.0}\n'


# === What both sides share ========================================================================


def make_inputs(folder: Path) -> None:
    """Creates a user's copy of the program, a random model of a million parameters, and prompts."""
    from launch import tiny_model

    vs_trl.copy_ours(folder, CONFIG, "vs_trl_async")
    tokenizer = tiny_model.make_tokenizer()
    tiny_model.save(tiny_model.make_model(tokenizer), tokenizer, folder / "model")
    letters = random.Random(0)
    words = ("".join(letters.choices("abcdefgh", k=8)) for _ in range(2048))
    tiny_model.write_rows(folder / "train.jsonl", map(vs_trl.row_of, words))


def fail_once(name: str) -> None:
    """Raises RuntimeError if `Record` has asked for a fault of that name."""
    with contextlib.suppress(FileNotFoundError):
        (FOLDER / name).unlink()
        raise RuntimeError(f"injected: one {name} fails")


def score(text: str) -> float:
    """Returns the reward of both sides."""
    fail_once("reward")
    return vs_trl.score(text)


class Paced(LogitsProcessor):
    """Gives answers set lengths and engine steps a set time, and logs these steps."""

    def __init__(self, *_) -> None:
        self.rows: dict[int, tuple[int, list[int]]] = {}
        self.log = open(FOLDER / f"engine-{os.getpid()}.log", "a")  # noqa: SIM115
        self.last = self.flushed = 0.0

    @classmethod
    def validate_params(cls, _) -> None:
        """Lets one request fail; vLLM calls this for every request."""
        fail_once("request")

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update) -> None:
        """Paces the engine; vLLM calls this once per engine step."""
        process_dict_updates(self.rows, batch_update, self.draw)
        time.sleep(max(0.0, self.last + PACE - time.time()))
        self.last = time.time()
        self.log.write(f"{self.last:.4f} {len(self.rows)}\n")
        if self.last - self.flushed > 1:
            self.log.flush()
            self.flushed = self.last

    def draw(self, params, prompt: list[int], output: list[int]) -> tuple[int, list[int]] | None:
        """Returns the length of a new request's answer, and the list that will hold its tokens.

        Returns None for the probe by which our driver compares engines and trainer, because it must
        not be changed.
        """
        if params.ignore_eos:
            return None
        of_prompt = random.Random(str(prompt)).gauss(0, SPREAD)
        of_sample = random.Random(params.seed).gauss(0, SPREAD)
        return max(1, round(MEDIAN * math.exp(of_prompt + of_sample))), output

    def apply(self, logits):
        logits[list(self.rows), EOS] = -math.inf
        ends = [i for i, (length, output) in self.rows.items() if len(output) >= length - 1]
        if ends:
            logits[ends] = -math.inf
            logits[ends, EOS] = 0.0
        return logits


class Record:
    """A record of what a side has trained, step by step."""

    def __init__(self, faults: bool):
        self.faults = faults
        self.steps: list[dict] = []

    def step(self, lengths: list[int], lags: list[int], dropped: list[int]) -> None:
        """Records a batch: its samples' lengths and lags, and the lengths of discarded samples."""
        if self.faults and len(self.steps) in FAULTS:
            (FOLDER / FAULTS[len(self.steps)]).touch()
        row = {"lengths": lengths, "lags": lags, "dropped": dropped, "first": [], "sync": 0.0}
        self.steps.append(row | {"began": time.time()})

    def save(self, note: str) -> None:
        """Writes record.json, with a note on how the run ended."""
        (FOLDER / "record.json").write_text(json.dumps({"steps": self.steps, "note": note}))


# === TRL's side ===================================================================================


def vowels(completions, **_) -> list[float]:
    """Returns the rewards, in the form that TRL expects."""
    return [score(completion[0]["content"]) for completion in completions]


class Tap:
    """TRL's queue, with a record of what was taken out."""

    def __init__(self, queue):
        self.queue = queue
        self.qsize = queue.qsize
        self.taken: list = []

    def get(self, timeout: float):
        self.taken.append(self.queue.get(timeout=timeout))
        return self.taken[-1]


def make_worker(job: dict):
    """Creates TRL's rollout worker with AsyncGRPOConfig's defaults except for `inflight`."""
    from transformers import AutoTokenizer
    from trl.experimental.async_grpo import async_rollout_worker

    async_rollout_worker.is_vllm_available = lambda: True  # it is installed only for the server
    tokenizer = AutoTokenizer.from_pretrained("model")
    # TRL has the chat templates of some models; for others, it must be told where an answer is.
    content = {"close_pattern": "<eos>", "content": "text"}
    template = {"defaults": {"role": "assistant"}, "start_anchor": "<assistant>"}
    tokenizer.response_template = template | {"fields": {"content": content}}
    return async_rollout_worker.AsyncRolloutWorker(
        model_name="model",
        dataset=vs_trl.prompts(),
        reward_funcs=[vowels],
        processing_class=tokenizer,
        eos_token_ids=[EOS],
        num_generations=G,
        max_inflight_tasks=job["inflight"],
        queue_maxsize=1024,
        vllm_server_url=job["url"],
        max_tokens=LONGEST,
        request_timeout=600,
    )


def train_trl(job: dict) -> None:
    """Runs TRL's rollouts under a trainer that sleeps, in TRL's interpreter."""
    from collections import defaultdict

    from accelerate import PartialState
    from trl.experimental.async_grpo.async_grpo_trainer import RolloutQueueDataset
    from trl.experimental.async_grpo.vllm_client import VLLMClient

    PartialState()  # TRL's loggers need it
    worker = make_worker(job)
    tap = Tap(worker.rollout_buffer)
    shared = (lambda: worker.model_version, worker.check_health, 300.0, defaultdict(list))
    samples = iter(RolloutQueueDataset(tap, *shared, max_staleness=job["lag"]))
    client = VLLMClient(job["url"])
    record = Record(job["faults"])
    worker.start()
    try:
        for version in range(job["steps"]):
            tap.taken = []
            for _ in range(P * G):
                next(samples)
            taken = [(int(s.completion_mask.sum()), version - s.model_version) for s in tap.taken]
            lengths, lags = zip(*(pair for pair in taken if pair[1] <= job["lag"]), strict=True)
            record.step(lengths, lags, [length for length, lag in taken if lag > job["lag"]])
            time.sleep(job["seconds"])
            began = time.perf_counter()
            client.pause()
            client.resume()
            worker.update_model_version(version + 1)
            record.steps[-1]["sync"] = time.perf_counter() - began
    except RuntimeError as error:  # the worker has died, and stop() would never return
        record.save(f"the run ends: {str(error.__cause__ or error).splitlines()[0]}")
    else:
        record.save("")
        worker.stop()


@contextlib.contextmanager
def server(folder: Path):
    """Runs vLLM's server with our engine's settings; yields its address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    flags = {"model": "model", "host": "127.0.0.1", "port": port, "dtype": "float32", "seed": 1}
    flags |= {"max_model_len": LONGEST + 32, "logprobs_mode": "processed_logprobs"}
    flags |= {"enforce_eager": True, "disable_uvicorn_access_log": True} | ENGINE
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    for name, value in flags.items():
        flag = name.replace("_", "-")
        switch = isinstance(value, bool)
        command.append(f"--no-{flag}" if value is False else f"--{flag}")
        command += [] if switch else [str(value[0] if isinstance(value, list) else value)]
    env = os.environ | {  # set as runtime/processes/cluster.py does for our engine
        "OMP_NUM_THREADS": "1",
        "TORCH_COMPILE_DISABLE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
    }
    env |= {"VLLM_SERVER_DEV_MODE": "1", "PYTHONPATH": str(folder), "BENCH_FOLDER": str(folder)}
    with open(folder / "server.log", "w") as log:
        process = subprocess.Popen(command, cwd=folder, env=env, stdout=log, stderr=log)
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(180):
            time.sleep(1)
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"{url}/health", timeout=5)
                break
        else:
            raise RuntimeError((folder / "server.log").read_text()[-2000:])
        yield url
    finally:
        process.terminate()
        process.wait(60)


# === Ours =========================================================================================


def train_ours(job: dict) -> None:
    """Runs the real program with a trainer that sleeps, in a copy of this folder."""
    import numpy as np

    import grpo_async

    record = Record(job["faults"])

    class Trainer(grpo_async.Trainer):
        def train_step(self, step, updates, *groups):
            seconds = job["seconds"] * len(groups) / P
            time.sleep(seconds)
            if not updates[-1].more:
                self.stage_weights()
            measured = {"train_seconds": seconds, "train_tokens": updates[-1].planned_tokens}
            return grpo_async.Trained(measured, {}, np.empty(0))

    class Run(grpo_async.Run):
        async def train(self, step, groups):
            if self.buffer.next_step > step:
                batch = [*self.current_step.groups, *groups]
                lengths = [info.response_tokens for group in batch for info in group.infos]
                lags = [step - group.version for group in batch for _ in group.infos]
                record.step(lengths, lags, [])
                first = [step - info.oldest_version for group in batch for info in group.infos]
                record.steps[-1]["first"] = first
            return await super().train(step, groups)

    os.cpu_count = lambda: 2  # one for the engine: two threads would spin, waiting for each other
    grpo_async.Run.ACTORS = (Trainer, grpo_async.RolloutWorker)
    grpo_async.Run = Run
    sys.argv = ["grpo_async.py", "--config", "configs/bench.py"]
    sys.argv += ["--steps", str(job["steps"]), "--max_lag", str(job["lag"])]
    sys.argv += ["--train_parts", str(job["parts"])]
    grpo_async.main()
    lines = map(json.loads, Path("run/metrics.jsonl").read_text().splitlines())
    for row, line in zip(record.steps, lines, strict=True):
        row["sync"] = line["sync_pause"] + line["sync_transfer"] + line["sync_resume"]
    record.save(f"{line['dropped_prompts']:.0f} prompts abandoned")


# === The comparison ===============================================================================


def measure(folder: Path, side: str, **job) -> dict:
    """Measures a run of one side, except its first steps and its last, which generate little."""
    skipped = 3 + job["lag"]
    job = {"seconds": TRAIN, "faults": False, "parts": 1} | job
    job["steps"] = skipped + STEPS + job["lag"] + 2
    shutil.rmtree(folder / "run", ignore_errors=True)
    interpreter = vs_trl.VENV / "bin" / "python" if side == "trl" else sys.executable
    env = os.environ | {"BENCH_FOLDER": str(folder), "HF_HUB_OFFLINE": "1"}
    script = folder / "bench" / "vs_trl_async.py"
    vs_trl.run([interpreter, script, f"--{side}", json.dumps(job)], folder, env)
    record = json.loads((folder / "record.json").read_text())
    rows = record["steps"][skipped : skipped + STEPS + 1]
    note = f"{len(record['steps'])} of {job['steps']} steps. {record['note']}"
    return summary(folder, rows) | {"note": note}


def summary(folder: Path, rows: list[dict]) -> dict:
    """Returns rates, shares and means over the measured steps, and the engine's work meanwhile."""
    begin, end = rows[0]["began"], rows[-1]["began"]
    seconds = end - begin
    trained = [n for row in rows[1:] for n in row["lengths"]]
    dropped = [n for row in rows[1:] for n in row["dropped"]]
    lines = [line.split() for path in folder.glob("engine-*.log") for line in path.open()]
    ticks = sorted((float(at), int(n)) for at, n in lines if begin <= float(at) <= end)
    times = [begin, *(at for at, _ in ticks), end]
    gaps = [b - a for a, b in zip(times, times[1:], strict=False)]
    return {
        "samples/s": len(trained) / seconds,
        "tokens/s": sum(trained) / seconds,
        "discarded": sum(dropped) / sum(trained + dropped),
        "idle": sum(gap for gap in gaps if gap > STILL) / seconds,
        "engine tokens/s": sum(n for _, n in ticks) / seconds,
        "mean lag": statistics.fmean(lag for row in rows[1:] for lag in row["lags"]),
        "first lag": statistics.fmean(lag for row in rows[1:] for lag in row["first"] or [0]),
        "trained": statistics.fmean(trained),
        "generated": statistics.fmean(trained + dropped),
        "sync": statistics.fmean(row["sync"] for row in rows[:-1]),
        "slowest": max(b["began"] - a["began"] for a, b in zip(rows, rows[1:], strict=False)),
    }


def show(name: str, results: list[dict]) -> None:
    """Prints a row of the table: means of the repetitions, and the range of the rate."""
    mean = {k: statistics.fmean(r[k] for r in results) for k in results[0] if k != "note"}
    rates = [result["samples/s"] for result in results]
    cells = [name, f"{mean['samples/s']:.1f} ({min(rates):.1f} to {max(rates):.1f})"]
    cells += [f"{mean['tokens/s']:.0f} / {mean['engine tokens/s']:.0f}"]
    first = f" ({mean['first lag']:.2f})" if mean["first lag"] else ""
    cells += [f"{mean['discarded']:.1%}", f"{mean['idle']:.1%}", f"{mean['mean lag']:.2f}{first}"]
    cells += [f"{mean['trained']:.1f} / {mean['generated']:.1f}"]
    cells += [f"{1e3 * mean['sync']:.0f}", f"{mean['slowest']:.1f}"]
    print(f"| {' | '.join(cells)} |", flush=True)


def ratio(name: str, ours: list[dict], peer: str, theirs: list[dict]) -> str:
    """Returns our rates divided by those of TRL's row `peer`, averaged over repetitions."""
    samples, tokens = (
        statistics.fmean(result[key] for result in ours)
        / statistics.fmean(result[key] for result in theirs)
        for key in ("samples/s", "tokens/s")
    )
    goals = "samples/s {:.2f} (goal 1.05), trained tokens/s {:.2f} (goal 1.3)"
    return f"{name} / {peer}: {goals.format(samples, tokens)}"


def main() -> None:
    """Measures both sides in turn at each lag, then what one failed request and reward cost."""
    repetitions = int(sys.argv[1]) if len(sys.argv) > 1 else 1
    vs_trl.install_trl()
    columns = ["", "trained samples/s", "tokens/s trained / sampled", "tokens discarded"]
    columns += ["engine idle", "mean lag", "mean length trained / generated"]
    columns += ["sync ms", "slowest step s"]
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}", flush=True)
    notes = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        make_inputs(folder)
        with server(folder) as url:  # the server idles while it is our turn
            for lag in LAGS:
                ours = {"side": "ours", "lag": lag}
                jobs: dict[str, dict] = {f"grpo_async, max_lag {lag}": ours}
                jobs[f"grpo_async, max_lag {lag}, train_parts {P}"] = ours | {"parts": P}
                for inflight in (SEATS, lag * P * G):
                    job = {"side": "trl", "lag": lag, "url": url, "inflight": inflight}
                    jobs[f"TRL, max_staleness {lag}, {inflight} in flight"] = job
                results: dict[str, list] = {name: [] for name in jobs}
                for name in list(jobs) * repetitions:
                    results[name].append(measure(folder, **jobs[name]))
                for name, runs in results.items():
                    show(name, runs)
                ours, in_parts, *theirs = results
                for name, peer in itertools.product((ours, in_parts), theirs):
                    notes.append(ratio(name, results[name], peer, results[peer]))
            for name, side in {"grpo_async": "ours", "TRL": "trl"}.items():
                fault = {"lag": 1, "url": url, "inflight": SEATS, "faults": True}
                result = measure(folder, side, **fault)
                show(f"{name}, lag 1, with faults", [result])
                notes.append(f"{name}, if a request and then a reward fails: {result['note']}")
    print("\n".join(["", *notes]))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--trl"]:
        train_trl(json.loads(sys.argv[2]))
    elif sys.argv[1:2] == ["--ours"]:
        train_ours(json.loads(sys.argv[2]))
    else:
        main()
