"""dustmap export and dustmap query, on a small run."""

import json
from pathlib import Path

import healpy as hp
import numpy as np
import pytest
from astropy import units as u
from astropy.coordinates import SkyCoord
from astropy.io import fits
from astropy.table import Table

from dustmap.cli import BAD_INPUT, DONE, main
from dustmap.cli._export import LAYOUTS
from dustmap.config import load
from dustmap.runs import execute_run, prepare
from dustmap.sky.layouts import LAYOUTS as WRITERS
from dustmap.sky.maps import DustMap, Quantity

PLACE = ["--l", "30", "--b", "5", "--distance", "0.03kpc"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A log-normal density from 60 stars, four samples; its folder."""
    path = tmp_path_factory.mktemp("run")
    rng = np.random.default_rng(0)
    l, b, d = rng.uniform(0, 360, 60), rng.uniform(-20, 20, 60), rng.uniform(10, 45, 60)
    table = Table({"l": l, "b": b, "distance_pc": d, "distance_error_pc": 0.01 * d})
    table["extinction"] = 0.002 * d * np.exp(0.05 * rng.standard_normal(60))
    table["extinction_error"] = 0.01
    table.meta["EXTSYS"] = "A_V"
    table.write(path / "stars.ecsv")
    (path / "run.toml").write_text(
        f'[data]\ncatalog = "{path}/stars.ecsv"\nsystem = "A_V"\ndistance_max = 55\n'
        "[grid]\nsize = [120, 100, 60]\nspacing = 20\n[model]\nlearn = []\nlength = 60\n"
        '[fit]\nsamples = 4\ndistance_rounds = 0\n[export]\nformats = ["zarr", "fits"]\n'
        "figures = []\n"
    )
    execute_run(prepare(load(path / "run.toml")), path / "run", load(path / "run.toml"), False)
    return path / "run"


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, object]:
    capsys.readouterr()
    assert main([*arguments, "--json"]) == DONE
    found: dict[str, object] = json.loads(capsys.readouterr().out)
    return found


def test_the_formats_are_those_of_the_layouts() -> None:
    assert set(LAYOUTS) == set(WRITERS)


def test_a_run_and_its_maps_answer_alike(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    posterior = told(capsys, "query", str(run), *PLACE)
    for name in ("map.zarr", "map.fits"):
        stored = told(capsys, "query", str(run / name), *PLACE)
        answers = {f"{of}_{what}" for of in ("extinction", "density") for what in ("mean", "std")}
        labels = {
            "extinction_system": "A_V",
            "extinction_unit": "mag",
            "density_unit": "mag / pc",
        }
        assert set(stored) == answers | set(labels) | {"coverage"}
        assert stored["coverage"] == pytest.approx(posterior["coverage"], rel=1e-4)
        assert {name: (stored[name], posterior[name]) for name in labels} == {
            name: (value, value) for name, value in labels.items()
        }
        assert stored["density_mean"] == pytest.approx(posterior["density_mean"], rel=1e-5)
        assert stored["extinction_mean"] == pytest.approx(posterior["extinction_mean"], rel=1e-4)


def test_many_places_are_answered_in_their_order(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """NaN where one is outside the box, and where a row has no distance."""
    rows = "name,l,b,distance_pc\na,30,5,30\nc,40,5,\nb,10,0,500\n"
    (tmp_path / "coords.csv").write_text(rows)
    one = told(capsys, "query", str(run / "map.zarr"), *PLACE)
    assert main(["query", str(run / "map.zarr"), "--file", str(tmp_path / "coords.csv")]) == DONE
    out = Table.read(capsys.readouterr().out, format="ascii.csv")
    assert list(out["name"]) == ["a", "c", "b"]
    assert out["extinction_std"][0] == pytest.approx(one["extinction_std"])
    assert np.isnan(out["density_mean"][1:]).all()
    found = told(capsys, "query", str(run), "--file", str(tmp_path / "coords.csv"))
    assert (found["rows"], found["rows_outside_the_box"], found["rows_without_a_place"]) == (
        3,
        1,
        1,
    )
    assert found["density_mean"] == [pytest.approx(one["density_mean"], rel=1e-5), None, None]
    assert found["name"] == ["a", "c", "b"]
    assert (found["extinction_system"], out["extinction_system"][0]) == ("A_V", "A_V")
    assert (out["extinction_unit"][0], out["density_unit"][0]) == ("mag", "mag / pc")


@pytest.mark.parametrize("source", ["", "map.zarr"])
def test_columns_of_the_table_are_not_overwritten(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], source: str
) -> None:
    places = tmp_path / "coords.csv"
    places.write_text("l,b,distance_pc,density_mean,extinction_p5\n30,5,30,99,98\n")
    arguments = ["query", str(run / source), "--file", str(places)]
    assert main([*arguments, "--percentiles", "5"]) == BAD_INPUT
    error = capsys.readouterr().err
    assert "columns extinction_p5, density_mean already" in error
    assert "rename" in error
    places.write_text("l,b,distance_pc,rows,extinction_p5\n30,5,30,99,98\n")
    assert main([*arguments, "--json"]) == BAD_INPUT
    assert "columns rows already" in capsys.readouterr().err
    assert main(arguments) == DONE
    out = Table.read(capsys.readouterr().out, format="ascii.csv")
    assert (out["rows"][0], out["extinction_p5"][0]) == (99, 98)


@pytest.mark.parametrize("source", ["", "map.zarr"])
def test_answers_are_in_the_system_that_is_asked_for(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], source: str
) -> None:
    asked = ["query", str(run / source), *PLACE, "--percentiles", "5"]
    own, other = told(capsys, *asked), told(capsys, *asked, "--system", "E(B-V)")
    assert (own.pop("extinction_system"), other.pop("extinction_system")) == ("A_V", "E(B-V)")
    assert own.pop("coverage") == other.pop("coverage")
    for name, value in own.items():
        expected = value / 3.1 if isinstance(value, float) else value
        assert other[name] == pytest.approx(expected), name
    (tmp_path / "coords.csv").write_text("l,b,distance_pc\n30,5,30\n")
    many = ["query", str(run / source), "--file", str(tmp_path / "coords.csv")]
    row = told(capsys, *many, "--system", "E(B-V)")
    assert row["extinction_mean"] == [pytest.approx(other["extinction_mean"])]
    assert main([*asked, "--system", "custom:x"]) == BAD_INPUT
    assert "converts to nothing" in capsys.readouterr().err


def test_answers_for_people_have_units_and_a_system(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["query", str(run), *PLACE]) == DONE
    lines = dict(line.split(": ") for line in capsys.readouterr().out.splitlines())
    assert lines["extinction_system"] == "A_V"
    assert lines["extinction_mean"].endswith(" mag")
    assert lines["density_std"].endswith(" mag / pc")
    assert 0.0 <= float(lines["coverage"]) <= 1.0


def test_equatorial_places_are_the_same_places(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = SkyCoord(l=30 * u.deg, b=5 * u.deg, frame="galactic").icrs
    equatorial = ["--ra", str(place.ra.deg), "--dec", str(place.dec.deg), "--distance", "30"]
    for name in ("", "map.zarr"):
        one, other = (told(capsys, "query", str(run / name), *at) for at in (PLACE, equatorial))
        assert one["extinction_mean"] == pytest.approx(other["extinction_mean"], rel=1e-6)


def test_percentiles_of_a_run_and_of_its_map(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # The node at (20, 10, 10) pc: between nodes a run knows more of the width than its file.
    node = ["--l", "26.56505118", "--b", "24.09484255", "--distance", "24.49489743"]
    node += ["--percentiles", "16", "50", "84", "97.5"]
    posterior = told(capsys, "query", str(run), *node)
    stored = told(capsys, "query", str(run / "map.zarr"), *node)
    for of in ("extinction", "density"):
        values = [float(str(posterior[f"{of}_p{p}"])) for p in ("16", "50", "84", "97.5")]
        assert values == sorted(values)
        if of == "density":
            known = [stored[f"{of}_p{p}"] for p in (16, 50, 84, 97.5)]
            assert values == pytest.approx(known, rel=0.02)
        # Both go with the std beside them, which is somewhat more in a log-normal distribution.
        for answers in (posterior, stored):
            low, high, std = (float(str(answers[f"{of}_{k}"])) for k in ("p16", "p84", "std"))
            assert 0.9 < 2.0 * std / (high - low) < 1.5


def test_percentiles_want_known_distances(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    places = tmp_path / "coords.csv"
    places.write_text("l,b,parallax,parallax_error\n10,0,30,3\n")
    arguments = ["query", str(run), "--file", str(places), "--percentiles", "16"]
    assert main(arguments) == BAD_INPUT
    assert "percentiles: expected exact distances" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["", "map.zarr"])
def test_a_profile_is_the_answers_along_a_line(
    run: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["query", str(run / name), "--l", "30", "--b", "5"]
    assert main([*line, "--profile", "--step", "0.01kpc"]) == DONE
    table = Table.read(capsys.readouterr().out, format="ascii.csv")
    assert list(table["distance_pc"]) == [10, 20, 30, 40, 50, 60]
    for of in ("density", "extinction"):
        assert {f"{of}_{what}" for what in ("mean", "std", "p16", "p84")} < set(table.colnames)
    one = told(capsys, *line, "--distance", "30")
    for quantity in ("extinction_mean", "density_std"):
        assert table[quantity][2] == pytest.approx(one[quantity], rel=1e-5)
    assert np.all(np.diff(table["extinction_mean"]) > 0.0)
    assert np.all(table["density_p16"] < table["density_p84"])
    rows = told(capsys, *line, "--profile")
    assert rows["distance_pc"] == [20.0, 40.0, 60.0]
    assert rows["extinction_system"] == "A_V"


def test_parallaxes_are_taken_as_the_run_takes_them(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    places, predicted = tmp_path / "coords.csv", tmp_path / "predicted.csv"
    places.write_text("l,b,parallax,parallax_error\n10,0,0.1,3\n")
    found = told(capsys, "query", str(run), "--file", str(places))
    command = ["predict", str(run), "--catalog", str(places), "--output", str(predicted)]
    assert main(command) == DONE
    table = Table.read(predicted)
    assert found["extinction_mean"] == [pytest.approx(table["extinction_mean"][0])]


def test_a_box_without_the_sun_has_densities_and_extinctions_by_the_prior_before_it(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = ["grid.center=[60,0,0]", "grid.size=[80,60,60]", "grid.around=none"]
    config = load(run.parent / "run.toml", settings)
    execute_run(prepare(config), tmp_path / "run", config, False)
    place = ["--l", "0", "--b", "0", "--distance", "60"]
    of_run, of_map = (
        told(capsys, "query", str(tmp_path / name), *place) for name in ("run", "run/map.zarr")
    )
    assert of_run["density_mean"] == pytest.approx(0.002, rel=0.9)
    assert of_map["density_mean"] == pytest.approx(of_run["density_mean"], rel=1e-3)
    # The first 20 pc are the prior's, of which a map file knows nothing.
    mean, std = (float(str(of_run[f"extinction_{name}"])) for name in ("mean", "std"))
    assert std > 0.2 * mean > 0.0
    assert of_map["extinction_mean"] is None
    for name, lacking in (("run/map.zarr", "mean, extinction_std"), ("run", "p50")):
        assert main(["query", str(tmp_path / name), *place, "--percentiles", "50"]) == DONE
        words = capsys.readouterr().err
        assert f"1 of 1 places in the box have no extinction_{lacking}" in words


def test_exports_hold_what_was_asked_for(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    box = ["--box", "-20", "20", "-40", "40pc", "0", "0.02kpc", "--step", "5"]
    output = ["--output", str(tmp_path / "part.zarr"), "--quantity", "mean,coverage"]
    found = told(capsys, "export", str(run), "--format", "zarr", *output, *box, "--samples", "2")
    assert found["voxels"] == [9, 17, 5]
    part = DustMap.open(tmp_path / "part.zarr")
    assert part.available == (Quantity.MEAN, Quantity.COVERAGE, Quantity.SAMPLES)
    assert part.n_samples == 2
    whole = DustMap.open(run)
    place = (30 * u.deg, 5 * u.deg, 15 * u.pc)
    assert part.query_gal(*place) == pytest.approx(whole.query_gal(*place), rel=0.05)


def test_shells_take_their_own_options(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shells = ["--nside", "2", "--distances", "5", "50pc", "7", "--quantity", "mean"]
    output = ["--output", str(tmp_path / "shells.fits")]
    found = told(capsys, "export", str(run), "--format", "healpix", *output, *shells)
    assert isinstance(found["values"], int)
    with fits.open(tmp_path / "shells.fits") as hdus:
        data = hdus["DENSITY_MEAN"].data
    assert len(data) == 48
    assert len(data.names) == 7


def test_samples_that_are_asked_for_are_written_for_edenhofers_reader(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shells = ["--nside", "2", "--distances", "5", "50pc", "7", "--samples"]
    arguments = ["export", str(run), "--format", "edenhofer2023", *shells]
    told(capsys, *arguments, "3", "--output", str(tmp_path / "shells.fits"))
    with fits.open(tmp_path / "shells.fits") as hdus:
        assert len(hdus["SAMPLES"].data) == 3
    assert main([*arguments, "5", "--output", str(tmp_path / "more.fits")]) == BAD_INPUT
    assert "5 samples were asked for and this density has 4" in capsys.readouterr().err


def test_shells_at_exact_distances(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A(<30 pc) stands on the shell at 30 pc."""
    shells = ["--nside", "2", "--shells", "20", "0.03kpc"]
    output = ["--output", str(tmp_path / "shells.fits")]
    told(capsys, "export", str(run), "--format", "healpix", *shells, *output)
    with fits.open(tmp_path / "shells.fits") as hdus:
        assert hdus["RADIAL PIXEL CENTERS"].data.field(0).tolist() == [20.0, 30.0]
        pixel = hdus["INTEGRATED_MEAN"].data["SHELL_001"][7]
    l, b = hp.pix2ang(2, 7, nest=True, lonlat=True)
    place = ["--l", str(l), "--b", str(b), "--distance", "30"]
    there = told(capsys, "query", str(run), *place)
    assert pixel == pytest.approx(there["extinction_mean"], rel=1e-4)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--format", "healpix", "--shells", "30", "20"], "shells: expected ascending distances"),
        (["--format", "healpix", "--shells", "-1"], "shells: expected ascending distances > 0"),
        (["--format", "bayestar", "--shells", "20"], "--shells: --format bayestar has none"),
        (
            ["--format", "healpix", "--shells", "20", "--distances", "5", "50", "7"],
            "--distances, --shells: expected one of them",
        ),
        (["--format", "zarr", "--nside", "8"], "--nside: --format zarr has none"),
        (["--format", "healpix", "--step", "5"], "--step: --format healpix has none"),
        (["--format", "leike2020", "--samples", "2"], "--format leike2020 is always mean"),
        (["--format", "gtomo", "--quantity", "mean,std"], "has mean or std or median"),
        (["--format", "gtomo", "--samples", "2"], "has mean or std or median"),
        (["--format", "bayestar", "--quantity", "p16"], "has mean,samples or samples"),
        (["--format", "edenhofer2023", "--quantity", "median"], "has mean,std or samples"),
        (["--format", "zarr", "--quantity", "mean,sd"], "quantity 'sd': expected one of mean"),
        (["--format", "zarr", "--samples", "40"], "40 samples were asked for"),
        (["--format", "healpix", "--distances", "5", "50", "x"], "expected a number of bins"),
        (["--format", "zarr", "--box", "0", "900", "0", "9", "0", "9"], "--box along X"),
    ],
)
def test_impossible_exports_write_nothing(
    run: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    words: str,
) -> None:
    assert main(["export", str(run), "--output", str(tmp_path / "out"), *arguments]) == BAD_INPUT
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert words in error
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["map.fits", "--l", "30", "--b", "5"], "either --l, --b and --distance, or --file"),
        (["map.fits", *PLACE, "--file", "x.csv"], "either --l, --b and --distance, or --file"),
        (["map.fits", "--l", "30", "--b", "5", "--distance", "400"], "is outside the box"),
        (["map.fits", *PLACE, "--profile"], "and --profile for --distance"),
        (["map.fits", *PLACE, "--ra", "3"], "--ra and --dec may stand for --l and --b"),
        (["map.fits", *PLACE, "--step", "3"], "--step goes with --profile"),
        (["map.fits", *PLACE, "--percentiles", "0.5", "100"], "expected percents between"),
        (["map.fits", "--ra", "1", "--dec", "99", "--profile"], "--dec 99: expected -90 to 90"),
        (["map.fits", "--l", "1", "--b", "9", "--profile", "--step", "1e-9"], "--step 1e-09: exp"),
        (["nosuch.fits", *PLACE], "expected a run directory, a map.zarr or a map.fits"),
    ],
)
def test_impossible_queries_say_so(
    run: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    assert main(["query", str(run / arguments[0]), *arguments[1:]]) == BAD_INPUT
    assert words in capsys.readouterr().err


def test_another_catalog_has_the_columns_of_the_runs_own_or_generic_ones(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    generic = Table.read(run.parent / "stars.ecsv")
    named = generic.copy()
    named.rename_columns(["l", "distance_pc", "extinction"], ["lon", "far", "red"])
    named.write(tmp_path / "named.ecsv")
    text = (run.parent / "run.toml").read_text()
    columns = '[data.columns]\nl = "lon"\ndistance = "far"\nextinction = "red"\n'
    (tmp_path / "run.toml").write_text(f"{text}{columns}")
    config = load(tmp_path / "run.toml", (f"data.catalog={tmp_path / 'named.ecsv'}",))
    execute_run(prepare(config), tmp_path / "run", config, False)
    for catalog in (tmp_path / "named.ecsv", run.parent / "stars.ecsv"):
        catalogs = ["--catalog", str(catalog)]
        scored = told(capsys, "evaluate", str(tmp_path / "run"), *catalogs)
        assert scored["stars_that_the_map_has_seen"] == 60
        output = ["--output", str(tmp_path / f"{catalog.stem}.fits"), "--distances"]
        assert told(capsys, "predict", str(tmp_path / "run"), *catalogs, *output)["rows"] == 60
    first, second = (Table.read(tmp_path / f"{name}.fits") for name in ("named", "stars"))
    np.testing.assert_array_equal(first["extinction_mean"], second["extinction_mean"])
    asked = ["evaluate", str(tmp_path / "run"), "--schema", "generic", "--catalog"]
    assert main([*asked, str(tmp_path / "named.ecsv")]) == BAD_INPUT


def test_maps_take_distances_as_exact_and_have_the_percentiles_that_they_hold(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "places.csv").write_text("l,b,distance,distance_error\n30,5,30,8\n")
    for source, warns in (("", False), ("map.zarr", True)):
        assert main(["query", str(run / source), "--file", str(tmp_path / "places.csv")]) == DONE
        assert ("at median distances, without their errors" in capsys.readouterr().err) == warns
    bare = str(tmp_path / "bare.zarr")
    cubes = ["--quantity", "mean,p16,median,p84", "--samples", "0"]
    assert main(["export", str(run), "--format", "zarr", "--output", bare, *cubes]) == DONE
    answers = told(capsys, "query", bare, *PLACE, "--percentiles", "16", "50", "84")
    assert answers["density_p16"] < answers["density_p50"] < answers["density_p84"]  # type: ignore[operator]
    assert "extinction_p50" not in answers
