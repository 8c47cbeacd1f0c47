r"""Lean 4 proofs of a given statement, compiled with Mathlib: 1.0 if Lean accepts it, else 0.0.

Row: `header` (imports and options), `formal_statement` (up to its `:= by`), and `informal_prefix`,
`name` and `split`, which are not used. Judged, as in NeMo-Gym's resources_servers/math_formal_lean:
the last fenced block of lean4, else lean3, lean or any, else the whole text. If a block has a
theorem or an example, only its proof counts, which follows `:=` and `by`; the row's header and
statement are put before it. Lean must end with code 0 within 30 s and not print "sorry". Here one
answer is judged; in envs/proofs/lean_refinement.py the policy may answer again after it has seen
Lean's errors.

`services.lean` is a command that compiles in the sandbox, a folder that launch/lean.sh created,
whose bin/lean does so, or the URL of NeMo-Skills' sandbox service, which includes Lean v4.12.0 and
Mathlib. If services.sandbox is "http" and services.lean is empty, the service at
services.sandbox_url compiles the proofs.

Deliberate deviations. FORBIDDEN words earn 0, wherever they appear: with them, an answer could run
code inside Lean, which can end Lean with code 0, or make Lean trust the compiler instead of the
kernel (`native_decide`). All of Lean's output is read, not only its first 1,000 characters, after
which a "sorry" can hide. If Lean fails without naming a line of the proof, it must compile the
row's header: a Lean without Mathlib is an error, not a 0. Once per header, Lean must refuse a false
proof.

Not checked: which axioms a proof uses (#print axioms). An axiom that an answer adds comes after the
statement, so the proof cannot use it.
"""

import re
from typing import NamedTuple

from core.waits import in_thread
from envs import Reward, final_text, get, require, unfinished
from envs.proofs import lean_runs, lean_source
from envs.proofs.lean_source import code_of, proof_of
from envs.sandbox import sandbox
from envs.services import Need

AGENTS = ("math_formal_lean_simple_agent", "math_formal_lean")
LONGEST = 50_000  # characters of a proof, which is searched for forbidden words
FORBIDDEN = re.compile(
    r"sorryAx|native_decide|\+\s*native|native\s*:=|(?:ofR|r)educe(?:Bool|Nat)|skipKernelTC|"
    r"warn\.sorry|implemented_by|\bcsimp\b|\bextern\b|\bunsafe\b|initialize\b|#eval|\brun_\w+|"
    r"\bby_elab\b|\belab(?:_rules)?\b|\bmacro(?:_rules)?\b|simproc\w*|\bIO\b|\bElab\b|\bMeta\b"
)


def needs(row: dict) -> tuple[Need, ...]:
    """`services.lean`, and a sandbox unless `services.lean` is a service."""
    return (lean_source.NEED,) if lean_source.url() else (lean_source.NEED, sandbox.NEED)


def check(row: dict) -> None:
    """Raises ValueError unless the row has a header and a statement that a proof can follow."""
    get(row, "header", str, "imports and options, or an empty text")
    statement = get(row, "formal_statement", str, "a theorem up to its `:= by`")
    ready = re.search(r":=\s*(?:by\s*)?\Z", statement)
    require(ready, "formal_statement", statement, "a theorem up to its `:= by`")
    for name in ("informal_prefix", "name", "split"):
        get(row, name, str | None, "a text or null")


class Attempt(NamedTuple):
    """An answer, its reward and Lean's output."""

    reward: Reward  # 0.0 or 1.0; `reason` explains a 0, `lean` is the start of Lean's output
    source: str = ""  # the file that Lean compiled
    ran: sandbox.Ran | None = None  # Lean's run; None if nothing was compiled


async def verify(row: dict, response: str) -> Reward:
    """Returns the reward for an attempt."""
    return (await attempt(row, response)).reward


async def attempt(row: dict, response: str) -> Attempt:
    """Compiles an answer's proof. Raises CheckerError if Lean cannot run."""
    text = final_text(response)
    if reason := unfinished(text):
        return Attempt(Reward(0.0, {"reason": reason}))
    proof = await in_thread(lambda: proof_of(code_of(text)))
    if reason := refused(proof):
        return Attempt(Reward(0.0, {"reason": reason}))
    source = row["header"] + row["formal_statement"] + proof
    ran = await lean_runs.compile_lean(source)
    reason = lean_runs.failure(ran)
    if not reason:
        await lean_runs.must_refuse(row["header"])
    elif reason != "sorry" and await lean_runs.is_doubtful(row["header"], ran):
        ran = await lean_runs.compile_lean(source)
        reason = lean_runs.failure(ran)
        if reason and lean_runs.is_unsaid(ran):
            await lean_runs.must_compile(row["header"])
    if not reason:
        return Attempt(Reward(1.0), source, ran)
    output = (ran.stdout + ran.stderr)[:1000]
    return Attempt(Reward(0.0, {"reason": reason, "lean": output}), source, ran)


def refused(proof: str) -> str:
    """Returns why a proof must not be compiled; "" if it may be."""
    if len(proof) > LONGEST:
        return "too long"
    word = FORBIDDEN.search(proof)
    return f"forbidden: {word[0]}" if word else ""
