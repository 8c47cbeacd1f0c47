"""Changes the code in one place after another, and prints which changes no test sees.

    python tests/mutations.py [COUNT [SEED]]    60 with seed 0: half an hour alone on the machine

A change is of one of these kinds:

    sign        a + b is a - b, a minus sign is gone
    bound       < is <=, > is >=, min is max, and back
    mask        a side of & or `and` is gone, or a `~`, a `not`, a filter; torch.where is swapped
    off by one  a whole number, the end of a slice or of a range is one higher
    swallow     an error is not raised, or its handler does nothing
    fsync       a flush to the disk or a rename is gone

The seed draws places in turn from the five areas of PARTS, and in an area in turn from the kinds,
so that each counts alike. Each change is made in a copy of the project, and the fast tests of its
file run there in the order of PARTS until one fails. If that one fails again by itself, the change
is seen; if it hangs, too. At the end the tests that have seen a change run in the unchanged copy:
what is red there has proved nothing.

Not changed are annotations, messages, the values of constants and settings, and `main`, which only
tests of whole programs run. Tests that compare the text of a file are left out, because they would
see every change. Changes that mean the same as the code are named in EQUIVALENT with the reason.
They are not drawn.

The exit status is 1 if fewer than 95 % of the changes are seen.
"""

import ast
import contextlib
import difflib
import importlib.util
import itertools
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from support.program import ROOT

SEEN = 0.95  # share of the changes
TEST_SECONDS = 120  # limit for a test: those that take a minute alone are marked `long`
RUN_SECONDS = 900  # limit for the tests of a file
# A change may make a loop endless: bytes that its tests may then use at most.
LIMITS = {resource.RLIMIT_AS: 16 << 30, resource.RLIMIT_FSIZE: 4 << 30}
LONGEST = 1000  # characters of a test's id: arguments of a command may have 100,000
LISTED = ["git", "-C", str(ROOT), "ls-files", "-co", "--exclude-standard", "-z"]
PYTEST = ["-m", "pytest", "-x", "--tb=no", "-m", "not (e2e or long)", "--hypothesis-seed=0"]
PYTEST += ["-p", "no:randomly", "--timeout", str(TEST_SECONDS)]
COMPARES_TEXT = "test_a_broken_buffer_is_caught"


class Part(NamedTuple):
    """A file, or some of its functions and classes, and the tests that protect it."""

    area: str
    source: str
    tests: str  # files below tests/, the most specific first
    names: str = ""  # definitions at the top of the file; "" for all


