"""The commands of data_prep.py, which work on row files: one command per module, or part of one."""
