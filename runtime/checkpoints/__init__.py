"""Keeps what a later run reads from a run folder: checkpoints, samples, scores, lineage."""
