"""Simulated skies of positive density, and the scores of what is found of them."""

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from dustmap.gp import Batch, GridPrior, RegularGrid
from dustmap.gp.features import interpolation
from dustmap.gp.functionals import AbstractFunctional, LineIntegrals
from dustmap.gp.kernels import Matern32
from dustmap.linalg import AbstractOperator
from pipelines.reproduce._experiment import Value

#: Length scale of the prior-drawn truth, in units of the box; its log-density has unit variance.
LENGTH = 0.2
#: Of the power-law truth: P(k) ∝ k^slope, the spectrum of Kolmogorov turbulence.
SLOPE = -11.0 / 3.0
#: Noise as a fraction of the median extinction.
NOISE = 0.05
TRUTHS = ("prior", "power law")


@final
@dataclass(frozen=True, eq=False)
class Sky:
    """Stars in a box around the observer.

    grid: M nodes; log_density (M,): the truth; train: rays with noisy extinction; held: rays of
    other stars, extinction (K,) theirs without noise. Extinctions are those of the multilinear
    interpolant of the density, as both methods take it.
    """

    grid: RegularGrid
    log_density: Tensor
    train: Batch
    held: LineIntegrals
    extinction: Tensor

    def rows(self, functional: AbstractFunctional, dtype: torch.dtype) -> AbstractOperator:
        """L of the functionals on the grid's nodes."""
        return interpolation(functional, self.grid, dtype=dtype)


def simulate(truth: str, seed: int, nodes: int = 32, stars: int = 2000, held: int = 1000) -> Sky:
    """A sky of unit log-density variance: drawn from a Matérn-3/2 prior, or of a power law."""
    grid = RegularGrid.from_bounds((-0.5,) * 3, (0.5,) * 3, (nodes,) * 3)
    generator = torch.Generator().manual_seed(1000 + seed)
    draw = _prior_draw if truth == "prior" else _power_law_draw
    log_density = draw(grid, generator)
    where = torch.rand(stars + held, 3, generator=generator, dtype=torch.float64) - 0.5
    rays = LineIntegrals.from_observer(where)
    f = interpolation(rays, grid, dtype=torch.float64).matmul(log_density.exp())
    sigma = NOISE * f[:stars].median()
    y = f[:stars] + sigma * torch.randn(stars, generator=generator, dtype=torch.float64)
    train = Batch(rays[:stars], y, sigma.square().expand(stars).clone())
    return Sky(grid, log_density, train, rays[stars:], f[stars:])


def _prior_draw(grid: RegularGrid, generator: torch.Generator) -> Tensor:
    prior = GridPrior.padded(Matern32(LENGTH, 1.0, dim=3), grid)
    white = torch.randn(prior.n_white, generator=generator, dtype=torch.float64)
    with torch.no_grad():
        field: Tensor = prior.root().matmul(white)
    return field


def _power_law_draw(grid: RegularGrid, generator: torch.Generator) -> Tensor:
    """√P(k) on a torus of twice the box, mean 0 and variance 1 over the box."""
    shape = tuple(2 * m for m in grid.shape)
    k = torch.meshgrid(*(torch.fft.fftfreq(n, 1 / n) for n in shape), indexing="ij")
    size = torch.stack(k).double().norm(dim=0)
    amplitude = torch.where(size > 0, size.clamp_min(1.0) ** (SLOPE / 2), 0.0)
    white = torch.randn(shape, generator=generator, dtype=torch.float64)
    field = torch.fft.ifftn(torch.fft.fftn(white) * amplitude).real
    inner = field[tuple(slice(0, m) for m in grid.shape)].reshape(-1)
    unit: Tensor = (inner - inner.mean()) / inner.std()
    return unit


def scores(sky: Sky, mean: Tensor, std: Tensor, extinction: Tensor, draws: int) -> dict[str, Value]:
    """What is compared: mean and std of the log-density at the nodes (M,), held-out extinction.

    draws: independent draws that std was estimated from. A perfect posterior would show
    χ² = draws / (draws − 2), from the scatter of the estimate alone.
    """
    truth = sky.log_density
    z = (truth - mean.double()) / std.double()
    error = extinction.double() - sky.extinction
    return {
        "log_correlation": float(torch.corrcoef(torch.stack([mean.double(), truth]))[0, 1]),
        "log_rmse": float((mean.double() - truth).square().mean().sqrt()),
        "extinction_rmse": float(error.square().mean().sqrt()),
        "extinction_mae": float(error.abs().mean()),
        "log_chi2": float(z.square().mean()),
        "coverage68": float((z.abs() < 1).double().mean()),
        "independent_draws": draws,
        "log_chi2_of_perfect": draws / (draws - 2),
    }
