"""Provides what any algorithm needs and no paper mentions: actors, waits, engines, metrics."""
