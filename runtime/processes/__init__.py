"""Starts a run's processes: its Ray cluster, the place of each actor, and the trainer ranks."""
