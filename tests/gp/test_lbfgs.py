"""L-BFGS in bounded coordinates against maxima that are known."""

import math

import pytest
import torch
from torch import Tensor

from dustmap.gp import FitStatus, Parameters, gradient_at, maximise
from dustmap.gp.kernels import Matern32, StationaryKernel


def start(prior_std: float | None = None) -> Parameters[StationaryKernel]:
    return Parameters.of(Matern32(1.0, 1.0, dim=1), prior_std=prior_std)


TOP = torch.tensor([1.3, -0.4], dtype=torch.float64)
CURVATURE = torch.tensor([[3.0, 1.0], [1.0, 2.0]], dtype=torch.float64)


def quadratic(theta: Tensor) -> Tensor:
    return 5.0 - 0.5 * (theta - TOP) @ CURVATURE @ (theta - TOP)


def test_the_top_of_a_quadratic_function() -> None:
    found = maximise(
        start(), lambda t: gradient_at(t, quadratic), n_data=1, max_steps=50, tolerance=1e-6
    )
    torch.testing.assert_close(found.theta, TOP, rtol=0, atol=1e-6)
    assert found.status is FitStatus.CONVERGED
    assert found.history[-1] == max(found.history) == pytest.approx(5.0)
    assert found.refused == 0


def test_the_prior_is_added_and_all_is_per_datum() -> None:
    std, n = 0.8, 7
    found = maximise(
        start(std), lambda t: gradient_at(t, quadratic), n_data=n, max_steps=50, tolerance=1e-9
    )
    precision = torch.eye(2, dtype=torch.float64) / std**2
    top = torch.linalg.solve(CURVATURE + precision, CURVATURE @ TOP)
    torch.testing.assert_close(found.theta, top, rtol=0, atol=1e-7)
    expected = float(quadratic(top)) - 0.5 * float(top.square().sum()) / std**2
    assert found.history[-1] == pytest.approx(expected / n)


def test_a_slope_without_end_stops_at_the_bound() -> None:
    found = maximise(
        start(), lambda t: gradient_at(t, torch.sum), n_data=1, max_steps=100, tolerance=1e-8
    )
    assert found.status is FitStatus.AT_BOUND
    assert float(found.theta.max()) == pytest.approx(math.log(1e3), rel=0.05)


def test_refusals_are_walls_and_counted_but_not_at_the_start() -> None:
    def refused(theta: Tensor) -> tuple[float, Tensor]:
        if float(theta[0]) > 0.5:
            raise ValueError("no factor")
        return gradient_at(theta, lambda t: 50.0 * (t - 10.0).square().sum().neg())

    found = maximise(start(), refused, n_data=1, max_steps=20, tolerance=1e-8)
    assert found.refused > 0
    assert float(found.theta[0]) <= 0.5
    assert found.history[-1] >= found.history[0]

    def never(theta: Tensor) -> tuple[float, Tensor]:
        raise ValueError("no factor")

    with pytest.raises(ValueError, match="no factor"):
        maximise(start(), never, n_data=1, max_steps=20, tolerance=1e-8)
