"""The commands of data_prep.py on files of rows: one command, or one part of it, a module."""
