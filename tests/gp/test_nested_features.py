"""Features of a Gaussian field on nested grids: beside kriging by hand, the kernel, and one fine
grid."""

import itertools
import math

import pytest
import torch
from torch import Tensor

from dustmap.errors import UserError
from dustmap.gp import GridPrior, NestedGrids, NestedPrior, RegularGrid
from dustmap.gp.features import (
    AbstractFeatureMap,
    LevelResiduals,
    LocalFeatures,
    NestedFeatures,
    NodeFeatures,
    row_bytes,
)
from dustmap.gp.functionals import Derivatives, LineIntegrals, PointValues, Stacked
from dustmap.gp.kernels import AbstractKernel, Matern12, Matern32, SquaredExponential
from dustmap.linalg import SparseOperator
from tests.gp.level_cases import SIDES, grid_of, kernel_of, nested_of, owner, random_rays
from tests.gp.parameters import check_one_direction, of_parameters

DOUBLE = torch.float64


def features_of(
    nested: NestedGrids, kernel: AbstractKernel, order: int = 4, dtype: torch.dtype = DOUBLE
) -> NestedFeatures:
    return NestedFeatures(NestedPrior.of(kernel, nested, dtype=dtype), order)


def places(nested: NestedGrids, count: int, seed: int = 0) -> Tensor:
    """Places in the box of all; of every second half those in the finest grid, faces of both."""
    generator = torch.Generator().manual_seed(seed)
    far, near = nested.outer.upper[0], nested.grids[-1].upper[0]
    x = 2.0 * torch.rand(count, nested.dim, generator=generator).to(DOUBLE) - 1.0
    x = x * torch.tensor([[far], [near]], dtype=DOUBLE).repeat(count // 2, 1)
    x[0], x[1], x[2], x[3] = far, -far, near, -near
    return x


def covariance_of(features: AbstractFeatureMap, data: PointValues | LineIntegrals) -> Tensor:
    """ΦΦᵀ + Var r (N, N)."""
    rows = features.rows(data)
    return rows.phi @ rows.phi.mT + rows.residual_variance.diag()


def weights_by_hand(kernel: AbstractKernel, nested: NestedGrids, x: Tensor, order: int) -> Tensor:
    """Kriging weights (M,) of one place on the nodes around it of the finest grid that has it."""
    number = int(owner(nested, x[None]))
    grid = nested.grids[number]
    lower, spacing = (torch.tensor(v, dtype=DOUBLE) for v in (grid.lower, grid.spacing))
    last = torch.tensor(grid.shape) - 1
    cell = ((x - lower) / spacing + 1e-12).floor().long().minimum(last - 1)
    p = order if bool(((cell >= 1) & (cell <= last - 2)).all()) else 2
    nodes = [
        cell + torch.tensor(shift)
        for shift in itertools.product(range(1 - p // 2, 1 + p // 2), repeat=nested.dim)
    ]
    at = lower + torch.stack(nodes) * spacing
    w = torch.linalg.solve(kernel(at[:, None] - at), kernel(at - x))
    found = torch.zeros(grid.shape, dtype=DOUBLE)
    for node, value in zip(nodes, w, strict=True):
        found[tuple(node.tolist())] = value
    whole = torch.zeros(nested.size, dtype=DOUBLE)
    whole[nested.places[number]] = found.flatten()
    return whole


@pytest.mark.parametrize("order", [2, 4])
@pytest.mark.parametrize("dim", [1, 2, 3])
def test_places_are_kriged_from_the_finest_grid(dim: int, order: int) -> None:
    kernel, nested = Matern32(2.0, 0.7, dim=dim), nested_of(dim)
    x = places(nested, 40)
    rows = NodeFeatures(kernel, nested, DOUBLE, order).rows(PointValues(x))
    expected = torch.stack([weights_by_hand(kernel, nested, place, order) for place in x])
    torch.testing.assert_close(rows.phi, expected, rtol=0, atol=1e-9)
    for place, left in zip(x, rows.residual_variance, strict=True):
        w = weights_by_hand(kernel, nested, place, order)
        met = w.nonzero().squeeze(-1)
        k = kernel(nested.points()[met] - place)
        assert float(left) == pytest.approx(float(0.7 - w[met] @ k), abs=1e-9)


@pytest.mark.parametrize(("dim", "order"), [(1, 4), (2, 2), (2, 4), (3, 2)])
def test_rays_are_sums_of_their_places(dim: int, order: int) -> None:
    """Within what two steps a cell leave: 3 % of the std of the integral."""
    kernel, nested = Matern32(2.0, dim=dim), nested_of(dim)
    features = features_of(nested, kernel, order)
    rays, steps = random_rays(dim, nested.outer.upper[0], 12), 400
    share = (torch.arange(steps).to(DOUBLE) + 0.5) / steps
    x = rays.at(rays.edges[:, 1:] * share).reshape(-1, dim)
    W = features.at_nodes.operator(PointValues(x))
    assert isinstance(W, SparseOperator)
    mean = torch.zeros(len(rays), nested.size, dtype=DOUBLE)
    for i in range(len(rays)):
        unit = torch.zeros(len(x), dtype=DOUBLE)
        unit[i * steps : (i + 1) * steps] = rays.edges[i, 1] / steps
        mean[i] = W.rmatmul(unit)
    K = features.prior.covariance_products()
    apart = features.at_nodes.operator(rays).to_dense() - mean
    error = (K.matmul(apart) * apart).sum(1).sqrt()
    assert bool((error < 0.03 * (K.matmul(mean) * mean).sum(1).sqrt()).all())


@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE])
@pytest.mark.parametrize("dim", [1, 2])
def test_operator_and_products_are_those_of_the_rows(dim: int, dtype: torch.dtype) -> None:
    nested, kernel = nested_of(dim), Matern32(2.0, dim=dim)
    features = features_of(nested, kernel, dtype=dtype)
    rays = random_rays(dim, nested.outer.upper[0], 7)
    data = Stacked((rays, PointValues(places(nested, 6))))[torch.tensor([9, 0, 12, 5, 3, 3])]
    rows, operator = features.rows(data), features.operator(data)
    generator, atol = torch.Generator().manual_seed(5), 1e-10 if dtype == DOUBLE else 2e-4
    v = torch.randn(3, features.n_features, generator=generator).to(dtype)
    y = torch.randn(3, len(data), generator=generator).to(dtype)
    assert rows.phi.dtype == operator.dtype == dtype
    torch.testing.assert_close(operator.matmul(v), v @ rows.phi.mT, rtol=0, atol=atol)
    torch.testing.assert_close(operator.rmatmul(y), y @ rows.phi, rtol=0, atol=atol)
    torch.testing.assert_close(features.products(data, v), v @ rows.phi.mT, rtol=0, atol=atol)
    left = features.residual_variance(data)
    torch.testing.assert_close(left, rows.residual_variance, rtol=1e-6, atol=1e-12)
    torch.testing.assert_close(
        features.at_nodes.operator(data).matmul(features.prior.root().matmul(v)),
        v @ rows.phi.mT,
        rtol=0,
        atol=atol,
    )


def test_no_data_have_no_rows_and_other_data_are_refused() -> None:
    features = features_of(nested_of(2), Matern32(2.0, dim=2))
    none = PointValues(torch.zeros(0, 2, dtype=DOUBLE))
    assert features.rows(none).phi.shape == (0, features.n_features)
    assert features.operator(none).shape == (0, features.n_features)
    x = torch.zeros(1, 2, dtype=DOUBLE)
    with pytest.raises(UserError, match="outside the box"):
        features.rows(PointValues(x + 100.0))
    with pytest.raises(UserError, match="not of Derivatives"):
        features.operator(Derivatives(x, x + math.sqrt(0.5)))


def test_recomputed_rows_are_the_stored_ones_and_as_many_as_planned() -> None:
    nested, rays = nested_of(2), random_rays(2, 9.0, 300)
    for order in (2, 4):
        kept = NodeFeatures(Matern32(2.0, dim=2), nested, torch.float32, order)
        stored = kept.operator(rays)
        assert isinstance(stored, SparseOperator)
        assert kept.plan_bytes(rays) == pytest.approx(stored.bytes, rel=0.02)
        assert row_bytes(rays, nested, order, torch.float32) == pytest.approx(stored.bytes, rel=0.2)
        anew = NodeFeatures(kept.kernel, nested, torch.float32, order, memory=1).operator(rays)
        u = torch.randn(nested.size, generator=torch.Generator().manual_seed(0))
        torch.testing.assert_close(anew.matmul(u), stored.matmul(u), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dim", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_rows_and_residuals_are_differentiable_in_the_kernel(dim: int) -> None:
    nested = NestedGrids((grid_of(4, 1, dim), grid_of(2, 2, dim)))
    data = Stacked((random_rays(dim, 4.0, 2), PointValues(places(nested, 4))))
    base = NestedPrior.of(Matern32((1.0,) * dim), nested)

    def outputs(kernel: AbstractKernel) -> tuple[Tensor, Tensor]:
        rows = NestedFeatures(base.on_torus(kernel, base.torus_shape)).rows(data)
        return rows.phi, rows.residual_variance

    scales = torch.linspace(0.7, 1.0, dim, dtype=DOUBLE, requires_grad=True)
    variance = torch.tensor(0.3, dtype=DOUBLE, requires_grad=True)
    objective = of_parameters(Matern32((1.0,) * dim), outputs)
    check_one_direction(objective, (scales, variance), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("dim", "ratio", "length"),
    [(1, 2, 4.0), (1, 4, 4.0), (2, 2, 5.0), pytest.param(3, 2, 6.0, marks=pytest.mark.slow)],
)
def test_covariances_of_any_two_places_are_those_of_the_kernel(
    dim: int, ratio: int, length: float
) -> None:
    """Within 2 % of the variance, where finer grids fade and at all faces, too: of a kernel that
    two nodes per axis, which the outermost cells have, resolve that well."""
    kernel, nested = Matern32(length, dim=dim), nested_of(dim, ratio)
    x = places(nested, 160 if dim < 3 else 60)
    found = covariance_of(features_of(nested, kernel), PointValues(x))
    assert float((found - kernel(x[:, None] - x)).abs().max()) < 0.02


@pytest.mark.parametrize(
    ("dim", "ratio", "name", "length"),
    [
        (1, 2, "matern32", 4.0),
        (1, 4, "matern32", 3.0),
        (1, 4, "matern12", 3.0),
        (2, 2, "matern32", 4.0),
        (2, 2, "matern12", 3.0),
        pytest.param(3, 2, "matern32", 4.0, marks=pytest.mark.slow),
    ],
)
def test_posteriors_are_those_of_one_fine_grid_where_both_resolve(
    dim: int, ratio: int, name: str, length: float
) -> None:
    """Rays from the middle, dense algebra: means within 0.1 standard deviations (root mean square
    within 0.05), these within 3 %."""
    kernel, noise = kernel_of(name, dim, length), 0.1
    far, near = SIDES[dim] if dim < 3 else (6, 4)
    nested = NestedGrids((grid_of(far, 1, dim), grid_of(near, ratio, dim)))
    fine = GridPrior.padded(kernel, grid_of(far, ratio, dim), padding=4.0 if dim < 3 else 2.0)
    generator = torch.Generator().manual_seed(3)
    count = 150 if dim < 3 else 60
    direction = torch.randn(count, dim, generator=generator).to(DOUBLE)
    reach = 0.99 * far * torch.rand(count, 1, generator=generator).to(DOUBLE)
    rays = LineIntegrals.from_observer(reach * direction / direction.norm(dim=1, keepdim=True))
    inside = 1.8 * (near - 2) * (torch.rand(100, dim, generator=generator).to(DOUBLE) - 0.5)
    y, found = torch.zeros(0, dtype=DOUBLE), []
    for features in (LocalFeatures(fine), features_of(nested, kernel)):
        seen, asked = features.rows(rays), features.rows(PointValues(inside))
        sigma = noise**2 + seen.residual_variance
        if len(y) == 0:
            white = torch.randn(features.n_features, generator=generator).to(DOUBLE)
            y = seen.phi @ white + sigma.sqrt() * torch.randn(count, generator=generator)
        A, B = seen.phi @ seen.phi.mT + sigma.diag(), asked.phi @ seen.phi.mT
        gain = torch.linalg.solve(A, B.mT).mT
        prior = asked.phi.square().sum(1) + asked.residual_variance
        found.append((gain @ y, (prior - (gain * B).sum(1)).sqrt()))
    (mean, std), (levelled, levelled_std) = found
    apart = (levelled - mean) / std
    assert float(apart.abs().max()) < 0.1
    assert float(apart.square().mean().sqrt()) < 0.05
    assert float((levelled_std / std).log().abs().max()) < 0.03


def test_residuals_of_a_beam_are_alike_and_those_of_others_are_not() -> None:
    nested = nested_of(3)
    features = NodeFeatures(Matern12(1.5, dim=3), nested, DOUBLE, order=2)
    ends = torch.tensor([[4.9, 0.3, 0.3], [4.9, 0.35, 0.35], [0.3, 4.9, 0.3]]).to(DOUBLE)
    rays = LineIntegrals.from_observer(ends)
    draws = LevelResiduals.of(features, seed=1, count=2000)
    unit = draws.unit(rays, DOUBLE)
    torch.testing.assert_close(unit.square().mean(0), torch.ones(3).to(DOUBLE), rtol=0, atol=0.1)
    correlation = torch.corrcoef(unit.mT)
    assert float(correlation[0, 1]) > 0.9
    assert float(correlation[0, 2].abs()) < 0.3
    some = draws.chosen(torch.tensor([7, 2])).unit(rays, DOUBLE)
    torch.testing.assert_close(some, unit[[7, 2]], rtol=0, atol=0)


@pytest.mark.parametrize("dim", [1, 2])
@pytest.mark.parametrize("length", [2.0, 4.0])
def test_places_on_a_plane_of_nodes_have_no_weight_on_the_opposite_face(
    length: float, dim: int
) -> None:
    """A smooth kernel takes weights from all nodes of a stencil, at a node too."""
    far = RegularGrid.from_bounds((-8.0,) * dim, (8.0,) * dim, (17,) * dim)
    near = RegularGrid.from_bounds((-3.0,) * dim, (3.0,) * dim, (25,) * dim)
    prior = NestedPrior.of(SquaredExponential(length, dim=dim), NestedGrids((far, near)))
    features = NestedFeatures(prior)
    on = torch.full((2, dim), 0.1, dtype=torch.float64)
    on[0, -1], on[1, -1] = 2.75, -2.75  # the nodes next to the faces
    whole = features.rows(PointValues(on))
    variance = whole.phi.square().sum(1) + whole.residual_variance
    assert ((variance - 1.0).abs() < 0.005).all()
    weights = features.at_nodes.rows(PointValues(on)).phi[:, far.size :]
    last = near.points()[:, -1]
    assert weights[0, last < 1.9].abs().max() < 1e-12
    assert weights[1, last > -1.9].abs().max() < 1e-12


def test_lengths_of_their_own_for_each_axis_are_refused() -> None:
    with pytest.raises(UserError, match=r"one length for all axes, got \[6.0, 1.0\]"):
        NestedPrior.of(Matern32((6.0, 1.0)), nested_of(2, 2))
