"""Implements the 27 tools of the office, which read and change its tables.

Each takes the office and the call's arguments, with the names and types in NeMo-Gym's schemas, and
returns a JSON value. A refused call returns a text. Nothing enforces the types: if a tool cannot
use an argument, it raises an exception and changes nothing.

A search matches a regular expression, regardless of case, as in pandas' str.contains.
"""

import collections
import datetime
import re
import time
from collections.abc import Callable, Iterable
from typing import TypeVar

import dateutil.parser
import regex

from envs.workplace.office import Office, Row, Table

Bound = TypeVar("Bound", str, datetime.datetime)
Page = dict[str, list[Row] | dict[str, int]]
Output = str | list[str] | Row | list[Row] | Page | dict[str, int] | dict[str, float]

NOW = datetime.datetime(2023, 11, 30, 23, 59)  # the office's clock stands still
ADDRESS = re.compile(r"[a-zA-Z0-9._%+-]+@[a-zA-Z0-9.-]+\.[a-zA-Z]{2,}\n?")
LISTS = ("Backlog", "In Progress", "In Review", "Completed")
BOARDS = ("Back end", "Front end", "Design")
STATUSES = ("Qualified", "Won", "Lost", "Lead", "Proposal")
PRODUCTS = ("Software", "Hardware", "Services", "Consulting", "Training")
SOURCES = ("direct", "referral", "search_engine", "social_media")
COUNTED = tuple(f"visits_{source}" for source in SOURCES)
VALUES = ("total_visits", "session_duration_seconds", "user_engaged", *COUNTED)
PLOTS = ("bar", "line", "scatter", "histogram")
EVENT = ("event_name", "participant_email", "event_start", "duration")
TASK = ("task_name", "assigned_to_email", "list_name", "due_date", "board")
TIME = "expected a time, YYYY-MM-DD HH:MM:SS"
SEARCH = 1.0  # seconds that a search may take
LONGEST = 1000  # characters of a search


def containing(pattern: str, rows: Iterable[Row], *columns: str) -> list[Row]:
    """Returns the rows that contain a pattern in one of `columns`.

    Raises ValueError if it is too long, regex.error if it is invalid, and TimeoutError.
    """
    if len(pattern) > LONGEST:
        raise ValueError(f"a search of {len(pattern)} characters, expected at most {LONGEST}")
    compiled = regex.compile(pattern, regex.IGNORECASE)
    until = time.monotonic() + SEARCH

    def holds(text: str | None) -> bool:
        if text is None:
            return False
        left = max(1e-3, until - time.monotonic())
        return bool(compiled.search(text, timeout=left, concurrent=True))

    return [row for row in rows if any(holds(row[column]) for column in columns)]


def moment(text: str) -> datetime.datetime:
    """Returns the time in a text, as pandas reads it. Raises ValueError if it has none."""
    if len(text) > 100 or is_small(text):
        raise ValueError(TIME)
    if text in ("now", "today"):
        return NOW
    try:
        return datetime.datetime.fromisoformat(text)
    except ValueError:
        pass
    try:
        return dateutil.parser.parse(text, default=NOW.replace(day=1, hour=0, minute=0))
    except OverflowError:
        raise ValueError(TIME) from None


def is_small(text: str) -> bool:
    """Returns whether a text is a number that is too small for a year."""
    try:
        return float(text) < 1000 and not text.startswith("0")
    except ValueError:
        return False


def page_of(name: str, rows: list[Row], page: int, page_size: int) -> str | Page:
    """Returns one page of the rows that were found, and the total number of rows."""
    if not rows:
        return f"No {name} found."
    pages = (len(rows) + page_size - 1) // page_size
    page = max(1, min(page, pages)) if pages > 0 else 1
    start = (page - 1) * page_size
    end = min(start + page_size, len(rows))
    counts = {
        f"total_{name}": len(rows),
        "page": page,
        "page_size": page_size,
        "total_pages": pages,
    }
    return {name: rows[start:end], "pagination": counts}


def field_of(table: Table, column: str, key: str | None, field: str | None) -> str | Row:
    """Returns one field of the row that a key names."""
    if not key or not field:
        return f"Missing: {column} and field."
    row = table.find(column, key)
    if not row:
        return "Not found."
    if field not in row:
        return f"No such field. There are: {', '.join(row)}."
    return {field: row[field]}


def between(
    rows: list[Row], first: Bound | None, last: Bound | None, value: Callable[[Row], Bound]
) -> list[Row]:
    """Returns the rows whose value lies between two bounds, each of which may be missing."""
    if first:
        rows = [row for row in rows if value(row) >= first]
    if last:
        rows = [row for row in rows if value(row) <= last]
    return rows


