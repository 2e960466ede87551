"""Stars beyond the box: dust that goes on outside must not be put inside, nor be lost."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from astropy.table import Table
from numpy.typing import NDArray

from dustmap.config import from_mapping, load
from dustmap.errors import UserError
from dustmap.gp import Prediction
from dustmap.gp.kernels import Matern32
from dustmap.inference import LogNormalPosterior
from dustmap.runs import Stage, StarMap, execute_run, open_run, prepare
from dustmap.runs.reports import Report
from dustmap.runs.stars._beyond import FarStars, by_the_others, limits_of, prior_dust
from dustmap.runs.stars._distance_rounds import _refuse_all_beyond
from dustmap.runs.stars._model import Hyperparameters
from dustmap.runs.stars._run import StarRun
from dustmap.sky import cartesian
from dustmap.sky.simulation import Measurements, SimulatedSky, write_sky
from dustmap.sky.stars import ExactDistances
from tests.skies import plain_sky

CONFIG = """
[data]
catalog = "stars.fits"
system = "A_V"
distance_prior = "exponential-density"
distance_scale = 150
distance_max = 1000
refit = false
[grid]
size = [160, 160, 120]
spacing = 20
around = "none"
[model]
mean_density = 0.001
[fit]
samples = 16
[export]
formats = []
figures = []
"""
DENSITY = 1e-3


def uniform(folder: Path, stars: int, error: float) -> None:
    """Stars out to 320 pc, uniform in volume, behind the same dust everywhere.

    error: of a parallax, as a part of it; 0 for exact distances.
    """
    rng = np.random.default_rng(0)
    d = 320.0 * rng.random(stars) ** (1 / 3)
    columns = {
        "l": 360.0 * rng.random(stars),
        "b": np.degrees(np.arcsin(2.0 * rng.random(stars) - 1.0)),
        "extinction": DENSITY * d + 0.01 * rng.standard_normal(stars),
        "extinction_error": np.full(stars, 0.01),
        "noise_free": DENSITY * d,
    }
    if error:
        columns["parallax_error"] = error * 1e3 / d
        columns["parallax"] = 1e3 / d * (1.0 + error * rng.standard_normal(stars))
    else:
        columns["distance"] = d
    Table(columns).write(folder / "stars.fits")
    (folder / "run.toml").write_text(CONFIG)


def finished(folder: Path, *settings: str) -> tuple[StarMap, Report]:
    config = load(folder / "run.toml", settings)
    report = execute_run(prepare(config), folder / "run", config, False, Stage.EVALUATE)
    found = open_run(folder / "run")
    assert isinstance(found, StarMap)
    return found, report


def draws(found: StarMap) -> NDArray[np.float64]:
    """ρ of every sample at the nodes (S, M)."""
    posterior = found.fit.posterior
    assert isinstance(posterior, LogNormalPosterior)
    return np.asarray(posterior.log_samples.double().exp())


def inwards(found: StarMap) -> NDArray[np.float64]:
    """Distance of the nodes from the nearest face (M,)."""
    grid = found.run.grid
    places = grid.points().numpy()
    return np.asarray(np.minimum(places - grid.lower, grid.upper - places).min(1))


@pytest.mark.parametrize(
    ("error", "kernel"),
    [
        pytest.param(0.0, "auto", marks=pytest.mark.slow),
        pytest.param(0.1, "auto", marks=pytest.mark.slow),
        (0.1, "matern32"),
    ],
)
def test_uniform_dust_is_uniform_up_to_the_faces(tmp_path: Path, error: float, kernel: str) -> None:
    """Within 12 %, or twice what the map says it does not know of a mean that is wide and skew."""
    uniform(tmp_path, 500, error)
    found, report = finished(tmp_path, f'model.kernel="{kernel}"')
    assert report.sections["counts"]["rays_that_leave_the_box"] > 300
    learned = report.sections["hyperparameters"]
    assert learned["beyond"] == pytest.approx(1.0, abs=0.3)
    # There is none of the variance that a prior of dust as uneven as in the Galaxy expects.
    assert learned["beyond_spread"] < 0.3
    # The stated errors are right, and of extinctions that distances make uncertain few tell.
    assert learned["noise"] == pytest.approx(1.0, abs=0.3)
    rho, depth = draws(found), inwards(found)
    for low, high in ((-1.0, 10.0), (10.0, 30.0), (30.0, 100.0)):
        part = rho[:, (depth >= low) & (depth < high)].mean(1)
        assert abs(part.mean() - DENSITY) < max(0.12 * DENSITY, 2.0 * part.std())
        assert part.mean() < 1.25 * DENSITY
    answer = found.query(0.0, 0.0, 79.0)
    off = answer["extinction_mean"] - 79.0 * DENSITY
    assert abs(off) < 3.0 * answer["extinction_std"]
    assert abs(off) < 0.01


def test_truncated_rays_fail_a_check_and_pile_dust_up(tmp_path: Path) -> None:
    uniform(tmp_path, 300, 0.0)
    found, report = finished(tmp_path, "grid.outside=truncate", "model.learn=[]")
    failed = {check.name: check for check in report.checks if not check.passed}
    assert failed["part of the rays cut at the box"].value > 0.9
    assert "prior" in failed["part of the rays cut at the box"].advice
    assert draws(found).mean() > 1.5 * DENSITY


@pytest.mark.parametrize(
    ("height", "length", "taken"),
    [
        (80.0, 2500.0, {}),
        (-400.0, 2500.0, {"disc_height_beyond": 600.0}),
        (900.0, -500.0, {"disc_height_beyond": 600.0, "disc_length_beyond": 30_000.0}),
        (80.0, 100.0, {"disc_length_beyond": 1000.0}),
    ],
)
def test_a_disc_falls_beyond_the_box_whatever_is_learned_within(
    height: float, length: float, taken: dict[str, float]
) -> None:
    """A box that is thinner than the disc, or holds hardly a star, may find that it grows."""
    config = from_mapping({"data": {"catalog": ["stars.fits"]}})
    at = Hyperparameters(60.0, 1.0, DENSITY, 1.0, disc_height=height, disc_length=length)
    dust = prior_dust(config, at)
    assert limits_of(dust, at) == pytest.approx(taken)
    heights = torch.tensor([[0.0, 900.0, z] for z in (0.0, 500.0, 5e3)], dtype=torch.float64)
    near, high, far = dust.expected(heights).tolist()
    assert near == pytest.approx(DENSITY * math.exp(0.5), rel=0.3)
    assert high < 0.5 * near
    assert far < 1e-3 * near
    assert dust.expected(torch.tensor([[-8e3, 0.0, 0.0]])).item() < near


def test_dust_beyond_the_box_that_leaves_nothing_within_is_refused(tmp_path: Path) -> None:
    uniform(tmp_path, 60, 0.1)
    run = prepare(load(tmp_path / "run.toml"))
    assert isinstance(run, StarRun)
    observed, train = run.observed, torch.arange(len(run.observed.measured))
    _refuse_all_beyond(run.config, observed, train)
    more = replace(observed, batch=replace(observed.batch, y=observed.measured - 1.0))
    with pytest.raises(
        UserError, match=r"beyond the box reddens the stars by .* larger grid\.size"
    ):
        _refuse_all_beyond(run.config, more, train)


def test_predictions_have_density_and_extinction_or_neither(tmp_path: Path) -> None:
    uniform(tmp_path, 300, 0.1)
    found, _ = finished(tmp_path, "model.learn=[]", "fit.distance_rounds=0")
    d = np.array([30.0, 66.0, 130.0])
    places = Table({"l": [0.0] * 3, "b": [0.0] * 3})
    places["parallax"], places["parallax_error"] = 1e3 / d, 0.15 * 1e3 / d
    places.write(tmp_path / "places.csv")
    told = found.predict(tmp_path / "places.csv", "generic", tmp_path / "out.csv", False)
    assert told["rows_outside_the_box"] == 1
    out = Table.read(tmp_path / "out.csv")
    for name in ("extinction_mean", "density_mean"):
        assert np.isfinite(np.ma.filled(out[name], np.nan)).tolist() == [True, True, False]
    # Many of the second star's distances are outside, where dust is expected too. A dozen stars lie
    # in the box: with 128 samples it is 0.055 mag for 0.069, a third of its standard deviation off.
    assert out["extinction_mean"][1] == pytest.approx(DENSITY * 69.0, rel=0.25)
    assert abs(out["extinction_mean"][1] - DENSITY * 69.0) < 0.5 * out["extinction_std"][1]


def truth_along(
    sky: SimulatedSky, found: StarMap, directions: int
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """True A from the Sun to places near the faces, and its posterior mean and std."""
    rng = np.random.default_rng(3)
    l, b = 360.0 * rng.random(directions), np.degrees(np.arcsin(rng.uniform(-1, 1, directions)))
    unit = cartesian(l, b, np.ones(directions))
    reach = 0.95 * (np.array(found.run.grid.upper) / np.abs(unit)).min(1)
    s = (np.arange(400) + 0.5) / 400
    points = unit[:, None] * (reach[:, None] * s)[..., None]
    rho = sky.truth.mean_at(points.reshape(-1, 3)).reshape(directions, -1)
    answer = found.at_stars(l, b, ExactDistances(reach))
    return rho.mean(1) * reach, answer["extinction_mean"], answer["extinction_std"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["exact", "parallaxes"])
def test_structured_dust_that_goes_on_outside(tmp_path: Path, kind: str) -> None:
    """Everything learned; truth on nodes twice as fine, four times the volume of the box.

    It has no disc and no scatter: where a run learns these, too, 0.785 are inside.
    """
    plain = 'model.mean="constant"', 'model.learn=["length", "std", "mean", "noise"]'
    inside, biases = [], []
    for seed in (1, 2, 3, 4):
        folder = tmp_path / str(seed)
        folder.mkdir()
        sky = plain_sky(3000, seed, (720.0, 720.0, 400.0), Measurements(outliers=0.0))
        write_sky(folder / "stars.fits", sky, exact_distances=kind == "exact")
        (folder / "run.toml").write_text(CONFIG)
        settings = ("grid.size=[360, 360, 240]", "fit.samples=32", 'data.system=""', *plain)
        found, report = finished(folder, *settings)
        assert report.sections["counts"]["rays_that_leave_the_box"] > 1500
        true, mean, std = truth_along(sky, found, 400)
        inside.append(np.abs(true - mean) < std)
        biases.append((mean - true).mean() / true.mean())
    assert 0.60 < np.mean(inside) < 0.76
    assert abs(np.mean(biases)) < 0.04


@pytest.mark.parametrize("center", ["[80, 0, 0]", "[-80, 80, 60]", "[200, 0, 0]"])
def test_pictures_where_the_sun_is_on_a_face_of_the_box(tmp_path: Path, center: str) -> None:
    """The line of sight goes into the box; without the Sun there is none."""
    uniform(tmp_path, 300, 0.0)
    (tmp_path / "run.toml").write_text(CONFIG)
    few = ['export.figures=["line", "shell"]', "model.kernel=matern32", "model.learn=[]"]
    config = load(tmp_path / "run.toml", [*few, "grid.spacing=40", f"grid.center={center}"])
    execute_run(prepare(config), tmp_path / "run", config, False)
    on_face = center != "[200, 0, 0]"
    assert (tmp_path / "run" / "plots" / "line.png").exists() == on_face
    assert isinstance(open_run(str(tmp_path / "run")), StarMap)


def far_stars(count: int, level: float, spread: float) -> FarStars:
    """Stars whose measurements are drawn with this dust beyond the box."""
    rng = np.random.default_rng(5)
    expected, prior = rng.uniform(0.2, 1.0, count), rng.uniform(0.05, 0.3, count)
    inside, before, distances = rng.uniform(0.1, 0.5, count), 0.02, 0.01
    variance = before + level**2 * (spread * prior + distances) + 0.05**2
    y = inside + level * expected + np.sqrt(variance) * rng.standard_normal(count)
    others = Prediction(torch.from_numpy(inside), torch.full((count,), before).double())
    at = Hyperparameters(length=50.0, std=1.0, mean=1e-3, noise=1.0)
    return FarStars(
        at,
        y=torch.from_numpy(y),
        errors=torch.full((count,), 0.05**2).double(),
        others=others,
        expected=torch.from_numpy(expected),
        prior=torch.from_numpy(prior),
        distances=torch.full((count,), distances).double(),
        alike=torch.ones(count).double(),
    )


@pytest.mark.parametrize(("level", "spread"), [(0.6, 0.2), (1.0, 1.0), (1.5, 4.0)])
def test_stars_say_how_much_dust_is_beyond_and_how_uneven_it_is(
    level: float, spread: float
) -> None:
    stars = far_stars(4000, level, spread)
    found, std = stars.level(level, spread)
    assert abs(found - level) < 4.0 * std
    assert stars.spread(level) == pytest.approx(spread, rel=0.15)


def test_stars_behind_the_same_dust_say_no_more_than_one() -> None:
    stars = far_stars(300, 0.8, 0.5)
    copies = stars[torch.arange(300).repeat(4)]
    alike = replace(copies, alike=4.0 * copies.alike)
    assert alike.spread(0.8) == pytest.approx(stars.spread(0.8), rel=1e-9)
    # Four times the variance of the dust, and no more: that of their errors is each star's own.
    assert 0.5 * stars.level(0.8, 0.5)[1] < alike.level(0.8, 0.5)[1] < stars.level(0.8, 0.5)[1]


def test_a_star_by_the_others_is_the_process_without_it() -> None:
    x = torch.linspace(0.0, 3.0, 12).double()[:, None]
    K = Matern32(1.0, 0.8, dim=1)(x[:, None] - x[None]).detach()
    generator = torch.Generator().manual_seed(0)
    y = torch.randn(12, generator=generator, dtype=torch.float64)
    noise = torch.linspace(0.1, 2.0, 12).double()

    def conditioned(known: torch.Tensor, at: torch.Tensor) -> Prediction:
        gain = torch.linalg.solve(K[known][:, known] + noise[known].diag(), K[known][:, at]).mT
        variance = K[at, at] - (gain * K[at][:, known]).sum(-1)
        return Prediction(gain @ y[known], variance)

    every = torch.arange(12)
    inside = conditioned(every, every)
    others = by_the_others(y, inside, inside, noise)
    for n in range(12):
        without = conditioned(every[every != n], every[n : n + 1])
        torch.testing.assert_close(others.mean[n : n + 1], without.mean)
        torch.testing.assert_close(others.variance[n : n + 1], without.variance)


@pytest.mark.parametrize("each", [10, 1_000])
def test_some_of_many_stars_say_of_the_dust_beyond_what_all_say(each: int) -> None:
    """200 sight lines, so many stars behind each: of 200,000 only 2,000 are asked."""
    rng, lines = np.random.default_rng(3), 200
    dust = 0.3 + math.sqrt(0.05 * 0.04) * rng.standard_normal(lines)
    of_star = np.arange(lines * each) % lines
    y = 0.5 + dust[of_star] + 0.03 * rng.standard_normal(lines * each)

    def all_alike(value: float) -> torch.Tensor:
        return torch.full((len(y),), value, dtype=torch.float64)

    stars = FarStars(
        Hyperparameters(length=50.0, std=1.0, mean=1e-3, noise=1.0),
        y=torch.from_numpy(y),
        errors=all_alike(0.03**2),
        others=Prediction(all_alike(0.5), all_alike(1e-4)),
        expected=all_alike(0.3),
        prior=all_alike(0.04),
        distances=all_alike(0.0),
        alike=all_alike(each),
    )
    assert stars.telling().spread(1.0) == pytest.approx(0.05, rel=0.5)
