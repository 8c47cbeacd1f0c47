"""The other side of tests/oracle.py: rewards by the code of NeMo-Gym itself.

    python theirs.py SERVER CONFIG CASES REWARDS

Runs where nemo-gym is installed, and imports nothing of ours. SERVER is a folder of its
resources_servers, CONFIG a file in its configs/. CASES has a line of JSON for each answer: `row`,
`text`, `calls`, `replies`, which a judge gives in turn, `config`, settings other than those of the
file, and `group`, the answers that it is compared with. REWARDS gets a line for each: the reward,
or the error as text.
"""

import asyncio
import importlib
import inspect
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import AsyncMock, MagicMock

import nemo_gym
import yaml
from nemo_gym.base_resources_server import SimpleResourcesServer
from nemo_gym.responses_converter import ResponsesConverter
from nemo_gym.server_utils import ServerClient

AT_ONCE = 4
OUTER = {"id": "1", "created_at": 0, "model": "policy", "object": "response"}
OUTER |= {"parallel_tool_calls": True, "tool_choice": "auto", "tools": []}
CONVERTER = ResponsesConverter(return_token_id_information=False)


def response(text: str, calls: list[dict]) -> dict:
    """An answer as Gym's model server passes it on."""
    made = [{"id": f"call_{i}", "type": "function", "function": c} for i, c in enumerate(calls)]
    message = {"role": "assistant", "content": text, "tool_calls": made}
    items = CONVERTER.postprocess_assistant_message_dict(message)
    return OUTER | {"output": [item.model_dump() for item in items]}


class Reply:
    """What a judge's server answers."""

    status = 200

    def __init__(self, content: dict) -> None:
        self.content = content

    async def json(self) -> dict:
        return self.content

    async def text(self) -> str:
        return json.dumps(self.content)

    async def read(self) -> bytes:
        return json.dumps(self.content).encode()


def load(name: str, config: str) -> SimpleNamespace:
    """A resources server with the settings of its file, and the type of its requests."""
    folder = Path(nemo_gym.__file__).parents[1] / "resources_servers" / name
    os.chdir(folder)  # as Gym starts it: it reads files and modules beside it
    sys.path[:0] = [str(folder), str(folder.parents[1])]
    app = importlib.import_module(f"resources_servers.{name}.app")
    many = AT_ONCE
    if hasattr(app, "check_correctness_remote"):  # a task of Ray; it forks, so one at a time
        many = 1
        metrics = importlib.import_module("lcb_integration.compute_code_generation_metrics")
        remote = lambda *task: asyncio.to_thread(metrics.check_correctness, *task)  # noqa: E731
        app.check_correctness_remote = SimpleNamespace(remote=remote)
    kinds = [kind for _, kind in inspect.getmembers(app, inspect.isclass)]
    (kind,) = [k for k in kinds if issubclass(k, SimpleResourcesServer) and is_own(k, app)]
    tops = yaml.safe_load((folder / f"configs/{config}.yaml").read_text())
    (outer,) = [top["resources_servers"] for top in tops.values() if "resources_servers" in top]
    settings = {"host": "127.0.0.1", "port": 1, "name": name} | next(iter(outer.values()))
    config = kind.model_fields["config"].annotation(**settings)
    server = kind(config=config, server_client=MagicMock(spec=ServerClient))
    server.setup_webserver()  # in which some read their files
    request = inspect.get_annotations(kind.verify, eval_str=True)["body"]
    return SimpleNamespace(app=app, server=server, body=request, many=asyncio.Semaphore(many))


def is_own(kind: type, app: object) -> bool:
    return kind.__module__ == app.__name__


async def judge(there: SimpleNamespace, case: dict) -> float | str:
    """The reward of an answer, or why there is none."""
    replies = iter(case.get("replies", []))
    post = AsyncMock(side_effect=lambda **_: Reply(response(next(replies), [])))
    there.server.server_client.post = post
    config = there.server.config
    try:
        if case.get("group"):
            return await in_group(there, case)
        there.server.config = config.model_copy(update=case.get("config", {}))
        body = case["row"] | {"response": response(case["text"], case["calls"])}
        return float((await there.server.verify(there.body.model_validate(body))).reward)
    except Exception as error:
        return f"{type(error).__name__}: {error}".replace("\n", " ")[:200]
    finally:
        there.server.config = config


async def in_group(there: SimpleNamespace, case: dict) -> float:
    """The reward of an answer beside the others of its group, compared in a circle."""
    group = case["group"]
    made = [response(text, []) for text in group]
    shown = [there.app.extract_output_text(one) for one in made]
    pairs = zip(shown, shown[1:] + shown[:1], strict=True)
    said = dict(zip(pairs, case["replies"], strict=True))

    def reply(json: object, **_: object) -> Reply:
        return Reply(response(said[json.metadata["response_1"], json.metadata["response_2"]], []))

    there.server.server_client.post = AsyncMock(side_effect=reply)
    size = {"num_rollouts_per_prompt": len(group)}
    there.server.config = there.server.config.model_copy(update=size | case["config"])
    bodies = [there.body.model_validate(case["row"] | {"response": one}) for one in made]
    found = await asyncio.gather(*map(there.server.verify, bodies))
    return float(found[group.index(case["text"])].reward)


async def main(name: str, config: str, cases: str, rewards: str) -> None:
    """Writes the rewards of all cases."""
    paths = Path(cases).resolve(), Path(rewards).resolve()
    there = load(name, config)
    alone = asyncio.Lock()  # a judge's replies are those of one case

    async def one(case: dict) -> float | str:
        async with alone if case.get("replies") else there.many:
            return await judge(there, case)

    found = [json.loads(line) for line in paths[0].read_text().splitlines()]
    made = await asyncio.gather(*map(one, found))
    paths[1].write_text("".join(f"{json.dumps(reward)}\n" for reward in made))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
