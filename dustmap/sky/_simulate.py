"""A sky to try things on: a random dust field, stars in it, and their noisy extinctions.

The field is log-normal, ρ = ρ̄ exp(s g − s²/2), with g a unit Matérn-3/2 field made in Fourier
space on a torus twice the box; every star sees the line integral of its trilinear interpolant.
"""

from dataclasses import dataclass
from typing import final

import numpy as np
from numpy.typing import NDArray
from scipy.ndimage import map_coordinates

from dustmap.gp import RegularGrid
from dustmap.sky._catalog import StarTable
from dustmap.sky._coordinates import galactic
from dustmap.sky.maps import DustMap

POINTS_PER_VOXEL = 4  # along a ray; the midpoint rule is then good to 1e-3 of an extinction
RAYS_AT_ONCE = 10_000


@final
@dataclass(frozen=True)
class SkyModel:
    """What is simulated: lengths in pc, densities in mag/pc, errors in mag.

    The box is centred on the Sun; `contrast` is s, the standard deviation of the log-density;
    errors are spread by a factor of 2 to either side of `error`.
    """

    size: tuple[float, float, float] = (400.0, 400.0, 240.0)
    spacing: float = 10.0
    mean_density: float = 2e-3
    contrast: float = 0.8
    length: float = 60.0
    error: float = 0.03
    system: str = "A_V"

    def __post_init__(self) -> None:
        for name in ("spacing", "mean_density", "contrast", "length", "error"):
            if not 0.0 < getattr(self, name) < np.inf:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        if not all(self.spacing <= size < np.inf for size in self.size):
            raise ValueError(f"size must be at least spacing = {self.spacing:g}, got {self.size}")

    def grid(self) -> RegularGrid:
        """Nodes `spacing` apart, or a little less to end on the faces of the box."""
        shape = [int(np.ceil(size / self.spacing - 1e-9)) + 1 for size in self.size]
        lower = [-size / 2 for size in self.size]
        return RegularGrid.from_bounds(lower, [size / 2 for size in self.size], shape)


def simulate(model: SkyModel, stars: int, seed: int) -> tuple[StarTable, DustMap]:
    """Draws a sky and `stars` stars, uniform in the box; the same seed gives the same sky."""
    if stars < 1:
        raise ValueError(f"stars must be at least 1, got {stars}")
    # The field has a stream of its own, so that more stars see the same dust.
    field_stream, star_stream = np.random.default_rng(seed).spawn(2)
    grid = model.grid()
    log_density = model.contrast * _unit_field(grid, model.length, field_stream)
    density = model.mean_density * np.exp(log_density - model.contrast**2 / 2)
    catalog = _observe(model, grid, density, stars, star_stream)
    return catalog, DustMap.from_nodes(grid, density.ravel(), None, model.system)


def _unit_field(grid: RegularGrid, length: float, rng: np.random.Generator) -> NDArray[np.float64]:
    """A Matérn-3/2 field of variance 1 at the nodes, from power ∝ (3/ℓ² + k²)^−3."""
    torus = tuple(2 * n for n in grid.shape)
    k = [2 * np.pi * np.fft.fftfreq(n, h) for n, h in zip(torus, grid.spacing, strict=True)]
    k2 = k[0][:, None, None] ** 2 + k[1][None, :, None] ** 2 + k[2][None, None, :] ** 2
    power = (3 / length**2 + k2) ** -3.0
    root = np.sqrt(power / power.mean())
    field = np.fft.ifftn(root * np.fft.fftn(rng.standard_normal(torus))).real
    x, y, z = grid.shape
    return np.ascontiguousarray(field[:x, :y, :z])


def _observe(
    model: SkyModel,
    grid: RegularGrid,
    density: NDArray[np.float64],
    stars: int,
    rng: np.random.Generator,
) -> StarTable:
    positions = rng.uniform(grid.lower, grid.upper, (stars, 3))
    error = model.error * 2.0 ** rng.uniform(-1.0, 1.0, stars)
    noise = error * rng.standard_normal(stars)
    l, b, distance = galactic(positions)
    return StarTable(
        source_id=np.arange(1, stars + 1),
        l=l,
        b=b,
        distance=distance,
        extinction=column_density(grid, density, positions) + noise,
        extinction_error=error,
        system=model.system,
    )


def column_density(
    grid: RegularGrid, density: NDArray[np.float64], positions: NDArray[np.float64]
) -> NDArray[np.float64]:
    """∫ ρ ds from the Sun to `positions` (N, 3) through `density` (x, y, z), in mag (N,)."""
    parts = np.split(positions, range(RAYS_AT_ONCE, len(positions), RAYS_AT_ONCE))
    return np.concatenate([_column_density(grid, density, part) for part in parts])


def _column_density(
    grid: RegularGrid, density: NDArray[np.float64], positions: NDArray[np.float64]
) -> NDArray[np.float64]:
    distance = np.linalg.norm(positions, axis=-1)
    count = int(np.ceil(POINTS_PER_VOXEL * distance.max() / min(grid.spacing)))
    fraction = (np.arange(count) + 0.5) / count
    points = positions[:, None, :] * fraction[None, :, None]
    index = (points - np.array(grid.lower)) / np.array(grid.spacing)
    along = map_coordinates(density, np.moveaxis(index, -1, 0), order=1, mode="nearest")
    return np.asarray(along.mean(axis=-1) * distance, np.float64)
