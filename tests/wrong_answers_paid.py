"""Offers wrong answers to every scorer of reasoning-gym, and prints those that are paid.

    python tests/wrong_answers_paid.py [ENTRIES] [DATASET ...]    20 entries of each: ten minutes

Each entry's right answer is spoiled in some forty ways. The rewards are those of
envs/questions/reasoning_gym.py, which runs the scorers in children under a deadline. Printed are,
for each data set and way, how many were tried, the share paid (0.99 or more), the mean and the
highest reward, the share that `"exact": true` pays, and an example. Then, apart, own answers that
earn less than 1, what is paid in other letters or blanks, constant answers, and near misses.

A spoiled answer may be a right one: a puzzle marked * has many, and a longer way may be as good.
So a line is a suspect, and the library's scorer says whether it is a leak.
"""

import asyncio
import json
import random
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from envs.questions import reasoning_gym as puzzles

DEADLINE = 3.0  # seconds of CPU of one check
PAID = 0.99
SHOWN = 6  # of the ways that are paid, for each data set
MANY = (
    *("boxnet", "countdown", "cryptarithm", "graph_color", "intermediate_integration", "jugs"),
    *("kakurasu", "knight_swap", "n_queens", "palindrome_generation", "propositional_logic"),
    *("puzzle24", "quantum_lock", "rubiks_cube", "rush_hour", "shortest_path"),
    *("simple_integration", "sokoban", "tower_of_hanoi", "word_ladder"),
)
CONSTANTS = ["", "nan", "NaN", "0", "1", "-1", "[]", "{}", "None", "True", "Yes", "No", "A", "I"]
Try = tuple[float, bool, str | None, str]  # reward, exact pays, right answer, offered answer
FORMS = ("case", "blanks", "no blanks")
NUMBER = r"-?\d+(?:\.\d+)?"
SEPARATORS = ("\n", ", ", ",", " → ", " × ", " + ", " ")


def plain(answer: str, question: str, dice: random.Random) -> Iterator[tuple[str, str]]:
    """What can be done to any text."""
    at = dice.randrange(len(answer))
    yield "append word", answer + " EXTRAJUNK"
    yield "append letters", answer + "EXTRAJUNK"
    yield "append letter", answer + "x"
    yield "append line", answer + "\nEXTRAJUNK"
    yield "append sentence", answer + " or not, who knows; I am guessing."
    yield "prepend word", "EXTRAJUNK " + answer
    yield "prepend letter", "x" + answer
    yield "deny before", "It is false that " + answer
    yield "deny after", answer + " is wrong"
    yield "drop first", answer[1:]
    yield "drop last", answer[:-1]
    yield "drop one", answer[:at] + answer[at + 1 :]
    yield "double one", answer[:at] + answer[at] + answer[at:]
    yield "other letter", answer[:at] + ("y" if answer[at] == "z" else "z") + answer[at + 1 :]
    yield "reversed", answer[::-1]
    yield "twice", f"{answer} {answer}"
    yield "question", question
    yield "case", answer.swapcase()
    yield "blanks", re.sub(r"\s", lambda blank: blank[0] * 2, answer)
    yield "no blanks", re.sub(r"\s", "", answer)


def numbers(answer: str, dice: random.Random) -> Iterator[tuple[str, str]]:
    """What can be done to a text with numbers."""
    found = list(re.finditer(NUMBER, answer))
    if not found:
        return
    one = dice.choice(found)
    yield "negated", answer[1:] if answer.startswith("-") else "-" + answer
    yield "append digit", answer + "0"
    yield "append decimal", answer + ".5"
    yield "append number", answer + " 7"
    yield "prepend digit", "1" + answer
    yield "all NaN", re.sub(NUMBER, "NaN", answer)
    yield "all 0", re.sub(NUMBER, "0", answer)
    yield "2nd digit", re.sub(r"\d", lambda digit: digit[0] + "7", answer)
    digits = [match.start() for match in re.finditer(r"\d", answer)]
    for name, at in (("first digit", digits[0]), ("last digit", digits[-1])):
        yield name, answer[:at] + str((int(answer[at]) + 1) % 10) + answer[at + 1 :]
    for name, change in (
        ("one number + 1", lambda number: number + 1),
        ("one number - 1", lambda number: number - 1),
        ("one number + 0.003", lambda number: round(number + 0.003, 6)),
        ("one number * 1.003", lambda number: number * 1.003),
    ):
        value = float(one[0]) if "." in one[0] else int(one[0])
        yield name, answer[: one.start()] + str(change(value)) + answer[one.end() :]
    shifted = re.sub(NUMBER, lambda match: f"{float(match[0]) + 0.9:.6g}", answer)
    yield "all numbers + 0.9", shifted


