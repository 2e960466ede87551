"""Units and sentinels that no single row gives away: refused, or a check that fails."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from astropy import units as u
from astropy.coordinates import SkyCoord
from astropy.table import Table
from numpy.typing import NDArray

from dustmap import config as configuration
from dustmap.cli import CHECK_FAILED, DONE, main
from dustmap.runs import prepare
from dustmap.runs.stars import _catalog_checks, _parts
from dustmap.runs.stars._catalog_checks import catalog_checks
from dustmap.runs.stars._run import StarRun
from dustmap.sky import galactic_from_icrs, read_catalog
from dustmap.sky.stars import ExactDistances, GaussianDistances, StarTable
from dustmap.sky.systems import system_named

N = 800
LIKE_NONE = "share of stars with a number that looks like none"
Columns = Mapping[str, NDArray[Any]]


def sky(seed: int = 0) -> dict[str, NDArray[Any]]:
    """Stars all over a box of 400 x 400 x 240 pc behind 1e-3 mag/pc."""
    rng = np.random.default_rng(seed)
    xyz = rng.uniform(-1.0, 1.0, (N, 3)) * [199.0, 199.0, 119.0]
    distance = np.linalg.norm(xyz, axis=1)
    return {
        "l": np.degrees(np.arctan2(xyz[:, 1], xyz[:, 0])) % 360.0,
        "b": np.degrees(np.arcsin(xyz[:, 2] / distance)),
        "distance_pc": distance,
        "extinction": 1e-3 * distance + rng.normal(0.0, 0.03, N),
        "extinction_error": np.full(N, 0.03),
    }


def with_parallaxes(stars: Columns, error: float = 0.1) -> dict[str, NDArray[Any]]:
    rest = {name: column for name, column in stars.items() if name != "distance_pc"}
    parallax = 1000.0 / stars["distance_pc"]
    return rest | {"parallax": parallax, "parallax_error": np.full(N, error)}


def in_radians(stars: Columns) -> Columns:
    return {**stars, "l": np.radians(stars["l"]), "b": np.radians(stars["b"])}


def around_zero_in_radians(stars: Columns) -> Columns:
    signed = (stars["l"] + 180.0) % 360.0 - 180.0
    return {**stars, "l": np.radians(signed), "b": np.radians(stars["b"])}


def icrs_in_radians(stars: Columns) -> Columns:
    places = SkyCoord(stars["l"] * u.deg, stars["b"] * u.deg, frame="galactic").icrs
    rest = {name: column for name, column in stars.items() if name not in ("l", "b")}
    return {**rest, "ra": places.ra.rad, "dec": places.dec.rad}


def icrs_in_hours(stars: Columns) -> Columns:
    radians = icrs_in_radians(stars)
    degrees = {name: np.degrees(radians[name]) for name in ("ra", "dec")}
    return {**radians, **degrees, "ra": degrees["ra"] / 15.0}


def with_errors(relative: float) -> Any:
    """Distances with such errors in pc for each pc, whatever they are meant to be."""

    def added(stars: Columns) -> Columns:
        return {**stars, "distance_error": relative * stars["distance_pc"]}

    return added


def some_below_zero(stars: Columns) -> Columns:
    found = with_parallaxes(stars)
    found["parallax"][::10], found["parallax_error"][::10] = -99.0, 1.5
    return found


def with_far_stars(stars: Columns) -> Columns:
    """A twentieth of them measured to be beyond 10 kpc, as a smaller distance_max has more."""
    found = with_parallaxes(stars)
    found["parallax"][::20], found["parallax_error"][::20] = 0.05, 0.005
    return found


def some_twice(stars: Columns) -> Columns:
    again = np.r_[np.arange(N), np.arange(0, N, 20)]
    return {name: column[again] for name, column in stars.items()}


def in_moduli(stars: Columns) -> Columns:
    return {**stars, "distance_pc": 5.0 * np.log10(stars["distance_pc"] / 10.0) + 0.1}


def in_arcseconds(stars: Columns) -> Columns:
    found = with_parallaxes(stars)
    return {**found, **{name: found[name] / 1e3 for name in ("parallax", "parallax_error")}}


def with_a_missing_value(value: float) -> Any:
    """One star in fifty has it, so that the mean stays above zero."""

    def spoiled(stars: Columns) -> Columns:
        extinction = 100.0 * stars["extinction"]
        extinction[::50] = value
        return {**stars, "extinction": extinction}

    return spoiled


def with_one_value(name: str, value: float) -> Any:
    """Every twentieth star has it, of parallaxes or of another column."""

    def spoiled(stars: Columns) -> Columns:
        found = with_parallaxes(stars) if name == "parallax" else {**stars}
        column = np.array(found[name], float)
        column[::20] = value
        return {**found, name: column}

    return spoiled


def at_the_center(stars: Columns) -> Columns:
    found = {name: np.array(column, float) for name, column in stars.items()}
    found["l"][::20] = found["b"][::20] = 0.0
    return found


def at_the_equinox(stars: Columns) -> Columns:
    """ra = dec = 0, of those that have no direction."""
    found = {name: np.array(column, float) for name, column in stars.items()}
    found["l"][::20], found["b"][::20] = galactic_from_icrs(np.zeros(1), np.zeros(1))
    return found


def capped(stars: Columns) -> Columns:
    """Distances that end at one number, as those of some surveys do."""
    far = float(np.quantile(stars["distance_pc"], 0.8))
    return {**stars, "distance_pc": np.minimum(stars["distance_pc"], far)}


def dust_and_outliers(stars: Columns) -> Columns:
    """Outliers of either sign, and extinctions rounded to a tenth."""
    extinction = np.round(stars["extinction"], 1)
    extinction[::50] += np.random.default_rng(1).normal(0.0, 2.0, len(extinction[::50]))
    return {**stars, "extinction": extinction}


def galactocentric(stars: Columns) -> Columns:
    l, b, distance = np.radians(stars["l"]), np.radians(stars["b"]), stars["distance_pc"]
    rest = {name: stars[name] for name in ("extinction", "extinction_error")}
    x, y, z = distance * [np.cos(b) * np.cos(l), np.cos(b) * np.sin(l), np.sin(b)]
    return {"x": x - 8178.0, "y": y, "z": z + 20.8, **rest}


def times(name: str, factor: float) -> Any:
    return lambda stars: {**stars, name: factor * stars[name]}


def with_a_zero_point(zero: float) -> Any:
    """Stars behind no dust, and a zero point."""
    noise = np.random.default_rng(4).normal(zero, 0.03, N)
    return lambda stars: {**stars, "extinction": noise}


def beam(width: float, center: float) -> Any:
    """A field in degrees, as wide as its name says and half as high."""

    def within(stars: Columns) -> Columns:
        rng = np.random.default_rng(3)
        l = (center + rng.uniform(-0.5, 0.5, N) * width) % 360.0
        return {**stars, "l": l, "b": rng.uniform(-0.25, 0.25, N) * width}

    return within


def config(path: Path, stars: Columns, *settings: str) -> configuration.Config:
    Table(dict(stars)).write(path / "stars.csv", overwrite=True)
    tables: dict[str, dict[str, object]] = {
        "data": {"catalog": str(path / "stars.csv"), "system": "A_V"},
        "grid": {"size": [400, 400, 240], "spacing": 20, "outside": "truncate"},
    }
    return configuration.from_mapping(tables, settings)


def failed(path: Path, stars: Columns, *settings: str) -> list[str]:
    run = prepare(config(path, stars, *settings))
    assert isinstance(run, StarRun)
    assert run.plan().checks == run.checks
    assert json.dumps([check.as_dict() for check in run.checks])
    return [check.name for check in run.checks if not check.passed]


@pytest.mark.parametrize(
    ("spoil", "names"),
    [
        (dict, []),
        (with_parallaxes, []),
        (in_radians, ["directions look like radians"]),
        (around_zero_in_radians, ["directions look like radians"]),
        (icrs_in_radians, ["directions look like radians"]),
        (icrs_in_hours, ["right ascensions look like hours"]),
        (with_errors(0.05), []),
        (with_errors(5e-5), ["median distance error / distance"]),
        (beam(6.0, 0.0), []),
        (beam(6.0, 3.0), []),
        (beam(3.0, 70.0), []),
        (some_below_zero, ["share of parallaxes 5 errors below 0"]),
        (times("distance_pc", 1000.0), ["median distance in pc", "stars within the box"]),
        (with_a_missing_value(-99.0), ["share of stars with one impossible extinction"]),
        (with_a_missing_value(99.9), ["share of stars with one impossible extinction"]),
        (
            with_one_value("distance_pc", 99.99),
            [LIKE_NONE],
        ),
        (with_one_value("parallax", 99.99), [LIKE_NONE]),
        (
            with_one_value("distance_pc", 9999.0),
            [LIKE_NONE],
        ),
        (at_the_center, [LIKE_NONE]),
        (at_the_equinox, [LIKE_NONE]),
        (with_one_value("distance_pc", 136.0), []),
        (with_one_value("b", 0.0), []),
        (capped, []),
        (lambda stars: {**stars, "distance_pc": np.round(stars["distance_pc"], -1)}, []),
        (dust_and_outliers, []),
        (with_far_stars, ["share of parallaxes 5 errors below that of the farthest distance"]),
        (some_twice, ["share of stars that repeat another"]),
        (galactocentric, ["places look Galactocentric", "stars within the box"]),
        (times("extinction_error", 1000.0), ["median error / extinctions"]),
        (times("extinction", 1000.0), ["median (A_V - 3 errors) / distance in mag/pc"]),
    ],
)
def test_a_catalog_in_other_units_fails_a_check(
    tmp_path: Path, spoil: Any, names: list[str]
) -> None:
    assert failed(tmp_path, spoil(sky()), "compute.dtype=float64") == names


@pytest.mark.parametrize(
    ("n", "times", "share"), [(300, 2, 0.5), (60_000, 1, 0.0), (60_000, 2, 0.5)]
)
def test_repetitions_are_found_among_any_number_of_stars(n: int, times: int, share: float) -> None:
    rng = np.random.default_rng(1)
    l, b, d = rng.uniform(0, 360, n), rng.uniform(-90, 90, n), rng.uniform(50, 500, n)
    y = rng.uniform(0.0, 2.0, n)
    l, b, d, y = (np.tile(column, times) for column in (l, b, d, y))
    stars = StarTable(
        *(np.arange(n * times), l, b, ExactDistances(d), y, 0.1 + 0.0 * y, system_named("A_V"))
    )
    assert _catalog_checks._repetitions(stars).value == share


@pytest.mark.parametrize(("value", "count", "names"), [(-99.0, 4, 1), (-99.0, 3, 0), (99.9, 4, 1)])
def test_few_missing_values_that_are_written_as_numbers_fail_a_check(
    value: float, count: int, names: int
) -> None:
    """Four of 8,000 stars, half of a thousandth, with one number are no chance."""
    rng = np.random.default_rng(0)
    extinction = rng.uniform(0.0, 2.0, 8000)
    extinction[:count] = value
    distance = rng.uniform(50.0, 500.0, 8000)
    table = StarTable(
        np.arange(8000),
        rng.uniform(0.0, 360.0, 8000),
        rng.uniform(-60.0, 60.0, 8000),
        GaussianDistances(distance, 0.1 * distance),
        extinction,
        np.full(8000, 0.05),
        system_named("A_V"),
    )
    failures = [check.name for check in catalog_checks(table) if not check.passed]
    assert failures == ["share of stars with one impossible extinction"] * names


def test_few_stars_in_the_box_fail_a_check(tmp_path: Path) -> None:
    stars = {name: values[:4] for name, values in sky().items()}
    run = prepare(config(tmp_path, stars, "compute.dtype=float64"))
    assert isinstance(run, StarRun)
    (found,) = (check for check in run.checks if check.name.startswith("stars within"))
    assert (found.value <= 4, found.low, found.passed) == (True, 5, False)


def test_extinctions_of_the_other_sign_fail_a_check(tmp_path: Path) -> None:
    """A log-normal density refuses them; a zero point that is off does not, where all is empty."""
    gaussian = ("model.density=gaussian", "model.std=0.001")
    (name,) = failed(tmp_path, times("extinction", -1.0)(sky()), *gaussian)
    assert name == "mean extinction below 0, in median errors"
    assert failed(tmp_path, with_a_zero_point(-0.05)(sky()), *gaussian) == []


def test_extinctions_that_were_cut_at_zero_fail_a_check(tmp_path: Path) -> None:
    """Those of 0.00 with others below are round numbers."""
    stars = sky()
    y = stars["extinction"] - 0.1
    assert np.mean(y < 0.0) > 0.05
    assert failed(tmp_path, {**stars, "extinction": y.round(2)}) == []
    (name,) = failed(tmp_path, {**stars, "extinction": y.clip(0.0)})
    assert name == "share of extinctions of exactly 0, with none below"


def test_extinctions_in_steps_wider_than_their_errors_fail_a_check(tmp_path: Path) -> None:
    """Those in steps of 0.1 mag are off by 0.029 mag for that alone: below 0.03, beyond 0.01."""
    stars = sky() | {"extinction": sky()["extinction"].round(1)}
    fewer = stars | {"extinction_error": np.full(N, 0.01)}
    assert "rounding" not in " ".join(failed(tmp_path, stars))
    assert "rounding of the extinctions, in median errors" in failed(tmp_path, fewer)


@pytest.mark.parametrize("kind", ["cut at 0", "cut at two errors", "floor", "limits"])
def test_extinctions_without_their_lower_end_fail_a_check(tmp_path: Path, kind: str) -> None:
    stars = sky()
    y, error = stars["extinction"] - 0.1, stars["extinction_error"]
    low = {"cut at 0": 0.0, "floor": 0.02}.get(kind, 2.0 * error)
    if kind in ("floor", "limits"):
        cut = {**stars, "extinction": np.maximum(y, low)}
    else:
        cut = {name: values[y >= low] for name, values in {**stars, "extinction": y}.items()}
    assert failed(tmp_path, {**stars, "extinction": y}) == []
    (name,) = failed(tmp_path, cut)
    assert name == "share of extinctions at the lowest of them"


@pytest.mark.parametrize(
    ("factor", "name", "value"),
    [
        (1.0, "stars within the box of 200 that were looked at", 200),
        (1000.0, "stars within the box", 0),
    ],
)
def test_stars_in_the_box_are_counted_in_a_sample_unless_few_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, factor: float, name: str, value: int
) -> None:
    monkeypatch.setattr(_parts, "SAMPLE", 200)
    run = prepare(config(tmp_path, times("distance_pc", factor)(sky())))
    assert isinstance(run, StarRun)
    (found,) = (check for check in run.checks if check.name.startswith("stars within"))
    assert (found.name, found.value, found.high) == (name, value, value or N)


def test_a_catalog_of_few_stars_is_said_to_be_one(tmp_path: Path) -> None:
    few = {name: values[:3] for name, values in sky().items()}
    run = prepare(config(tmp_path, few))
    assert isinstance(run, StarRun)
    (found,) = (check for check in run.checks if check.name == "stars within the box")
    assert (found.passed, found.low) == (False, 5.0)
    assert found.advice == "the catalog has 3 stars, and a map needs at least 5"


@pytest.mark.parametrize(
    ("spoil", "settings", "words"),
    [
        (times("distance_pc", 1e-3), [], "column distance_kpc"),
        (times("distance_pc", 1e3), ["grid.outside=drop"], "box"),
        (dict, ["model.length=1"], "grid.spacing = 1"),
        (times("extinction_error", 1e-5), [], 'compute.dtype = "float64"'),
        (times("extinction_error", 1e-10), [], "extinction_error is below 1e-09 mag"),
        (times("extinction_error", 5e-8), ["compute.dtype=float64"], "model.scatter"),
        (times("extinction", 1000.0), [], "are both in mag"),
    ],
)
def test_what_proves_the_input_wrong_is_refused(
    tmp_path: Path, spoil: Any, settings: list[str], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        prepare(config(tmp_path, spoil(sky()), *settings))


def test_errors_that_scatter_covers_are_resolved(tmp_path: Path) -> None:
    exact = times("extinction_error", 1e-5)(sky())
    assert failed(tmp_path, exact, "model.scatter=0.01") == ["median error / extinctions"]


def test_a_length_that_is_held_fits_the_grid(tmp_path: Path) -> None:
    name = "model.length in spacings"
    assert failed(tmp_path, sky(), "model.length=9", "model.learn=[]") == [name]
    assert failed(tmp_path, sky(), "model.length=12", "model.learn=[]") == []
    assert failed(tmp_path, sky(), "model.length=9") == []


def test_a_survey_far_deeper_than_its_box_passes(tmp_path: Path) -> None:
    deep = sky()
    deep["distance_pc"][N // 20 :] *= 50.0
    assert failed(tmp_path, deep) == []


@pytest.mark.parametrize(
    ("spoil", "name"),
    [
        (times("distance_pc", 1e-3), "median distance in pc"),
        (in_moduli, "median distance in pc"),
        (in_arcseconds, "median parallax error in mas"),
    ],
)
def test_other_units_of_distances_fail_a_check_without_a_box(
    tmp_path: Path, spoil: Any, name: str
) -> None:
    Table(dict(spoil(sky()))).write(tmp_path / "stars.csv")
    stars = read_catalog([tmp_path / "stars.csv"], system=system_named("A_V")).stars
    (check,) = [check for check in catalog_checks(stars) if check.name == name]
    assert not check.passed


@pytest.mark.parametrize("factor", [1.0, 1000.0])
def test_extinctions_in_mmag_fail_a_check_whatever_their_errors(
    tmp_path: Path, factor: float
) -> None:
    """Errors as large as the extinctions, which many stars prove together."""
    noisy, rng = sky(), np.random.default_rng(4)
    error = np.full(N, float(np.median(noisy["extinction"])))
    noisy["extinction"] = factor * (noisy["extinction"] + error * rng.normal(size=N))
    noisy["extinction_error"] = factor * error
    Table(dict(noisy)).write(tmp_path / "stars.csv")
    stars = read_catalog([tmp_path / "stars.csv"], system=system_named("A_V")).stars
    (check,) = [c for c in catalog_checks(stars) if c.name.startswith("median (A_V - 3 errors)")]
    assert check.passed == (factor == 1.0)


@pytest.mark.parametrize(
    ("of_parallax", "of_error", "unit"),
    [(1.0, 1e-3, "arcsec"), (1.0, 2e3, "uas"), (1e-3, 1e-3, "arcsec")],
)
def test_advice_on_units_is_on_the_columns_that_are_in_others(
    tmp_path: Path, of_parallax: float, of_error: float, unit: str
) -> None:
    stars = with_parallaxes(sky())
    stars["parallax"] *= of_parallax
    stars["parallax_error"] *= of_error
    Table(dict(stars)).write(tmp_path / "stars.csv")
    checks = catalog_checks(
        read_catalog([tmp_path / "stars.csv"], system=system_named("A_V")).stars
    )
    (check,) = [check for check in checks if check.name == "median parallax error in mas"]
    assert f'"parallax_error=NAME [{unit}]"' in check.advice
    assert (f'"parallax=NAME [{unit}]"' in check.advice) == (of_parallax != 1.0)


def test_ingest_and_dry_run_say_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stars = in_radians(sky())
    (tmp_path / "run.toml").write_text(configuration.echo(config(tmp_path, stars)))
    run = ["run", str(tmp_path / "run.toml"), "--output", str(tmp_path / "made"), "--dry-run"]
    assert main(run) == CHECK_FAILED
    told = capsys.readouterr()
    assert "directions look like radians = 1" in told.out
    assert "columns l, b" in told.err
    assert not (tmp_path / "made").exists()
    catalog, store = str(tmp_path / "stars.csv"), str(tmp_path / "stars.zarr")
    assert main(["ingest", catalog, "--system", "A_V", "--output", store]) == CHECK_FAILED
    assert "columns l, b" in capsys.readouterr().err
    config(tmp_path, sky())
    assert main(["ingest", catalog, "--system", "A_V", "--output", store, "--overwrite"]) == DONE
    assert capsys.readouterr().err == ""
