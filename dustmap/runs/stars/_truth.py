"""The density found beside the true one, where that is known."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dustmap.errors import UserError
from dustmap.gp import RegularGrid
from dustmap.inference import scores
from dustmap.runs.reports import by_distance, correlation
from dustmap.sky.maps import AbstractDensityField, DustMap, MapRequest, Quantity

#: Nodes that are compared at most, drawn at random beyond.
MOST_NODES = 500_000


def truth_scores(
    field: AbstractDensityField, grid: RegularGrid, truth: DustMap, seed: int
) -> dict[str, Any]:
    """Scores of the true density at the nodes inside the truth's box, in all and by distance.

    coverage68 counts nodes between the 16th and the 84th percentile of the posterior.
    """
    mine = _at_nodes(field, grid, truth, seed)
    if len(mine["true"]) == 0:
        raise UserError("data.truth: its box has no node of the run's grid inside")
    true, mean, std = mine["true"], mine["mean"], mine["std"]
    inside = (mine["p16"] <= true) & (true <= mine["p84"])
    found = scores(*(torch.from_numpy(v) for v in (true, mean, std**2))).as_dict()
    return found | {
        "coverage68": float(inside.mean()),
        "correlation": correlation(mean, true),
        "by_distance": by_distance(mine["distance"], true, mean, std, inside),
    }


def _at_nodes(
    field: AbstractDensityField, grid: RegularGrid, truth: DustMap, seed: int
) -> dict[str, NDArray[np.float64]]:
    """Truth and posterior (K,) at nodes inside the truth's box, slab by slab."""
    names = ("mean", "std", "p16", "p84")
    request = MapRequest(tuple(Quantity(name) for name in names))
    x, y, z = (axis.numpy() for axis in grid.axes())
    share, generator = MOST_NODES / grid.size, np.random.default_rng(seed)
    parts: dict[str, list[NDArray[np.float64]]] = {}
    for slab in field.planes(grid, request):
        zz, yy, xx = np.meshgrid(z[slab.start : slab.stop], y, x, indexing="ij")
        points = np.stack([xx, yy, zz], axis=-1).reshape(-1, 3)
        true = truth.mean_at(points)
        kept = np.isfinite(true)
        if share < 1.0:
            kept &= generator.random(len(true)) < share
        parts.setdefault("true", []).append(true[kept])
        parts.setdefault("distance", []).append(np.linalg.norm(points[kept], axis=1))
        for name in names:
            values = slab.arrays[name].reshape(-1)[kept].astype(np.float64)
            parts.setdefault(name, []).append(values)
    return {name: np.concatenate(values) for name, values in parts.items()}
