"""A disk that fills while a layout is written: one plain error, and nothing half-written."""

import errno
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from dustmap.gp import RegularGrid
from dustmap.sky.layouts import LAYOUTS, LayoutRequest, RadialBins
from dustmap.sky.maps import MapRequest, Quantity
from tests.sky.layouts.analytic import CLOUDS, PROVENANCE, AnalyticField

FIELD = AnalyticField(CLOUDS, box=((-60.0, -50.0, -40.0), (48.0, 54.0, 44.0)))
GRID = RegularGrid((-48.0, -48.0, -36.0), (2.0, 2.0, 2.0), (48, 50, 39))
ASKED = LayoutRequest(
    MapRequest((Quantity.MEAN, Quantity.STD)), GRID, nside=8, bins=RadialBins(5.0, 40.0, 60)
)
FILES = [(name, "map.fits") for name in LAYOUTS] + [("gtomo", "map.h5")]


@pytest.fixture
def full_at_100_kb() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.usefixtures("full_at_100_kb")
@pytest.mark.parametrize(("layout", "name"), FILES)
def test_nothing_is_left_behind(tmp_path: Path, layout: str, name: str) -> None:
    with pytest.raises(OSError, match="File too large") as raised:
        LAYOUTS[layout](tmp_path / name, FIELD, ASKED, PROVENANCE, False)
    assert raised.value.errno == errno.EFBIG
    assert "\n" not in str(raised.value)
    assert list(tmp_path.iterdir()) == []
