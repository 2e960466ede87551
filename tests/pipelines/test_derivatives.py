"""The derivatives experiment: what is drawn, and that the three methods agree on it."""

import torch

from dustmap.gp.functionals import PointValues
from pipelines.reproduce.derivatives import experiment as derivatives


def test_slopes_are_the_derivatives_of_the_drawn_function() -> None:
    drawn = derivatives.draw(3)
    x = torch.linspace(0.1, 0.9, 7, dtype=torch.float64)
    step = 1e-6
    numeric = (drawn.truth(x + step) - drawn.truth(x - step)) / (2 * step)
    torch.testing.assert_close(derivatives.slope(drawn.truth, x), numeric, rtol=1e-6, atol=1e-6)


def test_data_have_the_counts_and_noise_of_the_paper() -> None:
    drawn = derivatives.draw(0)
    assert (len(drawn.values), len(drawn.slopes)) == (100, 20)
    both = drawn.batch(with_derivatives=True)
    assert both.noise_variance is not None
    assert len(both) == 120
    expected = torch.tensor([0.05**2] * 100 + [0.2**2] * 20, dtype=torch.float64)
    torch.testing.assert_close(both.noise_variance, expected)


def test_the_drawn_functions_have_the_variance_of_the_kernel() -> None:
    x = torch.linspace(0.0, 1.0, 50, dtype=torch.float64)
    draws = torch.stack([derivatives.draw(seed).truth(x) for seed in range(200)])
    assert abs(float(draws.square().mean()) / derivatives.VARIANCE - 1.0) < 0.15


def test_the_same_seed_draws_the_same_data() -> None:
    a, b = derivatives.draw(5).batch(True), derivatives.draw(5).batch(True)
    assert torch.equal(a.y, b.y)


def test_hip_gp_svgp_and_the_exact_gp_agree_with_and_without_derivatives() -> None:
    goals = derivatives.goals(derivatives.rows_of(derivatives.draw(1), 1))
    assert len(goals) == 10
    assert [goal.name for goal in goals if not goal.met] == []


def test_a_short_solver_still_gives_a_valid_posterior() -> None:
    drawn = derivatives.draw(2)
    x = torch.linspace(0.0, 1.0, 30, dtype=torch.float64)[:, None]
    found = derivatives.posteriors(drawn, True)
    exact = found["exact"].predict(PointValues(x))
    short = found["HIP-GP, 20 PCG steps"].predict(PointValues(x))
    assert bool((short.variance > 0.99 * exact.variance).all())
    torch.testing.assert_close(short.mean, exact.mean, rtol=0.0, atol=1e-3)
