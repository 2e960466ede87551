"""Which numbers of a run are float32 and which float64, and why: each engine keeps to it.

stars (coordinates, rays, extinctions, errors)   float64
    few, and positions are differences of large numbers
spectra, lags and tables of the kernel           float64
    eigenvalues span more than float32 holds, and they are made once
fields and draws                                 compute.dtype
    most of the memory and of the time; rounding is far below the tolerance of a solve
rows of the data                                 compute.dtype
    like the fields that they meet
sums over data and nodes, energies, evidence     float64
    millions of terms, and small differences of them
the exact engine (covariance, factor, answers)   float64
    a dense factorisation loses digits that float32 does not have
maps in files                                    float32
    the Monte Carlo error of a map is per cents
"""

import dataclasses
import enum
from collections.abc import Mapping
from pathlib import Path
from typing import final

import pytest
import torch

from dustmap import config as configuration
from dustmap.config import Config
from dustmap.engines._inducing_grid import PlacesAndRays
from dustmap.gp import ExactPosterior, RegularGrid
from dustmap.inference import LogNormalPosterior, PathwisePosterior, VariationalPosterior
from dustmap.runs import prepare
from dustmap.runs._machine import dtype_of
from dustmap.runs.stars._engines import StarFit, fit_stars
from dustmap.runs.stars._run import StarRun
from dustmap.sky.maps import MapRequest, Quantity
from dustmap.sky.maps._field import empty_arrays
from dustmap.sky.simulation import SkyModel, simulate, write_sky

ENGINES = {
    "lognormal": ["fit.engine=global"],
    "gaussian": ["fit.engine=global", "model.density=gaussian"],
    "hip": ["fit.engine=hip", "fit.whitening=hip"],
    "exact": ["fit.engine=exact"],
}


@final
class Numbers(enum.Enum):
    """The lines of the table that a run can be held to."""

    STARS = "stars"
    SPECTRA = "spectra"
    FIELDS = "fields"
    ROWS = "rows"
    DENSE = "dense"
    MAPS = "maps"


def precision(config: Config) -> Mapping[Numbers, torch.dtype]:
    """The table for a configuration."""
    chosen = torch.float64 if config.fit.engine == "exact" else dtype_of(config.compute)
    return {
        Numbers.STARS: torch.float64,
        Numbers.SPECTRA: torch.float64,
        Numbers.FIELDS: chosen,
        Numbers.ROWS: chosen,
        Numbers.DENSE: torch.float64,
        Numbers.MAPS: torch.float32,
    }


@pytest.fixture(scope="module")
def catalog(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("precision") / "sky.fits"
    write_sky(path, simulate(SkyModel((200.0, 200.0, 120.0), 40.0), 30, 1), True)
    return path


@pytest.mark.parametrize(
    ("engine", "dtype"), [*((name, "float32") for name in ENGINES), ("lognormal", "float64")]
)
def test_a_fit_keeps_to_the_policy(catalog: Path, engine: str, dtype: str) -> None:
    given = {
        "data": {"catalog": str(catalog), "holdout": 0.0},
        "grid": {"size": [200, 200, 120], "spacing": 40},
        "model": {"learn": [], "noise": "gaussian"},
        "fit": {"samples": 4, "max_steps": 3},
        "compute": {"dtype": dtype},
    }
    config = configuration.from_mapping(given, ENGINES[engine])
    run = prepare(config)
    assert isinstance(run, StarRun)
    fit = fit_stars(config, run.observed.batch)
    wanted = precision(config)
    seen = _numbers(fit) | {Numbers.STARS: _of_stars(run)}
    assert len(seen) >= 3
    for numbers, dtypes in seen.items():
        assert dtypes == {wanted[numbers]}, numbers


def test_maps_are_float32() -> None:
    grid = RegularGrid((0.0,) * 3, (1.0,) * 3, (2, 2, 2))
    arrays = empty_arrays(grid, MapRequest((Quantity.MEAN,)), 1)
    assert {str(array.dtype) for array in arrays.values()} == {"float32"}
    config = configuration.from_mapping({"data": {"catalog": "stars.fits"}})
    assert precision(config)[Numbers.MAPS] is torch.float32


def _of_stars(run: StarRun) -> set[torch.dtype]:
    batch = run.observed.batch
    rays = [getattr(batch.functional, f.name) for f in dataclasses.fields(batch.functional)]  # type: ignore[arg-type]
    real = [v for v in rays if isinstance(v, torch.Tensor) and v.is_floating_point()]
    assert batch.noise_variance is not None
    return {value.dtype for value in (*real, batch.y, batch.noise_variance)}


def _numbers(fit: StarFit) -> dict[Numbers, set[torch.dtype]]:
    """What a posterior holds, line by line of the policy."""
    posterior = fit.posterior
    if isinstance(posterior, PlacesAndRays):
        posterior = posterior.rays
    if isinstance(posterior, LogNormalPosterior):
        fields = {posterior.log_density.dtype, posterior.log_samples.dtype}
        return {Numbers.FIELDS: fields, Numbers.ROWS: {_rows(posterior)}}
    if isinstance(posterior, PathwisePosterior):
        features = posterior.model.features
        return {
            Numbers.FIELDS: {posterior.eps_mean.dtype, posterior.deviations.dtype},
            Numbers.ROWS: {features.dtype},
            Numbers.SPECTRA: {features.prior.spectrum.dtype, features.prior.lags.dtype},  # type: ignore[attr-defined]
        }
    if isinstance(posterior, ExactPosterior):
        return {
            Numbers.DENSE: {posterior.cholesky.dtype, posterior.alpha.dtype},
            Numbers.FIELDS: {posterior.dtype},
        }
    assert isinstance(posterior, VariationalPosterior)
    features = posterior.model.features
    return {
        Numbers.ROWS: {features.dtype},
        Numbers.SPECTRA: {features.prior.spectrum.dtype},  # type: ignore[attr-defined]
        Numbers.FIELDS: {posterior.state.mean.dtype},
    }


def _rows(posterior: LogNormalPosterior) -> torch.dtype:
    keywords = posterior.interpolation.keywords  # type: ignore[attr-defined]
    found = keywords["dtype"]
    assert isinstance(found, torch.dtype)
    return found
