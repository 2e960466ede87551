"""Covariances of line integrals: closed forms, quadrature and Monte Carlo against each other."""

import functools
import math
from collections.abc import Callable

import numpy as np
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
    _rays,
)
from dustmap.gp.covariances._measures import row_blocks
from dustmap.gp.covariances._wrapping import Nodes, WrappedKernel
from dustmap.gp.functionals import (
    AbstractFunctional,
    Derivatives,
    LineIntegrals,
    PointMeasure,
    PointValues,
    SpacedGaussLegendre,
    Stacked,
)
from dustmap.gp.kernels import (
    AbstractKernel,
    Matern12,
    Matern13,
    Matern32,
    Matern52,
    SquaredExponential,
    StationaryKernel,
)
from tests.combinations import covering
from tests.contracts.functionals import uniform, unit
from tests.gp.parameters import traced
from tests.gp.ray_references import CORRELATIONS, ray_pair, ray_point, ray_variance

Make = Callable[..., StationaryKernel]
EVERY: list[Make] = [Matern13, Matern12, Matern32, Matern52, SquaredExponential]
SMOOTH = EVERY[2:]
DRAWS = [MonteCarlo(3, seed) for seed in range(200)]


def weighted_rays(n: int, dim: int, seed: int = 0) -> LineIntegrals:
    """Three segments each, up to 2 long, in the unit cube and around."""
    edges = 2 * uniform(n, 4, seed=seed + 1).sort(dim=-1).values
    weights = uniform(n, 3, seed=seed + 2)
    return LineIntegrals(uniform(n, dim, seed=seed), unit(n, dim, seed), edges, weights)


def plain_rays(n: int, dim: int, seed: int = 0) -> LineIntegrals:
    """From one observer, who stands on a node of `grid`."""
    return LineIntegrals.from_observer(3 * uniform(n, dim, seed=seed) - 1)


def grid(dim: int) -> RegularGrid:
    return RegularGrid.from_bounds((-0.5,) * dim, (0.5,) * dim, (3, 3, 3)[:dim])


def scales(dim: int, isotropic: bool) -> list[float]:
    return [0.4] * dim if isotropic else [0.3 + 0.25 * d for d in range(dim)]


@pytest.mark.parametrize("dim", [1, 2, 3])
@pytest.mark.parametrize("isotropic", [True, False])
@pytest.mark.parametrize("make", EVERY)
def test_cross_covariance_is_the_integral(make: Make, isotropic: bool, dim: int) -> None:
    ell = scales(dim, isotropic)
    kernel = make(ell, 1.3)
    k = CORRELATIONS[kernel.profile.name]
    points = grid(dim).points()
    for rays in (plain_rays(3, dim), weighted_rays(2, dim)):
        K = ClosedForm().cross(kernel, rays, grid(dim))
        expected = [
            [1.3 * ray_point(k, ell, rays, n, z.numpy()) for z in points] for n in range(len(rays))
        ]
        error = (K - torch.tensor(expected, dtype=torch.float64)).abs().max().item()
        assert error < 1e-8 * 1.3 * max(ell)
        if make is SquaredExponential:
            assert error < 1e-13


@pytest.mark.parametrize("dim", [1, 2, 3])
@pytest.mark.parametrize("make", EVERY)
def test_variance_is_the_double_integral(make: Make, dim: int) -> None:
    ell = scales(dim, isotropic=False)
    kernel = make(ell, 1.3)
    k = CORRELATIONS[kernel.profile.name]
    for rays in (plain_rays(4, dim), weighted_rays(4, dim)):
        expected = [1.3 * ray_variance(k, ell, rays, n) for n in range(4)]
        computed = ClosedForm().variance(kernel, rays)
        assert computed.tolist() == pytest.approx(expected, rel=1e-11)
        assert computed.min() > 0


