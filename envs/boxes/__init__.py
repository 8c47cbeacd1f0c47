"""Containers for agents and their judges: images, limits, commands, files in and out."""
