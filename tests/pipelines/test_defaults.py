"""The experiment on default settings, reduced."""

from pathlib import Path

import numpy as np
import pytest

from dustmap.sky import cartesian
from pipelines.reproduce import Request
from pipelines.reproduce._experiment import Row
from pipelines.reproduce.defaults import _clouds, experiment
from pipelines.reproduce.kernels import experiment as kernels


def test_scores_of_errors_as_large_as_stated() -> None:
    errors = np.random.default_rng(0).standard_normal(200_000)
    found = kernels.scores(2.0 + 0.1 * errors, np.full(errors.size, 2.0), np.full(errors.size, 0.1))
    assert found["scored"] == errors.size
    assert found["rmse"] == pytest.approx(0.1, rel=0.01)
    assert found["coverage68"] == pytest.approx(0.6827, abs=0.005)
    assert found["coverage95"] == pytest.approx(0.95, abs=0.003)
    # The mean of −z²/2 − ln σ − ln(2π)/2.
    assert found["log_density"] == pytest.approx(-0.5 + np.log(10) - 0.919, abs=0.01)


def test_goals_are_means_over_the_skies() -> None:
    def row(version: str, log_density: float, sky: str = "turbulence", which: str = "near") -> Row:
        shares = {"coverage68": 0.7, "coverage95": 0.98}
        scores = {"log_density": log_density, **shares}
        return {"sky": sky, "which": which, "version": version, **scores}

    rows = [row("now", 1.0), row("now", 1.2), row("before", 1.0), row("now", 0.0, "clouds", "all")]
    inner, outer, gain, near, far, beyond = experiment.goals_of(rows)
    assert gain.reached == pytest.approx(0.1)
    assert (inner.met, outer.met, gain.met, beyond.met) == (True, False, True, True)
    assert near.reached is None
    assert far.reached is None


def test_columns_of_clouds_are_those_of_quadrature() -> None:
    sky = _clouds.CloudySky(
        np.array([[60.0, 0.0, 0.0], [0.0, 30.0, 5.0]]), np.array([15.0, 9.0]), np.array([0.3, 0.2])
    )
    l, b, distance = np.array([0.0, 20.0, 90.0]), np.array([0.0, 10.0, 9.0]), np.full(3, 70.0)
    node, weight = np.polynomial.legendre.leggauss(80)
    s = 0.5 * 70.0 * (node + 1.0)
    x = cartesian(l, b, np.ones(3))[:, None] * s[:, None]
    away = np.square(x[:, :, None] - sky.centre).sum(-1)
    normal = np.exp(-0.5 * away / sky.size**2) / (np.sqrt(2.0 * np.pi) * sky.size)
    rho = (sky.column * normal).sum(-1) + 2.5e-4 * np.exp(-np.abs(x[..., 2]) / 100.0)
    expected = 0.5 * 70.0 * (weight * rho).sum(-1)
    np.testing.assert_allclose(sky.extinction(l, b, distance), expected, rtol=1e-9)


@pytest.mark.slow
def test_the_whole_runs_reduced() -> None:
    outcome = experiment.run(Request(quick=True, data=Path()))
    assert outcome.rows[0]["version"] == "now"
    assert outcome.rows[0]["scored"] == kernels.QUICK.scored
    assert {(row["sky"], row["which"]) for row in outcome.rows} == {
        ("turbulence", "near"),
        ("clouds", "near"),
        ("clouds", "all"),
    }
    assert len(outcome.goals) == 6
