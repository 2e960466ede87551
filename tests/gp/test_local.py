"""Local kriging features: W and Φ against slow loops and dense algebra, products, gradients."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from dustmap.gp import GridPrior, RegularGrid
from dustmap.gp.covariances import ClosedForm, MonteCarlo
from dustmap.gp.features import (
    LocalFeatures,
    Stencil,
    TorusFeatures,
    _local,
    _local_weights,
    nodes_of,
)
from dustmap.gp.features._local_weights import RecomputedOperator, Taps
from dustmap.gp.functionals import (
    AbstractFunctional,
    Derivatives,
    GaussLegendre,
    LineIntegrals,
    PointMeasure,
    PointValues,
    Stacked,
)
from dustmap.gp.kernels import AbstractKernel, Matern12, Matern32, Matern52
from dustmap.linalg import AbstractOperator, CirculantOperator, SparseOperator
from tests.combinations import covering
from tests.contracts import operators as contracts
from tests.contracts.operators import OperatorCase
from tests.gp.local_cases import (
    SHAPES,
    draw,
    make_features,
    some_mixed,
    some_points,
    some_rays,
    some_slopes,
    unit_grid,
)
from tests.gp.parameters import traced


def _slow_weights(features: LocalFeatures, functional: AbstractFunctional) -> Tensor:
    """W (N, M_w) node by node, at offsets rounded like the table's for rays."""
    if isinstance(functional, Stacked):
        return functional.arrange([_slow_weights(features, f) for f in functional.parts])
    prior, stencil = features.prior, features.cells.stencil
    direction = functional.direction if isinstance(functional, Derivatives) else None
    if isinstance(functional, PointMeasure):
        direction = functional.direction
    plain = PointValues(functional.x) if isinstance(functional, Derivatives) else functional
    if isinstance(functional, PointMeasure):
        plain = PointMeasure(functional.points, functional.weights)
    nodes = nodes_of(plain, prior.grid, prior.torus_shape)
    offsets = nodes.offset
    if isinstance(functional, LineIntegrals):
        offsets = (offsets * stencil.steps).round() / stencil.steps
    along = direction[nodes.row] if isinstance(direction, Tensor) else None
    weights = stencil.weights(offsets, along)
    W = torch.zeros(len(functional), *prior.torus_shape, dtype=torch.float64)
    for q in range(len(nodes)):
        n = int(nodes.row[q])
        values = nodes.weight[q] * weights[q]
        for shift, w in zip(stencil.shifts().tolist(), values.tolist(), strict=True):
            place = [
                (int(c) + s) % length
                for c, s, length in zip(nodes.cell[q], shift, prior.torus_shape, strict=True)
            ]
            W[(n, *place)] += w
    return W.flatten(1)


@pytest.mark.parametrize("order", [2, 4])
@pytest.mark.parametrize("shape", SHAPES)
def test_weights_against_loops(shape: tuple[int, ...], order: int) -> None:
    features, functional = make_features(shape, order), some_mixed(len(shape), 3)
    W = features.weights(functional)
    torch.testing.assert_close(W.to_dense(), _slow_weights(features, functional).detach())


