"""Levels beside one grid and beside tiles; `experiment` runs it."""
