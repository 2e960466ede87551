"""Coordinates: heliocentric Galactic, +X to l = 0, +Y to l = 90°, +Z to b = 90°, in pc.

Pixels of the sky are HEALPix's.
"""

import functools
from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
from astropy import units as u
from astropy.coordinates import SkyCoord, SphericalRepresentation, UnitSphericalRepresentation
from astropy.utils.masked import Masked
from numpy.typing import ArrayLike, NDArray

from dustmap.errors import UserError

#: Distance in pc that no map reaches.
_BEYOND_ANY = 1e9
#: Width of a HEALPix pixel, in rad, times nside.
PIXEL = (np.pi / 3.0) ** 0.5

Array: TypeAlias = NDArray[np.float64]
#: Directions around which others are counted, and how many in a ring, on average.
_COUNTED, _IN_A_RING = 2**13, 64


def cartesian(l: ArrayLike, b: ArrayLike, distance: ArrayLike) -> Array:
    """Return (X, Y, Z) in pc (..., 3) of Galactic l, b in degrees and distance in pc.

    Examples
    --------
    >>> cartesian(90.0, 0.0, 100.0).round(6)
    array([  0., 100.,   0.])
    """
    xyz: Array = places_at(l, b, distance).cartesian.xyz.to_value(u.pc)
    return np.moveaxis(xyz, 0, -1)


def galactic(xyz: Array) -> tuple[Array, Array, Array]:
    """Return (l, b, distance) in degrees and pc of heliocentric (X, Y, Z) in pc (..., 3).

    Examples
    --------
    >>> [float(number.round(6)) for number in galactic(np.array([0.0, 100.0, 0.0]))]
    [90.0, 0.0, 100.0]
    """
    x, y, z = np.moveaxis(xyz, -1, 0) * u.pc
    coordinates = SkyCoord(u=x, v=y, w=z, frame="galactic", representation_type="cartesian")
    spherical = coordinates.spherical
    return (
        spherical.lon.to_value(u.deg),
        spherical.lat.to_value(u.deg),
        spherical.distance.to_value(u.pc),
    )


@functools.cache
def _rotation() -> Array:
    """Return R (3, 3), Galactic = R · ICRS unit vectors, from astropy's own frames."""
    axes = SkyCoord(
        x=[1.0, 0.0, 0.0], y=[0.0, 1.0, 0.0], z=[0.0, 0.0, 1.0], representation_type="cartesian"
    )
    return np.asarray(axes.galactic.cartesian.xyz.to_value(u.one), np.float64)


def galactic_from_icrs(ra: Array, dec: Array) -> tuple[Array, Array]:
    """Return (l, b) in degrees of right ascension and declination in degrees; 0 ≤ l < 360.

    Examples
    --------
    >>> l, b = galactic_from_icrs(np.array([266.405]), np.array([-28.936]))  # the Galactic centre
    >>> bool(min(l[0], 360.0 - l[0]) < 0.01 and abs(b[0]) < 0.01)
    True
    """
    ra, dec = np.radians(ra), np.radians(dec)
    xyz = np.stack([np.cos(dec) * np.cos(ra), np.cos(dec) * np.sin(ra), np.sin(dec)])
    return direction(*(_rotation() @ xyz))


def direction(x: Array, y: Array, z: Array) -> tuple[Array, Array]:
    """Return (l, b) in degrees of X, Y, Z; 0 ≤ l < 360. Accurate at the poles, too."""
    l = np.degrees(np.arctan2(y, x)) % 360.0
    return np.where(l == 360.0, 0.0, l), np.degrees(np.arctan2(z, np.hypot(x, y)))


def coordinates_of(angles: Mapping[str, ArrayLike], d: ArrayLike | None, frame: str) -> SkyCoord:
    """Make coordinates; bare numbers are degrees and, as in the dustmaps package, kpc."""
    components = {name: u.Quantity(_filled(value), u.deg) for name, value in angles.items()}
    if d is not None:
        components["distance"] = u.Quantity(_filled(d), u.kpc)
    return SkyCoord(**components, frame=frame)


def _filled(values: ArrayLike) -> Any:
    """Return numbers with NaN where they are masked, and their unit where they have one."""
    if isinstance(values, np.ma.MaskedArray):
        unit = getattr(values, "unit", None)
        filled = np.ma.filled(values.astype(np.float64), np.nan)
        return filled if unit is None else u.Quantity(filled, unit)
    return _bare(values)


def _bare(values: Any) -> Any:
    """Return values with NaN in place of those that a mask of astropy hides."""
    return np.asanyarray(values.filled(np.nan)) if isinstance(values, Masked) else values


def positions_of(coords: SkyCoord) -> Array:
    """Return heliocentric Galactic X, Y, Z in pc (N, 3) of coordinates of any frame and shape.

    An infinite distance is one beyond any map.
    """
    xyz = _galactic(_within_reach(coords)).cartesian.xyz
    if not xyz.unit.is_equivalent(u.pc):
        got = "directions alone"
        if not isinstance(coords.data, UnitSphericalRepresentation):
            got = f"a distance in {xyz.unit}" if str(xyz.unit) else "a distance without a unit"
        raise UserError(
            f"coords: expected coordinates with a distance, got {got}; give "
            "SkyCoord(..., distance=300 * u.pc), or Distance(parallax=...) where that is known"
        )
    _refuse_behind(coords)
    return _stacked(xyz.to_value(u.pc))


