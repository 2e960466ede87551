"""Layouts of shells of HEALPix pixels, NESTED: tables, and the cubes of Edenhofer et al. (2024).

HEALPix tables: a row for each pixel and a column for each distance.
`healpy.read_map(path, hdu="DENSITY_MEAN", field=k, nest=True)` gives the sky at distance k of the
table RADIAL PIXEL CENTERS. DENSITY_... are densities at the centres, INTEGRATED_... extinctions
A(<d) from the Sun to them, exact along the ray through the centre of the pixel; COVERAGE has no
unit. What lies outside the box of the map is NaN. Any sign is allowed.

Edenhofer et al. (2024, A&A 685, A82): logarithmic in r.
`dustmaps.edenhofer2023.Edenhofer2023Query(map_fname=...)` reads the file. What its answers mean:

- Densities are those *at* the radial centres and the pixel centres. The reader interpolates
  their logarithm, linearly in r, so at these places it returns our numbers; a mean over the bin
  would differ by h² ρ''/24 of bin width h, a third of its error of interpolation.
- `integrated=True` sums ρ_k times the width of bin k on top of the inner sphere, and stores the
  sum to the *outer* boundary of bin k at its *centre*: too much by the dust of half a bin, of
  width r ln(farthest/nearest) / (2 count): 0.3 % for an even density in 500 bins, and 7 % in 20.
- Places outside the box of the map are NaN. Densities must be positive (`floor`).
"""

from dataclasses import dataclass
from pathlib import Path
from typing import final

import numpy as np
from astropy.io import fits
from numpy.typing import NDArray

from dustmap.errors import UserError
from dustmap.sky import _provenance
from dustmap.sky._provenance import Provenance
from dustmap.sky._streamed_fits import ImagePlan, StreamedImage, TablePlan, streamed_fits
from dustmap.sky.layouts import _places
from dustmap.sky.layouts._places import LayoutCounts, RadialBins, Shells
from dustmap.sky.maps import AbstractDensityField, MapRequest, Quantity
from dustmap.sky.maps._cubes import DENSITY_UNIT
from dustmap.sky.systems import ExtinctionSystem, conversion
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
        _places.refuse_bad_nside(self.nside)
        if self.bins is not None and self.bins.count > _MOST_COLUMNS:
            raise UserError(
                f"distances: expected at most {_MOST_COLUMNS}, the columns of a FITS table, got "
                f"{self.bins.count}"
            )
        if not set(self.integrated) <= set(_INTEGRATED):
            names = [quantity.value for quantity in self.integrated]
            raise UserError(f"integrated: expected mean, std, both or none, got {names}")


