"""Answers that a judge model scores, alone or beside the others of their group."""
