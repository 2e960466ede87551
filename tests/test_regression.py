"""The estimator: scikit-learn's contract, both engines against each other, and bad input."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.utils.estimator_checks import parametrize_with_checks

from dustmap import HIPGPRegressor
from dustmap.errors import UserError
from dustmap.gp import RegularGrid
from dustmap.gp.kernels import Matern32, Matern52
from tests.combinations import covering
from tests.regression_cases import ENGINES, FEW, wave, wave_kernel


@pytest.mark.filterwarnings("ignore:.*SCIPY_ARRAY_API.*")
@parametrize_with_checks([HIPGPRegressor("matern32", max_steps=8)])  # type: ignore[untyped-decorator]
def test_scikit_learn_contract(estimator: HIPGPRegressor, check: Any) -> None:
    check(estimator)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*SCIPY_ARRAY_API.*")
@parametrize_with_checks([HIPGPRegressor()])  # type: ignore[untyped-decorator]
def test_scikit_learn_contract_of_kernels_that_are_chosen(
    estimator: HIPGPRegressor, check: Any
) -> None:
    check(estimator)


def test_readme_in_ten_lines(capsys: pytest.CaptureFixture[str]) -> None:
    readme = (Path(__file__).resolve().parents[1] / "README.md").read_text(encoding="utf-8")
    section = readme.split("## Regression in ten lines")[1]
    code = section.split("```python\n")[1].split("```")[0]
    assert len(code.strip().splitlines()) == 10
    names: dict[str, Any] = {}
    # Learning on 2,000 rows and the choice of a kernel are most of the time, and not what the
    # section is about.
    exec(code.replace("HIPGPRegressor()", "HIPGPRegressor('matern32', n_learn=300)"), names)
    assert names["model"].engine_ == "hip"
    error = names["mean"] - np.sin(names["X"][2500:, 0]) * np.cos(names["X"][2500:, 1])
    assert np.sqrt(np.mean(error**2)) < 0.05
    assert 0.4 < np.mean((error / names["std"]) ** 2) < 1.3
    assert capsys.readouterr().out.strip().endswith("[]")


@pytest.mark.parametrize(
    ("dim", "whitening"), covering([1, 2, 3], ["torus", "hip", "cholesky", "ciq"])
)
def test_grid_agrees_with_exact(dim: int, whitening: str) -> None:
    X, truth, noise = wave(240, dim)
    X, y, new = X[:200], (truth + 2.0 * noise)[:200], X[200:]
    exact = HIPGPRegressor(wave_kernel(dim), noise=2.0, learn=False).fit(X, y)
    grid = {1: (40,), 2: (21, 21), 3: (9, 9, 9)}[dim]
    hip = HIPGPRegressor(
        wave_kernel(dim), grid=grid, whitening=whitening, noise=2.0, learn=False
    ).fit(X, y)
    assert (exact.engine_, hip.engine_) == ("exact", "hip")
    assert hip.report_["advice"] == []
    mean, std = exact.predict(new, return_std=True)
    grid_mean, grid_std = hip.predict(new, return_std=True)
    assert np.sqrt(np.mean((grid_mean - mean) ** 2)) < 0.15 * std.mean()
    if hip.report_["family"] == "full":
        assert np.mean(grid_std / std) == pytest.approx(1.0, abs=0.03)
    assert hip.elbo_ <= exact.log_evidence_


def test_grid_approaches_exact_as_it_is_refined() -> None:
    X, truth, noise = wave(200, 1)
    exact = HIPGPRegressor().fit(X, truth + noise)
    mean, std = exact.predict(X, return_std=True)
    worst_mean, worst_std = [], []
    for points in (8, 32, 128):
        hip = HIPGPRegressor(exact.kernel_, grid=(points,), noise=exact.noise_std_, learn=("mean",))
        grid_mean, grid_std = hip.fit(X, truth + noise).predict(X, return_std=True)
        worst_mean.append(np.abs(grid_mean - mean).max() / std.mean())
        worst_std.append(np.abs(grid_std / std - 1.0).max())
    assert worst_mean[0] > worst_mean[1] > worst_mean[2]
    assert worst_std[0] > worst_std[1] > worst_std[2]
    assert worst_mean[2] < 0.02
    assert worst_std[2] < 0.02


def test_predictions_beyond_the_grid_return_to_the_prior() -> None:
    X, truth, noise = wave(200, 1)
    exact = HIPGPRegressor().fit(X, truth + noise)
    hip = HIPGPRegressor(exact.kernel_, grid=(100,), noise=exact.noise_std_, learn=("mean",))
    hip.fit(X, truth + noise)
    length = exact.kernel_.terms()[0].lengthscale.detach().numpy()
    beyond = X.max() + length * np.array([[0.05], [0.5], [2.0], [50.0]])
    mean, std = exact.predict(beyond, return_std=True)
    grid_mean, grid_std = hip.predict(beyond, return_std=True)
    np.testing.assert_allclose(grid_mean, mean, atol=0.05 * std.max())
    np.testing.assert_allclose(grid_std, std, rtol=0.02)
    assert grid_mean[-1] == pytest.approx(hip.mean_[0])


@pytest.mark.parametrize("engine", ENGINES)
def test_noise_and_calibration(engine: str) -> None:
    X, truth, noise = wave(1500, 1)
    model = HIPGPRegressor("matern32", engine=engine).fit(X[:400], (truth + 3.0 * noise)[:400])
    assert model.noise_std_ == pytest.approx(3.0, rel=0.1)
    mean, std = model.predict(X[400:], return_std=True)
    within = np.abs(mean - truth[400:]) < 1.96 * std
    assert 0.85 < within.mean() <= 1.0
    _, wider = model.predict(X[400:], return_std=True, include_noise=True)
    within = np.abs(mean - (truth + 3.0 * noise)[400:]) < 1.96 * wider
    assert 0.93 < within.mean() < 0.97


@pytest.mark.parametrize("engine", ENGINES)
def test_units_do_not_matter(engine: str) -> None:
    X, truth, noise = wave(200, 2)
    y = truth + noise
    plain = HIPGPRegressor(engine=engine).fit(X[:150], y[:150])
    other = HIPGPRegressor(engine=engine).fit(1e3 * X[:150] - 7.0, 1e-4 * y[:150] + 2.0)
    mean, std = plain.predict(X[150:], return_std=True)
    scaled_mean, scaled_std = other.predict(1e3 * X[150:] - 7.0, return_std=True)
    np.testing.assert_allclose((scaled_mean - 2.0) / 1e-4, mean, rtol=1e-6)
    np.testing.assert_allclose(scaled_std / 1e-4, std, rtol=1e-4)
    term, scaled_term = plain.kernel_.terms()[0], other.kernel_.terms()[0]
    np.testing.assert_allclose(
        scaled_term.lengthscale.detach(), 1e3 * term.lengthscale.detach(), rtol=1e-4
    )
    np.testing.assert_allclose(
        scaled_term.variance.detach(), 1e-8 * term.variance.detach(), rtol=1e-3
    )
    assert plain.noise_std_ is not None
    assert other.noise_std_ == pytest.approx(1e-4 * plain.noise_std_, rel=1e-4)
    if engine == "global":
        assert not hasattr(plain, "log_evidence_")
        return
    evidence = "log_evidence_" if engine == "exact" else "elbo_"
    shift = 150 * np.log(1e-4)
    assert getattr(other, evidence) == pytest.approx(getattr(plain, evidence) - shift, rel=1e-6)


@pytest.mark.parametrize(("engine", "noise"), covering(ENGINES, ["auto", "scale", "jitter"]))
def test_noise_of_each_datum(engine: str, noise: str) -> None:
    X, truth, white = wave(400, 1)
    std = np.where(np.arange(400) % 2 == 0, 0.5, 5.0)
    model = HIPGPRegressor("matern32", engine=engine, noise=noise)
    model.fit(X, truth + std * white, noise_std=std)
    assert model.noise_std_ is None
    error = model.predict(X) - truth
    assert np.sqrt(np.mean(error**2)) < 0.5
    _, latent = model.predict(X, return_std=True)
    _, wider = model.predict(X, return_std=True, include_noise=True, noise_std=std)
    np.testing.assert_allclose(np.sqrt(wider**2 - latent**2), std, rtol=0.3)
    with pytest.raises(ValueError, match="noise_std: the data of fit had a noise_std"):
        model.predict(X, return_std=True, include_noise=True)


def test_linear_mean_extrapolates() -> None:
    rng = np.random.default_rng(0)
    X = rng.uniform(size=(200, 2))
    y = 3.0 + X @ [5.0, -2.0] + 0.01 * rng.standard_normal(200)
    model = HIPGPRegressor("matern32", mean="linear").fit(X, y)
    np.testing.assert_allclose(model.mean_, [3.0, 5.0, -2.0], atol=0.05)
    np.testing.assert_allclose(model.predict([[3.0, 3.0]]), 12.0, atol=0.3)


@pytest.mark.parametrize("engine", ENGINES)
def test_kernel_objects_are_copied_and_in_user_units(engine: str) -> None:
    X, truth, noise = wave(200, 2)
    kernel = Matern52([2.0, 20.0], 30.0) + Matern32(1.0, 0.5, dim=2)
    before = [p.value.clone() for p in kernel.parameters()]
    model = HIPGPRegressor(kernel, engine=engine, grid="auto").fit(X, truth + noise)
    assert all(bool((p.value == q).all()) for p, q in zip(kernel.parameters(), before, strict=True))
    assert [term.profile.name for term in model.kernel_.terms()] == ["matern52", "matern32"]
    assert model.score(X, truth) > 0.9
    fixed = HIPGPRegressor(kernel, engine=engine, learn=False, noise=1.0).fit(X, truth + noise)
    for term, given in zip(fixed.kernel_.terms(), kernel.terms(), strict=True):
        np.testing.assert_allclose(term.lengthscale.detach(), given.lengthscale.detach())
    assert fixed.report_["learning"] == {"status": "nothing to learn"}


@pytest.mark.parametrize("engine", ENGINES)
def test_samples_and_covariance_agree_with_the_marginals(engine: str) -> None:
    X, truth, noise = wave(150, 1)
    count = 1000
    model = HIPGPRegressor("matern32", engine=engine, samples=count, n_learn=100)
    model.fit(X, truth + noise)
    new = X[:12] + 0.01
    mean, std = model.predict(new, return_std=True)
    mean_too, covariance = model.predict(new, return_cov=True)
    np.testing.assert_allclose(mean_too, mean)
    np.testing.assert_allclose(np.sqrt(np.diag(covariance)), std, rtol=1e-4)
    draws = model.sample_y(new, n_samples=count, random_state=1)
    assert draws.shape == (12, count)
    np.testing.assert_allclose(draws.mean(axis=1), mean, atol=5.0 * std.max() / np.sqrt(count))
    np.testing.assert_allclose(draws.std(axis=1), std, rtol=0.1)
    np.testing.assert_array_equal(draws, model.sample_y(new, n_samples=count, random_state=1))


@pytest.mark.parametrize("family", ["block", "low-rank", "mean-field"])
def test_structured_families_have_the_mean_but_wider_deviations(family: str) -> None:
    X, truth, noise = wave(200, 2)
    full, structured = (
        HIPGPRegressor(
            wave_kernel(2), grid=(12, 12), whitening="torus", family=name, noise=1.0, learn=False
        ).fit(X, truth + noise)
        for name in ("full", family)
    )
    mean, std = full.predict(X, return_std=True)
    mean_too, wider = structured.predict(X, return_std=True)
    np.testing.assert_allclose(mean_too, mean, atol=1e-3)
    assert wider.mean() > std.mean()
    assert structured.elbo_ < full.elbo_


def test_rank_leads_from_mean_field_to_full(tmp_path: Path) -> None:
    X, truth, noise = wave(200, 2)
    settings: dict[str, Any] = {"grid": (8, 8), "whitening": "cholesky", "learn": False}

    def fitted(family: str, rank: int = 50) -> HIPGPRegressor:
        model = HIPGPRegressor(wave_kernel(2), family=family, rank=rank, noise=1.0, **settings)
        return model.fit(X, truth + noise)

    ranks = [0, 5, 20, 64, 1000]
    models = [fitted("low-rank", rank) for rank in ranks]
    ends = [fitted("mean-field").elbo_, fitted("full").elbo_]
    elbos = [model.elbo_ for model in models]
    assert elbos == sorted(elbos)
    np.testing.assert_allclose([elbos[0], *elbos[-2:]], [ends[0], ends[1], ends[1]], rtol=1e-9)
    assert [model.report_["rank"] for model in models] == [0, 5, 20, 64, 64]
    models[2].save(tmp_path / "model")
    again = HIPGPRegressor.load(tmp_path / "model")
    for before, after in zip(
        models[2].predict(X, return_std=True), again.predict(X, return_std=True), strict=True
    ):
        np.testing.assert_allclose(after, before, rtol=1e-10)
    with pytest.raises(ValueError, match="rank = -1: expected a whole number of at least 0"):
        fitted("low-rank", -1)


def test_single_precision_is_close_to_double() -> None:
    X, truth, noise = wave(200, 2)
    double, single = (
        HIPGPRegressor("matern32", grid=(20, 20), dtype=dtype).fit(X, truth + noise)
        for dtype in ("float64", "float32")
    )
    mean, std = double.predict(X, return_std=True)
    mean_too, std_too = single.predict(X, return_std=True)
    np.testing.assert_allclose(mean_too, mean, atol=0.05 * std.min())
    np.testing.assert_allclose(std_too, std, rtol=1e-2)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_squared_exponential_on_a_grid_has_a_nugget_that_is_reported(dtype: str) -> None:
    X, truth, noise = wave(200, 1)
    model = HIPGPRegressor("squared-exponential", engine="hip", dtype=dtype)
    model.fit(X, truth + noise)
    assert model.report_["prior"]["nugget"] > 0
    assert np.sqrt(np.mean((model.predict(X) - truth) ** 2)) < 0.5


def test_engine_is_chosen_by_size_and_columns() -> None:
    X, truth, noise = wave(2100, 1)
    model = HIPGPRegressor("matern32", n_learn=200)
    assert model.fit(X, truth + noise).engine_ == "hip"
    assert model.fit(X[:100], truth[:100] + noise[:100]).engine_ == "exact"
    wide = np.random.default_rng(0).uniform(size=(50, 5))
    assert HIPGPRegressor("matern32").fit(wide, wide.sum(1)).engine_ == "exact"
    given = HIPGPRegressor("matern32", grid=(40,)).fit(X[:100], truth[:100] + noise[:100])
    assert given.engine_ == "hip"
    assert given.grid_ is not None
    assert given.grid_.shape == (40,)


@pytest.mark.slow
@pytest.mark.usefixtures("few_are_quick")
def test_one_row_more_changes_nothing_where_the_engine_may() -> None:
    """Detail that no grid of few points resolves: what follows the exact engine is as good."""
    rng = np.random.default_rng(0)
    X = rng.uniform(size=(FEW + 401, 3))
    f = np.sin(11.0 * X[:, 0]) * np.cos(9.0 * X[:, 1]) * np.cos(8.0 * X[:, 2])
    y, new = f + 0.02 * rng.standard_normal(FEW + 401), slice(FEW + 1, None)
    errors, densities = [], []
    for n in (FEW, FEW + 1):
        model = HIPGPRegressor("matern32", n_learn=400, max_steps=30).fit(X[:n], y[:n])
        mean, std = model.predict(X[new], return_std=True, include_noise=True)
        errors.append(np.sqrt(np.mean((mean - f[new]) ** 2)))
        densities.append(np.mean(0.5 * ((y[new] - mean) / std) ** 2 + np.log(std)))
    assert errors[1] == pytest.approx(errors[0], rel=0.1)
    assert densities[1] == pytest.approx(densities[0], abs=0.05)


@pytest.mark.parametrize(
    "dim", [1, 2, pytest.param(3, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)]
)
def test_automatic_grid_is_as_good_as_exact(dim: int) -> None:
    X, truth, noise = wave(300, min(dim, 3))
    if dim == 4:  # a smooth fourth column, whose length scale is far beyond the box
        X = np.column_stack([X, np.random.default_rng(1).uniform(size=len(X))])
    y = truth + 3.0 * noise
    exact = HIPGPRegressor("matern32", n_learn=200).fit(X[:250], y[:250])
    hip = HIPGPRegressor("matern32", engine="hip", n_learn=200).fit(X[:250], y[:250])
    assert hip.report_["advice"] == []
    mean, std = exact.predict(X[250:], return_std=True)
    grid_mean, grid_std = hip.predict(X[250:], return_std=True)
    assert np.sqrt(np.mean((grid_mean - mean) ** 2)) < 0.3 * std.mean()
    assert 0.95 < np.mean(grid_std / std) < 1.3


def test_rows_beyond_the_memory_are_streamed() -> None:
    X, truth, noise = wave(2000, 1)
    kept, streamed = (
        HIPGPRegressor(
            wave_kernel(1), grid=(300,), whitening="torus", noise=1.0, learn=False, max_memory=size
        ).fit(X, truth + noise)
        for size in (2**30, 2**23)
    )
    assert 2 * streamed.report_["bytes_rows"] > 2**23
    np.testing.assert_allclose(streamed.predict(X), kept.predict(X), rtol=1e-8)


def test_users_grid_is_kept() -> None:
    X, truth, noise = wave(200, 2)
    grid = RegularGrid((49.0, 40.0), (0.1, 1.0), (31, 31))
    model = HIPGPRegressor("matern32", grid=grid).fit(X, truth + noise)
    assert model.grid_ is not None
    assert model.grid_.shape == grid.shape
    np.testing.assert_allclose(model.grid_.lower, grid.lower)
    np.testing.assert_allclose(model.grid_.spacing, grid.spacing)


def test_coarse_grid_is_told(caplog: pytest.LogCaptureFixture) -> None:
    X, truth, noise = wave(200, 1)
    model = HIPGPRegressor("matern32", grid=(4,)).fit(X, truth + 0.01 * noise)
    assert model.report_["residual_ratio"] > 1
    assert "the grid is too coarse" in model.report_["advice"][0]
    assert model.report_["advice"][0] in caplog.text


@pytest.mark.parametrize(
    "dim", [1, pytest.param(2, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)]
)
def test_the_noise_is_that_of_all_rows(dim: int) -> None:
    """Of 150 rows it is known to 6 per cent at best; of 3,000 to 1.3."""
    rng = np.random.default_rng(dim)
    X = rng.uniform(size=(3_000, dim))
    y = np.sin(4.0 * X).sum(1) + 0.1 * rng.standard_normal(len(X))
    fitted = HIPGPRegressor("matern32", engine="hip", n_learn=150, grid=(8,) * dim).fit(X, y)
    assert fitted.noise_std_ == pytest.approx(0.1, rel=0.04)
    assert fitted.report_["learning"]["noise_conditionals"] == 3_000
    # The kernel learns again if it is fitted again: nothing stays switched off.
    assert all(p.is_learned for p in fitted._regression.model.kernel.parameters())


def test_rows_too_few_for_what_is_learned_are_told(caplog: pytest.LogCaptureFixture) -> None:
    rng = np.random.default_rng(0)
    X, y = rng.uniform(size=(32, 2)), rng.standard_normal(32)
    advice = HIPGPRegressor("matern32").fit(X[:14], y[:14]).report_["advice"]
    assert "5 numbers were learned from 14 rows, too few to tell them" in advice[-1]
    assert advice[-1] in caplog.text
    assert HIPGPRegressor("matern32").fit(X, y).report_["advice"] == []
    assert HIPGPRegressor("matern32", learn=["noise"]).fit(X[:6], y[:6]).report_["advice"] == []


def test_a_fit_says_how_far_it_is() -> None:
    X = np.random.default_rng(0).uniform(size=(60, 1))
    y, model = np.sin(6.0 * X[:, 0]), HIPGPRegressor()
    said: list[tuple[str, int, int]] = []

    def progress(*count: Any) -> None:
        said.append(count)

    fitted = model.fit(X, y, progress=progress)
    assert {"kernel choice", "hyperparameters", "posterior"} <= {what for what, _, _ in said}
    for what, done, total in said:
        assert 0 <= done <= total
        # Whatever began ends.
        assert any(end == (what, total, total) for end in said)
    said.clear()
    fitted.refit(X[:50], y[:50], progress=progress)
    assert {what for what, _, _ in said} == {"posterior"}


@pytest.mark.parametrize("noise", [0.1, "given"])
def test_noise_that_is_given_stays(noise: Any) -> None:
    rng = np.random.default_rng(0)
    X = rng.uniform(size=(400, 1))
    y = np.sin(4.0 * X[:, 0]) + 0.2 * rng.standard_normal(len(X))
    given = np.full(400, 0.1) if noise == "given" else None
    model = HIPGPRegressor(engine="hip", n_learn=100, noise=noise, grid=(12,))
    assert "noise_status" not in model.fit(X, y, given).report_["learning"]


@pytest.mark.slow
@pytest.mark.parametrize("dim", [1, 2, 3])
@pytest.mark.parametrize("seed", [0, 1])
def test_held_out_rows_are_covered(dim: int, seed: int) -> None:
    """As their noise alone is, whose shares within σ and 1.96 σ vary by 0.007 and 0.003."""
    rng = np.random.default_rng(seed)
    X = rng.uniform(size=(14_000, dim))
    f = np.sin(6.0 * X[:, 0]) + (np.cos(9.0 * X[:, 0] * X[:, 1]) if dim > 1 else 0.0)
    white = rng.standard_normal(len(X))
    y, noise = f + 0.1 * white, np.abs(white[10_000:])
    model = HIPGPRegressor(n_learn=1_000, random_state=seed).fit(X[:10_000], y[:10_000])
    mean, std = model.predict(X[10_000:], return_std=True, include_noise=True)
    z = np.abs(y[10_000:] - mean) / std
    assert np.mean(z < 1.0) == pytest.approx(np.mean(noise < 1.0), abs=0.02)
    assert np.mean(z < 1.96) == pytest.approx(np.mean(noise < 1.96), abs=0.01)


@pytest.mark.parametrize("value", [0.1, 0.5])
def test_a_constant_column_says_nothing(value: float) -> None:
    """The deviation of 60 times 0.1 is 4e-17 and not 0."""
    X, truth, noise = wave(60, 2)
    y = truth + noise
    plain = np.asarray(HIPGPRegressor("matern32").fit(X, y).predict(X[:5]))
    column = np.full(len(X), value)
    wider = HIPGPRegressor("matern32").fit(np.column_stack([X, column]), y)
    close = np.column_stack([X[:5], column[:5] + 1e-9])
    np.testing.assert_allclose(
        np.asarray(wider.predict(close)), plain, atol=0.05 * float(np.std(y))
    )


def test_numbers_of_numpy_are_numbers() -> None:
    X, truth, noise = wave(60, 2)
    plain = HIPGPRegressor("matern32", noise=1, engine="hip", grid=(8, 8)).fit(X, truth + noise)
    counts = (np.int64(8), np.int64(8))
    same = HIPGPRegressor("matern32", noise=np.int64(1), engine="hip", grid=counts)
    np.testing.assert_array_equal(same.fit(X, truth + noise).predict(X), plain.predict(X))


@pytest.mark.parametrize("engine", ["exact", "hip", "global", "svgp"])
@pytest.mark.parametrize("far", [1e18, 1e160, 1e300])
def test_places_at_any_distance_have_the_mean(engine: str, far: float) -> None:
    X, truth, noise = wave(60, 2)
    model = HIPGPRegressor("matern52", engine=engine, max_steps=5, epochs=2).fit(X, truth + noise)
    mean, std = model.predict([[far, 50.0], [-far, far]], return_std=True)
    np.testing.assert_allclose(mean, model.mean_[0])
    assert np.isfinite(std).all()
    assert (std > model.predict(X, return_std=True)[1].max()).all()


@pytest.mark.parametrize(("rows", "columns", "amplitude"), [(300, 3, 0.3), (300, 5, 0.0)])
@pytest.mark.parametrize("noise", ["auto", "student-t"])
def test_noise_is_not_a_function(rows: int, columns: int, amplitude: float, noise: str) -> None:
    """Where most of y is noise its evidence has a maximum of no length and no noise, too."""
    rng = np.random.default_rng(1)
    X = rng.uniform(size=(rows, columns))
    f = amplitude * np.sin(6.0 * X[:, 0])
    model = HIPGPRegressor(noise=noise).fit(X, f + rng.standard_normal(rows))
    assert model.noise_std_ == pytest.approx(1.0, abs=0.15)
    error = model.predict(X) - f
    assert float(np.sqrt(np.mean(error**2))) < 0.2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"block": 4}, "block = 4: expected None or a tuple"),
        ({"block": (4.5, 4)}, "block = .* each at least 1"),
        ({"samples": 2.5}, "samples = 2.5: expected a whole number"),
    ],
)
def test_arguments_of_the_wrong_kind_say_what_is_expected(
    arguments: dict[str, Any], words: str
) -> None:
    X = np.linspace(0.0, 1.0, 40).reshape(-1, 2)
    with pytest.raises(UserError, match=words):
        HIPGPRegressor(**arguments).fit(X, X.sum(1))


def test_draws_are_counted_and_tiny_numbers_refused() -> None:
    X = np.linspace(0.0, 1.0, 30)[:, None]
    model = HIPGPRegressor(engine="exact", learn=False).fit(X, X[:, 0])
    with pytest.raises(UserError, match="n_samples = 0: expected a whole number"):
        model.sample_y(X, 0)
    with pytest.raises(UserError, match="too small for its square to be a number"):
        HIPGPRegressor().fit(X, 1e-200 * X[:, 0])


def test_columns_by_name_are_refused() -> None:
    X = np.zeros(5, dtype=[("a", float), ("b", float)])
    with pytest.raises(UserError, match="columns a, b: expected an array of numbers"):
        HIPGPRegressor().fit(X, np.zeros(5))


def test_copies_that_take_the_noise_away_are_named() -> None:
    """Of two rows with all numbers alike no noise is the best explanation, whatever others say."""
    rng = np.random.default_rng(0)
    X = rng.uniform(size=(300, 2))
    y = np.sin(6.0 * X).sum(1) + 0.4 * rng.standard_normal(300)
    often = np.r_[np.arange(300), np.arange(150)]
    copied = HIPGPRegressor("matern12", engine="exact").fit(X[often], y[often])
    assert copied.noise_std_ is not None
    assert copied.noise_std_ < 0.05
    assert copied.report_["share_of_copies"] == pytest.approx(1 / 3)
    assert "33 % of the rows repeat another" in copied.report_["advice"][-1]
    few = HIPGPRegressor("matern12", engine="exact").fit(X[often[:302]], y[often[:302]])
    assert few.noise_std_ is not None
    assert few.noise_std_ > 0.3
    assert "share_of_copies" not in few.report_


def test_evidence_of_learning_is_of_y_in_its_own_units() -> None:
    rng = np.random.default_rng(0)
    X = rng.uniform(size=(80, 1))
    y = 1e3 + 40.0 * np.sin(9.0 * X[:, 0]) + 5.0 * rng.standard_normal(80)
    fitted = HIPGPRegressor("matern32", engine="exact").fit(X, y)
    assert fitted.report_["learning"]["n_data"] == 80
    assert fitted.report_["learning"]["log_evidence"] == pytest.approx(fitted.log_evidence_)
