r"""Mathematics judged by the library math-verify: 1.0 if equivalent to the reference, else 0.0.

Row: `expected_answer` (string), with or without one outer `\(..\)` or `$..$`. Judged: the text
after `</think>`, whose expressions, boxed or not, are compared with `\boxed{expected_answer}`, as
in NeMo-Gym's resources_servers/math_with_judge without its judge. Deliberate deviation: a response
that never closes its `<think>` was cut off and earns 0.

SymPy hangs on answers such as 9^{9^{9^9}}, and no thread or signal handler can interrupt it. So
checks run in child processes, killed on a deadline and replaced, speaking JSON lines on pipes.
"""

import contextlib
import json
import logging
import os
import pkgutil
import resource
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

from envs import Reward, final_text, get, require, unfinished

AGENTS = ("math_with_judge_simple_agent", "math_with_judge", "math")
DEADLINE = 10.0  # seconds of one check, counted from when an idle child gets it
START_DEADLINE = 120.0  # seconds; a child needs about one second of CPU
CHILDREN = 2  # checks take milliseconds; two, so that a hanging one does not hold up the rest
CHILD_MEMORY = 4 << 30  # bytes of address space; a child uses 0.1 GB


def check(row: dict) -> None:
    """Raises ValueError unless `expected_answer` is a string that is not blank."""
    answer = get(row, "expected_answer", str, "a string")
    require(answer.strip(), "expected_answer", answer, "an answer")


async def verify(row: dict, response: str) -> Reward:
    """Reward 0.0 or 1.0; raises CheckerError where no check could run, whatever the answer."""
    text = final_text(response)
    if reason := unfinished(text):
        return Reward(0.0, {"reason": reason})
    verdict = await checkers.run(DEADLINE, expected=row["expected_answer"], text=text)
    return Reward(verdict.pop("value"), verdict)


def make_check():
    """The check that a child runs, its library imported and warm."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    targets = (ExprExtractionConfig(), LatexExtractionConfig())

    def check(expected: str, text: str) -> dict:
        for left, right in (("\\(", "\\)"), ("$", "$")):
            expected = expected.strip()
            if expected.startswith(left) and expected.endswith(right) and len(expected) > 1:
                expected = expected[len(left) : -len(right)].strip()
        gold = parse(f"\\boxed{{{expected}}}", targets[1:], parsing_timeout=None)
        answers = parse(text, targets, parsing_timeout=None)
        if not gold or not answers:
            return {"value": 0.0, "reason": "no answer found" if gold else "unparsable reference"}
        value = float(verify(gold, answers, float_rounding=6, timeout_seconds=None))
        # The string that was parsed: printing what SymPy made of it can itself take for ever.
        return {"value": value, "extracted": str(answers[-1])[:200]}

    check("\\frac{1}{2}", "\\boxed{\\frac{2}{4}}")  # the first parse builds the grammar's tables
    return check


class CheckerError(RuntimeError):
    """A check could not run: its process died, did not start, or was starved of CPU."""


class Checkers:
    """Child processes that run the function made by `factory`, "module:name", under a deadline.

    Tied to no event loop. Children start when first needed and end with this process. They are
    no sandbox: code that a check evaluates has this user's rights.
    """

    def __init__(self, factory: str):
        self.factory, self.own = factory, threading.local()  # each thread has its own child
        self.threads = ThreadPoolExecutor(CHILDREN)

    async def run(self, deadline: float, **request) -> dict:
        """The function's answer to `request`; value 0.0 with reason "timeout" after `deadline`.

        The deadline, in seconds, does not count the wait for a free child. Raises CheckerError.
        """
        import asyncio  # takes longer than all else that the registry imports with this module

        return await asyncio.wrap_future(self.threads.submit(self._run, deadline, request))

    def _run(self, deadline: float, request: dict) -> dict:
        child = getattr(self.own, "child", None)
        if child is None or child.poll() is not None:
            child = self.own.child = self._start()
        cpu = (~child.pid << 3) | 2  # the clock of another process, see clock_getcpuclockid(3)
        began, used = time.monotonic(), time.clock_gettime(cpu)
        if reply := self._ask(child, json.dumps([deadline, request]) + "\n", deadline):
            return json.loads(reply)
        waited, used = time.monotonic() - began, time.clock_gettime(cpu) - used
        child.communicate()
        if waited < deadline or used < deadline / 10:  # it crashed, or hardly got to run
            raise CheckerError(f"{self.factory}: code {child.returncode} after {used:.1f} s of CPU")
        return {"value": 0.0, "reason": "timeout"}

    def _start(self) -> subprocess.Popen:
        code = f"import sys; sys.path[:] = {sys.path!r}; from envs.math import serve; serve()"
        # Address space for the stacks of 128 BLAS threads would alone exceed the memory limit.
        env = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        pipes["start_new_session"] = True  # Ctrl-C is meant for the parent
        child = subprocess.Popen([sys.executable, "-c", code, self.factory], env=env, **pipes)
        if not self._ask(child, "", START_DEADLINE):
            child.communicate()
            raise CheckerError(f"{self.factory}: code {child.returncode} at its start")
        return child

    def _ask(self, child: subprocess.Popen, line: str, deadline: float) -> str:
        """The child's next line; "" if it died, of the deadline or otherwise."""
        timer = threading.Timer(deadline, child.kill)
        timer.start()
        with contextlib.suppress(BrokenPipeError):
            child.stdin.write(line)
            child.stdin.flush()
        reply = child.stdout.readline()
        timer.cancel()
        return reply


def serve() -> None:
    """A child's life: answer requests until the parent closes the pipe."""
    requests, replies = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # a check may print, and even close its stdin
    logging.disable(logging.CRITICAL)
    resource.setrlimit(resource.RLIMIT_AS, (CHILD_MEMORY, CHILD_MEMORY))
    function = pkgutil.resolve_name(sys.argv[1])()
    print("ready", file=replies, flush=True)
    for line in requests:
        deadline, request = json.loads(line)
        signal.alarm(int(deadline) + 2)  # a hanging check must not outlive a killed parent
        reply = function(**request)
        signal.alarm(0)
        print(json.dumps(reply), file=replies, flush=True)


checkers = Checkers("envs.math:make_check")
