"""Containers for agents and their judges: images, limits, commands, copying files in and out."""
