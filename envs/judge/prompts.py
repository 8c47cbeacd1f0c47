"""The prompts of judges: each module that sends some has them in a file beside it.

For maths/same_answer.py that is maths/same_answer.txt. A line `=== NAME` begins a prompt, and a
line that ends in a backslash goes on in the next one. Places are those of str.format, as {answer}.

An answer is shown as it is, with two exceptions. Markup of the prompt and labels of a verdict in it
get a space, so that it ends where the prompt says, and a judge that quotes it has said nothing. So
do control tokens of chat templates, which a server would take for the end of the message.
"""

import functools
import re
import string
from collections.abc import Iterable
from pathlib import Path

from envs.services import CheckerError, current

CONTROL = re.compile(
    r"<(?=[|\uff5c][^|\uff5c\s<>]{1,40}[|\uff5c]>)"  # <|im_end|>, also in full width
    r"|<(?=/?(?:s|bos|eos|think|start_of_turn|end_of_turn|<?SYS>?)>|SPECIAL_\d{1,4}>)"
    r"|\[(?=/?INST\])"
)


NAMES: dict[str, str] = {}  # of the modules' prompts, by their text


def prompts(module: str) -> dict[str, str]:
    """The prompts of a module, by name; `module` is its `__file__`."""
    found = read(str(Path(module).with_suffix(".txt")))
    NAMES.update((text, name) for name, text in found.items())
    return found


def chosen(judge: str, prompt: str) -> str:
    """A prompt of a module, or that of its name in services.judges[judge]["prompts"], a file.

    Raises CheckerError where the file is damaged.
    """
    path = current().judges.get(judge, {}).get("prompts")
    if path and (why := problem(path)):
        raise CheckerError(why)
    return read(path).get(NAMES.get(prompt, ""), prompt) if path else prompt


@functools.cache  # it is asked for every row
def problem(path: str) -> str:
    """Why prompts of a file cannot stand in for those of the modules; "" for nothing."""
    files = Path(__file__).parents[1].rglob("*.txt")
    ours = {name: text for file in files for name, text in read(str(file)).items()}
    try:
        given = read(path)
        for name, text in given.items():
            known = places(ours[name]) if name in ours else set()
            if name not in ours:
                return f"{path}: === {name}: expected one of {', '.join(ours)}"
            if not text or known and places(text) != known:
                return f"{path}: === {name} has the places {places(text)}, expected {known}"
    except (OSError, ValueError) as error:
        return f"{path}: {error}: expected prompts, each below a line `=== NAME`"
    return "" if given else f"{path}: expected prompts, each below a line `=== NAME`"


def places(prompt: str) -> set[str]:
    """The names in braces. Raises ValueError for a brace without its other half."""
    return {name for _, name, _, _ in string.Formatter().parse(prompt) if name is not None}


@functools.cache
def read(path: str) -> dict[str, str]:
    """The prompts of a file, by name.

    Raises OSError, and ValueError for what is no UTF-8 or has a name twice.
    """
    text = Path(path).read_text(encoding="utf-8-sig").replace("\\\n", "")
    names_and_texts = re.split(r"^=== (\w+)\n", text, flags=re.MULTILINE)[1:]
    names = names_and_texts[::2]
    if len(set(names)) < len(names):
        raise ValueError(f"a name is there twice: {', '.join(names)}")
    return dict(zip(names, map(str.strip, names_and_texts[1::2]), strict=True))


def filled(template: str, parts: dict[str, str], **labels: str) -> str:
    """A prompt with texts in its places <name>{name}</name>, which none of them can open or close.

    A label in brackets gets a space in them, another one is written small.
    """
    tag = re.compile(rf"<(?=/?\s*(?:{'|'.join(parts)})\s*/?>)", re.IGNORECASE)
    small = sorted((label for label in labels.values() if label[:1] != "["), key=len)[::-1]
    shown = {}
    for name, text in parts.items():
        text = apart(tag.sub("< ", text), (one for one in labels.values() if one[:1] == "["))
        for label in small:
            text = text.replace(label, label.lower())
        shown[name] = text.strip()
    return template.format(**labels, **shown)


def apart(text: str, words: Iterable[str]) -> str:
    """A text in which none of these words stands, in upper or lower case: each gets a space."""
    for word in words:
        found = re.compile(f"({re.escape(word[0])})(?={re.escape(word[1:])})", re.IGNORECASE)
        text = found.sub(r"\1 ", text)
    return text


def inert(messages: list[dict]) -> list[dict]:
    """Messages in whose texts nothing is a control token of a chat template."""
    return [one | {"content": CONTROL.sub(r"\g<0> ", one["content"])} for one in messages]
