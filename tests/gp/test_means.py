"""Means seen through functionals, against means integrated and differentiated by hand."""

import pytest
import torch
from torch import Tensor

from dustmap.gp._means import AbstractMean, ConstantMean, LinearMean, generalised_least_squares
from dustmap.gp.functionals import (
    AbstractFunctional,
    Derivatives,
    LineIntegrals,
    PointValues,
    Stacked,
)
from tests.gp.parameters import traced, with_values


def cloud(dim: int, n: int = 4, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn((n, dim), generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("dim", [1, 2, 3])
def test_means_are_seen_through_every_functional(dim: int) -> None:
    a, slope = 0.7, [1.0, -2.0, 0.5][:dim]
    b = torch.tensor(slope, dtype=torch.float64)
    x, end = cloud(dim), cloud(dim, seed=1)
    length = (end - x).norm(dim=1)
    direction = (end - x) / length[:, None]
    means: list[AbstractMean] = [ConstantMean(a), LinearMean(slope, a)]
    cases: list[tuple[AbstractFunctional, Tensor, Tensor]] = [
        (PointValues(x), torch.full((4,), a).double(), a + x @ b),
        (Derivatives(x, direction), torch.zeros(4).double(), direction @ b),
        (LineIntegrals.segment(x, end), a * length, length * (a + 0.5 * (x + end) @ b)),
    ]
    for functional, *expected in cases:
        for mean, values in zip(means, expected, strict=True):
            torch.testing.assert_close(mean.values(functional), values)
    stacked = Stacked(tuple(functional for functional, *_ in cases))
    expected_all = torch.cat([values for *_, values in cases])
    torch.testing.assert_close(means[1].values(stacked), expected_all)


@pytest.mark.parametrize("mean", [ConstantMean(0.3), LinearMean([1.0, 2.0], 0.3)])
def test_values_are_differentiable_in_the_coefficients(mean: AbstractMean) -> None:
    functional = PointValues(cloud(2))
    assert torch.autograd.gradcheck(
        lambda *values: with_values(mean, values).values(functional), traced(mean)[1], atol=1e-8
    )


def test_fixed_means_are_not_learned() -> None:
    for mean in (ConstantMean(0.3, learn=False), LinearMean([1.0], learn=False)):
        assert not mean.is_learned


@pytest.mark.parametrize("mean", [ConstantMean(), LinearMean([0.0, 0.0])])
def test_generalised_least_squares_against_the_normal_equations(mean: AbstractMean) -> None:
    functional = PointValues(cloud(2, n=9))
    H = mean.basis(functional)
    y = cloud(1, n=9, seed=3)[:, 0]
    root = cloud(9, n=9, seed=4)
    A = root @ root.T + torch.eye(9, dtype=torch.float64)
    expected = torch.linalg.solve(H.T @ torch.linalg.inv(A) @ H, H.T @ torch.linalg.inv(A) @ y)
    got = generalised_least_squares(H, y, torch.linalg.cholesky(A))
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(mean.with_coefficients(got).values(functional), H @ expected)


@pytest.mark.parametrize("columns", [1, 3])
def test_generalised_least_squares_repeats_to_the_bit(columns: int) -> None:
    """Whatever was in the memory that the solver is given for its work."""
    H, y = cloud(columns, n=40), cloud(1, n=40, seed=1)[:, 0]
    L = torch.eye(40, dtype=torch.float64)
    found = set()
    for left in range(400):
        junk = [torch.full((columns,), left % 2, dtype=torch.int32) for _ in range(20)]
        del junk
        found.add(tuple(generalised_least_squares(H, y, L).tolist()))
    assert len(found) == 1


def test_slopes_of_the_wrong_dimension_are_refused() -> None:
    with pytest.raises(ValueError, match="slope has 2 components, the data have 3 dimensions"):
        LinearMean([1.0, 2.0]).values(PointValues(cloud(3)))
