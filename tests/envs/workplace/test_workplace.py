"""Errands in an office: known answers, real rows, what each tool changes, and what is not paid."""

import asyncio
import json
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envs import Reward, services
from envs.workplace import office, office_tools, workplace
from envs.workplace.office import FILES, Office
from envs.workplace.office_tools import TOOLS, WRITES
from rollout.response import Response
from settings.environment_services import Services
from support.data import HERE, SHARED, shared
from support.scripts import Script, calling
from support.tables import gives, refused
from support.verifiers import HOSTILE, gym_rows, json_values, known_answers

# The tables of a small office, as NeMo-Gym writes them.
SMALL = {
    "emails": """\
email_id,inbox/outbox,sender/recipient,subject,sent_datetime,body
00000001,inbox,raj@atlas.com,Plan,2023-11-11 09:00:00,Dear Sam
00000002,inbox,nia@atlas.com,plan B,2023-11-12 09:00:00,Dear Sam
""",
    "events": """\
event_id,event_name,participant_email,event_start,duration
00000001,sync up,raj@atlas.com,2023-12-01 09:00:00,30
00000002,C++ (draft),raj@atlas.com,2023-12-02 09:00:00,30
""",
    "tasks": """\
task_id,task_name,assigned_to_email,list_name,due_date,board
00000001,Add,raj@atlas.com,Backlog,2023-11-27,Design
00000002,Add,raj@atlas.com,Backlog,2023-11-27,Design
""",
    "customers": """\
customer_id,assigned_to_email,customer_name,customer_email,customer_phone,last_contact_date,\
product_interest,status,follow_up_by,notes
00000001,raj@atlas.com,Taylor,Taylor@firm,,2023-11-01 23:59:00,Software,Lead,2023-12-22 23:59:00,
00000002,raj@atlas.com,Quinn,Quinn@firm,,2023-11-02 23:59:00,Software,Lead,2023-12-22 23:59:00,
""",
    "visits": """\
date_of_visit,visitor_id,page_views,session_duration_seconds,traffic_source,user_engaged
2023-10-02,0860,8,4,direct,True
2023-10-01,0860,8,5,referral,False
2023-10-01,0860,8,10,direct,True
""",
}


@pytest.fixture(autouse=True)
def tables(tmp_path, monkeypatch):
    for name, table in SMALL.items():
        (tmp_path / FILES[name]).write_text(table)
    monkeypatch.setattr(services, "_current", [Services(workplace=str(tmp_path))])


@pytest.fixture(params=[HERE, SHARED], ids=["here", "shared"])
def real(request, monkeypatch):
    """Where NeMo-Gym's tables lie: the rows that tests ask for and a few more, or all rows."""
    folder = HERE / "workplace_csv" if request.param == HERE else shared("workplace_csv")
    monkeypatch.setattr(services, "_current", [Services(workplace=str(folder))])
    return request.param


def call(name: str, /, **given: object) -> dict:
    return {"type": "function_call", "name": name, "arguments": json.dumps(given)}


def judged(made: list[dict], wanted: list[dict], text: str = "") -> Reward:
    return asyncio.run(workplace.verify({"ground_truth": wanted}, Response(text, tool_calls=made)))


def fresh() -> Office:
    return office.load(services.current().workplace).copy()


SEND = call("email_send_email", recipient="A@b.com", subject="Hi", body="x")
DELETE = call("email_delete_email", email_id="00000001")
REPLY = call("email_reply_email", email_id="00000002", body="Yes")
RISK = {"event_name": "Risk", "participant_email": "NIA@atlas.com", "duration": "30"}
RISK |= {"event_start": "2023-12-01 10:00:00"}
EVENT = call("calendar_create_event", **RISK)
DROP = call("calendar_delete_event", event_id="00000001")
STATUS = {"customer_id": "00000001", "field": "status"}
WON = call("customer_relationship_manager_update_customer", **STATUS, new_value="Won")
BARS = {"time_min": "2023-10-01", "time_max": "2023-10-02", "value_to_plot": "total_visits"}
PLOT = call("analytics_create_plot", **BARS, plot_type="bar")


def test_known_answers(real):
    cases = known_answers("workplace_assistant", "workplace_assistant")
    assert len(cases) == 24
    for of, response, reward, _ in cases:
        assert asyncio.run(workplace.verify(of, response)).value == reward, response.tool_calls


