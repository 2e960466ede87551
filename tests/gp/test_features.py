"""Feature maps against dense algebra: R φ = k_u, residual variances, products, gradients."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from dustmap.gp import GridPrior, RegularGrid
from dustmap.gp.covariances import ClosedForm
from dustmap.gp.features import (
    AbstractFeatureMap,
    CholeskyFeatures,
    HIPFeatures,
    TorusFeatures,
)
from dustmap.gp.functionals import (
    AbstractFunctional,
    PointValues,
)
from dustmap.gp.kernels import AbstractKernel, Matern32, Matern52
from tests.contracts.features import SHAPES, every_datum, unit_grid
from tests.gp.parameters import traced


def make_map(
    name: str, kernel: AbstractKernel, grid: RegularGrid, dtype: torch.dtype
) -> AbstractFeatureMap:
    if name == "cholesky":
        return CholeskyFeatures(kernel, grid, rows_dtype=dtype)
    prior = GridPrior.padded(kernel, grid, dtype=dtype)
    if name == "torus":
        return TorusFeatures(prior)
    rtol, dense_below = (1e-11 if dtype == torch.float64 else 1e-6), (4096 * (name == "hip-dense"))
    return HIPFeatures(prior, rtol=rtol, max_steps=500, dense_below=dense_below)


MAPS = ["hip", "hip-dense", "torus", "cholesky"]


def dense_terms(prior: GridPrior, functional: AbstractFunctional) -> tuple[Tensor, Tensor, Tensor]:
    """K_uu (M, M), K_fu (N, M), k_ff (N,) by the estimator's own definition, float64."""
    estimator, args = ClosedForm(), (prior.wrapping, torch.float64)
    K_uu = prior.covariance().to_dense()
    K_fu = estimator.cross(prior.kernel, functional, prior.grid, *args).detach()
    return K_uu, K_fu, estimator.variance(prior.kernel, functional, *args).detach()


@pytest.mark.parametrize("shape", SHAPES)
def test_hip_rows_satisfy_the_whitening_equation(shape: tuple[int, ...]) -> None:
    prior = GridPrior.padded(Matern32(0.4, 1.3, dim=len(shape)), unit_grid(shape))
    functional = every_datum(len(shape))
    rows = HIPFeatures(prior, rtol=1e-12, max_steps=500, dense_below=0).rows(functional)
    K_uu, K_fu, k_ff = dense_terms(prior, functional)
    R = prior.root().to_dense().detach()
    torch.testing.assert_close(rows.phi.detach() @ R.mT, K_fu, rtol=0, atol=1e-8)
    explained = (K_fu * torch.linalg.solve(K_uu, K_fu.mT).mT).sum(-1)
    torch.testing.assert_close(rows.residual_variance.detach(), k_ff - explained, rtol=0, atol=1e-8)
    assert rows.solves.unconverged == 0
    assert rows.solves.columns == len(functional)


@pytest.mark.parametrize("shape", SHAPES)
def test_torus_rows_satisfy_the_whitening_equation_and_explain_more(shape: tuple[int, ...]) -> None:
    prior = GridPrior.padded(Matern32(0.4, 1.3, dim=len(shape)), unit_grid(shape))
    functional = every_datum(len(shape))
    rows = TorusFeatures(prior).rows(functional)
    _, K_fu, _ = dense_terms(prior, functional)
    R = prior.root().to_dense().detach()
    torch.testing.assert_close(rows.phi.detach() @ R.mT, K_fu, rtol=0, atol=1e-6)
    hip = HIPFeatures(prior, rtol=1e-12, max_steps=500, dense_below=0).rows(functional)
    assert bool((rows.residual_variance > -1e-7).all())
    assert bool((rows.residual_variance <= hip.residual_variance + 1e-7).all())


@pytest.mark.parametrize("shape", SHAPES)
def test_truncated_pcg_keeps_the_exact_residual_variance_of_its_weights(
    shape: tuple[int, ...],
) -> None:
    prior = GridPrior.padded(Matern52(0.5, 0.7, dim=len(shape)), unit_grid(shape))
    functional = every_datum(len(shape))
    features = HIPFeatures(prior, rtol=1e-12, max_steps=2, dense_below=0)
    w = features.weights(functional)[0].detach()
    rows = features.rows(functional)
    K_uu, K_fu, k_ff = dense_terms(prior, functional)
    expected = k_ff - 2 * (w * K_fu).sum(-1) + ((w @ K_uu) * w).sum(-1)
    torch.testing.assert_close(rows.residual_variance.detach(), expected, rtol=0, atol=1e-10)
    exact = k_ff - (K_fu * torch.linalg.solve(K_uu, K_fu.mT).mT).sum(-1)
    assert bool((rows.residual_variance >= exact - 1e-10).all())
    assert rows.solves.unconverged > 0


