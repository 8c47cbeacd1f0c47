"""Following instructions and formats that the prompt states."""
