"""The client of judges: verdicts, replicas, failures that are no verdicts, and outages."""

import asyncio
import re
import time

import pytest

from core import errors
from envs import services
from envs.judge import endpoints, judge, prompts
from envs.maths.same_answer import PROMPTS
from envs.services import CheckerError
from runtime.processes.cluster import ROOT
from settings.environment_services import Services
from support.judges import Judge, as_judge
from support.skills import skills

MESSAGES = [{"role": "user", "content": "Is it right?"}]
VERDICTS = {"[[YES]]": True, "[[NO]]": False}


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    services.configure(Services(), services.Limits(10.0))
    monkeypatch.setattr(judge, "pause", lambda failures: 0.02 * min(2**failures, 10))
    monkeypatch.setattr(judge, "TICK", 0.02)
    for name in endpoints.VARIABLES:
        monkeypatch.delenv(name, raising=False)


def ask():
    return judge.ask("general", MESSAGES, VERDICTS.get)


def use(**judges):
    services.configure(Services(judges=judges))


def asked(count=1, tries=1, read=VERDICTS.get, **sampling):
    """The verdicts of so many calls at once, and the report after them."""
    judge.JUDGES.clear()

    async def every():
        calls = [judge.ask("general", MESSAGES, read, tries, **sampling) for _ in range(count)]
        return await asyncio.gather(*calls), services.report()

    return asyncio.run(every())


# --- verdicts -------------------------------------------------------------------------------------


def test_a_verdict_is_read_from_what_the_judge_says():
    with as_judge("general", "[[YES]]") as server:
        assert asked() == ([True], services.Report({}, {}))
        (body,) = server.asked
    assert body == {"model": "recorded", "messages": MESSAGES}


@pytest.mark.parametrize(("reply", "verdict"), [
    ("<think>[[NO]] at first sight</think>\n[[YES]]", True),
    ("it has no opening tag: [[NO]]</think>[[YES]]", True),
    ({"content": "[[YES]]", "reasoning_content": "[[NO]]"}, True),
    ({"content": None, "reasoning_content": "[[NO]]"}, None),
    ({"content": "[[YES]] only if", "finish_reason": "length"}, None),
    ("<think>it ends before [[NO]]", None),
    ("", None),
])  # fmt: skip
def test_a_thought_is_no_verdict(reply, verdict):
    def first(text):
        found = re.search(r"\[\[\w+\]\]", text)
        return found and VERDICTS[found[0]]

    with as_judge("general", reply):
        assert asked(read=first)[0] == [verdict]


def test_what_cannot_be_read_is_counted_and_asked_again():
    with as_judge("general", ["well", "", "[[NO]]", "hm", "hm"]):
        assert asked(tries=3) == ([False], services.Report({}, {"general/malformed": 2}))
        assert asked(tries=2) == ([None], services.Report({}, {"general/malformed": 2}))


async def test_a_judge_that_gives_no_verdicts_is_broken_and_no_answer_wrong():
    """One odd reply is what NeMo-Gym takes it for, and a verdict in between counts anew."""
    with as_judge("general", ["!!!!"] * 19 + ["[[YES]]"] + ["!!!!"] * 20):
        found = [await judge.ask("general", MESSAGES, VERDICTS.get) for _ in range(39)]
        assert found == [None] * 19 + [True] + [None] * 19
        with pytest.raises(CheckerError, match="'general' gave no verdict in 20 replies in a row"):
            await judge.ask("general", MESSAGES, VERDICTS.get)


def test_the_configuration_overrides_sampling_and_names_the_model():
    with Judge("[[YES]]", model="big") as server:
        sampling = {"temperature": 0.0, "max_tokens": 5}
        use(general={"url": server.url + "/", "model": "big", "sampling": sampling})
        asked(temperature=0.7, top_p=0.9)
        (body,) = server.asked
    expected = {"temperature": 0.0, "max_tokens": 5, "top_p": 0.9, "model": "big"}
    assert body == expected | {"messages": MESSAGES}


