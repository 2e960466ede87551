"""ICRS to Galactic, as one rotation: fast enough for tables of any length."""

import functools

import numpy as np
from astropy import units as u
from astropy.coordinates import SkyCoord
from numpy.typing import NDArray

Array = NDArray[np.float64]


@functools.cache
def _rotation() -> Array:
    """R (3, 3): Galactic unit vector = R · ICRS unit vector, from astropy's own frames."""
    axes = SkyCoord(
        x=[1.0, 0.0, 0.0], y=[0.0, 1.0, 0.0], z=[0.0, 0.0, 1.0], representation_type="cartesian"
    )
    rotation: Array = np.asarray(axes.galactic.cartesian.xyz.to_value(u.one), np.float64)
    return rotation


def galactic_from_icrs(ra: Array, dec: Array) -> tuple[Array, Array]:
    """(l, b) in degrees of right ascension and declination in degrees; 0 ≤ l < 360."""
    ra, dec = np.radians(ra), np.radians(dec)
    xyz = np.stack([np.cos(dec) * np.cos(ra), np.cos(dec) * np.sin(ra), np.sin(dec)])
    return direction(*(_rotation() @ xyz))


def direction(x: Array, y: Array, z: Array) -> tuple[Array, Array]:
    """(l, b) in degrees of X, Y, Z; 0 ≤ l < 360. Accurate at the poles, too."""
    l = np.degrees(np.arctan2(y, x)) % 360.0
    return np.where(l == 360.0, 0.0, l), np.degrees(np.arctan2(z, np.hypot(x, y)))
