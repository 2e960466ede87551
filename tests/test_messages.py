"""What a newcomer reads: results on the terminal, and errors before anything is computed."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from astropy.io import fits

from dustmap.cli import BAD_INPUT, DONE, main
from dustmap.cli._console import print_result
from dustmap.gp import RegularGrid
from dustmap.runs import RunDirectory
from dustmap.sky import DustMap, Provenance, write_map


def test_results_are_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    print_result(
        {"n": 3, "rows": {"read": 3, "cuts": {}}, "axes": ["x", 0.1234567], "off": None}, False
    )
    lines = capsys.readouterr().out.splitlines()
    assert lines == ["n: 3", "rows: read 3, cuts none", "axes: x, 0.123457", "off: none"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("query map.zarr --l 30 --b 95 --distance 100", "--b 95: expected -90 to 90 degrees"),
        ("query map.zarr --l nan --b 5 --distance 100", "--l nan: expected a number of degrees"),
        ("query map.zarr --ra inf --dec 5 --distance 1", "--ra inf: expected a number of degrees"),
        ("query map.zarr --l 30 --b 5 --distance -1", "--distance -1: expected more than 0"),
        ("query sky.fits --l 30 --b 5 --distance 100", "a map with an image MEAN"),
        ("simulate --stars 9 --seed 1 --output s.fits --truth t.txt", "t.txt: expected a name"),
        ("ingest sky.fits --output stars.fits", "stars.fits: expected a name that ends in .zarr"),
        ("export run --format fits --output map.zarr", "map.zarr: --format fits is no .zarr"),
        ("export run --format healpix --output s.h5", "--format healpix is no .h5, expected .fits"),
        ("export run --format bayestar --output m.FITS", "is no .fits, expected .h5 or .hdf5"),
        ("export run --format gtomo --output map.glb", "--format gtomo is no .glb, expected .fits"),
        ("export run --format fits --output map", "a name that ends in .fits"),
    ],
)
def test_errors_name_what_was_given(
    arguments: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    stars = np.zeros(2, [("l", "f8"), ("b", "f8")])
    fits.HDUList([fits.PrimaryHDU(), fits.BinTableHDU(stars)]).writeto("sky.fits")
    assert main(arguments.split()) == BAD_INPUT
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["sky.fits"]


@pytest.mark.parametrize("size", [0, 100])
def test_damaged_checkpoints_are_named(size: int, tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    directory.write_arrays("posterior.npz", {"mean": np.zeros(1000)})
    whole = (tmp_path / "posterior.npz").read_bytes()
    (tmp_path / "posterior.npz").write_bytes(whole[:size])
    (tmp_path / "found.json").write_text('{"length": ')
    with pytest.raises(ValueError, match=r"posterior\.npz is damaged .*run it again"):
        directory.read_arrays("posterior.npz")
    with pytest.raises(ValueError, match=r"found\.json is damaged .*run it again"):
        directory.read_json("found.json")


def test_maps_of_which_a_part_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """zarr takes a chunk that is not there for one of NaN."""
    grid, path = RegularGrid.from_bounds((-9.0,) * 3, (9.0,) * 3, (4, 4, 4)), tmp_path / "map.zarr"
    density = DustMap.from_nodes(grid, np.ones(64), None, "A_V")
    write_map(path, density, Provenance("", ()))
    place = ["query", str(path), "--l", "30", "--b", "5", "--distance", "3"]
    assert main(place) == DONE
    shutil.rmtree(path / "density_mean" / "c")
    assert main(place) == BAD_INPUT
    assert "a part of it is missing" in capsys.readouterr().err
