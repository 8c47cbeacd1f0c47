"""Says with how many examples hypothesis tries a property."""

import os


def tries(examples: int) -> int:
    """Returns all of them in `tests/run.sh long`, and a tenth of them elsewhere."""
    return examples if "GRPO_LONG" in os.environ else examples // 10
