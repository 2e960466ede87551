"""Zero points of surveys: a sky that no model drew, two surveys 0.1 mag apart."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from astropy.table import Table

from dustmap.cli import main
from dustmap.config import load
from dustmap.errors import UserError
from dustmap.gp import variance_of_pairs, whole_batch
from dustmap.gp.functionals import GaussLegendre, LineIntegrals, without_groups
from dustmap.inference import LogNormalPosterior, PathwisePosterior
from dustmap.runs import Stage, StarMap, execute_run, open_run, prepare
from dustmap.runs.stars._engines import with_unresolved
from dustmap.sky.stars import open_star_store
from tests.run_outputs import differences
from tests.runs.test_engines import SIZE, wave
from tests.runs.test_resume import Killed, interrupted

OFFSET, ERROR = 0.1, 0.03
CONFIG = """
[data]
catalog = "sky.fits"
system = "A_V"
groups = "SURVEY"
refit = false
[grid]
size = [120, 80, 40]
spacing = 10
[model]
length = 26
mean_density = 0.003
learn = ["mean", "noise"]
group_zero = "prior"
[fit]
samples = 16
[export]
formats = ["zarr"]
figures = []
"""
#: Prior standard deviations near those of the wave. The kernel is held: no test of learning it.
DENSITIES = {
    "gaussian": ("model.density=gaussian", "model.std=0.0047", 'model.learn=["mean"]'),
    "lognormal": ("model.std=1",),
}


def stars(count: int, seed: int) -> Table:
    """Stars all over the box; the survey `red` sees four of five stars at X > 0, and one at X < 0,
    0.1 mag too red."""
    generator = torch.Generator().manual_seed(seed)
    unit = torch.rand((count, 3), generator=generator, dtype=torch.float64) - 0.5
    rays = LineIntegrals.from_observer(unit * torch.tensor(SIZE, dtype=torch.float64))
    measure = rays.measure(GaussLegendre(12, panels=4))
    truth = (measure.weights * wave(measure.points)).sum(-1).numpy()
    x, y, z = (unit * torch.tensor(SIZE, dtype=torch.float64)).numpy().T
    distance = np.sqrt(x * x + y * y + z * z)
    rng = np.random.default_rng(seed)
    red = rng.random(count) < np.where(x > 0, 0.8, 0.2)
    return Table(
        {
            "l": np.degrees(np.arctan2(y, x)) % 360.0,
            "b": np.degrees(np.arcsin(z / distance)),
            "distance": distance,
            "extinction": truth + ERROR * rng.standard_normal(count) + OFFSET * red,
            "extinction_error": np.full(count, ERROR),
            "SURVEY": np.where(red, "red", "blue"),
            "FIELD": np.where(red, 7, 3),
            "TRUTH": truth,
        }
    )


@pytest.fixture(scope="module")
def sky(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("surveys")
    stars(500, 0).write(path / "sky.fits")
    more = stars(200, 1)
    more["SURVEY"][:20] = "grey"
    more.write(path / "more.fits")
    (path / "run.toml").write_text(CONFIG)
    return path


def run(sky: Path, path: Path, *settings: str, until: Stage = Stage.EVALUATE) -> Path:
    config = load(sky / "run.toml", settings)
    execute_run(prepare(config, path), path, config, False, until, resume=True)
    return path


@pytest.fixture(
    scope="module", params=["lognormal", pytest.param("gaussian", marks=pytest.mark.slow)]
)
def mapped(request: pytest.FixtureRequest, sky: Path) -> Path:
    """A run of each density, refitted to all stars."""
    return run(sky, sky / request.param, *DENSITIES[request.param], "data.refit=true")


def tilt(path: Path) -> float:
    """The mean error of extinctions at the far ends, X > 30 pc less X < -30 pc, in mag."""
    finished = open_run(path)
    assert isinstance(finished, StarMap)
    far = stars(2000, 9)
    radians = np.radians(far["l"]), np.radians(far["b"])
    x = far["distance"] * np.cos(radians[0]) * np.cos(radians[1])
    y = far["distance"] * np.sin(radians[0]) * np.cos(radians[1])
    z = far["distance"] * np.sin(radians[1])
    answers = finished.at(np.stack([x, y, z], axis=-1))
    error = answers["extinction_mean"] - far["TRUTH"]
    return float(error[x > 30].mean() - error[x < -30].mean())


def test_zero_points_are_recovered_and_the_map_is_not_tilted(sky: Path, mapped: Path) -> None:
    report = json.loads((mapped / "report.json").read_text())
    section = report["zero_points"]
    assert section["prior_std_mag"] == 0.05
    rows = {row["group"]: row for row in section["groups"]}
    for name, true in (("blue", 0.0), ("red", OFFSET)):
        assert abs(rows[name]["zero_point"] - true) < 2.0 * rows[name]["error"]
    apart = rows["red"]["zero_point"] - rows["blue"]["zero_point"]
    assert apart == pytest.approx(OFFSET, abs=0.02)
    assert sum(row["stars"] for row in rows.values()) == 450
    assert "| red |" in (mapped / "report.md").read_text()
    assert report["held_out_stars"]["chi2"] == pytest.approx(1.0, abs=0.5)
    with np.load(mapped / "checkpoint" / "posterior.npz") as arrays:
        named = {row["zero_point"] for row in rows.values()}
        assert named == set(arrays["zero_points"].tolist())
    without = run(sky, sky / f"{mapped.name}-without", *DENSITIES[mapped.name], "data.groups=")
    assert "zero_points" not in json.loads((without / "report.json").read_text())
    assert tilt(without) > 0.04
    assert abs(tilt(mapped)) < 0.015


@pytest.mark.parametrize("density", ["gaussian", pytest.param("lognormal", marks=pytest.mark.slow)])
def test_zero_points_may_be_those_against_their_mean(sky: Path, density: str) -> None:
    """Its weights are precisions, here numbers of stars; a reopened run knows them."""
    settings = (*DENSITIES[density], "model.group_zero=mean", "grid.spacing=20")
    path = run(sky, sky / f"{density}-mean", *settings)
    report = json.loads((path / "report.json").read_text())
    rows = {row["group"]: row for row in report["zero_points"]["groups"]}
    points = {name: row["zero_point"] for name, row in rows.items()}
    assert points["red"] - points["blue"] == pytest.approx(OFFSET, abs=0.01)
    total = sum(row["stars"] * row["zero_point"] for row in rows.values())
    assert total / report["counts"]["stars_fitted"] == pytest.approx(0.0, abs=2e-4)
    finished = open_run(path)
    assert isinstance(finished, StarMap)
    assert isinstance(finished.fit.posterior, LogNormalPosterior | PathwisePosterior)
    again = finished.fit.posterior.zero_points()
    assert again is not None
    assert again.mean.tolist() == pytest.approx([row["zero_point"] for row in rows.values()])
    lonely = Table.read(sky / "sky.fits")
    lonely["SURVEY"] = "all"
    lonely.write(path / "lonely.fits")
    alone = run(sky, path / "alone", *settings, f"data.catalog={path / 'lonely.fits'}")
    (row,) = json.loads((alone / "report.json").read_text())["zero_points"]["groups"]
    assert (row["zero_point"], row["error"]) == pytest.approx((0.0, 0.0), abs=1e-9)


@pytest.mark.parametrize("common", [0.0, 0.3])
def test_what_all_zero_points_have_in_common_is_checked(sky: Path, common: float) -> None:
    """Six times what their prior expects."""
    shifted = Table.read(sky / "sky.fits")
    shifted["extinction"] += common
    shifted.write(sky / f"shifted-{common}.fits")
    settings = (*DENSITIES["lognormal"], "grid.spacing=20", "fit.samples=4")
    path = run(
        sky, sky / f"common-{common}", *settings, f"data.catalog={sky}/shifted-{common}.fits"
    )
    checks = json.loads((path / "report.json").read_text())["checks"]
    (check,) = [check for check in checks if check["name"].startswith("mean zero point")]
    assert check["passed"] == (common == 0.0)


def test_other_stars_of_the_surveys_are_predicted_with_their_zero_points(
    sky: Path, mapped: Path
) -> None:
    finished = open_run(mapped)
    scores = finished.evaluate(sky / "more.fits", truth_column="TRUTH", system="A_V")
    assert scores["stars_of_unknown_groups"] == 20
    assert scores["chi2"] == pytest.approx(1.0, abs=0.4)
    assert scores["truth"]["rmse"] < 0.5 * OFFSET
    finished.predict(sky / "more.fits", "generic", mapped / "more.fits", False)
    table = Table.read(mapped / "more.fits")
    points = {
        r["group"]: r
        for r in json.loads((mapped / "report.json").read_text())["zero_points"]["groups"]
    }
    shift = np.array(
        [points[name]["zero_point"] if name in points else 0.0 for name in table["SURVEY"]]
    )
    np.testing.assert_allclose(
        table["measurement_mean"] - table["extinction_mean"], shift, atol=1e-5
    )
    variance = table["measurement_std"] ** 2 - table["extinction_std"] ** 2
    np.testing.assert_allclose(variance[:20], 0.05**2, rtol=1e-3)
    z = (table["extinction"] - table["measurement_mean"]) / np.hypot(
        table["measurement_std"], ERROR
    )
    assert float(np.square(z[20:]).mean()) == pytest.approx(1.0, abs=0.4)


def test_dust_between_the_nodes_is_that_of_the_field(sky: Path) -> None:
    """Of measurements it is √(F V), F the variance of draws of L ρ alone, without zero points."""
    finished = open_run(run(sky, sky / "lognormal", *DENSITIES["lognormal"], "data.refit=true"))
    assert isinstance(finished, StarMap)
    observed = finished.run.observed
    fit = with_unresolved(finished.run.config, finished.fit, 1.0)
    posterior = fit.posterior
    assert isinstance(posterior, LogNormalPosterior)
    rays = whole_batch(observed.batch).functional
    assert isinstance(rays, LineIntegrals)
    drawn = posterior.sample(without_groups(rays), posterior.n_samples, torch.manual_seed(0))
    field, whole = variance_of_pairs(drawn.double()), posterior.lacking(rays).double()
    expected = (torch.minimum(field, whole) * whole).sqrt()
    nodes = with_unresolved(finished.run.config, finished.fit, 0.0).posterior
    more = posterior.predict(rays).variance - nodes.predict(rays).variance
    torch.testing.assert_close(more.double(), expected, rtol=1e-3, atol=1e-9)


@pytest.mark.parametrize("density", ["lognormal", pytest.param("gaussian", marks=pytest.mark.slow)])
def test_a_killed_fit_of_groups_goes_on_to_the_same_bits(
    sky: Path, density: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = (*DENSITIES[density], "compute.checkpoint=0 s", "data.holdout=0.8")
    settings = (*settings, "grid.spacing=20", "fit.samples=4")
    run(sky, tmp_path / "whole", *settings)
    path = tmp_path / "run"

    def go() -> None:
        run(sky, path, *settings)

    assert interrupted(monkeypatch, 2, go, Killed())
    go()
    assert differences(tmp_path / "whole", path) == []


def test_numbers_name_groups_too_and_a_store_keeps_them(sky: Path) -> None:
    store = sky / "stars.zarr"
    common = [str(sky / "sky.fits"), "--system", "A_V", "--output", str(store)]
    assert main(["ingest", *common, "--groups", "FIELD"]) == 0
    opened = open_star_store(store)
    names = opened.attributes["catalog"]["groups"]["names"]
    groups = opened.read().groups
    assert groups is not None
    assert sorted(names) == ["3", "7"]
    table = Table.read(sky / "sky.fits")
    assert int((groups == names.index("7")).sum()) == int((table["FIELD"] == 7).sum())
    settings = (f"data.catalog={store}", "data.system=")
    assert prepare(load(sky / "run.toml", (*settings, "data.groups=FIELD"))).plan().passed
    with pytest.raises(UserError, match=r"groups in this store are those of the column FIELD"):
        prepare(load(sky / "run.toml", (*settings, "data.groups=SURVEY")))
    bare = sky / "bare.zarr"
    assert main(["ingest", *common[:-1], str(bare)]) == 0
    with pytest.raises(UserError, match="has no groups"):
        prepare(load(sky / "run.toml", (f"data.catalog={bare}", "data.system=")))
    # Without data.groups the groups of a store have no part in a run.
    assert prepare(load(sky / "run.toml", (*settings, "data.groups="))).plan().passed


def written(path: Path, labels: list[str]) -> Path:
    """The stars of the sky as CSV with these groups."""
    table = Table.read(path / "sky.fits")
    with (path / "labels.csv").open("w", newline="") as stream:
        rows = csv.writer(stream)
        names = ["l", "b", "distance", "extinction", "extinction_error"]
        rows.writerow([*names, "SURVEY"])
        for i, row in enumerate(table):
            rows.writerow([*(row[name] for name in names), labels[i % len(labels)]])
    return path / "labels.csv"


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        (["a", ""], "SURVEY: the group is missing in row 1 "),
        (["a", "nan"], "SURVEY: the group is missing in row 1 "),
        (["odd"] + ["a", "b"] * 300, "1 groups have a single star within the box, such as 'odd'"),
        ([f"{i}" for i in range(100)], "100 groups of 500 stars, expected at most 50"),
    ],
)
def test_groups_that_cannot_have_zero_points(sky: Path, labels: list[str], words: str) -> None:
    path = written(sky, labels)
    with pytest.raises(UserError) as raised:
        prepare(load(sky / "run.toml", [f"data.catalog={path}", 'data.invalid="error"']))
    assert words in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (("data.groups=SURVEYS",), "no column SURVEYS of groups .* did you mean SURVEY"),
        (("data.groups=distance",), "read as a number of every star"),
        (
            ("data.groups=TRUTH",),
            "column TRUTH: expected text or whole numbers, got floating point",
        ),
        (("fit.engine=exact",), 'is for .* fit.engine = "global"'),
        (("fit.engine=hip",), 'is for .* fit.engine = "global"'),
        (("data.tile=1/3",), "does not go with data.tile"),
        (("model.group_std=0",), "model.group_std"),
    ],
)
def test_what_has_no_zero_points_says_so(sky: Path, settings: tuple[str, ...], words: str) -> None:
    with pytest.raises(UserError, match=words):
        prepare(load(sky / "run.toml", settings))
