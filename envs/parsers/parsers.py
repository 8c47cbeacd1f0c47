"""Parses answers with vLLM's own parsers for reasoning and tool calls, in a process of their own.

    one thread --JSON lines--> a fork of the server, which has vLLM imported

If services.reasoning_parser or tool_parser names a parser, the server starts with the first answer;
otherwise tags are read (rollout/answer_markup.py), and vLLM is not imported. Some of vLLM's parsers
need quadratic time, and no other thread can stop them: a fork that uses CPU_SECONDS for one answer
is killed, and the answer counts as malformed.

A call is complete if it has the named parser's form (FORMS in forms.py), and if the parser read
every call in the text. vLLM's parsers silently mend or drop broken calls, so NeMo-RL's check, which
looks for markup that a parser left in the text, would accept them.
"""

import ast
import asyncio
import contextlib
import functools
import gc
import importlib.util
import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from core.secret_variables import public
from core.waits import in_thread
from envs import services
from envs.parsers.forms import FORMS, is_object
from envs.services import CheckerError
from rollout.answer_markup import CALL_TAG, THINK, flaw, split
from rollout.messages import functions, load_tokenizer
from rollout.response import Response
from settings.environment_services import Services

if TYPE_CHECKING:
    from vllm.parser.abstract_parser import Parser

CPU_SECONDS = 20.0  # limit per answer; most take a few milliseconds, 1 MB of tags takes 5 s
PIECE = 1 << 12  # characters that a vLLM parser is fed at once
READY = "ready\n"  # the server's greeting before the first answer

Parse = Callable[[str, list | None, dict], dict]


async def read(text: str, model: str, tools: list | None, template_kwargs: dict) -> Response:
    """Parses an answer with the parsers in this process's services.

    `text` includes the opening that the prompt already wrote, such as `<think>`; `model` is the
    tokenizer's folder; `tools` and `template_kwargs` come from the row. An answer that a parser
    cannot read is malformed. Raises CheckerError if no parser can run.
    """
    named = services.current()
    if not is_named(named):
        return await in_thread(Response.of, text)
    request = json.dumps([text, functions(tools), template_kwargs])
    found = await server(named.reasoning_parser, named.tool_parser, model).ask(request)
    if found is None:
        parts = split(text)
        return Response(text, parts.reasoning, parts.content, malformed="tool_call")
    return Response(text, **found)


def is_named(named: Services) -> bool:
    """Returns whether services name a parser."""
    return bool(named.reasoning_parser or named.tool_parser)


@functools.cache
def problem(named: Services, model: str) -> str:
    """Returns why a model cannot use vLLM's parsers, and names the existing ones; "" if it can."""
    if not is_named(named):
        return ""
    if not model:
        return "model = '': expected the folder of the tokenizer that the parsers need"
    if why := unknown(named):
        return f"vLLM's parsers: {why}"
    trial = Server((named.reasoning_parser, named.tool_parser, model))
    try:
        trial.start()
    except CheckerError as error:
        return str(error)
    trial.close()
    return ""


def unknown(named: Services) -> str:
    """Returns which name vLLM does not know, by its source: to import it takes ten seconds.

    "" if it knows both, or if its source is not as expected.
    """
    spec = importlib.util.find_spec("vllm")
    folder = Path(str(spec and spec.origin)).parent
    for kind, name, package in (
        ("reasoning", named.reasoning_parser, "reasoning"),
        ("tool", named.tool_parser, "tool_parsers"),
    ):
        known = registered(folder / package / "__init__.py")
        if name and known and name not in known:
            return f"services.{kind}_parser = {name!r}: expected one of: {', '.join(sorted(known))}"
    return ""


def registered(path: Path) -> set[str]:
    """Returns the keys of the dictionary in which one of vLLM's packages lists its parsers."""
    if not path.is_file():
        return set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]).endswith("_TO_REGISTER"):
            return set(ast.literal_eval(node.value))
    return set()


@functools.cache
def server(*names: str) -> "Server":
    """Returns this process's only server for these parsers."""
    return Server(names)


class Server:
    """A process that parses one answer at a time; it ends with this process."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names  # names of the parsers, and of the model
        self.thread = ThreadPoolExecutor(1)  # the only thread that talks to the process
        self.process: subprocess.Popen[str] | None = None

    async def ask(self, request: str) -> dict | None:
        """Returns the fields of a Response; None if a parser raised, or took too long.

        If the process dies, the request goes to a new one. Raises CheckerError if the new one dies
        as well.
        """
        return await asyncio.wrap_future(self.thread.submit(self._ask, request))

    def _ask(self, request: str) -> dict | None:
        for _ in range(2):
            process = self.process or self.start()
            with contextlib.suppress(OSError):
                print(request, file=process.stdin, flush=True)
            if line := _line_of(process):
                return json.loads(line)
            self.close()
        raise CheckerError(f"vLLM's parsers {self.names[:2]} died twice on the same answer")

    def start(self) -> subprocess.Popen[str]:
        """Starts the process. Raises CheckerError with the reason if it cannot parse."""
        path = [os.path.abspath(folder) for folder in sys.path]
        code = f"import sys; sys.path[:] = {path!r}; from {__name__} import serve; serve()"
        own = {
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
            "VLLM_LOGGING_LEVEL": "ERROR",
            "TOKENIZERS_PARALLELISM": "false",
        }
        process = subprocess.Popen(
            [sys.executable, "-c", code, *self.names, str(CPU_SECONDS)],
            env=public() | own,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.process = process
        greeting = _line_of(process)
        if greeting != READY:
            self.close()
            why = json.loads(greeting or "null") or f"they ended with code {process.returncode}"
            raise CheckerError(f"vLLM's parsers: {why}")
        return process

    def close(self) -> None:
        """Closes the process's input, and waits until it has ended."""
        assert self.process
        self.process.communicate()
        self.process = None


