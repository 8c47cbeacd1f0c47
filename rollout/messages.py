"""Converts the conversations in rows to messages for chat templates, and to prompts."""

import functools
import json
from typing import TYPE_CHECKING, Any

from envs import get, require

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

RENDER_SECONDS = 4.0  # seconds of CPU time; the longest prompts take a tenth of a second


def template_variables(row: dict) -> dict[str, Any]:
    """Returns a row's own chat template variables.

    Agents `..._reasoning_off` have the default `enable_thinking = False`.
    """
    metadata = row["responses_create_params"].get("metadata") or {}
    own = as_object(metadata.get("chat_template_kwargs")) or {}
    if row.get("agent_ref", {}).get("name", "").endswith("_reasoning_off"):
        return {"enable_thinking": False} | own
    return own


def chat(items: list[dict] | str) -> list[dict]:
    """Converts a row's items to the messages that a chat template expects.

    The assistant's reasoning, text and calls in one turn become one message, as in NeMo-Gym's
    VLLMConverter (responses_api_models/vllm_model/app.py). The reasoning is `reasoning_content`,
    which templates write in their own way, or leave out; arguments are objects.
    """
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    messages: list[dict] = []
    for item in items:
        kind = item.get("type") or "message"
        if kind == "function_call_output":
            answer = {"role": "tool", "tool_call_id": item["call_id"]}
            messages.append(answer | {"content": plain(item["output"])})
        elif kind == "message" and item["role"] != "assistant":
            messages.append(item | {"content": plain(item["content"])})
        else:
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            extend(messages[-1], item)
    return messages


def extend(message: dict, item: dict) -> None:
    """Adds an item of the assistant's turn to that turn's message."""
    if item.get("type") == "reasoning":
        thought = plain(item.get("summary") or item.get("content") or "").strip("\n")
    else:
        thought = item.get("reasoning_content") or ""
        message["content"] += plain(item.get("content") or "")
    if thought:
        message["reasoning_content"] = message.get("reasoning_content", "") + thought
    calls = [item] if item.get("type") == "function_call" else item.get("tool_calls") or []
    for call in calls:
        function = call.get("function", call)
        made = {"name": function["name"], "arguments": as_object(function["arguments"]) or {}}
        known = {"id": call.get("call_id", call.get("id")), "type": "function"}
        message.setdefault("tool_calls", []).append(known | {"function": made})


def functions(tools: list[dict] | None) -> list[dict] | None:
    """Returns tools for a chat template, or None; without `strict`, which templates would print."""
    made = []
    for tool in tools or ():
        if "function" in tool:
            made.append(tool)
        else:
            function = {k: v for k, v in tool.items() if k not in ("type", "strict")}
            made.append({"type": "function", "function": function})
    return made or None


def as_object(given: str | dict | None) -> dict | None:
    """Returns an object, given as such or as JSON; {} for empty text, None for anything else."""
    if isinstance(given, str | None):
        try:
            given = json.loads(given or "{}")
        except (ValueError, RecursionError):
            return None
    return given if isinstance(given, dict) else None


def plain(content: str | list[dict]) -> str:
    """Returns a message's text; templates would drop or print parts of the Responses API."""
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


@functools.cache
def load_tokenizer(model: str) -> "PreTrainedTokenizerBase":
    """Loads the model's tokenizer. Only this function imports transformers, which takes 2 s."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model)


def last_question(row: dict) -> str:
    """Returns the text of the user's last message in a row; "" if it has no such message."""
    for message in reversed(chat(row["responses_create_params"]["input"])):
        if message["role"] == "user":
            return message["content"]
    return ""


def render_messages(
    tokenizer: "PreTrainedTokenizerBase",
    messages: list[dict] | str,
    tools: list | None,
    chat_template_kwargs: dict[str, Any],
) -> list[int]:
    """Returns the token ids of a conversation, up to the start of the model's answer."""
    ids: list[int] = tokenizer.apply_chat_template(
        chat(messages),
        tools=functions(tools),
        add_generation_prompt=True,
        return_dict=False,
        **chat_template_kwargs,
    )
    return ids


ROLES = ("system", "developer", "user", "assistant", "tool")
# Arguments of apply_chat_template that are not template variables.
OWN = {"chat_template", "tools", "tokenize", "truncation", "max_length", "return_tensors"}
KINDS = ("message", "reasoning", "function_call", "function_call_output")


def check_items(items: list | str, at: str) -> None:
    """Raises ValueError, with field, value and expectation, unless `items` is a conversation."""
    for i, item in enumerate(items if isinstance(items, list) else ()):
        where = f"{at}[{i}]."
        kind = (item.get("type") if isinstance(item, dict) else None) or "message"
        require(kind in KINDS, where + "type", kind, "one of: " + ", ".join(KINDS))
        if kind == "message":
            check_message(item, where)
        elif kind == "reasoning":
            for name in ("summary", "content"):
                check_text(get(item, name, list | None, "a list of parts", where), where + name)
        else:
            get(item, "call_id", str, "a string", where)
        if kind == "function_call":
            check_call(item, where)
        elif kind == "function_call_output":
            output = get(item, "output", str | list, "text or a list of parts", where)
            check_text(output, where + "output")


def check_message(item: Any, where: str) -> None:
    """Raises ValueError unless `item` is a chat message."""
    role = get(item, "role", str, "a string", where)
    require(role in ROLES, where + "role", role, "one of: " + ", ".join(ROLES))
    get(item, "reasoning_content", str | None, "text or null", where)
    calls = get(item, "tool_calls", list | None, "a list or null", where) or []
    for k, call in enumerate(calls):
        function = get(call, "function", dict, "a call", f"{where}tool_calls[{k}].")
        check_call(function, where)
    kinds = str | list | None if calls else str | list
    check_text(get(item, "content", kinds, "text or a list of parts", where), where + "content")


def check_text(content: str | list | None, at: str) -> None:
    """Raises ValueError unless each part of a message's content has text."""
    for k, part in enumerate(content if isinstance(content, list) else ()):
        get(part, "text", str, "a string", f"{at}[{k}].")


def check_call(call: dict, where: str) -> None:
    """Raises ValueError unless a function call has a name, and a JSON object of arguments."""
    get(call, "name", str, "a string", where)
    given = get(call, "arguments", str | dict, "a JSON object", where)
    require(as_object(given) is not None, where + "arguments", given, "a JSON object")


def check_tools(tools: list | None, at: str) -> None:
    """Raises ValueError unless each tool is a function, in the Responses form or the chat form."""
    for i, tool in enumerate(tools or ()):
        where = f"{at}[{i}]."
        kind = get(tool, "type", str, "a string", where)
        require(kind == "function", where + "type", kind, "'function'")
        get(tool.get("function", tool), "name", str, "a string", where)


def check_overrides(params: dict, at: str) -> None:
    """Raises ValueError unless a row's sampling overrides can be used."""
    limit = get(params, "max_output_tokens", int | None, "tokens of an answer, or null", at)
    require(limit is None or limit > 0, at + "max_output_tokens", limit, "1 or more")
    asked = params.get("instructions")
    require(not asked, at + "instructions", asked, "null, and a system message instead")
    metadata = get(params, "metadata", dict | None, "an object or null", at) or {}
    text = metadata.get("chat_template_kwargs")
    found = as_object(text) if isinstance(text, str | None) else None
    good = found is not None and not OWN & found.keys()
    where = at + "metadata.chat_template_kwargs"
    require(good, where, text, "template variables as JSON text")
