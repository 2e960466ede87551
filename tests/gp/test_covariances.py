"""Covariances of values, derivatives, sums over points and stacks; wrapping; dtypes; refusals."""

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dustmap.gp import RegularGrid
from dustmap.gp.covariances import (
    AbstractEstimator,
    ClosedForm,
    MonteCarlo,
    Quadrature,
    Wrapping,
    plain_lags,
    wrapped_lags,
)
from dustmap.gp.functionals import (
    AbstractFunctional,
    Derivatives,
    GaussLegendre,
    LineIntegrals,
    PointMeasure,
    PointValues,
    Stacked,
)
from dustmap.gp.kernels import (
    AbstractKernel,
    Matern12,
    Matern32,
    Matern52,
    SquaredExponential,
)
from tests.contracts.functionals import uniform, unit

Make = Callable[..., AbstractKernel]
ESTIMATORS: list[AbstractEstimator] = [ClosedForm(), Quadrature(6), MonteCarlo(5, 0)]
SMOOTH = [Matern32, Matern52, SquaredExponential]
EVERY = [Matern12, *SMOOTH]


def rays(n: int, dim: int, seed: int = 0) -> LineIntegrals:
    edges = uniform(n, 3, seed=seed + 1).sort(dim=-1).values
    return LineIntegrals(
        uniform(n, dim, seed=seed), unit(n, dim, seed), edges, uniform(n, 2, seed=seed + 2)
    )


def mixed(dim: int, n: int = 4, seed: int = 0) -> Stacked:
    values = PointValues(uniform(n, dim, seed=seed))
    slopes = Derivatives(uniform(n, dim, seed=seed + 1), unit(n, dim, seed))
    return Stacked((values, slopes, rays(n, dim, seed)))


def grid(dim: int) -> RegularGrid:
    return RegularGrid.from_bounds((-0.1,) * dim, (1.1,) * dim, (5, 4, 3)[:dim])


def wrapped_value(kernel: AbstractKernel, dx: Tensor, periods: tuple[float, ...]) -> Tensor:
    """Σ_j k(dx + jL) over |j| <= 8 per axis."""
    cells = torch.tensor(list(itertools.product(range(-8, 9), repeat=dx.shape[-1])))
    shifts = cells * torch.tensor(periods, dtype=dx.dtype)
    total: Tensor = kernel(dx[..., None, :] + shifts).detach().sum(-1)
    return total


@pytest.mark.parametrize("dim", [1, 2, 3])
@pytest.mark.parametrize("make", EVERY)
def test_values_are_the_kernel(make: Make, dim: int) -> None:
    kernel = make(0.4, 1.3, dim)
    x, y = uniform(7, dim), uniform(5, dim, seed=1)
    expected = kernel(x[:, None] - y[None])
    on_grid = kernel(x[:, None] - grid(dim).points()[None])
    for estimator in ESTIMATORS:
        f, g = PointValues(x), PointValues(y)
        torch.testing.assert_close(estimator.cross(kernel, f, y), expected)
        torch.testing.assert_close(estimator.between(kernel, f, g), expected)
        torch.testing.assert_close(estimator.cross(kernel, f, grid(dim)), on_grid)
        variance = estimator.variance(kernel, f)
        torch.testing.assert_close(variance, torch.full((7,), 1.3, dtype=torch.float64))