def _line_of(process: subprocess.Popen[str]) -> str:
    """Returns a process's next line; "" if it has ended."""
    assert process.stdout
    return process.stdout.readline()


# --- in the server --------------------------------------------------------------------------------


def serve() -> None:
    """Runs the server: parses answers in a fork, until the parent closes the pipe.

    A fork that an answer occupies for too long is killed by its timer, which no C code can delay.
    """
    *names, seconds = sys.argv[1:]
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)  # text that a library prints is not an answer
        logging.disable(logging.CRITICAL)  # libraries log each answer that cannot be parsed
        try:
            parse = make_parse(*names)
            parse("", None, {})
        except Exception as error:  # vLLM's own code
            why = str(error) if isinstance(error, ValueError) else repr(error)
            print(json.dumps(why), file=answers, flush=True)
            return
        gc.freeze()  # a collection would copy the pages that forks share
        print(READY, end="", file=answers, flush=True)
        while not (pid := os.fork()) or killed_by_timer(pid):
            if not pid:
                attend(parse, answers, float(seconds))
                os._exit(0)
            print("null", file=answers, flush=True)


def killed_by_timer(pid: int) -> bool:
    """Waits for a fork to end; returns whether its timer ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGPROF


def attend(parse: Parse, answers: TextIO, seconds: float) -> None:
    """Runs a fork: writes one parsed answer for each line, or null if a parser raised."""
    for line in iter(sys.stdin.readline, ""):
        signal.setitimer(signal.ITIMER_PROF, seconds)
        try:
            found = json.dumps(parse(*json.loads(line)))
        except Exception:  # vLLM's own code, on an answer that it does not expect
            found = "null"
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(found, file=answers, flush=True)


def make_parse(reasoning: str, tool: str, model: str) -> Parse:
    """Returns a function that parses an answer into the arguments of a Response.

    Raises ValueError if vLLM does not know a name, or if a parser refuses the tokenizer.
    """
    from vllm.entrypoints.generate.base.protocol import FunctionDefinition
    from vllm.entrypoints.openai.chat_completion.protocol import (
        ChatCompletionRequest,
        ChatCompletionToolsParam,
    )
    from vllm.parser import ParserManager
    from vllm.tokenizers.hf import get_cached_tokenizer

    tokenizer = get_cached_tokenizer(load_tokenizer(model))
    try:
        parser_class: type[Parser] = ParserManager.get_parser(
            tool or None, reasoning or None, enable_auto_tools=bool(tool), tokenizer=tokenizer
        )
    except Exception as error:
        raise ValueError(f"services, model = {model!r}: {error}") from None

    def parse(text: str, tools: list | None, template_kwargs: dict) -> dict:
        offered = [
            ChatCompletionToolsParam.model_construct(
                function=FunctionDefinition.model_construct(**tool["function"])
            )
            for tool in tools or ()
        ]
        request = ChatCompletionRequest.model_construct(
            messages=[],
            tools=offered or None,
            tool_choice="auto",
            chat_template_kwargs=template_kwargs,
        )
        parser = parser_class(tokenizer, offered or None, chat_template_kwargs=template_kwargs)
        feed_in_pieces(parser)
        parts = split(text) if not reasoning else None
        thought, content, calls = parser.parse(
            parts.content if parts else text, request, enable_auto_tools=bool(tool)
        )
        half = parser.reasoning_parser
        ends = (half.reasoning_start_str, half.reasoning_end_str) if half else THINK
        marks = ends if all(ends) else THINK
        called = [
            {"type": "function_call", "name": call.name, "arguments": call.arguments}
            for call in calls or ()
        ]
        return {
            "reasoning": (parts.reasoning if parts else thought) or "",
            "content": content or "",
            "tool_calls": called,
            "malformed": malformed(text, content or "", called, tool, marks),
        }

    return parse


def malformed(
    text: str, content: str, calls: list[dict], tool_parser: str, marks: tuple[str, str]
) -> str:
    """Returns the flaw, one of FLAWS, of an answer that a parser split into content and calls."""
    if not all(is_object(call["arguments"]) for call in calls):
        return "tool_call"
    if tool_parser in FORMS:
        return flaw(text, FORMS[tool_parser], marks, len(calls) if tool_parser else None)
    if CALL_TAG.search(content):
        return "tool_call"
    return "thinking" if any(mark in content for mark in marks) else ""


def feed_in_pieces(parser: "Parser") -> None:
    """Makes a parser that vLLM wrote for streaming read a long text in linear time.

    Its lexer copies the entire rest of the text for each tag, and streamed arguments are converted
    again for each tag.
    """
    for half in (parser.reasoning_parser, parser.tool_parser):
        engine = getattr(half, "_parser_engine", None)
        if engine is None:
            continue
        feed = engine._engine.feed

        def in_pieces(text: str, ids: list[int], feed: Callable = feed) -> list:
            events: list = []
            for start in range(0, len(text), PIECE):
                events += feed(text[start : start + PIECE], ids)
            return events

        engine._engine.feed = in_pieces
        engine._stream_arg_deltas = False
