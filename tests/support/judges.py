"""A judge of recorded replies: a small server of OpenAI's protocol that can be told to fail."""

import asyncio
import contextlib
import json
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator
from typing import Any, Self

from aiohttp import web

from envs import services
from settings.environment_services import Services

FAULTS = ("429", "503", "hang", "garbage", "abort", "reset")


class Server:
    """Listens on 127.0.0.1, in a thread of its own, while `with` lasts."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.runners: list[web.AppRunner] = []

    def __enter__(self) -> Self:
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        self.up()
        return self

    def __exit__(self, *_: Any) -> None:
        self.down()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()

    def wait(self, work: Coroutine) -> Any:
        """What a coroutine returns that runs in the server's thread."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result()

    def up(self) -> None:
        """Listens, at the same port as before."""
        self.wait(self._up())

    def down(self) -> None:
        """Closes all ports and connections."""
        self.wait(self._down())

    async def _listen(self, app: web.Application, port: int) -> int:
        """Serves at a port, or at a free one for 0; returns it."""
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.05)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port, backlog=4096, reuse_address=True).start()
        self.runners.append(runner)
        return int(runner.addresses[0][1])

    async def _down(self) -> None:
        for runner in self.runners:
            await runner.cleanup()
        self.runners.clear()


class Judge(Server):
    """Serves /v1/models and /v1/chat/completions on 127.0.0.1 while `with` lasts.

    `replies` is one text for all, texts in the order of coming, or what a function of the messages
    says. A reply that is a dict is the `message`, with `reasoning_content` and `finish_reason`
    perhaps, or has `refused`, the message of an error 400, which an exhausted list is too. `asked`
    holds the body of every chat request that was answered.
    """

    def __init__(
        self,
        replies: str | dict | Iterable[str | dict] | Callable[[list[dict]], str | dict],
        model: str = "recorded",
        seconds: float = 0.0,
    ) -> None:
        super().__init__()
        if callable(replies):
            self.reply = replies
        elif isinstance(replies, str | dict):
            self.reply = lambda messages: replies
        else:
            rest = iter(replies)
            self.reply = lambda messages: next(rest)
        self.model = model
        self.seconds = seconds  # that each answer takes
        self.asked: list[dict[str, Any]] = []
        self.requests = 0  # to either path, also those that failed
        self.most = 0  # chat requests at once
        self.busy = 0
        self.faults: dict[str, float] = {}  # fault -> requests that it still meets
        self.retry_after = ""
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def fail(self, fault: str, times: float = float("inf"), retry_after: str = "") -> None:
        """Lets that many requests meet one of FAULTS; those to /v1/models as well."""
        assert fault in FAULTS
        self.retry_after = retry_after
        self.faults[fault] = times

    def mend(self) -> None:
        """Answers again; those that hang stay so."""
        self.faults.clear()

    async def _up(self) -> None:
        app = web.Application(client_max_size=1 << 28)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/chat/completions", self._chat)
        self.port = await self._listen(app, self.port)

    async def _down(self) -> None:
        await super()._down()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:  # requests that hang
            task.cancel()

    async def _fault(self, request: web.Request) -> web.Response | None:
        self.requests += 1
        fault = next((name for name, times in self.faults.items() if times > 0), "")
        if not fault:
            return None
        self.faults[fault] -= 1
        if fault == "hang":
            await asyncio.sleep(3600)
        if fault == "reset":
            request.transport.abort()
        if fault == "garbage":
            return web.Response(text='{"choices": [{"mess')
        if fault == "abort":
            given_up = {"message": {"content": "I think"}, "finish_reason": "abort"}
            return web.json_response({"choices": [given_up]})
        headers = {"Retry-After": self.retry_after} if self.retry_after else {}
        return web.Response(status=int(fault) if fault.isdigit() else 500, headers=headers)

    async def _models(self, request: web.Request) -> web.Response:
        models = {"object": "list", "data": [{"id": self.model, "object": "model"}]}
        return await self._fault(request) or web.json_response(models)

    async def _chat(self, request: web.Request) -> web.Response:
        self.busy += 1
        self.most = max(self.most, self.busy)
        try:
            return await self._fault(request) or await self._answer(request)
        finally:
            self.busy -= 1

    async def _answer(self, request: web.Request) -> web.Response:
        body = json.loads(await request.read())
        if body["model"] != self.model:
            return web.json_response({"message": f"no model {body['model']}"}, status=404)
        await asyncio.sleep(self.seconds)
        try:
            reply = self.reply(body["messages"])
        except StopIteration:
            return web.json_response({"message": "no more replies were recorded"}, status=400)
        self.asked.append(body)
        message = dict(reply) if isinstance(reply, dict) else {"content": reply}
        if "refused" in message:
            return web.json_response({"error": {"message": message["refused"]}}, status=400)
        ended = message.pop("finish_reason", "stop")
        choice = {"index": 0, "message": {"role": "assistant"} | message, "finish_reason": ended}
        return web.json_response({"object": "chat.completion", "choices": [choice]})


def configured(**judges: Judge) -> dict[str, dict[str, Any]]:
    return {name: {"url": judge.url} for name, judge in judges.items()}


@contextlib.contextmanager
def as_judge(name: str, *recorded, weights: dict | None = None, **options) -> Iterator[Judge]:
    """A Judge that is this process's judge of that name, also when it is gone."""
    with Judge(*recorded, **options) as judge:
        services.configure(Services(judges=configured(**{name: judge}), genrm=weights or {}))
        yield judge
