"""Prompts on their way to an engine and back: dispatch, retries, outages, evaluation, teachers."""
