"""Opens the vLLM engines, leads them as a fleet, and replaces them when they die."""