def test_real_rows_pay_what_they_ask_for(real):
    for of in gym_rows("workplace_assistant", place=real):
        workplace.check(of)
        wanted = of["ground_truth"]
        assert judged(wanted, wanted).value == 1 and judged(wanted[:-1], wanted).value == 0
        assert judged([], wanted).info == {"reason": "empty"}
        assert {tool["name"] for tool in of["responses_create_params"]["tools"]} == TOOLS.keys()


def test_the_tools_are_those_of_the_schemas(real):
    (of,) = gym_rows("workplace_assistant")
    schemas = of["responses_create_params"]["tools"]
    assert {schema["name"] for schema in schemas} == TOOLS.keys() and len(WRITES) == 14
    for schema in schemas:
        given = dict.fromkeys(schema["parameters"]["properties"], "2023-12-01")
        given |= {name: 1 for name in ("page", "page_size") if name in given}
        TOOLS[schema["name"]](fresh(), **given)
        with pytest.raises(TypeError):
            TOOLS[schema["name"]](fresh(), other="1")


test_what_is_paid = gives(
    lambda made, wanted: judged(made, wanted, "done").value,
    ([SEND, EVENT], [EVENT, SEND], 1),  # of different tables
    ([SEND, REPLY], [REPLY, SEND], 0),  # in another order
    ([SEND, SEND], [SEND], 0),
    ([DELETE, DELETE], [DELETE], 1),  # the second one fails
    ([DELETE, SEND], [DELETE, SEND], 1),
    ([SEND, DELETE], [DELETE, SEND], 0),  # pandas numbers the rows in another way
    ([EVENT, DROP], [DROP, EVENT], 1),  # where it numbers no rows anew
    ([call("email_search_emails", query="plan"), SEND], [SEND], 1),
    ([call("no_such_tool"), SEND], [SEND], 1),
    ([SEND | {"arguments": "{not"}, SEND], [SEND], 1),
    ([SEND | {"arguments": "[1]"}, SEND], [SEND], 1),
    ([SEND | {"arguments": SEND["arguments"].replace('"x"', '"X"')}], [SEND], 1),
    ([WON | {"arguments": WON["arguments"].replace("Won", "won")}], [WON], 0),
    ([EVENT | {"arguments": EVENT["arguments"].replace('"30"', "30")}], [EVENT], 0),
    ([PLOT], [PLOT], 1),
    ([PLOT, PLOT], [PLOT], 0),
    ([], [PLOT], 0),
    ([call("email_search_emails")], [], 1),
)

CHANGES = [SEND, DELETE, REPLY, EVENT, DROP, WON, PLOT]


@settings(max_examples=60, deadline=None)
@given(made=st.lists(st.sampled_from(CHANGES), max_size=5), extra=st.sampled_from([SEND, PLOT]))
def test_only_what_was_asked_for_is_paid(made, extra):
    """The same calls are; one more that changes something is not, wherever it stands."""
    looked = [call("calendar_search_events", query="."), call("email_delete_email", email_id="9")]
    assert judged([*looked, *made, *looked], made).value == 1
    for i in range(len(made) + 1):
        assert judged([*made[:i], extra, *made[i:]], made).value == 0


def test_an_office_is_not_changed_by_its_copies():
    before = fresh()
    changed = workplace.played(fresh(), [SEND, DELETE, EVENT, WON, PLOT])
    assert changed.difference(before) == "emails" and before.difference(fresh()) == ""
    assert changed.customers.rows[1] is before.customers.rows[1]


def test_what_tools_write():
    made = fresh()
    said = [TOOLS[c["name"]](made, **json.loads(c["arguments"])) for c in (SEND, REPLY, EVENT)]
    assert made.emails.rows[2]["email_id"] == "3" and said[2] == "00000003"
    assert made.emails.rows[2]["sender/recipient"] == "a@b.com"
    assert made.emails.rows[3]["subject"] == "RE: plan B"
    assert made.emails.rows[3]["sender/recipient"] == "nia@atlas.com"
    assert made.events.labels == [0, 1, 0] and made.emails.labels == [0, 1, 2, 3]
    add = TOOLS["customer_relationship_manager_add_customer"]
    key = add(made, customer_name="Ann", assigned_to_email="X@y.z", status="Lead")
    assert made.customers.find("customer_id", key)["notes"] == ""
    assert made.customers.find("customer_id", key)["customer_phone"] is None


