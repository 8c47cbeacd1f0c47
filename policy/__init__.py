"""The network being trained, behind one small interface."""
