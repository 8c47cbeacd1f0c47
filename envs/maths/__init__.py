"""Mathematics: answers compared with an expected one, with and without Python."""
