"""The Ananke experiment on stars of our own."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from dustmap.gp import ConstantMean, ExactGP
from dustmap.gp.kernels import Matern32
from pipelines.reproduce import Request, number
from pipelines.reproduce.ananke import _global as engine
from pipelines.reproduce.ananke import _hip as hip
from pipelines.reproduce.ananke import experiment as ananke
from pipelines.reproduce.ananke._exact import Correlations, log_evidence, maximise, reference
from pipelines.reproduce.ananke._sky import SIMULATED, Catalog, Sky, load, real, simulated
from pipelines.reproduce.dust._problem import Exact

COLUMNS = "id,x,y,z,distance,extinction,extinction_error,density"


@pytest.fixture
def catalog(tmp_path: Path) -> Catalog:
    """A file in the layout of the real one, of 200 stars."""
    generator = np.random.default_rng(0)
    x = generator.uniform(-1, 1, (200, 3)) * (0.25, 0.25, 0.05)
    distance = np.linalg.norm(x, axis=1)
    error = generator.uniform(0.0005, 0.0015, 200)
    extinction = 0.02 * np.sin(20.0 * x[:, 0]) * distance + error * generator.normal(size=200)
    table = np.column_stack([np.arange(200), x, distance, extinction, error, error])
    np.savetxt(tmp_path / "ananke_train.csv", table, delimiter=",", header=COLUMNS, comments="")
    return load(Request(quick=True, data=tmp_path))


def test_a_split_holds_out_a_fifth_and_shares_no_star(catalog: Catalog) -> None:
    sky = real(catalog, 1)
    assert len(sky.test) == 40
    assert sorted([*sky.train.tolist(), *sky.test.tolist()]) == list(range(200))
    assert torch.equal(sky.batch.y, catalog.y[sky.train])
    assert sky.truth is None


def test_a_simulated_sky_has_the_prior_and_the_noise(catalog: Catalog) -> None:
    correlation = Correlations(catalog.rays).at(0.15)
    skies = [simulated(catalog, correlation, seed) for seed in range(20)]
    truths = torch.stack([sky.truth for sky in skies if sky.truth is not None])
    prior = SIMULATED[1] * correlation.diagonal()
    assert float((truths.square().mean(0) / prior).mean()) == pytest.approx(1.0, abs=0.3)
    noise = torch.stack([sky.y for sky in skies]) - truths
    assert float((noise / catalog.sigma).square().mean()) == pytest.approx(1.0, abs=0.1)


def test_the_reference_is_the_exact_process_at_the_largest_evidence(catalog: Catalog) -> None:
    sky = real(catalog, 0)
    correlations = Correlations(catalog.rays)
    exact = reference(sky, correlations, (0.08, 0.16, 0.32)).exact
    gp = ExactGP(Matern32(exact.length, exact.variance, dim=3), ConstantMean(0.0, learn=False))
    batch = sky.batch
    assert batch.noise_variance is not None
    with torch.no_grad():
        evidence = gp.log_evidence(batch.functional, batch.y, batch.noise_variance)
    assert exact.log_evidence == pytest.approx(float(evidence), abs=1e-4)
    found = gp.condition(batch.functional, batch.y, batch.noise_variance).predict(sky.held_out)
    torch.testing.assert_close(exact.prediction.mean, found.mean, rtol=1e-4, atol=1e-8)
    torch.testing.assert_close(exact.prediction.variance, found.variance, rtol=1e-3, atol=1e-12)
    K = correlations.at(exact.length)[sky.train][:, sky.train]
    for factor in (0.5, 2.0):
        assert log_evidence(sky, K, factor * exact.variance) < exact.log_evidence


def test_a_covariance_is_computed_once_and_charged_to_all(catalog: Catalog) -> None:
    correlations = Correlations(catalog.rays)
    assert correlations.at(0.1) is correlations.at(0.1)
    assert correlations.seconds(0.1) > 0


@pytest.mark.parametrize("start", [(-1.0, 0.0, 1.0), (1.0, 1.5, 2.0)])
def test_maximise_finds_a_smooth_maximum(start: tuple[float, ...]) -> None:
    x, value = maximise(lambda x: -math.cosh(x - 0.3), start, 6)
    assert x == pytest.approx(0.3, abs=0.02)
    assert value == pytest.approx(-1.0, abs=1e-3)


def test_every_method_is_a_row_of_every_sky(catalog: Catalog) -> None:
    """With the exact process in the place of the engine."""
    correlations = Correlations(catalog.rays)
    sky = simulated(catalog, correlations.at(SIMULATED[0]), 0)
    exact = reference(sky, correlations, (0.1, 0.2)).exact
    families = tuple(hip.fit(sky, exact, (6, 6, 3)))
    found = ananke.Comparison(sky, exact, 1.0, stand_in(sky, exact), families)
    rows = found.rows()
    assert [row["method"] for row in rows] == ["exact", "global", "HIP mean-field", "HIP 2×2×2"]
    assert number(rows[1], "mean_error_in_std") < 1e-3
    for row in rows[2:]:
        assert number(row, "mean_error_in_std") < 1.0
        assert number(row, "std_ratio") > 0.9
    assert [len(plane.mean) for plane in found.maps(5).planes.values()] == [25, 25, 25]
    goals = ananke.goals([*replace(found, sky=real(catalog, 0)).rows(), *rows])
    assert len(goals) == 7
    assert all(goal.met for goal in goals)


def stand_in(sky: Sky, exact: Exact) -> engine.Fitted:
    """The exact posterior in the form of the engine's."""
    gp = ExactGP(Matern32(exact.length, exact.variance, dim=3), ConstantMean(0.0, learn=False))
    batch = sky.batch
    assert batch.noise_variance is not None
    posterior = gp.condition(batch.functional, batch.y, batch.noise_variance)
    prediction = posterior.predict(sky.held_out)
    return engine.Fitted(posterior, prediction, exact.length, exact.variance, 1.0, {})


@pytest.mark.slow
def test_the_engine_learns_and_predicts_as_the_exact_process(catalog: Catalog) -> None:
    correlations = Correlations(catalog.rays)
    sky = simulated(catalog, correlations.at(SIMULATED[0]), 0)
    exact = reference(sky, correlations, (0.1, 0.2)).exact
    found = engine.fit(sky, engine.Effort((8, 8, 4), (10, 10, 4), 64, 10))
    assert found.variance < 0.5 * engine.START[1]
    row = ananke.against(exact, found.prediction)
    assert number(row, "mean_error_in_std") < 0.5
    assert number(row, "std_ratio") == pytest.approx(1.0, abs=0.3)
