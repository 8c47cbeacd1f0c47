"""Represents an answer as environments judge it: the text, and the parts in its markup."""

from rollout.answer_markup import flaw, split


class Response(str):
    """The text of one answer, reasoning and markup included, with the parts parsed from it.

    vLLM's parsers read it once. Without services.reasoning_parser, the reasoning is the text in
    `<think>` tags; without services.tool_parser, calls are not read.
    """

    reasoning: str  # "" if there is none
    content: str  # the text without reasoning and calls
    tool_calls: list[dict[str, str]]  # {"type": "function_call", "name", "arguments": JSON text}
    malformed: str  # one of rollout.answer_markup.FLAWS: "tool_call", "thinking" or ""

    def __new__(
        cls,
        text: str,
        reasoning: str = "",
        content: str | None = None,
        tool_calls: list[dict[str, str]] | None = None,
        malformed: str = "",
    ) -> "Response":
        """Makes a response from its parts; if `content` is None, it is the whole text."""
        response = super().__new__(cls, text)
        response.reasoning = reasoning
        response.content = text if content is None else content
        response.tool_calls = tool_calls or []
        response.malformed = malformed
        return response

    @classmethod
    def of(cls, text: str) -> "Response":
        """Reads text without a parser; returns a Response unchanged.

        Reasoning that never ends counts as content.
        """
        if isinstance(text, Response):
            return text
        reasoning = ""
        content = text
        if "</think>" in text:
            reasoning, content = split(text)
        return cls(text, reasoning, content, malformed=flaw(text))
