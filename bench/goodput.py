"""Goodput of a run that loses an engine every 20 steps, over that of one that loses none.

    python bench/goodput.py [PROMPTS] [STEPS]       10 minutes; needs models/tiny and data/tiny

The tiny job with two engines and PROMPTS prompts a step. A new engine costs 20 s of one core, on a
cluster a minute or two of a GPU that does nothing else: so that a step relates to it as there, it
is longer than the tiny job's own. Both runs are timed over the same steps, one after the other.
"""

import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
from grpo_async import Config  # noqa: E402
from settings import reader as config  # noqa: E402
from support.program import Program, end  # noqa: E402

FIRST = 5  # steps before the clock starts
EVERY = 20  # steps from one kill to the next
FLAGS = {"val_period": 0, "data.val": "", "engine.count": 2, "engine.max_restarts": 99}


def seconds(folder: str, prompts: int, steps: int, kills: bool) -> float:
    """From the end of step FIRST to that of the last one."""
    flags = FLAGS | {"run_dir": f"{folder}/run-{kills}", "steps": FIRST + steps}
    flags |= {"prompts_per_step": prompts, "save_period": 0}
    words = [str(word) for name, value in flags.items() for word in (f"--{name}", value)]
    program = Program(config.load(Config, words, default="configs/tiny.py"))
    try:
        for step in range(FIRST + EVERY // 2, FIRST + steps, EVERY) if kills else ():
            program.wait_until(lambda s=step: len(program.steps()) >= s, 900)
            end(program.engine_cores()[-1])
        assert program.ends(1800) == 0, program.told()[-4000:]
    finally:
        program.stop()
    ends = [line["seconds"] for line in program.steps()]
    lost = program.told().count("an engine is lost")
    assert lost == (steps // EVERY if kills else 0), f"{lost} engines were lost"
    return ends[-1] - ends[FIRST - 1]


def main() -> None:
    """Prints both and their ratio."""
    given = [int(word) for word in sys.argv[1:]]
    prompts, steps = given + [28, 40][len(given) :]
    with tempfile.TemporaryDirectory() as folder:
        calm = seconds(folder, prompts, steps, kills=False)
        print(f"undisturbed: {steps} steps in {calm:.0f} s, {calm / steps:.2f} s each", flush=True)
        hurt = seconds(folder, prompts, steps, kills=True)
        print(f"an engine killed every {EVERY} steps: {hurt:.0f} s")
        print(f"goodput {calm / hurt:.2f}   (goal 0.9)")


if __name__ == "__main__":
    main()
