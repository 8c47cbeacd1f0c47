"""Errands among data that an attacker has written into: nine simulated offices, worked by calls."""
