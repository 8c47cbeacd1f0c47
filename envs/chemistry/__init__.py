"""Chemistry: numbers that a molecule has, with and without Python."""
