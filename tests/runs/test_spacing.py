"""grid.spacing = "auto": the coarsest grid that leaves out less than the errors, and a finer one
for dust whose length is shorter than three spacings."""

import json
from pathlib import Path

import numpy as np
import pytest
from astropy import units as u
from astropy.coordinates import SkyCoord

from dustmap.config import load
from dustmap.engines import KernelChoice
from dustmap.errors import UserError
from dustmap.gp import RegularGrid
from dustmap.gp.kernels import Matern32
from dustmap.inference import Unresolved
from dustmap.runs import Stage, execute_run, open_star_map, prepare, prior_sky
from dustmap.runs.stars import _kernel
from dustmap.runs.stars._grids import GRID
from dustmap.runs.stars._resolution import with_spacing
from dustmap.runs.stars._run import StarRun
from dustmap.sky import DustMap
from tests.cloudy import CloudySky, places_in, write_cloudy
from tests.skies import plain_sky, write_plain_sky

SIZE = (240.0, 160.0, 80.0)
CONFIG = """
[data]
catalog = "sky.fits"
[grid]
size = [240, 160, 80]
spacing = "auto"
[model]
length = 60
std = 0.8
learn = []
[fit]
samples = 4
[export]
formats = []
figures = []
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sky")
    write_plain_sky(path, plain_sky(80, 3, SIZE))
    (path / "run.toml").write_text(CONFIG)
    return path


def prepared(folder: Path, *settings: str) -> StarRun:
    run = prepare(load(folder / "run.toml", settings))
    assert isinstance(run, StarRun)
    return run


def lacking(folder: Path, spacing: float) -> float:
    """Variance that the median star lacks over that of its error, by the definition."""
    stars = prepared(folder).stars
    shape = tuple(round(side / spacing) + 1 for side in SIZE)
    grid = RegularGrid.from_bounds((0.0,) * 3, SIZE, shape)
    left = Unresolved.of(Matern32(60.0, 0.8**2, dim=3), grid).length
    extinction, distance = np.median(stars.extinction), np.median(stars.distances.median)
    error = np.median(stars.extinction_error)
    return float(left * np.exp(0.8**2) * extinction**2 / distance / error**2)


def test_the_coarsest_grid_that_lacks_less_than_the_errors_is_taken(folder: Path) -> None:
    run = prepared(folder)
    (spacing,) = set(run.grid.spacing)
    assert 80.0 / spacing == pytest.approx(round(80.0 / spacing))
    assert lacking(folder, spacing) < 1.0
    parts = round(80.0 / spacing)
    assert parts == 4 or lacking(folder, 80.0 / (parts - 1)) >= 1.0


def test_a_run_opens_with_the_spacing_that_it_chose(folder: Path, tmp_path: Path) -> None:
    config = load(folder / "run.toml")
    execute_run(prepare(config), tmp_path / "run", config, False, Stage.EVALUATE)
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    opened = open_star_map(tmp_path / "run")
    assert f"{opened.run.grid.spacing[0]:g}" in report["grid"]["spacing"]
    assert load(tmp_path / "run" / "config.toml").grid.spacing == 0.0


def test_a_run_opens_with_its_spacing_whatever_kernel_it_chose(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rougher fields leave more between nodes: stars would ask for others with it."""
    settings = ('model.learn=["length", "std"]', "model.std=1.5", "model.noise=gaussian")
    config = load(folder / "run.toml", (*settings, "data.holdout=0", "fit.max_steps=2"))
    rough = KernelChoice("matern13")
    monkeypatch.setattr(_kernel, "choose_kernel", lambda *_: rough)
    run = prepare(config)
    assert isinstance(run, StarRun)
    finer = with_spacing(_kernel.with_kernel(config, rough.name), run.stars)
    assert finer.grid.spacing < run.grid.spacing[0]
    execute_run(run, tmp_path / "run", config, False, Stage.FIT)
    opened = open_star_map(tmp_path / "run")
    assert opened.run.grid == run.grid
    assert opened.run.config.model.kernel == rough.name
    (tmp_path / "run" / GRID).write_text('{"boxes": [[[240, 160, 80], 10]]}')
    with pytest.raises(UserError, match="the run has begun with others: resume it with the memory"):
        execute_run(run, tmp_path / "run", config, False, Stage.FIT, resume=True)
    (tmp_path / "run" / GRID).write_text('{"boxes": [[240, 20]]}')
    with pytest.raises(UserError, match=r"grid.json: expected the boxes of a grid"):
        open_star_map(tmp_path / "run")


