"""Ordinary regression in the plane: error and time against the number of inducing points."""
