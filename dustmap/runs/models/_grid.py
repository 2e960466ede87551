"""The grid and the number type of a run, as the configuration describes them."""

import torch

from dustmap.config import ComputeConfig, GridConfig
from dustmap.gp import RegularGrid


def grid_of(config: GridConfig) -> RegularGrid:
    """Nodes from face to face of the box."""
    shape = tuple(round(size / config.spacing) + 1 for size in config.size)
    lower = tuple(c - size / 2 for c, size in zip(config.center, config.size, strict=True))
    return RegularGrid(lower, (config.spacing,) * 3, shape)


def coarse_grid(config: GridConfig, spacing: float) -> RegularGrid:
    """From face to face of the box, no finer than its own nodes or than about `spacing` pc."""
    lower = tuple(c - size / 2 for c, size in zip(config.center, config.size, strict=True))
    upper = tuple(a + size for a, size in zip(lower, config.size, strict=True))
    step = max(config.spacing, spacing)
    shape = tuple(max(2, round(size / step) + 1) for size in config.size)
    return RegularGrid.from_bounds(lower, upper, shape)


def dtype_of(compute: ComputeConfig) -> torch.dtype:
    """Of fields and products."""
    return {"float32": torch.float32, "float64": torch.float64}[compute.dtype]
