"""Chemistry: properties of molecules, with and without Python."""
