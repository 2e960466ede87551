"""Every feature map: what Φ explains, its operator, types, gradients, refusals."""

import pytest
import torch
from torch import Tensor

from dustmap.gp.functionals import PointValues
from dustmap.gp.kernels import AbstractKernel, Matern32
from tests.contracts.features import (
    FEATURE_CASES,
    SHAPES,
    FeatureCase,
    dense_terms,
    every_datum,
    unit_grid,
)
from tests.gp.parameters import check_one_direction, of_parameters

DOUBLE = torch.float64
over_cases = pytest.mark.parametrize("case", FEATURE_CASES, ids=lambda case: case.name)
over_shapes = pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{len(shape)}-D")


def kernel_of(shape: tuple[int, ...]) -> AbstractKernel:
    return Matern32(0.4, 1.3, dim=len(shape))


@over_cases
@over_shapes
def test_rows_explain_what_the_nodes_do_and_leave_the_rest(
    case: FeatureCase, shape: tuple[int, ...]
) -> None:
    """Φ Φᵀ = K_fu K_uu⁻¹ K_uf, and the residual variance is k_ff − diag Φ Φᵀ."""
    kernel, grid, data = kernel_of(shape), unit_grid(shape), every_datum(len(shape))
    rows = case.build(kernel, grid, DOUBLE).rows(data)
    phi, left = rows.phi.detach(), rows.residual_variance.detach()
    K_uu, K_fu, k_ff = dense_terms(kernel, grid, data)
    nodes = K_fu @ torch.linalg.solve(K_uu, K_fu.mT)
    assert phi.shape == (len(data), case.build(kernel, grid, DOUBLE).n_features)
    assert left.shape == (len(data),)
    if case.inducing:
        size = case.accuracy * float(nodes.max())
        torch.testing.assert_close(phi @ phi.mT, nodes, rtol=0, atol=size)
        torch.testing.assert_close(left, k_ff - nodes.diagonal(), rtol=0, atol=size)
        assert rows.solves.unconverged == 0
    elif case.name == "torus":
        torch.testing.assert_close(left, k_ff - phi.square().sum(-1), rtol=0, atol=2e-6)
        assert bool((left <= k_ff - nodes.diagonal() + 2e-6).all())
    assert bool((left > -2e-6).all())


@over_cases
@over_shapes
def test_the_operator_is_the_rows_and_their_adjoint(
    case: FeatureCase, shape: tuple[int, ...]
) -> None:
    features, data = case.build(kernel_of(shape), unit_grid(shape), DOUBLE), every_datum(len(shape))
    rows, operator = features.rows(data), features.operator(data)
    phi = rows.phi.detach()
    assert operator.shape == phi.shape
    generator = torch.Generator().manual_seed(5)
    v = torch.randn(3, features.n_features, dtype=DOUBLE, generator=generator)
    y = torch.randn(3, len(data), dtype=DOUBLE, generator=generator)
    torch.testing.assert_close(operator.matmul(v), v @ phi.mT, rtol=0, atol=1e-7)
    torch.testing.assert_close(operator.rmatmul(y), y @ phi, rtol=0, atol=1e-6)
    torch.testing.assert_close(features.products(data, v).detach(), v @ phi.mT, rtol=0, atol=1e-7)
    left = features.residual_variance(data)
    torch.testing.assert_close(left, rows.residual_variance, rtol=1e-6, atol=1e-7)


@over_cases
@over_shapes
def test_float32_rows_are_those_of_float64_but_for_rounding(
    case: FeatureCase, shape: tuple[int, ...]
) -> None:
    kernel, grid, data = kernel_of(shape), unit_grid(shape), every_datum(len(shape))
    double, single = (case.build(kernel, grid, t).rows(data) for t in (DOUBLE, torch.float32))
    assert (double.phi.dtype, single.phi.dtype) == (DOUBLE, torch.float32)
    largest = float(double.phi.detach().abs().max())
    torch.testing.assert_close(single.phi.double(), double.phi, rtol=0, atol=case.single * largest)
    assert single.phi.device == double.phi.device == data.device
    left, exact = single.residual_variance.detach().double(), double.residual_variance.detach()
    torch.testing.assert_close(left, exact, rtol=0, atol=2e-3)


def small() -> list[object]:
    """Every case in every dimension; stencils in 3-D take seconds."""
    return [
        pytest.param(
            case,
            shape,
            id=f"{len(shape)}-D-{case.name}",
            marks=pytest.mark.slow if (case.name, len(shape)) == ("local", 3) else (),
        )
        for shape in ((9,), (4, 4), (3, 3, 2))
        for case in FEATURE_CASES
    ]


@pytest.mark.parametrize(("case", "shape"), small())
def test_rows_are_differentiable_in_every_kernel_parameter(
    case: FeatureCase, shape: tuple[int, ...]
) -> None:
    dim, grid, data = len(shape), unit_grid(shape), every_datum(len(shape), n=2)

    def outputs(kernel: AbstractKernel) -> tuple[Tensor, Tensor]:
        rows = case.build(kernel, grid, DOUBLE).rows(data)
        return rows.phi.square().sum(-1) if case.turning else rows.phi, rows.residual_variance

    objective = of_parameters(Matern32((1.0,) * dim), outputs)
    scales = torch.linspace(-1.0, -0.6, dim, dtype=DOUBLE, requires_grad=True)
    variance = torch.tensor(0.3, dtype=DOUBLE, requires_grad=True)
    if dim > 1:  # gradcheck asks for some more passes, which take seconds here
        check_one_direction(objective, (scales, variance), atol=1e-5, rtol=1e-4)
        return
    assert torch.autograd.gradcheck(
        objective, (scales, variance), atol=1e-5, rtol=1e-4, fast_mode=True
    )


@over_cases
def test_parts_of_the_data_have_their_part_of_the_rows(case: FeatureCase) -> None:
    features, data = case.build(kernel_of((7, 6)), unit_grid((7, 6)), DOUBLE), every_datum(2)
    some = torch.tensor([11, 3, 3, 17])
    whole, part = features.rows(data), features.rows(data[some])
    # Which images of the wrapped kernel are negligible (1e-7) is decided for each block of rows.
    torch.testing.assert_close(part.phi, whole.phi[some], rtol=0, atol=2e-6)
    torch.testing.assert_close(
        part.residual_variance, whole.residual_variance[some], rtol=0, atol=2e-6
    )


@over_cases
def test_no_data_have_no_rows(case: FeatureCase) -> None:
    features = case.build(kernel_of((7, 6)), unit_grid((7, 6)), DOUBLE)
    none = PointValues(torch.zeros(0, 2, dtype=DOUBLE))
    if case.empty:
        assert features.rows(none).phi.shape == (0, features.n_features)
        return
    with pytest.raises(ValueError, match="rows need at least one datum"):
        features.rows(none)


@over_cases
def test_data_of_another_dimension_are_refused(case: FeatureCase) -> None:
    features = case.build(kernel_of((7, 6)), unit_grid((7, 6)), DOUBLE)
    with pytest.raises(ValueError, match="dimension"):
        features.rows(PointValues(torch.full((2, 3), 0.5)))
