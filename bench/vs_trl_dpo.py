"""Compares dpo.py with TRL's DPOTrainer on the same pairs: losses, seconds per step, memory.

    python bench/vs_trl_dpo.py [STEPS]      ten minutes; other work on the machine spoils its times

Both train the same random Qwen3 of a million parameters in float32 on a CPU, on the same pairs in
the same order, 16 per step, with the same AdamW. Answer lengths are geometric with mean 60, cut at
256. Losses are compared with TRL at one pair per micro-batch, where its "sft" is a mean over the
tokens of each pair, as ours is; times are compared with the fastest of its settings. Both score the
reference before they train, which is not timed. Memory is what a process uses on top of what it
holds once the model is loaded. TRL runs in its own virtual environment ($BENCH_VENV or
.venv-bench).
"""

import json
import os
import random
import re
import statistics
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from bench import vs_trl  # noqa: E402

STEPS = 20
SKIPPED = 2  # warm-up steps, not counted in times
PAIRS = 16
LONGEST = 256
MEAN = 60
LR = 1e-3
BETA, SFT = 0.05, 0.2
TRL = {  # pairs per micro-batch, and other settings of DPOConfig
    "1 pair a micro-batch": (1, {}),
    "4 pairs a micro-batch": (4, {}),
    "16 pairs a micro-batch": (16, {}),
    "16 pairs a micro-batch, padding-free": (16, {"padding_free": True}),
}
TEMPLATE = (
    "{% for m in messages %}{{ '<user>' if m.role == 'user' else '<bot>' }}{{ m.content }}"
    "{{ eos_token if m.role == 'assistant' }}{% endfor %}{{ '<bot>' if add_generation_prompt }}"
)


def make_inputs(folder: Path, steps: int) -> None:
    """Creates the model, and the pairs of all steps."""
    import torch

    from launch import tiny_model

    torch.manual_seed(0)
    tokenizer = tiny_model.make_tokenizer(template=TEMPLATE)
    model = tiny_model.make_model(tokenizer)
    model.config.max_position_embeddings = 2 * LONGEST
    tiny_model.save(model, tokenizer, folder / "model")
    draw = random.Random(0)

    def answer() -> list[dict]:
        length = min(LONGEST, 1 + int(draw.expovariate(1 / MEAN)))
        return [{"role": "assistant", "content": "".join(draw.choices("abcdefgh", k=length))}]

    rows = []
    for _ in range(steps * PAIRS):
        word = "".join(draw.choices("abcdefgh", k=draw.randint(6, 10)))
        prompt = [{"role": "user", "content": f"reverse {word}"}]
        rows.append({"prompt": prompt, "chosen": answer(), "rejected": answer()})
    tiny_model.write_rows(folder / "pairs.jsonl", rows)


def forget_peak() -> None:
    """Resets the kernel's record of this process's peak memory."""
    Path("/proc/self/clear_refs").write_text("5")


