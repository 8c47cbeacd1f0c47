"""Compares samples per second of training with TRL's synchronous GRPOTrainer, on a small problem.

    python bench/vs_trl.py [STEPS]      a quarter of an hour; other work on the machine spoils it

Both train the same random Qwen3 of a million parameters, whose EOS has about the same probability
at every position, so response lengths are geometric with mean 30, cut at 256. Prompts, reward,
batch (16 x 16, one optimizer step) and float32 are the same too. The learning rate is nearly zero,
so that the work stays the same, and ours trains on samples whose advantage is zero, as TRL does.

Ours runs as shipped, in a copy of this folder with one more environment. TRL gets its own virtual
environment ($BENCH_VENV or .venv-bench), which this script creates from requirements/bench.txt.
Each of its settings is tried for some steps; the fastest one is measured between two runs of ours.
"""

import json
import math
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = Path(os.environ.get("BENCH_VENV", ROOT / ".venv-bench")).absolute()
SKIPPED = 4  # steps of warm-up
TRIED = 6  # steps for which each of TRL's settings is tried
P = 16
G = 16
LONGEST = 256
MEAN = 30

CONFIG = """from configs.tiny import *
model = "model"
run_dir = "run"
data = {{"train": "train.jsonl", "val": ""}}
val_period = 0
prompts_per_step = {P}
group_size = {G}
loss = {{"skip_zero_advantage": False}}
policy = {{"lr": 1e-12, "warmup_lr": 1e-12, "row_tokens": 512}}
sampling = {{"max_response_tokens": {longest}, "max_model_len": {longest} + 32}}
engine = {{"args": {args}}}
"""
OURS = CONFIG.format(P=P, G=G, longest=LONGEST, args={"max_num_seqs": 64})
ENVIRONMENT = """from bench.{name} import score
from envs import Reward
AGENTS = ("vowels",)
def verify(row, response):
    return Reward(score(response))
"""
QUIET = {"logging_steps": 1000, "save_strategy": "no", "report_to": "none", "disable_tqdm": True}
QUIET |= {"dataloader_pin_memory": False, "lr_scheduler_type": "constant"}
QUIET |= {"use_cpu": True, "bf16": False, "gradient_checkpointing": False}
TRL = {  # environment variables, and settings of GRPOConfig
    "2 threads": ({}, {}),
    "1 thread": ({"OMP_NUM_THREADS": "1"}, {}),
    "2 threads, micro-batches of 32": ({}, {"per_device_train_batch_size": 32}),
    "2 threads, static cache": ({}, {"cache_implementation": "static"}),
    "2 threads, continuous batching": ({}, {"use_transformers_continuous_batching": True}),
}


def score(text: str) -> float:
    """Returns the share of vowels: cheap, and hardly ever the same in a whole group."""
    return sum(letter in "aeiou" for letter in text) / max(len(text), 1)


def run(command: list, folder: Path, env) -> str:
    """Runs a side in its own process; returns its output. Raises RuntimeError if it fails."""
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError((done.stderr.strip() or "no output").splitlines()[-1])
    return done.stdout


# === What both train ==============================================================================


def make_inputs(folder: Path) -> None:
    """Creates a model whose responses average `MEAN` tokens, and 1,024 prompts of 16 to 20."""
    sys.path.insert(0, str(ROOT))
    from launch import tiny_model

    letters = random.Random(0)
    words = ["".join(letters.choices("abcdefgh", k=letters.randint(6, 10))) for _ in range(1024)]
    rows = list(map(row_of, words))
    tiny_model.write_rows(folder / "train.jsonl", rows)
    save_model(folder / "model", rows[:64], max_position_embeddings=2 * LONGEST)


def row_of(word: str) -> dict:
    """Makes a row for our environment."""
    chat = [{"role": "user", "content": f"reverse {word}"}]
    return {"responses_create_params": {"input": chat}, "agent_ref": {"name": "vowels"}}


def save_model(folder: Path, rows: list[dict], **settings) -> None:
    """Creates a random model whose answers to `rows` are equally likely to end at each token."""
    import torch

    from launch import tiny_model

    torch.manual_seed(0)
    tokenizer = tiny_model.make_tokenizer()
    model = tiny_model.make_model(tokenizer)
    vars(model.config).update(settings)
    chats = [row["responses_create_params"]["input"] for row in rows]
    prompts = tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
    )
    fit_eos(model, prompts, tokenizer.eos_token_id)
    tiny_model.save(model, tokenizer, folder)


