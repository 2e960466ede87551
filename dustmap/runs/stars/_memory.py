"""Bytes of what every run on stars holds, whatever its engine."""

import dataclasses

import numpy as np
import torch
from numpy.typing import NDArray

from dustmap.config import Config
from dustmap.engines import MIB, Component, During
from dustmap.gp import RegularGrid
from dustmap.gp.functionals import LineIntegrals
from dustmap.runs._machine import own_rays
from dustmap.sky.catalogs import ROWS
from dustmap.sky.maps import MapRequest, bytes_per_plane, slab_memory
from dustmap.sky.observations import Observations
from dustmap.sky.stars import StarTable

#: Copies of the rays that a fit has: of all stars, and of those that are fitted.
_COPIES = 2
#: Bytes of the pictures while they are drawn, at the resolution that they have.
_PICTURES = 75 * MIB
#: Arrays of a slab beside those that it is asked for: compressing, and turning bytes around.
_IN_FLIGHT = 2


def star_components(stars: StarTable, observed: Observations) -> tuple[Component, ...]:
    """Of the catalog and what it says of the density: known, as they have been read."""
    rays = own_rays(observed.batch.functional)
    spread = observed.spread
    table = sum(a.nbytes for a in _arrays(stars))
    geometry = _COPIES * ray_bytes(rays)
    if spread is not None:
        geometry += ray_bytes(spread.rays) + spread.variance.nbytes
    if observed.beyond is not None:
        outside = observed.beyond.spread
        geometry += ray_bytes(outside.rays) + outside.variance.nbytes
    vectors = 6 * 8 * len(observed)
    what = f"catalog of {len(stars):,} rows, rays and errors of {len(observed):,} stars"
    return (Component("stars", table + geometry + vectors, During.WHOLE, what),)


def ray_bytes(rays: LineIntegrals) -> int:
    """Of the tensors that rays are made of."""
    return sum(
        value.nbytes
        for value in (getattr(rays, field.name) for field in dataclasses.fields(rays))
        if isinstance(value, torch.Tensor)
    )


def _arrays(stars: StarTable) -> list[NDArray[np.generic]]:
    own = [getattr(stars, field.name) for field in dataclasses.fields(stars)]
    return [a for a in (*own, *stars.distances.columns().values()) if isinstance(a, np.ndarray)]


def export_components(
    grid: RegularGrid, request: MapRequest, samples: int, memory: int
) -> tuple[tuple[Component, ...], int]:
    """Of writing a map of `grid` from `samples` fields, and planes of a slab.

    memory: bytes that slabs may take.
    """
    plane = bytes_per_plane(grid, request, _IN_FLIGHT)
    depth = max(1, min(grid.shape[2], memory // plane))
    widened = 2 * 4 * samples * grid.shape[0] * grid.shape[1]
    what = f"{depth} of {grid.shape[2]} planes of {request.values_per_place} numbers, and two more"
    return (
        Component("slabs", depth * plane, During.EXPORT, what),
        Component("planes", widened, During.EXPORT, f"{samples} samples between two planes"),
    ), depth


def finish_components(
    config: Config, grid: RegularGrid, stored_samples: int
) -> tuple[tuple[Component, ...], dict[str, str]]:
    """Of the map that [export] asks for, and of the figures; with the sizes of their chunks."""
    drawn = min(config.export.samples, stored_samples)
    names = (*config.export.quantities, *(("samples",) if drawn else ()))
    parts: tuple[Component, ...] = ()
    chunks = {"rows of a catalog read at once": f"{ROWS:,}"}
    if config.export.formats and names:
        request = MapRequest.named(names, drawn)
        memory = slab_memory(config.compute.memory_bytes)
        parts, depth = export_components(grid, request, stored_samples, memory)
        chunks["planes of the map written at once"] = f"{depth} of {grid.shape[2]}"
    if config.export.figures:
        what = f"{len(config.export.figures)} pictures, one after the other, and cubes of the map"
        cubes = 2 * 4 * grid.size
        parts += (Component("figures", _PICTURES + cubes, During.FIGURES, what),)
    return parts, chunks
