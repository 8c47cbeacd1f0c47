"""What the driver knows of judges that are down."""

from collections import Counter

import pytest

from envs.services import Report
from runtime.rollouts import outages
from runtime.rollouts.outages import Outages

WELL = Report({}, Counter())


@pytest.fixture
def clock(monkeypatch):
    """A list whose one number is the time."""
    now = [1000.0]
    monkeypatch.setattr(outages.time, "monotonic", lambda: now[0])
    return now


def away(why: str = "http://h:1/v1", **failures) -> Report:
    failed = Counter({f"general/{reason}": count for reason, count in failures.items()})
    return Report({"judges.general": why}, failed)


def test_an_outage_is_timed_while_any_worker_reports_it(clock):
    found = Outages()
    found.receive("a", WELL)
    clock[0] += 10
    assert found.seconds() == 0 and found.state() == ""
    found.receive("a", away())
    clock[0] += 5
    found.receive("b", away("http://h:2/v1"))
    found.receive("a", WELL)
    clock[0] += 5
    assert found.seconds() == 10 and found.state() == "judges.general is down: http://h:2/v1"
    found.receive("b", WELL)
    clock[0] += 100
    assert found.seconds() == 10 and found.state() == ""
    found.receive("a", away())
    clock[0] += 3
    assert found.seconds() == 13


def test_what_a_lost_worker_said_is_forgotten(clock):
    found = Outages()
    found.receive("a", away())
    clock[0] += 5
    found.forget("a")
    clock[0] += 5
    assert found.away() == {} and found.seconds() == 5


def test_an_outage_is_told_of_now_and_then(clock, capsys):
    found = Outages()
    for second in range(1000):
        clock[0] = second
        found.receive("a", away(f"http://h:1/v1, for {second} s"))
    found.receive("a", WELL)
    told = capsys.readouterr().out.splitlines()
    line = "the run is waiting: judges.general is down: http://h:1/v1, for"
    assert told[:-1] == [f"{line} {second} s" for second in (0, 60, 120, 240, 480, 960)]
    assert told[-1] == "all servers answer again, after 999 s"


def test_a_judge_that_comes_and_goes_is_told_of_once_a_minute(clock, capsys):
    found = Outages()
    for second in range(180):
        clock[0] = second
        found.receive("a", away() if second % 10 < 8 else WELL)
    told = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("the run is waiting") for line in told) == 3
    assert told.count("all servers answer again, after 8 s") == 3 and found.seconds() == 144


def test_starved_checks_are_counted_from_step_to_step():
    found = Outages()
    found.receive("a", Report({}, Counter(), Counter({"math/timeout": 3})))
    found.receive("b", Report({}, Counter(), Counter({"math/timeout": 1, "code/error": 2})))
    counts = {"starved_checks/math/timeout": 4.0, "starved_checks/code/error": 2.0}
    assert found.meters() == counts and found.meters() == {}
    found.receive("a", Report({}, Counter(), Counter({"math/timeout": 4})))
    assert found.meters() == {"starved_checks/math/timeout": 1.0}


def test_failures_and_seconds_are_counted_from_step_to_step(clock):
    found = Outages()
    assert found.meters() == {}
    found.receive("a", Report({}, Counter({"general/429": 3})))
    found.receive("b", Report({}, Counter({"general/429": 1, "genrm/malformed": 2})))
    counts = {"judge_failures/general/429": 4.0, "judge_failures/genrm/malformed": 2.0}
    assert found.meters() == counts and found.meters() == {}
    found.receive("a", Report({"judges.general": ""}, Counter({"general/429": 4})))
    clock[0] += 7
    found.forget("b")
    expected = {"judge_failures/general/429": 1.0, "judge_seconds_away": 7.0}
    assert found.meters() == expected and found.meters() == {}
    clock[0] += 2
    found.receive("b", WELL)  # another process of that rank
    assert found.meters() == {"judge_seconds_away": 2.0}
