"""What every room may use and what knows none of them: waits, JSONL, line files."""