def test_cholesky_rows_are_the_textbook_ones() -> None:
    grid = unit_grid((6, 5))
    kernel, functional = Matern32(0.4, 1.3, dim=2), every_datum(2)
    rows = CholeskyFeatures(kernel, grid).rows(functional)
    points = grid.points()
    L = torch.linalg.cholesky(kernel(points[:, None] - points[None]).detach())
    K_fu = ClosedForm().cross(kernel, functional, grid, None, torch.float64).detach()
    torch.testing.assert_close(rows.phi.detach() @ L.mT, K_fu, rtol=0, atol=1e-10)
    free = CholeskyFeatures(kernel, points).rows(functional)
    torch.testing.assert_close(free.phi, rows.phi, rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", MAPS)
def test_chunks_do_not_change_the_rows(name: str) -> None:
    grid, functional = unit_grid((7, 6)), every_datum(2)
    whole = make_map(name, Matern32(0.4, dim=2), grid, torch.float64)
    row_bytes = 2**28 // whole.chunk
    small = _with_memory(whole, 5 * row_bytes + row_bytes // 2)
    assert small.chunk < len(functional)
    a, b = whole.rows(functional), small.rows(functional)
    # Which images of the wrapped kernel are negligible (1e-7) is decided per chunk.
    torch.testing.assert_close(a.phi, b.phi, rtol=0, atol=2e-6)
    torch.testing.assert_close(a.residual_variance, b.residual_variance, rtol=0, atol=2e-6)


def _with_memory(features: AbstractFeatureMap, memory: int) -> AbstractFeatureMap:
    if isinstance(features, HIPFeatures):
        return replace(features, memory=memory)
    if isinstance(features, TorusFeatures):
        return TorusFeatures(features.prior, features.estimator, memory)
    assert isinstance(features, CholeskyFeatures)
    return CholeskyFeatures(features.kernel, features.inducing, memory=memory)


def test_finer_grids_leave_less_unexplained() -> None:
    functional = PointValues(torch.rand(20, 2, dtype=torch.float64, generator=torch.Generator()))
    left = []
    for m in (5, 9, 17):
        prior = GridPrior.padded(Matern32(0.4, dim=2), unit_grid((m, m)))
        with torch.no_grad():
            rows = HIPFeatures(prior, max_steps=500).rows(functional)
        left.append(float(rows.residual_variance.mean()))
    assert left[0] > 2 * left[1] > 4 * left[2] > 0


def test_torus_features_refuse_the_minimal_embedding() -> None:
    prior = GridPrior.minimal(Matern32(0.1, dim=1), unit_grid((9,)))
    with pytest.raises(ValueError, match=r"needs the wrapped kernel of GridPrior\.padded"):
        TorusFeatures(prior)


def test_singular_inducing_points_ask_for_a_nugget() -> None:
    points = torch.zeros(3, 1, dtype=torch.float64)
    with pytest.raises(ValueError, match="pass a larger nugget"):
        CholeskyFeatures(Matern32(0.4, dim=1), points)
    assert CholeskyFeatures(Matern32(0.4, dim=1), points, nugget=1e-6).n_features == 3


def test_a_row_beyond_the_memory_budget_names_its_bytes() -> None:
    prior = GridPrior.padded(Matern32(0.4, dim=2), unit_grid((20, 20)))
    with pytest.raises(MemoryError, match=r"one row of features needs [\d,]+ bytes"):
        HIPFeatures(prior, memory=1000).rows(every_datum(2))
    assert math.prod(prior.torus_shape) == prior.n_white


@pytest.mark.parametrize("name", ["hip", "hip-dense", "torus"])
def test_data_far_outside_the_grid_are_refused(name: str) -> None:
    features = make_map(name, Matern32(0.2, dim=2), unit_grid((6, 6)), torch.float64)
    x = torch.tensor([[0.5, 0.5], [0.5, 2.5]], dtype=torch.float64)
    with pytest.raises(ValueError, match=r"1 of 2 points .* outside the grid \[0, 1\] on axis 1"):
        features.rows(PointValues(x))
    near = features.rows(PointValues(torch.tensor([[0.5, 1.1]], dtype=torch.float64)))
    assert float(near.residual_variance.detach()) > 0.1


def test_gradients_survive_a_first_use_without_them() -> None:
    features = make_map("hip-dense", Matern32(0.4, dim=2), unit_grid((6, 5)), torch.float64)
    functional = every_datum(2)
    fresh, leaves = traced(features)
    expected = torch.autograd.grad(fresh.rows(functional).phi.square().sum(), leaves)
    used, leaves = traced(features)
    with torch.no_grad():
        used.rows(functional)
    loss = used.rows(functional).phi.square().sum()
    actual = torch.autograd.grad(loss, leaves)
    torch.testing.assert_close(actual, expected)
