"""Nested grids: their nodes, rows of data on them, and the prior, beside dense algebra and beside
one fine grid."""

import math

import pytest
import torch
from torch import Tensor

from dustmap.errors import UserError
from dustmap.gp import (
    GridPrior,
    NestedGrids,
    NestedPrior,
    RegularGrid,
    tori_for,
    zero_covariance,
)
from dustmap.gp._nested_operators import NestedCovariance
from dustmap.gp.features import interpolation, row_bytes
from dustmap.gp.functionals import LineIntegrals, PointValues, Stacked
from dustmap.gp.kernels import AbstractKernel, Matern12, Matern32, ProjectedKernel
from dustmap.linalg import SparseOperator
from tests.gp.level_cases import SIDES, grid_of, kernel_of, nested_of, owner, random_rays, seen


@pytest.mark.parametrize("dim", [1, 2, 3])
def test_rows_of_rays_are_sums_over_their_points(dim: int) -> None:
    far, mid = grid_of(8, 1, dim), grid_of(4, 2, dim)
    near = RegularGrid((-2.0,) * dim, (0.25,) * dim, (13,) * dim)
    nested = NestedGrids((far, mid, near))
    wave = nested.points() @ torch.linspace(0.4, 0.7, dim).double()
    density = 2.0 + wave.sin()
    plain = random_rays(dim, 8.0, 30)
    weights = torch.tensor([[1.0, 0.3]]).double().expand(30, 2)
    edges = plain.edges[:, -1:] * torch.tensor([0.05, 0.6, 1.0]).double()
    rays = LineIntegrals(plain.origin, plain.direction, edges, weights)
    got = interpolation(rays, nested, dtype=torch.float64).matmul(density)
    steps = 4000
    share = (torch.arange(steps).double() + 0.5) / steps
    expected = torch.zeros(len(rays), dtype=torch.float64)
    for j in range(2):
        length = rays.edges[:, j + 1] - rays.edges[:, j]
        places = rays.at(rays.edges[:, j : j + 1] + length[:, None] * share)
        points = PointValues(places.reshape(-1, dim))
        values = interpolation(points, nested, dtype=torch.float64).matmul(density)
        expected += rays.weights[:, j] * length * values.reshape(-1, steps).mean(1)
    # The interpolants of two levels differ at a face by what the coarser leaves out of the wave.
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    ones = interpolation(rays, nested, dtype=torch.float64).matmul(torch.ones_like(density))
    torch.testing.assert_close(ones, rays.moments()[:, 0], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_stacked_data_have_the_rows_of_their_parts(dtype: torch.dtype) -> None:
    nested = nested_of(2)
    rays, x = random_rays(2, 9.0, 7), 17.0 * (torch.rand(5, 2).double() - 0.5)
    stacked = Stacked((rays, PointValues(x)))
    rows = interpolation(stacked, nested, dtype=dtype).to_dense()
    parts = [interpolation(part, nested, dtype=dtype).to_dense() for part in stacked.parts]
    torch.testing.assert_close(rows, torch.cat(parts), rtol=1e-6, atol=0)


def test_planned_bytes_are_those_of_the_rows() -> None:
    nested, rays = nested_of(3), random_rays(3, 5.0, 300)
    rows = interpolation(rays, nested, dtype=torch.float32)
    assert isinstance(rows, SparseOperator)
    planned = row_bytes(rays, nested, order=2, dtype=torch.float32)
    assert planned == pytest.approx(rows.bytes, rel=0.02)


def test_the_finest_grid_has_a_place() -> None:
    nested = NestedGrids((grid_of(8, 1, 2), grid_of(4, 2, 2), grid_of(2, 4, 2)))
    x = torch.tensor([[0.0, 0.0], [3.0, 1.0], [-7.5, 0.0], [2.0, 2.0], [8.1, 0.0]]).double()
    assert owner(nested, x).tolist() == [2, 1, 0, 2, 0]
    assert nested.size == 17**2 + 17**2 + 17**2
    assert nested.points().shape == (nested.size, 2)


@pytest.mark.parametrize(
    ("fine", "word"),
    [
        (RegularGrid((-4.0,), (0.4,), (21,)), "2, 3"),
        (RegularGrid((-3.5,), (0.5,), (15,)), "on a node"),
        (RegularGrid((-9.0,), (0.5,), (37,)), "outside"),
        (RegularGrid((-2.0,) * 2, (0.5,) * 2, (9,) * 2), "number of axes"),
    ],
)
def test_grids_that_are_not_nested_are_refused(fine: RegularGrid, word: str) -> None:
    with pytest.raises(UserError, match=word):
        NestedGrids((grid_of(8, 1, 1), fine))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("dim", "ratio"), [(1, 4), (2, 2), (3, 2)])
