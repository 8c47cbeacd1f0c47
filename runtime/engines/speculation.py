"""Checks a drafter (speculative decoding), and warns as it ages while the policy moves."""

import ast
import functools
import json
import math
import os
import statistics
from collections import deque
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from core.errors import InputError
from settings.config import RunSettings, TrainingSettings
from settings.hub import is_class

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

WEIGHTLESS = {"ngram", "[ngram]", "ngram_gpu", "suffix"}  # methods that look tokens up
OWN_COUNT = {"suffix", "dspark"}  # methods that choose how many tokens they draft
# Methods that read the drafter from a folder of its own.
SEPARATE = {"draft_model", "eagle", "eagle3", "medusa", "mlp_speculator", "dflash"}
SETTING = "engine.args['speculative_config']"
STEPS = 5  # number of steps whose mean is compared
FALL = 0.75  # a mean below this fraction of the one reported last is reported
MARK = b'"draft_acceptance"'


def ageing(cfg: TrainingSettings) -> str:
    """Returns the note on its drafter that a run prints first; "" if no drafter has weights."""
    if not isinstance(cfg, RunSettings):
        return ""
    drafts = cfg.engine.args.get("speculative_config")
    if not drafts or drafts.get("method") in WEIGHTLESS:
        return ""
    return (
        "note: no update trains the drafter of speculative_config: "
        "it will be accepted less often as the policy moves: watch draft_acceptance"
    )


def check(cfg: RunSettings, hf: "PreTrainedConfig") -> None:
    """Raises InputError for drafts that vLLM would refuse when an engine starts.

    runtime/startup/preflight.py compares their names and types with vLLM's own.
    """
    drafts = cfg.engine.args.get("speculative_config")
    if drafts is None:
        return
    method = drafts.get("method")
    model = drafts.get("model")
    if not method and not model:
        raise InputError(
            f"{SETTING} = {drafts}: expected a method, such as "
            "{'method': 'ngram', 'num_speculative_tokens': 3}"
        )
    if "num_speculative_tokens" not in drafts and method not in OWN_COUNT:
        raise InputError(f"{SETTING} = {drafts}: expected num_speculative_tokens, 1 or more")
    least = drafts.get("prompt_lookup_min")
    most = drafts.get("prompt_lookup_max")
    if least and most and least > most:
        raise InputError(f"{SETTING} sets prompt_lookup_min = {least} > prompt_lookup_max = {most}")
    size = drafts.get("draft_tensor_parallel_size")
    if size not in (None, 1, cfg.engine.tensor_parallel):
        raise InputError(
            f"{SETTING} sets draft_tensor_parallel_size = {size}: "
            f"expected 1 or engine.tensor_parallel = {cfg.engine.tensor_parallel}"
        )
    if method == "suffix" and not find_spec("arctic_inference"):
        raise InputError(
            f"{SETTING} sets method = 'suffix', which needs a library that is not installed: "
            "pip install arctic-inference"
        )
    check_drafter(drafts, hf)


def check_drafter(drafts: Mapping[str, Any], hf: "PreTrainedConfig") -> None:
    """Raises InputError if the drafter is missing: its folder, or the heads of the policy."""
    method = drafts.get("method") or "draft_model"
    model = drafts.get("model")
    if model in WEIGHTLESS or is_class(model):
        return
    if model and not os.path.isfile(os.path.join(model, "config.json")):
        raise InputError(
            f"{SETTING} sets model = {model!r}: expected a folder that holds config.json"
        )
    if not model and method in SEPARATE:
        raise InputError(f"{SETTING} sets method = {method!r}: expected the folder of its model")
    if not model and (method == "mtp" or method.endswith("_mtp")):
        kinds = {hf.model_type, *(hf.architectures or ())}
        heads = getattr(hf.get_text_config(), "num_nextn_predict_layers", 1)
        if heads == 0 or (models_with_heads() and not kinds & models_with_heads()):
            raise InputError(
                f"{SETTING} sets method = {method!r}, but the model has no heads that draft: "
                f"model_type = {hf.model_type!r} in config.json"
            )


@functools.cache
def models_with_heads() -> set[str]:
    """Returns the model types and architectures whose MTP heads vLLM can use, from its source.

    Empty if its source is not as expected.
    """
    spec = find_spec("vllm")
    path = Path(str(spec and spec.origin)).parent / "config/speculative.py"
    if not path.is_file():
        return set()
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef) and node.name == "hf_config_override":
            words = (word.value for word in ast.walk(node) if isinstance(word, ast.Constant))
            found |= {word for word in words if isinstance(word, str)}
    return found


class Acceptance:
    """The share of accepted drafts, compared with the share in a run's first steps."""

    def __init__(self, metrics: Path):
        """Reads the steps that the run wrote before it was stopped, from its metrics.jsonl."""
        self.latest: deque[float] = deque(maxlen=STEPS)
        self.first = math.nan
        self.named = math.nan  # the mean that was reported last; no mean is below NaN
        if metrics.exists():
            with open(metrics, "rb") as lines:
                for line in lines:
                    if MARK in line:
                        self.fallen(json.loads(line))

    def fallen(self, step: Mapping[str, float]) -> str:
        """Returns a warning if the mean of the last steps fell by another quarter; else ""."""
        if "draft_acceptance" not in step:
            return ""
        self.latest.append(step["draft_acceptance"])
        if len(self.latest) < STEPS:
            return ""
        mean = statistics.fmean(self.latest)
        if math.isnan(self.first):
            self.first = self.named = mean
        if mean >= FALL * self.named:
            return ""
        self.named = mean
        return (
            f"draft_acceptance fell from {self.first:.2f} in the first {STEPS} steps to "
            f"{mean:.2f}, accepted_length is {step['accepted_length']:.2f}: "
            "train the drafter on this policy's answers, or leave speculative_config out"
        )
