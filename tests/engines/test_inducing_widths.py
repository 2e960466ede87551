"""Standard deviations of the inducing engine beside the dense ones, at two nodes a length scale."""

import itertools
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor

from dustmap.engines import EvidenceSettings, InducingEngine, InducingSettings, Problem, Watch
from dustmap.engines._inducing_grid import planned
from dustmap.gp import Batch, ConstantMean, ExactGP, GPModel, RegularGrid
from dustmap.gp.covariances import ClosedForm
from dustmap.gp.functionals import AbstractFunctional, LineIntegrals, PointValues
from dustmap.gp.kernels import Matern32
from dustmap.gp.likelihoods import GaussianLikelihood

#: Nodes of a box by its dimension; ℓ = 1 and h = 1/2.
SHAPES = {1: (24,), 2: (8, 8), 3: (6, 6, 5)}
STARS = 120
SETTINGS = InducingSettings(EvidenceSettings(rows=50), points_per_length=2.0, nugget=0.0)


def problem(dim: int) -> Problem:
    """Rays from the middle of a box, whose errors are a twentieth of their extinctions."""
    upper = torch.tensor([0.25 * (n - 1) for n in SHAPES[dim]], dtype=torch.float64)
    generator = torch.Generator().manual_seed(dim)
    ends = upper * (2 * torch.rand(STARS, dim, dtype=upper.dtype, generator=generator) - 1)
    y = 0.3 * ends.norm(dim=-1)
    noise = (0.05 * y).clamp_min(0.01).square()
    box = RegularGrid.from_bounds((-upper).tolist(), upper.tolist(), SHAPES[dim])
    model = GPModel(
        Matern32(1.0, 0.01, dim=dim).fixed(), ConstantMean(0.3).fixed(), GaussianLikelihood()
    )
    return Problem(model, Batch(LineIntegrals.from_observer(ends), y, noise), box)


def asked(dim: int) -> tuple[PointValues, LineIntegrals]:
    """Places in the box, and other rays."""
    generator = torch.Generator().manual_seed(9)
    unit = torch.rand(120, dim, dtype=torch.float64, generator=generator)
    upper = torch.tensor([0.25 * (n - 1) for n in SHAPES[dim]], dtype=torch.float64)
    x = upper * (2 * unit - 1)
    return PointValues(x), LineIntegrals.from_observer(x[:60])


@cache
def exact(dim: int) -> tuple[Tensor, Tensor]:
    """Standard deviations of the dense posterior at these."""
    data, model = problem(dim).data, problem(dim).model
    gp = ExactGP(model.kernel, model.mean, ClosedForm())
    assert data.noise_variance is not None
    A = gp.covariance(data.functional) + torch.diag(data.noise_variance)

    def std(functional: AbstractFunctional) -> Tensor:
        K = gp.between(functional, data.functional)
        left: Tensor = gp.variance(functional) - (K * torch.linalg.solve(A, K.mT).mT).sum(-1)
        return left.sqrt()

    with torch.no_grad():
        places, rays = (std(functional) for functional in asked(dim))
    return places, rays


def ratios(dim: int, settings: InducingSettings) -> tuple[Tensor, Tensor]:
    """Standard deviations of the engine over the dense ones, of places and of rays."""
    posterior = InducingEngine(settings).condition(problem(dim), Watch()).posterior
    places, rays = (
        posterior.predict(functional).std / dense
        for functional, dense in zip(asked(dim), exact(dim), strict=True)
    )
    return places, rays


@pytest.mark.parametrize("dim", [1, 2, 3])
def test_the_chosen_family_is_as_wide_as_the_exact_posterior(dim: int) -> None:
    places, rays = ratios(dim, SETTINGS)
    assert 0.95 <= float(places.median()) <= 1.05
    assert float(places.quantile(0.9)) <= 1.3
    assert float(rays.median()) <= 1.3


@pytest.mark.parametrize("dim", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
def test_larger_structures_are_less_wide(dim: int) -> None:
    """Extinctions are sums of many variables, whose correlations a small structure forgets; what
    the full family has too much is what the grid leaves unexplained."""
    families = (
        replace(SETTINGS, family="mean-field"),
        replace(SETTINGS, family="block", block=(2,) * dim),
        replace(SETTINGS, family="block"),
        replace(SETTINGS, family="full"),
    )
    widths = [ratios(dim, settings) for settings in families]
    medians = [float(rays.median()) for _, rays in widths]
    # A block may be the whole torus; its rows are solved for.
    assert all(less <= more + 1e-4 for more, less in itertools.pairwise(medians))
    assert medians[0] > 1.3
    low_rank = ratios(dim, replace(SETTINGS, family="low-rank", rank=60))
    for places, rays in (widths[2], widths[3], low_rank):
        assert 0.9 <= float(places.median()) <= 1.3
        assert float(places.quantile(0.9)) <= 1.3
        assert float(rays.median()) <= 1.2 * medians[3]


def test_few_nodes_take_the_full_family_and_many_take_blocks() -> None:
    small = problem(3)
    few, _ = planned(small, SETTINGS)
    assert (few.whitening, few.family, few.n_features) == ("cholesky", "full", 180)
    many, _ = planned(small, replace(SETTINGS, max_memory=2**19))  # full of 90 variables at most
    assert (many.whitening, many.family, many.block) == ("hip", "block", (6, 6, 6))


def unequal(ratio: float) -> Problem:
    """600 values on the plane, a tenth of them with errors so many times smaller."""
    generator = torch.Generator().manual_seed(0)
    x = 3.0 * torch.rand(600, 2, dtype=torch.float64, generator=generator)
    precise = torch.rand(600, generator=generator) < 0.1
    std = torch.where(precise, 0.1 / ratio, 0.1).double()
    noise = std * torch.randn(600, dtype=torch.float64, generator=generator)
    y = torch.sin(3.0 * x[:, 0]) * torch.cos(2.0 * x[:, 1]) + noise
    likelihood = GaussianLikelihood(learn=False)
    model = GPModel(Matern32(0.7, dim=2).fixed(), ConstantMean(learn=False), likelihood)
    return Problem(model, Batch(PointValues(x), y, std.square()), None)


@pytest.mark.parametrize(("ratio", "early"), [(1.0, False), (300.0, True)])
def test_steps_on_minibatches_that_end_early_say_so(ratio: float, early: bool) -> None:
    """Where some errors are far smaller than others steps of few rows need many."""
    settings = InducingSettings(
        EvidenceSettings(rows=50), family="block", block=(5, 5), grid=(10, 10), batch=100, epochs=5
    )
    fit = InducingEngine(settings).fit(unequal(ratio), Watch())
    assert any("before they came to rest" in line for line in fit.report["advice"]) is early


def test_contour_integrals_that_are_no_better_than_the_noise_say_so() -> None:
    of_ciq = InducingSettings(EvidenceSettings(rows=50), whitening="ciq", grid=(12, 12))
    asked = unequal(1.0)
    precise = replace(asked.data, noise_variance=torch.full_like(asked.data.y, 1e-6))
    for data, said in ((asked.data, False), (precise, True)):
        fit = InducingEngine(of_ciq).fit(replace(asked, data=data), Watch())
        assert any('take whitening="cholesky"' in line for line in fit.report["advice"]) is said
