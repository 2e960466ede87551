"""The experiment on simulated skies: its skies, its fit, and its scores."""

import functools
from dataclasses import replace

import numpy as np
import pytest
import torch

from dustmap.gp.features import interpolation
from dustmap.inference import LogNormalPosterior
from dustmap.sky.simulation import SkyModel
from pipelines.reproduce import Row
from pipelines.reproduce.skies import experiment as skies
from pipelines.reproduce.skies._problem import (
    BETWEEN,
    FINER,
    PRIOR,
    STRUCTURED,
    Fitted,
    Size,
    fit,
    sky_of,
)
from pipelines.reproduce.skies._scores import probabilities, scores

SIZE = Size((320.0, 240.0, 240.0), 40.0, stars=300, held=150, samples=8)
EDGES = (0.0, 100.0, 240.0)


@pytest.fixture(scope="module", params=[(PRIOR, 0), (STRUCTURED, 3)], ids=[PRIOR, STRUCTURED])
def fitted(request: pytest.FixtureRequest) -> Fitted:
    kind, seed = request.param
    return fit(kind, seed, SIZE)


def test_a_fit_holds_out_stars_and_adds_their_spread(fitted: Fitted) -> None:
    rows = fitted.held_rows.numpy()
    assert rows.min() >= SIZE.stars
    assert len(rows) == len(fitted.held) == len(fitted.true_rays) <= SIZE.held
    assert fitted.held.noise_variance is not None
    given = torch.from_numpy(fitted.sky.stars.extinction_error[rows])
    assert bool((fitted.held.noise_variance >= given.square()).all())
    assert 0.6 < fitted.noise < 1.25


def test_a_fit_is_positive_and_scored(fitted: Fitted) -> None:
    found = scores(fitted, EDGES)
    assert found["density_least"] > 0  # type: ignore[operator]
    assert 0.5 < found["extinction_coverage68"] < 0.85  # type: ignore[operator]
    by_distance = found["density_coverage68_by_distance"]
    assert isinstance(by_distance, list)
    assert len(by_distance) == 2


def test_scores_of_a_posterior_that_knows_how_wrong_it_is(fitted: Fitted) -> None:
    """Its samples are spread around a centre that is as far from the truth."""
    rng = np.random.default_rng(0)
    truth = fitted.truth.mean.transpose(2, 1, 0).ravel()
    centre = np.log(truth) + 0.2 * rng.standard_normal(len(truth))
    samples = centre + 0.2 * rng.standard_normal((400, len(truth)))
    posterior = LogNormalPosterior(
        functools.partial(interpolation, grid=fitted.grid),
        torch.from_numpy(centre),
        torch.from_numpy(samples),
    )
    known = replace(fitted, solution=replace(fitted.solution, posterior=posterior), noise=1.0)
    found = scores(known, EDGES)
    assert found["density_coverage68"] == pytest.approx(0.683, abs=0.06)
    assert found["density_correlation"] > 0.9  # type: ignore[operator]
    assert found["extinction_coverage68"] == pytest.approx(0.683, abs=0.15)
    pit = probabilities(known)
    assert ((pit > 0) & (pit < 1)).all()


def test_a_sky_between_nodes_has_the_truth_at_the_nodes_of_the_fit() -> None:
    size = replace(SIZE, stars=20, held=10)
    sky = sky_of(BETWEEN, 0, size)
    grid = SkyModel(size=size.size, spacing=size.spacing).grid()
    assert sky.truth.grid.spacing == tuple(h / FINER for h in grid.spacing)
    model = fit(PRIOR, 0, size)
    truth = replace(model, sky=sky, grid=grid).truth
    expected = sky.truth.mean_at(grid.points().numpy())
    np.testing.assert_allclose(truth.mean.transpose(2, 1, 0).ravel(), expected, rtol=1e-10)


def test_skies_of_both_kinds_have_parallaxes_and_only_one_has_outliers() -> None:
    many = replace(SIZE, stars=3000)
    prior, structured = (sky_of(kind, 1, many) for kind in (PRIOR, STRUCTURED))
    assert not prior.stars.distances.exact
    assert not prior.outlier.any()
    assert structured.outlier.any()


def test_goals_cover_every_sky_and_distance() -> None:
    row: Row = {
        "extinction_coverage68": 0.68,
        "extinction_true_coverage68": 0.75,
        "density_coverage68": 0.66,
        "density_coverage68_by_distance": [0.5, 0.6],
        "density_least": 1e-6,
    }
    rows: list[Row] = [{"sky": kind, "seed": 0, **row} for kind in skies.SEEDS]
    goals = {goal.name: goal.met for goal in skies._goals(rows, list(EDGES))}
    assert goals["prior sky 0: coverage of held-out extinctions"]
    assert not goals["structured skies: coverage of held-out extinctions without noise"]
    assert goals["prior skies: coverage of the density"]
    assert not goals["structured skies: coverage of the density, 0 to 100 pc"]
    assert goals["structured skies: coverage of the density, 100 to 240 pc"]
    assert goals["least density of all samples"]
