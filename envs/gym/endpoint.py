"""Serves the policy over OpenAI's protocol, for programs that hold conversations themselves.

    program --> POST http://HOST:PORT/GUEST/v1/chat/completions --> the Sampler of that episode

Each rollout worker listens on its own port, and each episode has its own address. A program that
needs one address for all episodes at startup gets the address of a router, which forwards each
request to the address in the request's `metadata["policy"]`:

    python -m envs.gym.endpoint PORT [HOST]

If a request repeats the policy's answers, it continues from the ids that were sampled. In earlier
messages, only the role, content, calls and result ids are compared, because programs drop reasoning
and trim text. The run decides how to sample: temperature, `tool_choice`, `response_format` and the
like are ignored, because a forced answer is not the policy's own. A smaller `max_tokens` is
honoured. Requests for several answers (n), or with stop words, are refused. A stream consists of
one event with the whole answer.

A request for `logprobs` gets the policy's own logprobs, with tokens named `token_id:N`. A request
with `return_token_ids` or `return_tokens_as_token_ids` gets prompt_token_ids, generation_token_ids
and generation_log_probs in the message, as in NeMo-Gym, and `versions` next to the message.
Training data does not travel this way: an episode consists of the turns that its own sampler saw.
"""

import asyncio
import contextlib
import dataclasses
import json
import re
import socket
import sys
import time
import uuid
import weakref
from collections.abc import AsyncIterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, NotRequired, TypedDict
from urllib.parse import urlsplit

import aiohttp
from aiohttp import web

from envs import Json, require, services
from rollout.chat import NoRoom, Said
from rollout.messages import chat, check_items, check_tools

if TYPE_CHECKING:
    from rollout.episode import Turn
    from rollout.sampler import Sampler

MODEL = "policy"
LARGEST = 1 << 30  # bytes of a request
LOOPBACK = "127.0.0.1"
ADDRESS = re.compile(r"http://[\w.:\[\]-]+/[0-9a-f]{32}/v1")
# The only accepted values of these fields.
ALLOWED: dict[str, tuple] = {"n": (None, 1), "stop": (None, "", [])}
IDS = ("return_token_ids", "return_tokens_as_token_ids")
ENDPOINTS: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, "asyncio.Task[Endpoint]"] = (
    weakref.WeakKeyDictionary()
)


class Choice(TypedDict):
    """The one answer in a chat completion."""

    index: int
    message: dict
    finish_reason: str
    logprobs: NotRequired[dict[str, list[Json]]]
    versions: NotRequired[list[int]]


class Completion(TypedDict):
    """The answer to a chat request."""

    id: str
    object: str
    created: int
    model: str
    choices: list[Choice]
    usage: dict[str, int]


class Asked(NamedTuple):
    """The fields of a chat request that are read."""

    messages: list[dict]  # as chat templates expect them
    tools: list[dict] | None
    max_tokens: int | None

    @classmethod
    def of(cls, body: Any) -> "Asked":
        """Reads a request.

        Raises ValueError if it is bad, naming the field, its value and what was expected.
        """
        require(isinstance(body, dict), "the request", body, "a JSON object")
        for name, allowed in ALLOWED.items():
            require(body.get(name) in allowed, name, body.get(name), repr(allowed[-1]))
        messages, tools = body.get("messages"), body.get("tools")
        require(messages and isinstance(messages, list), "messages", messages, "a conversation")
        messages = [silent(message) for message in messages]
        check_items(messages, "messages")
        require(isinstance(tools, list | None), "tools", tools, "a list or null")
        check_tools(tools, "tools")
        limit = body.get("max_completion_tokens") or body.get("max_tokens")
        require(isinstance(limit, int | None), "max_tokens", limit, "a number of tokens")
        require(limit is None or limit > 0, "max_tokens", limit, "1 or more")
        offered = []
        for tool in tools or ():
            items = tool.get("function", tool).items()
            function = {key: value for key, value in items if key not in ("type", "strict")}
            offered.append({"type": "function", "function": function})
        return cls(chat(messages), offered or None, limit)


