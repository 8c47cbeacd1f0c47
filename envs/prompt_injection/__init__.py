"""Errands in nine simulated offices, done by tool calls on data that an attacker has changed."""
