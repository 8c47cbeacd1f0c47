"""Proofs in Lean 4."""