def write_healpix(
    path: str | Path,
    field: AbstractDensityField,
    options: HealpixOptions,
    provenance: Provenance,
    overwrite: bool = False,
) -> LayoutCounts:
    """Write a table for each quantity and each sample."""
    _places.refuse_sun_outside(field)
    field.check(options.density)
    if Quantity.STD in options.integrated and field.n_samples < 2:
        raise UserError(
            f"integrated std: expected a density with samples, got {field.n_samples}; fit with "
            "more (fit.samples), or ask for the mean"
        )
    bins = options.bins or RadialBins.of_box(field)
    tables = [_provenance.column("RADIAL PIXEL CENTERS", bins.centres)]
    if isinstance(bins, RadialBins):
        tables.append(_provenance.column("RADIAL PIXEL BOUNDARIES", bins.boundaries))
    plans = _plans(field, options, bins, provenance)
    total = LayoutCounts()
    draws = field.n_samples if Quantity.STD in options.integrated else options.density.samples
    with (
        replacing(Path(path), overwrite) as partial,
        streamed_fits(partial, [*plans, *tables]) as images,
    ):
        for start, stop in _places.pixel_blocks(options.nside, bins.count * (1 + draws // 4)):
            tables_of_pixels = _block(
                field, options, bins, _places.directions(options.nside, start, stop)
            )
            for name, values in tables_of_pixels.items():
                images[name].write((start, 0), values)
                total += _places.counts(values)
    return total


def _plans(
    field: AbstractDensityField,
    options: HealpixOptions,
    bins: RadialBins | Shells,
    provenance: Provenance,
) -> list[TablePlan]:
    cards = _provenance.healpix_cards(
        _provenance.density_cards("", field.system, provenance), options.nside
    )
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
    density = _places.at_places(field, places, options.density)
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
    integrals = _places.cumulative(field, rays, bins.centres, request)
    if request.samples:
        integrals["std"] = integrals.pop("samples").std(axis=0, ddof=1)
    outside = bins.centres > _places.exits(field, rays)[:, None]
    return {
        f"INTEGRATED_{q.name}": np.where(outside, np.float32(np.nan), integrals[q.value])
        for q in options.integrated
    }


_TINY = float(np.finfo(np.float32).tiny)


@final
@dataclass(frozen=True)
class EdenhoferOptions:
    """bins: None for 516 out to the farthest face of the box; nside: a power of two.

    samples: 0 for the file of mean and standard deviation, else the file of so many samples.
    system: None for that of the map; the published map has E(ZGR23).
    floor: what densities ≤ 0 are raised to, mag/pc; None refuses them.
    """

    bins: RadialBins | None = None
    nside: int = 64
    samples: int = 0
    system: ExtinctionSystem | None = None
    floor: float | None = None

    def __post_init__(self) -> None:
        _places.refuse_bad_nside(self.nside)
        refuse_bad_floor(self.floor)
        if self.samples < 0:
            raise UserError(f"samples: expected 0 or more, got {self.samples}")

    @property
    def request(self) -> MapRequest:
        """Request what the file holds of the density and of the inner sphere."""
        if self.samples:
            return MapRequest((Quantity.SAMPLES,), self.samples)
        return MapRequest((Quantity.MEAN, Quantity.STD))


def write_edenhofer2023(
    path: str | Path,
    field: AbstractDensityField,
    options: EdenhoferOptions,
    provenance: Provenance,
    overwrite: bool = False,
) -> LayoutCounts:
    """Write MEAN and STD., or SAMPLES, (count, 12 nside²), and the inner sphere's integral."""
    _places.refuse_sun_outside(field)
    field.check(options.request)
    bins = options.bins or RadialBins.of_box(field)
    system = options.system or field.system
    factor = conversion(field.system, system)
    layout = _Layout(options, bins, system)
    note = _provenance.conversion_note(field.system, system, factor)
    tables = [
        _provenance.column("RADIAL PIXEL CENTERS", bins.centres),
        _provenance.column("RADIAL PIXEL BOUNDARIES", bins.boundaries),
    ]
    plans = layout.plans(provenance, note)
    # The reader wants a density before all else.
    units = [plans[0], *tables, *plans[1:]]
    with replacing(Path(path), overwrite) as partial, streamed_fits(partial, units) as images:
        total = LayoutCounts()
        for start, stop in _places.pixel_blocks(options.nside, bins.count):
            total += layout.fill(images, field, factor, start, stop)
        images[plans[0].name].header["NRAISED"] = total.raised
    return total


@final
@dataclass(frozen=True)
class _Layout:
    options: EdenhoferOptions
    bins: RadialBins
    system: ExtinctionSystem

    @property
    def _radius(self) -> str:
        return f"{self.bins.nearest:.10g}"

    @property
    def _names(self) -> dict[str, tuple[str, str, str]]:
        """By quantity: the name of its densities, of its inner integral, and its CTYPE."""
        inner = f"INTEGRATED INNER {self._radius} PC"
        meaning = f"inner density integrated within {self._radius} pc"
        if self.options.samples:
            return {"samples": ("SAMPLES", inner, meaning)}
        return {
            "mean": ("MEAN", f"MEAN OF {inner}", meaning),
            "std": ("STD.", f"STD. OF {inner}", f"std. of {meaning}"),
        }

    def plans(self, provenance: Provenance, note: str) -> list[ImagePlan]:
        nside, leading = self.options.nside, (self.options.samples,) * bool(self.options.samples)
        notes = (note, "values at radial pixel centers; NaN outside the box of the map")
        density = _provenance.density_cards(DENSITY_UNIT, self.system, provenance, notes)
        density["NRAISED"] = (0, "densities that were <= 0, raised to a floor")
        inner = _provenance.density_cards("mag", self.system, provenance, (note,))
        densities, inners = [], []
        for name, inner_name, meaning in self._names.values():
            cards = _provenance.healpix_cards(density, nside)
            pixels = 12 * nside**2
            densities.append(ImagePlan(name, (*leading, self.bins.count, pixels), cards))
            cards = _provenance.healpix_cards(inner, nside)
            cards["CTYPE"] = meaning
            inners.append(ImagePlan(inner_name, (*leading, pixels), cards))
        return [*densities, *inners]

    def fill(
        self,
        images: dict[str, StreamedImage],
        field: AbstractDensityField,
        factor: float,
        start: int,
        stop: int,
    ) -> LayoutCounts:
        """Write the pixels start <= p < stop of everything."""
        rays = _places.directions(self.options.nside, start, stop)
        places = self.bins.centres[:, None, None] * rays
        density = _places.at_places(field, places, self.options.request)
        inner = _places.within(field, rays, self.bins.nearest, self.options.request)
        total = LayoutCounts()
        for quantity, (name, inner_name, _) in self._names.items():
            values, count = density[quantity] * np.float32(factor), 0
            if quantity != "std":
                values, count = raised(values, field.positive, self.options.floor)
            total += _places.counts(values, count)
            _write_pixels(images[name], values, start)
            _write_pixels(images[inner_name], inner[quantity] * np.float32(factor), start)
        return total


def _write_pixels(image: StreamedImage, values: NDArray[np.float32], start: int) -> None:
    """Values (..., P) of pixels from `start` on, into an image (..., all pixels)."""
    for index in np.ndindex(values.shape[:-1]):
        image.write((*index, start), values[index])


def refuse_bad_floor(floor: float | None) -> None:
    """Refuse a floor that is no density."""
    if floor is not None and not _TINY <= floor < np.inf:
        raise UserError(f"floor: expected a density of at least {_TINY:g} mag/pc, got {floor:g}")


def raised(
    values: NDArray[np.float32], positive: bool, floor: float | None
) -> tuple[NDArray[np.float32], int]:
    """Return `values` with those ≤ 0 raised to `floor`, and how many they were; NaN stays.

    Without a floor a density that can be negative is refused; one that is positive but for the
    underflow of float32 gets the smallest number of float32.
    """
    low = values <= 0
    count = int(low.sum())
    if not count:
        return values, 0
    if floor is None and not positive:
        raise UserError(
            f"{count} of {values.size} densities so far are not positive, and readers of this "
            "layout interpolate logarithms: fit with model.density = 'lognormal', choose another "
            "format, or set a floor in mag/pc"
        )
    return np.where(low, np.float32(_TINY if floor is None else floor), values), count
