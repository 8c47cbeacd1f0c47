"""Checks a machine with GPUs, line by line; bench/gpu_first_hour.sh calls it after installing.

    python bench/gpu_first_hour.py FOLDER [LINE ...]      without LINE, all of them

Exit status: 0 if all lines passed, 1 if one failed, 2 if none failed but one was skipped.

Runs train a model of Qwen3-0.6B's sizes with random weights (a tiny one without a GPU) on the tiny
job's rows: they show that weights, logprobs and processes are right, not that the model learns.
"""

import contextlib
import json
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import psutil  # installed with vLLM
import torch

Word = str | int | float | Path  # a word of a command line
ROOT = Path(__file__).resolve().parents[1]
GPUS = torch.cuda.device_count()
DRIVER = 580  # needed by CUDA 13, for which requirements/gpu.txt's torch is built
FILES = 65536
KILL_AT = 10  # the step after which an engine is killed
MISMATCH = 1.02  # largest token_mult_prob_error at lag 0
SPARE = 256  # MiB by which the memory in use on a GPU may vary
TINY = ["--prompts_per_step", "4", "--group_size", "4", "--max_lag", "0", "--val_period", "0"]
TINY += ["--data.val", "", "--engine.verify_sync_every", "1", "--sample_period", "0"]
TINY += ["--loss.no-skip_zero_advantage"]  # with random weights all answers are wrong


class Line(NamedTuple):
    """One line of the table."""

    work: Callable[["Log"], str]  # returns its findings; raises if it fails
    gpus: int  # GPUs needed
    seconds: float  # its deadline


LINES: dict[str, Line] = {}


def line(gpus: int, seconds: float) -> Callable[[Callable], Callable]:
    """Returns a decorator that adds a function to the table under its own name."""

    def add(work: Callable[["Log"], str]) -> Callable[["Log"], str]:
        LINES[work.__name__] = Line(work, gpus, seconds)
        return work

    return add


class Log:
    """The file to which a line's programs write, and their deadline."""

    def __init__(self, name: str, folder: Path, seconds: float):
        self.folder = folder
        self.path = folder / f"{name}.log"
        self.path.unlink(missing_ok=True)
        self.ends = time.monotonic() + seconds

    @contextlib.contextmanager
    def program(self, *command: Word) -> Iterator[psutil.Popen]:
        """Runs a program, and at the end kills it and everything that it started."""
        text = [str(word) for word in command]
        with self.path.open("a") as file:
            file.write("$ " + " ".join(text) + "\n")
            file.flush()
            options = {"cwd": ROOT, "stdout": file, "stderr": file, "start_new_session": True}
            running = psutil.Popen(text, **options)
        try:
            yield running
        finally:
            with contextlib.suppress(psutil.NoSuchProcess):
                for process in running.children(recursive=True):
                    process.kill()
            with contextlib.suppress(ProcessLookupError):  # processes that lost their parent
                os.killpg(running.pid, signal.SIGKILL)
            running.wait(60)

    def run(self, *command: Word) -> str:
        """Returns a program's output. Raises RuntimeError if it fails, TimeoutError if slow."""
        with self.program(*command) as running:
            self.until(lambda: running.poll() is not None, f"{command[-1]} to end")
            if code := running.wait():
                raise RuntimeError(f"status {code}")
        return self.path.read_text(errors="replace")

    def until(self, done: Callable[[], bool], awaited: str) -> None:
        """Waits until `done` returns True. Raises TimeoutError naming what was awaited."""
        while not done():
            if time.monotonic() > self.ends:
                raise TimeoutError(f"waited too long for {awaited}")
            time.sleep(0.5)

    def command(self, steps: int, *flags: Word) -> list[Word]:
        """Returns the command that trains `steps` steps in this line's run folder."""
        command: list[Word] = [sys.executable, "grpo_async.py", "--model", model(self), *TINY]
        run = self.folder / f"run-{self.path.stem}"
        return [*command, "--run_dir", run, "--steps", steps, "--save_period", 0, *flags]

    def steps(self) -> list[dict]:
        """Returns the metrics of each step that the run has made so far."""
        path = self.folder / f"run-{self.path.stem}" / "metrics.jsonl"
        with contextlib.suppress(FileNotFoundError):
            return [json.loads(text) for text in path.read_text().splitlines()]
        return []


def model(log: Log) -> Path:
    """Returns the folder of a model with random weights; without a GPU, of the tiny model."""
    log.run(sys.executable, "launch/make_tiny.py")
    if not GPUS:
        return ROOT / "models/tiny"
    folder = log.folder / "model"
    if not (folder / "config.json").exists():
        from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config

        sizes = {"hidden_size": 1024, "num_hidden_layers": 28, "intermediate_size": 3072}
        heads = {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}
        config = Qwen3Config(**sizes, **heads, vocab_size=151936, tie_word_embeddings=True)
        tokenizer = AutoTokenizer.from_pretrained(ROOT / "models/tiny")
        config.eos_token_id = tokenizer.eos_token_id
        tokenizer.save_pretrained(folder)
        made = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        made.save_pretrained(folder)
    return folder


