"""Reads and fills the prompts of judges: each module has its prompts in a file next to it.

For maths/same_answer.py that file is maths/same_answer.txt. A line `=== NAME` begins a prompt, and
a line that ends in a backslash continues on the next line. Placeholders use str.format syntax, such
as {answer}.

An answer is shown unchanged, with two exceptions. A space is inserted into the prompt's tags and
into a verdict's labels, so that the answer cannot close the tag around it, and so that a judge does
not give a verdict by quoting the answer. A space is also inserted into chat-template control
tokens, because a server would read them as the end of the message.
"""

import functools
import re
import string
from collections.abc import Iterable
from pathlib import Path

from envs.services import CheckerError, current

CONTROL = re.compile(
    r"<(?=[|\uff5c][^|\uff5c\s<>]{1,40}[|\uff5c]>)"  # <|im_end|>, also with full-width bars
    r"|<(?=/?(?:s|bos|eos|think|start_of_turn|end_of_turn|<?SYS>?)>|SPECIAL_\d{1,4}>)"
    r"|\[(?=/?INST\])"
)


NAMES: dict[str, str] = {}  # names of the modules' prompts, by text


def prompts(module: str) -> dict[str, str]:
    """Returns a module's prompts, by name; `module` is its `__file__`."""
    found = read(str(Path(module).with_suffix(".txt")))
    NAMES.update((text, name) for name, text in found.items())
    return found


def chosen(judge: str, prompt: str) -> str:
    """Returns a module's prompt, or its replacement in the file services.judges[judge]["prompts"].

    Raises CheckerError if the file is malformed.
    """
    path = current().judges.get(judge, {}).get("prompts")
    if not path:
        return prompt
    if why := problem(path):
        raise CheckerError(why)
    return read(path).get(NAMES.get(prompt, ""), prompt)


@functools.cache  # called for every row
def problem(path: str) -> str:
    """Returns why a file's prompts cannot replace the modules' prompts; "" if they can."""
    files = Path(__file__).parents[1].rglob("*.txt")
    ours = {name: text for file in files for name, text in read(str(file)).items()}
    try:
        given = read(path)
        for name, text in given.items():
            known = places(ours[name]) if name in ours else set()
            if name not in ours:
                return f"{path}: === {name}: expected one of {', '.join(ours)}"
            if not text or known and places(text) != known:
                return f"{path}: === {name} has the placeholders {places(text)}, expected {known}"
    except (OSError, ValueError) as error:
        return f"{path}: {error}: expected prompts, each below a line `=== NAME`"
    return "" if given else f"{path}: expected prompts, each below a line `=== NAME`"


def places(prompt: str) -> set[str]:
    """Returns the names in braces. Raises ValueError if a brace is unpaired."""
    return {name for _, name, _, _ in string.Formatter().parse(prompt) if name is not None}


@functools.cache
def read(path: str) -> dict[str, str]:
    """Returns a file's prompts, by name.

    Raises OSError, and ValueError if the file is not UTF-8 or contains a name twice.
    """
    text = Path(path).read_text(encoding="utf-8-sig").replace("\\\n", "")
    names_and_texts = re.split(r"^=== (\w+)\n", text, flags=re.MULTILINE)[1:]
    names = names_and_texts[::2]
    if len(set(names)) < len(names):
        raise ValueError(f"a name appears twice: {', '.join(names)}")
    return dict(zip(names, map(str.strip, names_and_texts[1::2]), strict=True))


def filled(template: str, parts: dict[str, str], **labels: str) -> str:
    """Fills texts into a prompt's elements <name>{name}</name>, which no text can open or close.

    In the texts, a label in brackets is split by a space, and any other label is lower-cased.
    """
    tag = re.compile(rf"<(?=/?\s*(?:{'|'.join(parts)})\s*/?>)", re.IGNORECASE)
    bracketed = [label for label in labels.values() if label[:1] == "["]
    small = sorted((label for label in labels.values() if label[:1] != "["), key=len)[::-1]
    shown = {}
    for name, text in parts.items():
        text = apart(tag.sub("< ", text), bracketed)
        for label in small:
            text = text.replace(label, label.lower())
        shown[name] = text.strip()
    return template.format(**labels, **shown)


def apart(text: str, words: Iterable[str]) -> str:
    """Returns a text in which each of these words, regardless of case, is split by a space."""
    for word in words:
        found = re.compile(f"({re.escape(word[0])})(?={re.escape(word[1:])})", re.IGNORECASE)
        text = found.sub(r"\1 ", text)
    return text


def inert(messages: list[dict]) -> list[dict]:
    """Returns the messages with a space inserted into each chat-template control token."""
    return [one | {"content": CONTROL.sub(r"\g<0> ", one["content"])} for one in messages]
