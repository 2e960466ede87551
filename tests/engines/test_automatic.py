"""The rule behind "auto": rows, columns, memory, and what grids leave; scores at its switches."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from dustmap import HIPGPRegressor, engines
from dustmap.engines import AutomaticEngine, Problem
from dustmap.errors import UserError
from dustmap.gp import Batch, ConstantMean, GPModel, RegularGrid
from dustmap.gp.functionals import PointValues
from dustmap.gp.kernels import Matern32
from dustmap.gp.likelihoods import GaussianLikelihood
from tests.regression_cases import ENGINES, Array, wave

MEMORY = 4 * 2**30


def automatic(memory: int = MEMORY, **inducing: object) -> AutomaticEngine:
    """All engines at defaults."""
    learning = engines.EvidenceSettings(rows=100, search_start=True)
    of_grid = replace(engines.InducingSettings(learning, max_memory=memory), **inducing)  # type: ignore[arg-type]
    points = engines.PointSettings(8, 4.0, torch.float64, memory, grid=of_grid.grid)
    return AutomaticEngine(
        engines.ExactEngine(engines.ExactSettings(learning, memory)),
        engines.InducingEngine(of_grid),
        engines.PathwiseEngine(engines.PathwiseSettings(points, learning)),
        engines.FreePointsEngine(engines.FreePointSettings(max_memory=memory), collapsed=False),
    )


def problem(n: int, dim: int, length: float, noise: float = 0.1) -> Problem:
    """n places in a unit cube; targets have no part in the rule."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand((n, dim), generator=generator, dtype=torch.float64)
    model = GPModel(Matern32([length] * dim), ConstantMean(), GaussianLikelihood(jitter=noise))
    return Problem(model, Batch(PointValues(x), torch.zeros(n, dtype=torch.float64)))


@pytest.mark.parametrize(
    ("n", "dim", "length", "name"),
    [
        (100, 1, 0.3, "exact"),
        (2_000, 2, 3.0, "exact"),
        (2_001, 2, 3.0, "hip"),  # a few points of a grid are fine enough
        (2_001, 2, 0.02, "exact"),  # they are not
        (10_000, 4, 0.1, "exact"),
        (10_001, 4, 0.1, "global"),
        (10_001, 2, 3.0, "hip"),
        (10_001, 4, 1.0, "hip"),  # few points leave less than as many with padding around them
        (10_000, 5, 3.0, "exact"),
        (16_384, 5, 3.0, "exact"),
        (16_385, 5, 3.0, "svgp"),
        (100_000, 54, 3.0, "svgp"),
    ],
)
def test_rows_columns_and_kernel_choose(n: int, dim: int, length: float, name: str) -> None:
    choice = automatic().choose(problem(n, dim, length))
    assert choice.name == name
    assert choice.reason


def test_a_family_that_is_asked_for_is_kept() -> None:
    for asked in (automatic(family="block"), automatic(whitening="torus")):
        assert asked.choose(problem(5_000, 2, 1.0)).name == "hip"
    assert automatic().choose(problem(5_000, 2, 0.02)).name == "exact"


def test_free_points_take_over_where_no_grid_is_near_fine_enough() -> None:
    rows = problem(20_001, 4, 0.5, noise=1e-3)
    choice = automatic(10**8).choose(rows)
    assert choice.name == "svgp"
    assert "no grid is fine enough" in choice.reason
    # Dense matrices are better while they fit.
    fewer = automatic().choose(problem(10_001, 4, 0.5, noise=1e-3))
    assert fewer.name == "exact"
    assert "times the posterior variance" in fewer.reason
    # Of a grid that has to be, the better one is left.
    asked = automatic(10**8, family="full").choose(rows)
    assert asked.name in ("hip", "global")


def test_less_memory_means_fewer_dense_rows() -> None:
    assert automatic(10**8).choose(problem(2_001, 4, 0.1)).name == "exact"
    choice = automatic(10**7).choose(problem(1_000, 4, 0.1))  # its matrices take 16 MB
    assert choice.name == "global"
    assert "790" in choice.reason
    assert automatic(10**7).choose(problem(1_000, 5, 0.1)).name == "svgp"


def test_a_given_grid_is_kept() -> None:
    small = automatic(grid=RegularGrid((0.0, 0.0), (0.1, 0.1), (11, 11)))
    assert small.choose(problem(100, 2, 0.3)).name == "hip"
    large = RegularGrid((0.0, 0.0), (0.01, 0.01), (101, 101))
    assert automatic(grid=large).choose(problem(100, 2, 0.3)).name == "global"
    for asked in ({"family": "block"}, {"whitening": "torus"}, {"block": (8, 8)}):
        assert automatic(grid=large, **asked).choose(problem(100, 2, 0.3)).name == "hip"


@pytest.mark.parametrize("engine", [*ENGINES, "svgp", "sgpr"])
def test_a_given_engine_is_never_overridden(engine: str) -> None:
    X, truth, noise = wave(60, 2)
    model = HIPGPRegressor(
        "matern32", engine=engine, epochs=2, max_steps=5, samples=4, inducing=20
    ).fit(X, truth + noise)
    assert model.engine_ == model.report_["engine"] == engine
    assert "engine_choice" not in model.report_


def test_the_report_says_which_and_why() -> None:
    X, truth, noise = wave(60, 2)
    model = HIPGPRegressor("matern32", max_steps=5).fit(X, truth + noise)
    assert model.engine_ == "exact"
    assert model.report_["engine_choice"] == {
        "name": "exact",
        "reason": "60 rows: dense matrices fit the memory",
    }


