"""Commands in a terminal: one step compared with a reference, or a task with a check."""