ADVANTAGES = "group_advantages importance_weights sequence_mean divisor trusted_sequences k3"
LOSS = "token_mismatch policy_loss plan_step pack token_advantages GradientSum Trained Trainer"
DISTILLATION = "Config pack distillation_loss RolloutWorker Teacher keep_score Trainer"
PREFERENCE = "Config sequence_sums preference_losses dpo_loss mean_metrics plan_pairs pack Trainer"
CHECKERS = "sandbox/test_checkers.py sandbox/test_from_outside.py sandbox/test_out_of_memory.py"
PROGRAMS = "sandbox/test_sandbox.py sandbox/test_from_outside.py sandbox/test_out_of_memory.py"
ENVS = {  # module below envs/: its tests there
    "chemistry/answer_format": "chemistry/test_molecules.py",
    "chemistry/litmus": "chemistry/test_litmus.py",
    "chemistry/molecules": "chemistry/test_molecules.py",
    "coding/code": "coding/test_code.py test_envs.py",
    "following/format_verification": "following/test_format_verification.py",
    "following/formats": "following/test_structured_outputs.py",
    "following/instruction_following": "following/test_instruction_following.py",
    "following/instructions": "following/test_instruction_following.py",
    "following/sentences": "following/test_instruction_following.py",
    "following/structured_outputs": "following/test_structured_outputs.py",
    "judge/judge": "judge/test_judge.py llm_judged/test_judged.py",
    "judge/verdicts": "llm_judged/test_judged.py llm_judged/test_injection.py",
    "llm_judged/comparison": "llm_judged/test_genrm.py",
    "llm_judged/genrm": "llm_judged/test_genrm.py",
    "maths/equivalence": "llm_judged/test_judged.py llm_judged/test_injection.py",
    "maths/math": "maths/test_math.py llm_judged/test_judged.py test_envs.py",
    "maths/same_answer": "llm_judged/test_judged.py llm_judged/test_injection.py",
    "parsers/parsers": "parsers/test_parsers.py",
    "proofs/lean_source": "proofs/test_lean.py",
    "questions/calendar": "questions/test_calendar.py",
    "questions/letters": "questions/test_mcqa.py",
    "questions/mcqa": "questions/test_mcqa.py",
    "questions/nvarc": "questions/test_nvarc.py",
    "questions/reasoning_gym": "questions/test_exact_answers.py test_envs.py",
    "sandbox/checkers": CHECKERS,
    "sandbox/outcome": "sandbox/test_from_outside.py sandbox/test_service.py",
    "sandbox/programs": PROGRAMS,
    "swe/codex_patch": "swe/test_codex_patch.py",
    "swe/coding_calls": "swe/test_swe_pivot.py",
    "swe/swe_pivot": "swe/test_swe_pivot.py",
    "swe/test_logs": "swe/test_outcomes.py swe/test_log_oracle.py swe/test_swe_patch.py",
    "tools/calls": "tools/test_tool_choice.py swe/test_swe_pivot.py",
    "tools/tool_choice": "tools/test_tool_choice.py",
    "workplace/office": "workplace/test_workplace.py",
    "workplace/workplace": "workplace/test_workplace.py",
}
CHECKPOINTS = "runtime/checkpoints/test_checkpoints.py runtime/checkpoints/test_archive.py"
FLEET = "runtime/engines/test_fleet.py runtime/engines/test_probe.py"
PARTS = [
    Part(
        "algorithm",
        "grpo_async.py",
        "test_algorithm.py test_packing.py test_worker.py",
        f"{ADVANTAGES} {LOSS} probe_gaps",
    ),
    Part("algorithm", "mopd.py", "test_mopd.py runtime/rollouts/test_teachers.py", DISTILLATION),
    Part("algorithm", "dpo.py", "test_dpo.py", PREFERENCE),
    Part("algorithm", "policy/logprobs.py", "policy/test_allowed_tokens.py policy/test_fsdp.py"),
    Part("algorithm", "policy/packing.py", "test_packing.py test_algorithm.py"),
    Part(
        "buffer",
        "grpo_async.py",
        "test_buffer.py test_schedules.py test_loops.py",
        "RolloutBuffer",
    ),
    Part("buffer", "grpo_async.py", "test_loops.py test_buffer.py", "Progress StepInParts Run"),
    Part("buffer", "runtime/rollouts/dispatch.py", "runtime/rollouts/test_dispatch.py"),
    Part(
        "buffer",
        "runtime/rollouts/outages.py",
        "runtime/rollouts/test_outages.py runtime/rollouts/test_dispatch.py",
    ),
    Part("fleet", "grpo_async.py", FLEET, "Engines"),
    Part("fleet", "runtime/engines/fleet.py", f"{FLEET} test_loops.py"),
    Part("fleet", "runtime/engines/repair.py", FLEET),
    Part("fleet", "runtime/engines/probe.py", "runtime/engines/test_probe.py " + FLEET),
    Part("resume", "runtime/checkpoints/archive.py", "runtime/checkpoints/test_archive.py"),
    Part("resume", "runtime/checkpoints/folders.py", CHECKPOINTS),
    Part("resume", "runtime/checkpoints/lineage.py", "runtime/checkpoints/test_lineage.py"),
    Part("resume", "runtime/checkpoints/resume.py", CHECKPOINTS),
    Part("resume", "runtime/checkpoints/row_scores.py", "test_dpo.py"),
    Part("resume", "runtime/checkpoints/save.py", f"{CHECKPOINTS} test_loops.py"),
    Part("resume", "core/jsonl.py", f"runtime/reporting/test_log.py {CHECKPOINTS}"),
    Part("rewards", "grpo_async.py", "test_worker.py test_zero_rewards.py", "RolloutWorker"),
    Part("rewards", "rollout/zero_rewards.py", "test_zero_rewards.py"),
]
for module, of_module in ENVS.items():
    tests = " ".join(f"envs/{name}" for name in of_module.split())
    PARTS.append(Part("rewards", f"envs/{module}.py", tests))


class Equivalent(NamedTuple):
    """A change that no test can see, or none should: named by the lines, not by their number."""

    source: str
    before: str
    after: str
    reason: str


