"""True extinctions: integrals through the trilinear interpolant, to round-off."""

import itertools

import numpy as np
import pytest
import torch
from scipy.integrate import quad
from scipy.interpolate import RegularGridInterpolator

from dustmap.gp import RegularGrid
from dustmap.gp.features import interpolation
from dustmap.gp.functionals import LineIntegrals
from dustmap.sky.simulation import column_density

GRID = RegularGrid.from_bounds((-50, -40, -30), (60, 45, 35), (12, 8, 9))
RNG = np.random.default_rng(0)
DENSITY = np.exp(RNG.standard_normal(GRID.shape))
POSITIONS = np.concatenate(
    [
        RNG.uniform(GRID.lower, GRID.upper, (30, 3)),
        [GRID.upper, GRID.lower, (60.0, 0.0, 0.0), (0.0, 0.0, -30.0), (1e-9, 0.0, 0.0)],
    ]
)


def test_columns_are_integrals_of_the_interpolant() -> None:
    """The reference is adaptive, told where the integrand has kinks."""
    axes = tuple(axis.numpy() for axis in GRID.axes())
    density = RegularGridInterpolator(axes, DENSITY, bounds_error=False, fill_value=None)
    for position, found in zip(POSITIONS, column_density(GRID, DENSITY, POSITIONS), strict=True):
        planes = np.concatenate([a / p for a, p in zip(axes, position, strict=True) if p != 0])
        kinks = np.unique(planes[(planes > 0) & (planes < 1)])
        ends = np.concatenate([[0.0], kinks, [1.0]])
        parts = [
            quad(lambda t, p=position: float(density(t * p)[0]), a, b)[0]
            for a, b in itertools.pairwise(ends)
        ]
        assert found == pytest.approx(sum(parts) * np.linalg.norm(position), rel=1e-9)


def test_columns_are_those_of_the_engine() -> None:
    rays = LineIntegrals.from_observer(torch.from_numpy(POSITIONS[:30]))
    rows = interpolation(rays, GRID, dtype=torch.float64)
    engine = rows.matmul(torch.from_numpy(DENSITY.ravel())).numpy()
    columns = column_density(GRID, DENSITY, POSITIONS[:30])
    np.testing.assert_allclose(columns, engine, rtol=1e-10)


def test_a_constant_density_integrates_to_density_times_distance() -> None:
    columns = column_density(GRID, np.full(GRID.shape, 0.002), POSITIONS)
    np.testing.assert_allclose(columns, 0.002 * np.linalg.norm(POSITIONS, axis=-1), rtol=1e-12)


def test_columns_do_not_depend_on_how_many_rays_there_are() -> None:
    many = np.repeat(POSITIONS, 400, axis=0)  # more than one part
    columns = column_density(GRID, DENSITY, many)
    np.testing.assert_array_equal(columns[::400], column_density(GRID, DENSITY, POSITIONS))


def test_places_outside_the_box_are_refused() -> None:
    with pytest.raises(ValueError, match="1 of 2 positions are outside the box"):
        column_density(GRID, DENSITY, np.array([[0.0, 0.0, 10.0], [0.0, 0.0, 36.0]]))
    away = RegularGrid.from_bounds((10, 0, 0), (20, 10, 10), (3, 3, 3))
    with pytest.raises(ValueError, match="the Sun is outside the box"):
        column_density(away, np.ones((3, 3, 3)), np.array([[15.0, 5.0, 5.0]]))
