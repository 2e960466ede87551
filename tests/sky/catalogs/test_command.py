"""dustmap ingest: what it prints and writes, and how it ends."""

import json
from pathlib import Path

import numpy as np
import pytest
from astropy.table import Table

from dustmap.cli import BAD_INPUT, DONE, main
from dustmap.sky.catalogs import card_path, known_cards
from dustmap.sky.stars import ExponentialDensity, ParallaxDistances, open_star_store
from tests.sky.catalogs.files import star_columns, write


def test_counts_are_printed_and_stars_stored(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, store = write(tmp_path, "fits", star_columns()), tmp_path / "stars.zarr"
    assert main(["ingest", str(path), "--output", str(store)]) == DONE
    assert capsys.readouterr().out.splitlines() == [
        "rows read: 7",
        "kept: 7",
        "columns: b = b [deg], distance = distance_pc [pc], extinction = extinction [mag], "
        "extinction_error = extinction_error [mag], l = l [deg], source_id = source_id",
        "distances: exact",
        "extinction_system: A_V",
        f"output: {store}",
    ]
    assert len(open_star_store(store).read()) == 7
    assert main(["ingest", str(path), "--output", str(store)]) == BAD_INPUT
    assert "--overwrite" in capsys.readouterr().err


def test_every_option(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = Table(star_columns(), meta={})
    table.rename_columns(["distance_pc"], ["parallax_error"])
    table["parallax_error"].unit = None
    table["parallax"] = -0.5
    table["parallax_error"][3] = np.nan
    path, store = write(tmp_path, "csv", table), tmp_path / "stars.zarr"
    options = ["--cuts", "none", "--system", "A_G", "--invalid", "drop", "--schema", "generic"]
    options += ["--distance-prior", "exponential-density", "--distance-max", "20kpc"]
    options += ["--distance-scale", "900pc", "--parallax-zero-point", "-0.04", "--json"]
    assert main(["ingest", str(path), "--output", str(store), *options]) == DONE
    told = json.loads(capsys.readouterr().out)
    assert told["invalid"] == {"parallax_error is not finite": 1}
    assert (told["rows"], told["kept"]) == (7, 6)
    assert told["columns"]["parallax_error"] == "parallax_error [mas]"
    assert (told["distances"], told["extinction_system"]) == ("parallax", "A_G")
    stars = open_star_store(store).read()
    assert stars.system.name == "A_G"
    assert isinstance(stars.distances, ParallaxDistances)
    assert stars.distances.prior == ExponentialDensity(900.0, 20_000.0)
    np.testing.assert_allclose(stars.distances.parallax, -0.46)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--schema", "zgr32"], "did you mean zgr23?"),
        (["--schema", "zgr23"], "missing parallax, parallax_error (card zgr23) for distances"),
        (["--column", "l"], "--column l: expected NAME=COLUMN"),
        (["--column", "l=GLON"], "missing l (card generic)"),
        (["--column", "ra=b"], "column ra: named, but stars are made of l, b, distance"),
        (["--system", "AV"], "choose A_V"),
        (["--distance-max", "10"], "nothing says which extinction"),
        (["--distance-max", "10mag"], "10mag: expected a length"),
        (["--cuts", "best"], "the card generic has default, none"),
    ],
)
def test_bad_input(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    path = write(tmp_path, "csv", Table(star_columns()))
    store = tmp_path / "stars.zarr"
    assert main(["ingest", str(path), "--output", str(store), *arguments]) == BAD_INPUT
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert words in lines[0]
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


def test_columns_by_the_names_they_have(tmp_path: Path) -> None:
    """Those that are named count first, in the units that go with the names."""
    table = Table(star_columns(), meta={})
    for name in table.colnames:
        table[name].unit = None
    table["distance_pc"] /= 1000.0
    table.rename_columns(["l", "distance_pc", "extinction"], ["GLON", "D", "my[A]"])
    table["parallax"] = table["parallax_error"] = 1.0
    path, store = write(tmp_path, "csv", table), tmp_path / "stars.zarr"
    options = ["--column", "distance=D [kpc]", "--column", "extinction=my[A]", "--system", "A_V"]
    assert main(["ingest", str(path), "--output", str(store), *options]) == DONE
    stars = open_star_store(store).read()
    assert stars.distances.exact
    np.testing.assert_allclose(sorted(stars.distance), sorted(1000.0 * table["D"]))


def test_the_cards_are_listed_and_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["catalogs"]) == DONE
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if line[0] != " "] == list(known_cards())
    assert main(["catalogs", "--json"]) == DONE
    assert json.loads(capsys.readouterr().out)["zgr23"]["system"] == "E(ZGR23)"
    assert main(["catalogs", "generic"]) == DONE
    assert capsys.readouterr().out == card_path("generic").read_text()
    assert main(["catalogs", "genric"]) == BAD_INPUT
    assert "did you mean generic?" in capsys.readouterr().err
