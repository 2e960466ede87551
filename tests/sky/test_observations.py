"""Stars become the line integrals that they observe."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from dustmap.gp import RegularGrid
from dustmap.gp.functionals import LineIntegrals, OutsidePolicy
from dustmap.sky import StarTable, observe

GRID = RegularGrid.from_bounds((-50.0, -50.0, -50.0), (50.0, 50.0, 50.0), (3, 3, 3))


def stars(*distances: float) -> StarTable:
    count = len(distances)
    return StarTable(
        source_id=np.arange(count),
        l=np.full(count, 90.0),
        b=np.zeros(count),
        distance=np.array(distances),
        extinction=np.linspace(0.1, 0.4, count),
        extinction_error=np.linspace(0.01, 0.04, count),
        system="A_V",
    )


def test_a_star_observes_the_integral_from_the_sun() -> None:
    observed = observe(stars(20.0, 40.0), GRID, OutsidePolicy.ERROR)
    rays = observed.batch.functional
    assert isinstance(rays, LineIntegrals)
    # ∫ (1, x, y, z) ds along +Y to d: (d, 0, d²/2, 0)
    expected = torch.tensor([[20.0, 0, 200.0, 0], [40.0, 0, 800.0, 0]], dtype=torch.float64)
    torch.testing.assert_close(rays.moments(), expected, atol=1e-9, rtol=1e-12)
    noise = observed.batch.noise_variance
    assert noise is not None
    np.testing.assert_allclose(noise.numpy(), [0.01**2, 0.04**2])
    np.testing.assert_allclose(observed.batch.y.numpy(), [0.1, 0.4])


def test_a_star_outside_the_box_is_truncated_dropped_or_an_error() -> None:
    table = stars(20.0, 80.0, 40.0)
    truncated = observe(table, GRID, OutsidePolicy.TRUNCATE)
    assert (truncated.counts.truncated, truncated.counts.dropped) == (1, 0)
    assert truncated.batch.functional.moments()[1, 0] == pytest.approx(50.0)
    dropped = observe(table, GRID, OutsidePolicy.DROP)
    assert (dropped.counts.truncated, dropped.counts.dropped) == (0, 1)
    np.testing.assert_array_equal(dropped.rows, [0, 2])
    np.testing.assert_allclose(dropped.batch.y.numpy(), table.extinction[[0, 2]])
    with pytest.raises(ValueError, match="1 of 3 rays leave the box"):
        observe(table, GRID, OutsidePolicy.ERROR)


def test_a_box_that_no_star_is_seen_through_is_refused() -> None:
    away = RegularGrid.from_bounds((100.0, 100.0, 100.0), (150.0, 150.0, 150.0), (3, 3, 3))
    table = replace(stars(20.0, 30.0), l=np.full(2, 45.0), b=np.full(2, 10.0))
    with pytest.raises(ValueError, match=r"none of the 2 stars .*grid"):
        observe(table, away, OutsidePolicy.TRUNCATE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_measurements_take_the_dtype_and_rays_stay_exact(dtype: torch.dtype) -> None:
    observed = observe(stars(20.0), GRID, OutsidePolicy.TRUNCATE, dtype)
    assert observed.batch.y.dtype == dtype
    rays = observed.batch.functional
    assert isinstance(rays, LineIntegrals)
    assert rays.edges.dtype == torch.float64
