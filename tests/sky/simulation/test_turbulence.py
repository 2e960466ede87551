"""Turbulent fields: their variance, spectrum and correlation are those that were asked for."""

import math

import numpy as np
import pytest

from dustmap.gp import RegularGrid
from dustmap.sky.simulation import Turbulence
from tests.skies import matern

GRID = RegularGrid.from_bounds((-160, -150, -140), (160, 150, 140), (33, 31, 29))


def fields(turbulence: Turbulence, grid: RegularGrid, count: int) -> np.ndarray:
    return np.stack([turbulence.field(grid, np.random.default_rng(i)) for i in range(count)])


def test_the_variance_is_the_contrast_squared() -> None:
    found = fields(Turbulence(0.7, 20.0), GRID, 40)
    assert found.std() == pytest.approx(0.7, rel=0.02)
    assert found.mean() == pytest.approx(0.0, abs=0.02)


@pytest.mark.parametrize("slope", [-11.0 / 3.0, pytest.param(-5.0, marks=pytest.mark.slow)])
def test_the_spectrum_falls_with_the_slope(slope: float) -> None:
    """Periodogram along one axis, whose spectrum has a slope flatter by 2."""
    grid = RegularGrid.from_bounds((-64, -1, -1), (63, 1, 1), (128, 3, 3))
    lines = fields(Turbulence(1.0, 12.0, slope), grid, 60).transpose(0, 2, 3, 1)
    power = (np.abs(np.fft.rfft(lines * np.hanning(128), axis=-1)) ** 2).mean((0, 1, 2))
    used = slice(5, 16)  # beyond the outer scale, and before the cut at the grid's spacing
    k = np.arange(len(power))[used] * 2 * np.pi / 128
    found = np.polyfit(np.log(k**2 + 12.0**-2), np.log(power[used]), 1)[0]
    assert 2 * found == pytest.approx(slope + 2.0, abs=0.15)


def test_a_matern_field_has_its_correlation() -> None:
    length = 40.0
    found = fields(matern(1.5, length, 1.0), GRID, 60)
    for steps in (2, 4, 8):
        a = math.sqrt(3) * steps * GRID.spacing[0] / length
        correlation = float((found[:, :-steps] * found[:, steps:]).mean() / (found**2).mean())
        assert correlation == pytest.approx((1 + a) * math.exp(-a), abs=0.06)


def test_opposite_faces_of_the_box_are_nearly_independent() -> None:
    found = fields(Turbulence(1.0, 40.0), GRID, 80)
    correlation = float((found[:, 0] * found[:, -1]).mean() / (found**2).mean())
    assert correlation == pytest.approx(0.0, abs=0.06)


def test_impossible_turbulence_is_refused() -> None:
    with pytest.raises(ValueError, match=r"slope must be between -12 and -3.01, got -2.0"):
        Turbulence(slope=-2.0)
    with pytest.raises(ValueError, match="contrast must be positive and finite, got 0"):
        Turbulence(contrast=0.0)