@pytest.mark.parametrize(("name", "given"), [
    ("email_send_email", {"recipient": "nobody", "subject": "a", "body": "b"}),
    ("email_forward_email", {"email_id": "00000001", "recipient": "nobody"}),
    ("email_delete_email", {"email_id": "1"}),
    ("calendar_create_event", RISK | {"event_start": "soon"}),
    ("calendar_create_event", RISK | {"event_start": "30"}),
    ("calendar_create_event", RISK | {"duration": "-5"}),
    ("calendar_create_event", RISK | {"duration": "long"}),
    ("calendar_update_event",
     {"event_id": "00000001", "field": "event_id", "new_value": "00000009"}),
    ("project_management_update_task", {"task_id": "00000001", "field": "board"}),
    ("project_management_update_task",
     {"task_id": "00000001", "field": "assigned_to_email", "new_value": "x@y.z"}),
    ("customer_relationship_manager_update_customer", STATUS | {"new_value": "Rich"}),
    ("analytics_create_plot", BARS | {"plot_type": "pie"}),
])  # fmt: skip
def test_what_tools_refuse_changes_nothing(name, given):
    made = fresh()
    assert isinstance(TOOLS[name](made, **given), str) and made.difference(fresh()) == ""


def test_what_tools_find():
    made = fresh()
    found = TOOLS["email_search_emails"](made, query="PLAN sam")
    assert [row["email_id"] for row in found["emails"]] == ["00000002", "00000001"]
    found = TOOLS["email_search_emails"](made, date_min="Nov 12 2023", page=7, page_size=1)
    assert found["pagination"] == {"total_emails": 1, "page": 1, "page_size": 1, "total_pages": 1}
    events = TOOLS["calendar_search_events"]
    assert len(events(made, query="SYNC|c\\+")["events"]) == 2
    assert isinstance(events(made, query="nothing"), str)
    assert len(events(made, time_min="2023-12-02T00:00:00")["events"]) == 1
    people = TOOLS["company_directory_find_email_address"](made, name="NIA")
    assert people == ["nia@atlas.com"]
    customers = TOOLS["customer_relationship_manager_search_customers"]
    assert customers(made, last_contact_date_max="2023-11-02")["pagination"]["total_customers"] == 1
    assert isinstance(customers(made), str)
    tasks = TOOLS["project_management_search_tasks"]
    assert len(tasks(made, board="des", assigned_to_email="RAJ@atlas.com")) == 2
    assert TOOLS["analytics_total_visits_count"](made) == {"2023-10-01": 2, "2023-10-02": 1}
    direct = TOOLS["analytics_traffic_source_count"](made, traffic_source="direct")
    assert direct == {"2023-10-01": 1, "2023-10-02": 1}
    assert TOOLS["analytics_engaged_users_count"](made, time_max="2023-10-01") == {"2023-10-01": 1}
    assert TOOLS["analytics_get_average_session_duration"](made)["2023-10-01"] == 7.5


def test_an_errand_over_several_answers():
    """It looks up a mail, answers it wrongly in part, and is judged by what all calls did."""
    answers = [calling("email_search_emails", query="plan b")]
    answers += [calling("email_reply_email", email_id="00000009", body="Yes")]
    answers += [calling("email_reply_email", email_id="00000002", body="Yes"), "Done."]
    tools = [{"type": "function", "name": name} for name in TOOLS]
    of = {"responses_create_params": {"input": "Reply.", "tools": tools}, "ground_truth": [REPLY]}
    policy = Script(answers)
    episode = asyncio.run(workplace.rollout(of, policy))
    read = policy.last()
    assert episode.reward == Reward(1.0) and len(episode.turns) == 4
    assert read[0] == "Reply." and json.loads(read[1])["output"]["pagination"]["total_emails"] == 1
    assert read[2:] == ['{"output":"Not found."}', '{"output":"Sent."}']
    again = Script([calling("email_delete_email", email_id="00000001")] * 9)
    episode = asyncio.run(workplace.rollout(of, again))
    assert len(episode.turns) == workplace.MAX_STEPS and episode.reward.value == 0