def items(answer: str, dice: random.Random) -> Iterator[tuple[str, str]]:
    """What can be done to a text of several items, in brackets or not."""
    brackets = re.fullmatch(r"(\[)(.*)(\])", answer, re.DOTALL)
    head, body, tail = brackets.groups() if brackets else ("", answer, "")
    separator = next((one for one in SEPARATORS if one in body), None)
    if separator is None:
        return
    parts = body.split(separator)
    at = dice.randrange(len(parts) - 1)
    for name, changed in (
        ("drop item", parts[:at] + parts[at + 1 :]),
        ("drop last item", parts[:-1]),
        ("double item", parts[: at + 1] + parts[at:]),
        ("double last item", parts + parts[-1:]),
        ("swap items", [*parts[:at], parts[at + 1], parts[at], *parts[at + 2 :]]),
        ("reverse items", parts[::-1]),
        ("sort items", sorted(parts)),
    ):
        yield name, head + separator.join(changed) + tail
    for extra in ('"EXTRAJUNK"', "EXTRAJUNK", "7"):
        yield f"append item {extra}", head + separator.join([*parts, extra]) + tail


def special(entry: dict) -> Iterator[tuple[str, str]]:
    """What the scorer of one data set invites to."""
    metadata, answer = entry["metadata"], entry["answer"] or ""
    name = metadata["source_dataset"]
    if name == "puzzle24":
        yield "other numbers", "9 + 5 + 5 + 5"
        yield "24.4", "5*5 - 3/5"
    if name == "countdown":
        used = "*".join(map(str, metadata["numbers"]))
        yield "hidden number", f"0x0*{used} + 0x{metadata['target']:x}"
    if name == "propositional_logic":
        yield "a premise", metadata["premises"][0]
    if name.endswith("_integration"):
        yield "not integrated", f"Integral({metadata['integrand']}, {metadata['variable']})"
    if name == "polynomial_multiplication":
        yield "not multiplied", f"expand({metadata['polynomial_expr']})"
    if name == "cryptarithm":
        yield "contradicts itself", f"{answer[0]}={(int(answer[2]) + 1) % 10},{answer}"
    if name == "time_intervals":
        for constant in ("50 days", "06:00", "06:00:00", "50 days, 06:00", "50 days, 06:00:00"):
            yield "constant " + constant, constant
    if name == "game_of_life":
        yield "empty board", re.sub("1", "0", answer)
    if name == "boxnet":
        yield "targets moved", json.dumps(list(moved_targets(metadata["initial_state"])))
    if name == "decimal_arithmetic":
        yield "3 decimals", f"{float(answer):.3f}"
    if name == "coin_flip":
        yield "4 digits", f"{float(Fraction(answer)) + 0.00009:.7f}"
    if name == "rubiks_cube":
        yield "nonsense before", "2B2 1x1 " + metadata["example_correct_answer"]
    if name == "palindrome_partitioning":
        yield "every one twice", json.dumps(json.loads(answer) * 2)
    if name == "word_ladder":
        first, second, *_ = answer.split(",")
        yield "to and fro", f"{first},{second},{answer}"
    if name in puzzles.BOARDS:
        yield "line before", f"Shape: EXTRAJUNK\n{answer}"
    if name == "modulo_grid":
        grid = entry["question"].split("\n\n")[-1]
        yield "all crosses", grid.replace("❔", "❌")


def moved_targets(state: dict[str, list[str]]) -> Iterator[dict[str, str]]:
    """Moves of boxnet that bring each target to its box, and no box anywhere."""
    place = {thing: [float(n) for n in at.split("_")] for at in state for thing in state[at]}
    for box in [thing for thing in place if thing.startswith("box_")]:
        target = box.replace("box_", "target_")
        here, goal = place[target], place[box]
        for axis in (0, 1):
            while here[axis] != goal[axis]:
                agent = f"Agent[{here[0]}, {here[1]}]"
                here[axis] += 1 if goal[axis] > here[axis] else -1
                yield {agent: f"move({target}, square[{here[0]}, {here[1]}])"}
        yield {f"Agent[{goal[0]}, {goal[1]}]": f"move({box}, {target})"}


def example(entry: dict) -> str | None:
    """A right answer, also of a puzzle whose entry has none; null where nothing is known."""
    metadata = entry["metadata"]
    if entry["answer"] is not None:
        return entry["answer"]
    if metadata["source_dataset"] == "graph_color":
        return json.dumps(metadata["possible_answer"])
    return metadata.get("example_answer") or metadata.get("example_correct_answer")


def spoiled(entries: list[dict], i: int, dice: random.Random) -> dict[str, str]:
    """Way -> answer: all that is offered for one entry."""
    entry = entries[i]
    ways = dict(special(entry)) | {f"constant {text!r}": text for text in CONSTANTS}
    answer = example(entry)
    if not answer:
        return ways | {"question": entry["question"]}
    others = {text: None for one in entries if (text := example(one)) and text != answer}
    if others:
        other = dice.choice(list(others))
        ways |= {"of another entry": other, "then another": f"{answer} or {other}"}
        ways |= {"another before": f"{other} or {answer}"}
    ways["all answers"] = ", ".join(sorted({answer, *others}))[:20_000]
    ways |= dict(plain(answer, entry["question"], dice))
    ways |= dict(numbers(answer, dice)) | dict(items(answer, dice))
    bare = re.sub(r"\s", "", answer)
    return {
        way: text
        for way, text in ways.items()
        if text.strip() != answer.strip() and (way in FORMS or re.sub(r"\s", "", text) != bare)
    }


