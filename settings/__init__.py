"""The settings of a run: dataclasses, how they are read, and what is wrong with them."""