def test_root_and_covariance_are_one(dim: int, ratio: int, dtype: torch.dtype) -> None:
    nested = NestedGrids((grid_of(4, 1, dim), grid_of(2, ratio, dim)))
    prior = NestedPrior.of(Matern32(1.5, 0.7, dim=dim), nested, padding=1.0, dtype=dtype)
    root, K = prior.root(), prior.covariance_products().to_dense()
    assert root.shape == (nested.size, prior.n_white)
    some = torch.randn(7, nested.size, generator=torch.Generator().manual_seed(0)).to(dtype)
    atol = 2e-5 if dtype == torch.float32 else 1e-11
    torch.testing.assert_close(root.matmul(root.rmatmul(some)), some @ K, rtol=0, atol=atol)
    torch.testing.assert_close(K, K.mT, rtol=0, atol=atol)
    white = torch.randn(prior.n_white, generator=torch.Generator().manual_seed(1)).to(dtype)
    left = (some[0] * root.matmul(white)).sum()
    assert float(left) == pytest.approx(float((root.rmatmul(some[0]) * white).sum()), rel=1e-4)


@pytest.mark.parametrize(
    ("dim", "ratio", "name", "length", "most"),
    [
        (1, 4, "matern32", 3.0, 0.006),
        (1, 2, "matern32", 2.0, 0.015),
        (1, 4, "smooth", 6.0, 0.001),
        (2, 2, "matern32", 2.0, 0.015),
        (2, 4, "matern32", 3.0, 0.007),
        pytest.param(3, 2, "matern32", 3.0, 0.006, marks=pytest.mark.slow),
    ],
)
def test_covariances_are_those_of_the_kernel(
    dim: int, ratio: int, name: str, length: float, most: float
) -> None:
    """Between any two nodes, those of the faces included; a kernel of variance 1."""
    kernel, nested = kernel_of(name, dim, length), nested_of(dim, ratio)
    K = NestedPrior.of(kernel, nested).covariance_products().to_dense()
    here = nested.points()[seen(nested)]
    expected = kernel(here[:, None] - here)
    found = K[seen(nested)][:, seen(nested)]
    assert float((found - expected).abs().max()) < most
    torch.testing.assert_close(found.diagonal(), expected.diagonal(), rtol=0.01, atol=0)


@pytest.mark.parametrize("name", ["matern12", "matern32"])
def test_grids_do_not_fade_at_faces_they_share(name: str) -> None:
    """Three grids with one upper face; short lengths, which the coarse ones do not resolve."""
    sides = ((108.0, 9.0), (63.0, 3.0), (30.0, 1.0))
    grids = [RegularGrid((-side,), (h,), (round(side / h) + 1,)) for side, h in sides]
    K = NestedPrior.of(kernel_of(name, 1, 8.0), NestedGrids(tuple(grids))).covariance_products()
    x = grids[-1].points()[-15:]
    found, expected = K.to_dense()[-15:, -15:], kernel_of(name, 1, 8.0)(x[:, None] - x)
    torch.testing.assert_close(found, expected, rtol=0, atol=0.003)


def test_a_rough_field_has_its_variance_at_every_node() -> None:
    nested = NestedGrids((grid_of(24, 1, 1), grid_of(12, 2, 1), grid_of(6, 8, 1)))
    K = NestedPrior.of(Matern12(3.0, dim=1), nested).covariance_products().to_dense()
    torch.testing.assert_close(
        K.diagonal()[seen(nested)], torch.ones(int(seen(nested).sum())).double(), rtol=0.02, atol=0
    )


