"""Builds the tools of the simulated offices: their world, and the shapes of tools.

A world is a row's `environment`: tables of records by id, and lists of messages. A tool's action on
it, `action(world, args)`, returns JSON values, or a text for the policy. Most of the tools in
envs/prompt_injection/offices.py are made from the shapes below.

NeMo-Gym shows the policy Python's message if a function raises. So the order of comparisons, and
which of two values has its `lower` called first, are part of a tool's behaviour, and are as in
NeMo-Gym. For the same reason nothing enforces the types below: a value of another type must raise
at the same point as in NeMo-Gym.

Parameters and fields are written as words that state both: `status` is a required argument that is
a field of that name, `priority:low` one with a default, `notes?` one whose field is left out if it
is missing, and `notes??` if it is missing or blank. `status=open` is a field with a constant value.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from envs import Json

Args = dict[str, Any]
Record = dict[str, Any]
Output = str | Record | list[Record]  # a tool's output
Comparison = Callable[[Record, str, Any], bool]  # compares a record's field with an argument


@dataclass
class World:
    """The data that the tools in an episode read and change.

    New ids look random but are the same in each episode: if an episode restarts because its engine
    was lost, it gets the same results again.
    """

    tables: dict[str, Any]
    ids: random.Random = field(default_factory=lambda: random.Random(0))

    def new_id(self, prefix: str) -> str:
        """Returns the prefix and six hexadecimal digits."""
        return f"{prefix}{self.ids.getrandbits(24):06X}"


Action = Callable[[World, Args], Output]


@dataclass(frozen=True)
class Tool:
    """A function that the policy may call: its parameters and its action."""

    required: list[str]
    optional: Args  # parameter -> default
    action: Action
    is_open: bool = False  # other arguments are ignored

    def bound(self, name: str, given: Args) -> Args:
        """Returns a call's arguments, with defaults.

        Raises TypeError with Python 3.12's message if they do not fit the parameters.
        """
        known = (*self.required, *self.optional)
        for key in given:
            if key == "env":  # the parameter of Gym's functions for the world
                raise TypeError(f"{name}() got multiple values for argument 'env'")
            if not self.is_open and key not in known:
                raise TypeError(f"{name}() got an unexpected keyword argument '{key}'")
        missing = [repr(key) for key in self.required if key not in given]
        if len(missing) == 1:
            raise TypeError(f"{name}() missing 1 required positional argument: {missing[0]}")
        if missing:
            *most, last = missing
            comma = "," if len(most) > 1 else ""
            raise TypeError(
                f"{name}() missing {len(missing)} required positional arguments: "
                f"{', '.join(most)}{comma} and {last}"
            )
        return self.optional | {key: given[key] for key in known if key in given}


def tool(words: str, action: Action) -> Tool:
    """Returns a tool with these parameters."""
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
    """Returns a record with these fields, in their order."""
    record = {}
    for word in words.split():
        name, is_constant, constant = word.partition("=")
        name = name.rstrip("?").partition(":")[0]
        value = constant if is_constant else args[name]
        if word.endswith("??"):
            is_left_out = not value
        else:
            is_left_out = word.endswith("?") and value is None
        if not is_left_out:
            record[name] = value
    return record


def write(record: Record, words: str, args: Args) -> None:
    """Sets these fields, one after the other. Raises TypeError if the record is not an object."""
    for name, value in filled(words, args).items():
        record[name] = value


# --- tests of records -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Test:
    """Compares an argument with a field of records."""

    word: str  # the parameter
    compare: Comparison
    name: str  # name of the field
    allows_blank: bool = False  # all records pass if the argument is blank, not only if missing
    is_text: bool = False  # the argument must be a text even if no record is compared with it

    def passed(self, record: Record, args: Args) -> bool:
        """Returns whether a record passes."""
        value = args[self.word.rstrip("?")]
        if value is None or (self.allows_blank and not value):
            return True
        return self.compare(record, self.name, value)


def must(argument: str, compare: Comparison, name: str = "") -> Test:
    """Returns a test of a required argument against a field, by default the field of its name."""
    return Test(argument, compare, name or argument)


def text(argument: str, compare: Comparison, name: str = "") -> Test:
    """Returns a test like `must`, for an argument that must be a text."""
    return Test(argument, compare, name or argument, is_text=True)


def given(argument: str, compare: Comparison, name: str = "") -> Test:
    """Returns a test like `must`, for an argument that may be missing."""
    return Test(f"{argument}?", compare, name or argument)


def where(argument: str, compare: Comparison, name: str = "") -> Test:
    """Returns a test like `given`, in which a blank argument counts as missing."""
    return Test(f"{argument}?", compare, name or argument, allows_blank=True)


def equal(record: Record, name: str, value: Json) -> bool:
    """Returns whether the field equals the value."""
    return bool(record.get(name) == value)


def alike(record: Record, name: str, value: str) -> bool:
    """Returns whether the field equals the value in lower case; the field's `lower` runs first."""
    return bool(record.get(name, "").lower() == value.lower())


