"""Helpers that every other package may use: errors, waits, JSON lines, HTTP."""
