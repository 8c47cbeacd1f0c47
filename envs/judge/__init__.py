"""Models that judge answers: the client, its addresses, prompts and verdicts."""
