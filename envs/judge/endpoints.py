"""Finds the addresses of judges, and checks their configuration before a run.

There may be no address yet when a run starts: launch/judges.sh adds each one to the file that
JUDGES_FILE names, as "NAME http://HOST:PORT/v1", once the server answers. A big model takes half an
hour to load.
"""

import contextlib
import functools
import json
import os
import urllib.error
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from core.http import directly
from envs import Json
from envs.judge import prompts
from envs.services import Need
from settings.environment_services import is_address

VARIABLES = ("JUDGES_FILE", "JUDGES", "JUDGE_NODES")  # variables of launch/grpo.sbatch
SECONDS = 5.0  # seconds that a server may take to list its models, before a run starts


def addresses(name: str, judge: Mapping[str, Json]) -> list[str]:
    """Returns a judge's addresses from its configuration or, without a url, from JUDGES_FILE."""
    urls = judge.get("url") or []
    found = list(urls) if isinstance(urls, list) else [urls]
    if not found:
        lines = text_of(os.environ.get("JUDGES_FILE")).rpartition("\n")[0].splitlines()
        pairs = [line.split() for line in lines]
        found = [pair[1] for pair in pairs if len(pair) == 2 and pair[0] == name]
    good = [url.rstrip("/") for url in found if isinstance(url, str) and is_address(url)]
    return list(dict.fromkeys(good))


def text_of(path: str | None) -> str:
    """Returns a file's text; "" if it does not exist yet."""
    with contextlib.suppress(OSError):
        return Path(path or "").read_text(encoding="utf-8", errors="replace")
    return ""


def problem(name: str, judge: Mapping[str, Json]) -> str:
    """Returns why a run cannot ask a judge, and how to fix it; "" if nothing prevents it.

    A server that does not answer is not a problem: the run waits for it. A server that answers must
    serve the judge's model.
    """
    path = judge.get("prompts")
    if isinstance(path, str) and path:
        wrong = prompts.problem(path)
        if wrong:
            return f"services.judges[{name!r}]['prompts']: {wrong}"
    return _problem(name, json.dumps(judge), *(os.environ.get(key, "") for key in VARIABLES))


@functools.cache  # called for every row
def _problem(name: str, judge: str, file: str, served: str, nodes: str) -> str:
    settings = json.loads(judge)
    if found := addresses(name, settings):
        with ThreadPoolExecutor(len(found)) as pool:
            answers = pool.map(lambda url: unserved(url, settings.get("model", "")), found)
            return next(filter(None, answers), "")
    names = listed(served)
    comes = bool(file) or nodes not in ("", "0")  # perhaps with a job that is not submitted yet
    if comes and (name in names or not names):
        return ""
    lacks = "neither JUDGES_FILE nor JUDGE_NODES is set"
    if names and name not in names:
        lacks = "JUDGES has no line for it"
    return (
        f"no url, and {lacks}: expected services.judges = "
        f"{{{name!r}: {{'url': 'http://HOST:PORT/v1'}}}}, "
        f"or `{name} MODEL GPUS` in JUDGES (docs/judges.md)"
    )


def listed(served: str) -> list[str]:
    """Returns the names of the judges in JUDGES, which is a file or its lines."""
    lines = (text_of(served) or served).splitlines()
    return [line.split()[0] for line in lines if line.strip()]


def is_announced(need: Need) -> bool:
    """Returns True for a judge whose servers launch/submit.sh will start with the run."""
    starts = os.environ.get("JUDGE_NODES") != "0"
    names = listed(os.environ.get("JUDGES", ""))
    return starts and need.name in [f"judges.{name}" for name in names]


def unserved(url: str, model: str) -> str:
    """Returns the problem of a server that answers; "" if it has none, or if it does not answer."""
    try:
        with directly(f"{url}/models", SECONDS) as answer:
            served = [entry["id"] for entry in json.loads(answer.read())["data"]]
    except urllib.error.HTTPError as error:
        if error.code in (408, 429) or error.code >= 500:  # it may still be starting
            return ""
        return (
            f"GET {url}/models: status {error.code}, "
            "expected a server that speaks OpenAI's protocol, such as vLLM's"
        )
    except OSError:
        return ""
    except (ValueError, TypeError, LookupError):
        return f"GET {url}/models returned no list of models, expected a server such as vLLM's"
    if not served or (model and model not in served):
        return f"{url} serves {', '.join(map(str, served))}, expected {model or 'a model'!r}"
    return ""