@pytest.mark.parametrize("dim", [1, 2, 3])
@pytest.mark.parametrize("make", [Matern12, Matern32, SquaredExponential])
def test_covariance_between_rays_is_the_double_integral(make: Make, dim: int) -> None:
    """From one observer: the rays meet where the kernel has its kink."""
    ell = scales(dim, isotropic=False)
    kernel = make(ell, 1.3)
    k = CORRELATIONS[kernel.profile.name]
    f, g = plain_rays(2, dim), weighted_rays(1, dim)
    K = ClosedForm().between(kernel, f, g)
    tolerance = 1e-5 if make is Matern12 else 1e-7
    for n in range(2):
        expected = 1.3 * ray_pair(k, ell, (f, n), (g, 0))
        assert K[n, 0].item() == pytest.approx(expected, abs=tolerance)
    own = ClosedForm().between(kernel, f, f)
    expected = 1.3 * ray_pair(k, ell, (f, 0), (f, 1))
    assert own[0, 1].item() == pytest.approx(expected, abs=tolerance)
    assert torch.equal(own, own.T)
    torch.testing.assert_close(own.diagonal(), ClosedForm().variance(kernel, f))


@pytest.mark.parametrize("make", EVERY)
def test_long_and_distant_rays(make: Make) -> None:
    """Fifty length scales: through a node, past it at every distance, and far away."""
    kernel = make(1.0, 1.0, 3)
    k = CORRELATIONS[kernel.profile.name]
    start = torch.tensor([[-20.0, 0.0, 0.0]]).double().repeat(7, 1)
    start[:, 1] = torch.tensor([0.0, 1e-6, 1e-3, 0.1, 1.0, 6.0, 30.0])
    end = start.clone()
    end[:, 0] = 30.0
    rays = LineIntegrals.segment(start, end)
    K = ClosedForm().cross(kernel, rays, torch.zeros(1, 3))[:, 0]
    expected = [ray_point(k, [1.0] * 3, rays, n, np.zeros(3)) for n in range(7)]
    assert K.tolist() == pytest.approx(expected, abs=1e-8)


@pytest.mark.parametrize("make", EVERY)
@pytest.mark.parametrize("length", [1e-6, 1e-4, 1e-2, 0.05, 0.099, 0.101, 1.0])
def test_variance_keeps_relative_accuracy_for_short_rays(make: Make, length: float) -> None:
    """k_ff = ℓ² g(d/ℓ) with g(t) ~ t² - c t^(8/3 to 4): quadrature of 2∫(d - t)k(t)dt over ∛t."""
    ell = 2.0
    kernel = make(ell, 1.5, 2)
    k = CORRELATIONS[kernel.profile.name]
    d = ell * length
    rays = LineIntegrals.segment(
        torch.zeros(1, 2), torch.tensor([[0.6 * d, 0.8 * d]], dtype=torch.float64)
    )
    x, w = np.polynomial.legendre.leggauss(30)
    root = (x + 1) / 2
    t, w = d * root**3, 3 * root**2 * w
    expected = 1.5 * d * sum(w * (d - t) * np.array([k(u / ell) for u in t]))
    assert ClosedForm().variance(kernel, rays).item() == pytest.approx(expected, rel=3e-10)


@pytest.mark.parametrize("make", EVERY)
@pytest.mark.parametrize("estimator", [ClosedForm(), Quadrature(4), MonteCarlo(4, 0)])
def test_a_ray_without_length_has_no_covariance(
    make: Make, estimator: ClosedForm | Quadrature | MonteCarlo
) -> None:
    kernel = make(0.4, 1.0, 3)
    at_observer = LineIntegrals.from_observer(torch.zeros(2, 3))
    others = Stacked((plain_rays(3, 3), PointValues(uniform(2, 3))))
    torus = Wrapping((3.0, 3.0, 3.0))
    for wrapping in (None, torus):
        assert estimator.variance(kernel, at_observer, wrapping).abs().max() == 0
        assert estimator.cross(kernel, at_observer, grid(3), wrapping).abs().max() == 0
        assert estimator.between(kernel, at_observer, others, wrapping).abs().max() == 0
        assert estimator.between(kernel, others, at_observer, wrapping).abs().max() == 0


@functools.cache
def drawn_points(dim: int) -> tuple[PointMeasure, PointMeasure]:
    """The points by which each of `DRAWS` observes the first and the other rays, of any kernel."""

    def stacked(rays: LineIntegrals) -> PointMeasure:
        sums = [draw.observed(rays, Matern32(1.0, 1.0, dim)) for draw in DRAWS]
        points, weights = [s.points for s in sums], [s.weights for s in sums]
        return PointMeasure(torch.cat(points), torch.cat(weights))

    rays = weighted_rays(5, dim)  # no key twice
    return stacked(rays[:3]), stacked(rays[3:])


