"""The map is made of all stars, and the scores are of a fit that has not seen those held out."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from astropy.table import Table
from numpy.typing import NDArray

from dustmap import HIPGPRegressor
from dustmap.config import load
from dustmap.engines import _lognormal
from dustmap.gp import ConstantMean, ExactGP
from dustmap.gp.functionals import PointValues
from dustmap.runs import Stage, StarMap, execute_run, open_star_map, prepare
from dustmap.runs.stars import _duration, _parts, _run
from dustmap.sky.maps import DustMap, MapRequest, Quantity
from dustmap.sky.simulation import Measurements, write_sky
from tests.skies import plain_sky

CONFIG = """
[data]
catalog = "sky.fits"
holdout = 0.25
[grid]
size = [80, 80, 40]
spacing = 20
[model]
length = 40
std = 1.0
noise = "gaussian"
learn = []
[fit]
samples = 4
learn_rows = 40
[export]
formats = ["zarr"]
samples = 0
figures = []
[compute]
dtype = "float64"
"""
LINEAR = ("model.density=gaussian", "model.std=0.002", "model.mean_density=0.002")
ENGINES = {
    "lognormal": ("fit.samples=16",),
    "gaussian": LINEAR,
    "student-t": (*LINEAR, "model.noise=student-t"),
    "exact": (*LINEAR, "fit.engine=exact"),
    "hip": (*LINEAR, "fit.engine=hip"),
}


def rms(values: NDArray[np.floating]) -> float:
    return float(np.sqrt(np.mean(np.square(values))))


def run(sky: Path, path: Path, *settings: str, until: Stage = Stage.EXPORT) -> dict[str, Any]:
    """The report of a run."""
    config = load(sky / "run.toml", settings)
    execute_run(prepare(config, path), path, config, False, until, resume=True)
    report: dict[str, Any] = json.loads((path / "report.json").read_text())
    return report


def reordered(sky: Path, path: Path) -> str:
    """The setting for a catalog whose held-out stars come last: random numbers go by rows."""
    split = prepare(load(sky / "run.toml"))
    assert isinstance(split, _run.StarRun)
    rows = torch.cat([split.train, split.holdout]).numpy()
    Table.read(sky / "sky.fits")[split.observed.rows[rows]].write(path)
    return f"data.catalog={path}"


@pytest.mark.parametrize(
    "engine",
    [
        pytest.param(name, marks=() if name in ("lognormal", "exact") else pytest.mark.slow)
        for name in ENGINES
    ],
)
def test_where_nothing_is_learned_the_map_is_that_of_a_run_that_holds_out_none(
    engine: str, sky: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the scores, and what is drawn of them, are those of a run that does not fit again.

    Log-normal samples start from those of the first fit, and end within a tenth of a posterior
    standard deviation (rms) of samples from scratch; ten times as many would leave as much. Their
    random numbers belong to places of stars, so that all runs have to take them as they come.
    """
    settings = ENGINES[engine]
    monkeypatch.setattr(_lognormal, "sky_order", lambda rays: torch.arange(len(rays)))
    both = run(sky, tmp_path / "both", *settings)
    ordered = reordered(sky, tmp_path / "ordered.fits")
    all_stars = run(sky, tmp_path / "all", *settings, ordered, "data.holdout=0")
    unseen = run(sky, tmp_path / "unseen", *settings, "data.refit=false")
    assert both["counts"]["stars_fitted"] == unseen["counts"]["stars_in_the_map"] == 45
    assert both["counts"]["stars_in_the_map"] == all_stars["counts"]["stars_fitted"] == 60
    assert both["refit"]["stars"] == 60
    assert both["held_out_stars"]["n"] == both["counts"]["stars_held_out"] == 15
    assert "refit" not in all_stars
    assert "refit" not in unseen

    maps = {name: DustMap.open(tmp_path / name / "map.zarr") for name in ("both", "all", "unseen")}
    # ν is learned again, from where it was.
    rtol = 2e-2 if engine == "student-t" else 1e-6
    if engine == "lognormal":
        found, wanted = maps["both"].std, maps["all"].std
        assert found is not None
        assert wanted is not None
        shift = (maps["both"].mean - maps["all"].mean) / wanted
        wider = found / wanted - 1.0
        assert rms(shift) < 0.1
        assert rms(wider) < 0.1
    else:
        np.testing.assert_allclose(maps["both"].mean, maps["all"].mean, rtol=rtol, atol=1e-9)
    assert np.abs(maps["both"].mean - maps["unseen"].mean).max() > 1e-5

    for section in ("hyperparameters", "held_out_stars", "calibration", "quality_proxies"):
        assert both[section] == unseen[section]
    drawn, expected = (open_star_map(tmp_path / name).held_out() for name in ("both", "unseen"))
    for column in ("l", "b", "measured", "predicted", "std", "standardised"):
        np.testing.assert_array_equal(getattr(drawn, column), getattr(expected, column))