def resident(what: str) -> float:
    """Returns this process's memory in MiB: VmRSS is the current value, VmHWM the peak."""
    (line,) = re.findall(rf"{what}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(line) / 1024


def train_trl(steps: int, size: int, settings: dict) -> dict:
    """Returns each step's loss and seconds, and the memory; runs in TRL's interpreter."""
    import torch
    from datasets import load_dataset
    from transformers import TrainerCallback
    from trl import DPOConfig, DPOTrainer

    losses: list[float] = []
    ends: list[float] = []
    memory: list[float] = []

    class InOrder(DPOTrainer):
        def _get_train_sampler(self, *_args, **_kwargs):
            return torch.utils.data.SequentialSampler(self.train_dataset)

        def compute_loss(self, *args, **kwargs):
            result = super().compute_loss(*args, **kwargs)
            losses.append(float(result[0] if isinstance(result, tuple) else result))
            return result

    class Clock(TrainerCallback):
        def on_train_begin(self, *_args, **_kwargs):
            forget_peak()
            memory.append(resident("VmRSS"))
            ends.append(time.perf_counter())

        def on_step_end(self, *_args, **_kwargs):
            ends.append(time.perf_counter())

    same = {"learning_rate": LR, "warmup_steps": 0, "weight_decay": 0.0, "max_grad_norm": 1.0}
    same |= {"beta": BETA, "max_length": None, "max_steps": steps}
    same |= {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, SFT]}
    same |= {"per_device_train_batch_size": size, "gradient_accumulation_steps": PAIRS // size}
    same |= {"precompute_ref_log_probs": True, "precompute_ref_batch_size": PAIRS}
    config = DPOConfig(output_dir="trl", **vs_trl.QUIET, **same, **settings)
    rows = load_dataset("json", data_files="pairs.jsonl", split="train", cache_dir="cache")
    trainer = InOrder("model", args=config, train_dataset=rows, callbacks=[Clock()])
    trainer.train()
    micro = PAIRS // size
    means = [statistics.fmean(losses[i : i + micro]) for i in range(0, len(losses), micro)]
    seconds = [b - a for a, b in zip(ends, ends[1:], strict=False)]
    return {"losses": means, "seconds": seconds, "memory": resident("VmHWM") - memory[0]}


def train_ours(steps: int, _size: int, settings: dict) -> dict:
    """Takes the same measurements with dpo.py's trainer, on one rank and without Ray."""
    from dpo import Config, Scored, Trainer, load_pairs, plan_pairs
    from rollout.preference_rows import render_all

    policy = {"lr": LR, "warmup_lr": LR, "warmup_steps": 0, "activation_checkpointing": False}
    loss = {"beta": BETA, "sft_weight": SFT}
    cfg = Config(
        model="model",
        pairs_per_step=PAIRS,
        data={"train": "pairs.jsonl"},
        loss=loss,
        policy=policy | settings,
    )
    trainer = Trainer(cfg)
    trainer.start(0, trainer.open_store(1))
    rows = load_pairs(cfg.data.train, cfg)
    pairs = render_all(rows, range(steps * PAIRS), cfg)

    def packed(scored: list[Scored]) -> list[list[Scored]]:
        plan = plan_pairs([one.pair for one in scored], cfg)
        return [[scored[i] for i in row] for row in plan[0]]

    every = [Scored(i, pair) for i, pair in enumerate(pairs)]
    batches = [every[i : i + PAIRS] for i in range(0, len(every), PAIRS)]
    known = [trainer.score(packed(batch), PAIRS) for batch in batches]
    forget_peak()
    before = resident("VmRSS")
    losses, seconds = [], []
    for batch, logps in zip(batches, known, strict=True):
        began = time.perf_counter()
        scored = [one._replace(ref_logps=logps[one.place]) for one in batch]
        losses.append(trainer.train_step(packed(scored), PAIRS)["loss"])
        seconds.append(time.perf_counter() - began)
    return {"losses": losses, "seconds": seconds, "memory": resident("VmHWM") - before}


def run(folder: Path, side: str, steps: int, size: int, settings: dict) -> dict:
    """Runs one side in its own process. Raises RuntimeError as bench/vs_trl.py's `run` does."""
    python = vs_trl.VENV / "bin" / "python" if side == "trl" else sys.executable
    # Both sides get the values that runtime/processes/cluster.py sets for a trainer.
    threads = {"OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1"}
    command = [python, __file__, f"--{side}", str(steps), str(size), json.dumps(settings)]
    result = json.loads(vs_trl.run(command, folder, os.environ | threads).splitlines()[-1])
    seconds = statistics.median(result["seconds"][SKIPPED:])
    name = side if side == "ours" else f"TRL, {size}, {settings}"
    load = os.getloadavg()[0]
    print(f"{name:44}{seconds:8.3f} s{result['memory']:8.0f} MiB  load {load:.1f}", flush=True)
    return result | {"median": seconds}


def main() -> None:
    """Compares losses, then times: ours, each of TRL's settings, and ours again."""
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else STEPS
    vs_trl.install_trl()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_inputs(folder, steps)
        rows = {"row_tokens": 2 * (LONGEST + 24)}  # the longest pair
        print(f"{'':44}{'a step':>10}{'memory':>12}")
        ours = [run(folder, "ours", steps, PAIRS, rows)]
        theirs = {name: run(folder, "trl", steps, *of) for name, of in TRL.items()}
        ours.append(run(folder, "ours", steps, PAIRS, rows))
    exact = theirs["1 pair a micro-batch"]
    gaps = [abs(a - b) for a, b in zip(ours[0]["losses"], exact["losses"], strict=True)]
    best = min(theirs, key=lambda name: theirs[name]["median"])
    least = min(theirs, key=lambda name: theirs[name]["memory"])
    seconds = statistics.fmean(one["median"] for one in ours)
    memory = statistics.fmean(one["memory"] for one in ours)
    print(f"losses of {steps} steps: at most {max(gaps):.2g} apart   (goal 1e-5)")
    print(f"time, ours / TRL ({best}): {seconds / theirs[best]['median']:.2f}   (goal 0.7)")
    print(f"time, ours / TRL (1 pair a micro-batch): {seconds / exact['median']:.2f}")
    print(f"memory, ours / TRL ({best}): {memory / theirs[best]['memory']:.2f}")
    print(f"memory, ours / TRL ({least}): {memory / theirs[least]['memory']:.2f}")


if __name__ == "__main__":
    sides = {"--trl": train_trl, "--ours": train_ours}
    if sys.argv[1:2] and sys.argv[1] in sides:
        side = sides[sys.argv[1]]
        print(json.dumps(side(int(sys.argv[2]), int(sys.argv[3]), json.loads(sys.argv[4]))))
    else:
        main()