@pytest.mark.parametrize(("dim", "make"), covering([1, 2, 3], EVERY))
def test_three_estimators_agree(make: Make, dim: int) -> None:
    """Quadrature to 1e-5 where the kernel is smooth; Monte Carlo in the mean of 200 draws."""
    kernel = make(0.6, 1.3, dim)
    f, g = weighted_rays(5, dim)[:3], weighted_rays(5, dim)[3:]
    closed, fine = ClosedForm(), Quadrature(48)
    tolerance = 3e-4 if make in (Matern12, Matern13) else 2e-6

    def cross(estimator: AbstractEstimator) -> Tensor:
        return estimator.cross(kernel, f, grid(dim))

    def between(estimator: AbstractEstimator) -> Tensor:
        return estimator.between(kernel, f, g)

    n, (points, others) = len(DRAWS), drawn_points(dim)
    crosses = closed.cross(kernel, points, grid(dim)).reshape(n, 3, -1)
    pairs = closed.between(kernel, points, others).reshape(n, 3, n, 2)
    betweens = pairs.diagonal(dim1=0, dim2=2).movedim(-1, 0)
    for apply, sample in ((cross, crosses), (between, betweens)):
        exact = apply(closed)
        torch.testing.assert_close(apply(fine), exact, rtol=0, atol=tolerance)
        torch.testing.assert_close(apply(DRAWS[7]), sample[7], rtol=0, atol=1e-12)
        error = (sample.mean(0) - exact).abs()
        assert (error < 5 * sample.std(0) / math.sqrt(n) + 1e-9).all()
    variance = fine.variance(kernel, f)
    torch.testing.assert_close(variance, closed.variance(kernel, f), rtol=0, atol=tolerance)


@pytest.mark.parametrize("dim", [1, 2, 3])
@pytest.mark.parametrize("make", EVERY)
def test_monte_carlo_converges_to_the_variance(make: Make, dim: int) -> None:
    kernel, rays = make(0.6, 1.3, dim), weighted_rays(4, dim)
    estimate = MonteCarlo(400, 1).variance(kernel, rays)
    torch.testing.assert_close(estimate, ClosedForm().variance(kernel, rays), rtol=5e-3, atol=0)


@pytest.mark.parametrize("dim", [1, 2, 3])
@pytest.mark.parametrize("make", EVERY)
def test_monte_carlo_covariances_are_jointly_valid(make: Make, dim: int) -> None:
    """[[k_ff, K_fu], [K_uf, K_uu]] of one datum and of all data is positive semi-definite."""
    kernel, rays, nodes = make(0.5, 1.3, dim), weighted_rays(6, dim), grid(dim)
    estimator = MonteCarlo(2, 7)
    points = PointValues(nodes.points())
    K_fu, K_uu = (estimator.cross(kernel, f, nodes) for f in (rays, points))
    K_ff, k_ff = estimator.between(kernel, rays, rays), estimator.variance(kernel, rays)
    torch.testing.assert_close(K_ff.diagonal(), k_ff)
    joint = torch.cat([torch.cat([K_ff, K_fu], 1), torch.cat([K_fu.T, K_uu], 1)])
    assert torch.linalg.eigvalsh(joint).min() > -1e-12
    explained = (K_fu * torch.linalg.solve(K_uu, K_fu.T).T).sum(-1)
    assert (k_ff - explained).min() > -1e-9


@pytest.mark.parametrize("dim", [1, 2, 3])
@pytest.mark.parametrize("make", EVERY)
def test_closed_forms_are_jointly_valid(make: Make, dim: int) -> None:
    kernel, rays, nodes = make(0.5, 1.3, dim), weighted_rays(8, dim), grid(dim)
    data = Stacked((rays, plain_rays(8, dim), PointValues(nodes.points())))
    joint = ClosedForm().between(kernel, data, data)
    assert torch.linalg.eigvalsh(joint).min() > -3e-6


