"""Masses of clouds in maps beside the true ones; `experiment` runs it."""
