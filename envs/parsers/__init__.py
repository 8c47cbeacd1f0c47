"""vLLM's parsers for thoughts and tool calls, and the forms in which models write calls."""