@pytest.mark.parametrize("dim", [1, 2, 3])
@pytest.mark.parametrize("make", SMOOTH)
def test_derivatives_are_limits_of_differences(make: Make, dim: int) -> None:
    """(ρ(x + h v) - ρ(x - h v)) / 2h as a PointMeasure has the covariances of ∂_v ρ(x)."""
    kernel = make([0.5 + 0.2 * d for d in range(dim)], 1.3)
    x, v, h = uniform(4, dim), unit(4, dim), 1e-4
    ends = torch.stack([x + h * v, x - h * v], dim=1)
    difference = PointMeasure(ends, torch.tensor([[0.5 / h, -0.5 / h]]).expand(4, 2))
    slopes = Derivatives(x, v)
    estimator = ClosedForm()
    for other in (grid(dim), uniform(5, dim, seed=9)):
        expected = estimator.cross(kernel, difference, other)
        torch.testing.assert_close(
            estimator.cross(kernel, slopes, other), expected, rtol=0, atol=2e-6
        )
    tolerance = 3e-3 if make is Matern32 else 1e-5  # Matérn-3/2: k'' has a kink at zero
    between = estimator.between(kernel, slopes, slopes)
    differences = estimator.between(kernel, difference, difference)
    torch.testing.assert_close(between, differences, rtol=tolerance, atol=tolerance)
    mixed_sides = estimator.between(kernel, slopes, difference)
    torch.testing.assert_close(mixed_sides, differences, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(between.diagonal(), estimator.variance(kernel, slopes))


@pytest.mark.parametrize("dim", [1, 2, 3])
def test_stacks_agree_with_their_parts_in_every_order(dim: int) -> None:
    kernel = Matern52(0.5, 1.0, dim) + Matern32(1.0, 0.5, dim)
    data = mixed(dim)
    picked = torch.tensor([11, 3, 3, 7, 0])
    for estimator in ESTIMATORS:
        cross = estimator.cross(kernel, data, grid(dim))
        parts = [estimator.cross(kernel, part, grid(dim)) for part in data.parts]
        torch.testing.assert_close(cross, torch.cat(parts), rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(
            estimator.cross(kernel, data[picked], grid(dim)), cross[picked], rtol=1e-12, atol=1e-14
        )
        between = estimator.between(kernel, data, data)
        torch.testing.assert_close(between, between.T, rtol=1e-6, atol=1e-6)
        some = estimator.between(kernel, data[picked], data)
        torch.testing.assert_close(some, between[picked], rtol=1e-6, atol=1e-6)
        variance = estimator.variance(kernel, data)
        torch.testing.assert_close(variance, between.diagonal(), rtol=1e-9, atol=1e-12)
        assert torch.linalg.eigvalsh(between).min() > -1e-8


@pytest.mark.parametrize("dim", [1, 2, 3])
@pytest.mark.parametrize("make", EVERY)
def test_wrapped_covariances_are_sums_over_images(make: Make, dim: int) -> None:
    kernel = make([0.15 + 0.05 * d for d in range(dim)], 1.3)
    periods = (1.4, 1.5, 1.6)[:dim]
    x, y = uniform(6, dim), uniform(4, dim, seed=1)
    f, g, torus = PointValues(x), PointValues(y), Wrapping(periods)
    on_grid = wrapped_value(kernel, x[:, None] - grid(dim).points()[None], periods)
    to_points = wrapped_value(kernel, x[:, None] - y[None], periods)
    own = wrapped_value(kernel, torch.zeros(6, dim, dtype=torch.float64), periods)
    for estimator in ESTIMATORS:
        torch.testing.assert_close(
            estimator.cross(kernel, f, grid(dim), torus), on_grid, rtol=0, atol=1e-6
        )
        torch.testing.assert_close(
            estimator.between(kernel, f, g, torus), to_points, rtol=0, atol=1e-6
        )
        torch.testing.assert_close(estimator.variance(kernel, f, torus), own, rtol=0, atol=1e-6)


@pytest.mark.parametrize("dim", [1, 2, 3])
def test_wrapped_derivatives_are_limits_of_differences(dim: int) -> None:
    kernel, torus = Matern52(0.3, 1.0, dim), Wrapping((1.5,) * dim)
    x, v, h = uniform(4, dim), unit(4, dim), 1e-4
    ends = torch.stack([x + h * v, x - h * v], dim=1)
    difference = PointMeasure(ends, torch.tensor([[0.5 / h, -0.5 / h]]).expand(4, 2))
    estimator, slopes = ClosedForm(), Derivatives(x, v)
    expected = estimator.cross(kernel, difference, grid(dim), torus)
    torch.testing.assert_close(
        estimator.cross(kernel, slopes, grid(dim), torus), expected, rtol=0, atol=1e-5
    )
    expected = estimator.between(kernel, difference, difference, torus)
    between = estimator.between(kernel, slopes, slopes, torus)
    torch.testing.assert_close(between, expected, rtol=0, atol=2e-5)
    torch.testing.assert_close(between.diagonal(), estimator.variance(kernel, slopes, torus))


@pytest.mark.parametrize("shape", [(12,), (13,), (8, 9), (6, 5, 4)])
@pytest.mark.parametrize("make", EVERY)
def test_wrapped_lags_match_images_and_have_a_positive_spectrum(
    make: Make, shape: tuple[int, ...]
) -> None:
    dim = len(shape)
    spacing = (0.2, 0.25, 0.3)[:dim]
    kernel = make([0.25 + 0.05 * d for d in range(dim)], 1.3)
    table = wrapped_lags(kernel, spacing, shape)
    assert table.shape == shape
    assert table.dtype == torch.float64
    lags = RegularGrid((0.0,) * dim, spacing, shape).points()
    periods = tuple(m * h for m, h in zip(shape, spacing, strict=True))
    expected = wrapped_value(kernel, lags, periods).reshape(shape)
    torch.testing.assert_close(table, expected, rtol=0, atol=1e-10)
    spectrum = torch.fft.rfftn(table)
    assert spectrum.imag.abs().max() < 1e-12 * spectrum.real.max()
    assert spectrum.real.min() > -1e-13 * spectrum.real.max()


@pytest.mark.parametrize("dim", [1, 2, 3])
def test_plain_lags_are_the_first_column(dim: int) -> None:
    kernel, nodes = Matern32(0.4, 1.3, dim), grid(dim)
    column = kernel(nodes.points() - nodes.points()[:1]).reshape(nodes.shape)
    torch.testing.assert_close(plain_lags(kernel, nodes.spacing, nodes.shape), column)


def test_a_torus_node_in_the_padding_sees_data_through_the_boundary() -> None:
    """The nearest image counts: a point at the lower face is close to the last torus node."""
    kernel, torus = Matern32(0.1, 1.0, 1), Wrapping((1.0,))
    nodes = RegularGrid((0.0,), (0.1,), (10,))
    K = ClosedForm().cross(kernel, PointValues(torch.zeros(1, 1)), nodes, torus)
    torch.testing.assert_close(K[0, 1:], K[0, 1:].flip(0))


@pytest.mark.parametrize("size", [10**3, 10**4, 10**6])
def test_float32_survives_fine_grids(size: int) -> None:
    """Relative error at the kernel's own scale, ℓ = 2h, on [1, 2]: coordinates cast to float32
    before the subtraction would be off by 1 % at a million nodes."""
    nodes = RegularGrid.from_bounds((1.0,), (2.0,), (size,))
    kernel = Matern32(2.0 / size, 1.0, 1)
    f = PointValues(1 + uniform(5, 1))
    exact = ClosedForm().cross(kernel, f, nodes)
    single = ClosedForm().cross(kernel, f, nodes, None, torch.float32)
    assert single.dtype == torch.float32
    seen = exact > 1e-6
    assert int(seen.sum()) > 5 * 20
    relative = ((single - exact).abs() / exact)[seen]
    assert relative.max() < 3e-6


@pytest.mark.parametrize("estimator", ESTIMATORS, ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("period", [None, 1.7])
def test_float32_agrees_with_float64(estimator: AbstractEstimator, period: float | None) -> None:
    kernel, data = Matern52([0.2, 0.3], 1.3), mixed(2)
    torus = None if period is None else Wrapping((period, period))

    def every(dtype: torch.dtype) -> list[Tensor]:
        return [
            estimator.cross(kernel, data, grid(2), torus, dtype),
            estimator.variance(kernel, data, torus, dtype),
            estimator.between(kernel, data, data, torus, dtype),
        ]

    for single, double in zip(every(torch.float32), every(torch.float64), strict=True):
        assert single.dtype == torch.float32
        torch.testing.assert_close(single.double(), double, rtol=1e-5, atol=1e-4)


def test_blocks_do_not_change_the_result() -> None:
    """Many rows, nodes beyond the reach of the kernel, rows regrouped by position."""
    kernel = Matern32([0.004, 0.01], 1.0)
    nodes = RegularGrid.from_bounds((0.0, 0.0), (1.0, 1.0), (700, 300))
    x = uniform(40, 2)
    K = ClosedForm().cross(kernel, PointValues(x), nodes)
    some = torch.tensor([3, 20, 39])
    expected = kernel(x[some][:, None] - nodes.points()[None])
    torch.testing.assert_close(K[some], expected, rtol=1e-10, atol=1e-15)
    torch.testing.assert_close(K[some], ClosedForm().cross(kernel, PointValues(x[some]), nodes))
    along = LineIntegrals.segment(x[:3], x[:3] + 0.05)
    K = ClosedForm().cross(kernel, along, nodes)
    parts = [ClosedForm().cross(kernel, along[i : i + 1], nodes) for i in range(3)]
    torch.testing.assert_close(K, torch.cat(parts), rtol=1e-9, atol=1e-14)


def test_no_rows_give_no_covariances() -> None:
    kernel, nodes = Matern32(0.5, 1.0, 2), grid(2)
    for functional in (*mixed(2).parts, mixed(2)):
        for estimator in ESTIMATORS:
            empty = functional[:0]
            assert estimator.cross(kernel, empty, nodes).shape == (0, nodes.size)
            assert estimator.variance(kernel, empty).shape == (0,)
            assert estimator.between(kernel, empty, mixed(2)).shape == (0, 12)


def test_measures_with_weights_are_linear() -> None:
    kernel, measure = Matern32(0.5, 1.0, 2), PointMeasure(uniform(3, 4, 2), uniform(3, 4, seed=1))
    estimator = ClosedForm()
    points = PointValues(measure.points.reshape(12, 2))
    W = torch.zeros(3, 12, dtype=torch.float64)
    for n in range(3):
        W[n, 4 * n : 4 * n + 4] = measure.weights[n]
    K = estimator.between(kernel, points, points)
    torch.testing.assert_close(estimator.between(kernel, measure, measure), W @ K @ W.T)
    torch.testing.assert_close(estimator.variance(kernel, measure), (W @ K @ W.T).diagonal())
    torch.testing.assert_close(
        estimator.cross(kernel, measure, grid(2)), W @ estimator.cross(kernel, points, grid(2))
    )


def bad_calls() -> list[tuple[Callable[[], Tensor], str]]:
    kernel, f = Matern32(0.5, 1.0, 2), PointValues(uniform(2, 2))
    estimator, nowhere = ClosedForm(), torch.full((1, 2), torch.nan)
    return [
        (lambda: estimator.cross(Matern32(1.0, dim=3), f, grid(2)), "kernel has 3 input"),
        (lambda: estimator.cross(kernel, f, grid(3)), "grid has 3 axes"),
        (lambda: estimator.cross(kernel, f, torch.zeros(4, 3)), r"points must be \(M, 2\)"),
        (lambda: estimator.cross(kernel, f, nowhere), "points must be finite"),
        (lambda: estimator.variance(kernel, f, Wrapping((1.0,))), "1 periods"),
        (lambda: estimator.between(kernel, f, PointValues(uniform(2, 3))), "PointValues has 3"),
        (lambda: plain_lags(kernel, (1.0,), (3,)), "must have 2 entries"),
    ]


@pytest.mark.parametrize("case", range(len(bad_calls())))
def test_mismatches_are_refused(case: int) -> None:
    call, message = bad_calls()[case]
    with pytest.raises(ValueError, match=message):
        call()


def test_bad_wrapping_is_refused() -> None:
    with pytest.raises(ValueError, match="periods must be positive"):
        Wrapping((1.0, 0.0))
    with pytest.raises(ValueError, match="tolerance must lie"):
        Wrapping((1.0,), 0.0)


@pytest.mark.parametrize("estimator", ESTIMATORS, ids=lambda e: type(e).__name__)
def test_derivatives_of_matern12_are_refused_by_name(estimator: AbstractEstimator) -> None:
    kernel = Matern12(0.5, 1.0, 2)
    slopes = Derivatives(uniform(2, 2), unit(2, 2))
    directed = slopes.measure(GaussLegendre(1))
    values: AbstractFunctional = PointValues(uniform(2, 2))
    refusal = pytest.raises(ValueError, match=r"(?s)Derivatives.*matern12")
    for f in (slopes, directed, Stacked((values, slopes))):
        with refusal:
            estimator.cross(kernel, f, grid(2))
        with refusal:
            estimator.variance(kernel, f)
        with refusal:
            estimator.between(kernel, values, f)
        with refusal:
            estimator.between(kernel, f, values)