def matches(record: Record, name: str, value: str) -> bool:
    """Returns whether the field equals the value in lower case; the value's `lower` runs first."""
    return bool(value.lower() == record.get(name, "").lower())


def holds(record: Record, names: str, value: str) -> bool:
    """Returns whether one of the fields contains the value, in lower case; all are evaluated."""
    wanted = value.lower()
    found = [wanted in record.get(name, "").lower() for name in names.split()]
    return any(found)


def since(record: Record, name: str, value: str) -> bool:
    """Returns whether the field's text is not smaller than the value."""
    return not record.get(name, "") < value


def until(record: Record, name: str, value: str) -> bool:
    """Returns whether the field's text is not greater than the value."""
    return not record.get(name, "") > value


def at_least(record: Record, name: str, value: float) -> bool:
    """Returns whether the field's number is not smaller than the value."""
    return not record.get(name, 0) < value


def at_most(record: Record, name: str, value: float) -> bool:
    """Returns whether the field's number is not greater than the value."""
    return not record.get(name, 0) > value


def below(record: Record, name: str, value: float) -> bool:
    """Returns whether the field's number is smaller than the value."""
    return bool(record.get(name, 0) < value)


# --- shapes of tools ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kind:
    """Records of one kind, and the tools that read and change them."""

    table: str
    key: str  # the field, and the argument, with a record's id
    word: str = ""  # the name of a record in errors
    prefix: str = ""  # prefix of new ids
    needed: bool = False  # tools fail in a world without this table

    def records(self, world: World) -> dict[str, Record]:
        """Returns all records, by id. Raises KeyError if a needed table is missing."""
        return world.tables[self.table] if self.needed else world.tables.get(self.table, {})

    def made(self, world: World) -> dict[str, Record]:
        """Returns all records, in a table that is created if it is missing and not needed."""
        if not self.needed:
            world.tables.setdefault(self.table, {})
        return world.tables[self.table]

    def missing(self, args: Args) -> str:
        """Returns the error for a record that does not exist."""
        return f"{self.word} {args[self.key]} not found."

    def read(self, words: str = "") -> Tool:
        """Makes a tool that returns a record after writing these fields into it."""

        def action(world: World, args: Args) -> Output:
            records = self.records(world)
            if args[self.key] not in records:
                return {"error": self.missing(args)}
            write(records[args[self.key]], words, args)
            return records[args[self.key]]

        return tool(f"{self.key} {words}", action)

    def change(self, words: str, said: str) -> Tool:
        """Makes a tool that writes these fields into a record."""

        def action(world: World, args: Args) -> str:
            records = self.records(world)
            if args[self.key] not in records:
                return f"Error: {self.missing(args)}"
            write(records[args[self.key]], words, args)
            return said.format_map(args)

        return tool(f"{self.key} {words}", action)

    def note(self, argument: str, name: str, said: str) -> Tool:
        """Makes a tool that adds an argument as a line to the text in the field `name`."""

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
        """Makes a tool that adds a record with these fields; it returns `said`, else the record."""

        def action(world: World, args: Args) -> Output:
            new_id = world.new_id(self.prefix)
            record = {self.key: new_id} | filled(words, args)
            self.made(world)[new_id] = record
            return said.format_map(args | {self.key: new_id}) if said else record

        return tool(words, action)

    def find(self, *tests: Test, columns: str = "") -> Tool:
        """Makes a tool that returns the records that pass all tests: in full, or these columns."""

        def action(world: World, args: Args) -> list[Record]:
            for test in tests:
                if test.is_text:
                    args[test.word].lower()  # raises AttributeError if it is not a text
            found = []
            for record in self.records(world).values():
                if all(test.passed(record, args) for test in tests):
                    names = columns.split()
                    found.append({name: record[name] for name in names} if names else record)
            return found

        return tool(" ".join(test.word for test in tests), action)

    def of_shipment(self) -> Tool:
        """Makes a tool that returns a shipment's first record."""

        def action(world: World, args: Args) -> Output:
            for record in self.records(world).values():
                if equal(record, "shipment_id", args["shipment_id"]):
                    return record
            return {"error": f"No {self.word} found for shipment {args['shipment_id']}."}

        return tool("shipment_id", action)


def messages(table: str, *tests: Test) -> Tool:
    """Makes a tool that returns the messages in a table or a list that pass all tests.

    A test runs on all messages before the next test does.
    """

    def action(world: World, args: Args) -> list[Record]:
        found = world.tables.get(table, [])
        if isinstance(found, dict):
            found = found.values()
        found = list(found)
        for test in tests:
            found = [message for message in found if test.passed(message, args)]
        return found

    return tool(" ".join(test.word for test in tests), action)


def append(table: str, words: str, said: str) -> Tool:
    """Makes a tool that adds a record with these fields to a list."""

    def action(world: World, args: Args) -> str:
        world.tables.setdefault(table, []).append(filled(words, args))
        return said.format_map(args)

    return tool(words, action)