def removed(table: Table, column: str, key: str | None) -> str:
    """Deletes the rows that a key names."""
    if not key:
        return f"Missing: {column}."
    if not table.find(column, key):
        return "Not found."
    table.delete(column, key)
    return "Deleted."


# --- the directory and emails ---------------------------------------------------------------------


def company_directory_find_email_address(office: Office, /, name: str = "") -> Output:
    if name == "":
        return "Missing: name."
    known = {row["sender/recipient"] for row in office.emails.rows}
    known |= {row["participant_email"] for row in office.events.rows}
    people = [{"address": address} for address in sorted(known)]
    return [row["address"] for row in containing(name.lower(), people, "address")]


def email_get_email_information_by_id(
    office: Office, /, email_id: str | None = None, field: str | None = None
) -> Output:
    return field_of(office.emails, "email_id", email_id, field)


def email_search_emails(
    office: Office,
    /,
    query: str = "",
    date_min: str | None = None,
    date_max: str | None = None,
    page: int = 1,
    page_size: int = 5,
) -> Output:
    words = query.lower().split()
    columns = ("subject", "body", "sender/recipient")
    found = []
    for row in office.emails.rows:
        text = " ".join(str(row[column]) for column in columns).lower()
        if all(word in text for word in words):
            found.append(row)
    found.sort(key=lambda row: row["sent_datetime"], reverse=True)
    first = str(moment(date_min).date()) if date_min else None
    last = str(moment(date_max).date()) if date_max else None
    found = between(found, first, last, lambda row: row["sent_datetime"][:10])
    return page_of("emails", found, page, page_size)


def email_send_email(
    office: Office,
    /,
    recipient: str | None = None,
    subject: str | None = None,
    body: str | None = None,
) -> str:
    if not recipient or not subject or not body:
        return "Missing: recipient, subject or body."
    if "@" not in recipient or "." not in recipient:
        return "The recipient is not an email address."
    emails = office.emails
    number = emails.following("email_id") if emails.rows else 1
    email = {
        "email_id": str(number),
        "inbox/outbox": "outbox",
        "sender/recipient": recipient.lower(),
        "subject": subject,
        "sent_datetime": str(NOW),
        "body": body,
    }
    emails.append(email)
    return "Sent."


def email_delete_email(office: Office, /, email_id: str | None = None) -> str:
    return removed(office.emails, "email_id", email_id)


def email_forward_email(
    office: Office, /, email_id: str | None = None, recipient: str | None = None
) -> str:
    if not email_id or not recipient:
        return "Missing: email_id or recipient."
    email = office.emails.find("email_id", email_id)
    if not email:
        return "Not found."
    return email_send_email(office, recipient, f"FW: {email['subject']}", email["body"])


def email_reply_email(
    office: Office, /, email_id: str | None = None, body: str | None = None
) -> str:
    if not email_id or not body:
        return "Missing: email_id or body."
    email = office.emails.find("email_id", email_id)
    if not email:
        return "Not found."
    return email_send_email(office, email["sender/recipient"], f"RE: {email['subject']}", body)


# --- the calendar ---------------------------------------------------------------------------------


def is_event_id(key: str) -> bool:
    """Returns whether a key has the form of an event's id."""
    return isinstance(key, str) and len(key) == 8 and key.isdigit()


def event_problem(event: Row) -> str:
    """Returns the error in an event's time or duration; "" if there is none."""
    try:
        if "event_start" in event:
            moment(event["event_start"])
    except ValueError:
        return f"Wrong event_start: {TIME}."
    try:
        if "duration" in event and int(event["duration"]) <= 0:
            return "Wrong duration: expected more than 0 minutes."
    except ValueError:
        return "Wrong duration: expected a number of minutes."
    return ""


def calendar_get_event_information_by_id(
    office: Office, /, event_id: str | None = None, field: str | None = None
) -> Output:
    return field_of(office.events, "event_id", event_id, field)


def calendar_search_events(
    office: Office,
    /,
    query: str = "",
    time_min: str | None = None,
    time_max: str | None = None,
    page: int = 1,
    page_size: int = 5,
) -> Output:
    found = containing(query, office.events.rows, "event_name", "participant_email")
    first = moment(time_min) if time_min else None
    last = moment(time_max) if time_max else None
    found = between(found, first, last, lambda row: moment(row["event_start"]))
    found.sort(key=lambda row: moment(row["event_start"]), reverse=True)
    return page_of("events", found, page, page_size)


def calendar_create_event(office: Office, /, **given: str | None) -> str:
    event = exactly(EVENT, given)
    if missing := [name for name, value in event.items() if not value]:
        return f"Missing: {', '.join(missing)}."
    if problem := event_problem(event):
        return problem
    event["participant_email"] = event["participant_email"].lower()
    key = str(office.events.following("event_id")).zfill(8)
    office.events.append({"event_id": key} | event, numbered=False)
    return key


