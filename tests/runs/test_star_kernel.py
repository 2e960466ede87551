"""model.kernel = "auto" of star runs: the choice, its report, and runs that are opened again."""

import json
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dustmap import config as configuration
from dustmap import engines
from dustmap.config import Config
from dustmap.engines import KernelChoice, Watch
from dustmap.gp.functionals import OutsidePolicy
from dustmap.linalg import Alone
from dustmap.runs import execute_run, open_star_map, prepare
from dustmap.runs.checkpoints._state_file import DiskCheckpoints
from dustmap.runs.stars import _grids, _kernel, _model
from dustmap.runs.stars._input import StarInput
from dustmap.runs.stars._run import StarRun, assemble
from dustmap.sky import galactic
from dustmap.sky.observations import observe
from dustmap.sky.simulation import (
    Bubbles,
    Disc,
    Measurements,
    SimulatedSky,
    SkyModel,
    StructuredDust,
    Turbulence,
    simulate,
    write_sky,
)
from dustmap.sky.stars import ExactDistances, StarTable
from dustmap.sky.systems import system_named
from tests.skies import matern

SIZE = (200.0, 200.0, 120.0)
ROUGH = Turbulence(0.8, 100.0, -11.0 / 3.0)
SMOOTH = matern(2.5, 60.0, 0.8)


def sky(turbulence: Turbulence, seed: int, stars: int = 120) -> SimulatedSky:
    """Stars behind dust that is finer than any grid here."""
    dust = StructuredDust(
        turbulence=turbulence,
        disc=Disc(height=1e9, length=1e9),
        bubbles=Bubbles(local_radius=0.0, others=0),
    )
    errors = Measurements(error=0.01, outliers=0.0)
    return simulate(SkyModel(size=SIZE, spacing=5.0, dust=dust, measurements=errors), stars, seed)


def configured(catalog: Path, *overrides: str) -> Config:
    tables: dict[str, Any] = {
        "data": {"catalog": str(catalog), "holdout": 0.1},
        "grid": {"size": list(SIZE), "spacing": 20.0},
        "model": {"length": 30.0, "noise": "gaussian"},
        "fit": {"samples": 4},
        "export": {"formats": ["zarr"], "figures": [], "samples": 2},
        "compute": {"dtype": "float64", "threads": 1},
    }
    return configuration.from_mapping(tables, overrides)


def choice_of(sky: SimulatedSky, *overrides: str) -> KernelChoice:
    """The choice by stars at known distances."""
    config = configured(Path("sky.fits"), "data.holdout=0", *overrides)
    run = assemble(config, StarInput(sky.at_true_distances(), {}))
    return _kernel.choose_kernel(run.config, run.observed, run.train, Watch(), Alone())


@pytest.fixture(scope="module")
def catalog(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("kernel") / "sky.fits"
    write_sky(path, sky(SMOOTH, 1), exact_distances=True)
    return path


@pytest.fixture(scope="module")
def finished(catalog: Path) -> Path:
    """A run that has chosen its kernel."""
    config = configured(catalog)
    execute_run(prepare(config), catalog.parent / "auto", config, overwrite=False)
    return catalog.parent / "auto"


def report(run: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((run / "report.json").read_text())
    return content


def test_stars_choose_where_length_and_std_are_learned() -> None:
    names = {
        "": "auto",
        "model.learn=[mean, noise]": "matern32",
        "model.learn=[length, mean]": "matern32",
        "data.tile=1/4": "matern32",
        "fit.engine=hip": "auto",
        "model.density=gaussian": "auto",
        "model.kernel=matern52": "matern52",
    }
    for override, name in names.items():
        config = configured(Path("sky.fits"), *([override] if override else []))
        assert config.model.kernel == name
        again = configuration.from_mapping(tomllib.loads(configuration.echo(config)))
        assert again == config


def test_the_prior_before_a_choice_is_that_of_few_stars() -> None:
    config = configured(Path("sky.fits"))
    assert _model.start_kernel(config).terms()[0].profile.name == engines.FALLBACK


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_kolmogorov_turbulence_is_rough(seed: int) -> None:
    choice = choice_of(sky(ROUGH, seed, 500), "grid.spacing=10")
    assert choice.name in ("matern13", "matern12")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 4))
@pytest.mark.parametrize("density", ["lognormal", "gaussian"])
def test_smooth_clouds_are_smooth(seed: int, density: str) -> None:
    choice = choice_of(sky(SMOOTH, seed, 500), "grid.spacing=10", f"model.density={density}")
    assert choice.name == "matern32"


def test_a_run_reports_its_choice(finished: Path) -> None:
    written = report(finished)
    choice = written["kernel_choice"]
    assert json.loads((finished / _kernel.CHOICE).read_text()) == choice
    assert choice["rows"] == 108
    assert choice["patches"] >= 8
    assert {"name", "score", "difference", "standard_error", "seconds", "learned"} == set(
        choice["candidates"][0]
    )
    assert set(choice["candidates"][0]["learned"]) == {"length", "std"}
    assert "## Kernel choice" in (finished / "report.md").read_text()
    assert 'kernel = "auto"' in (finished / "config.toml").read_text()
    assert "kernel" in [stage["stage"] for stage in written["stages"]["stages"]]


