"""Checks a run before any actor starts, and runs it in modes other than training."""
