"""Errands in nine simulated offices, worked by calls, with data that an attacker has changed."""