EQUIVALENT = [
    Equivalent(
        "grpo_async.py",
        "spread_G = std_G > SPREAD_FLOOR * r_G.abs().max()",
        "spread_G = std_G >= SPREAD_FLOOR * r_G.abs().max()",
        "both are 0 only if all rewards are, and then so are the advantages",
    ),
    Equivalent(
        "runtime/checkpoints/resume.py",
        'trained = state.get("version", 0) * config.get("prompts_per_step", 0)',
        'trained = state.get("version", 1) * config.get("prompts_per_step", 0)',
        "without a checkpoint there is no config either: the product is 0",
    ),
    Equivalent(
        "runtime/checkpoints/resume.py",
        "while high - low > BLOCK:",
        "while high - low >= BLOCK:",
        "one more bisection: any line up to the step will do",
    ),
    Equivalent(
        "runtime/engines/repair.py",
        "if time.monotonic() - began < waits.ANSWER_SECONDS:",
        "if time.monotonic() - began <= waits.ANSWER_SECONDS:",
        "the clock has nanoseconds: a difference of exactly the limit does not happen",
    ),
    Equivalent(
        "envs/questions/letters.py",
        "while start < end and text[start].isspace():",
        "while (text[start].isspace()):",
        "at `end` is the closing brace, which is no white space",
    ),
    Equivalent(
        "envs/swe/coding_calls.py",
        "return None",
        "pass",
        "a function without a return returns None",
    ),
    Equivalent(
        "envs/swe/swe_pivot.py",
        'return Reward(0.0, {"reason": "nested too deep"})',
        "pass",
        "what is too deep to be compared was too deep to be parsed, just before",
    ),
    Equivalent(
        "envs/sandbox/checkers.py",
        "slept = idle and busy - busy_before < (now - before) / 2",
        "slept = idle and busy - busy_before <= (now - before) / 2",
        "the clock has nanoseconds: a sleep of exactly half of the time does not happen",
    ),
]
NAMES = {equivalent[:3] for equivalent in EQUIVALENT}
KINDS = 6

# === Places =======================================================================================


class Place(NamedTuple):
    """A change: bytes `start` to `end` of a file become `new`."""

    part: Part
    kind: str
    line: int
    start: int
    end: int
    new: bytes

    def applied(self, text: bytes) -> bytes:
        """Returns the file with the change."""
        return text[: self.start] + self.new + text[self.end :]

    def lines(self, text: bytes) -> tuple[str, str]:
        """Returns the changed lines before and after, each as one line."""
        first = text.rfind(b"\n", 0, self.start) + 1
        last = text.find(b"\n", self.end)
        after = text[first : self.start] + self.new + text[self.end : last]
        return one_line(text[first:last]), one_line(after)


def one_line(text: bytes) -> str:
    """Returns a text without line breaks and indentation."""
    return " ".join(text.decode().split())


MESSAGES = {"print", "write", "note", "phase", "drop", "warn"}  # their arguments are texts
FORMATS = {"indent"}  # keyword arguments that change the form of a file alone
SIGNS = {ast.Add: (b"+", b"-"), ast.Sub: (b"-", b"+")}
BOUNDS = {ast.Lt: (b"<", b"<="), ast.LtE: (b"<=", b"<"), ast.Gt: (b">", b">=")}
BOUNDS[ast.GtE] = (b">=", b">")
EXTREMES = {"min": "max", "max": "min", "maximum": "minimum", "minimum": "maximum"}
TO_DISK = {"fsync", "flush", "replace", "rename"}


