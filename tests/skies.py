"""A plain sky for tests of what is done with catalogs: no disc, no bubbles, no outliers."""

import math
from pathlib import Path

from dustmap.sky import Provenance, write_map
from dustmap.sky.simulation import (
    Bubbles,
    Disc,
    Measurements,
    SimulatedSky,
    SkyModel,
    StructuredDust,
    Turbulence,
    simulate,
    write_sky,
)

SIZE = (120.0, 80.0, 40.0)


def matern(smoothness: float, length: float, contrast: float) -> Turbulence:
    """A Matérn field: L = ℓ/√(2ν)."""
    return Turbulence(contrast, length / math.sqrt(2.0 * smoothness), -(2.0 * smoothness + 3.0))


def plain_sky(
    stars: int,
    seed: int,
    size: tuple[float, float, float] = SIZE,
    measurements: Measurements | None = None,
) -> SimulatedSky:
    """A Matérn-3/2 field of 60 pc and contrast 0.8 around 2e-3 mag/pc."""
    dust = StructuredDust(
        turbulence=matern(1.5, 60.0, 0.8),
        disc=Disc(height=1e9, length=1e9),
        bubbles=Bubbles(local_radius=0.0, others=0),
    )
    model = SkyModel(size=size, dust=dust, measurements=measurements or Measurements(outliers=0.0))
    return simulate(model, stars, seed)


def write_plain_sky(folder: Path, sky: SimulatedSky) -> None:
    """sky.fits with exact distances, and truth.zarr."""
    write_sky(folder / "sky.fits", sky, exact_distances=True)
    write_map(folder / "truth.zarr", sky.truth, Provenance(""))
