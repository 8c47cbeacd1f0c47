"""Provides what any algorithm needs and no paper names: actors, engines, checkpoints, metrics."""