def test_smaller_errors_take_a_finer_grid_until_the_memory_ends(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    coarse = prepared(folder).grid.spacing[0]
    rough = ("model.kernel=matern12", "model.std=3", "compute.memory=150MB")
    finest = prepared(folder, *rough).grid.spacing[0]
    assert finest < coarse
    assert "the finest within compute.memory" in caplog.text


@pytest.mark.parametrize(("length", "most"), [(60.0, 20.0), (30.0, 10.0)])
def test_nodes_are_a_third_of_a_length_that_is_learned(
    folder: Path, length: float, most: float
) -> None:
    """However large the errors: a learned length of fewer spacings is the grid's."""
    settings = (f"model.length={length}", "model.kernel=matern32")
    given = prepared(folder, *settings).grid.spacing[0]
    learned = prepared(folder, *settings, 'model.learn=["length"]').grid.spacing[0]
    assert learned <= most
    assert learned <= given


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (("data.tile=1/4",), "does not go with data.tile"),
        (("compute.memory=1MB",), "compute.memory holds no grid"),
    ],
)
def test_where_no_spacing_can_be_chosen(
    settings: tuple[str, ...], expected: str, folder: Path
) -> None:
    with pytest.raises(UserError, match=expected):
        prepare(load(folder / "run.toml", settings))


def test_a_sky_of_the_prior_needs_a_length(folder: Path) -> None:
    config = load(folder / "run.toml")
    with pytest.raises(UserError, match="name a length"):
        prior_sky(config)
    assert prior_sky(config, 10.0).spacing == 10.0


CLOUDY = (120.0, 120.0, 80.0)
LEARNED = """
[data]
catalog = "cloudy.csv"
system = "A_V"
[grid]
size = [120, 120, 80]
spacing = "auto"
[fit]
samples = 16
[export]
figures = []
"""


def with_cloudy_stars(path: Path, count: int, radius: float) -> CloudySky:
    sky = CloudySky.of(CLOUDY, 0.3, radius, seed=5)
    write_cloudy(path / "cloudy.csv", sky, places_in(CLOUDY, count, seed=6), seed=7)
    (path / "run.toml").write_text(LEARNED)
    return sky


def test_clouds_below_a_third_of_the_length_ask_for_a_finer_grid(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever `model.length` says; where it is held, or few stars tell, nothing is asked."""
    with_cloudy_stars(tmp_path, 300, radius=6.0)
    caplog.set_level("INFO")
    assert prepared(tmp_path).grid.spacing[0] == 4.0  # the finest of at most 60,000 nodes
    assert "the length that 300 stars have is" in caplog.text
    assert prepared(tmp_path, 'model.learn=["std", "mean"]').grid.spacing[0] >= 10.0
    with_cloudy_stars(tmp_path, 150, radius=6.0)
    assert prepared(tmp_path).grid.spacing[0] == 20.0


@pytest.mark.parametrize(
    "kernel",
    [
        "matern",
        pytest.param("matern32+matern12", marks=pytest.mark.slow),
        pytest.param("squared-exponential", marks=pytest.mark.slow),
        pytest.param("matern13", marks=pytest.mark.slow),
    ],
)
def test_stars_have_a_length_by_any_kernel(tmp_path: Path, kernel: str) -> None:
    with_cloudy_stars(tmp_path, 300, radius=6.0)
    assert prepared(tmp_path, f"model.kernel={kernel}").grid.spacing[0] < 10.0


@pytest.mark.slow
def test_smooth_dust_keeps_the_grid_of_its_start(tmp_path: Path) -> None:
    """The field of `plain_sky` has the length where learning starts."""
    write_plain_sky(tmp_path, plain_sky(300, 3, SIZE))
    (tmp_path / "run.toml").write_text(LEARNED.replace("cloudy.csv", "sky.fits"))
    size = f"grid.size={list(SIZE)}"
    assert prepared(tmp_path, size).grid.spacing[0] == 20.0


def test_a_run_that_has_begun_keeps_its_grid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_cloudy_stars(tmp_path, 300, radius=6.0)
    config = load(tmp_path / "run.toml", ("compute.memory=2GiB",))
    run = prepare(config)
    assert isinstance(run, StarRun)
    execute_run(run, tmp_path / "run", config, False, Stage.INGEST)
    monkeypatch.setattr(_kernel, "length_of_stars", lambda *_: pytest.fail("asked again"))
    again = prepare(config, tmp_path / "run")
    assert isinstance(again, StarRun)
    assert again.grid == run.grid


@pytest.mark.slow
def test_extinctions_behind_small_clouds_are_better_on_the_grid_that_they_ask_for(
    tmp_path: Path,
) -> None:
    """By sight lines that no star has; the truth is no draw of a kernel."""
    sky = with_cloudy_stars(tmp_path, 800, radius=8.0)
    new = places_in(CLOUDY, 500, seed=8)
    where = SkyCoord(*(new.T * u.pc), frame="galactic", representation_type="cartesian")
    where.representation_type = "spherical"
    error, inside = {}, {}
    for spacing in ("auto", "20"):
        config = load(tmp_path / "run.toml", (f"grid.spacing={spacing}",))
        execute_run(prepare(config), tmp_path / spacing, config, False, Stage.EXPORT)
        answers = DustMap.open(tmp_path / spacing)
        mean, std = (answers.query(where, mode, integrated=True) for mode in ("mean", "std"))
        known = np.isfinite(mean)
        off = (sky.extinctions(new) - mean)[known]
        error[spacing] = float(np.sqrt((off**2).mean()))
        inside[spacing] = float((np.abs(off) < std[known]).mean())
    assert error["auto"] < 0.9 * error["20"]
    assert 0.58 < inside["auto"] < 0.78
