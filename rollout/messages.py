"""Conversations: as rows hold them, as chat templates take them, and as the prompts they become."""

import functools
import json
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def template_variables(row: dict) -> dict[str, Any]:
    """A row's own variables of the chat template; agents `..._reasoning_off` have a default."""
    off = row.get("agent_ref", {}).get("name", "").endswith("_reasoning_off")
    own = (row["responses_create_params"].get("metadata") or {}).get("chat_template_kwargs")
    return ({"enable_thinking": False} if off else {}) | (as_object(own) or {})


def chat(items: list[dict] | str) -> list[dict]:
    """The messages that a chat template takes.

    What the assistant thought, said and called in one turn becomes one message, as in NeMo-Gym's
    VLLMConverter (responses_api_models/vllm_model/app.py). Its thoughts are `reasoning_content`,
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
    """Adds an item to the message of the assistant's turn that it belongs to."""
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
    """The tools that a chat template takes; None for none. Templates would print `strict`."""
    made = []
    for tool in tools or ():
        function = {k: v for k, v in tool.items() if k not in ("type", "strict")}
        made.append(tool if "function" in tool else {"type": "function", "function": function})
    return made or None


def as_object(given: str | dict | None) -> dict | None:
    """An object, or the one that a text holds as JSON; {} for no text, None for another text."""
    try:
        found = json.loads(given or "{}") if isinstance(given, str | None) else given
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def plain(content: str | list[dict]) -> str:
    """A content's text; templates would drop or print the parts of the Responses API."""
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


@functools.cache
def load_tokenizer(model: str) -> "PreTrainedTokenizerBase":
    """The model's tokenizer. transformers takes 2 s to import, so it waits until it is needed."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model)


def last_question(row: dict) -> str:
    """The text of the last message of the user in a row; "" where there is none."""
    messages = chat(row["responses_create_params"]["input"])
    return next((m["content"] for m in reversed(messages) if m["role"] == "user"), "")


def render_messages(
    tokenizer: "PreTrainedTokenizerBase",
    messages: list[dict] | str,
    tools: list | None,
    chat_template_kwargs: dict[str, Any],
) -> list[int]:
    """Token ids of a conversation, up to where the model's answer begins."""
    ids = tokenizer.apply_chat_template(
        chat(messages),
        tools=functions(tools),
        add_generation_prompt=True,
        return_dict=False,
        **chat_template_kwargs,
    )
    return cast(list[int], ids)
