"""Containers for agents and their judges: an image, limits, commands, files in and out."""
