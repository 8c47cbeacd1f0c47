"""Runs untrusted code: bubblewrap, warm interpreters, shells, child processes for checks."""
