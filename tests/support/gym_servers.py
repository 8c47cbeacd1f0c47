"""NeMo-Gym's servers, written from their public protocol, that can be told to fail.

Head, agent, model server and resources server are one program here. Each step of a row is as
NeMo-Gym 0.4.0 does it: the agent's loop (responses_api_agents/simple_agent), what becomes of a
thought and of calls on their way to the model and back (nemo_gym/responses_converter.py,
responses_api_models/vllm_model), and which errors are tried again (nemo_gym/openai_utils.py).
"""

import asyncio
import json
import re
from typing import Any

import aiohttp
from aiohttp import web

from envs.gym.endpoint import Router
from support.judges import Server

AGENT = "sums_simple_agent"
TOOL = {"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": True}
THOUGHT = re.compile(r"<think>(.*?)</think>", re.DOTALL)
FAULTS = ("500", "hang", "reset", "no metadata")


class Gym(Server):
    """Serves the agent on 127.0.0.1 while `with` lasts, and a router for the policy.

    The agent answers calls of `add` with `output`. The reward is 1 where the last answer holds the
    row's `expected`. `verdict` is added to what /run answers. `tried` holds every row that came.
    """

    def __init__(self, output: str = "7", **verdict: Any) -> None:
        super().__init__()
        self.output = output
        self.verdict = verdict
        self.tried: list[dict[str, Any]] = []
        self.asked: list[dict[str, Any]] = []  # chat requests
        self.fault = ""  # one of FAULTS
        self.policy = ""  # policy_base_url
        self.head = 0
        self.agent = 0  # the port
        self.router = Router()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.head}"

    def __exit__(self, *error: Any) -> None:
        self.wait(self.router.session.close())
        super().__exit__(*error)

    async def _up(self) -> None:
        """Listens; the head server at the same port as before, the agent at another one."""
        if not self.policy:
            self.policy = await self.router.start("127.0.0.1", 0)
        head = web.Application()
        head.router.add_get("/global_config_dict_yaml", self._config)
        served = web.Application(client_max_size=1 << 28)
        served.router.add_get("/", self._alive)
        served.router.add_post("/run", self._run)
        self.head = await self._listen(head, self.head)
        self.agent = await self._listen(served, 0)

    async def _alive(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def _config(self, request: web.Request) -> web.Response:
        """YAML in a JSON string, as the head server sends it."""
        lines = ["policy_model:", "  responses_api_models:", "    vllm_model: {entrypoint: app.py}"]
        lines += [f"{AGENT}:", "  responses_api_agents:", "    simple_agent:"]
        lines += ["      host: 127.0.0.1", f"      port: {self.agent}", "uv_cache_dir: null"]
        return web.json_response("\n".join(lines) + "\n")

    async def _run(self, request: web.Request) -> web.Response:
        row = json.loads(await request.read())
        self.tried.append(row)
        if self.fault == "hang":
            await asyncio.sleep(3600)
        if self.fault == "reset":
            request.transport.abort()
        if self.fault == "500":
            return web.json_response("RuntimeError('a tool broke')", status=500)
        try:
            answer = await self._episode(row)
        except RuntimeError as error:  # as an exception in any of its servers
            return web.json_response(repr(error), status=500)
        right = row.get("expected", "") in answer
        result = row | {"response": {"output": answer}, "reward": float(right), "length": 3}
        return web.json_response(result | self.verdict)

    async def _episode(self, row: dict[str, Any]) -> str:
        """The last answer."""
        params = row["responses_create_params"]
        messages = [{"role": m["role"], "content": m["content"]} for m in params["input"]]
        function = {k: v for k, v in TOOL.items() if k != "type"}
        for _ in range(9):
            body = {"model": "policy", "messages": messages, "temperature": 0.1}
            body |= {"tools": [{"type": "function", "function": function}]}
            if self.fault != "no metadata":
                body["metadata"] = params["metadata"]
            choice = await self._ask(body)
            said = choice["message"]
            messages.append({"role": "assistant", "content": told(said)})
            if calls := said.get("tool_calls"):
                messages[-1]["tool_calls"] = calls
            if thoughts := THOUGHT.findall(messages[-1]["content"] or ""):
                messages[-1]["content"] = THOUGHT.sub("", messages[-1]["content"])
                messages[-1]["reasoning_content"] = messages[-1]["reasoning"] = thoughts[0]
            if choice["finish_reason"] == "length" or not calls:
                break
            for call in calls:
                json.loads(call["function"]["arguments"])
                known = {"role": "tool", "tool_call_id": call["id"]}
                messages.append(known | {"content": self.output})
        return str(messages[-1]["content"])

    async def _ask(self, body: dict[str, Any]) -> dict[str, Any]:
        """The policy's choice. Raises RuntimeError where it gives none."""
        self.asked.append(json.loads(json.dumps(body)))
        async with aiohttp.ClientSession() as session:
            for _ in range(3):
                async with session.post(f"{self.policy}/chat/completions", json=body) as answer:
                    text, status = await answer.text(), answer.status
                if status < 429:
                    break
        if status == 400 and "context length" in text:
            return {"message": {"content": None}, "finish_reason": "length"}
        if status != 200:
            raise RuntimeError(f"calling an inner server: {text}")
        return dict(json.loads(text)["choices"][0])


def told(message: dict[str, Any]) -> str | None:
    """The content of a message that NeMo-Gym keeps: with the thought, in tags."""
    thought = message.get("reasoning_content")
    content = (f"<think>{thought}</think>" if thought else "") + (message["content"] or "")
    return content or None
