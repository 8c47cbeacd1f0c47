"""Agents on a server of NeMo-Gym or of the verifiers library."""
