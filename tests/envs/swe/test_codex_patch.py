"""Patches in Codex's form: known answers, and what is refused."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envs.swe.codex_patch import Change, parsed, updated
from support.examples import tries

TEXT = "import a\n\ndef f():\n    x = 1\n    return x\n\ndef g():\n    x = 1\n    return x\n"


def patch(*lines: str) -> str:
    return "\n".join(["*** Begin Patch", *lines, "*** End Patch"])


def after(*lines: str, text: str = TEXT) -> str:
    """The text after an update with these lines."""
    (change,) = parsed(patch("*** Update File: a.py", *lines))
    return updated(text, change)


def test_the_first_place_that_has_the_lines_is_changed():
    assert after("     x = 1", "-    return x", "+    return -x") == TEXT.replace(
        "    return x", "    return -x", 1
    )


def test_a_line_to_come_after_chooses_among_them():
    changed = after("@@ def g():", "-    x = 1", "+    x = 2")
    assert changed == TEXT.partition("def g")[0] + "def g():\n    x = 2\n    return x\n"


def test_hunks_follow_each_other():
    changed = after("@@", "-    x = 1", "+    x = 2", "@@", "-    x = 1", "+    x = 3")
    assert changed.count("x = 2") == changed.count("x = 3") == 1 and "x = 1" not in changed


def test_lines_without_old_ones_come_at_the_end_or_after_their_line():
    assert after("+last") == TEXT + "last\n"
    assert after("@@ import a", "+import b").startswith("import a\nimport b\n\n")
    assert after("+last", text="no end") == "no end\nlast"


def test_the_last_lines_can_be_asked_for():
    changed = after("@@", "-    return x", "+    return 0", "*** End of File")
    assert changed == TEXT[: TEXT.rindex("    return x")] + "    return 0\n"


def test_blanks_at_the_ends_of_lines_may_differ():
    assert after("-x=1  ", "+y", text="  x=1\nz") == "y\nz"
    assert after("-b ", "+c", text=" b\nb\n") == " b\nc\n", "the nearer likeness comes first"


def test_files_come_go_and_move():
    lines = ("*** Add File: new.py", "+a", "+", "+b", "*** Delete File: old.py")
    lines += ("*** Update File: c.py", "*** Move to: d.py", "-x", "+y")
    new, gone, moved = parsed(patch(*lines))
    assert new == Change("new.py", "a\n\nb\n") and gone == Change("old.py", to=None)
    assert (moved.path, moved.to, updated("x", moved)) == ("c.py", "d.py", "y")


@pytest.mark.parametrize(("lines", "error"), [
    ((), "changes no file"),
    (("*** Update File: a.py", "?"), "begins with a space, - or \\+: '\\?'"),
    (("*** Add File: a.py", "x"), "lines that begin with \\+, got 'x'"),
    (("a.py", "-x"), "expected a line such as"),
])  # fmt: skip
def test_a_bad_patch_is_refused(lines, error):
    with pytest.raises(ValueError, match=error):
        parsed(patch(*lines))


def test_what_is_not_there_is_refused():
    with pytest.raises(ValueError, match="a.py has no such lines after line 0: nothing"):
        after("-nothing")
    with pytest.raises(ValueError, match="no such lines"):
        after("@@ def h():", "-    x = 1")
    with pytest.raises(ValueError, match="expected .*Begin Patch"):
        parsed("--- a\n+++ b\n")


LINES = ("*** Update File: a", "*** Add File: b", "*** Delete File: c", "*** Move to: d", "@@",
         "@@ x", "+", "-", " ", "", "x", "*** End of File", "*** End Patch")  # fmt: skip
WORDS = st.lists(st.sampled_from(["a", " b", "", "c c"]), max_size=8)


@settings(max_examples=tries(200), deadline=None)
@given(WORDS, WORDS, WORDS)
def test_a_whole_file_can_be_replaced_by_its_lines(before, old, new):
    text = "\n".join(["first", *before, "mark", *old])
    hunk = ["-mark", *(f"-{line}" for line in old), *(f"+{line}" for line in new)]
    assert after(*hunk, text=text) == "\n".join(["first", *before, *new])


@settings(max_examples=tries(300), deadline=None)
@given(st.lists(st.sampled_from(LINES)))
def test_any_lines_are_read_or_refused(lines):
    try:
        changes = parsed(patch(*lines))
    except ValueError:
        return
    for change in changes:
        try:
            assert isinstance(updated("x\ny\n", change), str)
        except ValueError:
            continue
