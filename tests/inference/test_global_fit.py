"""One call from data to a posterior: against the dense exact process, and with outliers."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from dustmap.gp import (
    Batch,
    ConstantMean,
    ExactGP,
    GPModel,
    Parameters,
    RegularGrid,
    fit_hyperparameters,
)
from dustmap.gp.functionals import LineIntegrals
from dustmap.gp.kernels import Matern32, StationaryKernel
from dustmap.gp.likelihoods import GaussianLikelihood
from dustmap.inference import GlobalSettings, RobustSettings, fit_global

GRID = RegularGrid.from_bounds((-1.0, -1.0), (1.0, 1.0), (21, 21))
SETTINGS = GlobalSettings(samples=64, dtype=torch.float64, order=4, start_rows=0)


def sky(n: int, seed: int = 0) -> Batch:
    """Rays from the centre of a square through a Matérn-3/2 field of mean 1, noise of 0.05."""
    generator = torch.Generator().manual_seed(seed)
    ends = 2.0 * torch.rand(n, 2, generator=generator, dtype=torch.float64) - 1.0
    rays = LineIntegrals.from_observer(ends)
    gp = ExactGP(Matern32(0.4, 0.25, dim=2), ConstantMean(1.0))
    root = torch.linalg.cholesky(gp.covariance(rays) + 1e-10 * torch.eye(n, dtype=torch.float64))
    white = torch.randn(2, n, generator=generator, dtype=torch.float64)
    field = gp.mean.values(rays).detach() + root @ white[0]
    return Batch(rays, field + 0.05 * white[1], torch.full((n,), 0.05**2, dtype=torch.float64))


def parts(length: float, variance: float) -> tuple[StationaryKernel, ConstantMean]:
    return Matern32(length, variance, dim=2), ConstantMean(0.0)


def fixed(kernel: StationaryKernel) -> StationaryKernel:
    return kernel.fixed()


def far() -> LineIntegrals:
    """Queries that no datum sits on."""
    angle = torch.linspace(0.0, 6.0, 12, dtype=torch.float64)
    return LineIntegrals.from_observer(0.7 * torch.stack([angle.cos(), angle.sin()], -1))


@pytest.mark.slow
def test_learns_what_the_dense_evidence_does_and_predicts_the_same() -> None:
    data = sky(100)
    kernel, mean = parts(0.15, 2.0)
    likelihood = GaussianLikelihood(scale=2.0)
    # The noise of the coarser grid is less by 4 %: its residuals are alike along a beam.
    fine = RegularGrid.from_bounds((-1.0, -1.0), (1.0, 1.0), (31, 31))
    fit = fit_global(GPModel(kernel, mean, likelihood), data, fine, SETTINGS)
    assert fit.learned is not None
    assert fit.learned.status.value == "converged", fit.learned.message()

    start = GPModel(*parts(0.3, 0.5), GaussianLikelihood(scale=1.0))
    best = fit_hyperparameters(start, data).model
    found, wanted = (Parameters.of(model, without=("mean",)).theta for model in (fit.gp, best))
    exact, noise = ExactGP(best.kernel, best.mean), best.likelihood
    errors = torch.tensor(fit.learned.monte_carlo_errors) + 0.1 * torch.tensor(
        fit.learned.standard_deviations
    )
    apart = found - wanted
    assert bool((apart.abs() < 3.0 * errors).all()), (apart, errors)

    with torch.no_grad():
        told = exact.condition(data.functional, data.y, noise.noise_variance(data)).predict(far())
    here = fit.posterior.predict(far())
    assert float(((here.mean - told.mean) / told.std).abs().max()) < 0.5
    # 64 draws: ±9 % each.
    assert float((here.std / told.std).median()) == pytest.approx(1.0, abs=0.1)


def test_nothing_to_learn_is_one_solve() -> None:
    data = sky(40)
    kernel = fixed(Matern32(0.4, 0.25, dim=2))
    mean, noise = ConstantMean(1.0, learn=False), GaussianLikelihood()
    fit = fit_global(GPModel(kernel, mean, noise), data, GRID, SETTINGS)
    assert (fit.started, fit.learned, fit.robust) == (None, None, None)
    told = ExactGP(kernel, mean).condition(
        data.functional,
        data.y,
        data.noise_variance,  # type: ignore[arg-type]
    )
    apart = fit.posterior.predict(far()).mean - told.predict(far()).mean
    assert float((apart / told.predict(far()).std).abs().max()) < 0.1
    assert fit.report["cg_columns_unconverged"] == 0


def test_the_torus_follows_the_length_scale() -> None:
    data = sky(40)
    shapes = []
    for length in (0.1, 0.4):
        model = GPModel(
            fixed(Matern32(length, 0.25, dim=2)),
            ConstantMean(1.0, learn=False),
            GaussianLikelihood(),
        )
        fit = fit_global(model, data, GRID, SETTINGS)
        shapes.append(fit.features.prior.torus_shape)
        # Opposite faces see each other through four length scales of padding.
        assert fit.report["wrap_error"] < 0.01
    assert shapes[0] < shapes[1]


def test_learning_takes_a_part_of_many_data() -> None:
    data = sky(150)
    kernel, mean = parts(0.3, 0.5)
    settings = replace(SETTINGS, learn_rows=100)
    model = GPModel(kernel, mean, GaussianLikelihood(scale=1.0))
    fit = fit_global(model, data, GRID, settings)
    assert fit.learned is not None
    assert len(fit.solution.sigma) == 150
    assert fit.learned.model.sigma(data[:100]).shape == (100,)


@pytest.mark.parametrize("learn", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_gross_outliers_do_not_move_the_map_by_its_own_deviation(learn: bool) -> None:
    clean = sky(150)
    generator = torch.Generator().manual_seed(1)
    hit = torch.randperm(150, generator=generator)[:8]
    y = clean.y.clone()
    y[hit] += 2.0
    dirty = Batch(clean.functional, y, clean.noise_variance)
    settings = replace(SETTINGS, robust=RobustSettings())
    nodes = far()

    def posterior(data: Batch, chosen: GlobalSettings) -> tuple[Tensor, Tensor]:
        kernel = Matern32(0.4, 0.25, dim=2)
        model = GPModel(
            kernel if learn else kernel.fixed(), ConstantMean(1.0), GaussianLikelihood(scale=1.0)
        )
        fit = fit_global(model, data, GRID, chosen)
        told = fit.posterior.predict(nodes)
        return told.mean, told.std

    without, std = posterior(clean, SETTINGS)
    with_them, _ = posterior(dirty, settings)
    bent, _ = posterior(dirty, SETTINGS)
    assert float(((with_them - without) / std).abs().max()) < 1.0
    assert float(((bent - without) / std).abs().max()) > 1.0
