"""Altitudes of roads: exact GP, SGPR, SVGP, HIP-GP and the global engine at learned parameters."""
