"""Log-normal fields that are too wide, and stars that were held out, who say so."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dustmap.config import Config, from_mapping
from dustmap.engines import Watch
from dustmap.gp import Prediction
from dustmap.runs import execute_run, open_star_map, prepare
from dustmap.runs.stars import _between, _grids, _model
from dustmap.runs.stars._distance_rounds import FitData
from dustmap.runs.stars._distances import predictions
from dustmap.runs.stars._engines import StarFit, fit_stars
from dustmap.sky.observations import Observations, observe
from dustmap.sky.simulation import Measurements
from tests.inference.checkpointers import MemoryCheckpointer
from tests.skies import SIZE, plain_sky, write_plain_sky

TRUE_STD = 0.8


def config(*settings: str) -> Config:
    tables: dict[str, dict[str, object]] = {
        "data": {"catalog": ["sky.fits"], "system": "A_V", "holdout": 0.3, "refit": False},
        "grid": {"size": list(SIZE), "spacing": 10.0},
        "model": {"kernel": "matern32", "length": 60.0, "noise": "gaussian"},
        "fit": {"samples": 8},
        "export": {"formats": [], "figures": []},
    }
    return from_mapping(tables, settings)


def observed_and_parts(stars: int) -> tuple[Observations, tuple[Tensor, Tensor]]:
    """Stars with errors of 0.03 mag; a third of them is held out."""
    sky = plain_sky(stars, seed=4, measurements=Measurements(error=0.03, outliers=0.0))
    grid, policy = _grids.grid_of(config().grid), _model.policy_beyond(config())
    table = sky.at_true_distances()
    observed = observe(table, grid, policy, torch.float64)
    which = torch.randperm(len(observed), generator=torch.Generator().manual_seed(0))
    return observed, (which[: 2 * stars // 3], which[2 * stars // 3 :])


def at_std(std: float, observed: Observations, train: Tensor) -> StarFit:
    """A fit that holds such a standard deviation."""
    made = _model.held(config(f"model.std={std}"))
    return fit_stars(made, observed.training(train))


def test_a_field_that_is_too_wide_is_narrowed_while_held_out_stars_gain() -> None:
    observed, parts = observed_and_parts(450)
    wide = at_std(3.0, observed, parts[0])
    made = config('model.learn=["length", "std", "mean"]')
    pages = MemoryCheckpointer()
    fit, sections = _between.narrowed(made, wide, FitData(observed, observed), parts, Watch(pages))
    choice = sections["std_choice"]
    tried = choice["rounds"]
    assert choice["learned"] == wide.hyperparameters.std
    taken = [each for each in tried if each["gain"] > -each["standard_error"]]
    assert [each["std"] for each in tried] == pytest.approx([2.1, 1.47][: len(tried)])
    assert len(taken) >= 1
    assert fit.hyperparameters.std == pytest.approx(taken[-1]["std"])
    before, _ = _between.judged(made, wide, observed, parts[1])
    gains = [predictions(f, observed, parts[1]).data.log_density for f in (before, fit)]
    assert float((gains[1] - gains[0]).mean()) > 0.02
    assert tried[0]["gain"] > 0.0
    # Once more from what has been kept.
    again, same = _between.narrowed(made, wide, FitData(observed, observed), parts, Watch(pages))
    assert same == sections
    nodes = (each.posterior.predict(observed.batch.functional).mean for each in (fit, again))
    assert torch.equal(*nodes)


def test_one_outlier_that_was_held_out_does_not_ask_for_dust_between_the_nodes() -> None:
    """No fitted star is one, so that ν is as large as it may be: of 400 stars this says little."""
    observed, (train, holdout) = observed_and_parts(450)
    judges = holdout[:40]
    made = _model.held(config("model.std=0.8", "model.noise=student-t"))
    fit = fit_stars(made, observed.training(train))
    assert fit.hyperparameters.nu is not None
    fit = replace(fit, hyperparameters=replace(fit.hyperparameters, nu=1e3))
    _, without = _between.judged(made, fit, observed, judges)
    more = torch.zeros_like(observed.measured)
    more[judges[0]] = 0.4  # 23 of its errors
    batch = replace(observed.batch, y=observed.batch.y + more)
    wild = replace(observed, measured=observed.measured + more, batch=batch)
    _, one = _between.judged(made, fit, wild, judges)
    assert one["factor"] < without["factor"] + 1.0, (one, without)


@pytest.mark.parametrize(
    ("count", "factor", "low", "high"), [(27, 1.0, 0.6, 2.5), (300, 8.0, 5, 11)]
)
def test_many_stars_and_not_one_outlier_tell_a_factor(
    count: int, factor: float, low: float, high: float
) -> None:
    """Half of the variance of many is between the nodes at a factor 1. Of few that is so of the
    first, which is an outlier of the catalog, as three others are."""
    config_, none = config("model.noise=student-t"), torch.zeros(count, dtype=torch.float64)
    at = replace(_model.start_of(config_), noise=1.0, nu=5.0)
    generator = torch.Generator().manual_seed(1)
    z = torch.randn(count, generator=generator, dtype=torch.float64)
    y = z * 0.02 * math.sqrt(0.5 + 0.5 * factor)
    if factor == 1.0:
        y[:4] = 0.02 * torch.tensor([13.0, 2.7, 3.3, -2.6], dtype=torch.float64)
    more = torch.full_like(none, 0.5 * 0.02**2)
    errors = more.clone()
    if factor == 1.0:
        more[1:] *= 0.1
    resolved = Prediction(none[:, None], none[:, None])
    judges = _between._Judges(y, errors, none, resolved, more[:, None], torch.ones(1).double())
    found, std = _between._factor([judges], _between._Noise.all_of(config_, at, 400))
    assert low < found < high
    assert std > 0.1


def test_others_are_left_as_they_were_learned() -> None:
    observed, (train, holdout) = observed_and_parts(150)
    fit = at_std(TRUE_STD, observed, train)
    wide = replace(fit, hyperparameters=replace(fit.hyperparameters, std=3.0))
    learned, known = config(), config('model.learn=["mean"]')
    for made, each, judges in (
        (learned, fit, holdout),  # not wide
        (known, wide, holdout),  # the user's own
        (learned, wide, holdout[:49]),  # too few to ask
        (learned, wide, holdout[:0]),
    ):
        found, sections = _between.narrowed(
            made, each, FitData(observed, observed), (train, judges), Watch()
        )
        assert "std_choice" not in sections
        assert found.hyperparameters.std == each.hyperparameters.std


def test_a_run_reports_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_plain_sky(tmp_path, plain_sky(200, seed=4))
    monkeypatch.setattr(_between, "_WIDE", 0.3)
    monkeypatch.setattr(_between, "_NARROWEST", 0.2)
    made = config(f"data.catalog={tmp_path / 'sky.fits'}", "grid.spacing=20")
    execute_run(prepare(made), tmp_path / "run", made, False)
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    tried, learned = report["std_choice"]["rounds"], report["std_choice"]["learned"]
    gained = [each for each in tried if each["gain"] > -each["standard_error"]]
    expected = gained[-1]["std"] if gained else learned
    assert report["hyperparameters"]["std"] == pytest.approx(expected)
    assert ("std" in report["hyperparameter_errors"]) == (not gained)
    assert open_star_map(tmp_path / "run").fit.hyperparameters.std == pytest.approx(expected)
