"""Provides what every environment needs: rows, prompts, sampling, turns, episodes, samples."""