def rough(X: Array) -> Array:
    """Steps and edges: what no stationary process draws."""
    return np.abs((9.0 * X[:, 0]) % 2.0 - 1.0) + np.floor(3.0 * X[:, 1])


def smooth(X: Array) -> Array:
    """Few points of a grid can follow it."""
    return np.sin(3.0 * X[:, 0]) * np.cos(2.0 * X[:, 1])


@pytest.mark.slow
@pytest.mark.parametrize(("truth", "n"), [(rough, 6_001), (smooth, 2_001)])
def test_scores_do_not_jump_at_a_switch(truth: Callable[[Array], Array], n: int) -> None:
    rng = np.random.default_rng(0)
    X, new = rng.uniform(size=(n, 2)), rng.uniform(size=(500, 2))
    y = truth(X) + 0.2 * rng.standard_normal(n)
    before = HIPGPRegressor("matern32", engine="exact", n_learn=300).fit(X, y)
    after = HIPGPRegressor(before.kernel_, noise=before.noise_std_, learn=False).fit(X, y)
    assert after.engine_ == "hip"
    scores = []
    for model in (before, after):
        mean, std = model.predict(new, return_std=True)
        error = mean - truth(new)
        nlpd = 0.5 * np.mean(error**2 / std**2 + np.log(2.0 * np.pi * std**2))
        scores.append((np.sqrt(np.mean(error**2)), nlpd))
    (rmse, nlpd), (next_rmse, next_nlpd) = scores
    assert next_rmse == pytest.approx(rmse, rel=0.03)
    assert next_nlpd == pytest.approx(nlpd, abs=0.05)


@pytest.mark.parametrize(
    ("arguments", "columns", "said"),
    [
        ({"engine": "hip"}, 5, '4 axes at most: use engine="svgp"'),
        ({"grid": (4, 4, 4, 4, 4)}, 5, '4 axes at most: leave grid="auto"'),
        ({"engine": "svgp", "grid": (4, 4)}, 2, 'engine="svgp" has no grid'),
        ({"engine": "best"}, 2, "engine = 'best': expected one of 'auto', 'exact'"),
    ],
)
def test_what_cannot_be_is_refused(arguments: dict[str, object], columns: int, said: str) -> None:
    X = np.random.default_rng(0).uniform(size=(20, columns))
    with pytest.raises(UserError, match=said):
        HIPGPRegressor(**arguments).fit(X, X[:, 0])  # type: ignore[arg-type]


def test_a_refit_to_more_rows_than_a_dense_fit_takes_goes_on_a_grid() -> None:
    rng = np.random.default_rng(0)
    X = rng.uniform(size=(700, 2))
    y = rough(X) + 0.2 * rng.standard_normal(700)
    model = HIPGPRegressor("matern32", max_memory=7 * 10**6, n_learn=400, samples=8)
    fitted = model.fit(X[:600], y[:600])
    assert fitted.engine_ == "exact"
    again = fitted.refit(X, y)
    assert again.engine_ in ("global", "hip")
    assert again.report_["engine_choice"]["name"] == again.engine_
    apart = again.predict(X[600:]) - y[600:]
    assert np.sqrt(np.mean(apart**2)) < 0.3


@pytest.mark.parametrize(
    ("dim", "length", "memory", "name"),
    [
        (2, 0.3, MEMORY, "global"),
        (4, 0.1, MEMORY, "exact"),  # 48 variables a datum leave a coarse grid
        (4, 0.1, 10**6, "global"),  # five matrices of 300 × 300 take four times as much
    ],
)
def test_student_t_noise_takes_dense_algebra_where_the_grid_is_coarse(
    dim: int, length: float, memory: int, name: str
) -> None:
    auto = automatic(memory)
    robust = engines.StudentTEngine(auto.pathwise, auto.exact.settings.learning, auto.exact)
    asked = problem(300, dim, length)
    expected = {"global": auto.pathwise, "exact": auto.exact}[name].plan(asked)
    other = {"global": auto.exact, "exact": auto.pathwise}[name].plan(asked)
    assert robust.plan(asked) == expected != other


@pytest.mark.slow
def test_student_t_noise_of_many_rows_reports_the_engine() -> None:
    rng = np.random.default_rng(0)
    X = rng.uniform(size=(2_101, 3))
    truth = np.sin(12.0 * X[:, 0]) * np.cos(10.0 * X[:, 1]) + np.sin(7.0 * X[:, 2])
    y = truth + 0.1 * rng.standard_t(3, len(X))
    kernel = Matern32([0.68, 0.97, 1.35], 14.8)
    model = HIPGPRegressor(kernel, noise="student-t", learn=("noise", "mean"))
    model.fit(X[:-100], y[:-100])
    assert model.engine_ == model.report_["engine_choice"]["name"] == "exact"
    assert "too coarse" in model.report_["engine_choice"]["reason"]
    mean, std = model.predict(X[-100:], return_std=True)
    assert 0.7 < np.sqrt(np.mean(((mean - truth[-100:]) / std) ** 2)) < 1.3


def test_rows_at_one_place_have_no_grid() -> None:
    X = np.ones((2_100, 1))
    y = 3.0 + np.random.default_rng(0).standard_normal(2_100)
    fitted = HIPGPRegressor("matern32", n_learn=300).fit(X, y)
    assert fitted.engine_ == "exact"
    assert abs(fitted.predict(X[:1])[0] - y.mean()) < 0.01
