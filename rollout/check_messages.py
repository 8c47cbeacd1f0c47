"""Whether the messages and tools of a row are such as a chat template takes."""

from typing import Any

from envs import get, require
from rollout.messages import as_object

ROLES = ("system", "developer", "user", "assistant", "tool")
# Arguments of apply_chat_template that are no variables of the template.
OWN = {"chat_template", "tools", "tokenize", "truncation", "max_length", "return_tensors"}
KINDS = ("message", "reasoning", "function_call", "function_call_output")


def check_items(items: list | str, at: str) -> None:
    """Raises ValueError naming field, value and expectation unless `items` is a conversation."""
    for i, item in enumerate(items if isinstance(items, list) else ()):
        where = f"{at}[{i}]."
        kind = (item.get("type") if isinstance(item, dict) else None) or "message"
        require(kind in KINDS, where + "type", kind, "one of: " + ", ".join(KINDS))
        if kind == "message":
            check_message(item, where)
        elif kind == "reasoning":
            for name in ("summary", "content"):
                check_text(get(item, name, list | None, "a list of texts", where), where + name)
        else:
            get(item, "call_id", str, "a string", where)
        if kind == "function_call":
            check_call(item, where)
        elif kind == "function_call_output":
            output = get(item, "output", str | list, "text or a list of parts", where)
            check_text(output, where + "output")


def check_message(item: Any, where: str) -> None:
    """Raises ValueError unless `item` is a message of a chat."""
    role = get(item, "role", str, "a string", where)
    require(role in ROLES, where + "role", role, "one of: " + ", ".join(ROLES))
    get(item, "reasoning_content", str | None, "text or null", where)
    calls = get(item, "tool_calls", list | None, "a list or null", where) or []
    for k, call in enumerate(calls):
        check_call(get(call, "function", dict, "a call", f"{where}tool_calls[{k}]."), where)
    kinds = str | list | None if calls else str | list
    check_text(get(item, "content", kinds, "text or a list of parts", where), where + "content")


def check_text(content: str | list | None, at: str) -> None:
    """Raises ValueError unless each part of a content is a text."""
    for k, part in enumerate(content if isinstance(content, list) else ()):
        get(part, "text", str, "a string", f"{at}[{k}].")


def check_call(call: dict, where: str) -> None:
    """Raises ValueError unless a function call has a name, and arguments in a JSON object."""
    get(call, "name", str, "a string", where)
    given = get(call, "arguments", str | dict, "a JSON object", where)
    require(as_object(given) is not None, where + "arguments", given, "a JSON object")


def check_tools(tools: list | None, at: str) -> None:
    """Raises ValueError unless each tool is a function, in Responses form or in that of chats."""
    for i, tool in enumerate(tools or ()):
        where = f"{at}[{i}]."
        kind = get(tool, "type", str, "a string", where)
        require(kind == "function", where + "type", kind, "'function'")
        get(tool.get("function", tool), "name", str, "a string", where)


def check_overrides(params: dict, at: str) -> None:
    """Raises ValueError unless what a row overrides of the run's sampling can be used."""
    limit = get(params, "max_output_tokens", int | None, "tokens of an answer, or null", at)
    require(limit is None or limit > 0, at + "max_output_tokens", limit, "1 or more")
    asked = params.get("instructions")
    require(not asked, at + "instructions", asked, "null, and a system message instead")
    metadata = get(params, "metadata", dict | None, "an object or null", at) or {}
    text = metadata.get("chat_template_kwargs")
    found = as_object(text) if isinstance(text, str | None) else None
    good = found is not None and not OWN & found.keys()
    where = at + "metadata.chat_template_kwargs"
    require(good, where, text, "template variables, JSON in a string")
