"""Shells of HEALPix pixels as tables: a row for each pixel, NESTED, and a column for each distance.

`healpy.read_map(path, hdu="DENSITY_MEAN", field=k, nest=True)` gives the sky at distance k of the
table RADIAL PIXEL CENTERS. DENSITY_... are densities at the centres, INTEGRATED_... extinctions
A(<d) from the Sun to them, exact along the ray through the centre of the pixel; COVERAGE has no
unit. What lies outside the box of the map is NaN. Any sign is allowed.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import final

import numpy as np
from astropy.io import fits
from numpy.typing import NDArray

from dustmap.sky._provenance import Provenance, column, density_cards, healpix_cards
from dustmap.sky._streamed_fits import TablePlan, streamed_fits
from dustmap.sky.layouts._places import (
    LayoutCounts,
    RadialBins,
    Shells,
    at_places,
    counts,
    cumulative,
    directions,
    exits,
    pixel_blocks,
    refuse_bad_nside,
    refuse_sun_outside,
)
from dustmap.sky.maps import AbstractDensityField, MapRequest, Quantity
from dustmap.sky.maps._cubes import DENSITY_UNIT
from dustmap.tables import replacing

_MOST_COLUMNS = 999  # of a FITS table
_INTEGRATED = (Quantity.MEAN, Quantity.STD)


@final
@dataclass(frozen=True)
class HealpixOptions:
    """bins: or shells; None for 516 bins out to the farthest face of the box; nside: a power of
    two.

    density: what of the density; integrated: MEAN, STD or both of A(<d), or none.
    """

    bins: RadialBins | Shells | None = None
    nside: int = 64
    density: MapRequest = MapRequest((Quantity.MEAN, Quantity.STD))  # noqa: RUF009  frozen
    integrated: tuple[Quantity, ...] = ()

    def __post_init__(self) -> None:
        refuse_bad_nside(self.nside)
        if self.bins is not None and self.bins.count > _MOST_COLUMNS:
            raise ValueError(
                f"distances: expected at most {_MOST_COLUMNS}, the columns of a FITS table, got "
                f"{self.bins.count}"
            )
        if not set(self.integrated) <= set(_INTEGRATED):
            names = [quantity.value for quantity in self.integrated]
            raise ValueError(f"integrated: expected mean, std, both or none, got {names}")


def write_healpix(
    path: str | Path,
    field: AbstractDensityField,
    options: HealpixOptions,
    provenance: Provenance,
    overwrite: bool = False,
) -> LayoutCounts:
    """Writes a table for each quantity and each sample."""
    refuse_sun_outside(field)
    field.check(options.density)
    if Quantity.STD in options.integrated and field.n_samples < 2:
        raise ValueError(
            f"integrated std: expected a density with samples, got {field.n_samples}; fit with "
            "more (fit.samples), or ask for the mean"
        )
    bins = options.bins or RadialBins.of_box(field)
    tables = [column("RADIAL PIXEL CENTERS", bins.centres)]
    if isinstance(bins, RadialBins):
        tables.append(column("RADIAL PIXEL BOUNDARIES", bins.boundaries))
    plans = _plans(field, options, bins, provenance)
    total = LayoutCounts()
    draws = field.n_samples if Quantity.STD in options.integrated else options.density.samples
    with (
        replacing(Path(path), overwrite) as partial,
        streamed_fits(partial, [*plans, *tables]) as images,
    ):
        for start, stop in pixel_blocks(options.nside, bins.count * (1 + draws // 4)):
            tables_of_pixels = _block(field, options, bins, directions(options.nside, start, stop))
            for name, values in tables_of_pixels.items():
                images[name].write((start, 0), values)
                total += counts(values)
    return total


def _plans(
    field: AbstractDensityField,
    options: HealpixOptions,
    bins: RadialBins | Shells,
    provenance: Provenance,
) -> list[TablePlan]:
    cards = healpix_cards(density_cards("", field.system, provenance), options.nside)
    cards["INDXSCHM"] = "IMPLICIT"
    cards["OBJECT"] = "FULLSKY"
    columns = [(f"SHELL_{k:03d}", f"{d:.6g} pc") for k, d in enumerate(bins.centres)]
    rows = 12 * options.nside**2

    def plan(name: str, unit: str) -> TablePlan:
        return TablePlan(name, rows, columns, unit, fits.Header(cards, copy=True))

    cubes = [
        plan(_name(q), "" if q is Quantity.COVERAGE else DENSITY_UNIT)
        for q in options.density.cubes
    ]
    samples = [plan(_sample(s), DENSITY_UNIT) for s in range(options.density.samples)]
    integrated = [plan(f"INTEGRATED_{q.name}", "mag") for q in options.integrated]
    return [*cubes, *samples, *integrated]


def _name(quantity: Quantity) -> str:
    return quantity.name if quantity is Quantity.COVERAGE else f"DENSITY_{quantity.name}"


def _sample(s: int) -> str:
    return f"SAMPLE_{s + 1:02d}"


def _block(
    field: AbstractDensityField,
    options: HealpixOptions,
    bins: RadialBins | Shells,
    rays: NDArray[np.float64],
) -> dict[str, NDArray[np.float32]]:
    """All tables' rows (P, count) of the pixels along `rays` (P, 3)."""
    places = rays[:, None] * bins.centres[:, None]
    density = at_places(field, places, options.density)
    rows = {_name(q): density[q.value] for q in options.density.cubes}
    if options.density.samples:
        rows |= {_sample(s): values for s, values in enumerate(density["samples"])}
    if options.integrated:
        rows |= _integrated(field, options, bins, rays)
    return rows


def _integrated(
    field: AbstractDensityField,
    options: HealpixOptions,
    bins: RadialBins | Shells,
    rays: NDArray[np.float64],
) -> dict[str, NDArray[np.float32]]:
    request = MapRequest((Quantity.MEAN,))
    if Quantity.STD in options.integrated:
        request = MapRequest((Quantity.MEAN, Quantity.SAMPLES), field.n_samples)
    integrals = cumulative(field, rays, bins.centres, request)
    if request.samples:
        integrals["std"] = integrals.pop("samples").std(axis=0, ddof=1)
    outside = bins.centres > exits(field, rays)[:, None]
    return {
        f"INTEGRATED_{q.name}": np.where(outside, np.float32(np.nan), integrals[q.value])
        for q in options.integrated
    }
