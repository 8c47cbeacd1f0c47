"""Repairs of a repository: one patch, or one agent step."""