class Guest:
    """An episode whose conversations are held by another program."""

    def __init__(self, sampler: "Sampler", url: str) -> None:
        self.sampler = sampler
        self.sampling = sampler.sampling
        self.url = url  # the address that the program gets
        self.turns: list[Turn] = []
        self.said: list[Said] = []  # the conversation after each turn
        self.full: NoRoom | None = None  # the error for a prompt that did not fit
        self.refused = ""  # why a request was refused, if not for lack of room
        self.left = False  # True if the client of the last request did not wait for the answer
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.calls: set[asyncio.Task | None] = set()  # calls under way
        self.asking = asyncio.Lock()

    async def answer(self, asked: Asked) -> "Turn":
        """Returns the policy's next turn; answers one call at a time. Raises NoRoom."""
        async with self.asking:
            said = self.before(asked)
            self.sampler.said = said
            known = said.messages if said else []
            longest = self.sampling.max_response_tokens
            most = min(asked.max_tokens or longest, longest)
            self.sampler.sampling = dataclasses.replace(self.sampling, max_response_tokens=most)
            messages = known + asked.messages[len(known) :]
            turn = await self.sampler.chat(messages, asked.tools)
            self.turns.append(turn)
            self.left = False
            if self.sampler.said:
                self.said.append(self.sampler.said)
            return turn

    def before(self, asked: Asked) -> Said | None:
        """Returns the longest conversation in this episode that a request continues, or None."""
        repeated = [meant(message) for message in asked.messages]
        latest_first = reversed(self.said)  # among conversations of the same length
        for said in sorted(latest_first, key=lambda said: -len(said.messages)):
            known = [meant(message) for message in said.messages]
            if said.tools == asked.tools and repeated[: len(known)] == known:
                return said
        return None

    def fail(self, error: Exception) -> None:
        """Ends the episode with an error that the program did not cause."""
        if not self.failed.done():
            self.failed.set_exception(error)
            self.failed.exception()  # or asyncio would warn that the error was never read


def silent(message: Json) -> Json:
    """Returns a message, with content "" if the policy's empty answer is repeated as null."""
    if not isinstance(message, dict) or message.get("role") != "assistant":
        return message
    if message.get("content") is not None:
        return message
    return message | {"content": ""}


def meant(message: dict) -> tuple:
    """Returns the parts of a repeated message that are compared."""
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    made = [(call["name"], call["arguments"]) for call in calls]
    return message["role"], message["content"].strip(), made, message.get("tool_call_id")


def completion(turn: "Turn", body: Mapping[str, Json]) -> Completion:
    """Returns a turn as the answer to a chat request."""
    message = dict(turn.message)
    calls = []
    for call in message.pop("tool_calls", []):
        # Programs stop if arguments are not JSON. The message has {} in place of such arguments,
        # because templates need JSON as well.
        function = call["function"]
        text = json.dumps(function["arguments"])
        calls.append(call | {"function": function | {"arguments": text}})
    choice: Choice = {"index": 0, "message": message, "finish_reason": "stop"}
    if calls:
        message["tool_calls"] = calls
        choice["finish_reason"] = "tool_calls"
    if turn.finish_reason == "length":
        choice["finish_reason"] = "length"
    if body.get("logprobs"):
        content: list[Json] = []
        for token, logp in zip(turn.token_ids, turn.logps, strict=True):
            name = f"token_id:{token}"
            content.append({"token": name, "logprob": logp, "bytes": None, "top_logprobs": []})
        choice["logprobs"] = {"content": content}
    if any(body.get(name) for name in IDS):
        message["prompt_token_ids"] = turn.prompt_ids
        message["generation_token_ids"] = turn.token_ids
        message["generation_log_probs"] = turn.logps
        choice["versions"] = turn.versions
    read = len(turn.prompt_ids)
    written = len(turn.token_ids)
    return {
        "id": f"chatcmpl-{uuid.uuid4().hex}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": str(body.get("model") or MODEL),
        "choices": [choice],
        "usage": {
            "prompt_tokens": read,
            "completion_tokens": written,
            "total_tokens": read + written,
        },
    }


def streamed(made: Completion) -> web.Response:
    """Returns an answer as a stream of one event."""
    (choice,) = made["choices"]
    calls = choice["message"].get("tool_calls", [])
    delta = choice["message"] | {"tool_calls": [{"index": i} | c for i, c in enumerate(calls)]}
    part = {name: value for name, value in choice.items() if name != "message"}
    part["delta"] = delta
    chunk = {**made, "object": "chat.completion.chunk", "choices": [part]}
    text = f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n"
    return web.Response(text=text, content_type="text/event-stream")


