"""vLLM's parsers for reasoning and tool calls, and the forms in which models write calls."""
