"""From the coordinates that users have to X, Y, Z in pc."""

import numpy as np
from astropy import units as u
from astropy.coordinates import SkyCoord, UnitSphericalRepresentation
from numpy.typing import ArrayLike, NDArray


def positions_of(coords: SkyCoord) -> NDArray[np.float64]:
    """Heliocentric Galactic X, Y, Z in pc (N, 3) of coordinates of any frame and shape."""
    xyz = _galactic(coords).cartesian.xyz
    if not xyz.unit.is_equivalent(u.pc):
        raise ValueError(
            "coords: expected coordinates with a distance, got directions alone; give "
            "SkyCoord(..., distance=300 * u.pc), or Distance(parallax=...) where that is known"
        )
    return _stacked(xyz.to_value(u.pc))


def directions_of(coords: SkyCoord) -> NDArray[np.float64]:
    """Unit vectors (N, 3) from the Sun, of coordinates with or without distance."""
    sphere = _galactic(coords).represent_as(UnitSphericalRepresentation)
    return _stacked(sphere.to_cartesian().xyz.value)


def galactic_coordinates(l: ArrayLike, b: ArrayLike, d: ArrayLike | None) -> SkyCoord:
    """Bare numbers are degrees and, as the dustmaps package has them, kpc."""
    return _coordinates(("l", l), ("b", b), d, "galactic")


def equatorial_coordinates(
    ra: ArrayLike, dec: ArrayLike, d: ArrayLike | None, frame: str
) -> SkyCoord:
    """Bare numbers are degrees and, as the dustmaps package has them, kpc."""
    known = ("icrs", "fk4", "fk5", "fk4noeterms")
    if frame not in known:
        raise ValueError(f"frame: expected one of {', '.join(known)}, got {frame!r}")
    return _coordinates(("ra", ra), ("dec", dec), d, frame)


def _coordinates(
    first: tuple[str, ArrayLike], second: tuple[str, ArrayLike], d: ArrayLike | None, frame: str
) -> SkyCoord:
    given = {name: u.Quantity(value, u.deg) for name, value in (first, second)}
    if d is not None:
        given["distance"] = u.Quantity(d, u.kpc)
    return SkyCoord(**given, frame=frame)


def _galactic(coords: SkyCoord) -> SkyCoord:
    if not isinstance(coords, SkyCoord):
        raise TypeError(
            f"coords: expected an astropy SkyCoord, got {type(coords).__name__}; for numbers use "
            "query_gal(l, b, d) or query_equ(ra, dec, d)"
        )
    return coords if coords.frame.name == "galactic" else coords.transform_to("galactic")


def _stacked(xyz: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.ascontiguousarray(np.asarray(xyz, np.float64).reshape(3, -1).T)