@pytest.mark.parametrize("dim", [1, 2, 3])
@pytest.mark.parametrize("make", EVERY)
def test_split_rays_add(make: Make, dim: int) -> None:
    kernel = make(0.5, 1.3, dim)
    start, end = uniform(4, dim), uniform(4, dim, seed=1) + 0.5
    middle = start + 0.3 * (end - start)
    whole = LineIntegrals.segment(start, end)
    halves = (LineIntegrals.segment(start, middle), LineIntegrals.segment(middle, end))
    estimator = ClosedForm()
    K = sum(estimator.cross(kernel, half, grid(dim)) for half in halves)
    torch.testing.assert_close(estimator.cross(kernel, whole, grid(dim)), K, rtol=0, atol=1e-8)
    variance = sum(estimator.variance(kernel, half) for half in halves)
    between = estimator.between(kernel, *halves).diagonal()
    expected = estimator.variance(kernel, whole)
    torch.testing.assert_close(variance + 2 * between, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("dim", [1, 2, 3])
@pytest.mark.parametrize("make", EVERY)
def test_a_point_is_the_limit_of_a_short_mean(make: Make, dim: int) -> None:
    kernel, x = make(0.5, 1.3, dim), uniform(4, dim)
    short = LineIntegrals.mean(x, x + 1e-5 * unit(4, dim))
    points, estimator = PointValues(x), ClosedForm()

    def every(f: AbstractFunctional) -> list[Tensor]:
        return [
            estimator.cross(kernel, f, grid(dim)),
            estimator.variance(kernel, f),
            estimator.between(kernel, f, points),
            estimator.between(kernel, f, plain_rays(3, dim)),
        ]

    for of_mean, of_point in zip(every(short), every(points), strict=True):
        # Matérn-1/3 falls by (1e-5 / ℓ)^(2/3) over the length of the mean
        torch.testing.assert_close(
            of_mean, of_point, rtol=0, atol=1e-3 if make is Matern13 else 1e-4
        )


@pytest.mark.parametrize("dim", [1, 2, 3])
@pytest.mark.parametrize("make", SMOOTH)
def test_rays_with_derivatives_are_limits_of_differences(make: Make, dim: int) -> None:
    kernel, estimator = make(scales(dim, isotropic=False), 1.3), ClosedForm()
    x, v, h = uniform(5, dim), unit(5, dim), 1e-3
    rays = weighted_rays(4, dim)
    ends = torch.stack([x + h * v, x - h * v], dim=1)
    difference = PointMeasure(ends, torch.tensor([[0.5 / h, -0.5 / h]]).expand(5, 2))
    K = estimator.between(kernel, rays, Derivatives(x, v))
    expected = Quadrature(60).between(kernel, rays, difference)
    torch.testing.assert_close(K, expected, rtol=0, atol=1e-4 if make is Matern32 else 1e-5)
    other = estimator.between(kernel, Derivatives(x, v), rays)
    torch.testing.assert_close(other, K.T)


@pytest.mark.parametrize(("dim", "make"), covering([1, 2, 3], SMOOTH))
def test_wrapped_covariances_of_rays(make: Make, dim: int) -> None:
    """Against quadrature of the same wrapped kernel, where images are left out alike."""
    kernel, torus = make(0.25, 1.3, dim), Wrapping((2.2, 2.3, 2.4)[:dim])
    f, g = weighted_rays(3, dim), plain_rays(2, dim)
    closed, fine = ClosedForm(), Quadrature(64)
    torch.testing.assert_close(
        closed.cross(kernel, f, grid(dim), torus),
        fine.cross(kernel, f, grid(dim), torus),
        rtol=0,
        atol=2e-6,
    )
    torch.testing.assert_close(
        closed.variance(kernel, f, torus), fine.variance(kernel, f, torus), rtol=0, atol=3e-6
    )
    torch.testing.assert_close(
        closed.between(kernel, f, g, torus), fine.between(kernel, f, g, torus), rtol=0, atol=3e-6
    )


def test_a_sum_of_kernels_adds_covariances() -> None:
    parts: list[AbstractKernel] = [Matern12(0.3, 1.0, 2), SquaredExponential([0.5, 1.0], 0.4)]
    summed, rays = parts[0] + parts[1], weighted_rays(3, 2)
    estimator = ClosedForm()

    def every(kernel: AbstractKernel) -> list[Tensor]:
        return [
            estimator.cross(kernel, rays, grid(2)),
            estimator.variance(kernel, rays),
            estimator.between(kernel, rays, plain_rays(3, 2)),
        ]

    for total, first, second in zip(every(summed), *map(every, parts), strict=True):
        torch.testing.assert_close(total, first + second, rtol=0, atol=1e-6)


@pytest.mark.parametrize("make", [Matern12, Matern32])
@pytest.mark.parametrize("length", [0.3, [0.3, 0.6, 0.2]])
def test_pairs_do_not_depend_on_order_or_company(
    make: Make, length: float | list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rays of very different lengths, enough for several tiles, some in one direction."""
    kernel = make(length, 1.0, 3)
    positions = (2 * uniform(90, 3) - 1) * torch.logspace(-3, 0.5, 90).double()[:, None]
    positions[45:60] = 1.01 * positions[30:45]
    rays = LineIntegrals.from_observer(positions)
    whole = ClosedForm().between(kernel, rays, rays)
    some = torch.tensor([89, 3, 50, 35])
    scale = (whole.diagonal()[:, None] * whole.diagonal()[None]).sqrt()
    apart = ClosedForm().between(kernel, rays[some], rays)
    others = apart.clone()
    others[torch.arange(4), some] = whole[some, some]  # exact where a ray meets itself
    assert ((others - whole[some]).abs() / scale[some]).max() < 1e-13
    assert ((apart - whole[some]).abs() / scale[some]).max() < 1e-6
    assert torch.linalg.eigvalsh(whole / scale).min() > -1e-6
    monkeypatch.setattr(_rays, "TILE", 256)
    assert ((ClosedForm().between(kernel, rays, rays) - whole).abs() / scale).max() < 1e-13


def test_quadrature_on_a_segment_is_the_rule_on_points() -> None:
    kernel, rays = Matern32(0.5, 1.0, 2), weighted_rays(3, 2)
    measure = rays.measure(SpacedGaussLegendre(4, 4 * 0.5 / 8))
    torch.testing.assert_close(
        Quadrature(4).cross(kernel, rays, grid(2)), ClosedForm().cross(kernel, measure, grid(2))
    )


def test_the_table_is_usable_after_inference_mode() -> None:
    """Tables are made once per process; the first use must not freeze them."""
    (kernel, (length, _)), rays = traced(Matern52(0.5, 1.0, 2)), weighted_rays(2, 2)
    with torch.inference_mode():
        ClosedForm().cross(kernel, rays, grid(2))
    total = ClosedForm().cross(kernel, rays, grid(2)).sum()
    (gradient,) = torch.autograd.grad(total, length)
    assert bool(torch.isfinite(gradient).all())


@pytest.mark.parametrize("dim", [1, 2, 3])
def test_rays_that_share_a_block_have_the_covariances_of_each_alone(
    monkeypatch: pytest.MonkeyPatch, dim: int
) -> None:
    """Images below the tolerance may be left out for one and not for others."""
    lines, kernel = plain_rays(40, dim), Matern32(0.1, 1.3, dim=dim)
    nodes = Nodes.of_axes(RegularGrid((0.0,) * dim, (0.1,) * dim, (10,) * dim).axes())
    wrapped = WrappedKernel.of(kernel, Wrapping((1.5,) * dim))
    cross = functools.partial(_rays.ray_cross, wrapped, nodes=nodes, dtype=torch.float64)
    alone = torch.cat([cross(lines[i : i + 1]) for i in range(len(lines))])
    monkeypatch.setattr(_rays, "BLOCK_ELEMENTS", 7 * nodes.size)
    groups = list(row_blocks(wrapped, _rays.ends(lines), nodes, 7 * nodes.size))
    assert all(isinstance(group, Tensor) and len(group) <= 7 for group in groups)
    torch.testing.assert_close(cross(lines), alone, rtol=0, atol=1e-6)
    assert sorted(torch.cat([torch.as_tensor(group) for group in groups]).tolist()) == [*range(40)]
