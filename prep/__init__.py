"""The commands of data_prep.py, which work on files of rows: one command per module, or a part."""
