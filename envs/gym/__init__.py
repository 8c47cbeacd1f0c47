"""Agents on a server of NeMo-Gym, or of the library verifiers."""
