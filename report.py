"""The curves of a run: `python report.py RUN_DIR` -> RUN_DIR/reward.png."""

import json
import sys
from pathlib import Path


def draw(run_dir: str) -> Path:
    """Draws reward, validation reward and policy lag over the steps; returns the picture's path."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    text = (Path(run_dir) / "metrics.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    trained = [line for line in lines if "reward" in line]
    validated = [line for line in lines if "validation_reward" in line]
    figure, (top, bottom) = pyplot.subplots(
        2, 1, sharex=True, figsize=(7, 5), height_ratios=(3, 1), layout="constrained"
    )
    steps = [line["step"] for line in trained]
    top.plot(steps, [line["reward"] for line in trained], color="0.75", label="training batch")
    if validated:
        top.plot(
            [line["step"] for line in validated],
            [line["validation_reward"] for line in validated],
            "o-",
            color="C0",
            label="validation, sampled as in training",
        )
    top.set(ylabel="mean reward", title=Path(run_dir).name)
    top.legend(loc="lower right")
    top.grid(alpha=0.3)
    bottom.plot(steps, [line["lag_mean"] for line in trained], color="C1", label="mean lag (steps)")
    mixed = [line["mixed_version_samples"] for line in trained]
    bottom.plot(steps, mixed, color="C2", label="samples with two or more versions (share)")
    bottom.set(xlabel="step")
    bottom.legend(loc="center right", fontsize="small")
    bottom.grid(alpha=0.3)
    picture = Path(run_dir) / "reward.png"
    figure.savefig(picture, dpi=120)
    pyplot.close(figure)
    return picture


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python report.py RUN_DIR")
    print(draw(sys.argv[1]))
