"""Residuals that rays in one beam share: their correlations, and the errors that draws have."""

from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor

from dustmap.errors import UserError
from dustmap.gp import Batch, ConstantMean, ExactGP, GridPrior, RegularGrid
from dustmap.gp.features import CellResiduals, LocalFeatures, nodes_of
from dustmap.gp.functionals import LineIntegrals, PointValues, Stacked
from dustmap.gp.kernels import Matern32
from dustmap.gp.likelihoods import GaussianLikelihood
from dustmap.inference import GridModel, PathwisePosterior, SolveSettings, solve_global
from dustmap.inference.solve._grid_model import SharedResiduals
from tests.inference.checkpointers import MemoryCheckpointer

GRID = RegularGrid.from_bounds((-40.0,) * 3, (40.0,) * 3, (5,) * 3)
KERNEL = Matern32(60.0, 2.5e-7, dim=3).fixed()
MEAN = ConstantMean(1e-3, learn=False)
#: Stars, others that no fit has seen, relative errors, and draws.
STARS, UNSEEN, ERROR, DRAWS = 200, 60, 0.02, 128


def some_rays(count: int, seed: int = 0) -> LineIntegrals:
    generator = torch.Generator().manual_seed(seed)
    ends = 79.0 * torch.rand(count, 3, dtype=torch.float64, generator=generator) - 39.5
    return LineIntegrals.from_observer(ends)


def lengths_in_cells(rays: LineIntegrals, steps: int = 400) -> Tensor:
    """(N, 4³) of rays in the box, by many short steps."""
    share = (torch.arange(steps, dtype=torch.float64) + 0.5) / steps
    length = rays.edges[:, -1]
    along = (length[:, None] * share)[..., None] * rays.direction[:, None]
    points = rays.origin[:, None] + along
    x, y, z = ((points + 40.0) / 20.0).floor().long().unbind(-1)
    cell = (4 * x + y) * 4 + z
    out = torch.zeros(len(rays), 64, dtype=torch.float64)
    out.scatter_add_(1, cell, (length / steps)[:, None].expand(len(rays), steps))
    return out


def cosines(rows: Tensor) -> Tensor:
    unit = rows / rows.norm(dim=1, keepdim=True)
    cosine: Tensor = unit @ unit.mT
    return cosine


def test_correlations_are_those_of_lengths_in_common_cells() -> None:
    rays, count = some_rays(30), 4000
    unit = CellResiduals.of(GRID, (9, 9, 9), seed=3, count=count).unit(rays, torch.float64)
    found = unit.mT @ unit / count
    # Two steps a cell share a ray among cells to within a quarter of one or so.
    assert float((found - cosines(lengths_in_cells(rays))).abs().mean()) < 0.06
    assert float((found.diagonal() - 1.0).abs().max()) < 5.0 * (2.0 / count) ** 0.5


def test_numbers_depend_on_seed_draw_and_ray_alone() -> None:
    rays = some_rays(500)
    cells = CellResiduals.of(GRID, (9, 9, 9), seed=3, count=6)
    whole, few = cells.unit(rays, torch.float64), cells.unit(rays[slice(7, 12)], torch.float64)
    assert torch.equal(whole[:, 7:12], few)
    some = cells.chosen(torch.tensor([4, 1])).unit(rays, torch.float64)
    assert torch.equal(whole[[4, 1]], some)
    other = replace(cells, seed=4).unit(rays, torch.float64)
    assert float((whole * other).mean().abs()) < 0.2


def test_only_rays_share_residuals() -> None:
    model, _, rays = problem()
    cells = CellResiduals.of(GRID, (9, 9, 9), seed=3, count=6)
    points = PointValues(torch.zeros(2, 3, dtype=torch.float64))
    assert SharedResiduals.of(model.features, cells, rays[slice(0, 2)]) is not None
    for others in (points, Stacked((rays[slice(0, 2)], points))):
        assert SharedResiduals.of(model.features, cells, others) is None


@cache
def problem() -> tuple[GridModel, Batch, LineIntegrals]:
    """Many stars in few cells, whose residuals are larger than their errors."""
    features = LocalFeatures(GridPrior.padded(KERNEL, GRID, dtype=torch.float64))
    rays = some_rays(STARS)
    sigma = ERROR * MEAN.values(rays).clamp_min(0.02)
    data = Batch(rays, torch.zeros_like(sigma), sigma.square())
    return GridModel(features, MEAN, GaussianLikelihood()), data, some_rays(UNSEEN, seed=1)


@cache
def posterior(shared: bool) -> PathwisePosterior:
    model, data, _ = problem()
    settings = SolveSettings(rtol=1e-5, samples=DRAWS, shared_residuals=shared)
    return solve_global(model, data, settings).posterior


