"""Where judges are served: what the configuration may say of it, and what is missing.

No address may be there when a run starts: launch/judges.sh adds each to the file that JUDGES_FILE
names, as "NAME http://HOST:PORT/v1", once the server answers. A big model takes half an hour.
"""

import contextlib
import functools
import json
import os
import urllib.error
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from core.http import directly
from envs.judge import prompts
from settings.environment_services import is_address

VARIABLES = ("JUDGES_FILE", "JUDGES", "JUDGE_NODES")  # of launch/grpo.sbatch
SECONDS = 5.0  # that a server may take to say what it serves, before a run starts


def addresses(name: str, judge: dict[str, Any]) -> list[str]:
    """Where a judge is served: by its configuration or, without a url, by JUDGES_FILE."""
    urls = judge.get("url") or []
    found = urls if isinstance(urls, list) else [urls]
    if not found:
        lines = text_of(os.environ.get("JUDGES_FILE")).rpartition("\n")[0].splitlines()
        pairs = [line.split() for line in lines]
        found = [pair[1] for pair in pairs if len(pair) == 2 and pair[0] == name]
    return list(dict.fromkeys(url.rstrip("/") for url in found if is_address(url)))


def text_of(path: str | None) -> str:
    """The text of a file; "" where there is none yet."""
    with contextlib.suppress(OSError):
        return Path(path or "").read_text(encoding="utf-8", errors="replace")
    return ""


def problem(name: str, judge: dict[str, Any]) -> str:
    """Why a run could not ask a judge, and how to mend it; "" for nothing.

    A server that does not answer is none: the run waits for it. One that answers must serve it.
    """
    if (path := judge.get("prompts")) and (wrong := prompts.problem(path)):
        return f"services.judges[{name!r}]['prompts']: {wrong}"
    return _problem(name, json.dumps(judge), *(os.environ.get(key, "") for key in VARIABLES))


@functools.cache  # it is asked for every row
def _problem(name: str, judge: str, file: str, served: str, nodes: str) -> str:
    settings = json.loads(judge)
    if found := addresses(name, settings):
        with ThreadPoolExecutor(len(found)) as pool:
            answers = pool.map(lambda url: unserved(url, settings.get("model", "")), found)
            return next(filter(None, answers), "")
    lines = (text_of(served) or served).splitlines()
    names = [line.split()[0] for line in lines if line.strip()]
    comes = bool(file) or nodes not in ("", "0")  # with a job that has yet to be submitted, perhaps
    if comes and (name in names or not names):
        return ""
    lacks = "JUDGES has no line for it" if comes else "neither JUDGES_FILE nor JUDGE_NODES is set"
    url = f"services.judges = {{{name!r}: {{'url': 'http://HOST:PORT/v1'}}}}"
    return f"no url, and {lacks}: expected {url}, or `{name} MODEL GPUS` in JUDGES (docs/judges.md)"


def unserved(url: str, model: str) -> str:
    """What is wrong with a server that answers; "" for nothing, or for one that does not answer."""
    try:
        with directly(f"{url}/models", SECONDS) as answer:
            served = [entry["id"] for entry in json.loads(answer.read())["data"]]
    except urllib.error.HTTPError as error:
        starts = error.code in (408, 429) or error.code >= 500
        expected = "expected a server of OpenAI's protocol, as vLLM's"
        return "" if starts else f"GET {url}/models: status {error.code}, {expected}"
    except OSError:
        return ""
    except (ValueError, TypeError, LookupError):
        return f"GET {url}/models gave no list of models, expected OpenAI's protocol, as vLLM's"
    if not served or (model and model not in served):
        return f"{url} serves {', '.join(map(str, served))}, expected {model or 'a model'!r}"
    return ""
