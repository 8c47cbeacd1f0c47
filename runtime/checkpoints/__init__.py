"""Everything in a run folder that a later run reads: checkpoints, samples, scores, lineage."""
