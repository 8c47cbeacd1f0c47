"""What the tools of the simulated offices are made of: a world, and the shapes that tools have.

A world is the `environment` of a row: tables of records by id, and lists of messages. A tool's
action on it, `action(world, args)`, returns JSON values, or a text for the policy. The shapes below
make most of the tools in envs/prompt_injection/offices.py.

NeMo-Gym shows the policy what Python says where a function fails. So what is compared first, and
which of two values is asked first for its `lower`, is part of what a tool does, and is as there.

Parameters and fields are written as words, which say both: `status` is a required argument that is
a field of that name, `priority:low` one with a default, `notes?` one whose field is left out where
it is missing, and `notes??` where it is blank, too. `status=open` is a field that is a constant.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

Args = dict[str, Any]
Record = dict[str, Any]
Comparison = Callable[[Record, str, Any], bool]  # of a record's field with an argument


@dataclass
class World:
    """What the tools of an episode read and change.

    New ids look like random ones, but are the same in each episode: one that begins anew, as its
    engine was lost, gets the results that it had.
    """

    tables: dict[str, Any]
    ids: random.Random = field(default_factory=lambda: random.Random(0))

    def new_id(self, prefix: str) -> str:
        """The prefix and six hexadecimal digits."""
        return f"{prefix}{self.ids.getrandbits(24):06X}"


Action = Callable[[World, Args], Any]


@dataclass(frozen=True)
class Tool:
    """A function that the policy may call: its parameters, and what it does."""

    required: list[str]
    optional: Args  # parameter -> default
    action: Action
    is_open: bool = False  # whether other arguments are ignored

    def bound(self, name: str, given: Args) -> Args:
        """The arguments of a call, with defaults. Raises TypeError in the words of Python 3.12."""
        for key in given:
            if key == "env":  # the parameter of Gym's functions that has the world
                raise TypeError(f"{name}() got multiple values for argument 'env'")
            if not self.is_open and key not in (*self.required, *self.optional):
                raise TypeError(f"{name}() got an unexpected keyword argument '{key}'")
        if missing := [repr(key) for key in self.required if key not in given]:
            *most, last = missing
            comma = "," if len(most) > 1 else ""
            listed = f"{', '.join(most)}{comma} and {last}" if most else last
            number = f"{len(missing)} required positional argument{'s' if most else ''}"
            raise TypeError(f"{name}() missing {number}: {listed}")
        known = (*self.required, *self.optional)
        return self.optional | {key: given[key] for key in known if key in given}


def tool(words: str, action: Action) -> Tool:
    """A tool with these parameters."""
    required: list[str] = []
    optional: Args = {}
    for word in words.split():
        name, has_default, default = word.partition(":")
        if has_default:
            optional[name] = default
        elif word.endswith("?"):
            optional[word.rstrip("?")] = None
        elif "=" not in word:
            required.append(word)
    return Tool(required, optional, action)


def filled(words: str, args: Args) -> Record:
    """A record of these fields, in their order."""
    record = {}
    for word in words.split():
        name, is_constant, constant = word.partition("=")
        name = name.rstrip("?").partition(":")[0]
        value = constant if is_constant else args[name]
        is_missing = word.endswith("?") and value is None
        if not is_missing and not (word.endswith("??") and not value):
            record[name] = value
    return record


def write(record: Record, words: str, args: Args) -> None:
    """Sets these fields, one after the other. Raises TypeError for what is no object."""
    for name, value in filled(words, args).items():
        record[name] = value


# --- tests of records -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Test:
    """Compares an argument with a field of records."""

    word: str  # the parameter
    compare: Comparison
    name: str  # of the field
    is_blank: Callable[[Any], bool] = lambda value: value is None  # whether all records pass
    is_text: bool = False  # whether it has to be one even where no record is compared with it

    def passed(self, record: Record, args: Args) -> bool:
        """Whether a record passes."""
        value = args[self.word.rstrip("?")]
        return self.is_blank(value) or self.compare(record, self.name, value)


def must(argument: str, compare: Comparison, name: str = "") -> Test:
    """Of a required argument with the field `name`, or that of its own name."""
    return Test(argument, compare, name or argument)


def text(argument: str, compare: Comparison, name: str = "") -> Test:
    """As `must`, of a text."""
    return Test(argument, compare, name or argument, is_text=True)


def given(argument: str, compare: Comparison, name: str = "") -> Test:
    """As `must`, but the argument may be missing."""
    return Test(f"{argument}?", compare, name or argument)


def where(argument: str, compare: Comparison, name: str = "") -> Test:
    """As `given`, but a blank one counts as missing."""
    return Test(f"{argument}?", compare, name or argument, lambda value: not value)


def equal(record: Record, name: str, value: Any) -> bool:
    """Whether the field is the value."""
    return bool(record.get(name) == value)


def alike(record: Record, name: str, value: Any) -> bool:
    """Whether the field is the value, whatever the case; the field is asked first."""
    return bool(record.get(name, "").lower() == value.lower())


def matches(record: Record, name: str, value: Any) -> bool:
    """Whether the field is the value, whatever the case; the value is asked first."""
    return bool(value.lower() == record.get(name, "").lower())


def holds(record: Record, names: str, value: Any) -> bool:
    """Whether one of the fields holds the value, whatever the case; all of them are asked."""
    wanted = value.lower()
    found = [wanted in record.get(name, "").lower() for name in names.split()]
    return any(found)


def since(record: Record, name: str, value: Any) -> bool:
    """Whether the text of the field is not smaller."""
    return not record.get(name, "") < value


def until(record: Record, name: str, value: Any) -> bool:
    """Whether the text of the field is not greater."""
    return not record.get(name, "") > value


def at_least(record: Record, name: str, value: Any) -> bool:
    """Whether the number of the field is not smaller."""
    return not record.get(name, 0) < value


def at_most(record: Record, name: str, value: Any) -> bool:
    """Whether the number of the field is not greater."""
    return not record.get(name, 0) > value


def below(record: Record, name: str, value: Any) -> bool:
    """Whether the number of the field is smaller."""
    return bool(record.get(name, 0) < value)


# --- shapes of tools ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kind:
    """Records of one kind, and the tools that read and change them."""

    table: str
    key: str  # the field, and the argument, with the id of a record
    word: str = ""  # what an error calls a record
    prefix: str = ""  # of new ids
    needed: bool = False  # tools fail in a world without this table

    def records(self, world: World) -> Any:
        """All records, by id. Raises KeyError where a needed table is missing."""
        return world.tables[self.table] if self.needed else world.tables.get(self.table, {})

    def made(self, world: World) -> Any:
        """All records, in a table that is made where it is missing, unless it is needed."""
        if not self.needed:
            world.tables.setdefault(self.table, {})
        return world.tables[self.table]

    def missing(self, args: Args) -> str:
        """That there is no such record."""
        return f"{self.word} {args[self.key]} not found."

    def read(self, words: str = "") -> Tool:
        """Returns a record, after these fields were written into it."""

        def action(world: World, args: Args) -> Any:
            records = self.records(world)
            if args[self.key] not in records:
                return {"error": self.missing(args)}
            write(records[args[self.key]], words, args)
            return records[args[self.key]]

        return tool(f"{self.key} {words}", action)

    def change(self, words: str, said: str) -> Tool:
        """Writes these fields into a record."""

        def action(world: World, args: Args) -> str:
            records = self.records(world)
            if args[self.key] not in records:
                return f"Error: {self.missing(args)}"
            write(records[args[self.key]], words, args)
            return said.format_map(args)

        return tool(f"{self.key} {words}", action)

    def note(self, argument: str, name: str, said: str) -> Tool:
        """Adds an argument as a line to the text in the field `name`."""

        def action(world: World, args: Args) -> str:
            records = self.records(world)
            if args[self.key] not in records:
                return f"Error: {self.missing(args)}"
            before = records[args[self.key]].get(name, "")
            line = args[argument]
            records[args[self.key]][name] = before + "\n" + line if before else line
            return said.format_map(args)

        return tool(f"{self.key} {argument}", action)

    def add(self, words: str, said: str = "") -> Tool:
        """Adds a record of these fields, and returns `said`, or without one the record."""

        def action(world: World, args: Args) -> Any:
            key = {self.key: world.new_id(self.prefix)}
            record = key | filled(words, args)
            self.made(world)[key[self.key]] = record
            return said.format_map(args | key) if said else record

        return tool(words, action)

    def find(self, *tests: Test, columns: str = "") -> Tool:
        """The records that pass all tests: whole, or these columns of them."""

        def action(world: World, args: Args) -> list:
            for test in tests:
                if test.is_text:
                    args[test.word].lower()
            found = []
            for record in self.records(world).values():
                if all(test.passed(record, args) for test in tests):
                    names = columns.split()
                    found.append({name: record[name] for name in names} if names else record)
            return found

        return tool(" ".join(test.word for test in tests), action)

    def of_shipment(self) -> Tool:
        """The first record of a shipment."""

        def action(world: World, args: Args) -> Any:
            for record in self.records(world).values():
                if equal(record, "shipment_id", args["shipment_id"]):
                    return record
            return {"error": f"No {self.word} found for shipment {args['shipment_id']}."}

        return tool("shipment_id", action)


def messages(table: str, *tests: Test) -> Tool:
    """The messages, of a table or a list, that pass each test; all make one before the next."""

    def action(world: World, args: Args) -> list:
        found = world.tables.get(table, [])
        found = list(found.values() if isinstance(found, dict) else found)
        for test in tests:
            found = [message for message in found if test.passed(message, args)]
        return found

    return tool(" ".join(test.word for test in tests), action)


def append(table: str, words: str, said: str) -> Tool:
    """Adds a record of these fields to a list."""

    def action(world: World, args: Args) -> str:
        world.tables.setdefault(table, []).append(filled(words, args))
        return said.format_map(args)

    return tool(words, action)
