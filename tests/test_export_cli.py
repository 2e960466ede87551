"""dustmap export in the published layouts: readers of these maps return what the run says."""

import json
from pathlib import Path

import h5py
import healpy
import numpy as np
import pytest
import torch
from astropy import units as u
from astropy.coordinates import SkyCoord

from dustmap.cli import BAD_INPUT, DONE, main
from dustmap.gp.functionals import LineIntegrals, PointValues
from dustmap.runs import open_star_map
from dustmap.sky.layouts import LAYOUTS, _formats, read_gtomo
from dustmap.sky.maps import AbstractDensityField, MapRequest, Quantity
from tests.sky.layouts.readers import BayestarQuery, Edenhofer2023Query

NSIDE = 4
MEAN = MapRequest((Quantity.MEAN,))


@pytest.fixture(scope="module")
def finished(positive_run: Path) -> Path:
    return positive_run / "run"


@pytest.fixture(scope="module")
def field(finished: Path) -> AbstractDensityField:
    return open_star_map(finished).field()


def export(run: Path, kind: str, output: Path, *options: str) -> int:
    return main(["export", str(run), "--format", kind, "--output", str(output), *options])


def pixel_centres(distance: float) -> tuple[SkyCoord, torch.Tensor]:
    """Some pixels well within the box, as coordinates and as X, Y, Z."""
    l, b = healpy.pix2ang(NSIDE, np.arange(40, 150, 7), lonlat=True)
    where = SkyCoord(l * u.deg, b * u.deg, np.full(len(l), distance) * u.pc, frame="galactic")
    return where, torch.from_numpy(np.ascontiguousarray(where.cartesian.xyz.to_value(u.pc).T))


def test_edenhofer2023(finished: Path, field: AbstractDensityField, tmp_path: Path) -> None:
    path = tmp_path / "map.fits"
    options = ("--nside", str(NSIDE), "--distances", "20", "0.1kpc", "40")
    assert export(finished, "edenhofer2023", path, *options) == DONE
    query = Edenhofer2023Query(map_fname=str(path))
    where, x = pixel_centres(query.distances.value[30])
    np.testing.assert_allclose(
        query(where), field.evaluate(PointValues(x), MEAN)["mean"], rtol=1e-4
    )


def test_bayestar(finished: Path, field: AbstractDensityField, tmp_path: Path) -> None:
    path = tmp_path / "map.h5"
    assert export(finished, "bayestar", path, "--nside", str(NSIDE), "--samples", "3") == DONE
    where, x = pixel_centres(10 ** (4 / 5 + 1) * (1 + 1e-12))
    found = field.evaluate(LineIntegrals.from_observer(x), MEAN)["mean"] / (3.1 * 0.884)
    query = BayestarQuery(map_fname=str(path))
    np.testing.assert_allclose(query(where, mode="best"), found, rtol=1e-4)


