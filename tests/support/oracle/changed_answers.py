"""Answers, changed in ways in which a policy might write them: some stay right, some do not."""

import json
import random
import re
from collections.abc import Callable

Way = Callable[[str, random.Random], str]
LATIN = str.maketrans("0123456789", "\uff10\uff11\uff12\uff13\uff14\uff15\uff16\uff17\uff18\uff19")


def swaps(*pairs: tuple[str, str]) -> list[Way]:
    """Ways that write one text for another."""
    return [lambda text, dice, pair=pair: text.replace(*pair) for pair in pairs]


def put(form: str) -> Way:
    """Writes something around the answer."""
    return lambda text, dice: form.replace("TEXT", text)


def drop(text: str, dice: random.Random) -> str:
    at = dice.randrange(len(text) + 1)
    return text[:at] + text[at + 1 :]


def double(text: str, dice: random.Random) -> str:
    at = dice.randrange(len(text) + 1)
    return text[:at] + text[at : at + 1] + text[at:]


def number(text: str, dice: random.Random) -> str:
    """Another number in place of one of them."""
    found = list(re.finditer(r"\d+", text))
    if not found:
        return text
    one = dice.choice(found)
    return text[: one.start()] + str(int(one[0][:9]) + dice.choice((-1, 1, 10))) + text[one.end() :]


def boxes(form: str) -> Way:
    r"""Writes something around what a \boxed{} without braces holds."""
    return lambda text, dice: re.sub(
        r"\\boxed\{([^{}]*)\}", lambda box: "\\boxed{" + form.replace("TEXT", box[1]) + "}", text
    )


WAYS: list[Way] = [
    *map(put, ("  \n TEXT \n", "TEXT TEXT", "TEXT\n\nI hope this helps!", "Final answer: TEXT")),
    *map(put, ("<think>TEXT", "<think>Is it \\boxed{3}? Answer: C</think>TEXT", "TEXT<think>")),
    *map(put, ("```\nTEXT\n```", "```json\nTEXT\n```", "TEXT\n```python\nprint(1)\n```")),
    *map(put, ("**TEXT**", "$TEXT$", "TEXT.", "TEXT, or not", "\\boxed{0} TEXT")),
    *map(put, ("TEXT \\boxed{0}", "TEXT: yes")),
    *map(put, ("It is not TEXT", "\\text{TEXT}", "TEXT\nAnswer: A", "\\boxed{TEXT}", "[TEXT]")),
    *map(boxes, ("TEXT.", " TEXT ", "\\text{TEXT}", "\\textbf{TEXT}", "\\mathrm{TEXT}")),
    *map(boxes, ("(TEXT)", "TEXT\\%", "TEXT\\text{ cm}", "TEXT.0", "TEXT,000", "TEXT\\,000")),
    *map(boxes, ("\\$TEXT", "TEXT^\\circ", "$TEXT$", "TEXT-D", "{TEXT}", "TEXT = 42")),
    *map(boxes, ("\\{TEXT\\}", "x=TEXT", "-TEXT")),
    *swaps(("\\boxed", "\\fbox"), ("\\boxed{", "\\boxed {"), ("\\frac", "\\dfrac")),
    *swaps(("\\frac", "\\tfrac"), ("(", "\\left("), (",", ";"), (",", "{,}")),
    *swaps((" ", "  "), (" ", "\u00a0"), ("\n", "\r\n"), ('"', "'"), (" ", "")),
    *swaps(("Answer:", "**Answer:**"), ("answer>", "ANSWER>"), (":00", ":00 AM")),
    *swaps(("true", "True"), ("null", "None"), ("[", "[["), ("```", "~~~")),
    lambda text, dice: text.upper(),
    lambda text, dice: text.lower(),
    lambda text, dice: text.translate(LATIN),
    *[drop] * 4, *[double] * 4, *[number] * 4,
]  # fmt: skip


def spoiled(text: str, calls: list[dict], dice: random.Random) -> tuple[str, list[dict]]:
    """An answer after one to three changes."""
    for _ in range(dice.choice((1, 1, 1, 2, 3))):
        if calls and dice.random() < 0.9:
            calls = dice.choice(CHANGES)(calls, dice)
        else:
            ways = [way for way in dice.sample(WAYS, len(WAYS)) if way(text, dice) != text]
            text = ways[0](text, dice)
    return text, calls


def of_one(change: Callable[[dict, random.Random], dict]) -> Callable:
    """The change of one of the calls."""

    def changed(calls: list[dict], dice: random.Random) -> list[dict]:
        at = dice.randrange(len(calls))
        return [*calls[:at], change(dict(calls[at]), dice), *calls[at + 1 :]]

    return changed


def written(way: Way) -> Callable:
    """The change of a call's arguments as text."""
    return of_one(lambda call, dice: call | {"arguments": way(call["arguments"], dice)})


def named(way: Way) -> Callable:
    """The change of a call's name."""
    return of_one(lambda call, dice: call | {"name": way(call["name"], dice)})


def valued(change: Callable[[dict, str, random.Random], None]) -> Callable:
    """The change of a value among a call's arguments."""

    def changed(call: dict, dice: random.Random) -> dict:
        try:
            given = json.loads(call["arguments"])
            change(given, dice.choice(sorted(given)), dice)
        except (ValueError, LookupError, TypeError, AttributeError):
            return call
        return call | {"arguments": json.dumps(given)}

    return of_one(changed)


def texts(way: Way) -> Callable:
    """The change of a value that is a text."""

    def change(given: dict, key: str, dice: random.Random) -> None:
        given[key] = way(given[key], dice)

    return valued(change)


def sets(make: Callable) -> Callable:
    """Another value for an argument."""
    return valued(lambda given, key, dice: given.update({key: make(given[key])}))


def renamed(given: dict, key: str, dice: random.Random) -> None:
    given[key + "_"] = given.pop(key)


CHANGES: list[Callable] = [
    *map(written, (drop, double, number, put(" TEXT\n"), put("[TEXT]"), put("TEXT}"), put(""))),
    *map(written, swaps((", ", ","), ('"', "'"), ("true", "1"), (": ", " : "))),
    *map(named, (drop, put("TEXT_"), lambda name, dice: name.upper(), lambda name, dice: "view")),
    *map(texts, (drop, double, number, put("TEXT "), put("TEXT; rm -rf /"), put(""))),
    *map(texts, (put("TEXT TEXT"), put("TEXT\n"))),
    *map(texts, (lambda text, dice: text.upper(), lambda text, dice: text[::-1], put("the TEXT"))),
    *map(texts, (put("/repo/TEXT"), put("cd / && TEXT"), *swaps(("/", "//")), put("New Delhi"))),
    *map(sets, (str, lambda value: None, lambda value: [value], lambda value: 7)),
    sets(lambda value: 1.5),
    valued(lambda given, key, dice: given.pop(key)),
    valued(lambda given, key, dice: given.update(more=1)),
    valued(renamed),
    lambda calls, dice: [*calls, *calls],
    lambda calls, dice: calls[:-1],
    lambda calls, dice: calls[::-1],
    lambda calls, dice: [{"name": "noop", "arguments": "{}"}, *calls],
    lambda calls, dice: [*calls, {"name": "noop", "arguments": "{}"}],
]  # fmt: skip
