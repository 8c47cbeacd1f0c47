"""Commands in a terminal: one step against a reference, or a task with a check."""
