"""Agents that a server of NeMo-Gym, or of the library verifiers, has."""
