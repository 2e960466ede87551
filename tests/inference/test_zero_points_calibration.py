"""Zero points of many skies: (estimate − truth) / error has mean 0 and standard deviation 1."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from dustmap.gp import (
    Batch,
    ConstantMean,
    ExactGP,
    GridPrior,
    Prediction,
    RegularGrid,
    ZeroPoints,
)
from dustmap.gp.features import GroupedFeatures, LocalFeatures, interpolation
from dustmap.gp.functionals import LineIntegrals, without_groups
from dustmap.gp.kernels import Matern32
from dustmap.gp.likelihoods import GaussianLikelihood
from dustmap.inference import (
    GridModel,
    LogNormalModel,
    MGVISettings,
    SolveSettings,
    fit_mgvi,
    solve_global,
)

pytestmark = pytest.mark.slow

STD, NOISE, COUNT, STARS = 0.05, 0.03, 3, 90
KERNEL = Matern32(0.5, 1.0, dim=2).fixed()
MEAN = ConstantMean(0.0, learn=False)


def box(nodes: int) -> RegularGrid:
    return RegularGrid.from_bounds((-0.5,) * 2, (0.5,) * 2, (nodes,) * 2)


def observers(seed: int) -> tuple[LineIntegrals, Tensor, Tensor]:
    """Rays of three surveys, each with most of its stars in a sector of its own; their zero points;
    noise of the data."""
    generator = torch.Generator().manual_seed(seed)
    ends = torch.rand(STARS, 2, generator=generator, dtype=torch.float64) - 0.5
    sector = ((torch.atan2(ends[:, 1], ends[:, 0]) / torch.pi + 1.0) * COUNT / 2).long() % COUNT
    mixed = torch.rand(STARS, generator=generator) < 0.4
    groups = torch.where(mixed, torch.randint(COUNT, (STARS,), generator=generator), sector)
    rays = replace(LineIntegrals.from_observer(ends), groups=groups)
    b = STD * torch.randn(COUNT, generator=generator, dtype=torch.float64)
    noise = NOISE * torch.randn(STARS, generator=generator, dtype=torch.float64)
    return rays, b, noise + b[groups]


def linear(seed: int) -> tuple[Prediction | None, Tensor]:
    """Of a sky drawn from the exact process of its rays, not on the grid."""
    rays, b, errors = observers(seed)
    prior = GridPrior.padded(KERNEL, box(11), dtype=torch.float64)
    exact = ExactGP(KERNEL, MEAN).covariance(without_groups(rays))
    root = torch.linalg.cholesky(exact + 1e-6 * torch.eye(STARS, dtype=torch.float64))
    white = torch.randn(STARS, generator=torch.Generator().manual_seed(9000 + seed)).double()
    model = GridModel(
        GroupedFeatures(LocalFeatures(prior), ZeroPoints(COUNT, STD)), MEAN, GaussianLikelihood()
    )
    data = Batch(rays, root @ white + errors, torch.full_like(errors, NOISE**2))
    solution = solve_global(model, data, SolveSettings(rtol=1e-6, samples=400, seed=seed))
    return solution.posterior.zero_points(), b


def lognormal(seed: int) -> tuple[Prediction | None, Tensor]:
    """Of a sky drawn on a grid twice as fine as that of the fit."""
    rays, b, errors = observers(seed)
    fine = GridPrior.padded(KERNEL, box(21), dtype=torch.float64)
    generator = torch.Generator().manual_seed(9000 + seed)
    white = torch.randn(fine.n_white, generator=generator, dtype=torch.float64)
    truth = fine.root().matmul(white).exp()
    f = interpolation(without_groups(rays), fine.grid, dtype=torch.float64).matmul(truth)

    def rows(functional):  # type: ignore[no-untyped-def]
        return interpolation(functional, box(11), dtype=torch.float64)

    prior = GridPrior.padded(KERNEL, box(11), dtype=torch.float64)
    model = LogNormalModel(
        prior, MEAN, GaussianLikelihood().fixed(), rows, zero_points=ZeroPoints(COUNT, STD)
    )
    data = Batch(rays, f + errors, torch.full_like(errors, NOISE**2))
    settings = MGVISettings(samples=64, curved=False, seed=seed)
    return fit_mgvi(model, data, settings).posterior.zero_points(), b


@pytest.mark.parametrize(("sky", "skies"), [(linear, 40), (lognormal, 24)])
def test_zero_points_are_as_uncertain_as_they_are_said_to_be(sky, skies: int) -> None:  # type: ignore[no-untyped-def]
    """Zero points of one sky share what only their prior tells, so that of 3 n values about 2 n
    count: mean and standard deviation within three of their own."""
    z, b_std, left = list[Tensor](), list[Tensor](), list[Tensor]()
    for seed in range(skies):
        found, b = sky(seed)
        assert found is not None
        z.append((found.mean.double() - b) / found.std.double())
        left.append(found.mean.double() - b)
        b_std.append(found.std.double())
    every = torch.cat(z)
    assert abs(float(every.mean())) < 3.0 / (2 * skies) ** 0.5
    assert float(every.std()) == pytest.approx(1.0, abs=3.0 / (4 * skies) ** 0.5)
    # The data, and not the prior, say what they are.
    assert float(torch.cat(b_std).mean()) < 0.6 * STD
