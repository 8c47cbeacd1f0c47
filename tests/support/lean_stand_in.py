#!/usr/bin/env python3
"""Stands in for Lean in tests: it proves nothing, and says of a few words what Lean says.

A file with a word of WRONG holds an error, one that uses sorry a warning.
"""

import re
import sys
import time

WRONG = (
    "wrong_tactic",
    "absurd rfl",
    "False := trivial",
    "could not prove",
    "Proof Plan",
    "7 * y ^ 3 : ZMod 7",
)

name = sys.argv[-1]
with open(name, encoding="utf-8") as file:
    text = file.read()
if "import Missing" in text:
    print(f"{name}:1:0: error: unknown module prefix 'Missing'")
    sys.exit(1)
if "sleep_for_ever" in text or "import Slow" in text:
    time.sleep(1000)
if "much_output" in text:
    print("x" * (2 << 20))
if "exit_at_once" in text:  # as IO.Process.exit does
    sys.exit(0)
if "exit_silently" in text:
    sys.exit(1)
wrong = [i for i, line in enumerate(text.split("\n"), 1) if any(word in line for word in WRONG)]
for line in wrong:
    print(f"{name}:{line}:2: error: unsolved goals")
if re.search(r"\bsorry(Ax)?\b", re.sub(r"/-.*?-/|--[^\n]*", "", text, flags=re.DOTALL)):
    print(f"{name}:1:8: warning: declaration uses 'sorry'")
sys.exit(bool(wrong))
