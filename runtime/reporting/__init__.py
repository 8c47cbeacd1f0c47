"""Reports a run to its user: metrics, log files, the console, and W&B."""
