"""vLLM's parsers of thoughts and tool calls, and the forms in which models write calls."""