class Finder:
    """Finds the places of a file."""

    def __init__(self, part: Part, text: bytes):
        self.part = part
        self.text = text
        self.starts = [0, *itertools.accumulate(map(len, text.splitlines(keepends=True)))]

    def find(self) -> list[Place]:
        """Returns all places in the part's functions, in the order of the file."""
        names = self.part.names.split()
        found: list[Place] = []
        for top in ast.parse(self.text).body:
            name = getattr(top, "name", "")
            if name in names or (not names and name != "main"):
                found += self.in_functions(top)
        return found

    def in_functions(self, node: ast.AST) -> Iterator[Place]:
        """Yields the places in the functions of a definition, without their defaults."""
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for statement in node.body:
                yield from self.visit(statement)
        elif isinstance(node, ast.ClassDef):
            for statement in node.body:
                yield from self.in_functions(statement)

    def visit(self, node: ast.AST) -> Iterator[Place]:
        """Yields the places in a node, and in those below it."""
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from self.in_functions(node)
            return
        if isinstance(node, ast.AnnAssign):
            if node.value:
                yield from self.visit(node.value)
            return
        yield from self.of_statement(node)
        if isinstance(node, ast.JoinedStr | ast.Raise | ast.Assert):
            return
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.LShift | ast.RShift):
            return  # a size in bytes
        if isinstance(node, ast.Call) and name_of(node) in MESSAGES:
            return
        if isinstance(node, ast.keyword) and node.arg in FORMATS:
            return
        yield from self.of_numbers(node)
        yield from self.of_conditions(node)
        yield from self.of_positions(node)
        for below in ast.iter_child_nodes(node):
            yield from self.visit(below)

    def of_statement(self, node: ast.AST) -> Iterator[Place]:
        """Yields what is done by leaving out a statement, or all of a handler."""
        if isinstance(node, ast.Raise):
            yield self.place("swallow", node, b"pass")
        if isinstance(node, ast.ExceptHandler):
            raises = any(isinstance(below, ast.Raise) for below in ast.walk(node))
            does = any(not isinstance(each, ast.Pass | ast.Continue) for each in node.body)
            if does and not raises:
                start, end = self.span(node.body[0])[0], self.span(node.body[-1])[1]
                yield Place(self.part, "swallow", node.body[0].lineno, start, end, b"pass")
        if isinstance(node, ast.Expr) and name_of(node.value) in TO_DISK:
            yield self.place("fsync", node, b"pass")

    def of_numbers(self, node: ast.AST) -> Iterator[Place]:
        """Yields other signs and bounds."""
        if isinstance(node, ast.BinOp | ast.AugAssign) and type(node.op) in SIGNS:
            sides = (node.left, node.right) if isinstance(node, ast.BinOp) else (node.value,)
            if not any(map(is_joined, sides)):
                left = node.left if isinstance(node, ast.BinOp) else node.target
                yield self.operator("sign", left, sides[-1], SIGNS[type(node.op)])
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            yield self.place("sign", node, self.source(node.operand))
        if isinstance(node, ast.Compare):
            pairs = itertools.pairwise([node.left, *node.comparators])
            for (left, right), op in zip(pairs, node.ops, strict=True):
                if type(op) in BOUNDS:
                    yield self.operator("bound", left, right, BOUNDS[type(op)])
        if isinstance(node, ast.Call) and name_of(node) in EXTREMES:
            function = self.source(node.func)
            name = name_of(node)
            new = function[: -len(name)] + EXTREMES[name].encode()
            yield self.place("bound", node.func, new)

    def of_conditions(self, node: ast.AST) -> Iterator[Place]:
        """Yields conditions that are missing or turned around."""
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitAnd):
            for side in (node.left, node.right):
                yield self.place("mask", node, b"(" + self.source(side) + b")")
        if isinstance(node, ast.BoolOp) and isinstance(node.op, ast.And):
            for gone in node.values:
                others = [self.source(each) for each in node.values if each is not gone]
                yield self.place("mask", node, b"(" + b") and (".join(others) + b")")
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Invert | ast.Not):
            yield self.place("mask", node, b"(" + self.source(node.operand) + b")")
        if isinstance(node, ast.comprehension):
            for condition in node.ifs:
                yield self.place("mask", condition, b"True")
        if isinstance(node, ast.Call) and name_of(node) == "where" and len(node.args) == 3:
            condition = node.args[0]
            yield self.place("mask", condition, b"~(" + self.source(condition) + b")")

    def of_positions(self, node: ast.AST) -> Iterator[Place]:
        """Yields whole numbers, and ends of slices and ranges, that are one higher."""
        ends: list[ast.expr | None] = []
        if isinstance(node, ast.Constant) and type(node.value) is int:
            yield self.place("off by one", node, str(node.value + 1).encode())
        if isinstance(node, ast.Slice):
            ends = [node.lower, node.upper]
        if isinstance(node, ast.Call) and name_of(node) == "range":
            ends = [node.args[min(1, len(node.args) - 1)]]
        for end in ends:
            if end and not isinstance(end, ast.Constant | ast.UnaryOp):
                yield self.place("off by one", end, b"(" + self.source(end) + b") + 1")

    def operator(self, kind: str, left: ast.AST, right: ast.AST, change: tuple) -> Place:
        """Returns the place of the operator between two nodes."""
        old, new = change
        start = self.text.index(old, self.span(left)[1], self.span(right)[0])
        return Place(self.part, kind, line_of(right), start, start + len(old), new)

    def place(self, kind: str, node: ast.AST, new: bytes) -> Place:
        """Returns the place of a whole node."""
        return Place(self.part, kind, line_of(node), *self.span(node), new)

    def span(self, node: ast.AST) -> tuple[int, int]:
        """Returns where a node begins and ends in the file."""
        assert isinstance(node, ast.expr | ast.stmt)
        assert node.end_lineno and node.end_col_offset is not None
        start = self.starts[node.lineno - 1] + node.col_offset
        return start, self.starts[node.end_lineno - 1] + node.end_col_offset

    def source(self, node: ast.AST) -> bytes:
        """Returns the text of a node."""
        start, end = self.span(node)
        return self.text[start:end]


