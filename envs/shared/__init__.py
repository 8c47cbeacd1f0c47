"""What several environments need."""
