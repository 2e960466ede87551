"""Skies whose dust is finer than the length where learning starts; `experiment` maps them."""
