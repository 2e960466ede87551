"""Skies with structure between the nodes of the map, and without."""
