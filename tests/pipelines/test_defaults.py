"""The experiment on default settings, reduced."""

from pathlib import Path

import numpy as np
import pytest

from pipelines.reproduce import Request
from pipelines.reproduce._experiment import Row
from pipelines.reproduce.defaults import experiment
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
    def row(version: str, log_density: float) -> Row:
        shares = {"coverage68": 0.7, "coverage95": 0.98}
        return {"version": version, "log_density": log_density, **shares}

    inner, outer, gain = experiment.goals_of([row("now", 1.0), row("now", 1.2), row("before", 1.0)])
    assert gain.reached == pytest.approx(0.1)
    assert (inner.met, outer.met, gain.met) == (True, False, True)


@pytest.mark.slow
def test_the_whole_runs_reduced() -> None:
    outcome = experiment.run(Request(quick=True, data=Path()))
    assert outcome.rows[0]["version"] == "now"
    assert outcome.rows[0]["scored"] == kernels.QUICK.scored
    assert len(outcome.goals) == 3