def line_of(node: ast.AST) -> int:
    """Returns the line at which a node begins."""
    return getattr(node, "lineno", 0)


def is_joined(node: ast.AST) -> bool:
    """Returns whether a node is a text, a list or the like, for which a sum has no difference."""
    if isinstance(node, ast.IfExp):
        return is_joined(node.body)
    if isinstance(node, ast.Constant):
        return isinstance(node.value, str | bytes)
    return isinstance(node, ast.JoinedStr | ast.List | ast.ListComp | ast.Tuple | ast.Dict)


def name_of(node: ast.AST) -> str:
    """Returns the name of a called function or method, without its object; "" for others."""
    if isinstance(node, ast.Await):
        return name_of(node.value)
    if not isinstance(node, ast.Call):
        return ""
    return getattr(node.func, "attr", getattr(node.func, "id", ""))


def places() -> Iterator[Place]:
    """Yields the places of all parts."""
    for part in PARTS:
        yield from Finder(part, (ROOT / part.source).read_bytes()).find()


def drawn(seed: int, found: list[Place]) -> Iterator[Place]:
    """Yields places in random order: the areas in turn, and in each area its kinds in turn.

    Equivalent changes are left out after the draw, so that naming one moves no place of another
    kind.
    """
    dice = random.Random(seed)
    of_area: dict[str, dict[str, list[Place]]] = defaultdict(lambda: defaultdict(list))
    for place in found:
        of_area[place.part.area][place.kind].append(place)
    turns = {}
    left = 0
    for area, of_kind in of_area.items():
        for kind, of_one in of_kind.items():
            dice.shuffle(of_one)
            of_kind[kind] = [place for place in of_one if named(place) not in NAMES]
            left += len(of_kind[kind])
        turns[area] = itertools.cycle(of_kind.values())
    for area in itertools.cycle(of_area):
        if not left:
            return
        of_one = next((one for one in itertools.islice(turns[area], KINDS) if one), [])
        if of_one:
            left -= 1
            yield of_one.pop()


def named(place: Place) -> tuple[str, str, str]:
    """Returns the file of a change and its lines before and after, as EQUIVALENT has them."""
    source = place.part.source
    return source, *place.lines((ROOT / source).read_bytes())


# === Tests ========================================================================================


def copied(folder: Path) -> Path:
    """Copies the project into a folder, and returns where it is there."""
    tree = folder / "tree"
    for name in subprocess.check_output(LISTED, text=True).split("\0"):
        if name and (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, tree / name)
    folder.chmod(0o755)  # the sandbox's user reads it
    shared = ROOT.parent / "shared"
    if shared.is_dir():
        (folder / "shared").symlink_to(shared.resolve())
    return tree


class Result(NamedTuple):
    """What the tests say: the first one that failed, "" if they hung, None if all have passed."""

    failed: str | None
    seconds: float


def limit() -> None:
    """Limits this process before it starts the tests."""
    for kind, most in LIMITS.items():
        resource.setrlimit(kind, (most, resource.getrlimit(kind)[1]))