@pytest.mark.parametrize(
    ("name", "length", "below", "near"),
    [
        ("matern12", 15.0, 0.934, 0.828),
        ("matern12", 30.0, 0.961, 0.895),
        ("matern12", 60.0, 0.979, 0.945),
        ("matern32", 15.0, 0.938, 0.833),
        ("matern32", 30.0, 0.979, 0.941),
    ],
)
def test_short_lengths_lose_variance_where_a_grid_begins(
    name: str, length: float, below: float, near: float
) -> None:
    """A node below a face, and two nodes from three of them; h_0 = 30."""
    grids = tuple(
        RegularGrid.from_bounds((-half,) * 3, (half,) * 3, (round(2 * half / h) + 1,) * 3)
        for half, h in ((180.0, 30.0), (90.0, 10.0))
    )
    nested = NestedGrids(grids)
    root = NestedPrior.of(kernel_of(name, 3, length), nested, padding=2.0).root()
    fine = torch.arange(19**3).reshape(19, 19, 19) + nested.places[1].start
    unit = torch.zeros(3, nested.size, dtype=torch.float64)
    for row, at in zip(unit, ((1, 9, 9), (2, 2, 2), (9, 9, 9)), strict=True):
        row[fine[at]] = 1.0
    variances = root.rmatmul(unit).square().sum(1).tolist()
    assert variances == pytest.approx([below, near, 1.0], abs=0.003)


@pytest.mark.parametrize("dim", [1, 2])
def test_away_from_finer_grids_the_coarsest_is_a_grid_of_its_own(dim: int) -> None:
    kernel, nested = Matern32(2.0, 0.5, dim=dim), nested_of(dim)
    K = NestedPrior.of(kernel, nested, padding=6.0).covariance_products().to_dense()
    alone = GridPrior.padded(kernel, nested.outer, padding=6.0).covariance().to_dense()
    outside = seen(nested)[: nested.outer.size]
    found, expected = (each[: nested.outer.size, : nested.outer.size] for each in (K, alone))
    torch.testing.assert_close(
        found[outside][:, outside], expected[outside][:, outside], rtol=0, atol=2e-3
    )


def test_products_before_there_is_a_kernel_are_those_of_the_prior() -> None:
    """The same operators of the same shapes, for the time they take; also of one grid."""
    nodes, kernel = nested_of(2), kernel_of("matern32", 2, 2.0)
    tori = tori_for(kernel, nodes, 4.0)
    K = NestedPrior.of(kernel, nodes, dtype=torch.float32).covariance_products()
    zero = zero_covariance(nodes, tori, torch.float32)
    assert isinstance(K, NestedCovariance)
    assert isinstance(zero, NestedCovariance)
    assert [(type(b), b.shape) for b in zero.blocks] == [(type(b), b.shape) for b in K.blocks]
    grid = nodes.grids[-1]
    one = zero_covariance(grid, tori_for(kernel, grid, 4.0), torch.float32)
    assert one.shape == GridPrior.padded(kernel, grid, padding=4.0).covariance_products().shape
    assert not one.matmul(torch.ones(grid.size)).any()


