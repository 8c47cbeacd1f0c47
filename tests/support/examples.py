"""How many examples hypothesis tries a property with."""

import os


def tries(examples: int) -> int:
    """A tenth of them in the quick run of tests/run.sh, all of them in CI."""
    return examples // 10 if "GRPO_QUICK" in os.environ else examples
