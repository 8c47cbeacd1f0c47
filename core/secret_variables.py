"""Tells which environment variables hold secrets, and hides them from processes that need none."""

import contextlib
import os
import re
from collections.abc import Iterator

# HF_TOKEN, WANDB_API_KEY, AWS_SECRET_ACCESS_KEY; launch/grpo.sbatch has the same ends of names.
SECRET = re.compile(r".*(TOKEN|KEY|SECRET|PASSWORD|PASSWD|CREDENTIALS?)", re.I)
OF_RAY = "RAY_AUTH_TOKEN"  # all processes of a run prove with it that they belong to the run


def is_secret(name: str) -> bool:
    """Returns whether a variable holds a secret, by its name."""
    return name != OF_RAY and SECRET.fullmatch(name) is not None


def public() -> dict[str, str]:
    """Returns the environment variables of this process that hold no secret."""
    return {name: value for name, value in os.environ.items() if not is_secret(name)}


@contextlib.contextmanager
def hidden() -> Iterator[None]:
    """Hides the secrets of this process from processes that are started in the block."""
    secrets = {name: value for name, value in os.environ.items() if is_secret(name)}
    for name in secrets:
        del os.environ[name]
    try:
        yield
    finally:
        os.environ.update(secrets)