def test_bayestar_has_as_many_samples_as_readers_expect(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not all that the run keeps: four here, of which two stand for the five of such files."""
    monkeypatch.setattr(_formats, "_BAYESTAR_SAMPLES", 2)
    for asked, samples in (((), 2), (("--samples", "3"), 3)):
        path = tmp_path / f"{samples}.h5"
        assert export(finished, "bayestar", path, "--nside", "1", *asked) == DONE
        with h5py.File(path) as file:
            assert file["samples"].shape[1] == samples


@pytest.mark.parametrize(
    ("layout", "distances"),
    [("healpix", ["--shells", "5000"]), ("edenhofer2023", ["--distances", "5000", "6000", "3"])],
)
def test_no_distance_within_the_box(
    layout: str,
    distances: list[str],
    finished: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "map.fits"
    assert export(finished, layout, path, "--nside", "1", *distances) == BAD_INPUT
    assert "pc from the Sun: expected distances within it" in capsys.readouterr().err
    assert not path.exists()


@pytest.mark.slow
def test_leike2020(finished: Path, field: AbstractDensityField, tmp_path: Path) -> None:
    path = tmp_path / "mean_std.h5"
    assert export(finished, "leike2020", path) == DONE
    x = torch.tensor([[60.5, -30.5, 10.5], [-40.5, 100.5, -50.5]], dtype=torch.float64)
    found = field.evaluate(PointValues(x), MEAN)["mean"] * 2.2732 / 2.8 * 1e3 / 1.0857362
    with h5py.File(path) as file:
        assert file["mean"].shape == (740, 740, 540)
        np.testing.assert_allclose(file["mean"][430, 339, 280], found[0], rtol=1e-4)
        np.testing.assert_allclose(file["mean"][329, 470, 219], found[1], rtol=1e-4)


def test_gtomo(finished: Path, field: AbstractDensityField, tmp_path: Path) -> None:
    path = tmp_path / "cube.fits"
    box = ("--box", "-40pc", "80", "-0.04kpc", "0pc", "-20", "60", "--step", "20pc")
    assert export(finished, "gtomo", path, *box) == DONE
    cube = read_gtomo(path)
    assert cube.grid.shape == (7, 3, 5)
    found = field.evaluate(PointValues(cube.grid.points()), MEAN)["mean"] * 2.6798 / 2.8
    np.testing.assert_allclose(cube.mean.transpose().ravel(), found, rtol=1e-4)


@pytest.mark.parametrize(
    ("options", "warned"),
    [
        (("--step", "20pc"), False),
        (("--step", "40pc"), False),
        (("--box", "-60", "60", "-40", "40", "-40", "40"), False),
        (("--box", "-40", "40", "-40", "40", "-40", "40"), True),
        (("--box", "-60", "60", "-40", "50", "-40", "50", "--step", "30"), True),
    ],
)
def test_voxels_that_leave_nodes_out_are_warned_of(
    finished: Path,
    tmp_path: Path,
    options: tuple[str, ...],
    warned: bool,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The run's nodes are 40 pc apart; between other voxels a file has other answers."""
    assert open_star_map(finished).run.grid.spacing == (40.0,) * 3
    capsys.readouterr()
    assert export(finished, "zarr", tmp_path / "map.zarr", *options) == DONE
    assert ("without all of the run's nodes, 40 pc apart" in capsys.readouterr().err) == warned


def test_healpix(
    finished: Path, field: AbstractDensityField, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "map.fits"
    options = ("--nside", str(NSIDE), "--distances", "20", "60", "3", "--quantity", "mean,p84")
    capsys.readouterr()
    assert export(finished, "healpix", path, *options, "--json") == DONE
    told = json.loads(capsys.readouterr().out)
    assert told["values"] == 4 * 3 * 12 * NSIDE**2
    assert told["outside_the_box"] == told["raised"] == 0
    shell = healpy.read_map(path, hdu="DENSITY_MEAN", field=0)
    where, x = pixel_centres(20 * 3 ** (1 / 6))
    found = field.evaluate(PointValues(x), MEAN)["mean"]
    pixels = healpy.ang2pix(NSIDE, where.l.deg, where.b.deg, lonlat=True)
    np.testing.assert_allclose(shell[pixels], found, rtol=1e-4)


@pytest.mark.parametrize("kind", LAYOUTS)
def test_an_existing_file_is_kept(
    finished: Path, tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "map"
    path.write_text("mine")
    assert export(finished, kind, path) == BAD_INPUT
    assert "exists already" in capsys.readouterr().err
    assert path.read_text() == "mine"


def test_what_has_no_plan_and_maps_in_files_are_refused(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert export(finished, "leike2020", tmp_path / "map.h5", "--dry-run") == BAD_INPUT
    assert "--dry-run: --format leike2020 has none; zarr, fits do" in capsys.readouterr().err
    assert export(finished / "map.zarr", "fits", tmp_path / "map.fits") == BAD_INPUT
    assert "is a map in a file, of which only --format glb is made" in capsys.readouterr().err


def test_glb(finished: Path, field: AbstractDensityField, tmp_path: Path) -> None:
    path = tmp_path / "dust.glb"
    assert export(finished, "glb", path, "--step", "20pc") == DONE
    assert path.read_bytes()[:4] == b"glTF"
    assert export(finished, "fits", tmp_path / "map.fits", "--iso", "0.01") == BAD_INPUT
