"""The vLLM engines: how they are opened, led as a fleet, and replaced when they die."""
