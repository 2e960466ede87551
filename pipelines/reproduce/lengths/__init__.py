"""Learned length scales of skies with structure between the nodes of the map, and without."""