def test_a_run_is_that_of_the_kernel_by_name(catalog: Path, finished: Path) -> None:
    name = report(finished)["kernel_choice"]["name"]
    config = configured(catalog, f"model.kernel={name}")
    named = catalog.parent / "named"
    execute_run(prepare(config), named, config, overwrite=False)
    assert "kernel_choice" not in report(named)
    assert not (named / _kernel.CHOICE).exists()
    first, second = (
        np.load(run / "checkpoint" / "refit.npz")["log_samples"] for run in (finished, named)
    )
    np.testing.assert_array_equal(first, second)
    assert report(finished)["hyperparameters"] == report(named)["hyperparameters"]


def test_a_finished_run_is_opened_with_its_kernel(finished: Path) -> None:
    opened = open_star_map(finished)
    assert opened.run.config.model.kernel == report(finished)["kernel_choice"]["name"]
    assert opened.made.config_sha256 == report(finished)["config_sha256"]
    assert opened.query(30.0, 5.0, 60.0)["extinction_mean"] > 0


def test_the_plan_counts_the_choice(catalog: Path) -> None:
    plans = {}
    for name in ("auto", "matern12"):
        prepared = prepare(configured(catalog, f"model.kernel={name}"))
        assert isinstance(prepared, StarRun)
        plans[name] = prepared.plan()
        assert prepared.seconds() > 0
    parts = [[c.name for c in plan.memory.components] for plan in plans.values()]
    assert set(parts[0]) - set(parts[1]) == {"kernels compared"}
    asked = "auto: matern13, matern12, matern32 by patches of 108 stars"
    assert plans["auto"].counts["kernel"] == asked
    assert plans["matern12"].counts["kernel"] == "matern12"


def test_a_choice_is_resumed_and_not_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configured(Path("sky.fits"), "data.holdout=0")
    run = assemble(config, StarInput(sky(SMOOTH, 1, 150).at_true_distances(), {}))
    data = run.config, run.observed, run.train

    def watch() -> Watch:
        return Watch(DiskCheckpoints(tmp_path, 1e9).checkpointer("kernel"))

    first = _kernel.choose_kernel(*data, watch(), Alone())
    assert first.candidates
    monkeypatch.setattr(engines, "choose_ray_kernel", None)
    assert _kernel.choose_kernel(*data, watch(), Alone()) == first


def test_few_stars_keep_the_kernel_in_the_middle() -> None:
    choice = choice_of(sky(SMOOTH, 1, 25))
    assert choice.name == "matern32"
    assert choice.candidates == ()
    assert choice.remark == (
        "25 stars fill fewer than 8 patches of at least 60 pc: too few to compare kernels"
    )


def test_many_stars_and_fine_grids_are_thinned() -> None:
    assert [_kernel.compared_stars(n) for n in (30, 500, 2000, 4000, 10**6)] == [
        30,
        500,
        500,
        800,
        1000,
    ]
    config = configured(Path("sky.fits"), "grid.spacing=2")
    coarse = _grids.grid_of(_kernel.compared_on(config).grid)
    fine = _grids.grid_of(config.grid)
    assert coarse.size <= 60_000 < fine.size
    inside = torch.tensor([fine.lower, fine.upper], dtype=torch.float64)
    assert bool(coarse.contains(inside).all())
    config = configured(Path("sky.fits"))
    assert replace(_kernel.compared_on(config).grid, around=config.grid.around) == config.grid
    assert "relative_scatter" in config.model.learn
    assert "relative_scatter" not in _kernel.compared_on(config).model.learn


def test_the_noise_of_a_choice_is_that_of_the_stars_compared() -> None:
    """Stars behind the same dust beyond the box are not independent: of 3,000, and of the 300 among
    them that are compared."""
    rng = np.random.default_rng(0)
    x = rng.uniform(-300.0, 300.0, (3_000, 3))
    l, b, distance = galactic(x)
    extinction = 1e-3 * distance + 0.05 * rng.standard_normal(3_000)
    error, system = np.full(3_000, 0.05), system_named("A_V")
    places = ExactDistances(distance)
    stars = StarTable(np.arange(3_000), l, b, places, extinction, error, system)
    grid = {"size": [400, 400, 400], "spacing": 40, "around": "none"}
    tables = {"data": {"catalog": "a.fits"}, "grid": grid, "model": {"mean": "constant"}}
    config = configuration.from_mapping(tables, ["model.kernel=matern32"])
    box = _grids.grid_of(config.grid)
    some = torch.randperm(3_000, generator=torch.Generator().manual_seed(1))[:300].sort().values
    whole = observe(stars, box, OutsidePolicy.PRIOR)
    alone = observe(stars[some.numpy()], box, OutsidePolicy.PRIOR)
    of_all, of_some = (
        _kernel._ray_data(config, observed, index).errors
        for observed, index in ((whole, some), (alone, torch.arange(300)))
    )
    beyond = alone.counts.truncated
    assert beyond > 100
    ratio = (of_all / of_some).sqrt()
    assert 0.8 < float(ratio.median()) < 1.25
    assert float(ratio.max()) < 2.0
