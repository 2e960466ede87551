"""The grid of a map, as the configuration describes it."""

from dustmap.config import GridConfig
from dustmap.gp import RegularGrid


def grid_of(config: GridConfig) -> RegularGrid:
    """Nodes from face to face of the box."""
    shape = tuple(round(size / config.spacing) + 1 for size in config.size)
    lower = tuple(c - size / 2 for c, size in zip(config.center, config.size, strict=True))
    return RegularGrid(lower, (config.spacing,) * 3, shape)