def test_any_text_can_be_judged():
    hostile = "\0 half a pair \ud800 \U0001f600 " + "x" * 1_000_000
    message = [{"role": "user", "content": hostile}]
    with as_judge("general", lambda messages: messages[0]["content"][:30]):
        said = asyncio.run(judge.ask("general", message, str))
    assert said == hostile[:30].replace("\ud800", "?").strip()


# --- failures -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("fault", "reason"), [
    ("429", "429"),
    ("503", "5xx"),
    ("garbage", "garbled"),
    ("abort", "garbled"),
    ("reset", "connection"),
])  # fmt: skip
def test_a_call_that_fails_is_made_again(fault, reason):
    with Judge("[[YES]]") as server:
        use(general={"url": server.url, "model": "recorded"})
        server.fail(fault, times=2)
        assert asked() == ([True], services.Report({}, {f"general/{reason}": 2}))
        assert len(server.asked) == 1


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_another_servers_verdict_does_not_count(status):
    """What a redirect points to was not asked."""
    with Judge("[[YES]]") as other:
        there = f"Location: {other.url}/chat/completions\r\nContent-Length: 0"
        moved = f"HTTP/1.1 {status} Moved\r\n{there}\r\n\r\n".encode()
        with skills(lambda *_: moved) as url:
            use(general={"url": url, "model": "recorded"})
            with pytest.raises(CheckerError, match=f"refused a request: .*status {status}"):
                asked()
        assert other.requests == 0


def test_an_endless_answer_is_garbled(monkeypatch):
    monkeypatch.setattr(judge, "LONGEST", 10_000)
    left = ["[[YES]]" + " " * 10_000, "[[YES]]"]
    with as_judge("general", lambda _: left.pop(0)):
        assert asked() == ([True], services.Report({}, {"general/garbled": 1}))


def test_retry_after_is_honoured(monkeypatch):
    with as_judge("general", "[[YES]]") as server:
        server.fail("429", times=1, retry_after="1")
        began = time.monotonic()
        assert asked()[0] == [True]
        assert time.monotonic() - began >= 1.0


def test_the_forms_of_retry_after():
    date = time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime(time.time() + 30))
    assert 25 < judge.rest(date) <= 30
    waits = {"": 0, "2.5": 2.5, "-1": 0, "soon": 0, "1e9": judge.LONGEST_REST, "nan": 0}
    assert {text: judge.rest(text) for text in waits} == waits


def test_a_server_that_hangs_is_found_out(monkeypatch):
    monkeypatch.setattr(services, "SILENCE", 0.2)
    with as_judge("general", "[[YES]]") as server:
        server.fail("hang", times=12)  # some calls, and probes
        verdicts, report = asked(5)
        assert verdicts == [True] * 5 and report.failures["general/timeout"] == 5


def test_a_slow_server_is_left_alone(monkeypatch):
    monkeypatch.setattr(services, "SILENCE", 0.1)
    with as_judge("general", "[[YES]]", seconds=1.0) as server:
        assert asked(3) == ([True] * 3, services.Report({}, {}))
        assert len(server.asked) == 3


def test_a_refused_request_is_an_error():
    with Judge("[[YES]]") as server:
        use(general={"url": server.url, "model": "another"})
        with pytest.raises(CheckerError, match="refused.*status 404: .*no model another") as error:
            asked()
    assert not isinstance(error.value, services.Away)


TOO_LONG = (
    "This model's maximum context length is 200 tokens. However, your request has more",
    "'max_tokens' is too large: 200. This model's maximum context length is 200 tokens and your",
    "The decoder prompt is longer than the maximum model length of 200.",
)


@pytest.mark.parametrize("told", TOO_LONG)
async def test_a_conversation_too_long_for_the_judge_gets_no_verdict_and_a_short_one_an_error(told):
    """A context that is too short for the judge's own reply is no fault of an answer."""
    with as_judge("general", lambda _: {"refused": told}) as server:
        long = [{"role": "user", "content": "x" * 101}]
        for _ in range(19):
            assert await judge.ask("general", long, VERDICTS.get, tries=4) is None
        assert len(server.asked) == 19
        with pytest.raises(CheckerError, match="refused a request: .*length (is|of) 200"):
            await judge.ask("general", [{"role": "user", "content": "x" * 100}], VERDICTS.get)
        with pytest.raises(CheckerError, match="no verdict in 20 replies in a row"):
            await judge.ask("general", long, VERDICTS.get)


