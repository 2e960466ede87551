"""Maps of stars whose kernel is the sum of two scales."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dustmap.config import from_mapping, load
from dustmap.gp import ConstantMean, ExactGP
from dustmap.gp.functionals import AbstractFunctional
from dustmap.gp.kernels import Matern12, Matern32
from dustmap.inference import LogNormalPosterior
from dustmap.runs import StarMap, execute_run, open_run, prepare
from dustmap.runs.stars._engines import fit_stars, problem_of
from dustmap.runs.stars._model import (
    Hyperparameters,
    hyperparameters_of,
    kernel_of,
    start_for,
    start_of,
    units_of,
)
from tests.runs.test_engines import config, sky
from tests.runs.test_zero_points import CONFIG, stars

TWO = "model.kernel=matern32+matern12"


def covariance(functional: AbstractFunctional, length: float, std: float) -> Tensor:
    """Of rays, one term at a time."""
    mean, half = ConstantMean(0.0), 0.5 * std**2
    coarse = ExactGP(Matern32(length, half, dim=3), mean).covariance(functional)
    fine = ExactGP(Matern12(length / 4.0, half, dim=3), mean).covariance(functional)
    return coarse + fine


def test_gaussian_maps_have_the_dense_posterior_of_the_sum() -> None:
    """By dense algebra; `tests/contracts` compare the global engine with that."""
    settings = ("model.density=gaussian", "fit.engine=exact", "model.learn=[]")
    made = config(TWO, *settings, "compute.dtype=float64")
    every, model = sky(80), made.model
    data, other = every[slice(0, 60)], every[slice(60, 80)].functional
    found = fit_stars(made, data).posterior.predict(other)
    K = covariance(every.functional, model.length, model.std)
    assert data.noise_variance is not None
    gain = K[60:, :60] @ torch.linalg.inv(K[:60, :60] + torch.diag(data.noise_variance))
    prior = every.functional.moments()[:, 0] * model.mean_density
    mean = prior[60:] + gain @ (data.y - prior[:60])
    std = (K[60:, 60:] - gain @ K[:60, 60:]).diagonal().sqrt()
    assert float(((found.mean - mean) / std).abs().max()) < 1e-4
    torch.testing.assert_close(found.std.double(), std, rtol=1e-4, atol=0)


def test_hyperparameters_of_a_sum_make_its_kernel_again() -> None:
    made = config(TWO, "model.density=gaussian")
    at = start_of(made)
    assert at.second_length is None
    (first, second) = kernel_of(made.model, at).terms()
    assert [t.profile.name for t in (first, second)] == ["matern32", "matern12"]
    assert float(second.lengthscale[0]) == pytest.approx(25.0 / 4.0)
    assert float(kernel_of(made.model, at).variance()) == pytest.approx(0.003**2)
    model = problem_of(made, sky(10), start_for(made, sky(10))).model
    moved = model.with_value("length[1]", torch.tensor([1.0], dtype=torch.float64))
    values = hyperparameters_of(made, moved)
    assert values.second_length == pytest.approx(torch.e)
    assert values.std == pytest.approx(0.003)
    assert values.longest == pytest.approx(25.0)
    assert replace(values, second_length=40.0).longest == 40.0
    again = Hyperparameters.from_dict(values.as_dict())
    assert again == values
    dx = torch.randn(20, 3, dtype=torch.float64)
    torch.testing.assert_close(kernel_of(made.model, again)(dx), moved.kernel(dx))
    assert set(units_of(made)) >= {"first_std", "second_std", "second_length"}
    # A kernel of one term has no word of a second.
    alone = hyperparameters_of(config(), problem_of(config(), sky(10)).model)
    assert not set(alone.as_dict()) & {"first_std", "second_std", "second_length"}


def test_a_log_normal_map_learns_both_scales_and_opens_again(tmp_path: Path) -> None:
    stars(200, 0).write(tmp_path / "sky.fits")
    (tmp_path / "run.toml").write_text(CONFIG)
    learn = 'model.learn=["length", "std", "mean", "noise"]'
    settings = (TWO, learn, "data.groups=", "model.noise=gaussian", "model.std=1")
    small = ("fit.samples=4", "export.formats=[]")
    made = load(tmp_path / "run.toml", (*settings, *small))
    path = tmp_path / "run"
    execute_run(prepare(made, path), path, made, False)
    report = json.loads((path / "report.json").read_text())
    at = report["hyperparameters"]
    assert at["std"] == pytest.approx((at["first_std"] ** 2 + at["second_std"] ** 2) ** 0.5)
    assert at["second_length"] != pytest.approx(at["length"] / 4.0, rel=1e-3)
    assert report["units"]["second_std"] == "of ln density, of the second term"
    # No sky of two surveys: all that is asked for is that the fit describes it.
    assert report["fit"]["learning"] == "converged"
    finished = open_run(path)
    assert isinstance(finished, StarMap)
    assert isinstance(finished.fit.posterior, LogNormalPosterior)
    kernel = kernel_of(made.model, finished.fit.hyperparameters)
    assert float(kernel.terms()[1].lengthscale[0]) == pytest.approx(at["second_length"])


def test_a_regression_learns_both_scales(tmp_path: Path) -> None:
    x = torch.linspace(0.0, 10.0, 120, dtype=torch.float64)
    white = torch.randn(120, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    y = x.sin() + 0.2 * (9.0 * x).sin() + 0.05 * white
    rows = "\n".join(f"{a},{b}" for a, b in zip(x.tolist(), y.tolist(), strict=True))
    (tmp_path / "wave.csv").write_text(f"x,y\n{rows}\n")
    data = {
        "catalog": str(tmp_path / "wave.csv"),
        "kind": "regression",
        "inputs": ["x"],
        "target": "y",
    }
    made = from_mapping({"data": data}, (TWO, "export.figures=[]"))
    path = tmp_path / "run"
    execute_run(prepare(made, path), path, made, False)
    at = json.loads((path / "report.json").read_text())["hyperparameters"]
    assert (at["profile"], at["second_profile"]) == ("matern32", "matern12")
    assert at["std"] > 0
    assert at["second_std"] > 0
    assert at["second_length"][0] > 0
