"""A map as xarray: its cubes, a line of sight, shells on the sky in HEALPix."""

from typing import TYPE_CHECKING, Any

import numpy as np
import xarray as xr
from astropy import units as u
from astropy.coordinates import SkyCoord
from numpy.typing import NDArray

from dustmap.errors import UserError
from dustmap.sky._coordinates import directions_of, galactic
from dustmap.sky.maps._cubes import DENSITY_UNIT, DESCRIPTIONS
from dustmap.sky.maps._quantities import Quantity
from dustmap.sky.maps._trilinear import chord

if TYPE_CHECKING:
    from dustmap.sky.maps._dust_map import DustMap

#: Percentiles between which 68 % lie.
_BAND = (16.0, 84.0)
#: Distances along a line of sight, unless the caller names them, lie half a voxel apart, at most
#: so many.
_MOST = 600
_UNIT_OF = {"density": DENSITY_UNIT, "extinction": "mag"}


def cubes_of(density: "DustMap") -> xr.Dataset:
    """Return all cubes of a map as `DustMap.to_xarray` does."""
    x, y, z = density.axes()
    axes = {name: (name, at, {"units": "pc"}) for name, at in (("x", x), ("y", y), ("z", z))}
    data: dict[str, Any] = {}
    for quantity in density.available:
        described = DESCRIPTIONS[quantity]
        attributes = {"units": described.unit, "long_name": described.meaning}
        if quantity is Quantity.SAMPLES:
            cubes = [density.cube(quantity, k) for k in range(density.n_samples)]
            data[described.variable] = ("sample", "z", "y", "x"), np.stack(cubes), attributes
        else:
            data[described.variable] = ("z", "y", "x"), density.cube(quantity), attributes
    return xr.Dataset(data, axes, {"extinction_system": density.system.name})


def profile_of(density: "DustMap", coords: SkyCoord, distances: u.Quantity | None) -> xr.Dataset:
    """Return density and extinction along a direction as `DustMap.profile` does."""
    direction = directions_of(coords)
    if len(direction) != 1:
        raise UserError(f"coords: expected one direction, got {len(direction)}; ask for one by one")
    along = _distances(density, direction) if distances is None else _checked(distances)
    places = _places(direction, along)
    bands = {"density": _band(density, places, False), "extinction": _band(density, places, True)}
    data = {
        f"{what}_{name}": (
            "distance",
            values,
            {"units": "mag" if what == "extinction" else DENSITY_UNIT},
        )
        for what, band in bands.items()
        for name, values in band.items()
    }
    if Quantity.COVERAGE in density.available:
        data["coverage"] = ("distance", density.coverage(places), {"units": ""})
    l, b, _ = galactic(direction[0])
    seen = {"l_deg": float(l), "b_deg": float(b), "extinction_system": density.system.name}
    return xr.Dataset(data, {"distance": ("distance", along, {"units": "pc"})}, seen)


def sky_of(
    density: "DustMap", nside: int, distances: u.Quantity, integrated: bool, nest: bool
) -> xr.Dataset:
    """Return shells in HEALPix as `DustMap.to_healpix` does."""
    import healpy

    if not healpy.isnsideok(nside, nest=True):
        raise UserError(f"nside: expected a power of 2, such as 64, got {nside!r}")
    along = _checked(distances)
    lon, lat = healpy.pix2ang(nside, np.arange(healpy.nside2npix(nside)), nest=nest, lonlat=True)
    pixels = SkyCoord(l=lon * u.deg, b=lat * u.deg, frame="galactic")
    shells = [_places(directions_of(pixels), np.full(len(lon), d)) for d in along]
    name = "extinction" if integrated else "density"
    modes = ("mean", "std") if _has_std(density, integrated) else ("mean",)
    data = {
        f"{name}_{mode}": (
            ("distance", "pixel"),
            np.stack([density.query(shell, mode, integrated=integrated) for shell in shells]),
            {"units": _UNIT_OF[name]},
        )
        for mode in modes
    }
    attributes = {
        "nside": nside,
        "ordering": "NESTED" if nest else "RING",
        "frame": "galactic",
        "extinction_system": density.system.name,
    }
    return xr.Dataset(data, {"distance": ("distance", along, {"units": "pc"})}, attributes)


def _places(directions: NDArray[np.float64], distances: NDArray[np.float64]) -> SkyCoord:
    """Place points on directions (N, 3), or one (1, 3), at distances (N,) in pc."""
    x, y, z = (directions * distances[:, None]).T * u.pc
    return SkyCoord(u=x, v=y, w=z, frame="galactic", representation_type="cartesian")


def _checked(distances: u.Quantity) -> NDArray[np.float64]:
    """Return distances (K,) in pc, ascending; a bare number has no unit and is refused."""
    try:
        along = np.atleast_1d(u.Quantity(distances).to_value(u.pc)).astype(np.float64)
    except u.UnitConversionError:
        raise UserError(
            f"distances: expected lengths with a unit, such as [100, 200] * u.pc, got {distances!r}"
        ) from None
    if along.ndim != 1 or not np.isfinite(along).all() or (along < 0).any():
        raise UserError(f"distances: expected a row of lengths, 0 or more, got {distances!r}")
    return along


def _distances(density: "DustMap", direction: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return distances in pc half a voxel apart, from the Sun or the near face to the far one."""
    grid, ahead = density.grid, np.where(np.abs(direction) > 1e-12, direction, 0.0)
    enter, leave = chord(grid.lower, grid.upper, ahead)
    if not leave[0] > max(enter[0], 0.0):
        raise UserError(f"coords: the line of sight does not meet the map ({density!r})")
    near, far = max(float(enter[0]), 0.0), float(leave[0])
    count = min(max(2, int(np.ceil((far - near) / (0.5 * min(grid.spacing)))) + 1), _MOST)
    # A hair inside, so that rounding does not put the ends outside.
    ends = near + 1e-9 * (far - near), far - 1e-9 * (far - near)
    return np.linspace(*ends, count)


def _band(density: "DustMap", places: SkyCoord, integrated: bool) -> dict[str, NDArray[np.float64]]:
    """Return mean, std and the edges of the central 68 %, as far as the map has them."""
    found = {"mean": density.query(places, integrated=integrated)}
    if _has_std(density, integrated):
        found["std"] = density.query(places, "std", integrated=integrated)
    edges = {Quantity.P16, Quantity.P84} <= set(density.available) and not integrated
    if density.n_samples > 1 or edges:
        low, high = density.query(places, "percentile", list(_BAND), integrated).T
        found |= {"p16": low, "p84": high}
    return found


def _has_std(density: "DustMap", integrated: bool) -> bool:
    return density.n_samples > 1 or (not integrated and Quantity.STD in density.available)
