"""Takes prompts to an engine and back: dispatch, retries, outages, evaluation, teachers."""