@pytest.mark.parametrize("engine", ["lognormal", "exact"])
def test_the_map_opened_again_is_that_of_all_stars(engine: str, sky: Path, tmp_path: Path) -> None:
    run(sky, tmp_path / "run", *ENGINES[engine])
    opened, written = open_star_map(tmp_path / "run"), DustMap.open(tmp_path / "run" / "map.zarr")
    assert "60 stars fitted" in " ".join(opened.made.history())
    nodes = opened.run.grid.points().numpy()
    nodes = nodes[np.linalg.norm(nodes, axis=1) > 0.0]
    np.testing.assert_allclose(
        opened.at(nodes)["density_mean"], written.mean_at(nodes), rtol=1e-5, atol=1e-9
    )


def test_a_run_that_ends_with_its_scores_has_the_map_without_the_held_out(
    sky: Path, tmp_path: Path
) -> None:
    path = tmp_path / "run"
    early = run(sky, path, until=Stage.EVALUATE)
    assert "refit" not in early
    opened = open_star_map(path)
    assert "45 stars fitted" in " ".join(opened.made.history())
    before = opened.held_out()
    late = run(sky, path)
    assert late["held_out_stars"] == early["held_out_stars"]
    opened = open_star_map(path)
    assert "60 stars fitted" in " ".join(opened.made.history())
    np.testing.assert_array_equal(opened.held_out().predicted, before.predicted)
    assert not (path / _run.POSTERIOR).exists()


def test_what_is_learned_is_kept(sky: Path, tmp_path: Path) -> None:
    """Of a sky with uncertain distances, whose noise the held-out stars have no part in either."""
    uncertain = plain_sky(60, 2, (80.0, 80.0, 40.0), Measurements(outliers=0.0))
    write_sky(tmp_path / "sky.fits", uncertain)
    (tmp_path / "run.toml").write_text(CONFIG)
    learn = 'model.learn=["length", "std", "mean", "noise"]'
    report = run(tmp_path, tmp_path / "run", learn)
    learned = json.loads((tmp_path / "run" / _run.HYPERPARAMETERS).read_text())
    kept = json.loads((tmp_path / "run" / _run.REFIT).read_text())
    same = {"length", "std", "noise", "beyond", "beyond_std"} & set(learned)
    assert {name: learned[name] for name in same} == {name: kept[name] for name in same}
    assert report["hyperparameters"] == learned
    assert report["distances"]["rounds"]
    opened = open_star_map(tmp_path / "run")
    assert isinstance(opened, StarMap)
    assert opened.fit.hyperparameters.length == learned["length"]


def test_held_out_predictions_that_are_missing_are_no_reason_to_show_seen_stars(
    sky: Path, tmp_path: Path
) -> None:
    run(sky, tmp_path / "run", *ENGINES["exact"])
    (tmp_path / "run" / _run.HELD_OUT).unlink()
    with pytest.raises(ValueError, match=r"held_out\.npz is missing, and the map has seen"):
        open_star_map(tmp_path / "run")


