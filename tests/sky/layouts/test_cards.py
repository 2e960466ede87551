"""What every file says about itself, in the characters its format has."""

from pathlib import Path

import h5py
from astropy.io import fits

from dustmap.gp import RegularGrid
from dustmap.sky import Provenance
from dustmap.sky._streamed_fits import printable
from dustmap.sky.layouts import GTomoOptions, write_gtomo
from dustmap.sky.maps import MapRequest, Quantity, Slabs, write_map
from tests.sky.layouts.analytic import CLOUDS, AnalyticField

FIELD = AnalyticField(CLOUDS)
GRID = RegularGrid((-10.0, -10.0, -10.0), (10.0, 10.0, 10.0), (3, 3, 3))
PROVENANCE = Provenance("0" * 64, ("a step\tof café",), catalog=("/data/étoiles/π.fits",), seed=3)


def test_names_outside_ascii_are_written(tmp_path: Path) -> None:
    cube, ours, hdf5 = tmp_path / "cube.fits", tmp_path / "map.fits", tmp_path / "cube.h5"
    write_gtomo(cube, FIELD, GTomoOptions(GRID), PROVENANCE)
    write_map(ours, Slabs.of_field(FIELD, GRID, MapRequest((Quantity.MEAN,))), PROVENANCE)
    for path, unit in ((cube, 0), (ours, 1)):
        with fits.open(path, checksum=True) as hdus:
            hdus.verify("exception")
            history = "".join(hdus[unit].header["HISTORY"])
        assert r"/data/\xe9toiles/\u03c0.fits" in history
        assert "seed: 3" in history
        assert r"a step\x09of caf\xe9" in history
    write_gtomo(hdf5, FIELD, GTomoOptions(GRID), PROVENANCE)
    with h5py.File(hdf5) as file:
        assert "/data/étoiles/π.fits" in file.attrs["history"]
        assert "550 nm" in file.attrs["extinction_meaning"]
    assert "550 nm" in " ".join(fits.getheader(cube)["COMMENT"])


def test_printable_leaves_ascii_alone() -> None:
    assert printable("A(<d) = 3 mag; ~/x_y.fits") == "A(<d) = 3 mag; ~/x_y.fits"
    assert printable("a\nb") == r"a\x0ab"
