"""Models that judge answers: the client, its addresses, and what a verdict looks like."""
