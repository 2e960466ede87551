"""The exact engine on stars whose distances are uncertain: weighted rays or rays to their means."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from dustmap.config import Config, from_mapping
from dustmap.engines import _exact
from dustmap.engines._exact import draw_grid
from dustmap.engines._learning import at_mean_distances
from dustmap.gp import RegularGrid
from dustmap.gp.functionals import LineIntegrals, OutsidePolicy, PointValues
from dustmap.runs.stars._engines import StarFit, fit_stars, load_stars
from dustmap.runs.stars._grids import grid_of
from dustmap.sky.observations import Moments, Observations, observe
from dustmap.sky.stars import GaussianDistances
from tests.skies import SIZE, plain_sky


def config(*settings: str) -> Config:
    tables: dict[str, dict[str, object]] = {
        "data": {"catalog": ["stars.fits"]},
        "grid": {"size": list(SIZE), "spacing": 10.0},
        "model": {"density": "gaussian", "length": 40.0, "std": 0.002, "learn": []},
        "fit": {"engine": "exact"},
    }
    return from_mapping(tables, settings)


def box(*settings: str) -> RegularGrid:
    return grid_of(config(*settings).grid)


def observations(made: Config, stars: int, error: float) -> Observations:
    """Stars whose distances are known to the fraction `error`, extinctions to 0.005 mag."""
    sky = plain_sky(stars, seed=4)
    rng = np.random.default_rng(1)
    guess = np.abs(sky.true_distance * (1.0 + error * rng.standard_normal(stars)))
    table = replace(
        sky.stars,
        distances=GaussianDistances(guess, error * guess),
        extinction=sky.true_extinction + 0.005 * rng.standard_normal(stars),
        extinction_error=np.full(stars, 0.005),
    )
    observed = observe(table, grid_of(made.grid), OutsidePolicy.TRUNCATE, torch.float64)
    assert observed.spread is not None
    variance = observed.spread.uniform(0.002)
    none = torch.zeros_like(variance)
    return observed.with_added(Moments(none, variance, none, none))


def at_nodes(fit: StarFit, grid: RegularGrid) -> tuple[torch.Tensor, torch.Tensor]:
    found = fit.posterior.predict(PointValues(grid.points()))
    return found.mean, found.std


def test_rays_to_the_mean_distance_map_what_weighted_rays_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = config("grid.spacing=20")
    data = observations(made, 60, 0.2).batch
    weighted = fit_stars(made, data)
    monkeypatch.setattr(_exact, "WEIGHTED_ROWS", 59)
    plain = fit_stars(made, data)
    assert weighted.summary["rays"] == "weighted"
    assert plain.summary["rays"] == "to the mean distance"
    (mean, std), (expected, scale) = (at_nodes(f, grid_of(made.grid)) for f in (plain, weighted))
    apart = (mean - expected).abs() / scale
    assert float(apart.square().mean().sqrt()) < 0.05
    assert float(apart.max()) < 0.3
    torch.testing.assert_close(std, scale, rtol=0.08, atol=0)


def test_what_distances_add_is_drawn_on_a_grid() -> None:
    made = config("grid.spacing=20")
    observed = observations(made, 60, 0.2)
    assert observed.spread is not None
    fit = fit_stars(made, observed.batch)
    assert fit.for_many_rays() is fit.for_many_rays()
    some = observed.spread[:16]
    added = some.added_variance(fit.for_many_rays())
    # the same of rays that are solved for one by one
    slow = some.added_variance(fit.posterior)
    assert float((added / slow).log().mean().exp()) == pytest.approx(1.0, abs=0.2)


def test_the_grid_of_draws_is_no_finer_than_it_need_be() -> None:
    shape = draw_grid(box("grid.spacing=1"), 40.0).shape
    assert shape == (round(120 / 16) + 1, round(80 / 16) + 1, round(40 / 16) + 1)
    assert draw_grid(box("grid.spacing=20"), 40.0).shape == (7, 5, 3)
    fine = draw_grid(box("grid.spacing=1"), 2.0)
    assert 0.8 * _exact.MOST_NODES < fine.size <= _exact.MOST_NODES
    assert fine.upper == pytest.approx((60.0, 40.0, 20.0))


def test_exact_distances_are_not_spoken_of_and_come_back() -> None:
    made = config("grid.spacing=20")
    data = observations(made, 30, 0.1).batch
    fit = fit_stars(made, at_mean_distances(data))
    assert set(fit.summary) == {"log_evidence"}
    again = load_stars(made, at_mean_distances(data), fit.hyperparameters, {})
    assert again.summary == fit.summary


def test_learning_takes_rays_to_the_mean_distance() -> None:
    made = config('model.learn=["std", "mean"]', "fit.max_steps=5")
    data = observations(made, 40, 0.2).batch
    assert isinstance(data.functional, LineIntegrals)
    assert data.functional.weights.shape[1] > 1
    found = fit_stars(made, data)
    plain = fit_stars(made, at_mean_distances(data))
    # The mean is that of the rays of the posterior.
    learned, expected = (fit.hyperparameters.as_dict() for fit in (found, plain))
    assert learned.pop("mean") != expected["mean"]
    # Threads may add up in another order.
    assert learned == pytest.approx({name: expected[name] for name in learned}, rel=1e-9)
    assert found.summary["rays"] == "weighted"
    assert found.learning is not None
