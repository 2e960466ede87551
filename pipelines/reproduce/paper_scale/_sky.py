"""The simulated sky of `paper_scale`: a drawn field, stars in it, and a file of both.

ρ = mean + g, g a Matérn-3/2 field on a grid twice as fine as that of the fit, trilinear between
its nodes; y_n = ∫ρ ds from the Sun to a star + noise of 5 %. Lengths in kpc, densities in mag/kpc.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dustmap.gp import Batch, GridPrior, RegularGrid
from dustmap.gp.functionals import LineIntegrals
from dustmap.gp.kernels import Matern32, StationaryKernel
from dustmap.sky import column_density
from pipelines.reproduce._experiment import Row

LOWER, UPPER = (-2.0, -2.0, -1.0), (2.0, 2.0, 1.0)
#: Nodes of the truth per cell of the fit's grid, on each axis.
FINER = 2
#: The error of a star is that fraction of its extinction, but at least FLOOR mag.
ERROR, FLOOR = 0.05, 0.01


@final
@dataclass(frozen=True)
class SkySettings:
    """What is drawn.

    shape: nodes of the fit's grid on the box; stars: of the fit; held_out: stars more whose
    noise-free extinction is kept; length (kpc), std and mean (mag/kpc): of the density.
    """

    shape: tuple[int, int, int] = (50, 50, 25)
    stars: int = 500_000
    held_out: int = 10_000
    length: float = 0.2
    std: float = 0.5
    mean: float = 1.5
    seed: int = 0

    def grid(self) -> RegularGrid:
        """Of the fit."""
        return RegularGrid.from_bounds(LOWER, UPPER, self.shape)

    def truth_grid(self) -> RegularGrid:
        """Of the truth: the nodes of `grid` and those between."""
        return RegularGrid.from_bounds(LOWER, UPPER, [FINER * (m - 1) + 1 for m in self.shape])

    def kernel(self) -> StationaryKernel:
        """Of the truth."""
        return Matern32(self.length, self.std**2, dim=3)

    def as_row(self) -> Row:
        """For the settings of the experiment."""
        return {
            "box_kpc": [b - a for a, b in zip(LOWER, UPPER, strict=True)],
            "truth_grid": list(self.truth_grid().shape),
            "truth_length_kpc": self.length,
            "truth_std": self.std,
            "truth_mean": self.mean,
            "error": f"{ERROR:g} of the noise-free extinction, at least {FLOOR:g} mag",
            "held_out": self.held_out,
            "seed": self.seed,
        }


@final
@dataclass(frozen=True, eq=False)
class Sky:
    """Stars: positions (N, 3), y (N,), sigma (N,); held-out stars: positions, noise-free
    extinctions; truth: density at the nodes of the truth's grid, in its shape.
    """

    positions: Tensor
    y: Tensor
    sigma: Tensor
    test_positions: Tensor
    test_extinction: Tensor
    truth: Tensor

    def batch(self, stars: int) -> Batch:
        """The first stars, float32."""
        rays = LineIntegrals.from_observer(self.positions[:stars])
        return Batch(rays, self.y[:stars].float(), self.sigma[:stars].float().square())

    def test(self) -> LineIntegrals:
        """The held-out stars."""
        return LineIntegrals.from_observer(self.test_positions)


def draw(settings: SkySettings) -> Sky:
    """The sky of those settings; more stars leave the first ones and the field as they were."""
    field, places, noise = (
        torch.Generator().manual_seed(settings.seed + stream) for stream in (0, 1_000, 2_000)
    )
    truth = draw_density(settings, field)
    count = settings.held_out + settings.stars
    lower, upper = (torch.tensor(v, dtype=torch.float64) for v in (LOWER, UPPER))
    unit = torch.rand(count, 3, dtype=torch.float64, generator=places)
    positions = lower + (upper - lower) * unit
    extinction = extinctions(settings.truth_grid(), truth, positions)
    sigma = (ERROR * extinction).clamp_min(FLOOR)
    y = extinction + sigma * torch.randn(count, dtype=torch.float64, generator=noise)
    test, train = slice(0, settings.held_out), slice(settings.held_out, None)
    return Sky(positions[train], y[train], sigma[train], positions[test], extinction[test], truth)


def draw_density(settings: SkySettings, generator: torch.Generator) -> Tensor:
    """mean + R ε on the truth's grid, in its shape; float64."""
    grid, kernel = settings.truth_grid(), settings.kernel()
    with torch.no_grad():
        prior = GridPrior.padded(kernel, grid)
        eps = torch.randn(prior.n_white, dtype=torch.float64, generator=generator)
        density: Tensor = settings.mean + prior.root().matmul(eps).reshape(grid.shape)
    return density


def extinctions(grid: RegularGrid, density: Tensor, positions: Tensor) -> Tensor:
    """∫ρ ds (N,) from the Sun to positions (N, 3), four points of the trilinear field per cell."""
    return torch.from_numpy(column_density(grid, density.numpy(), positions.numpy()))


_FIELDS = ("positions", "y", "sigma", "test_positions", "test_extinction", "truth")


def save(sky: Sky, path: Path) -> None:
    """To one file."""
    arrays: dict[str, NDArray[np.float64]] = {f: getattr(sky, f).numpy() for f in _FIELDS}
    np.savez(path, **arrays)  # type: ignore[arg-type]


def load(path: Path) -> Sky:
    """From one file."""
    with np.load(path) as table:
        return Sky(*(torch.from_numpy(table[f]) for f in _FIELDS))
