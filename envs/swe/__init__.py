"""Repairs of a repository: one patch, or one step of an agent."""
