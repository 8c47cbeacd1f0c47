"""Chemistry: numerical properties of molecules, with and without Python."""
