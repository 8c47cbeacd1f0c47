"""Checks before any actor starts, and modes other than training."""
