"""Reads an answer for swe_patch.py: a block of Python, or search/replace edits to files:

    ```python
    ### path/of/a/file.py
    <<<<<<< SEARCH
    lines of the file
    =======
    the lines that replace them
    >>>>>>> REPLACE
    ```

This is not an environment itself.
"""

SEARCH, MIDDLE, REPLACE = "<<<<<<< SEARCH", "=======", ">>>>>>> REPLACE"


class EditError(ValueError):
    """Raised if edits cannot be applied."""


def edited(contents: dict[str, str], text: str) -> dict[str, str]:
    """Returns the new contents of the files that the edits in a text change: path -> content.

    A search text must begin at the start of a line; its first occurrence in the file is replaced.
    Raises EditError if a search text is missing, is replaced by itself, or overlaps another, or if
    nothing changes.
    """
    by_path: dict[str, dict[tuple[str, str], None]] = {}  # without repeated edits
    for path, search, replace in edits(text):
        by_path.setdefault(path, {})[search, replace] = None
    new: dict[str, str] = {}
    for path, pairs in by_path.items():
        content = _replaced(contents, path, list(pairs))
        if content != contents[path]:
            new[path] = content
    if not new:
        raise EditError("no edit")
    return new


def _replaced(contents: dict[str, str], path: str, pairs: list[tuple[str, str]]) -> str:
    if path not in contents:
        raise EditError("a file that was not shown")
    old = "\n" + contents[path]
    places = sorted((old.find("\n" + search), search, replace) for search, replace in pairs)
    parts = []
    done = 0
    for start, search, replace in places:
        if start < 0:
            raise EditError("search text not found")
        if search == replace:
            raise EditError("an edit changes nothing")
        if start < done:
            raise EditError("edits overlap")
        parts += [old[done:start], "\n", replace]
        done = start + 1 + len(search)
    return "".join([*parts, old[done:]])[1:]


def edits(text: str) -> list[tuple[str, str, str]]:
    """Returns (path, search text, replacement) for each edit in a text, in linear time.

    A fence must be on the line before the path, and another one must directly follow the end
    marker.
    """
    lines = text.split("\n")
    found = []
    at = 0
    while at + 1 < len(lines):
        path, start = _head(lines, at + 1) if "```" in lines[at] else ("", 0)
        if not start:
            at += 1
            continue
        middle = _find(lines, MIDDLE, start + 1)
        end, fence = _end(lines, middle + 2)
        if not fence:
            break
        search = "\n".join(lines[start:middle])
        found.append((path, search, "\n".join(lines[middle + 1 : end])))
        rest = lines[fence] if fence > end else lines[end].removeprefix(REPLACE)
        lines[fence] = rest[3:]
        at = fence
    return found


def _head(lines: list[str], at: int) -> tuple[str, int]:
    """Returns the path in a line, and the number of the first line of the search text.

    The number is 0 if no edit begins there.
    """
    if not lines[at].startswith("### "):
        return "", 0
    path = lines[at][4:]
    below = at + 1
    while below < len(lines) and not lines[below].strip():
        below += 1
    if below < len(lines) and lines[below].lstrip() == SEARCH:
        return path, below + 1
    return (path.removesuffix(SEARCH), at + 1) if path.endswith(SEARCH) else ("", 0)


def _find(lines: list[str], line: str, start: int) -> int:
    """Returns the index of a line, from `start` on; the number of lines if it is missing."""
    try:
        return lines.index(line, start)
    except ValueError:
        return len(lines)


def _end(lines: list[str], start: int) -> tuple[int, int]:
    """Returns the line of the first end of an edit that a fence follows, and the fence's line.

    Both are 0 if there is no such end.
    """
    for at in range(start, len(lines)):
        if not lines[at].startswith(REPLACE):
            continue
        fence = at
        rest = lines[at].removeprefix(REPLACE)
        while not rest and fence + 1 < len(lines):
            fence += 1
            rest = lines[fence]
        if rest.startswith("```"):
            return at, fence
    return 0, 0


def last_block(text: str) -> str | None:
    """Returns the code in a text's last ```python block; None if there is no block."""
    code = None
    at = 0
    while (start := text.find("```python\n", at)) >= 0:
        start += len("```python\n")
        at = text.find("\n```", start)
        if at < 0:
            break
        code = text[start:at]
        at += len("\n```")
    return code