def _refuse_behind(coords: SkyCoord) -> None:
    """Refuse negative distances, which stand for places in the opposite direction."""
    if isinstance(coords.data, SphericalRepresentation):
        negative = int((np.asarray(_bare(coords.data.distance.value)) < 0.0).sum())
        if negative:
            raise UserError(
                f"coords: {negative} of {coords.size} distances are negative: leave them out, or "
                "give a parallax with its error where one is known"
            )


def _within_reach(coords: SkyCoord) -> SkyCoord:
    """The same with `_BEYOND_ANY` in place of infinite distances, which have no components."""
    sphere = getattr(coords, "data", None)
    if not isinstance(sphere, SphericalRepresentation):
        return coords
    endless = np.isposinf(np.asarray(_bare(sphere.distance.value)))
    if not endless.any() or not sphere.distance.unit.is_equivalent(u.pc):
        return coords
    distance = np.where(endless, _BEYOND_ANY * u.pc, sphere.distance)
    reached = SphericalRepresentation(sphere.lon, sphere.lat, distance)
    return SkyCoord(coords.realize_frame(reached))


def places_at(l: ArrayLike, b: ArrayLike, distance: ArrayLike) -> SkyCoord:
    """Place points at Galactic l, b in degrees and distance in pc, broadcast together."""
    l, b, distance = (np.asarray(values, np.float64) for values in (l, b, distance))
    return SkyCoord(l * u.deg, b * u.deg, distance * u.pc, frame="galactic")


def places_towards(directions: Array, distances: Array) -> SkyCoord:
    """Place points on unit vectors (N, 3), or one (3,), at distances (N,) in pc."""
    x, y, z = np.moveaxis(directions * distances[:, None], -1, 0) * u.pc
    return SkyCoord(u=x, v=y, w=z, frame="galactic", representation_type="cartesian")


def refuse_bad_nside(nside: int, what: str = "nside") -> None:
    """Refuse what is no number of HEALPix pixels along a side: a power of two, as NESTED needs."""
    if nside not in {2**order for order in range(14)}:
        raise UserError(f"{what}: expected a power of two, 1 to 8192, got {nside!r}")


def pixel_directions(nside: int, pixels: NDArray[np.int64] | int) -> Array:
    """Return unit vectors (N, 3) to the centres of pixels (N,), NESTED; (3,) to that of one."""
    import healpy  # takes a second, as it takes matplotlib

    return np.stack(healpy.pix2vec(nside, pixels, nest=True), axis=-1)


def pixels_towards(nside: int, vectors: Array) -> NDArray[np.int64]:
    """Return the pixels (N,), NESTED, of vectors (N, 3) of any length but 0."""
    import healpy

    return np.asarray(healpy.vec2pix(nside, *vectors.T, nest=True))


def directions_of(coords: SkyCoord) -> Array:
    """Return unit vectors (N, 3) from the Sun, of coordinates with or without distance."""
    sphere = _galactic(coords).represent_as(UnitSphericalRepresentation)
    return _stacked(sphere.to_cartesian().xyz.to_value(u.one))


def _galactic(coords: SkyCoord) -> SkyCoord:
    if not isinstance(coords, SkyCoord):
        raise TypeError(
            f"coords: expected an astropy SkyCoord, got {type(coords).__name__}; for numbers use "
            "query_gal(l, b, d) or query_equ(ra, dec, d)"
        )
    return coords if coords.frame.name == "galactic" else coords.transform_to("galactic")


def _stacked(xyz: Array) -> Array:
    """Return the rows (N, 3) of components (3, ...), NaN where they are masked."""
    return np.ascontiguousarray(np.asarray(_bare(xyz), np.float64).reshape(3, -1).T)


def weighted_neighbours(direction: Array, chords: Array, weights: Array) -> Array:
    """Return Σ_r w_r n_ir (N,) of the other directions n_ir in the rings r around each.

    Beyond `_COUNTED` directions they are counted around some: all others have the density of the
    nearest of these.

    Parameters
    ----------
    direction : (N, 3), unit vectors
    chords : (N, R), outer radii of the rings on the unit sphere, ascending
    weights : (R,), w

    Examples
    --------
    >>> ahead = np.array([[1.0, 0.0, 0.0], [1.0, 0.0, 0.0], [0.0, 1.0, 0.0]])
    >>> weighted_neighbours(ahead, np.full((3, 2), [0.1, 1.5]), np.array([1.0, 0.5]))
    array([1.5, 1.5, 1. ])
    """
    from scipy.spatial import cKDTree  # which takes half a second

    random = np.random.default_rng(0)
    some = np.sort(random.permutation(len(direction))[:_COUNTED])
    number, inner = np.zeros(len(some)), np.zeros(len(some))
    for outer, weight in zip(chords[some].T, weights, strict=True):
        # Where rings have many, a random part of them, so that the cost grows with N alone.
        expected = len(direction) * float(np.square(outer).mean()) / 4.0
        share = min(1.0, _IN_A_RING / max(expected, 1.0))
        chosen = random.uniform(size=len(direction)) < share
        tree = cKDTree(direction[chosen])
        within, nearer = (
            tree.query_ball_point(direction[some], radius, return_length=True)
            for radius in (outer, inner)
        )
        # Without an inner radius only the direction itself is nearer, not others that equal it.
        number += weight / share * (within - np.where(inner > 0.0, nearer, chosen[some]))
        inner = outer
    if len(some) == len(direction):
        return number
    nearest = cKDTree(direction[some]).query(direction)[1]
    wider = np.square(chords[:, -1] / chords[some][nearest, -1])
    return np.asarray(number[nearest] * wider, np.float64)
