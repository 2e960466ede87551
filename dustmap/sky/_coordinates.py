"""Heliocentric Galactic coordinates: +X to l = 0, +Y to l = 90°, +Z to b = 90°, in pc."""

import numpy as np
from astropy import units as u
from astropy.coordinates import SkyCoord
from numpy.typing import ArrayLike, NDArray


def cartesian(l: ArrayLike, b: ArrayLike, distance: ArrayLike) -> NDArray[np.float64]:
    """(X, Y, Z) in pc (..., 3) of Galactic l, b in degrees and distance in pc."""
    coordinates = SkyCoord(
        l=np.asarray(l, np.float64) * u.deg,
        b=np.asarray(b, np.float64) * u.deg,
        distance=np.asarray(distance, np.float64) * u.pc,
        frame="galactic",
    )
    xyz: NDArray[np.float64] = coordinates.cartesian.xyz.to_value(u.pc)
    return np.moveaxis(xyz, 0, -1)


def galactic(
    xyz: NDArray[np.float64],
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """(l, b, distance) in degrees and pc of heliocentric (X, Y, Z) in pc (..., 3)."""
    x, y, z = np.moveaxis(xyz, -1, 0) * u.pc
    coordinates = SkyCoord(u=x, v=y, w=z, frame="galactic", representation_type="cartesian")
    spherical = coordinates.spherical
    return (
        spherical.lon.to_value(u.deg),
        spherical.lat.to_value(u.deg),
        spherical.distance.to_value(u.pc),
    )