def calendar_delete_event(office: Office, /, event_id: str | None = None) -> str:
    if event_id and not is_event_id(event_id):
        return "Wrong event_id: expected 8 digits."
    return removed(office.events, "event_id", event_id)


def calendar_update_event(
    office: Office,
    /,
    event_id: str | None = None,
    field: str | None = None,
    new_value: str | None = None,
) -> str:
    if not event_id or not field or not new_value:
        return "Missing: event_id, field or new_value."
    if not is_event_id(event_id):
        return "Wrong event_id: expected 8 digits."
    if field not in EVENT:
        return f"No such field. There are: {', '.join(EVENT)}."
    if problem := event_problem({field: new_value}):
        return problem
    if not office.events.find("event_id", event_id):
        return "Not found."
    new_value = new_value.lower() if field == "participant_email" else new_value
    office.events.update("event_id", event_id, {field: new_value})
    return "Updated."


# --- website visits -------------------------------------------------------------------------------


def visits(office: Office, time_min: str | None, time_max: str | None) -> list[Row]:
    """Returns the visits on these days; dates are compared as texts."""
    return between(office.visits, time_min, time_max, lambda row: row["date_of_visit"])


def by_day(rows: list[Row], value: Callable[[Row], float]) -> dict[str, list[float]]:
    """Returns the values of all rows by day."""
    days = collections.defaultdict(list)
    for row in sorted(rows, key=lambda row: row["date_of_visit"]):
        days[row["date_of_visit"]].append(value(row))
    return days


def analytics_get_visitor_information_by_id(
    office: Office, /, visitor_id: str | None = None
) -> Output:
    if not visitor_id:
        return "Missing: visitor_id."
    return [row for row in office.visits if row["visitor_id"] == visitor_id] or "Not found."


def analytics_create_plot(
    office: Office,
    /,
    time_min: str | None = None,
    time_max: str | None = None,
    value_to_plot: str | None = None,
    plot_type: str | None = None,
) -> str:
    if not time_min or not time_max:
        return "Missing: time_min or time_max."
    if value_to_plot not in VALUES:
        return f"Wrong value_to_plot: expected one of {', '.join(VALUES)}."
    if plot_type not in PLOTS:
        return f"Wrong plot_type: expected one of {', '.join(PLOTS)}."
    path = f"plots/{time_min}_{time_max}_{value_to_plot}_{plot_type}.png"
    office.plots.append({"file_path": path})
    return path


def analytics_total_visits_count(
    office: Office, /, time_min: str | None = None, time_max: str | None = None
) -> Output:
    days = by_day(visits(office, time_min, time_max), lambda row: 1)
    return {day: len(values) for day, values in days.items()}


def analytics_engaged_users_count(
    office: Office, /, time_min: str | None = None, time_max: str | None = None
) -> Output:
    days = by_day(visits(office, time_min, time_max), lambda row: row["user_engaged"])
    return {day: sum(values) for day, values in days.items()}


def analytics_traffic_source_count(
    office: Office,
    /,
    time_min: str | None = None,
    time_max: str | None = None,
    traffic_source: str | None = None,
) -> Output:
    chosen = visits(office, time_min, time_max)
    days = by_day(chosen, lambda row: traffic_source in (None, "", row["traffic_source"]))
    return {day: sum(values) for day, values in days.items()}


def analytics_get_average_session_duration(
    office: Office, /, time_min: str | None = None, time_max: str | None = None
) -> Output:
    chosen = visits(office, time_min, time_max)
    days = by_day(chosen, lambda row: float(row["session_duration_seconds"]))
    return {day: sum(values) / len(values) for day, values in days.items()}


# --- project tasks --------------------------------------------------------------------------------


def task_problem(office: Office, task: Row) -> str:
    """Returns the error in the values of a task; "" if there is none."""
    for name, allowed in {"list_name": LISTS, "board": BOARDS}.items():
        if name in task and task[name] not in allowed:
            return f"Wrong {name}: expected one of {', '.join(allowed)}."
    team = {str(row["assigned_to_email"]).lower() for row in office.tasks.rows}
    if "assigned_to_email" in task and task["assigned_to_email"] not in team:
        return "Wrong assigned_to_email: expected a member of the team."
    return ""


def project_management_get_task_information_by_id(
    office: Office, /, task_id: str | None = None, field: str | None = None
) -> Output:
    return field_of(office.tasks, "task_id", task_id, field)


def project_management_search_tasks(office: Office, /, **given: str | None) -> Output:
    asked = {name: value for name, value in exactly(TASK, given).items() if value}
    if not asked:
        return "Missing: what to search for."
    found = office.tasks.rows
    if address := asked.pop("assigned_to_email", ""):
        if not ADDRESS.fullmatch(address):
            return "Wrong assigned_to_email: expected an email address."
        found = [row for row in found if row["assigned_to_email"].lower() == address.lower()]
    for name, pattern in asked.items():
        found = containing(pattern, found, name)
    return found