@pytest.mark.parametrize(("dtype", "shape"), covering([torch.float64, torch.float32], SHAPES))
def test_rows_operator_and_products_agree(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    features, functional = make_features(shape, dtype=dtype), some_mixed(len(shape))
    rows, operator = features.rows(functional), features.operator(functional)
    atol = 1e-10 if dtype == torch.float64 else 2e-4
    torch.testing.assert_close(operator.to_dense(), rows.phi.detach(), rtol=0, atol=atol)
    eps = torch.randn(3, features.n_features, dtype=dtype, generator=torch.Generator())
    products = features.products(functional, eps)
    assert products.dtype == rows.phi.dtype == dtype
    expected = eps @ rows.phi.detach().mT
    torch.testing.assert_close(products.detach(), expected, rtol=0, atol=atol)
    with torch.no_grad():
        plain = features.products(functional, eps)
    torch.testing.assert_close(plain, expected, rtol=0, atol=atol)


@pytest.mark.parametrize("ratio", [1.0, 2.0])
@pytest.mark.parametrize(("make", "allowed"), [(Matern12, 0.03), (Matern32, 0.025)])
def test_steps_and_table_of_rays_are_fine_enough(
    make: Callable[..., AbstractKernel], allowed: float, ratio: float
) -> None:
    """Prior std of Σ_q v_q w_q − ∫ w ds, the integral by many exact points, over that of ∫ρ ds."""
    grid = RegularGrid((0.0,) * 2, (1.0,) * 2, (10, 10))
    prior = GridPrior.padded(make(ratio, dim=2), grid, padding=2.0)
    start, along = 4.0 * draw(30, 2, 0), draw(30, 2, 1)
    lengths = torch.linspace(0.3, 4.0, 30, dtype=torch.float64)[:, None]
    rays = LineIntegrals.segment(start, start + lengths * along)
    features = LocalFeatures(prior, order=2)
    error = features.weights(rays).to_dense()
    error -= features.weights(rays.measure(GaussLegendre(4, panels=12))).to_dense()
    K = CirculantOperator(prior.spectrum.detach(), prior.torus_shape)
    k_ff = ClosedForm().variance(prior.kernel, rays, prior.wrapping).detach()
    relative = ((error * K.matmul(error)).sum(-1) / k_ff).sqrt()
    assert 0 < float(relative.max()) < allowed


KINDS: list[Callable[[int, int], AbstractFunctional]] = [some_points, some_slopes, some_rays]


@pytest.mark.parametrize(("kind", "dim"), covering(KINDS, [1, 2, 3]))
def test_finer_grids_bring_the_exact_covariances(
    kind: Callable[[int, int], AbstractFunctional], dim: int
) -> None:
    functional, kernel = kind(dim, 6), Matern52(0.5, dim=dim)
    errors = []
    for m in (5, 9, 17):
        prior = GridPrior.padded(kernel, unit_grid((m,) * dim), padding=3.0)
        operator = LocalFeatures(prior).operator(functional)
        phi = operator.rmatmul(torch.eye(6, dtype=torch.float64))
        exact = ClosedForm().between(kernel, functional, functional, prior.wrapping).detach()
        errors.append(float((phi @ phi.mT - exact).abs().max() / exact.abs().max()))
    assert errors[0] > errors[1] > errors[2]
    assert errors[2] < min(0.02, errors[0] / 4)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_residual_variance_of_any_weights(shape: tuple[int, ...]) -> None:
    features, dim = make_features(shape), len(shape)
    functional = Stacked((some_points(dim, 5), some_slopes(dim, 5)))
    prior, arguments = features.prior, (features.prior.wrapping, torch.float64)
    w = _slow_weights(features, functional).detach()
    k_ff = ClosedForm().variance(prior.kernel, functional, *arguments)
    k_fu = ClosedForm().cross(prior.kernel, functional, prior.torus_grid(), *arguments)
    K = CirculantOperator(prior.spectrum, prior.torus_shape)
    expected = (k_ff - 2 * (w * k_fu).sum(-1) + (w * K.matmul(w)).sum(-1)).detach()
    actual = features.residual_variance(functional).detach()
    torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-5)
    exact = TorusFeatures(prior).rows(functional).residual_variance.detach()
    assert bool((actual >= exact - 1e-6).all())


def _stored_case(shape: tuple[int, ...]) -> OperatorCase:
    functional = some_mixed(len(shape), 3)

    def build(dtype: torch.dtype) -> AbstractOperator:
        return make_features(shape, 2, dtype).weights(functional)

    dense = _slow_weights(make_features(shape, 2), functional).detach()
    return OperatorCase(f"stored-{len(shape)}", build, dense)


