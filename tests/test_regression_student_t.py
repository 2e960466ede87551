"""Regression with Student-t noise: outliers, refusals, checkpoints."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy.stats import t
from sklearn.base import clone
from sklearn.utils.estimator_checks import parametrize_with_checks

from dustmap import HIPGPRegressor
from dustmap.engines import choose_kernel, plain_part, plain_rows
from dustmap.gp import Batch, ConstantMean, GPModel
from dustmap.gp.functionals import PointValues
from dustmap.gp.kernels import Matern32
from dustmap.gp.likelihoods import GaussianLikelihood

Array = NDArray[np.float64]


@pytest.mark.slow
@parametrize_with_checks(  # type: ignore[untyped-decorator]
    [HIPGPRegressor(noise="student-t", max_steps=5)]
)
def test_conventions_of_scikit_learn(
    estimator: HIPGPRegressor, check: Callable[[HIPGPRegressor], None]
) -> None:
    check(estimator)


def surface(X: Array) -> Array:
    """A smooth function of two inputs."""
    wave = np.sin(6.0 * X[:, 0]) * np.cos(4.0 * X[:, 1]) + 0.3 * np.sin(20.0 * X[:, 0])
    return np.asarray(7.0 + wave)


def rows(n: int, seed: int = 0) -> tuple[Array, Array, Array]:
    """Inputs, targets with noise of 0.1, and these with 1 % of them 10⁴ σ off."""
    rng = np.random.default_rng(seed)
    X = rng.uniform(size=(n, 2))
    y = surface(X) + 0.1 * rng.standard_normal(n)
    dirty = y.copy()
    hit = rng.permutation(n)[: n // 100]
    dirty[hit] += 1e3 * rng.choice([-1.0, 1.0], len(hit))
    return X, y, dirty


def rmse(model: HIPGPRegressor) -> float:
    Q = np.random.default_rng(9).uniform(size=(400, 2))
    return float(np.sqrt(np.mean((model.predict(Q) - surface(Q)) ** 2)))


@pytest.mark.parametrize(
    ("engine", "n"), [("exact", 400), pytest.param("global", 3000, marks=pytest.mark.slow)]
)
def test_gross_outliers_do_not_ruin_the_fit(engine: str, n: int) -> None:
    X, y, dirty = rows(n)
    # Both learn from as many rows.
    clean = HIPGPRegressor("matern32", engine=engine, samples=16, n_learn=1_000).fit(X, y)
    robust = HIPGPRegressor("matern32", noise="student-t", samples=16).fit(X, dirty)
    assert robust.engine_ == engine
    assert robust.report_["student_t"]["converged"]
    assert robust.report_["learning"]["status"] == "converged"
    assert rmse(robust) < 1.2 * rmse(clean)
    assert robust.noise_dof_ is not None
    assert robust.noise_dof_ < 4.0
    assert robust.noise_std_ == pytest.approx(0.1, rel=0.2)
    Q = X[:50]
    mean, std = robust.predict(Q, return_std=True)
    assert 0.4 < np.sqrt(np.mean(((mean - surface(Q)) / std) ** 2)) < 1.6
    assert robust.score(X[:200], surface(X[:200])) > 0.98


def step(X: Array) -> Array:
    return np.asarray(5.0 * (X[:, 0] > 0.52))


TRUTHS: dict[str, tuple[int, Callable[[Array], Array], float]] = {
    "step": (2, step, 0.05),
    "plateau": (2, lambda X: np.asarray(5.0 * (X[:, 0] > 0.8)), 0.05),
    "spike": (1, lambda X: np.asarray(5.0 * np.exp(-0.5 * ((X[:, 0] - 0.3) / 0.01) ** 2)), 0.1),
    "no noise": (3, lambda X: np.sin(6.0 * X).sum(1), 0.0),
    "five columns": (5, lambda X: np.sin(3.0 * X).sum(1), 0.05),
}


@pytest.mark.parametrize("name", TRUTHS)
def test_outliers_are_told_from_steps_plateaus_and_spikes(name: str) -> None:
    dim, truth, noise = TRUTHS[name]
    rng = np.random.default_rng(0)
    X = rng.uniform(size=(2_000, dim))
    y = truth(X) + noise * rng.standard_normal(len(X))
    assert len(plain_rows(X, y)) > 0.99 * len(X)
    wild = rng.uniform(size=len(X)) < 0.2
    kept = plain_rows(X, np.where(wild, -99.0, y))
    assert len(np.intersect1d(kept, wild.nonzero()[0])) <= 0.02 * wild.sum()
    assert len(np.intersect1d(kept, (~wild).nonzero()[0])) > 0.99 * (~wild).sum()
    few = plain_rows(1e6 + 1e-3 * X, y, most=500, seed=1)
    assert 490 < len(few) <= 500


def test_rows_on_the_other_side_of_a_step_are_no_outliers() -> None:
    """More than half of the rows are at 0: their median deviation is that of the noise."""
    rng = np.random.default_rng(0)
    X = rng.uniform(size=(300, 2))
    y = step(X) + 0.05 * rng.standard_normal(len(X))
    y[::40] += 3.0
    Q = rng.uniform(size=(300, 2))
    Q = Q[np.abs(Q[:, 0] - 0.52) > 0.05]
    fitted = HIPGPRegressor("matern12", noise="student-t").fit(X, y)
    assert np.sqrt(np.mean((fitted.predict(Q) - step(Q)) ** 2)) < 0.2


@pytest.mark.slow
@pytest.mark.parametrize("seed", [2, 3, 4])
def test_outliers_do_not_hide_how_smooth_a_function_is(seed: int) -> None:
    rng = np.random.default_rng(seed)
    X = rng.uniform(size=(2_500, 2))
    f = np.sin(5.0 * X[:, 0]) + 2.0 * X[:, 1] ** 2
    y, wild = f + 0.2 * rng.standard_normal(len(X)), rng.uniform(size=len(X)) < 0.05
    y[wild] += rng.choice([-1.0, 1.0], wild.sum()) * rng.uniform(2.0, 20.0, wild.sum())
    start = GPModel(Matern32([1.0, 1.0], 1.0), ConstantMean(), GaussianLikelihood(jitter=0.1))
    data = Batch(PointValues(torch.from_numpy((X - 0.5) / 0.29)), torch.from_numpy(y))
    hidden, plain = (choose_kernel(start, each) for each in (data, plain_part(data, 100_000)))
    assert plain.name in ("matern32", "matern52")
    assert hidden.candidates[0].difference > -0.01
    assert plain.candidates[0].difference < -0.015


def test_noise_of_t_is_learned_with_and_without_its_errors() -> None:
    rng = np.random.default_rng(1)
    X = rng.uniform(size=(400, 1))
    sigma = rng.uniform(0.05, 0.2, 400)
    y = np.sin(6.0 * X[:, 0]) + 2.0 * sigma * rng.standard_t(3.0, 400)
    model = HIPGPRegressor(noise="student-t").fit(X, y, noise_std=sigma)
    assert model.noise_std_ is None
    assert model.noise_dof_ is not None
    assert 2.0 < model.noise_dof_ < 5.0
    core = t.ppf(0.8413447460685429, model.noise_dof_)
    scale = model.report_["hyperparameters"]["noise_scale"]
    assert scale == pytest.approx(2.0 * core, rel=0.2)
    of_field = model.predict(X[:3], return_std=True)[1]
    measured = model.predict(X[:3], return_std=True, include_noise=True, noise_std=sigma[:3])[1]
    np.testing.assert_allclose(measured**2 - of_field**2, (scale * sigma[:3]) ** 2, rtol=1e-6)


@pytest.mark.slow
def test_global_and_exact_engines_agree() -> None:
    X, _, dirty = rows(300)
    kernel = HIPGPRegressor("matern32", noise="student-t").fit(X, dirty).kernel_
    fits = [
        HIPGPRegressor(
            kernel, engine=engine, noise="student-t", learn=("noise", "mean"), samples=300
        ).fit(X, dirty)
        for engine in ("exact", "global")
    ]
    (exact, std), (whole, spread) = (fit.predict(X, return_std=True) for fit in fits)
    assert fits[1].noise_dof_ == pytest.approx(fits[0].noise_dof_, rel=0.1)
    assert np.sqrt(np.mean(((whole - exact) / std) ** 2)) < 0.1
    assert np.mean(spread / std) == pytest.approx(1.0, abs=0.05)


@pytest.mark.parametrize("engine", ["hip", "svgp", "sgpr"])
def test_engines_without_student_t_noise_refuse_it(engine: str) -> None:
    X, y, _ = rows(30)
    model = HIPGPRegressor(engine=engine, noise="student-t")
    with pytest.raises(ValueError, match=r'has no noise="student-t": use engine="global"'):
        model.fit(X, y)


def test_automatic_engines_have_it() -> None:
    X, y, _ = rows(100)
    model = HIPGPRegressor(grid=(20, 20), noise="student-t", max_steps=5, samples=4).fit(X, y)
    assert model.engine_ == "global"


def test_fits_are_saved_with_their_degrees_of_freedom(tmp_path: Path) -> None:
    X, _, dirty = rows(60)
    model = clone(HIPGPRegressor(noise="student-t", max_steps=5)).fit(X, dirty)
    model.save(tmp_path / "model")
    again = HIPGPRegressor.load(tmp_path / "model")
    assert again.noise_dof_ == model.noise_dof_
    assert again.noise_std_ == pytest.approx(model.noise_std_, rel=1e-12)
    assert again.get_params()["noise"] == "student-t"
    for include in (False, True):
        ours, theirs = (
            m.predict(X[:5], return_std=True, include_noise=include) for m in (model, again)
        )
        np.testing.assert_allclose(theirs, ours, rtol=1e-8)


def test_more_rows_than_dense_rounds_take_are_refused_in_many_columns() -> None:
    X = np.zeros((10_001, 5))
    for engine in ("auto", "exact"):
        with pytest.raises(ValueError, match="repeated dense solves of 10,000 rows at most in 5"):
            HIPGPRegressor(noise="student-t", engine=engine).fit(X, X[:, 0])


def test_equal_targets_bound_the_noise_and_are_named() -> None:
    """Seven in ten rows at 0: the others are outliers, whatever the width is."""
    rng = np.random.default_rng(2)
    X = np.sort(rng.uniform(0.0, 10.0, 120))[:, None]
    y = np.where(rng.uniform(size=120) < 0.7, 0.0, rng.standard_normal(120))
    model = HIPGPRegressor("matern32", noise="student-t").fit(X, y)
    assert model.noise_std_ is not None
    assert model.noise_std_ > 1e-5 * y.std()
    assert "of 120 targets are equal" in model.report_["advice"][0]


def test_gross_outliers_do_not_widen_the_noise() -> None:
    rng = np.random.default_rng(0)
    X = np.sort(rng.uniform(0.0, 10.0, 150))[:, None]
    y = np.sin(X[:, 0]) + 0.01 * rng.standard_normal(150)
    y[::40] = -99999.0
    model = HIPGPRegressor("matern52", noise="student-t").fit(X, y)
    assert model.noise_std_ == pytest.approx(0.01, rel=0.4)
    assert np.sqrt(np.mean((model.predict(X) - np.sin(X[:, 0])) ** 2)) < 0.01


@pytest.mark.parametrize("rows", [2, 3, 4, 5])
def test_few_rows_are_no_outliers_of_each_other(rows: int) -> None:
    """Neighbours that do not exist are none that a row is unlike."""
    x = np.linspace(0.0, 1.0, rows)[:, None]
    assert len(plain_rows(x, 2.0 * x[:, 0])) == rows
    model = HIPGPRegressor("matern32", noise="student-t").fit(x, 2.0 * x[:, 0])
    assert np.isfinite(model.predict(x)).all()


def test_one_of_five_rows_is_an_outlier() -> None:
    x = np.linspace(0.0, 1.0, 5)
    y = np.where(np.arange(5) == 2, 50.0, x)
    assert plain_rows(x[:, None], y).tolist() == [0, 1, 3, 4]