def project_management_create_task(office: Office, /, **given: str | None) -> str:
    task = exactly(TASK, given)
    if missing := [name for name, value in task.items() if not value]:
        return f"Missing: {', '.join(missing)}."
    task["assigned_to_email"] = task["assigned_to_email"].lower()
    if problem := task_problem(office, task):
        return problem
    key = str(office.tasks.following("task_id")).zfill(8)
    office.tasks.append({"task_id": key} | task)
    return key


def project_management_delete_task(office: Office, /, task_id: str | None = None) -> str:
    return removed(office.tasks, "task_id", task_id)


def project_management_update_task(
    office: Office,
    /,
    task_id: str | None = None,
    field: str | None = None,
    new_value: str | None = None,
) -> str:
    if not task_id or not field or not new_value:
        return "Missing: task_id, field or new_value."
    new_value = new_value.lower() if field == "assigned_to_email" else new_value
    if problem := task_problem(office, {field: new_value}):
        return problem
    task = office.tasks.find("task_id", task_id)
    if not task:
        return "Not found."
    if field not in task:
        return f"No such field. There are: {', '.join(task)}."
    office.tasks.update("task_id", task_id, {field: new_value})
    return "Updated."


# --- customers ------------------------------------------------------------------------------------

SEARCHED = ("customer_name", "customer_email", "product_interest", "status", "assigned_to_email")
DATES = ("last_contact_date", "follow_up_by")
NEEDED = ("customer_name", "assigned_to_email", "status")
MORE = ("customer_email", "customer_phone", "product_interest", "notes")


def customer_relationship_manager_search_customers(
    office: Office, /, page: int = 1, page_size: int = 5, **given: str | None
) -> Output:
    bounds = [f"{name}_{bound}" for name in DATES for bound in ("min", "max")]
    asked = {name: value for name, value in exactly((*SEARCHED, *bounds), given).items() if value}
    if not asked:
        return "Missing: what to search for."
    found = office.customers.rows
    for name, value in asked.items():
        column = name.removesuffix("_min").removesuffix("_max")
        if name in SEARCHED:
            found = containing(value, found, name)
        else:
            found = [row for row in found if row[column] is not None]
            if name.endswith("_min"):
                found = [row for row in found if row[column] >= value]
            else:
                found = [row for row in found if row[column] <= value]
    return page_of("customers", found, page, page_size)


def customer_relationship_manager_update_customer(
    office: Office,
    /,
    customer_id: str | None = None,
    field: str | None = None,
    new_value: str | None = None,
) -> str:
    if not customer_id or not field or not new_value:
        return "Missing: customer_id, field or new_value."
    allowed = {"status": STATUSES, "product_interest": PRODUCTS}.get(field, (new_value,))
    if new_value not in allowed:
        return f"Wrong {field}: expected one of {', '.join(allowed)}."
    new_value = new_value.lower() if field in ("customer_email", "assigned_to_email") else new_value
    customer = office.customers.find("customer_id", customer_id)
    if not customer:
        return "Not found."
    if field not in customer:
        return f"No such field. There are: {', '.join(customer)}."
    office.customers.update("customer_id", customer_id, {field: new_value})
    return "Updated."


def customer_relationship_manager_add_customer(office: Office, /, **given: str | None) -> str:
    customer = exactly((*NEEDED, *MORE, *DATES), {"notes": ""} | given)
    if missing := [name for name in NEEDED if not customer[name]]:
        return f"Missing: {', '.join(missing)}."
    customer["assigned_to_email"] = customer["assigned_to_email"].lower()
    if customer["customer_email"]:
        customer["customer_email"] = customer["customer_email"].lower()
    key = str(office.customers.following("customer_id")).zfill(8)
    office.customers.append({"customer_id": key} | customer)
    return key


def customer_relationship_manager_delete_customer(
    office: Office, /, customer_id: str | None = None
) -> str:
    return removed(office.customers, "customer_id", customer_id)


def exactly(names: Iterable[str], given: Row) -> Row:
    """Returns the values of all these names, with None for those that are not given.

    Raises TypeError if another name is given.
    """
    row = dict.fromkeys(names)
    if unknown := given.keys() - row.keys():
        raise TypeError(f"unknown arguments: {', '.join(sorted(unknown))}")
    return row | given


KITS = ("company_directory_", "email_", "calendar_", "analytics_", "project_", "customer_")
TOOLS: dict[str, Callable[..., Output]] = {
    name: function for name, function in list(globals().items()) if name.startswith(KITS)
}
VERBS = ("send", "delete", "forward", "reply", "create", "update", "add")
WRITES = {name for name in TOOLS if any(f"_{verb}_" in name for verb in VERBS)}
