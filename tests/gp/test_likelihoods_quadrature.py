"""Quadrature rules over N(μ, v): moments, bends, limits."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dustmap.gp.likelihoods import SinhTrapezoid

RULES = {
    "sinh": SinhTrapezoid(0.3, 0.7, 64),
    "tilted": SinhTrapezoid(
        torch.tensor([0.3, -1.0, 4.0]), 0.7, 96, torch.tensor([1e-4, -2.0, 0.0])
    ),
}


def problem(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    return torch.tensor([0.0, -2.0, 3.0], dtype=dtype), torch.tensor([1e-8, 0.5, 40.0], dtype=dtype)


def _power(of: tuple[Tensor, Tensor], power: int) -> Callable[[Tensor], Tensor]:
    mean, std = (x.double().unsqueeze(-1) for x in of)
    return lambda f: ((f - mean) / std) ** power


def _bend(width: float) -> Callable[[Tensor], Tensor]:
    return lambda f: (f / width).square().log1p()


@pytest.mark.parametrize("name", RULES)
def test_moments_of_the_normal_distribution(name: str) -> None:
    rule = RULES[name]
    mean, variance = problem()
    std = variance.sqrt()
    for power, moment in enumerate((1.0, 0.0, 1.0, 0.0, 3.0, 0.0, 15.0)):
        found = rule.expectation(_power((mean, std), power), mean, variance)
        # Of the sixth moment 1e-9 lies beyond 8 standard deviations.
        torch.testing.assert_close(found, torch.full_like(mean, moment), rtol=1e-8, atol=1e-8)
    log_normal = rule.log_expectation(lambda f: 0.3 * f, mean, variance)
    torch.testing.assert_close(log_normal, 0.3 * mean + 0.045 * variance, rtol=0, atol=1e-8)


def test_bends_narrower_than_q_want_nodes_that_follow_them() -> None:
    """E ln(1 + f²/a²) → 2 E ln|f| − 2 ln a + … as a → 0: by 10⁴ nodes of the same kind."""
    mean, variance = torch.tensor([0.0, 1.0]).double(), torch.tensor([1.0, 9.0]).double()
    for width in (1.0, 0.1, 0.01):
        values = [
            rule.expectation(_bend(width), mean, variance)
            for rule in (SinhTrapezoid(0.0, width, 10_000), SinhTrapezoid(0.0, width, 96))
        ]
        torch.testing.assert_close(values[1], values[0], rtol=0, atol=2e-8)


def test_no_width_is_a_point() -> None:
    mean, _ = problem()
    for variance in (torch.zeros_like(mean), torch.full_like(mean, 1e-30)):
        found = RULES["sinh"].expectation(torch.sin, mean, variance)
        torch.testing.assert_close(found, mean.sin(), rtol=0, atol=1e-9)


def test_expectations_have_all_derivatives() -> None:
    """Nodes and weights are constants, and yet the derivatives are those of the integral."""
    mean, variance = (x[1:].clone().requires_grad_() for x in problem())
    rule = RULES["sinh"]

    def smooth(m: Tensor, v: Tensor) -> Tensor:
        return rule.expectation(lambda f: (0.3 * f).sin(), m, v)

    assert torch.autograd.gradcheck(smooth, (mean, variance))
    assert torch.autograd.gradgradcheck(smooth, (mean, variance))
    exact = (0.3 * mean).sin() * (-0.045 * variance).exp()
    torch.testing.assert_close(smooth(mean, variance), exact, rtol=0, atol=1e-9)
    for found, wanted in zip(
        torch.autograd.grad(smooth(mean, variance).sum(), (mean, variance)),
        torch.autograd.grad(exact.sum(), (mean, variance)),
        strict=True,
    ):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-9)