@pytest.mark.parametrize("projected", [False, True])
def test_slopes_are_differences_of_covariances(projected: bool) -> None:
    kernel: AbstractKernel = Matern32(2.0, 0.5, dim=2)
    longer: AbstractKernel = Matern32(2.002, 0.5, dim=2)
    if projected:
        kernel, longer = (ProjectedKernel.of(each, 0.4) for each in (kernel, longer))
    nested = NestedGrids((grid_of(4, 1, 2), grid_of(2, 2, 2)))
    prior = NestedPrior.of(kernel, nested)
    slopes = prior.slopes([longer, kernel], 1e-3)
    x = torch.randn(3, nested.size, generator=torch.Generator().manual_seed(0)).double()
    change = prior.with_kernel(longer).covariance_products().to_dense()
    change = (change - prior.covariance_products().to_dense()) / 1e-3
    products = slopes.products(x[0])
    torch.testing.assert_close(products[0], change @ x[0], rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(products[1], torch.zeros_like(x[0]), rtol=0, atol=1e-12)
    forms = slopes.quadratic(x)
    torch.testing.assert_close(forms[0], ((x @ change) * x).sum(1), rtol=1e-6, atol=1e-8)
    assert slopes.quadratic(x[:0]).shape == (2, 0)  # of a rank that has no vector


@pytest.mark.parametrize("dim", [1, 2, 3])
def test_spectra_end_in_zeros_and_in_nothing_near_them(dim: int) -> None:
    """Products of a vector and an eigenvalue that passes for 0 are denormal numbers in float32."""
    spectrum = NestedPrior.of(Matern12(4.0, dim=dim), nested_of(dim)).spectra[0]
    positive = spectrum[spectrum > 0.0]
    assert 0 < len(positive) < spectrum.numel()
    assert float(positive.min()) > 1e-25 * float(spectrum.max())


def test_the_first_torus_grows_with_the_length_and_the_others_do_not() -> None:
    nested = nested_of(1)
    short, long = (NestedPrior.of(Matern32(v, dim=1), nested) for v in (1.0, 6.0))
    assert long.torus_shape > short.torus_shape
    assert long.tori[1:] == short.tori[1:]
    moved = short.on_torus(long.kernel, long.torus_shape)
    torch.testing.assert_close(
        moved.covariance_products().to_dense(), long.covariance_products().to_dense()
    )
    assert moved.n_white == long.n_white == short.white_on(long.torus_shape)


@pytest.mark.parametrize(
    ("dim", "ratio", "length", "shift", "ratio_of_stds"),
    [(1, 2, 4.0, 0.02, 0.005), (1, 4, 3.0, 0.03, 0.005), (2, 2, 4.0, 0.05, 0.01)],
)
def test_posteriors_are_those_of_one_fine_grid_where_both_resolve(
    dim: int, ratio: int, length: float, shift: float, ratio_of_stds: float
) -> None:
    """Rays from the middle through a Gaussian field; dense algebra on either."""
    far, near = SIDES[dim]
    nested, fine = nested_of(dim, ratio), grid_of(far, ratio, dim)
    kernel, noise = Matern32(length, dim=dim), 0.1
    generator = torch.Generator().manual_seed(3)
    directions = torch.randn(150, dim, generator=generator).double()
    reach = far * torch.rand(150, 1, generator=generator).double()
    rays = LineIntegrals.from_observer(
        0.99 * reach * directions / directions.norm(dim=1, keepdim=True)
    )
    inside = 1.8 * (near - 2) * (torch.rand(200, dim, generator=generator).double() - 0.5)
    places = PointValues((inside * ratio).round() / ratio)
    priors = GridPrior.padded(kernel, fine), NestedPrior.of(kernel, nested)
    y: Tensor | None = None
    found = []
    for prior in priors:
        K = prior.covariance_products().to_dense()
        L, P = (
            interpolation(f, prior.lattice, dtype=torch.float64).to_dense() for f in (rays, places)
        )
        if y is None:
            white = torch.randn(prior.n_white, generator=generator).double()
            y = L @ prior.root().matmul(white)
            y = y + noise * torch.randn(len(y), generator=generator).double()
        A, B = L @ K @ L.mT + noise**2 * torch.eye(len(y)).double(), P @ K @ L.mT
        gain = torch.linalg.solve(A, B.mT).mT
        found.append((gain @ y, ((P @ K @ P.mT).diagonal() - (gain * B).sum(1)).sqrt()))
    (mean, std), (levelled, levelled_std) = found
    assert float(((levelled - mean) / std).square().mean().sqrt()) < shift
    assert float((levelled_std / std).log().abs().median()) < ratio_of_stds
    assert math.isclose(float((levelled_std / std).mean()), 1.0, abs_tol=0.03)


@pytest.mark.parametrize("padding", [0.0, -1.0, math.nan, math.inf])
def test_a_prior_without_padding_is_refused(padding: float) -> None:
    with pytest.raises(UserError, match="padding must be positive and finite"):
        NestedPrior.of(Matern32(10.0, dim=1), nested_of(1), padding=padding)
