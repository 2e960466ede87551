"""Columns of all the dust as data: what they say of a box, against sums over one column."""

from pathlib import Path

import healpy
import numpy as np
import pytest
import torch

from dustmap.errors import UserError
from dustmap.gp import Batch, ConstantMean, Prediction, RegularGrid
from dustmap.gp.functionals import LineIntegrals, OutsidePolicy
from dustmap.gp.kernels import Matern32
from dustmap.sky.observations import ColumnMap, FarColumn, PriorDust
from dustmap.sky.observations._column import LEAST, NOTHING, REMAINDER

BOX = RegularGrid.from_bounds((-100.0, -100.0, -50.0), (100.0, 100.0, 50.0), (11, 11, 6))
DENSITY, LAYER = 2e-3, 120.0


def columns(path: Path, nside: int = 4, **keywords: object) -> Path:
    """A map whose pixels have their own number in units of 0.01 mag, and the first no value."""
    values = 0.01 * np.arange(12 * nside**2, dtype=np.float64)
    values[0] = np.nan
    healpy.write_map(path, values, nest=True, dtype=np.float64, **keywords)
    return path


def column(pixels: ColumnMap, bound: bool = False, outside: str = "prior") -> FarColumn:
    return FarColumn.of(
        pixels,
        BOX,
        OutsidePolicy(outside),
        scatter=0.1,
        bound=bound,
        layer=LAYER,
        farthest=2000.0,
    )


def test_maps_are_read_averaged_and_scaled(tmp_path: Path) -> None:
    path = columns(tmp_path / "column.fits")
    own = ColumnMap.read(path, 8, factor=2.0)
    assert (own.nside, len(own), own.missing) == (4, 191, 1)
    np.testing.assert_allclose(own.value, 0.02 * np.arange(1, 192))
    pixel = healpy.ang2pix(4, own.l, own.b, nest=True, lonlat=True)
    np.testing.assert_array_equal(pixel, np.arange(1, 192))
    coarse = ColumnMap.read(path, 2)
    np.testing.assert_allclose(coarse.value[1:], 0.01 * (4 * np.arange(1, 48) + 1.5))
    assert coarse.value[0] == pytest.approx(0.02)  # of three pixels that have one
    ring = tmp_path / "ring.fits"
    healpy.write_map(ring, healpy.reorder(np.arange(192.0), n2r=True), dtype=np.float64)
    np.testing.assert_allclose(ColumnMap.read(ring, 4).value, np.arange(192.0))


def test_what_is_no_galactic_map_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="COORDSYS"):
        ColumnMap.read(columns(tmp_path / "icrs.fits", coord="C"), 4)
    with pytest.raises(UserError, match="no such file"):
        ColumnMap.read(tmp_path / "none.fits", 4)
    (tmp_path / "text.fits").write_text("no map")
    with pytest.raises(UserError, match="HEALPix"):
        ColumnMap.read(tmp_path / "text.fits", 4)


def test_the_rest_of_a_column_is_the_priors(tmp_path: Path) -> None:
    """Of an even prior: the way from the face to the end of the layer, and what is uncertain."""
    pixels = ColumnMap.read(columns(tmp_path / "column.fits"), 4)
    dust = PriorDust(Matern32(30.0, 1e-12, dim=3), ConstantMean(DENSITY), lognormal=False)
    found = column(pixels).about(dust)
    assert found.target is not None
    assert found.variance is not None
    sine = np.abs(np.sin(np.radians(pixels.b)))
    inside = found.lines.rays.moments()[:, 0].numpy()
    behind = np.maximum(np.minimum(LAYER / np.maximum(sine, 1e-9), 2000.0) - inside, 0.0)
    rest = DENSITY * behind
    np.testing.assert_allclose(found.target, np.maximum(pixels.value - rest, 0.0), atol=1e-6)
    s2 = np.maximum(0.1 * pixels.value, LEAST) ** 2
    level = len(pixels) / 12 * (REMAINDER * rest) ** 2  # off alike in a twelfth of the sky
    np.testing.assert_allclose(found.variance, s2 + level, rtol=1e-4)
    cut = column(pixels, outside="truncate").about(dust)
    assert cut.target is not None
    np.testing.assert_allclose(cut.target, pixels.value)


def test_a_bound_holds_down_what_is_above_it_alone() -> None:
    """And takes its own word out before it speaks again: the second round finds the first."""
    count = 3
    where = np.linspace(0.0, 40.0, count)
    pixels = ColumnMap(1, where, where, np.full(count, 0.5), 0)
    others = Prediction(
        torch.tensor([0.8, 0.51, 0.4], dtype=torch.float64),
        torch.full((count,), 0.04, dtype=torch.float64),
    )
    first = column(pixels, bound=True).at_most(others)
    assert first.target is not None
    assert first.variance is not None
    s2 = (0.1 * 0.5) ** 2
    np.testing.assert_allclose(first.variance, [s2, s2, NOTHING**2])
    np.testing.assert_allclose(first.target, [0.5, 0.5, 0.4])
    # The mode of all is that of max(A − y, 0)² / 2s² + (A − m)² / 2v.
    v = 1.0 / (1.0 / others.variance + 1.0 / first.variance)
    mean = v * (others.mean / others.variance + first.target / first.variance)
    a = np.linspace(0.0, 1.0, 100_001)
    for i in range(count):
        m, var = float(others.mean[i]), float(others.variance[i])
        energy = np.maximum(a - 0.5, 0.0) ** 2 / (2 * s2) + (a - m) ** 2 / (2 * var)
        assert float(mean[i]) == pytest.approx(a[energy.argmin()], abs=1e-4)
    second = first.at_most(Prediction(mean, v))
    torch.testing.assert_close(second.target, first.target, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(second.variance, first.variance)
    assert second.precision_change(first) < 1e-9


def test_columns_come_before_the_stars_and_have_keys_of_their_own(tmp_path: Path) -> None:
    pixels = ColumnMap.read(columns(tmp_path / "column.fits"), 4)
    rays = LineIntegrals(
        torch.zeros(2, 3, dtype=torch.float64),
        torch.eye(3, dtype=torch.float64)[:2],
        torch.tensor([[0.0, 10.0, 20.0], [0.0, 5.0, 50.0]], dtype=torch.float64),
        torch.tensor([[1.0, 0.5], [1.0, 0.1]], dtype=torch.float64),
    )
    y, noise = torch.tensor([[0.1, 0.2], [0.01, 0.04]], dtype=torch.float64)
    stars, far = Batch(rays, y, noise), column(pixels, bound=True)
    assert far.before(stars) is stars
    far = far.with_data(far.value, far.std**2)
    both = far.before(stars)
    assert len(both) == len(far) + 2
    assert isinstance(both.functional, LineIntegrals)
    assert len(set(both.functional.keys.tolist())) == len(both)
    torch.testing.assert_close(both.functional.moments()[: len(far)], far.lines.rays.moments())
    torch.testing.assert_close(both.functional.moments()[-2:], rays.moments())
    assert both.added_variance is not None
    assert both.noise_variance is not None
    torch.testing.assert_close(both.added_variance[-2:], torch.zeros(2, dtype=torch.float64))
    torch.testing.assert_close(both.added_variance[:-2], both.noise_variance[:-2])