def test_the_plan_and_the_seconds_count_it(sky: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Seconds are estimated by timing some products; here a ray takes one.
    monkeypatch.setattr(_duration, "estimated_seconds", lambda config, rays: float(len(rays)))
    one, two = (
        prepare(load(sky / "run.toml", [*ENGINES["exact"], f"data.refit={refit}"]))
        for refit in ("false", "true")
    )
    sizes = {
        component.name: (component.bytes, other.bytes)
        for component, other in zip(
            one.plan().memory.components, two.plan().memory.components, strict=True
        )
    }
    assert sizes["factor"] == (8 * 45**2, 8 * 60**2)
    assert two.plan().counts["stars_in_the_map"] == 60
    assert two.seconds() > 1.5 * one.seconds() > 0.0


@pytest.mark.parametrize("engine", ["exact", "hip", "global"])
def test_a_regression_of_other_rows_is_the_dense_one_at_the_learned_kernel(engine: str) -> None:
    rng = np.random.default_rng(1)
    X = rng.uniform(0.0, 6.0, size=(120, 1))
    y = 3.0 + np.sin(X[:, 0]) + 0.1 * rng.standard_normal(120)
    first = HIPGPRegressor("matern52", engine=engine, samples=512).fit(X[:80], y[:80])
    second = first.refit(X, y)
    assert second.noise_std_ == first.noise_std_
    assert second.report_["n"] == 120
    assert first.noise_std_ is not None
    posterior = ExactGP(first.kernel_, ConstantMean(0.0, learn=True))
    points, noise = PointValues(torch.from_numpy(X)), torch.full((120,), first.noise_std_**2)
    beta = posterior.fitted_coefficients(points, torch.from_numpy(y), noise.double())
    dense = ExactGP(first.kernel_, ConstantMean(float(beta[0]), learn=True)).condition(
        points, torch.from_numpy(y), noise.double(), mean_is_fitted=True
    )
    at = np.linspace(0.0, 6.0, 25)[:, None]
    expected = dense.predict(PointValues(torch.from_numpy(at)))
    mean, std = second.predict(at, return_std=True)
    wide = float(expected.std.max())
    np.testing.assert_allclose(mean, expected.mean.numpy(), atol=0.1 * wide)
    np.testing.assert_allclose(std, expected.std.numpy(), rtol=0.15)
    assert first.report_["n"] == 80


@pytest.mark.parametrize("engine", ["svgp", "sgpr", "auto"])
def test_free_points_learn_their_places_of_other_rows_again(engine: str) -> None:
    """At the kernel and noise of the first; so does "auto" where no grid is near fine enough."""
    rng = np.random.default_rng(0)
    dim, rows = (4, 400) if engine == "auto" else (1, 200)
    X = rng.uniform(0.0, 6.0, (rows, dim))
    y = np.sin(X[:, 0]) + X[:, -1] + 0.01 * rng.standard_normal(rows)
    memory = 10**6 if engine == "auto" else 2**30
    first = HIPGPRegressor(
        "matern32", engine=engine, noise=0.01, n_learn=50, inducing=40, max_memory=memory
    ).fit(X[:-50], y[:-50])
    second = first.refit(X, y)
    assert first.engine_ == second.engine_ == ("svgp" if engine == "auto" else engine)
    assert second.report_["n"] == rows
    assert torch.equal(*(m.kernel_.terms()[0].lengthscale for m in (first, second)))
    before, after = (np.abs(m.predict(X[-50:]) - y[-50:]).mean() for m in (first, second))
    assert after < 1.1 * before


def test_a_regression_of_other_rows_refuses_what_it_cannot_have() -> None:
    X = np.linspace(0.0, 6.0, 40)[:, None]
    y = np.sin(X[:, 0])
    fitted = HIPGPRegressor(noise=0.1).fit(X, y)
    with pytest.raises(ValueError, match=r"y: expected shape \(40,\), got \(39,\)"):
        fitted.refit(X, y[:-1])
    with pytest.raises(ValueError, match="the data of fit had no noise_std, and so must these"):
        fitted.refit(X, y, noise_std=np.ones(40))
    robust = HIPGPRegressor(noise="student-t").fit(X, y)
    with pytest.raises(ValueError, match="learns its sites from its rows: fit it to these"):
        robust.refit(X, y)


def test_stars_that_the_map_has_seen_are_counted(
    sky: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of the run's own catalog: those fitted, and with `data.refit` those held out as well."""
    for refit, seen in (("true", 60), ("false", 45)):
        run(sky, tmp_path / refit, *ENGINES["exact"], f"data.refit={refit}")
        with caplog.at_level("WARNING", "dustmap"):
            caplog.clear()
            scores = open_star_map(tmp_path / refit).evaluate(sky / "sky.fits")
        assert scores["stars_that_the_map_has_seen"] == seen
        assert f"the map has seen {seen} of 60 stars" in caplog.text
    others = Table.read(sky / "sky.fits")
    others["extinction"] += 1e-3
    others.write(tmp_path / "others.fits")
    caplog.clear()
    scores = open_star_map(tmp_path / "true").evaluate(tmp_path / "others.fits")
    assert scores["stars_that_the_map_has_seen"] == 0
    assert "has seen" not in caplog.text


def test_a_log_normal_run_is_opened_without_its_stars(
    positive_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are observed where they are asked for; the report says how many the map has seen."""

    def refused(*_: object) -> None:
        raise AssertionError("nothing needs the stars")

    with monkeypatch.context() as patched:
        patched.setattr(_parts.StarShare, "observed", refused)
        found = open_star_map(positive_run / "run")
        there = found.at(np.array([[20.0, 10.0, 5.0]]))
        found.field().evaluate(PointValues(torch.zeros(1, 3)), MapRequest((Quantity.COVERAGE,)))
        with pytest.raises(AssertionError, match="nothing needs"):
            found.evaluate(positive_run / "sky.fits")
    assert np.isfinite([values[0] for values in there.values()]).all()
    assert len(found.fitted) == len(found.run.observed) == 60
    assert "60 stars fitted" in " ".join(found.made.history())
