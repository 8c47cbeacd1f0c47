"""Declares the settings for what environments need from outside this program."""

import os
import re
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

# The names that services.genrm may set, and their values in RLVR.
WEIGHTS = {
    "reasoning_bonus": 0.5,  # for the group's shortest reasoning, if its answer is a top one
    "answer_bonus": 0.5,  # for the shortest answer, if it is a top one
    "top_percentile": 0.2,  # share of the group that is on top
    "reasoning_length": 0.1,  # score difference between the longest reasoning and the shortest
    "answer_length": 0.1,  # score difference between the longest answer and the shortest
    "style": 0.1,  # score difference between the most densely formatted answer and the plainest
}


def weights(given: dict[str, float]) -> dict[str, float]:
    """Returns all weights: WEIGHTS, overridden by services.genrm.

    Raises ValueError if a name is unknown or a value is out of range.
    """
    for name, value in given.items():
        if name not in WEIGHTS:
            known = ", ".join(WEIGHTS)
            raise ValueError(
                f"services.genrm[{name!r}] = {value!r}, expected one of the names {known}"
            )
        most = 1.0 if name == "top_percentile" else 1e3
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= most:
            raise ValueError(
                f"services.genrm[{name!r}] = {value!r}, expected a number from 0 to {most:g}"
            )
    return WEIGHTS | given


ADDRESS = re.compile(r"https?://[^\s/?#]+(/[^\s?#]*)?")
KEYS = ("url", "model", "concurrency", "sampling", "prompts")
OWN = {"messages", "model", "n", "stream"}  # parameters that a call sets itself


def check_judge(name: str, judge: dict[str, Any]) -> None:
    """Raises ValueError naming the field, its value and the expectation if a judge is malformed."""
    urls = judge.get("url") or []
    if not isinstance(urls, list):
        urls = [urls]
    count = judge.get("concurrency", 1)
    sampling = judge.get("sampling", {})
    wrong = [(key, judge[key], f"one of {', '.join(KEYS)}") for key in judge if key not in KEYS]
    for url in urls:
        if not isinstance(url, str) or not is_address(url):
            wrong.append(("url", url, "http://HOST:PORT/v1"))
    if not isinstance(judge.get("model", ""), str):
        wrong.append(("model", judge["model"], "the name that the server gives it, or ''"))
    if not isinstance(judge.get("prompts", ""), str):
        wrong.append(("prompts", judge["prompts"], "the path of a file of prompts"))
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        wrong.append(("concurrency", count, "calls at once, 1 or more"))
    if not isinstance(sampling, dict) or not all(isinstance(key, str) for key in sampling):
        wrong.append(("sampling", sampling, "a dictionary such as {'temperature': 0.0}"))
    elif own := sorted(OWN & sampling.keys()):
        wrong.append(("sampling", sampling, f"no {own[0]!r}, which each call sets itself"))
    if wrong:
        key, value, expected = wrong[0]
        raise ValueError(f"services.judges[{name!r}][{key!r}] = {value!r}, expected {expected}")


def is_address(url: object) -> bool:
    """Returns True if a URL can be called; in a configuration it may have any type."""
    return isinstance(url, str) and ADDRESS.fullmatch(url) is not None


@dataclass(frozen=True)
class Services:
    """Parsers of answers, the sandbox, and programs and files that environments use."""

    __pydantic_config__: ClassVar[dict] = {"extra": "forbid"}  # an unknown name is an error

    reasoning_parser: str = ""
    """vLLM's reasoning parser: nemotron_v3, deepseek_r1, ...; empty: `<think>` tags."""
    tool_parser: str = ""
    """vLLM's tool call parser: qwen3_coder, hermes, ...; empty: calls are not read."""
    sandbox: Literal["bubblewrap", "http", "unsafe"] = "bubblewrap"
    """Sandbox for untrusted code; "http" is the service of NeMo-Skills at sandbox_url."""
    sandbox_url: str = ""
    """Address of the sandbox service: http://127.0.0.1:6000."""
    lean: str = ""
    """Lean compiler: the folder of launch/lean.sh, a command, or a sandbox service's URL."""
    images: str = ""
    """Folder with the images or root folders that patches are tested in."""
    workplace: str = ""
    """Folder with the five tables (CSV) that NeMo-Gym's workplace_assistant works on."""
    judges: dict[str, dict[str, Any]] = field(default_factory=dict, hash=False)
    """Models that judge answers, by name: url, model, sampling and others (docs/judges.md)."""
    genrm: dict[str, float] = field(default_factory=dict, hash=False)
    """Weights of comparisons that differ from RLVR's, by name (envs/llm_judged/comparison.py)."""
    nemo_gym: tuple[str, ...] = ()
    """NeMo-Gym or verifiers servers with the agents that envs/ lacks: http://HOST:PORT."""

    def located(self) -> "Services":
        """Returns a copy with absolute paths, because each process has its own working folder."""
        named = {name: getattr(self, name) for name in ("lean", "images", "workplace")}
        folders = {name: os.path.abspath(p) for name, p in named.items() if os.path.isdir(p)}
        judges = {name: dict(judge) for name, judge in self.judges.items()}
        for judge in judges.values():
            if "prompts" in judge:
                judge["prompts"] = os.path.abspath(judge["prompts"])
        return replace(self, judges=judges, **folders)

    def __post_init__(self) -> None:
        """Refuses malformed addresses, judges and weights. Raises ValueError."""
        weights(self.genrm)
        if self.sandbox_url and not is_address(self.sandbox_url):
            raise ValueError(
                f"services.sandbox_url = {self.sandbox_url!r}, expected an address such as"
                " http://127.0.0.1:6000"
            )
        for url in self.nemo_gym:
            if not is_address(url) or url.endswith("/"):
                raise ValueError(
                    f"services.nemo_gym = {self.nemo_gym!r}, expected addresses such as"
                    " ('http://HOST:PORT',)"
                )
        for name, judge in self.judges.items():
            check_judge(name, judge)