def test_a_file_of_prompts_that_is_damaged_during_a_run_asks_nothing(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text("=== compare\nYou grade an an")
    with Judge("[[YES]]") as server:
        use(general={"url": server.url, "prompts": str(path)})
        with pytest.raises(CheckerError, match="=== compare has the placeholders set"):
            prompts.chosen("general", PROMPTS["compare"])
    assert not server.asked


# --- replicas and outages -------------------------------------------------------------------------


def test_calls_are_bounded_and_go_to_the_least_busy_server():
    with Judge("[[YES]]", seconds=0.1) as one, Judge("[[YES]]", seconds=0.1) as two:
        use(general={"url": [one.url, two.url], "concurrency": 8})
        assert asked(64)[0] == [True] * 64
        assert one.most == two.most == 8 and min(len(one.asked), len(two.asked)) >= 16
        services.configure(services.current(), services.Limits(10.0, 4))
        one.most = two.most = 0
        assert asked(16)[0] == [True] * 16
        assert one.most == two.most == 2


def test_a_dead_server_gets_no_calls_while_another_answers():
    with Judge("[[YES]]", seconds=0.05) as good, Judge("[[NO]]") as dead:
        use(general={"url": [good.url, dead.url], "concurrency": 4})
        dead.down()
        verdicts, report = asked(40)
        assert verdicts == [True] * 40 and not report.away
        assert report.failures["general/connection"] <= 4 + judge.FAILURES


@pytest.mark.parametrize(("failures", "probes"), [(2, 0), (3, 1)])
def test_a_server_is_probed_once_three_calls_have_failed(monkeypatch, failures, probes):
    probed = []
    usual = judge.Judge.probe

    async def probe(self, server: judge.Server) -> None:
        probed.append(server)
        await usual(self, server)

    monkeypatch.setattr(judge.Judge, "probe", probe)
    with as_judge("general", "[[YES]]") as server:
        server.fail("503", failures)
        assert asked()[0] == [True]
    assert len(probed) == probes


async def test_an_outage_costs_time_and_no_verdict():
    with as_judge("general", "[[YES]]", seconds=0.1) as server:
        calls = [asyncio.create_task(ask()) for _ in range(400)]
        await asyncio.sleep(0.3)
        server.down()
        async with asyncio.timeout(60):
            while not services.report().away:
                await asyncio.sleep(0.01)
        (why,) = services.report().away.values()
        assert server.url in why
        before = server.requests
        server.fail("503")
        server.up()  # it listens, and is not ready yet
        await asyncio.sleep(0.5)
        assert server.requests - before < 20  # probes, one at a time
        server.mend()
        assert await asyncio.gather(*calls) == [True] * 400 and not services.report().away
        assert 400 <= len(server.asked) <= 400 + 64  # those that were cut off were asked again


def test_a_judge_that_stays_away_is_named():
    with Judge("[[YES]]") as server:
        url = server.url
    services.configure(Services(judges={"general": {"url": url}}), services.Limits(0.5, 1))
    began = time.monotonic()
    with pytest.raises(services.Away, match=f"'general' is down: {url}, for \\d s: .*onnect"):
        asked(3)
    assert 0.5 <= time.monotonic() - began < 60


async def test_servers_are_found_while_calls_wait(monkeypatch, tmp_path):
    monkeypatch.setattr(judge, "REREAD", 0.05)
    file = tmp_path / "judges"
    monkeypatch.setenv("JUDGES_FILE", str(file))
    with Judge("[[YES]]", seconds=0.1) as one, Judge("[[YES]]", seconds=0.1) as two:
        use(general={"concurrency": 2})
        call = asyncio.create_task(ask())
        await asyncio.sleep(0.1)
        assert f"no address in JUDGES_FILE = '{file}'" in services.report().away["judges.general"]
        file.write_text(f"other http://127.0.0.1:1/v1\ngeneral {one.url}\ngeneral {two.url}")
        assert await call is True
        assert not two.asked  # its line is not written to the end
        with file.open("a") as lines:
            lines.write("\n")
        await asyncio.gather(*(ask() for _ in range(20)))
        assert len(one.asked) + len(two.asked) == 21 and two.asked


async def test_a_call_that_is_given_up_leaves_its_place():
    with Judge("[[YES]]", seconds=0.5) as server:
        use(general={"url": server.url, "concurrency": 2})
        calls = [asyncio.create_task(ask()) for _ in range(9)]
        await asyncio.sleep(0.2)
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        (one,) = judge.JUDGES[asyncio.get_running_loop()].values()
        (replica,) = one.servers.values()
        assert replica.busy == one.calls == 0
        assert await ask() is True


# --- configuration --------------------------------------------------------------------------------


@pytest.mark.parametrize(("settings", "message"), [
    ({"urls": ""}, "['urls'] = '', expected one of url, model, concurrency, sampling"),
    ({"url": "host:5000"}, "['url'] = 'host:5000', expected http://HOST:PORT/v1"),
    ({"url": ["http://a:1/v1", 5]}, "['url'] = 5, expected http://HOST:PORT/v1"),
    ({"model": None}, "['model'] = None, expected the name"),
    ({"concurrency": 0}, "['concurrency'] = 0, expected calls at once, 1 or more"),
    ({"concurrency": True}, "['concurrency'] = True, expected calls at once"),
    ({"sampling": []}, "['sampling'] = [], expected a dictionary"),
    ({"sampling": {"n": 2}}, "['sampling'] = {'n': 2}, expected no 'n'"),
])  # fmt: skip
def test_malformed_settings_are_named(settings, message):
    with pytest.raises(ValueError, match=re.escape("services.judges['general']" + message)):
        Services(judges={"general": settings})


def test_what_is_missing_is_named(monkeypatch, tmp_path):
    assert judge.need("genrm").problem() == (
        "no url, and neither JUDGES_FILE nor JUDGE_NODES is set: expected services.judges = "
        "{'genrm': {'url': 'http://HOST:PORT/v1'}}, or `genrm MODEL GPUS` in JUDGES "
        "(docs/judges.md)"
    )
    monkeypatch.setenv("JUDGES_FILE", str(tmp_path / "judges"))  # launch/judges.sh will write it
    assert judge.need("genrm").problem() == ""
    monkeypatch.setenv("JUDGES", "\ngenrm org/model 8 --max-model-len 60000\n")
    assert judge.need("genrm").problem() == ""
    assert "JUDGES has no line for it" in judge.need("safety").problem()
    monkeypatch.setenv("JUDGES", str(ROOT / "launch/judges/rlhf.txt"))
    assert judge.need("genrm").problem() == ""
    assert "JUDGES has no line for it" in judge.need("safety").problem()
    monkeypatch.delenv("JUDGES_FILE")  # as where a job is submitted
    assert "neither" in judge.need("genrm").problem()
    monkeypatch.setenv("JUDGE_NODES", "5")
    assert judge.need("genrm").problem() == ""
    monkeypatch.setenv("JUDGE_NODES", "0")
    assert "neither" in judge.need("genrm").problem()


def test_a_server_that_answers_must_serve_the_model():
    with Judge("[[YES]]", model="big") as server:
        use(general={"url": server.url}, safety={"url": server.url, "model": "small"})
        assert judge.need("general").problem() == ""
        assert judge.need("safety").problem() == f"{server.url} serves big, expected 'small'"
        use(general={"url": server.url.removesuffix("/v1")})
        assert "/models: status 404, expected a server" in judge.need("general").problem()
    use(general={"url": server.url + "/elsewhere"})
    assert judge.need("general").problem() == ""  # it may come


def test_a_configuration_is_checked(tmp_path):
    from grpo_async import Config
    from settings import reader
    from settings.environment_services import is_address

    file = tmp_path / "wrong.py"
    file.write_text('services = {"judges": {"general": {"port": 5}}}')
    with pytest.raises(errors.InputError, match=r"services.judges\['general'\]\['port'\] = 5, exp"):
        reader.read(Config, file)
    assert is_address("http://[::1]:5000/v1") and not is_address("http:// a")
