"""vLLM's parsers of thoughts and tool calls, and how families of models write calls."""
