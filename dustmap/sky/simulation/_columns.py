"""True extinctions: integrals of the density along rays, exact for its trilinear interpolant."""

import math

import numpy as np
from numpy.typing import NDArray
from scipy.ndimage import map_coordinates

from dustmap.gp import RegularGrid

#: Rays at once: some 100 MB of crossings for a grid of 200 nodes an axis.
RAYS_AT_ONCE = 10_000


def column_density(
    grid: RegularGrid, density: NDArray[np.float64], positions: NDArray[np.float64]
) -> NDArray[np.float64]:
    """∫ ρ ds from the Sun to `positions` (N, 3) through `density` (x, y, z), in mag (N,).

    Between two planes of nodes ρ is a cubic along the ray, which two Gauss points integrate
    exactly. The Sun and the positions must lie in the grid's box.
    """
    _check_inside(grid, positions)
    parts = np.split(positions, range(RAYS_AT_ONCE, len(positions), RAYS_AT_ONCE))
    return np.concatenate([_column_density(grid, density, part) for part in parts])


def _check_inside(grid: RegularGrid, positions: NDArray[np.float64]) -> None:
    lower, upper = np.array(grid.lower), np.array(grid.upper)
    slack = 1e-6 * np.array(grid.spacing)
    if not ((lower <= 0) & (upper >= 0)).all():
        raise ValueError(f"the Sun is outside the box {grid.lower} to {grid.upper} pc: move it")
    outside = ((positions < lower - slack) | (positions > upper + slack)).any(axis=-1)
    if outside.any():
        raise ValueError(
            f"{outside.sum()} of {len(positions)} positions are outside the box {grid.lower} to "
            f"{grid.upper} pc"
        )


def _column_density(
    grid: RegularGrid, density: NDArray[np.float64], positions: NDArray[np.float64]
) -> NDArray[np.float64]:
    ends = _crossings(grid, positions)
    step = np.diff(ends, axis=1)
    ray, segment = np.nonzero(step > 0)
    width, middle = step[ray, segment], ends[ray, segment] + step[ray, segment] / 2
    total = np.zeros(len(positions))
    for sign in (-1.0, 1.0):
        at = middle + sign * width / (2 * math.sqrt(3.0))
        index = (at[:, None] * positions[ray] - np.array(grid.lower)) / np.array(grid.spacing)
        along = map_coordinates(density, index.T, order=1, mode="nearest")
        total += np.bincount(ray, weights=along * width / 2, minlength=len(positions))
    return np.asarray(total * np.linalg.norm(positions, axis=-1))


def _crossings(grid: RegularGrid, positions: NDArray[np.float64]) -> NDArray[np.float64]:
    """Where rays cross planes of nodes, as fractions of their length: (N, K), ascending, 0 to 1."""
    found = [np.zeros((len(positions), 1)), np.ones((len(positions), 1))]
    for axis, planes in enumerate(grid.axes()):
        along = positions[:, axis, None]
        # A ray that hardly moves along an axis crosses none of its planes, or all at the Sun.
        with np.errstate(divide="ignore", invalid="ignore"):
            t = planes.numpy()[None, :] / along
        found.append(np.clip(np.nan_to_num(t, nan=0.0, posinf=1.0, neginf=0.0), 0.0, 1.0))
    return np.sort(np.concatenate(found, axis=1), axis=1)
