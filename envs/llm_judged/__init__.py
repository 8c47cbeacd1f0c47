"""Answers that a judge model scores, alone or together with the other answers of their group."""
