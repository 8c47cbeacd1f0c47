"""Programming: programs that are run against tests."""