def memory(log: Log) -> list[int]:
    """Returns the MiB in use on each GPU of the machine."""
    units = "--format=csv,noheader,nounits"
    said = log.run("nvidia-smi", "--query-gpu=memory.used", units)
    return [int(text) for text in said.rpartition(units)[2].split()]


def given_back(log: Log, before: list[int]) -> bool:
    """Returns True if no more memory is in use than before; in containers, pids mean nothing."""
    return all(now <= then + SPARE for now, then in zip(memory(log), before, strict=True))


def trained(log: Log, steps: int, *flags: Word) -> str:
    """Trains to the end. Raises RuntimeError if engine and trainer disagree."""
    command = log.command(steps, *flags)
    planned = log.run(*command, "--dry_run")
    log.run(*command)
    if len(log.steps()) != steps:
        raise RuntimeError(f"{len(log.steps())} steps of {steps}")
    return f"{agreed(log.steps())}; {beside(planned, log.steps()[-1])}"


def beside(planned: str, step: dict) -> str:
    """Compares the seconds per step and per update in the dry run and in the last step."""
    names = ("= step", "weight update")
    said = {name: re.search(rf"^  {name} +([\d.,]+)", planned, re.M)[1] for name in names}
    took = {"= step": step["step_seconds"], "weight update": step["sync_transfer"]}
    pairs = [f"{name.strip('= ')} {took[name]:.2f} s, {said[name]} planned" for name in said]
    return ", ".join(pairs)


def agreed(steps: list[dict]) -> str:
    """Returns how far engine and trainer were apart. Raises RuntimeError if it is too far."""
    worst = max(step["token_mult_prob_error"] for step in steps)
    if worst > MISMATCH:
        raise RuntimeError(f"token_mult_prob_error {worst:.4f}, expected at most {MISMATCH}")
    return f"{len(steps)} steps, token_mult_prob_error at most {worst:.6f}"


def serve_again(steps: list[dict], seen: int) -> bool:
    """Returns True if two more steps than `seen` were trained and both engines served the last."""
    return len(steps) >= seen + 2 and steps[-1]["engines"] == 2


# --- the lines ------------------------------------------------------------------------------------


@line(gpus=0, seconds=60)
def limits(log: Log) -> str:
    """Checks the limit on open files, and imports the libraries."""
    log.run(sys.executable, "-c", "import vllm, ray, torch; print(vllm.__version__)")
    import resource

    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if most < FILES:
        raise RuntimeError(f"ulimit -n is {most}, expected {FILES}: ulimit -n {FILES}")
    return f"ulimit -n {most}, torch {torch.__version__}"


@line(gpus=1, seconds=60)
def driver(log: Log) -> str:
    """Checks the driver, and logs the topology."""
    log.run("nvidia-smi", "topo", "-m")
    query = "--query-gpu=driver_version,name"
    said = log.run("nvidia-smi", query, "--format=csv,noheader").splitlines()[-1]
    if int(said.split(".")[0]) < DRIVER:  # CUDA's compatibility libraries may help
        torch.ones(1, device="cuda").sum().item()
    return f"{GPUS} x {said}"


@line(gpus=0, seconds=60)
def matmul(log: Log) -> str:
    """Compares the head's products of bf16 numbers with float64."""
    from policy.logprobs import matmul as product

    device = "cuda" if GPUS else "cpu"
    a, b = (torch.randn(512, 2048, device=device, dtype=torch.bfloat16) for _ in range(2))
    exact = a.double() @ b.double().T
    worst = float((product(a, b.T) - exact).abs().max() / exact.abs().max())
    if worst > 1e-5:
        raise RuntimeError(f"off by {worst:.1e} of the largest, expected 1e-5: not float32")
    return f"off by {worst:.1e} of the largest"


@line(gpus=0, seconds=300)
def logprobs(log: Log) -> str:
    """Measures the head against full logits, and Liger's head if it is installed."""
    sizes = () if GPUS else ("--tokens", 512, "--vocab", 16384, "--hidden", 64, "--chunk", 64)
    said = log.run(sys.executable, "bench/logprob_memory.py", *sizes).splitlines()
    found = {word: text.split()[-2:] for text in said if (word := text[:10].strip())}
    measured = {name: found[name] for name in ("chunked", "liger") if name in found}
    ratios = [f"{name} {peak} x memory, {time} x time" for name, (peak, time) in measured.items()]
    return "; ".join(ratios) + " of full logits"


@line(gpus=0, seconds=1800)
def trainer(log: Log) -> str:
    """Measures the trainer's speed and memory with each kind of attention."""
    said = log.run(sys.executable, "bench/gpu_trainer.py", "auto", "sdpa").splitlines()
    peak = next(text for text in said if "matmul " in text)
    rows = [text.split() for text in said if re.search(r"( +([\d.,]+|nan)){9}$", text)]
    speeds = [
        f"{' '.join(row[:-8])}: {row[-8]} tokens/s, {row[-6]}, compiled {row[-1]} x the time"
        for row in rows
    ]
    return "; ".join([peak, *speeds])


