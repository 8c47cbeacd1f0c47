"""Takes a run's judge away for a while, and prints what that cost.

    python tests/outage.py [SECONDS] [PROMPTS]     60 s and 256 prompts a step: six minutes

Needs models/tiny (launch/make_tiny.py). Engines and trainer are real; a server of
support/judges.py judges. It goes away by closing its port, by answering nothing, and by 503, each
in a run of its own. A call may wait for three quarters of the outage. The exit status is 1 where a
reward was wrong; a prompt that was dropped, trained twice or never raises AssertionError.
"""

import json
import os
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from grpo_async import Config  # noqa: E402
from runtime.startup import preflight  # noqa: E402
from support.judges import Judge  # noqa: E402
from support.outages import endure, fork, reply, rows  # noqa: E402

STEPS = 4
FLAGS = {"steps": STEPS, "group_size": 2, "sampling.max_response_tokens": 8, "save_period": 0}
FLAGS |= {"val_period": 0, "data.val": ""}
FLAGS |= {"engine.args": '{"max_num_seqs": 64}', "policy.row_tokens": 4096}


def main() -> int:
    """Prints three lines for each kind of outage; returns the exit status."""
    given = sys.argv[1:]
    seconds, prompts = map(int, (*given, *("60", "256")[len(given) :]))
    wrong = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        root = fork(folder / "fork")
        flags = FLAGS | {"prompts_per_step": prompts, "timeouts.rollout": 0.75 * seconds}
        data = folder / "rows.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows(STEPS * prompts)))
        flags["data.train"] = str(data)
        os.environ["JUDGES_FILE"] = str(folder / "judges")
        for fault in ("down", "hang", "503"):
            flags["run_dir"] = str(folder / fault)
            words = [str(word) for flag in flags.items() for word in (f"--{flag[0]}", flag[1])]
            cfg = preflight.load(Config, words, default="configs/tiny.py")
            with Judge(reply, seconds=0.2) as judge:
                (folder / "judges").write_text(f"general {judge.url}\n")
                found = endure(cfg, root, judge, fault, seconds)
            wrong += found.wrong
            took = ", ".join(f"{step:.1f}" for step in found.seconds)
            failures = ", ".join(f"{name} {n:.0f}" for name, n in found.failures.items())
            print(f"{fault} for {seconds} s, P = {prompts}: steps of {took} s")
            print(f"  {found.away:.1f} s away by the run's count; failed calls: {failures}")
            counts = f"{found.answers:,} answers, {found.verdicts:,} verdicts"
            print(f"  {counts}, wrong rewards: {found.wrong}", flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
