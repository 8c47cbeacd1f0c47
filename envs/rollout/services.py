"""What environments need from outside this program, as the configuration names it."""

import functools
import os
import shlex
import shutil
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from envs.judge import endpoints
from envs.judged import comparison


@dataclass(frozen=True)
class Services:
    """Parsers of answers, the sandbox, and programs and files that environments use."""

    __pydantic_config__: ClassVar[dict] = {"extra": "forbid"}  # an unknown name is an error

    reasoning_parser: str = ""
    """vLLM's parser of thoughts: nemotron_v3, deepseek_r1, ...; empty: `<think>` tags."""
    tool_parser: str = ""
    """vLLM's parser of tool calls: qwen3_coder, hermes, ...; empty: calls are not read."""
    sandbox: Literal["bubblewrap", "http", "unsafe"] = "bubblewrap"
    """What runs code that nobody trusts: "http" is the service of NeMo-Skills at sandbox_url."""
    sandbox_url: str = ""
    """Address of the sandbox service: http://127.0.0.1:6000."""
    lean: str = ""
    """Command that compiles a Lean file beside Mathlib; empty: the sandbox service does."""
    images: str = ""
    """Folder of the images or root folders that patches are tested in."""
    workplace: str = ""
    """Folder of the five tables (CSV) that NeMo-Gym's workplace_assistant works on."""
    judges: dict[str, dict[str, Any]] = field(default_factory=dict, hash=False)
    """Models that judge answers, by name: url, model, concurrency, sampling (docs/judges.md)."""
    genrm: dict[str, float] = field(default_factory=dict, hash=False)
    """Weights of a comparison that are unlike RLVR's, by name (envs/judged/comparison.py)."""
    nemo_gym: tuple[str, ...] = ()
    """Servers of NeMo-Gym or verifiers with the agents that envs/ lacks: http://HOST:PORT."""

    def __post_init__(self) -> None:
        """Refuses servers that no call could be made to, and unknown weights. Raises ValueError."""
        comparison.weights(self.genrm)
        for url in self.nemo_gym:
            if not endpoints.is_address(url) or url.endswith("/"):
                expected = "expected addresses such as ('http://HOST:PORT',)"
                raise ValueError(f"services.nemo_gym = {self.nemo_gym!r}, {expected}")
        for name, judge in self.judges.items():
            endpoints.check(f"services.judges[{name!r}]", judge)


EXPECTED = {
    "lean": "a command such as `env LEAN_PATH=... /opt/lean/bin/lean` (elan installs Lean, `lake "
    "exe cache get` Mathlib, `lake env` says LEAN_PATH), or services.sandbox = 'http'",
    "images": "a folder of unpacked images, and services.sandbox = 'bubblewrap'",
    "workplace": "the folder csv_data/processed of NeMo-Gym's workplace_assistant",
}
_current = [Services()]


def configure(services: Services) -> None:
    """Sets what the environments of this process use: once, before the first row."""
    _current[0] = services


def current() -> Services:
    """The services of this process."""
    return _current[0]


def problem(need: str) -> str:
    """What keeps environments from something that they need, and how to get it; "" for nothing.

    `need` is "sandbox", "checks" (whose answers run as code), "judges.NAME", "nemo_gym.AGENT", or
    the name of a setting in Services that must not be empty.
    """
    setting, _, name = need.partition(".")
    if name and setting == "judges":
        return endpoints.problem(name, current().judges.get(name, {}))
    if name and setting == "nemo_gym":
        from envs.gym import gym

        return gym.problem(name)
    return _problem(need, current())


@functools.cache
def _problem(need: str, services: Services) -> str:
    if need == "shell" and services.sandbox != "bubblewrap":
        return f"services.sandbox = {services.sandbox!r}, expected 'bubblewrap'"
    if need in ("sandbox", "shell", "checks"):
        from envs.sandbox.sandbox import problem as of_sandbox
        from envs.sandbox.sandbox import problem_of_checks

        return problem_of_checks() if need == "checks" else of_sandbox()
    value = getattr(services, need)
    shown = f"services.{need} = {value!r}"
    if not value:
        return f"{shown}, expected {EXPECTED.get(need, 'a value')}"
    if need == "lean" and not shutil.which(shlex.split(value)[0]):
        return f"{shown}: no such command; expected {EXPECTED[need]}"
    if need == "images" and (services.sandbox != "bubblewrap" or not os.path.isdir(value)):
        return f"{shown}, services.sandbox = {services.sandbox!r}, expected {EXPECTED[need]}"
    if need == "workplace":
        from envs.office.office import FILES

        absent = [file for file in FILES.values() if not os.path.isfile(os.path.join(value, file))]
        return f"{shown} lacks {', '.join(absent)}: expected {EXPECTED[need]}" if absent else ""
    return ""
