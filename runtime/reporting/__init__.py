"""Everything that a run tells its user: metrics, log files, the console, and W&B."""
