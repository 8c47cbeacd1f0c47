"""Loads, changes and compares the tables in NeMo-Gym's workplace_assistant, a simulated office."""

import csv
import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from envs import services

Row = dict[str, Any]
FILES = {
    "emails": "emails.csv",
    "events": "calendar_events.csv",
    "tasks": "project_tasks.csv",
    "customers": "customer_relationship_manager_data.csv",
    "visits": "analytics_data.csv",
}
COLUMNS = {
    "emails": [
        "email_id",
        "inbox/outbox",
        "sender/recipient",
        "subject",
        "sent_datetime",
        "body",
    ],
    "events": ["event_id", "event_name", "participant_email", "event_start", "duration"],
    "tasks": ["task_id", "task_name", "assigned_to_email", "list_name", "due_date", "board"],
    "customers": [
        "customer_id",
        "assigned_to_email",
        "customer_name",
        "customer_email",
        "customer_phone",
        "last_contact_date",
        "product_interest",
        "status",
        "follow_up_by",
        "notes",
    ],
    "visits": [
        "date_of_visit",
        "visitor_id",
        "page_views",
        "session_duration_seconds",
        "traffic_source",
        "user_engaged",
    ],
}
EXACT = ("status", "list_name", "board")  # columns in which case matters


class Table:
    """Rows in order. A row is replaced, never changed, because copies of a table share rows.

    `labels` are the rows' labels in pandas, whose equality, by which NeMo-Gym judges, compares
    them: deleting a row and then appending one differs from appending and then deleting.
    """

    def __init__(self, rows: list[Row], labels: list[int] | None = None) -> None:
        self.rows = rows
        self.labels = list(range(len(rows))) if labels is None else labels

    def copy(self) -> "Table":
        """Returns a table that can be changed independently."""
        return Table(self.rows.copy(), self.labels.copy())

    def find(self, column: str, value: str) -> Row | None:
        """Returns the first row with this value; None if there is none."""
        return next((row for row in self.rows if row[column] == value), None)

    def following(self, column: str) -> int:
        """Returns the number after the greatest one in a column, compared as text.

        Raises ValueError if there are no rows, or if that text is not a number.
        """
        return int(max(row[column] for row in self.rows)) + 1

    def append(self, row: Row, numbered: bool = True) -> None:
        """Adds a row. If `numbered`, all rows are relabelled from 0, else the row's label is 0."""
        columns = self.rows[0] if self.rows else row
        self.rows.append({column: row[column] for column in columns})
        self.labels = list(range(len(self.rows))) if numbered else [*self.labels, 0]

    def update(self, column: str, value: str, change: Row) -> None:
        """Writes `change` into the rows with this value."""
        self.rows = [row | change if row[column] == value else row for row in self.rows]

    def delete(self, column: str, value: str) -> None:
        """Removes the rows with this value; the others keep their labels."""
        kept = [i for i, row in enumerate(self.rows) if row[column] != value]
        self.rows = [self.rows[i] for i in kept]
        self.labels = [self.labels[i] for i in kept]

    def is_same(self, other: "Table") -> bool:
        """Returns whether labels and rows agree, apart from case in most columns."""
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
    visits: list[Row]  # no tool changes them

    def copy(self) -> "Office":
        """Returns an office that can be changed independently."""
        return Office(
            emails=self.emails.copy(),
            events=self.events.copy(),
            tasks=self.tasks.copy(),
            customers=self.customers.copy(),
            plots=self.plots.copy(),
            visits=self.visits,
        )

    def difference(self, other: "Office") -> str:
        """Returns the name of the first table that differs; "" if none does."""
        for name in ("emails", "events", "tasks", "customers", "plots"):
            if not getattr(self, name).is_same(getattr(other, name)):
                return name
        return ""


def folded(row: Row) -> Row:
    """Returns a row as it is compared, in lower case except for the columns in EXACT."""
    return {
        name: value.lower() if isinstance(value, str) and name not in EXACT else value
        for name, value in row.items()
    }


@functools.cache
def load(folder: str) -> Office:
    """Returns the office in a folder with NeMo-Gym's tables; copy it before changing it.

    Raises OSError if a file is missing, and ValueError if one does not have the expected columns:
    the calls in a ground truth would find nothing to change in it, and any answer would be right.
    """
    tables = {name: read_table(folder, name) for name in FILES}
    for row in tables["visits"]:
        row["user_engaged"] = row["user_engaged"] == "True"
    return Office(
        emails=Table(tables["emails"]),
        events=Table(tables["events"]),
        tasks=Table(tables["tasks"]),
        customers=Table(tables["customers"]),
        plots=Table([]),
        visits=tables["visits"],
    )


def read_table(folder: str, name: str) -> list[Row]:
    """Returns a table's rows, with None for empty cells. Raises OSError and ValueError."""
    columns = COLUMNS[name]
    file = FILES[name]
    with open(Path(folder, file), newline="", encoding="utf-8") as lines:
        rows = list(csv.DictReader(lines))
    if not rows or any(list(row) != columns or None in row.values() for row in rows):
        raise ValueError(f"{folder}/{file}: expected rows of {', '.join(columns)}")
    return [{key: text or None for key, text in row.items()} for row in rows]


def problem() -> str:
    """Returns why the office has no tables, and the remedy; "" if it has them."""
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
