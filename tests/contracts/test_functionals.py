"""Every functional in 1, 2 and 3 dimensions: its rows, moments, covariances, types, refusals."""

import pytest
import torch

from dustmap.gp import RegularGrid
from dustmap.gp.covariances import ClosedForm, Wrapping
from dustmap.gp.functionals import GaussLegendre, PointValues, Stacked
from dustmap.gp.kernels import Matern52
from tests.contracts.functionals import FUNCTIONAL_CASES, FunctionalCase
from tests.gp.parameters import of_parameters

over_cases = pytest.mark.parametrize("case", FUNCTIONAL_CASES, ids=lambda case: case.name)
over_dimensions = pytest.mark.parametrize("dim", [1, 2, 3])


def grid(dim: int) -> RegularGrid:
    return RegularGrid.from_bounds((-0.1,) * dim, (1.1,) * dim, (5, 4, 3)[:dim])


@over_cases
@over_dimensions
def test_length_dimension_and_dtype(case: FunctionalCase, dim: int) -> None:
    functional = case.make(dim)
    assert functional.dim == dim
    assert functional.device == torch.device("cpu")
    assert functional.moments().dtype == torch.float64
    assert functional.moments().shape == (len(functional), 1 + dim)


@over_cases
@over_dimensions
def test_selections_keep_type_and_order(case: FunctionalCase, dim: int) -> None:
    functional = case.make(dim)
    n = len(functional)
    backwards = torch.arange(n - 1, -1, -1)
    mask = torch.arange(n) % 2 == 0
    for index in (slice(1, n - 1), backwards, mask, torch.tensor([0, 0, n - 1])):
        picked = functional[index]
        assert type(picked) is type(functional)
        torch.testing.assert_close(picked.moments(), functional.moments()[index])
        again = picked[torch.arange(len(picked) - 1, -1, -1)]
        torch.testing.assert_close(again.moments(), picked.moments().flip(0))
    assert len(functional[:0]) == 0
    assert functional[:0].dim == dim


@over_cases
@over_dimensions
def test_the_measure_has_the_moments_and_nearly_the_covariances(
    case: FunctionalCase, dim: int
) -> None:
    """Sums over the points of a rule: moments of first order exactly, K_fu and k_ff nearly."""
    functional, kernel, closed = case.make(dim), Matern52(0.6, 1.3, dim), ClosedForm()
    if not case.measured:
        with pytest.raises(ValueError, match="mixes Derivatives"):
            functional.measure(GaussLegendre(2))
        return
    measure = functional.measure(GaussLegendre(24))
    torch.testing.assert_close(measure.moments(), functional.moments(), rtol=1e-12, atol=1e-13)
    for wrapping in (None, Wrapping((2.5,) * dim)):
        torch.testing.assert_close(
            closed.cross(kernel, functional, grid(dim), wrapping),
            closed.cross(kernel, measure, grid(dim), wrapping),
            rtol=0,
            atol=2e-6,
        )
        torch.testing.assert_close(
            closed.variance(kernel, functional, wrapping),
            closed.variance(kernel, measure, wrapping),
            rtol=0,
            atol=2e-6,
        )


@over_cases
@over_dimensions
def test_covariances_are_one_matrix(case: FunctionalCase, dim: int) -> None:
    """[[K_ff, K_fu], [K_uf, K_uu]] is symmetric, positive, and the same in parts."""
    data, kernel, closed = case.make(dim), Matern52(0.6, 1.3, dim), ClosedForm()
    nodes = PointValues(grid(dim).points())
    both = Stacked((data, nodes))
    K, n = closed.between(kernel, both, both).detach(), len(data)
    torch.testing.assert_close(K, K.T, rtol=0, atol=1e-12)
    assert torch.linalg.eigvalsh(K).min() > -1e-9
    torch.testing.assert_close(K[:n, n:], closed.cross(kernel, data, grid(dim)), rtol=0, atol=1e-8)
    torch.testing.assert_close(K.diagonal()[:n], closed.variance(kernel, data), rtol=0, atol=1e-8)
    some = torch.tensor([n - 1, 0, 2])
    part = closed.between(kernel, data[some], data[some])
    torch.testing.assert_close(part, K[some][:, some], rtol=0, atol=1e-8)


@over_cases
@over_dimensions
def test_covariances_keep_the_type_that_is_asked_for(case: FunctionalCase, dim: int) -> None:
    data, kernel, closed = case.make(dim), Matern52(0.6, 1.3, dim), ClosedForm()
    exact = closed.cross(kernel, data, grid(dim), None, torch.float64)
    single = closed.cross(kernel, data, grid(dim), None, torch.float32)
    assert (exact.dtype, single.dtype) == (torch.float64, torch.float32)
    assert exact.shape == (len(data), grid(dim).size)
    torch.testing.assert_close(single.double(), exact, rtol=1e-4, atol=1e-5)


@over_cases
@over_dimensions
def test_covariances_are_differentiable_in_the_kernel(case: FunctionalCase, dim: int) -> None:
    data, closed = case.make(dim)[:4], ClosedForm()
    objective = of_parameters(
        Matern52((1.0,) * dim),
        lambda kernel: (closed.cross(kernel, data, grid(dim)), closed.variance(kernel, data)),
    )
    scales = torch.linspace(-0.6, -0.3, dim, dtype=torch.float64, requires_grad=True)
    variance = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        objective, (scales, variance), atol=1e-6, rtol=1e-5, fast_mode=True
    )


@over_cases
def test_kernels_and_grids_of_another_dimension_are_refused(case: FunctionalCase) -> None:
    data, closed = case.make(2), ClosedForm()
    with pytest.raises(ValueError, match="build both with the same dimension"):
        closed.cross(Matern52(0.6, dim=3), data, grid(3))
    with pytest.raises(ValueError, match="build both with the same dimension"):
        closed.variance(Matern52(0.6, dim=1), data)
    with pytest.raises(ValueError, match="same dimension"):
        closed.cross(Matern52(0.6, dim=2), data, grid(3))
