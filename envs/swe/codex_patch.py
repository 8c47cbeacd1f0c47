"""Applies patches in the format of Codex's apply_patch tool, which finds lines by their text.

    *** Begin Patch
    *** Update File: a.py         or *** Add File: a.py and lines with +, or *** Delete File: a.py
    *** Move to: b.py             optional
    @@ def f():                   optional: the change comes after this line
     a line that is kept
    -a line that is removed
    +a line that is added
    *** End of File               optional: the lines above are the last in the file
    *** End Patch

Source: the grammar in openai/codex, codex-rs/apply-patch. As in Codex, if no lines match exactly,
lines may differ in blanks at their ends, and if still none match, also at their beginnings.
"""

from typing import NamedTuple

BEGIN, END, LAST = "*** Begin Patch", "*** End Patch", "*** End of File"
ADD, DELETE = "*** Add File: ", "*** Delete File: "
UPDATE, MOVE = "*** Update File: ", "*** Move to: "


class Hunk(NamedTuple):
    """One place in a file: its old lines, and the new lines that replace them."""

    after: str  # the line before it, "" for any
    old: list[str]
    new: list[str]
    is_last: bool


class Change(NamedTuple):
    """The change to one file."""

    path: str
    text: str | None = None  # text of a new file
    to: str | None = ""  # the new path, "" for the same path, None if the file is deleted
    hunks: tuple[Hunk, ...] = ()


def parsed(patch: str) -> list[Change]:
    """Returns the changes in a patch. Raises ValueError naming the error in it."""
    lines = patch.strip().split("\n")
    if lines[0].strip() != BEGIN or lines[-1].strip() != END:
        raise ValueError(f"expected {BEGIN!r} as the first line and {END!r} as the last")
    body = lines[1:-1]
    changes: list[Change] = []
    while body:
        head = body.pop(0)
        if not head.strip():
            continue
        inner = []
        while body and not body[0].startswith((ADD, DELETE, UPDATE)):
            inner.append(body.pop(0))
        changes.append(change(head, inner))
    if not changes:
        raise ValueError("the patch changes no file")
    return changes


def change(head: str, lines: list[str]) -> Change:
    """Parses a change, given its first line and the lines after it. Raises ValueError."""
    if head.startswith(ADD):
        wrong = [line for line in lines if not line.startswith("+")]
        if any(map(str.strip, wrong)):
            raise ValueError(f"{head!r}: expected lines that begin with +, got {wrong[0]!r:.200}")
        text = "".join(line[1:] + "\n" for line in lines if line not in wrong)
        return Change(head.removeprefix(ADD).strip(), text)
    if head.startswith(DELETE):
        return Change(head.removeprefix(DELETE).strip(), to=None)
    if not head.startswith(UPDATE):
        raise ValueError(f"expected a line such as {UPDATE + 'a.py'!r}, got {head!r:.200}")
    to = lines.pop(0).removeprefix(MOVE).strip() if lines and lines[0].startswith(MOVE) else ""
    return Change(head.removeprefix(UPDATE).strip(), to=to, hunks=tuple(hunks(head, lines)))


def hunks(head: str, lines: list[str]) -> list[Hunk]:
    """Parses the hunks of an update. Raises ValueError."""
    found: list[Hunk] = []
    for line in lines:
        if line.startswith("@@"):
            found.append(Hunk(line[2:].strip(), [], [], False))
        elif line.strip() == LAST and found:
            found[-1] = found[-1]._replace(is_last=True)
        elif line[:1] in ("", " ", "-", "+"):
            if not found or found[-1].is_last:
                found.append(Hunk("", [], [], False))
            if line[:1] != "+":
                found[-1].old.append(line[1:])
            if line[:1] != "-":
                found[-1].new.append(line[1:])
        else:
            raise ValueError(
                f"{head!r:.200}: expected a line that begins with a space, - or +: {line!r:.200}"
            )
    return found


def updated(text: str, change: Change) -> str:
    """Returns a file's text after an update. Raises ValueError if a hunk's lines are missing."""
    lines = text.split("\n")
    at = 0
    for hunk in change.hunks:
        if hunk.after:
            at = place(lines, [hunk.after], at, False, change.path) + 1
        if not hunk.old:
            end = len(lines) - (lines[-1] == "")
            at = at if hunk.after else end
        else:
            at = place(lines, hunk.old, at, hunk.is_last, change.path)
        lines[at : at + len(hunk.old)] = hunk.new
        at += len(hunk.new)
    return "\n".join(lines)


def place(lines: list[str], old: list[str], start: int, is_last: bool, path: str) -> int:
    """Returns the index of some lines, from `start` on. Raises ValueError if they are missing."""
    count = len(old)
    ends = {len(lines) - count, len(lines) - count - (lines[-1] == "")}
    for plain in (str, str.rstrip, str.strip):
        wanted = [plain(line) for line in old]
        shown = [plain(line) for line in lines]
        for i in range(start, len(lines) - count + 1):
            if shown[i : i + count] == wanted and (not is_last or i in ends):
                return i
    raise ValueError(f"{path} has no such lines after line {start}: " + "\n".join(old)[:500])
