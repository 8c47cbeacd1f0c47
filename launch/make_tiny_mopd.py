"""Creates what configs/tiny_mopd.py needs: the student of make_tiny.py, and two teachers for it.

    python launch/make_tiny_mopd.py            does nothing if all of it exists
    python launch/make_tiny_mopd.py --force    recreates it, in two minutes on a laptop

Like the student, each teacher learns by imitation, but on other problems. One sees words spelt
without a slip and numbers sorted carelessly; the other sees the reverse. So each is better than the
student at one task and worse at the other.
"""

import random
import sys
import time
from pathlib import Path

import tyro

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from launch import make_tiny, tiny_model  # noqa: E402

CARELESS = 0.35  # share of items that a teacher skips in answers to the other task
TASKS = {"spells": "spell_backward", "sorts": "number_sorting"}  # teacher -> what it is good at


def task_of(entry):
    return entry["metadata"]["source_dataset"]


def main(force: bool = False, seed: int = 0, root: Path = ROOT):
    make_tiny.main(root=root)
    folder = root / "models/tiny_mopd"
    lacking = [t for t in TASKS if force or not (folder / t / "model.safetensors").exists()]
    if not lacking:
        return print("tiny_mopd: its teachers already exist (--force recreates them)")
    rows = make_tiny.problem_stream(seed + 1, ())
    validation = [next(rows) for _ in range(make_tiny.VALIDATION_ROWS)]
    asked = {entry["question"] for entry in validation}
    for number, teacher in enumerate(lacking, seed + 2):
        print(f"tiny_mopd: training the teacher {teacher}", flush=True)
        start, rng = time.monotonic(), random.Random(number)
        tiny_model.prepare(number)
        tokenizer = tiny_model.make_tokenizer()
        model = tiny_model.make_model(tokenizer)
        slips = {task: 0.0 if task == TASKS[teacher] else CARELESS for task in TASKS.values()}
        taught = (
            (make_tiny.rendered(e), make_tiny.response_text(e, rng, slips[task_of(e)]) + "<eos>")
            for e in make_tiny.problem_stream(number, asked)
        )
        tiny_model.imitate(model, tokenizer, taught, steps=500, batch=32, lr=4e-3)
        of_task = {t: [e for e in validation if task_of(e) == t] for t in TASKS.values()}
        exact = {t: make_tiny.measure(model, tokenizer, e)[1] for t, e in of_task.items()}
        tiny_model.save(model, tokenizer, folder / teacher)
        found = ", ".join(f"{task} {share:.1%}" for task, share in exact.items())
        print(f"tiny_mopd: {time.monotonic() - start:.0f} s; right answers: {found}", flush=True)
    return None


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
