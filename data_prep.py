"""Prepares data: released blends, your own questions, pass rates, models. See docs/data.md.

    python data_prep.py blend                                  Nemotron 3 Super's blends
    python data_prep.py check data/rlvr1/train-split.jsonl     can it be trained on?
    python data_prep.py rows SOURCE OUT --prompt question --answer answer --agent math
    python data_prep.py profile FILE OUT --model M -- --config configs/gsm8k.py
    python data_prep.py curriculum FILE OUT --prompts_per_step 256
    python data_prep.py effort FILE OUT --phase early
    python data_prep.py reasoning_control FILE OUT
    python data_prep.py tool_pairs FILE runs/NAME/rollouts.jsonl OUT
    python data_prep.py swe SOURCE OUT --check                 repository issues, with tests
    python data_prep.py pivot TRAJECTORIES OUT                 agents' single steps
    python data_prep.py model FILE.gguf OUT                    a model in bf16

Every command reads its input line by line and writes to a temporary name, so a file under its final
name is complete. The same input gives the same bytes.
"""

import dataclasses
import sys
from collections.abc import Callable
from typing import Protocol

try:
    import tyro
except ModuleNotFoundError:
    sys.exit(
        "error: this Python lacks the project's libraries: run DEVICE=cpu bash launch/setup.sh, "
        "and then .venv/bin/python data_prep.py; runs in containers do not use this .venv"
    )

from core.errors import InputError, reader_may_leave
from prep.blend import Blend
from prep.check import Check
from prep.convert import Rows
from prep.curriculum import Curriculum
from prep.model_folder import Model
from prep.pivot import Pivot
from prep.profile import Profile
from prep.shares import Effort, ReasoningControl
from prep.swe_rows import Swe
from prep.tool_pairs import ToolPairs


class Command(Protocol):
    """A command with its arguments."""

    def run(self) -> int:
        """Runs the command; returns its exit code."""


COMMANDS: dict[str, Callable[..., Command]] = {
    "blend": Blend,
    "check": Check,
    "rows": Rows,
    "profile": Profile,
    "curriculum": Curriculum,
    "effort": Effort,
    "reasoning_control": ReasoningControl,
    "tool_pairs": ToolPairs,
    "swe": Swe,
    "pivot": Pivot,
    "model": Model,
}


def main(argv: list[str]) -> int:
    """Runs a command; returns its exit code. Raises InputError for bad input."""
    at = argv.index("--") if "--" in argv else len(argv)
    command = tyro.extras.subcommand_cli_from_dict(
        COMMANDS, prog="data_prep.py", description=__doc__, args=argv[:at]
    )
    if isinstance(command, Profile):
        command = dataclasses.replace(command, overrides=tuple(argv[at + 1 :]))
    elif at < len(argv):
        raise InputError("only profile accepts --: the words after it are passed to its run")
    try:
        return command.run()
    except BrokenPipeError:
        raise
    except OSError as error:  # a full disk, a read-only folder
        raise InputError(f"{error.filename or 'output'}: {error.strerror}") from None


if __name__ == "__main__":
    with reader_may_leave():
        sys.exit(main(sys.argv[1:]))