class Endpoint:
    """A rollout worker's server."""

    def __init__(self) -> None:
        self.guests: dict[str, Guest] = {}
        self.url = ""

    async def start(self) -> "Endpoint":
        """Listens on a free port of this node; returns itself."""
        import ray

        host = ray.util.get_node_ip_address() if ray.is_initialized() else LOOPBACK
        if host == LOOPBACK:  # Ray runs on this machine alone, NeMo-Gym perhaps on another one
            host = next(filter(None, map(address_towards, services.current().nemo_gym)), LOOPBACK)
        app = web.Application(client_max_size=LARGEST)
        app.router.add_get("/{guest}/v1/models", models)
        app.router.add_post("/{guest}/v1/chat/completions", self.chat)
        self.url = f"http://{host}:{await listen(app, host, 0)}"
        return self

    async def chat(self, request: web.Request) -> web.Response:
        """Answers a chat request."""
        guest = self.guests.get(request.match_info["guest"])
        if guest is None:
            return refusal(410, "this episode is over")
        call = asyncio.current_task()
        guest.calls.add(call)
        try:
            body = json.loads(await request.read())
            asked = Asked.of(body)
        except (ValueError, RecursionError) as error:
            guest.refused = str(error)
            return refusal(400, str(error))
        try:
            made = completion(await guest.answer(asked), body)
            return streamed(made) if body.get("stream") else web.json_response(made)
        except NoRoom as error:
            guest.full = error
            return refusal(400, f"beyond the maximum context length: {error}")
        except asyncio.CancelledError:
            guest.left = True
            raise
        except Exception as error:  # for example, the death of an engine
            guest.fail(error)
            return refusal(410, f"this episode has failed: {type(error).__name__}")
        finally:
            guest.calls.discard(call)


def address_towards(url: str) -> str:
    """Returns the address at which the server of a URL reaches this machine; "" if it has none."""
    with contextlib.suppress(OSError), socket.socket(type=socket.SOCK_DGRAM) as probe:
        probe.connect((urlsplit(url).hostname or "", 1))  # sends nothing
        host = str(probe.getsockname()[0])
        return "" if host.startswith("127.") else host
    return ""


@contextlib.asynccontextmanager
async def invited(sampler: "Sampler") -> AsyncIterator[Guest]:
    """Opens an episode in which programs talk to the policy at `url` until the block ends."""
    loop = asyncio.get_running_loop()
    started = ENDPOINTS.get(loop)
    if not started or (started.done() and started.exception()):  # e.g. too many open files
        ENDPOINTS[loop] = loop.create_task(Endpoint().start())
    endpoint = await asyncio.shield(ENDPOINTS[loop])
    name = uuid.uuid4().hex
    guest = endpoint.guests[name] = Guest(sampler, f"{endpoint.url}/{name}/v1")
    try:
        yield guest
    finally:
        del endpoint.guests[name]
        for call in guest.calls:
            if call:
                call.cancel()


async def listen(app: web.Application, host: str, port: int) -> int:
    """Starts a server that runs until the process ends; returns its port."""
    # Handlers are cancelled so that the policy stops generating an answer whose client has gone.
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, host, port, backlog=4096).start()
    return int(runner.addresses[0][1])


def refusal(status: int, message: str) -> web.Response:
    """Returns an error in OpenAI's protocol, with a status after which no client retries."""
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": status}
    return web.json_response({"error": error}, status=status)


async def models(request: web.Request) -> web.Response:
    """Returns the list of models, which contains only the policy."""
    return web.json_response({"object": "list", "data": [{"id": MODEL, "object": "model"}]})


class Router:
    """Forwards requests to the episodes that they belong to."""

    async def start(self, host: str, port: int) -> str:
        """Starts listening, and returns the address."""
        limits = aiohttp.ClientTimeout(total=None, sock_connect=20)
        every = aiohttp.TCPConnector(limit=0)
        self.session = aiohttp.ClientSession(connector=every, timeout=limits)
        app = web.Application(client_max_size=LARGEST)
        app.router.add_get("/v1/models", models)
        app.router.add_post("/v1/chat/completions", self.pass_on)
        return f"http://{host}:{await listen(app, host, port)}/v1"

    async def pass_on(self, request: web.Request) -> web.Response:
        """Forwards a request, and returns the episode's reply."""
        raw = await request.read()
        try:
            url = json.loads(raw)["metadata"]["policy"]
            require(ADDRESS.fullmatch(url), "metadata.policy", url, "the address of an episode")
        except (ValueError, TypeError, LookupError):
            return refusal(
                400, "no metadata.policy: the agent does not pass on the metadata of its row"
            )
        headers = {"Content-Type": "application/json"}
        try:
            path = f"{url}/chat/completions"
            sent = self.session.post(path, data=raw, headers=headers, allow_redirects=False)
            async with sent as answer:
                body = await answer.read()
        except (aiohttp.ClientError, OSError) as error:
            return refusal(410, f"the run of this episode is gone: {type(error).__name__}: {error}")
        return web.Response(body=body, status=answer.status, content_type="application/json")


async def route(port: int, host: str = "127.0.0.1") -> None:
    """Runs a router until the process ends."""
    url = await Router().start(host, port)
    print(f"the policy is at {url}", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(route(int(sys.argv[1]), *sys.argv[2:3]))
