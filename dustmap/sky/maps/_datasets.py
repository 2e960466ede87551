"""Answers of a map as xarray: its cubes, a line of sight, shells on the sky in HEALPix."""

import logging
from typing import TYPE_CHECKING, Any

import numpy as np
from astropy import units as u
from astropy.coordinates import SkyCoord
from numpy.typing import NDArray

from dustmap.errors import UserError
from dustmap.sky._coordinates import directions_of, galactic, places_towards, refuse_bad_nside
from dustmap.sky.maps._answers import central_band, spread_of
from dustmap.sky.maps._cubes import DENSITY_UNIT, DESCRIPTIONS, Cube
from dustmap.sky.maps._quantities import Quantity, dimensions_of, variable_of
from dustmap.sky.maps._trilinear import distances_through

if TYPE_CHECKING:
    import xarray as xr

    from dustmap.sky.maps._dust_map import DustMap

log = logging.getLogger(__name__)

#: Numbers of the samples along rays that are held at once.
_NUMBERS = 2**24
#: Units of answers, by their names.
_UNIT_OF = {"density": DENSITY_UNIT, "extinction": "mag"}


def cubes_of(density: "DustMap") -> "xr.Dataset":
    """Return all cubes of a map as `DustMap.to_xarray` does."""
    import xarray as xr

    places = zip("xyz", density.axes(), strict=True)
    axes = {name: (name, at, {"units": "pc"}) for name, at in places}
    data: dict[str, Any] = {}
    for quantity in density.available:
        described, name = DESCRIPTIONS[quantity], variable_of(quantity)
        attributes = {"units": described.unit, "long_name": described.meaning}
        if quantity is Quantity.SAMPLES:
            every = slice(None), slice(None), slice(None)
            values = np.empty((density.n_samples, *density.layout.shape), np.float32)
            for k in range(density.n_samples):
                values[k] = density.cubes.read(Cube(quantity, k), every)
        else:
            values = density.cube(quantity)
        data[name] = dimensions_of(quantity), values, attributes
    if density.finer:
        log.warning("cubes of the coarsest level alone: on_one_grid().to_xarray() has the finest")
    return xr.Dataset(data, axes, {"extinction_system": density.system.name})


def profile_of(density: "DustMap", coords: SkyCoord, distances: u.Quantity | None) -> "xr.Dataset":
    """Return density and extinction along a direction as `DustMap.profile` does."""
    import xarray as xr

    direction = directions_of(coords)
    if len(direction) != 1 or not np.isfinite(direction).all():
        raise UserError(f"coords: expected one direction, got {len(direction)}; ask for one by one")
    grid = density.grid
    if distances is None:
        step = 0.5 * density.finest_spacing
        along = distances_through(grid.lower, grid.upper, direction[0], step)
        if along is None:
            raise UserError(f"coords: the line of sight does not meet the map ({density!r})")
    else:
        along = _checked(distances)
    places = places_towards(direction, along)
    bands = {"density": _band(density, places, False), "extinction": _band(density, places, True)}
    data = {
        f"{what}_{name}": ("distance", values, {"units": _UNIT_OF[what]})
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
) -> "xr.Dataset":
    """Return shells in HEALPix as `DustMap.to_healpix` does."""
    import healpy
    import xarray as xr

    refuse_bad_nside(nside)
    along = _checked(distances)
    lon, lat = healpy.pix2ang(nside, np.arange(healpy.nside2npix(nside)), nest=nest, lonlat=True)
    pixels = directions_of(SkyCoord(l=lon * u.deg, b=lat * u.deg, frame="galactic"))
    name, known = "extinction" if integrated else "density", dict[str, list[Any]](mean=[], std=[])
    held = max(1, _NUMBERS // (max(1, density.n_samples) * len(along)))
    for start in range(0, len(pixels), held):
        some = np.repeat(pixels[start : start + held], len(along), axis=0)
        shells = places_towards(some, np.resize(along, len(some)))
        known["mean"].append(density.query(shells, integrated=integrated))
        std = spread_of(density, shells, integrated)
        known["std"] += [] if std is None else [std]
    data = {
        f"{name}_{mode}": (
            ("distance", "pixel"),
            np.concatenate(values).reshape(len(pixels), len(along)).T,
            {"units": _UNIT_OF[name]},
        )
        for mode, values in known.items()
        if values
    }
    attributes = {
        "nside": nside,
        "ordering": "NESTED" if nest else "RING",
        "frame": "galactic",
        "extinction_system": density.system.name,
    }
    return xr.Dataset(data, {"distance": ("distance", along, {"units": "pc"})}, attributes)


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


def _band(density: "DustMap", places: SkyCoord, integrated: bool) -> dict[str, NDArray[np.float64]]:
    """Return mean, std and the edges of the central 68 %, as far as the map has them."""
    moments = {"mean": density.query(places, integrated=integrated)}
    std = spread_of(density, places, integrated)
    if std is not None:
        moments["std"] = std
    edges = central_band(density, places, integrated)
    return moments if edges is None else moments | {"p16": edges[0], "p84": edges[1]}