def fit_eos(model, prompts, eos: int) -> None:
    """Sets EOS's embedding so that its probability is 1 / MEAN wherever the model ends up."""
    import torch

    table_VH = model.get_input_embeddings().weight
    with torch.no_grad():
        for _ in range(2):  # where it ends up depends slightly on EOS
            tokens_BT = model.generate(**prompts, do_sample=True, top_k=0, max_new_tokens=128)
            hidden_BTH = model.model(tokens_BT).last_hidden_state
            h_NH = hidden_BTH[:, prompts["input_ids"].shape[1] :].flatten(0, 1)
            logits_NV = h_NH @ table_VH.T
            logits_NV[:, eos] = -math.inf
            target_N = logits_NV.logsumexp(1) - math.log(MEAN - 1)
            ridge_HH = 0.0025 * len(h_NH) * torch.eye(h_NH.shape[1])
            table_VH[eos] = torch.linalg.solve(h_NH.T @ h_NH + ridge_HH, h_NH.T @ target_N)


# === TRL's side ===================================================================================


def install_trl() -> None:
    """Creates or completes TRL's virtual environment, as launch/setup.sh creates ours."""
    scripts = Path(sys.executable).parent
    uv = str(scripts / "uv")
    links = [str(scripts / "pip"), "config", "get", "global.find-links"]
    found = subprocess.run(links, capture_output=True, text=True).stdout.strip()
    env = os.environ | ({"UV_FIND_LINKS": found} if found else {})
    if not (VENV / "bin" / "python").exists():
        subprocess.run([uv, "venv", "--quiet", "--python", sys.executable, VENV], check=True)
    install = [uv, "pip", "install", "--quiet", "--compile-bytecode", "--python", VENV]
    install += ["--override", "requirements/overrides.txt", "-r", "requirements/bench.txt"]
    install += [] if found else ["--torch-backend=cpu"]
    subprocess.run(install, cwd=ROOT, env=env, check=True)


