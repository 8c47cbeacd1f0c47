"""The office of NeMo-Gym's workplace_assistant: its tables, and their comparison."""

import csv
import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from envs import services

Row = dict[str, Any]
FILES = {"emails": "emails.csv", "events": "calendar_events.csv", "tasks": "project_tasks.csv"}
FILES |= {"customers": "customer_relationship_manager_data.csv", "visits": "analytics_data.csv"}
COLUMNS = {
    "emails": "email_id inbox/outbox sender/recipient subject sent_datetime body",
    "events": "event_id event_name participant_email event_start duration",
    "tasks": "task_id task_name assigned_to_email list_name due_date board",
    "customers": "customer_id assigned_to_email customer_name customer_email customer_phone"
    " last_contact_date product_interest status follow_up_by notes",
    "visits": "date_of_visit visitor_id page_views session_duration_seconds traffic_source"
    " user_engaged",
}
EXACT = ("status", "list_name", "board")  # columns in which case counts


class Table:
    """Rows in order. No row is ever changed, but replaced: copies of a table share them.

    `labels` are the names that pandas gives to rows. Its equality, by which NeMo-Gym judges,
    compares them: to delete a row and then to append one is not the same as the other way round.
    """

    def __init__(self, rows: list[Row], labels: list[int] | None = None) -> None:
        self.rows = rows
        self.labels = list(range(len(rows))) if labels is None else labels

    def copy(self) -> "Table":
        """A table that changes on its own."""
        return Table(self.rows.copy(), self.labels.copy())

    def find(self, column: str, value: Any) -> Row | None:
        """The first row with this value; None for none."""
        return next((row for row in self.rows if row[column] == value), None)

    def following(self, column: str) -> int:
        """The number after the greatest of a column, as texts compare. Raises ValueError."""
        return int(max(row[column] for row in self.rows)) + 1

    def append(self, row: Row, numbered: bool = True) -> None:
        """Adds a row. `numbered`: all labels are counted anew; else its own is 0."""
        columns = self.rows[0] if self.rows else row
        self.rows.append({column: row[column] for column in columns})
        self.labels = list(range(len(self.rows))) if numbered else [*self.labels, 0]

    def update(self, column: str, value: Any, change: Row) -> None:
        """Writes `change` into the rows with this value."""
        self.rows = [row | change if row[column] == value else row for row in self.rows]

    def delete(self, column: str, value: Any) -> None:
        """Removes the rows with this value; the others keep their labels."""
        kept = [i for i, row in enumerate(self.rows) if row[column] != value]
        self.rows = [self.rows[i] for i in kept]
        self.labels = [self.labels[i] for i in kept]

    def is_same(self, other: "Table") -> bool:
        """Whether labels and rows agree, in most columns whatever the case."""
        if self.labels != other.labels:
            return False
        pairs = zip(self.rows, other.rows, strict=True)
        return all(a is b or folded(a) == folded(b) for a, b in pairs)


@dataclass
class Office:
    """The tables that the tools read and change."""

    emails: Table
    events: Table
    tasks: Table
    customers: Table
    plots: Table
    visits: list[Row]  # which no tool changes

    def copy(self) -> "Office":
        """An office that changes on its own."""
        tables = {name: table.copy() for name, table in vars(self).items() if name != "visits"}
        return Office(**tables, visits=self.visits)

    def difference(self, other: "Office") -> str:
        """The first table that is not the same; "" for none."""
        names = [name for name in vars(self) if name != "visits"]
        differ = (name for name in names if not getattr(self, name).is_same(getattr(other, name)))
        return next(differ, "")


def folded(row: Row) -> Row:
    """A row as it is compared."""
    return {
        name: value.lower() if isinstance(value, str) and name not in EXACT else value
        for name, value in row.items()
    }


@functools.cache
def load(folder: str) -> Office:
    """The office of a folder with NeMo-Gym's tables; to be copied before it is changed.

    Raises OSError where a file is missing, and ValueError for one that is no such table: the calls
    of a ground truth would find nothing to change in it, and any answer would be right.
    """
    tables = {}
    for name, file in FILES.items():
        columns = COLUMNS[name].split()
        with open(Path(folder, file), newline="", encoding="utf-8") as lines:
            rows = list(csv.DictReader(lines))
        if not rows or any(list(row) != columns or None in row.values() for row in rows):
            raise ValueError(f"{folder}/{file}: expected rows of {', '.join(columns)}")
        tables[name] = [{key: text or None for key, text in row.items()} for row in rows]
    for row in tables["visits"]:
        row["user_engaged"] = row["user_engaged"] == "True"
    visits = tables.pop("visits")
    known = {name: Table(rows) for name, rows in tables.items()}
    return Office(**known, plots=Table([]), visits=visits)


def problem() -> str:
    """Why the office has no tables, and how to mend it; "" for nothing."""
    folder = services.current().workplace
    expected = "expected the tables that `bash launch/tables.sh FOLDER` fetches"
    if not folder:
        return f"services.workplace = '', {expected}"
    if absent := [file for file in FILES.values() if not Path(folder, file).is_file()]:
        return f"services.workplace = {folder!r} lacks {', '.join(absent)}: {expected}"
    try:
        load(folder)
    except (OSError, ValueError, csv.Error) as error:
        return f"services.workplace = {folder!r}: {error}: {expected}"
    return ""


NEED = services.Need("workplace", problem)