@cache
def rows() -> tuple[Tensor, Tensor]:
    """Φ (N, M_w) of the data and of the stars unseen, from the side that has fewer."""
    model, data, at = problem()
    operators = (model.features.operator(f) for f in (data.functional, at))
    phi, seen = (o.rmatmul(torch.eye(o.shape[0], dtype=torch.float64)) for o in operators)
    return phi, seen


def variance_of_errors(cross: Tensor, between: Tensor) -> Tensor:
    """E (U,) = Var (f − aᵀy) for the mean's weights a; cross (N, U), between (N, N): covariances of
    residuals of the data with those of unseen stars, and with each other."""
    model, data, at = problem()
    phi, seen = rows()
    V, v = (model.features.residual_variance(f) for f in (data.functional, at))
    assert data.noise_variance is not None
    a = torch.linalg.solve(phi @ phi.mT + (V + data.noise_variance).diag(), phi @ seen.mT)
    field = (seen - a.mT @ phi).square().sum(1) + v
    noise = (a.square() * data.noise_variance[:, None]).sum(0)
    error: Tensor = field + noise - 2.0 * (a * cross).sum(0) + (a * (between @ a)).sum(0)
    return error


def test_draws_have_the_errors_of_data_with_such_residuals() -> None:
    model, data, at = problem()
    cells = posterior(True).residuals
    assert isinstance(cells, CellResiduals)
    rays = Stacked((data.functional, at))
    steps = nodes_of(rays, GRID, cells.torus_shape)
    rows = torch.zeros(len(rays), *cells.torus_shape, dtype=torch.float64)
    rows.index_put_((steps.row, *steps.cell.unbind(-1)), steps.weight, accumulate=True)
    std = torch.cat([model.features.residual_variance(f).sqrt() for f in (data.functional, at)])
    C = cosines(rows.flatten(1)) * torch.outer(std, std)
    expected = variance_of_errors(C[:STARS, STARS:], C[:STARS, :STARS])
    found = posterior(True).predict(at).variance
    assert float((found / expected - 1.0).abs().max()) < 5.0 * (2.0 / DRAWS) ** 0.5
    assert float((found / expected - 1.0).abs().mean()) < 1.5 * (2.0 / DRAWS) ** 0.5


def test_predicted_variances_are_those_of_errors_under_the_exact_prior() -> None:
    model, data, at = problem()
    exact = ExactGP(KERNEL, MEAN)
    stars = data.functional
    cross, between = exact.between(stars, at), exact.between(stars, stars)
    between.diagonal().copy_(exact.variance(stars))
    phi, seen = rows()
    E = variance_of_errors(cross - phi @ seen.mT, between - phi @ phi.mT)
    E = E + exact.variance(at) - seen.square().sum(1) - model.features.residual_variance(at)
    honest, wide = ((E / posterior(s).predict(at).variance).mean() for s in (True, False))
    assert 0.85 < float(honest) < 1.15
    assert float(wide) < 0.5


def test_draws_and_covariances_have_the_same_residuals() -> None:
    _, _, at = problem()
    known, count = posterior(True), DRAWS
    prediction = known.predict(at)
    drawn = known.sample(at, count, torch.Generator().manual_seed(0)) - prediction.mean
    torch.testing.assert_close(drawn.square().mean(0), prediction.variance)
    torch.testing.assert_close(drawn.mT @ drawn / count, known.covariance(at))
    half = known.with_draws(torch.arange(1, count, 2))
    again = half.sample(at, 3, torch.Generator().manual_seed(1)) - prediction.mean
    torch.testing.assert_close(again, drawn[1:6:2])


def test_places_keep_their_own_residual() -> None:
    model, _, _ = problem()
    x = PointValues(torch.tensor([[10.0, 10.0, 10.0], [-3.0, 7.0, 31.0]], dtype=torch.float64))
    variance = posterior(True).predict(x).variance
    phi = model.features.operator(x)
    spread = phi.matmul(posterior(True).deviations).square().mean(0)
    torch.testing.assert_close(variance, spread + model.features.residual_variance(x))


def test_a_resumed_solve_needs_the_same_residuals() -> None:
    model, data, at = problem()
    checkpoints = MemoryCheckpointer()
    settings = SolveSettings(rtol=1e-4, samples=3, shared_residuals=True)
    first = solve_global(model, data, settings, checkpointer=checkpoints).posterior
    again = solve_global(model, data, settings, checkpointer=checkpoints).posterior
    assert torch.equal(first.predict(at).variance, again.predict(at).variance)
    with pytest.raises(UserError, match="shared_residuals"):
        solve_global(
            model, data, replace(settings, shared_residuals=False), checkpointer=checkpoints
        )
