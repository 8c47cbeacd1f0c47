"""Serves environments from the verifiers library to runs, over the protocol of NeMo-Gym's agents.

    VENV/bin/python launch/verifiers_hub.py FILE.toml...
    VENV/bin/python launch/verifiers_hub.py rows 1000 FILE.toml > data/FILE.jsonl

VENV contains the packages of requirements/hub.txt and those of the environments. A FILE.toml is a
file for `vf-eval @ FILE.toml`; only its [env] is read. Its rows have the agent `verifiers.FILE`,
and in `task` the library's own description of a task. HUB_HOST and HUB_PORT are the hub's address,
HUB_AT_ONCE the number of episodes that may run at once. The hub prints the setting that a run
needs: services.nemo_gym.

verifiers runs the episode, with its own harness, tools and rewards. It calls the policy at the
address in the row (envs/gym/nemo_gym.py), and everything that the policy writes is trained on. So
verifiers must not retry by itself, and other roles need their own clients.
"""

import asyncio
import contextlib
import json
import logging
import os
import sys
import tomllib
from pathlib import Path

try:
    import verifiers.v1 as vf
    from aiohttp import web
    from verifiers.v1.configs.agent import agent_config_fields
except ImportError as error:
    sys.exit(f"error: {error}; expected a Python with requirements/hub.txt: docs/environments.md")

SHOWN = 250  # characters of an error that are shown


def environment(file: str) -> vf.Env:
    """Loads the environment of a TOML file. Raises ValueError if it cannot train one policy."""
    try:
        config = vf.resolve_env_config(tomllib.loads(Path(file).read_text())["env"])
        env = vf.load_environment(config)
    except (OSError, ImportError, KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{file}: {type(error).__name__}: {error}") from None
    roles = agent_config_fields(config)
    policy = [name for name, role in roles.items() if role.client is None]
    if len(policy) != 1:
        raise ValueError(
            f"{file}: roles that the policy plays are {policy}, expected one; the others need "
            "[env.ROLE.client]"
        )
    for what in (config, roles[policy[0]]):
        if what.retries.max_retries or what.retries.rules:
            raise ValueError(
                f"{file}: retries = {what.retries}, expected none: the run itself retries"
            )
    return env


def task(env: vf.Env, row: dict) -> vf.Task:
    """Makes a row's task as the taskset would. Raises ValueError if the row does not fit."""
    kind = type(env.taskset).task_type()
    try:
        data = kind.data_type().model_validate(row["task"])
    except (KeyError, ValueError) as error:
        raise ValueError(f"task is {str(row.get('task'))[:SHOWN]}: {error}") from None
    return kind(data, env.config.taskset.task)


def verdict(episode: vf.Episode, policy: str) -> dict:
    """Returns an episode's result: `reward` and metrics, or `_ng_failure_class` and why."""
    errors = [*episode.errors, *(e for trace in episode.traces for e in trace.errors)]
    if not episode.ok:
        return {"_ng_failure_class": errors[-1].type, "why": errors[-1].message[-SHOWN:]}
    played = [t for t in episode.traces if t.agent.config.client.base_url == policy]
    if len(played) != 1:
        return {"_ng_failure_class": f"the policy played {len(played)} times, expected once"}
    trace = played[0]
    scores = {name: reward and reward.score for name, reward in trace.rewards.items()}
    if not scores or None in scores.values():
        return {"_ng_failure_class": "no reward", "why": f"{trace.stop_condition}: {scores}"}
    return trace.metrics | (scores if len(scores) > 1 else {}) | {"reward": trace.reward}


class Hub:
    """The server of several environments."""

    def __init__(self, envs: dict[str, vf.Env], host: str, port: int, at_once: int) -> None:
        self.envs = envs
        self.gate = asyncio.Semaphore(at_once)
        place = {"responses_api_agents": {"verifiers": {"host": host, "port": port}}}
        self.agents = json.dumps(dict.fromkeys(envs, place))  # JSON is YAML

    async def serving(self, app: web.Application):
        """Holds the resources that episodes share, such as the servers of their tools."""
        async with contextlib.AsyncExitStack() as stack:
            for env in self.envs.values():
                await stack.enter_async_context(env.serving())
            yield

    async def known(self, request: web.Request) -> web.Response:
        """Answers with the agents, in the form of NeMo-Gym's head server."""
        return web.json_response(self.agents)

    async def run(self, request: web.Request) -> web.Response:
        """Runs one episode, which ends with the request."""
        row = await request.json()
        name = row["agent_ref"]["name"]
        policy = row["responses_create_params"]["metadata"]["policy"]
        client = vf.EvalClientConfig(base_url=policy, api_key_var="NO_KEY")  # not Prime's key
        context = vf.ModelContext(model="policy", client=client, sampling=vf.SamplingConfig())
        try:
            (slot,) = self.envs[name].slots(task(self.envs[name], row))
        except (KeyError, ValueError) as error:
            return web.json_response({"_ng_failure_class": "row", "why": str(error)})
        episode = await self.envs[name].run_slot(slot, context, self.gate)
        return web.json_response(verdict(episode, policy))


def print_rows(envs: dict[str, vf.Env], most: int) -> None:
    """Prints tasksets as rows of a data file."""
    for name, env in envs.items():
        for one in env.taskset.take(most):
            shown = [{"role": "user", "content": one.data.prompt_text}] if one.data.prompt else []
            row = {"responses_create_params": {"input": shown}, "agent_ref": {"name": name}}
            print(json.dumps(row | {"task": one.data.model_dump(mode="json")}))


def main(words: list[str]) -> None:
    """Serves until the process ends, or prints rows."""
    most = int(words[1]) if words[:1] == ["rows"] and words[1:2] and words[1].isdigit() else 0
    files = {f"verifiers.{Path(file).stem}": file for file in (words[2:] if most else words)}
    if not files or not all(file.endswith(".toml") for file in files.values()):
        sys.exit(f"error: {' '.join(words)}: expected FILE.toml..., or rows NUMBER FILE.toml")
    try:
        envs = {name: environment(file) for name, file in files.items()}
    except ValueError as error:
        sys.exit(f"error: {error}")
    if most:
        sys.exit(print_rows(envs, most))
    # Harnesses are started with uv, which is installed next to this Python.
    os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    logging.basicConfig()  # for failures, which verifiers reports nowhere else
    host, port = os.environ.get("HUB_HOST", "127.0.0.1"), int(os.environ.get("HUB_PORT", "11002"))
    hub = Hub(envs, host, port, int(os.environ.get("HUB_AT_ONCE", "128")))
    app = web.Application(client_max_size=1 << 30)
    app.cleanup_ctx.append(hub.serving)
    app.router.add_get("/global_config_dict_yaml", hub.known)
    app.router.add_post("/run", hub.run)
    print(f'services.nemo_gym = ("http://{host}:{port}",)', flush=True)
    web.run_app(app, host=host, port=port, print=None, handler_cancellation=True)


if __name__ == "__main__":
    main(sys.argv[1:])