def tested(tree: Path, names: list[str], *options: str) -> Result:
    """Runs tests in a copy. Raises RuntimeError if pytest could not run them."""
    cache = tree / ".pytest_cache"
    shutil.rmtree(cache, ignore_errors=True)
    command = [sys.executable, *PYTEST, *options, *names]
    began = time.monotonic()
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            command,
            cwd=tree,
            stdout=output,
            stderr=output,
            start_new_session=True,
            preexec_fn=limit,
        )
        try:
            code = process.wait(RUN_SECONDS)
        except subprocess.TimeoutExpired:
            return Result("", time.monotonic() - began)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # and what a test has left behind
            process.wait()
        output.seek(0)
        told = output.read().decode(errors="replace")
    seconds = time.monotonic() - began
    if code == 0:
        return Result(None, seconds)
    if code > 2:
        raise RuntimeError(f"{' '.join(command)} ended with {code}: {told[-2000:]}")
    noted = cache / "v/cache/lastfailed"
    failures = json.loads(noted.read_text()) if noted.is_file() else {"": True}
    failed = next(iter(failures))
    return Result(failed if len(failed) < LONGEST else failed.partition("[")[0], seconds)


def try_change(tree: Path, place: Place) -> Result:
    """Makes one change in the copy, runs the tests of its part, and takes it back."""
    path = tree / place.part.source
    text = path.read_bytes()
    cached = Path(importlib.util.cache_from_source(str(path)))
    cached.unlink(missing_ok=True)  # it would hold for a file of the same size and second
    path.write_bytes(place.applied(text))
    names = [f"tests/{name}" for name in dict.fromkeys(place.part.tests.split())]
    try:
        return confirmed(tree, names)
    finally:
        path.write_bytes(text)
        cached.unlink(missing_ok=True)


def confirmed(tree: Path, names: list[str]) -> Result:
    """Runs tests, and the one that fails again by itself; twice if it passes then."""
    seconds = 0.0
    for _ in range(2):
        result = tested(tree, names, "-k", f"not {COMPARES_TEXT}")
        seconds += result.seconds
        if not result.failed:
            return Result(result.failed, seconds)
        again = tested(tree, [result.failed])
        seconds += again.seconds
        if again.failed is not None:
            return Result(result.failed, seconds)
    return Result(None, seconds)


def red_unchanged(tree: Path, names: list[str]) -> str | None:
    """Returns the first test that also fails in the unchanged copy, or None."""
    return tested(tree, list(dict.fromkeys(names))).failed if names else None


# === The report ===================================================================================


def show_table(places_: list[Place], results: dict[Place, Result]) -> None:
    """Prints for each area the places that it has, and how many changes were seen."""
    of_area = Counter(place.part.area for place in places_)
    tried = Counter(place.part.area for place in results)
    seen = Counter(place.part.area for place, result in results.items() if was_seen(result))
    print(f"\n{'area':12} {'places':>8} {'drawn':>8} {'seen':>8}")
    for area, count in of_area.items():
        print(f"{area:12} {count:8} {tried[area]:8} {seen[area]:8}")
    print(f"{'all':12} {of_area.total():8} {tried.total():8} {seen.total():8}")


def show_difference(place: Place) -> None:
    """Prints a change as a diff."""
    text = (ROOT / place.part.source).read_bytes()
    before, after = text.decode().splitlines(), place.applied(text).decode().splitlines()
    name = place.part.source
    print(*difflib.unified_diff(before, after, name, name, n=2, lineterm=""), sep="\n")


def was_seen(result: Result) -> bool:
    """Returns whether a test has failed."""
    return result.failed is not None


def main(count: int = 60, seed: int = 0) -> int:
    """Prints a line for each change, a table and the changes that no test saw."""
    found = list(places())
    results: dict[Place, Result] = {}
    with tempfile.TemporaryDirectory() as folder:
        tree = copied(Path(folder))
        for place in itertools.islice(drawn(seed, found), count):
            result = results[place] = try_change(tree, place)
            said = "survived" if result.failed is None else f"seen by {result.failed or 'a hang'}"
            _, before, after = named(place)
            print(f"{len(results):3} {place.kind:10} {place.part.source}:{place.line}")
            print(f"    {before}\n    {after}")
            print(f"    {said}, {result.seconds:.0f} s", flush=True)
        witnesses = [result.failed for result in results.values() if result.failed]
        red = red_unchanged(tree, witnesses)
    show_table(found, results)
    for place, result in results.items():
        if not was_seen(result):
            show_difference(place)
    if red:
        print(f"fails without a change as well: {red}")
    gone = NAMES - set(map(named, found))
    for source, before, _ in gone:
        print(f"named in EQUIVALENT, and not found: {source}: {before}")
    seen = sum(map(was_seen, results.values()))
    return bool(red or gone) or seen < SEEN * len(results)


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
