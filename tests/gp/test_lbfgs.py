"""L-BFGS against that of torch, trial by trial; in bounded coordinates against known maxima."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dustmap.gp import FitStatus, Parameters, gradient_at, maximise
from dustmap.gp._lbfgs import minimise
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


def valley(x: Tensor) -> Tensor:
    """Rosenbrock's, in any dimension."""
    return (100.0 * (x[1:] - x[:-1].square()).square() + (1.0 - x[:-1]).square()).sum()


def ripples(x: Tensor) -> Tensor:
    """Many minima on a bowl: trials overshoot, slopes change their sign."""
    return (0.1 * x.square() - (3.0 * x).cos()).sum()


def walled(x: Tensor) -> Tensor:
    """A slope that ends at a flat wall, as where models are refused."""
    return -x.exp().sum() if bool((x < 0.7).all()) else 0.0 * x.sum() + 1e3


def bowl(x: Tensor) -> Tensor:
    """Quadratic, of condition number 10⁶."""
    return 0.5 * (torch.logspace(0, 6, len(x), dtype=x.dtype) * x.square()).sum()


def test_a_straight_line_is_followed_as_far_as_trials_go() -> None:
    start = torch.zeros(2, dtype=torch.float64)
    found = minimise(
        lambda x: gradient_at(x, lambda at: -at.sum()),
        start,
        max_steps=3,
        max_evaluations=12,
        tolerance=1e-9,
    )
    assert found.evaluations == 13  # the first trial of a search is always made
    assert float(found.x.min()) > 100.0


def test_where_there_is_no_number_is_a_wall() -> None:
    def cut(x: Tensor) -> tuple[float, Tensor]:
        if float(x[0]) > 1.5:
            return math.nan, x * math.nan
        return -float(x[0]), -torch.ones_like(x)

    start = torch.zeros(1, dtype=torch.float64)
    found = minimise(cut, start, max_steps=50, max_evaluations=200, tolerance=1e-8)
    assert 1.0 < float(found.x[0]) <= 1.5


#: Trials of a minimisation that must be torch's but for rounding.
SAME = 50


@pytest.mark.parametrize("dim", [2, 30])
@pytest.mark.parametrize("max_steps", [3, 200])
@pytest.mark.parametrize("function", [valley, ripples, walled, bowl])
def test_its_trials_are_those_of_torch(
    function: Callable[[Tensor], Tensor], max_steps: int, dim: int
) -> None:
    generator = torch.Generator().manual_seed(4)
    start = torch.randn(dim, generator=generator, dtype=torch.float64).clamp_max(0.6)
    tried, expected = [], []

    def own(x: Tensor) -> tuple[float, Tensor]:
        tried.append(x.clone())
        return gradient_at(x, function)

    found = minimise(
        own,
        start,
        max_steps=max_steps,
        max_evaluations=4 * max_steps,
        tolerance=1e-9,
    )
    z = start.clone().requires_grad_()
    optimiser = torch.optim.LBFGS(
        [z],
        max_iter=max_steps,
        max_eval=4 * max_steps,
        history_size=20,
        tolerance_grad=1e-9,
        tolerance_change=1e-13,
        line_search_fn="strong_wolfe",
    )

    def closure() -> float:
        expected.append(z.detach().clone())
        value, z.grad = gradient_at(z, function)
        return value

    optimiser.step(closure)  # type: ignore[no-untyped-call]
    assert found.evaluations == len(tried)
    # Sums of other alignment round differently, and steps amplify it: later ones part.
    early = list(zip(tried, expected, strict=False))[:SAME]
    assert len(early) == min(SAME, len(expected))
    for one, other in early:
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)
    if len(expected) <= SAME:
        assert found.evaluations == len(expected)
        assert found.steps == optimiser.state[z]["n_iter"]
    torch.testing.assert_close(function(found.x), function(z.detach()), rtol=1e-4, atol=1e-4)
