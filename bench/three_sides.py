"""Measures how well mopd.py's engines, teachers and trainers overlap, in real runs on two cores.

    python bench/three_sides.py [STEPS]

Two cores are too few for three sides, so each side sleeps until its tokens have taken a set time,
as in `bench/simulate.py --validate`. Trainer and teacher take equally long per token. The ratio is
a step's time over the time of the trainer or the teacher, whichever is slower; 1 is the best. An
engine counts as busy while it has an answer to write.
"""

import statistics
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
from bench.simulation import real  # noqa: E402
from mopd import Config  # noqa: E402
from support.configs import changed  # noqa: E402
from support.program import Program  # noqa: E402

P, G, PARTS = 64, 1, 8  # one answer to a prompt, as for Nemotron 3 Ultra
JOBS = ((1, 1), (1, PARTS), (2, 1), (2, PARTS))  # max_lag, parts per step


def configured(folder: Path, lag: int, parts: int, steps: int) -> Config:
    """Creates a student and its teacher, the same random model; no answer changes the student."""
    base = real.configured(folder, f"lag{lag}-parts{parts}", real.Job(lag), seed=1)
    model = str(folder / "model")
    shared = {name: getattr(base, name) for name in ("run_dir", "model", "data", "engine")}
    shared |= {"sampling": base.sampling, "timeouts": base.timeouts, "seed": 1, "save_period": 0}
    cfg = Config(**shared, steps=steps, max_lag=lag, prompts_per_step=P, group_size=G)
    how = {"lr": 1e-12, "warmup_lr": 1e-12, "row_tokens": 256, "activation_checkpointing": False}
    cfg = changed(cfg, policy=how, train_parts=parts)
    return changed(cfg, teachers={"one": model}, default_teacher="one", teacher_policy=how)


def measure(cfg: Config) -> dict[str, float]:
    """Returns mean seconds per step between filling and draining, and per side within a step."""
    program = Program(cfg, script="bench/simulation/paced_mopd.py").succeeds(600)
    steps = program.steps()
    began = (program.folder / "metrics.jsonl").stat().st_mtime - steps[-1]["seconds"]
    ends = [began + step["seconds"] for step in steps]
    edge = 2 * (cfg.max_lag + 1)
    inner = steps[edge : -cfg.max_lag - 1]
    start, end = ends[edge - 1], ends[-cfg.max_lag - 2]
    logs = sorted(program.folder.parent.glob("engines/*.log"))
    spans = [real.busy_spans(real.beats(path)) for path in logs]
    busy = statistics.fmean(real.covered(of_engine, start, end) for of_engine in spans)
    return {
        "step": (end - start) / len(inner),
        "engine": busy / len(inner),
        "teacher": real.mean(inner, "teacher_seconds/one"),
        "trainer": real.mean(inner, "train_seconds"),
    }


def main() -> None:
    """Prints a line for each run."""
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 18
    print(f"{'seconds of a step':24}{'step':>8}{'engine':>9}{'teacher':>9}{'trainer':>9}   ratio")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        real.make_inputs(folder)
        for lag, parts in JOBS:
            found = measure(configured(folder, lag, parts, steps))
            ratio = found["step"] / max(found["teacher"], found["trainer"])
            values = found["step"], found["engine"], found["teacher"], found["trainer"]
            shown = "".join(f"{value:9.2f}" for value in values)
            print(f"max_lag {lag}, train_parts {parts:2}{shown}{ratio:8.3f}", flush=True)


if __name__ == "__main__":
    main()
