r"""Lean 4 proofs of a given statement, compiled beside Mathlib: 1.0 if Lean accepts it, else 0.0.

Row: `header` (imports and options), `formal_statement` (up to its `:= by`), and for readers
`informal_prefix`, `name`, `split`. Judged, as in NeMo-Gym's resources_servers/
math_formal_lean: the last fenced block of lean4, else lean3, lean or any, else the whole text. Of a
block with a theorem or an example only the proof counts, what follows its `:=` and `by`; the row's
header and statement go before it. Lean must end with code 0 within 30 s and not print "sorry". Here
one answer is judged; envs/proofs/lean_refinement.py lets others follow upon Lean's errors.

The compiler is the command `services.lean`, in the sandbox; or, where services.sandbox is "http",
the service at services.sandbox_url, which brings Lean v4.12.0 and Mathlib along.

Deliberate deviations. FORBIDDEN words earn 0, wherever they stand: with them an answer runs code
inside Lean, which can end it with code 0, or has the compiler believed in place of the kernel
(`native_decide`). All of Lean's output is read, not its first 1,000 characters, after which a
"sorry" can hide. Where Lean's errors are not in the answer, it must compile the row's header: a
Lean without Mathlib is an error, not a 0.

Not checked: which axioms a proof uses (#print axioms). An axiom that an answer adds comes after the
statement, so the proof cannot use it.
"""

import re
import shlex
from typing import NamedTuple

from core.waits import in_thread
from envs import Reward, final_text, get, require, unfinished
from envs.proofs.lean_source import code_of, folders, proof_of
from envs.rollout import services
from envs.rollout.services import CheckerError
from envs.sandbox import sandbox, service

AGENTS = ("math_formal_lean_simple_agent", "math_formal_lean")
LIMITS = sandbox.Limits(seconds=30, memory=16 << 30, output=200_000)
ENDED = {"completed": "", "failed": "", "timeout": "time"}  # status of the service -> Ran.ended
LONGEST = 50_000  # characters of a proof, which is searched for forbidden words
FORBIDDEN = re.compile(
    r"sorryAx|native_decide|\+\s*native|native\s*:=|(?:ofR|r)educe(?:Bool|Nat)|skipKernelTC|"
    r"warn\.sorry|implemented_by|\bcsimp\b|\bextern\b|\bunsafe\b|initialize\b|#eval|\brun_\w+|"
    r"\bby_elab\b|\belab(?:_rules)?\b|\bmacro(?:_rules)?\b|simproc\w*|\bIO\b|\bElab\b|\bMeta\b"
)
ERROR = re.compile(r":(\d{1,9}):\d+: error")  # as in FILE:LINE:COLUMN: error: unknown identifier
SAYS_WHY = re.compile(r"error|overflow|exception|panic", re.IGNORECASE)  # or it was killed
COMPILES: set[str] = set()  # headers that this process has seen compiled


def needs(row: dict) -> tuple[str, ...]:
    """A sandbox, and `services.lean` unless that sandbox is the service of NeMo-Skills."""
    return ("sandbox",) if services.current().sandbox == "http" else ("lean", "sandbox")


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

    reward: Reward  # 0.0 or 1.0; `reason` is why 0, `lean` the start of Lean's output
    source: str = ""  # the file that Lean compiled
    ran: sandbox.Ran | None = None  # Lean's run; None where it compiled nothing


async def verify(row: dict, response: str) -> Reward:
    """The reward of an attempt."""
    return (await attempt(row, response)).reward


async def attempt(row: dict, response: str) -> Attempt:
    """Compiles an answer's proof. Raises CheckerError where Lean cannot run."""
    text = final_text(response)
    if reason := unfinished(text):
        return Attempt(Reward(0.0, {"reason": reason}))
    proof = await in_thread(lambda: proof_of(code_of(text)))
    if reason := refused(proof):
        return Attempt(Reward(0.0, {"reason": reason}))
    source = row["header"] + row["formal_statement"] + proof
    ran = await compile_lean(source)
    reason = failure(ran)
    if reason not in ("", "sorry") and await is_doubtful(row["header"], ran):
        ran = await compile_lean(source)
        reason = failure(ran)
    info = {"reason": reason, "lean": (ran.stdout + ran.stderr)[:1000]} if reason else {}
    return Attempt(Reward(float(not reason), info), source, ran)


def refused(proof: str) -> str:
    """Why a proof is not compiled; "" where it is."""
    if len(proof) > LONGEST:
        return "too long"
    word = FORBIDDEN.search(proof)
    return f"forbidden: {word[0]}" if word else ""


async def compile_lean(source: str) -> sandbox.Ran:
    """Lean's output for a file. Raises CheckerError where Lean cannot run."""
    own = services.current()
    source = source.encode("utf-8", "replace").decode()
    if own.sandbox == "http":
        reply = await service.execute(own.sandbox_url, source, "lean4", "", LIMITS)
        status, out, err = (reply[key] for key in service.FIELDS)
        if status not in ENDED or (status == "failed" and not SAYS_WHY.search(out + err)):
            raise CheckerError(f"the sandbox service at {own.sandbox_url}: {status}: {err[:300]}")
        ended = "output" if out.endswith("<output cut>") else ENDED[status]
        return sandbox.Ran(out, err, int(status == "failed"), ended, 0.0)
    command = [*shlex.split(own.lean), "proof.lean"]
    files = {"proof.lean": source}
    return await sandbox.run(command, files=files, reads=folders(command), limits=LIMITS)


def failure(ran: sandbox.Ran) -> str:
    """Why Lean did not accept a file: "timeout", "output", "memory", "failed", "sorry", or ""."""
    output = ran.stdout + ran.stderr
    if ran.ended:
        return "timeout" if ran.ended == "time" else ran.ended
    if ran.code != 0 or ERROR.search(output):
        return "failed"
    return "sorry" if re.search(r"\bsorry\b", output.lower()) else ""


async def is_doubtful(header: str, ran: sandbox.Ran) -> bool:
    """Whether a proof should be compiled again: Lean refused it and named no line of it.

    Raises CheckerError where the header alone does not compile either.
    """
    output = ran.stdout + ran.stderr
    of_answer = (int(line) > header.count("\n") for line in ERROR.findall(output))
    if any(of_answer):
        return False
    if header in COMPILES and (ran.ended or not output.strip()):
        # The service's deadline is one of the wall clock: it may have been busy.
        return ran.ended == "time" and services.current().sandbox == "http"
    probe = await compile_lean(header + "example : True := trivial\n")
    if reason := failure(probe):
        shown = " ".join((probe.stdout + probe.stderr).split())[:300]
        raise CheckerError(f"Lean cannot compile the header {header[:100]!r}: {reason}: {shown}")
    COMPILES.add(header)
    return True
