"""`effort` and `reasoning_control`: make a share of the rows ask the model for less.

A row is chosen by the hash of its line, so the same rows are chosen each time, in any order.
"""

import hashlib
import json
from collections import Counter
from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from core.errors import InputError
from prep import files

MARKER = "{reasoning effort: low}"  # from the Super recipe, as in advantage.low_effort.marker
# The agents for the domains in the report, without `_simple_agent`.
DOMAINS = {
    "math": ("math", "math_with_judge"),
    "stem": ("mcqa", "equivalence_llm_judge"),
    "code": ("code_gen",),
}
# Share of each domain's rows. The step at which the phase changes is not published.
PHASES = {
    "early": {"math": 0.02, "stem": 0.02, "code": 0.02},
    "late": {"math": 0.01, "stem": 0.01},
}
OFF, LIMITED = 0.10, 0.03  # shares of rows whose reasoning Nemotron 3 Nano strips and truncates
BUDGETS = (1024, 2048, 4096, 8192)  # tokens; the report does not publish its budgets


def share(text: str, purpose: str) -> float:
    """Returns a number in [0, 1) that depends only on a line and a purpose."""
    digest = hashlib.sha256(f"{purpose}\n{text.strip()}".encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


@dataclass(frozen=True)
class Effort:
    """Makes some rows ask for low effort, which the run then rewards by length."""

    file: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="FILE")]
    """JSONL file of rows."""
    out: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="OUT")]
    """JSONL file to write, with the rows in the same order."""
    phase: Literal["early", "late"]
    """early: 2 % of math, STEM and code; late: 1 % of math and STEM."""

    def run(self) -> int:
        """Writes the rows and prints how many were chosen."""
        seen: Counter[str] = Counter()
        chosen: Counter[str] = Counter()
        with files.rewriting(self.file, self.out) as output:
            for line in files.lines(self.file):
                row = line.row()
                name = files.agent(row).removesuffix("_simple_agent")
                domain = next((key for key, agents in DOMAINS.items() if name in agents), "")
                seen[domain] += 1
                if share(line.text, "effort") >= PHASES[self.phase].get(domain, 0.0):
                    output.write(row, line.text)
                    continue
                mark(row, line.place)
                chosen[domain] += 1
                output.write(row)
        for domain in PHASES[self.phase]:
            print(f"  {domain}: {chosen[domain]:,} of {seen[domain]:,} rows ask for low effort")
        return 0


def mark(row: dict, place: str) -> None:
    """Adds the marker to the last user message. Raises InputError if there is none."""
    params = row.get("responses_create_params") or {}
    items = params.get("input")
    users = [item for item in items or () if isinstance(item, dict) and item.get("role") == "user"]
    if isinstance(items, str):
        holder, key = params, "input"
    else:
        holder, key = users[-1] if users else {}, "content"
    parts = holder.get(key)
    if isinstance(parts, list) and parts and isinstance(parts[-1], dict):
        holder, key = parts[-1], "text"
    if not isinstance(holder.get(key), str):
        raise InputError(
            f"{place}: responses_create_params.input holds {items!r:.60}, expected a user message"
        )
    holder[key] += f" {MARKER}"


@dataclass(frozen=True)
class ReasoningControl:
    """Makes some rows ask for answers without reasoning, and some for answers within a budget."""

    file: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="FILE")]
    """JSONL file of rows."""
    out: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="OUT")]
    """JSONL file to write, with the rows in the same order."""
    off: float = OFF
    """Share of the rows that get enable_thinking = false for the chat template."""
    limited: float = LIMITED
    """Share of the rows, in addition to `off`, that get a budget in max_output_tokens."""
    budgets: tuple[int, ...] = BUDGETS
    """Budgets in tokens, each used equally often."""

    def run(self) -> int:
        """Writes the rows and prints how many were chosen."""
        good = min(self.off, self.limited) >= 0 and self.off + self.limited <= 1
        if not good or not self.budgets or min(self.budgets) < 1:
            raise InputError(
                f"--off {self.off} --limited {self.limited} --budgets {self.budgets}: "
                "expected shares that add up to at most 1, and positive budgets"
            )
        counts: Counter[str] = Counter()
        with files.rewriting(self.file, self.out) as output:
            for line in files.lines(self.file):
                row = line.row()
                place = share(line.text, "reasoning_control") - self.off
                if place >= self.limited:
                    output.write(row, line.text)
                    continue
                params = row.get("responses_create_params")
                if not isinstance(params, dict):
                    raise InputError(
                        f"{line.place}: responses_create_params is {params!r:.60}, "
                        "expected an object"
                    )
                if place < 0:
                    stop_thinking(params, line.place)
                    counts["off"] += 1
                else:
                    budget = self.budgets[int(place / self.limited * len(self.budgets))]
                    own = params.get("max_output_tokens") or budget
                    params["max_output_tokens"] = min(own, budget)
                    counts["limited"] += 1
                output.write(row)
        print(f"  {counts['off']:,} rows without reasoning, {counts['limited']:,} with a budget")
        return 0


def stop_thinking(params: dict, place: str) -> None:
    """Merges enable_thinking = false into the row's chat-template variables, a JSON text."""
    metadata = params.setdefault("metadata", {}) or {}
    text = metadata.get("chat_template_kwargs") or "{}"
    try:
        variables = json.loads(text) | {"enable_thinking": False}
    except (TypeError, ValueError):
        raise InputError(
            f"{place}: responses_create_params.metadata.chat_template_kwargs is {text!r:.80}, "
            "expected a JSON object as text"
        ) from None
    params["metadata"] = metadata | {"chat_template_kwargs": json.dumps(variables)}
