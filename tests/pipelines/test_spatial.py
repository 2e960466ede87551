"""The spatial experiment on a drawn field small enough for the dense exact GP."""

from pathlib import Path

import numpy as np
import pytest
import torch

from dustmap.gp import ConstantMean, ExactGP
from dustmap.gp.kernels import Matern32, Matern52
from dustmap.inference import RowSource, solve_direct
from pipelines.reproduce import MissingData, Request, number
from pipelines.reproduce.spatial import _models as models
from pipelines.reproduce.spatial._problem import (
    KM_PER_DEGREE,
    Origin,
    Problem,
    house_prices,
    land_temperature,
    learn,
    projected,
    split,
)

SIGMA = 0.3


@pytest.fixture(scope="module")
def problem() -> Problem:
    """200 noisy values of a Matérn-3/2 field and 50 more to predict."""
    generator = torch.Generator().manual_seed(0)
    x = 10.0 * torch.rand(250, 2, dtype=torch.float64, generator=generator)
    kernel, mean = Matern32(2.5, 1.0, dim=2).fixed(), ConstantMean(0.5, learn=False)
    K = kernel(x[:, None] - x[None, :]) + SIGMA**2 * torch.eye(250, dtype=torch.float64)
    white = torch.randn(250, dtype=torch.float64, generator=generator)
    y = (0.5 + torch.linalg.cholesky(K) @ white).float()
    origin = Origin("drawn", "f", Matern32)
    return Problem(origin, x[:200], y[:200], x[200:], y[200:], kernel, mean, SIGMA)


def test_hip_svgp_and_the_exact_gp_predict_alike(problem: Problem) -> None:
    noise = torch.full((200,), SIGMA**2)
    train = problem.train
    posterior = ExactGP(problem.kernel, problem.mean).condition(train.functional, train.y, noise)
    exact = posterior.predict(problem.test)
    for make in (
        lambda: models.hip(problem, 16, 200, 200, rtol=1e-5),
        lambda: models.cholesky(problem, 16),
    ):
        row, fitted = models.measure(problem, make)
        found = fitted.predict(problem.test)
        assert row["M"] == 256
        assert float((found.mean - exact.mean).abs().max()) < 0.1
        assert 0.9 < float((found.variance / exact.variance).mean()) < 1.5


def test_the_mean_by_cg_is_the_mean_of_the_direct_solution(
    problem: Problem, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The residuals of 1e-3 that the experiment leaves are half a per cent of the error."""
    method = models.hip(problem, 12, 200, 200, rtol=1e-6)
    model, rows = models.model_of(problem, method), problem.train.functional
    solved = solve_direct(model, problem.train, RowSource(method.train, rows), rtol=1e-5)
    direct = models.Fitted(problem, method, solved.state)
    wanted = direct.scores(models.rows_of(method.test, problem.test))["rmse"]
    monkeypatch.setattr(models, "INNER_RTOL", 1e-7)
    monkeypatch.setattr(models, "OUTER_RTOL", 1e-5)
    alone = models.mean_by_cg(problem, 12)
    assert alone["direct_converged"] is True
    assert alone["unconverged_products"] == 0
    assert number(alone, "rmse") == pytest.approx(wanted, rel=1e-4)


def test_epochs_approach_the_direct_solution(problem: Problem) -> None:
    row, _ = models.measure(problem, lambda: models.hip(problem, 12, 50, 50), epochs=3)
    start = float((problem.y_test - 0.5).square().mean().sqrt())
    assert number(row, "rmse") < number(row, "epoch3_rmse") < start
    assert number(row, "epoch_s") > 0


def test_truncated_pcg_costs_accuracy_only_gradually(problem: Problem) -> None:
    errors = [
        number(models.measure(problem, lambda s=steps: models.hip(problem, 12, s, s))[0], "rmse")  # type: ignore[misc]
        for steps in (1, 5, 100)
    ]
    assert errors[1] == pytest.approx(errors[2], rel=0.02)


def test_hyperparameters_of_a_drawn_field_are_recovered(problem: Problem) -> None:
    kernel, mean, sigma = learn(problem.x, problem.y.double(), Matern32, 200)
    assert sigma == pytest.approx(SIGMA, rel=0.4)
    assert 1.0 < float(kernel.lengthscale[0]) < 6.0
    assert not kernel.is_learned
    assert not mean.is_learned


def test_a_split_shares_no_datum() -> None:
    x = torch.rand(60, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    found = split(Origin("a", "b", Matern52), x, x.sum(-1), 40, 20, quick=False)
    both = torch.cat([found.x, found.x_test])
    assert len({tuple(row) for row in both.tolist()}) == 60
    part = found.subset(10, 5)
    assert (len(part.train), len(part.test), len(part.y_test)) == (10, 5, 5)


def test_a_degree_is_as_long_as_it_is() -> None:
    x = projected(np.array([10.0, 12.0]), np.array([59.0, 61.0]))
    assert float(x[1, 1] - x[0, 1]) == pytest.approx(2 * KM_PER_DEGREE)
    assert float(x[1, 0] - x[0, 0]) == pytest.approx(KM_PER_DEGREE, rel=1e-3)


def test_absent_data_are_named(tmp_path: Path) -> None:
    for load in (house_prices, land_temperature):
        with pytest.raises(MissingData, match="--data"):
            load(Request(True, tmp_path))