def test_what_the_policy_reads():
    said = workplace.used(fresh(), "calendar_search_events", {"query": "("})
    assert said.startswith('{"output":"Error: ')
    said = workplace.used(fresh(), "calendar_delete_event", {"event_id": "00000001", "x": None})
    assert json.loads(said) == {"output": "Deleted."}


def test_a_search_that_never_ends_is_ended(monkeypatch):
    monkeypatch.setattr(office_tools, "SEARCH", 0.1)
    made = fresh()
    made.events.update("event_id", "00000001", {"event_name": "a" * 60})
    ticks = []
    stop = threading.Event()

    def tick() -> None:
        while not stop.wait(0.01):
            ticks.append(time.monotonic())

    thread = threading.Thread(target=tick)
    thread.start()
    said = workplace.used(made, "calendar_search_events", {"query": "(a|a)+b"})
    stop.set()
    thread.join()
    assert "TimeoutError" in said and len(ticks) >= 5  # others could run beside it
    assert "at most" in workplace.used(made, "calendar_search_events", {"query": "a" * 10**6})


VALUES = json_values(texts=st.text() | st.sampled_from(HOSTILE))
NAMES = "email_id event_id task_id customer_id field new_value recipient subject body query name"


@settings(max_examples=100, deadline=None)
@given(
    name=st.sampled_from(sorted(TOOLS)),
    given=st.dictionaries(st.sampled_from(NAMES.split()), VALUES, max_size=3),
)
def test_no_arguments_make_a_tool_fail(name, given):
    assert json.loads(workplace.used(fresh(), name, given)).keys() == {"output"}


@pytest.mark.parametrize("text", HOSTILE, ids=lambda text: repr(text[:8]))
def test_no_call_is_paid_or_raises_by_what_it_says(text):
    for made in (
        [SEND | {"arguments": text}],
        [SEND | {"name": text}],
        [SEND | {"arguments": json.dumps({"recipient": text, "subject": text, "body": text})}],
    ):
        assert judged(made, [SEND]).value == 0
    assert judged([], [SEND], text).value == 0


def test_many_calls_are_judged_in_time():
    """A megabyte of them; the event loop goes on meanwhile."""
    many = [SEND] * 9000
    began = time.monotonic()
    assert judged(many, [SEND]).value == 0
    assert time.monotonic() - began < 60


test_bad_rows_are_named = refused(
    lambda of: workplace.check(of),
    ({}, "ground_truth is missing"),
    ({"ground_truth": "x"}, "ground_truth is 'x'"),
    ({"ground_truth": [5]}, r"ground_truth\[0\].name"),
    ({"ground_truth": [{"name": "email_send_email"}]}, r"ground_truth\[0\].arguments"),
    ({"ground_truth": [SEND | {"arguments": "[]"}]}, r"ground_truth\[0\].arguments"),
    ({"ground_truth": [SEND, SEND | {"name": "mail"}]}, r"ground_truth\[1\].name is 'mail'"),
)


@pytest.mark.parametrize("text", [
    "",
    "email_id,subject\n1,a\n",
    SMALL["emails"].split("\n")[0] + "\n",
    SMALL["emails"][:-20],
    "<html>log in</html>\n",
    "version https://git-lfs.github.com/spec/v1\nsize 5\n",
    "\0" * 4096,
])  # fmt: skip
def test_a_damaged_table_pays_nothing_and_is_named(tmp_path, monkeypatch, text):
    """A ground truth would find nothing to change in it."""
    folder = tmp_path / "other"
    folder.mkdir()
    for name, table in SMALL.items():
        (folder / FILES[name]).write_text(text if name == "emails" else table)
    monkeypatch.setattr(services, "_current", [Services(workplace=str(folder))])
    with pytest.raises(services.CheckerError, match="emails.csv: expected rows of email_id, inbox"):
        judged([call("email_delete_email", email_id="00000002")], [SEND])


def test_a_folder_without_tables_is_named(monkeypatch, tmp_path):
    assert not office.NEED.problem()
    monkeypatch.setattr(services, "_current", [Services(workplace=str(tmp_path / "no"))])
    assert "lacks emails.csv, calendar_events.csv" in office.NEED.problem()
    monkeypatch.setattr(services, "_current", [Services()])
    assert "`bash launch/tables.sh FOLDER`" in office.NEED.problem()
    with pytest.raises(
        services.CheckerError,
        match="`bash launch/tables.sh FOLDER`",
    ):
        judged([SEND], [SEND])