async def reward(entry: dict, answer: str) -> float:
    """What envs/questions/reasoning_gym.py pays; nan where no verdict was had."""
    try:
        text = f"<answer>{answer}</answer>"
        pool = puzzles.evaluators if puzzles.evaluates(entry) else puzzles.checkers
        verdict = await pool.run(DEADLINE, entry=entry, text=text)
        return float(verdict.get("value", "nan"))
    except puzzles.CheckerError as error:
        print(f"no verdict: {entry['metadata']['source_dataset']} {answer[:60]!r}: {error}")
        return float("nan")


async def offer(name: str, count: int) -> dict[str, list[Try]]:
    """Way -> what came of it, of each entry."""
    from reasoning_gym import create_dataset

    dataset = create_dataset(name, size=count, seed=0)
    # As rows hold them: JSON turns tuples into lists, and the keys of dictionaries into strings.
    entries = [json.loads(json.dumps(dataset[i], default=str)) for i in range(count)]
    dice = random.Random(0)
    asked = [(entry, "own", text) for entry in entries if (text := example(entry)) is not None]
    for i, entry in enumerate(entries):
        asked += [(entry, way, text) for way, text in spoiled(entries, i, dice).items()]
    for text in sorted({text for entry in entries if (text := example(entry))}):
        if len(text) < 20:
            asked += [(entry, f"constant own {text!r}", text) for entry in entries]
    rewards = await asyncio.gather(*(reward(entry, text) for entry, _, text in asked))
    ways = defaultdict(list)
    for (entry, way, text), value in zip(asked, rewards, strict=True):
        right = entry["answer"]
        offered = puzzles.extract(f"<answer>{text}</answer>")
        same = right is not None and puzzles.is_same(offered, right)
        ways[way].append((value, same, example(entry), text))
    return ways


def line(name: str, way: str, tries: list[Try]) -> str:
    """One line of the table; its example is the one paid most."""
    values = [value for value, *_ in tries]
    share = sum(value >= PAID for value in values) / len(tries)
    exact = sum(same for _, same, *_ in tries) / len(tries)
    _, _, right, offered = max(tries, key=lambda one: one[0])
    texts = ("?" if right is None else right, offered)
    cut = [text if len(text) < 50 else f"{text[:22]} ... {text[-22:]}" for text in texts]
    numbers = f"{len(tries):3} {share:5.2f} {sum(values) / len(tries):5.2f} {max(values):7.4g}"
    name = name + "*" * (name in MANY)
    return f"{name:24} {way:24} {numbers} {exact:5.2f}  {cut[0]!r} -> {cut[1]!r}"


def suspects(name: str, ways: dict[str, list[Try]]) -> list[list[str]]:
    """The lines of one data set, for each table."""
    paid, refused, forms, constants, near = [], [], [], [], []
    for way, tries in ways.items():
        values = [value for value, *_ in tries]
        mean, shown = sum(values) / len(values), line(name, way, tries)
        if way == "own":
            lost = [one for one in tries if one[0] != 1 or not (one[1] or name in MANY)]
            refused += [line(name, way, lost)] if lost else []
        elif way.startswith("constant own"):
            constants += [(mean, shown)] if mean >= 0.5 else []
        elif way in FORMS:
            forms += [way] if max(values) >= PAID else []
        elif max(values) >= PAID:
            paid.append((mean, shown, way))
        elif max(values) >= 0.8:
            near.append((mean, shown))
    best = sorted(paid, reverse=True)
    wrong = [shown for _, shown, _ in best[:SHOWN]]
    if rest := ", ".join(way for *_, way in best[SHOWN:]):
        wrong.append(f"{'':24} also: {rest}")
    highest = [[max(lines)[1]] if lines else [] for lines in (constants, near)]
    return [wrong, refused, [f"{name:24} {', '.join(forms)}"] if forms else [], *highest]


async def main() -> None:
    from reasoning_gym.factory import DATASETS

    count = int(sys.argv[1]) if len(sys.argv) > 1 else 20
    names = sys.argv[2:] or sorted(set(DATASETS) - {"composite"})
    tables: dict[str, list[str]] = {
        "wrong answers paid": [],
        "own answers refused, by the scorer or by exact": [],
        "paid in another form": [],
        "right answers of one entry offered to all, with a mean of 0.5 or more": [],
        "wrong answers nearly paid, 0.8 or more; the best way": [],
    }
    for name in names:
        found = suspects(name, await offer(name, count))
        for lines, more in zip(tables.values(), found, strict=True):
            lines += more
        print(f"{name}: done", file=sys.stderr, flush=True)
    head = f"{'data set':24} {'way':24} {'n':>3} {'paid':>5} {'mean':>5} {'highest':>7} exact"
    for title, lines in tables.items():
        print(f"\n--- {title}\n{head}  right -> offered", *lines, sep="\n")


if __name__ == "__main__":
    asyncio.run(main())