def train_trl(steps: int, settings: dict) -> None:
    """Runs in TRL's interpreter, and writes trl.json.

    The file contains the times at which steps ended, the generation times and the lengths.
    """
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    log = {"ends": [], "generation": [], "lengths": []}

    def vowels(completions, completion_ids, **_):
        log["lengths"].append([len(ids) for ids in completion_ids])
        return [score(completion[0]["content"]) for completion in completions]

    class Timed(GRPOTrainer):
        def _generate_single_turn(self, *args, **kwargs):
            began = time.perf_counter()
            result = super()._generate_single_turn(*args, **kwargs)
            log["generation"].append(time.perf_counter() - began)
            return result

    class Clock(TrainerCallback):
        def on_step_end(self, *_args, **_kwargs):
            log["ends"].append(time.perf_counter())

    size = settings.setdefault("per_device_train_batch_size", P * G)
    same = {"learning_rate": 1e-12, "shuffle_dataset": False}
    same |= {"num_generations": G, "gradient_accumulation_steps": P * G // size}
    same |= {"max_steps": steps, "max_completion_length": LONGEST}
    config = GRPOConfig(output_dir="trl", **QUIET, **same, **settings)
    Timed("model", vowels, config, prompts(), callbacks=[Clock()]).train()
    Path("trl.json").write_text(json.dumps(log))


def prompts():
    """Reads our rows as TRL's data set."""
    from datasets import load_dataset

    rows = load_dataset("json", data_files="train.jsonl", split="train", cache_dir="cache")
    rows = rows.map(lambda row: {"prompt": row["responses_create_params"]["input"]})
    return rows.select_columns("prompt")


def run_trl(folder: Path, name: str, steps: int) -> dict:
    """Runs TRL with one of its settings."""
    variables, settings = TRL[name]
    env = os.environ | {"OMP_NUM_THREADS": "2", "HF_HUB_OFFLINE": "1"} | variables
    command = [VENV / "bin" / "python", __file__, "--trl", str(steps), json.dumps(settings)]
    run(command, folder, env)
    log = json.loads((folder / "trl.json").read_text())
    generation = statistics.median(log["generation"][SKIPPED:])
    result = summary(log["ends"], log["lengths"][SKIPPED:])
    rest = result["median step"] - generation
    return result | {"parts": {"generation": generation, "training": rest}}


# === Ours, and the comparison =====================================================================


def copy_ours(folder: Path, config: str = OURS, name: str = "vs_trl") -> None:
    """Creates a user's copy of the program, with an environment that scores by bench/NAME.py."""
    hidden = shutil.ignore_patterns(".*", "__pycache__", "data", "models", "runs", "tests")
    shutil.copytree(ROOT, folder, ignore=hidden, dirs_exist_ok=True)
    (folder / "envs" / "vowels.py").write_text(ENVIRONMENT.format(name=name))
    (folder / "configs" / "bench.py").write_text(config)


def run_ours(folder: Path, steps: int) -> dict:
    """Runs grpo_async.py and sums up what it logs.

    The last step is left out, because nothing more is generated during it.
    """
    shutil.rmtree(folder / "run", ignore_errors=True)
    command = [sys.executable, "grpo_async.py", "--config", "configs/bench.py"]
    command += ["--steps", str(steps + 1)]
    run(command, folder, os.environ)
    lines, rollouts = (
        [json.loads(line) for line in (folder / "run" / name).read_text().splitlines()]
        for name in ("metrics.jsonl", "rollouts.jsonl")
    )
    lines.pop()
    measured = range(SKIPPED + 1, steps + 1)
    lengths = [sum(n for _, n in r["versions"]) for r in rollouts if r["step"] in measured]
    for line in lines:
        line["sync"] = line["sync_pause"] + line["sync_transfer"] + line["sync_resume"]
    keys = ("train_seconds", "wait_for_rollouts", "sync", "wait_for_training")
    parts = {k: statistics.median(line[k] for line in lines[SKIPPED:]) for k in keys}
    return summary([line["seconds"] for line in lines], [lengths]) | {"parts": parts}


def summary(ends: list[float], lengths: list[list[int]]) -> dict:
    """Sums up the rate after the warm-up, the median step, and the lengths of responses."""
    ends = ends[SKIPPED - 1 :]
    lengths = sum(lengths, [])
    return {
        "samples/s": P * G * (len(ends) - 1) / (ends[-1] - ends[0]),
        "median step": statistics.median(b - a for a, b in zip(ends, ends[1:], strict=False)),
        "mean tokens": statistics.fmean(lengths),
        "median tokens": statistics.median(lengths),
        "max tokens": max(lengths),
    }


def show(name: str, result: dict) -> None:
    """Prints one row of the table, and below it the parts of a step's time."""
    numbers = "".join(f"{v:14.2f}" for k, v in result.items() if k != "parts")
    print(f"{name:40}{numbers}  load {os.getloadavg()[0]:.1f}")
    print("    " + ", ".join(f"{k} {v:.3f} s" for k, v in result["parts"].items()), flush=True)


def fastest(folder: Path) -> str:
    """Finds TRL's fastest setting; reports settings that do not run on this machine."""
    rates = {}
    for setting in TRL:
        try:
            result = run_trl(folder, setting, SKIPPED + TRIED)
        except RuntimeError as error:
            print(f"TRL tried: {setting}: {error}", flush=True)
            continue
        show(f"tried: {setting}", result)
        rates[setting] = result["samples/s"]
    return max(rates, key=rates.get)


def main() -> None:
    """Measures ours, TRL at its fastest, TRL, ours, and prints the ratio."""
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 20
    install_trl()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_inputs(folder)
        copy_ours(folder)
        columns = ("samples/s", "median step", "mean tokens", "median tokens", "max tokens")
        print(f"{'':40}" + "".join(f"{column:>14}" for column in columns))
        best = fastest(folder)
        ours = []
        trl = []
        for turn in (0, 1, 1, 0):
            result = run_trl(folder, best, steps) if turn else run_ours(folder, steps)
            (trl if turn else ours).append(result["samples/s"])
            show(f"TRL, {best}" if turn else "grpo_async", result)
    print(f"grpo_async / TRL ({best}): {sum(ours) / sum(trl):.2f}   (goal 1.5)")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--trl"]:
        train_trl(int(sys.argv[2]), json.loads(sys.argv[3]))
    else:
        main()
