"""The Ananke experiment on stars of our own."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from dustmap.gp import ConstantMean, ExactGP
from dustmap.gp.kernels import Matern32
from pipelines.reproduce import Request, ananke
from pipelines.reproduce._ananke_exact import Correlations, log_evidence, maximise, reference
from pipelines.reproduce._ananke_sky import Catalog, Sky, load, real, simulated

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
    prior = 0.0016 * correlation.diagonal()
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
    scale = ananke.Scale((0,), (8, 8, 4), (6, 6, 3), (0.1, 0.2), 5)
    sky: Sky = simulated(catalog, Correlations(catalog.rays).at(0.15), 0)
    found = ananke.Comparison.of(sky, Correlations(catalog.rays), scale)
    rows = found.rows()
    assert [row["method"] for row in rows] == ["exact", "global", "HIP mean-field", "HIP 2×2×2"]
    for row in rows:
        distance, ratio = row["mean_error_in_std"], row["std_ratio"]
        assert isinstance(distance, float)
        assert isinstance(ratio, float)
        assert distance < 1.0
        assert ratio > 0.5
    maps = found.maps(scale.step)
    assert [len(plane.mean) for plane in maps.planes.values()] == [25, 25, 25]
    again = replace(found, sky=real(catalog, 0)).rows()
    goals = ananke.goals([*again, *rows])
    assert len(goals) == 7
    assert all(goal.reached is not None for goal in goals)