@line(gpus=0, seconds=900)
def decode(log: Log) -> str:
    """Compares an engine's tokens per second with the dry run's."""
    return log.run(sys.executable, "bench/gpu_decode.py", model(log)).splitlines()[-1]


@line(gpus=0, seconds=900)
def experts(log: Log) -> str:
    """Measures an update of a real engine's many experts: by vLLM's loaders, and copied."""
    sizes = () if GPUS else (8, 2)
    said = log.run(sys.executable, "bench/reload.py", *sizes).splitlines()
    rows = [text.split() for text in said[-2:]]
    return "; ".join(f"{kind} {slow} us a tensor, copied {fast}" for kind, slow, fast in rows)


@line(gpus=0, seconds=600)
def nemotron_h(log: Log) -> str:
    """Checks bf16 checkpoints of Nemotron-H, by Megatron if its kernels are installed."""
    return log.run(sys.executable, "bench/nemotron_h.py").splitlines()[-1]


@line(gpus=0, seconds=900)
def one_gpu(log: Log) -> str:
    """Trains with one GPU for engine and trainer; verified weights travel through gloo."""
    share = ("--gpu_share", 0.5, "--engine.args", '{"gpu_memory_utilization": 0.4}')
    return trained(log, 5, *(share if GPUS else ()))


@line(gpus=2, seconds=900)
def two_gpus(log: Log) -> str:
    """Trains with two GPUs; verified weights travel through NCCL."""
    return trained(log, 5, "--gpu_share", 1)


@line(gpus=2, seconds=900)
def drafts(log: Log) -> str:
    """Trains with drafts, which must not change the policy that samples come from."""
    looked_up = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
    args = json.dumps({"speculative_config": looked_up})
    said = trained(log, 5, "--gpu_share", 1, "--engine.args", args)
    accepted = [step["draft_acceptance"] for step in log.steps()]
    return f"{said}; accepted {max(accepted):.0%} at most"


@line(gpus=2, seconds=900)
def truncated(log: Log) -> str:
    """Trains with top_p: the trainer normalises over the tokens that the engine chose among."""
    return trained(log, 5, "--gpu_share", 1, "--sampling.top_p", 0.95)


@line(gpus=4, seconds=900)
def four_gpus(log: Log) -> str:
    """Trains with an engine of tensor_parallel 2 and with two trainer ranks."""
    return trained(log, 5, "--gpu_share", 1, "--engine.tensor_parallel", 2, "--policy.ranks", 2)


@line(gpus=3, seconds=1800)
def killed_engine(log: Log) -> str:
    """Kills one of two engines: the run replaces it, and nothing of it stays on a GPU."""
    before = memory(log)
    with log.program(*log.command(10_000, "--gpu_share", 1, "--engine.count", 2)) as running:

        def wait(done: Callable[[], bool], awaited: str) -> None:
            log.until(lambda: done() or running.poll() is not None, awaited)
            if running.poll() is not None:
                raise RuntimeError(f"{len(log.steps())} steps, status {running.poll()}")

        wait(lambda: len(log.steps()) >= KILL_AT, f"step {KILL_AT}")
        family = running.children(recursive=True)
        cores = [process for process in family if process.name().startswith("VLLM::Engine")]
        if not cores:
            raise RuntimeError(f"no EngineCore after {len(log.steps())} steps, expected 2")
        cores[0].kill()
        seen = len(log.steps())
        wait(lambda: serve_again(log.steps(), seen), "two steps of which both engines serve one")
        running.terminate()
        log.until(lambda: running.poll() is not None, "the run to save and leave")
        if code := running.wait():
            raise RuntimeError(f"status {code} after SIGTERM")
        # Check before program() ends the leftover processes, so that an orphan is noticed.
        log.ends = time.monotonic() + 60
        log.until(lambda: given_back(log, before), f"GPUs to hold {before} MiB: an orphan has more")
    said = agreed(log.steps())
    return f"{said}; one of {len(cores)} engines killed at step {KILL_AT}, repaired, no orphan"


def main(folder: str, *names: str) -> None:
    """Prints the table and exits with its status."""
    out = Path(folder).resolve()
    out.mkdir(parents=True, exist_ok=True)
    verdicts = set()
    for name in names or LINES:
        work, gpus, seconds = LINES[name]
        began = time.monotonic()
        log = Log(name, out, seconds)
        details = ""
        try:
            if gpus > GPUS:
                verdict, said = "skip", f"needs {gpus} GPUs, here are {GPUS}"
            else:
                verdict, said = "pass", work(log) + ("" if GPUS else ", on a CPU")
        except Exception as error:
            verdict, said = "FAIL", f"{type(error).__name__}: {error}"
            details = traceback.format_exc()
        verdicts.add(verdict)
        with log.path.open("a") as file:
            file.write(f"{details}{verdict}: {said}\n")
        took = f"{time.monotonic() - began:6.0f} s"
        print(f"{verdict}  {name:14}{took}  {said} ({log.path})", flush=True)
    sys.exit(1 if "FAIL" in verdicts else 2 if "skip" in verdicts else 0)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main(*sys.argv[1:])
