"""Grids around the box, for the dust that stars beyond it see."""