def _recomputed_case() -> OperatorCase:
    generator = torch.Generator().manual_seed(0)
    row = torch.tensor([0, 0, 1, 3, 3, 3, 4])
    column = torch.randint(6, (7, 3), generator=generator)
    value = torch.randn(7, 3, dtype=torch.float64, generator=generator)

    def build(dtype: torch.dtype) -> AbstractOperator:
        def taps(part: slice) -> Taps:
            kept = (row >= part.start) & (row < part.stop)
            values = value[kept].to(dtype)
            return Taps(row[kept] - part.start, column[kept], values, part.stop - part.start)

        return RecomputedOperator(taps, (5, 6), 2, torch.empty(0, dtype=dtype))

    dense = torch.zeros(5 * 6, dtype=torch.float64)
    dense.index_add_(0, (row[:, None] * 6 + column).flatten(), value.flatten())
    return OperatorCase("recomputed", build, dense.reshape(5, 6))


CASES = [_stored_case((6,)), _stored_case((4, 3)), _recomputed_case()]


@pytest.mark.parametrize("check", contracts.OPERATOR_CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_operator_contract(case: OperatorCase, check: Callable[[OperatorCase], None]) -> None:
    check(case)


@pytest.mark.parametrize("shape", SHAPES)
def test_stored_and_recomputed_rows_are_the_same(
    shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    functional = some_mixed(len(shape), 20)
    kept = make_features(shape)
    planned = kept.plan_bytes(functional)
    monkeypatch.setattr(_local_weights, "CHUNK_ENTRIES", 700)
    streamed = replace(kept, memory=planned - 1)
    expected = kept.weights(functional)
    actual = streamed.weights(functional)
    for x in (draw(2, kept.n_features, 0), draw(1, kept.n_features, 1)[0]):
        torch.testing.assert_close(actual.matmul(x), expected.matmul(x))
    y = draw(2, len(functional), 0)
    torch.testing.assert_close(actual.rmatmul(y), expected.rmatmul(y))


def test_planned_bytes_are_those_of_what_is_stored() -> None:
    features, rays = make_features((7, 6)), some_rays(2, 2000)
    W = features.weights(rays)
    assert isinstance(W, SparseOperator)
    assert features.plan_bytes(rays) == pytest.approx(W.bytes, rel=0.05)
    entries = int((W.to_dense() != 0).sum())
    assert features.plan_bytes(rays) == pytest.approx(2 * entries * 12, rel=0.05)


@pytest.mark.parametrize("shape", SHAPES)
def test_chunks_change_no_number(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    features, functional = make_features(shape), some_mixed(len(shape), 9)
    eps = draw(2, features.n_features, 0)
    weights, products = _outputs(features, functional, eps)
    monkeypatch.setattr(_local_weights, "CHUNK_ENTRIES", 300)
    again, cut = _outputs(features, functional, eps)
    torch.testing.assert_close(again, weights, rtol=0, atol=1e-11)
    for one, other in zip(products, cut, strict=True):
        torch.testing.assert_close(one, other)


def _outputs(
    features: LocalFeatures, functional: AbstractFunctional, eps: Tensor
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """W, and Φ ε with its gradients in eps and in the kernel's parameters."""
    eps = eps.clone().requires_grad_()
    followed, leaves = traced(features)
    products = followed.products(functional, eps)
    inputs = [eps, *leaves]
    gradients = torch.autograd.grad(products.square().sum(), inputs)
    return features.weights(functional).to_dense(), (products.detach(), *gradients)


def test_draws_match_the_residual_variance() -> None:
    """W u of draws of the field on the torus, with and without the point itself observed."""
    kernel = Matern12(0.4, dim=1)
    prior = GridPrior.padded(kernel, unit_grid((9,)), torus_shape=(24,))
    fine = GridPrior.padded(kernel, RegularGrid((0.0,), (0.125 / 4,), (33,)), torus_shape=(96,))
    x = fine.grid.points()
    eps = torch.randn(4000, 96, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        field = fine.torus_root(0.5).matmul(eps)
        features = LocalFeatures(prior)
        predicted = features.weights(PointValues(x)).matmul(field[:, ::4].contiguous())
        error = (field[:, :33] - predicted).square().mean(0)
        expected = features.residual_variance(PointValues(x))
    torch.testing.assert_close(error, expected, rtol=0.1, atol=1e-6)


def test_estimators_that_pick_points_decide_what_is_observed() -> None:
    features = replace(make_features((7, 6)), estimator=MonteCarlo(16, seed=3))
    rays = some_rays(2, 6)
    as_points = MonteCarlo(16, seed=3).observed(rays, features.prior.kernel)
    torch.testing.assert_close(
        features.weights(rays).to_dense(), features.weights(as_points).to_dense()
    )


def test_other_parameters_make_other_features() -> None:
    kernel = Matern32(0.4, dim=1)
    features = LocalFeatures(GridPrior.padded(kernel, unit_grid((9,))))
    points, eps = some_points(1, 4), draw(1, features.n_features, 0)
    before = features.products(points, eps).detach()
    after = features.with_value("variance", kernel.amplitude.value + 2.0).products(points, eps)
    torch.testing.assert_close(after, before * torch.e)


def test_wrong_arguments_are_refused() -> None:
    prior = GridPrior.padded(Matern32(0.4, dim=1), unit_grid((9,)))
    with pytest.raises(ValueError, match="expected 2 or 4, got 3"):
        LocalFeatures(prior, order=3)
    with pytest.raises(ValueError, match=r"needs the wrapped kernel of GridPrior\.padded"):
        LocalFeatures(GridPrior.minimal(Matern32(0.1, dim=1), unit_grid((9,))))
    far = PointValues(torch.tensor([[0.5], [2.9]]).double())
    with pytest.raises(ValueError, match="1 of 2 points of the data lie outside the grid"):
        LocalFeatures(prior).operator(far)
    assert Stencil.of(prior, 2).size == 2


def test_points_in_the_padding_are_seen() -> None:
    features = LocalFeatures(GridPrior.padded(Matern32(0.4, dim=1), unit_grid((9,))))
    beyond = PointValues(torch.tensor([[-0.3], [1.2]]).double())
    assert float(features.residual_variance(beyond).detach().max()) < 0.02


@pytest.mark.parametrize("kind", KINDS)
def test_no_data_make_no_rows(kind: Callable[[int, int], AbstractFunctional]) -> None:
    features, none = make_features((7, 6)), kind(2, 4)[:0]
    eps = draw(2, features.n_features, 0)
    assert features.operator(none).matmul(eps).shape == (2, 0)
    assert features.products(none, eps).shape == (2, 0)


def test_rays_stored_among_their_neighbours_give_the_same_products(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    generator = torch.Generator().manual_seed(0)
    start, end = torch.rand(2, 60, 3, generator=generator, dtype=torch.float64)
    rays = LineIntegrals.segment(0.2 * start, end)
    grid = RegularGrid.from_bounds((0.0,) * 3, (1.0,) * 3, (7, 6, 5))
    features = LocalFeatures(GridPrior.padded(Matern32(0.3, 1.0, dim=3), grid), order=2)
    plain = features.weights(rays)
    monkeypatch.setattr(_local, "MANY_RAYS", 2)
    together = features.weights(rays)
    assert type(together) is not type(plain)
    assert torch.allclose(together.to_dense(), plain.to_dense(), rtol=0, atol=1e-14)
    y = torch.randn(2, 60, generator=generator, dtype=torch.float64)
    assert torch.allclose(together.rmatmul(y), plain.rmatmul(y), rtol=0, atol=1e-13)


@pytest.mark.parametrize("dim", [1, 2])
def test_stencils_go_around_a_torus_that_has_no_more_nodes_than_the_grid(dim: int) -> None:
    """Covariances of two places, which a stencil that is laid otherwise would change."""
    grid = RegularGrid((0.0,) * dim, (1.0,) * dim, (12,) * dim)
    kernel = Matern32(2.0, dim=dim)
    prior = GridPrior.padded(kernel, grid, torus_shape=grid.shape)
    places = torch.full((3, dim), 10.2, dtype=torch.float64)
    places[1], places[2] = 8.2, 9.6
    phi = LocalFeatures(prior).rows(PointValues(places)).phi
    apart = (places[:1] - places)[:, None] + 12.0 * torch.cartesian_prod(
        *[torch.arange(-3.0, 4.0, dtype=torch.float64)] * dim
    ).reshape(-1, dim)
    wrapped = kernel(apart).sum(1).detach()
    torch.testing.assert_close(phi @ phi[0], wrapped, atol=0.03, rtol=0.0)
