"""An answer as environments judge it: the text, and what its markup says."""

from typing import Any

from rollout.answer_markup import flaw, split


class Response(str):
    """The text of one answer, thought and markup included, with what was parsed from it.

    vLLM's parsers read it once. Without services.reasoning_parser a thought is what `<think>` tags
    hold; without services.tool_parser calls are not read.
    """

    reasoning: str  # the thought, "" for none
    content: str  # what is said: without thought and calls
    tool_calls: list[dict[str, Any]]  # {"type": "function_call", "name", "arguments": JSON text}
    malformed: str  # one of rollout.answer_markup.FLAWS: "tool_call", "thinking", or "" for none

    def __new__(
        cls,
        text: str,
        reasoning: str = "",
        content: str | None = None,
        tool_calls: list[dict[str, Any]] | None = None,
        malformed: str = "",
    ) -> "Response":
        """`content` is the text where it is None."""
        response = super().__new__(cls, text)
        response.reasoning = reasoning
        response.content = text if content is None else content
        response.tool_calls = tool_calls or []
        response.malformed = malformed
        return response

    @classmethod
    def of(cls, text: str) -> "Response":
        """A text, read without a parser; a Response is returned as it is.

        A thought that never ends is content.
        """
        if isinstance(text, Response):
            return text
        parts = split(text)
        content = parts.content if "</think>" in text else text
        reasoning = parts.reasoning if "</think>" in text else ""
        return cls(text, reasoning, content, malformed=flaw(text))
