"""A run's processes: its Ray cluster, where each actor runs, and the trainer ranks."""
