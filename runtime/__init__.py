"""What any algorithm needs and no paper mentions: actors, waits, engines, checkpoints, metrics."""
