"""Layouts of HEALPix pixels, NESTED: tables, the cubes of Edenhofer et al. (2024), Bayestar.

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

Bayestar (Green et al. 2015, 2018, 2019): cumulative reddening by pixel, HDF5.
`dustmaps.bayestar.BayestarQuery(map_fname=...)` reads the file. It interpolates linearly in the
distance modulus and, below the first, scales the first value with distance.

- Units are the native ones of Bayestar19, E(B-V) = 0.884 of it, so that the coefficients published
  for that map hold; the attributes of the file state the factor.
- samples (pixels, samples, distances) are integrals of each sample from the Sun, best_fit those
  of the mean.
- Beyond the face of the box nothing is added: such distances are never reliable.
- DM_reliable_min, DM_reliable_max: the distance moduli of the table from the first at which the
  data reach (coverage of at least ¼) to the last before they first do not; NaN where none.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import final

import numpy as np
from astropy.io import fits
from numpy.typing import NDArray

from dustmap.errors import UserError
from dustmap.sky import _provenance
from dustmap.sky._coordinates import refuse_bad_nside
from dustmap.sky._provenance import Provenance
from dustmap.sky._streamed_fits import StreamedImage, UnitPlan, streamed_fits
from dustmap.sky.layouts import _places
from dustmap.sky.layouts._places import Array, LayoutCounts, RadialBins, Shells
from dustmap.sky.maps import AbstractDensityField, MapRequest, Quantity
from dustmap.sky.maps._cubes import DENSITY_UNIT
from dustmap.sky.maps._field import Arrays
from dustmap.sky.systems import ExtinctionSystem, conversion, system_named
from dustmap.tables import new_hdf5, replacing

_MOST_COLUMNS = 999  # of a FITS table
_INTEGRATED = (Quantity.MEAN, Quantity.STD)
_SAMPLE = "SAMPLE_{:02d}"
_TINY = float(np.finfo(np.float32).tiny)


@final
@dataclass(frozen=True)
class HealpixOptions:
    """Settings of `write_healpix`.

    Attributes
    ----------
    bins : bins or shells; None for 516 bins out to the farthest face of the box
    nside : a power of two
    density : quantities of the density
    integrated : MEAN, STD or both of A(<d), or none
    """

    bins: RadialBins | Shells | None = None
    nside: int = 64
    density: MapRequest = MapRequest((Quantity.MEAN, Quantity.STD))  # noqa: RUF009  frozen
    integrated: tuple[Quantity, ...] = ()

    def __post_init__(self) -> None:
        refuse_bad_nside(self.nside)
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
    """Write a table for each quantity and each sample.

    Examples
    --------
    >>> from dustmap.gp import ConstantMean, ExactGP, functionals
    >>> from dustmap.gp.kernels import Matern32
    >>> from dustmap.sky.maps import PosteriorField
    >>> from dustmap.sky.systems import system_named
    >>> prior = ExactGP(Matern32(50.0, 1e-6, dim=3), ConstantMean(0.002, learn=False))
    >>> at = functionals.PointValues(torch.zeros(1, 3, dtype=torch.float64))
    >>> y, noise_variance = torch.tensor([[0.004], [1e-6]], dtype=torch.float64)
    >>> posterior, A_V = prior.condition(at, y, noise_variance), system_named("A_V")
    >>> field = PosteriorField(posterior, A_V, (-100.0,) * 3, (100.0,) * 3, prior_std=1e-3)
    >>> options = HealpixOptions(RadialBins(10.0, 90.0, count=2), nside=1)
    >>> write_healpix("shells.fits", field, options, Provenance(""))
    LayoutCounts(values=48, outside=0, raised=0)
    """
    _places.refuse_sun_outside(field)
    field.check(options.density)
    if Quantity.STD in options.integrated and field.n_samples < 2:
        raise UserError(
            f"integrated std: expected a density with samples, got {field.n_samples}; fit with "
            "more (fit.samples), or ask for the mean"
        )
    bins = options.bins or RadialBins.of_box(field)
    _places.refuse_beyond(field, bins)
    plans = [*_healpix_plans(field, options, bins, provenance), *_distance_tables(bins)]
    total = LayoutCounts()
    draws = field.n_samples if Quantity.STD in options.integrated else options.density.samples
    with replacing(Path(path), overwrite) as partial, streamed_fits(partial, plans) as images:
        for part, rays in _places.pixel_blocks(options.nside, bins.count * (1 + draws // 4)):
            for name, values in _healpix_rows(field, options, bins, rays).items():
                images[name].write((part.start, 0), values)
                total += LayoutCounts.of(values)
    return total


def _distance_tables(bins: RadialBins | Shells) -> list[fits.BinTableHDU]:
    """Make tables of the centres and, of bins, the boundaries in pc, as the published map has."""
    distances = {"RADIAL PIXEL CENTERS": bins.centres}
    if isinstance(bins, RadialBins):
        distances["RADIAL PIXEL BOUNDARIES"] = bins.boundaries
    return [
        fits.BinTableHDU.from_columns(
            [fits.Column(name.lower(), "D", unit="pc", array=values)], name=name
        )
        for name, values in distances.items()
    ]


def _healpix_plans(
    field: AbstractDensityField,
    options: HealpixOptions,
    bins: RadialBins | Shells,
    provenance: Provenance,
) -> list[UnitPlan]:
    cards = _provenance.healpix_cards(
        _provenance.density_cards("", field.system, provenance), options.nside
    )
    cards["INDXSCHM"] = "IMPLICIT"
    cards["OBJECT"] = "FULLSKY"
    columns = [(f"SHELL_{k:03d}", f"{d:.6g} pc") for k, d in enumerate(bins.centres)]
    units = {
        _table(q): "" if q is Quantity.COVERAGE else DENSITY_UNIT for q in options.density.cubes
    }
    units |= {_SAMPLE.format(s + 1): DENSITY_UNIT for s in range(options.density.samples)}
    units |= {f"INTEGRATED_{q.name}": "mag" for q in options.integrated}
    return [
        UnitPlan.table(name, 12 * options.nside**2, columns, unit, fits.Header(cards, copy=True))
        for name, unit in units.items()
    ]


def _table(quantity: Quantity) -> str:
    return quantity.name if quantity is Quantity.COVERAGE else f"DENSITY_{quantity.name}"


def _healpix_rows(
    field: AbstractDensityField, options: HealpixOptions, bins: RadialBins | Shells, rays: Array
) -> Arrays:
    """Compute the rows (P, count) of every table, of the pixels along `rays` (P, 3)."""
    density = _places.at_places(field, rays[:, None] * bins.centres[:, None], options.density)
    rows = {_table(q): density[q.value] for q in options.density.cubes}
    rows |= {_SAMPLE.format(s + 1): values for s, values in enumerate(density.get("samples", ()))}
    if not options.integrated:
        return rows
    request = MapRequest((Quantity.MEAN,))
    if Quantity.STD in options.integrated:
        request = MapRequest((Quantity.MEAN, Quantity.SAMPLES), field.n_samples)
    integrals = _places.cumulative(field, rays, bins.centres, request)
    if request.samples:
        drawn = integrals.pop("samples")
        integrals["std"] = _places.cumulative_std(field, rays, bins.centres, drawn)
    outside = bins.centres > _places.exits(field, rays)[:, None]
    return rows | {
        f"INTEGRATED_{q.name}": np.where(outside, np.float32(np.nan), integrals[q.value])
        for q in options.integrated
    }


@final
@dataclass(frozen=True)
class EdenhoferOptions:
    """Settings of `write_edenhofer2023`.

    Attributes
    ----------
    bins : None for 516 out to the farthest face of the box
    nside : a power of two
    samples : 0 for the file of mean and standard deviation, else the file of so many samples
    system : None for that of the map; the published map has E(ZGR23)
    floor : what densities ≤ 0 are raised to, mag/pc; None refuses them
    """

    bins: RadialBins | None = None
    nside: int = 64
    samples: int = 0
    system: ExtinctionSystem | None = None
    floor: float | None = None

    def __post_init__(self) -> None:
        refuse_bad_nside(self.nside)
        if self.floor is not None and not _TINY <= self.floor < np.inf:
            raise UserError(
                f"floor: expected a density of at least {_TINY:g} mag/pc, got {self.floor:g}"
            )
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
    _places.refuse_beyond(field, bins)
    system = options.system or field.system
    factor = conversion(field.system, system)
    note = _provenance.conversion_note(field.system, system)
    plans = _edenhofer_plans(options, bins, system, provenance, note)
    names = list(zip(options.request.quantities, plans[::2], plans[1::2], strict=True))
    # The reader wants a density before all else.
    units = [plans[0], *_distance_tables(bins), *plans[2::2], *plans[1::2]]
    total = LayoutCounts()
    with replacing(Path(path), overwrite) as partial, streamed_fits(partial, units) as images:
        for part, rays in _places.pixel_blocks(options.nside, bins.count):
            places = bins.centres[:, None, None] * rays
            density = _places.at_places(field, places, options.request)
            inner = _places.within(field, rays, bins.nearest, options.request)
            for quantity, outer_plan, inner_plan in names:
                values, count = density[quantity.value] * np.float32(factor), 0
                if quantity is not Quantity.STD:
                    values, count = _raised(values, field.positive, options.floor)
                total += LayoutCounts.of(values, count)
                _write_pixels(images[outer_plan.name], values, part.start)
                integrals = inner[quantity.value] * np.float32(factor)
                _write_pixels(images[inner_plan.name], integrals, part.start)
        images[plans[0].name].header["NRAISED"] = total.raised
    return total


def _edenhofer_plans(
    options: EdenhoferOptions,
    bins: RadialBins,
    system: ExtinctionSystem,
    provenance: Provenance,
    note: str,
) -> list[UnitPlan]:
    """Plan for each quantity its densities, then its integral within the inner sphere."""
    radius = f"{bins.nearest:.10g}"
    inner = f"INTEGRATED INNER {radius} PC"
    meaning = f"inner density integrated within {radius} pc"
    names = {
        Quantity.SAMPLES: ("SAMPLES", inner, meaning),
        Quantity.MEAN: ("MEAN", f"MEAN OF {inner}", meaning),
        Quantity.STD: ("STD.", f"STD. OF {inner}", f"std. of {meaning}"),
    }
    notes = (note, "values at radial pixel centers; NaN outside the box of the map")
    cards = _provenance.density_cards(DENSITY_UNIT, system, provenance, notes)
    cards["NRAISED"] = (0, "densities that were <= 0, raised to a floor")
    cards = _provenance.healpix_cards(cards, options.nside)
    inner_cards = _provenance.density_cards("mag", system, provenance, (note,))
    inner_cards = _provenance.healpix_cards(inner_cards, options.nside)
    leading, pixels = (options.samples,) * bool(options.samples), 12 * options.nside**2
    plans = []
    for quantity in options.request.quantities:
        name, inner_name, inner_cards["CTYPE"] = names[quantity]
        plans.append(UnitPlan.image(name, (*leading, bins.count, pixels), cards.copy()))
        plans.append(UnitPlan.image(inner_name, (*leading, pixels), inner_cards.copy()))
    return plans


def _write_pixels(image: StreamedImage, values: NDArray[np.float32], start: int) -> None:
    """Write values (..., P) of pixels from `start` on into an image (..., all pixels)."""
    for index in np.ndindex(values.shape[:-1]):
        image.write((*index, start), values[index])


def _raised(
    values: NDArray[np.float32], positive: bool, floor: float | None
) -> tuple[NDArray[np.float32], int]:
    """Raise values ≤ 0 to `floor`, and count them; NaN stays."""
    low = values <= 0
    count = int(low.sum())
    if not count:
        return values, 0
    if floor is None and not positive:
        raise UserError(
            f"{count} of {values.size} densities so far are not positive, and readers of this "
            "layout interpolate logarithms: fit with model.density = 'lognormal', or choose "
            "another format (in Python, EdenhoferOptions has a floor)"
        )
    # A positive density that underflows in float32 becomes its smallest number.
    return np.where(low, np.float32(_TINY if floor is None else floor), values), count


#: Coverage of a reliable distance at least, as of `DustMap.reliable_distances`.
_TRUSTED = 0.25
#: What readers of this map take for granted: 63 pc to 60 kpc.
DISTANCE_MODULI = np.linspace(4.0, 18.875, 120)
_DISTANCES = 10.0 ** (DISTANCE_MODULI / 5 + 1)
_BAYESTAR = "Bayestar19"
_PIXEL = np.dtype(
    [
        ("nside", "i4"),
        ("healpix_index", "i8"),
        ("converged", "u1"),
        ("DM_reliable_min", "f4"),
        ("DM_reliable_max", "f4"),
        ("n_stars", "i4"),
    ]
)


@final
@dataclass(frozen=True, eq=False)
class BayestarOptions:
    """Settings of `write_bayestar`.

    Attributes
    ----------
    nside : a power of two, of all pixels
    samples : how many of the field are written
    n_stars : (12 nside²,)
        Stars by NESTED pixel; None for -1, unknown.
    """

    nside: int = 64
    samples: int = 5
    n_stars: NDArray[np.int64] | None = None

    def __post_init__(self) -> None:
        refuse_bad_nside(self.nside)
        if self.samples < 1:
            raise UserError(f"samples: expected at least 1, got {self.samples}")
        if self.n_stars is not None and self.n_stars.shape != (self.pixels,):
            raise UserError(
                f"n_stars: expected one number for each of {self.pixels} pixels, got shape "
                f"{self.n_stars.shape}"
            )

    @property
    def pixels(self) -> int:
        """12 nside²."""
        return 12 * self.nside**2


def write_bayestar(
    path: str | Path,
    field: AbstractDensityField,
    options: BayestarOptions,
    provenance: Provenance,
    overwrite: bool = False,
) -> LayoutCounts:
    """Write pixel_info, samples and best_fit; `outside` counts numbers beyond the box."""
    _places.refuse_sun_outside(field)
    system = system_named(_BAYESTAR)
    factor = conversion(field.system, system)
    request = MapRequest((Quantity.MEAN, Quantity.SAMPLES), options.samples)
    field.check(request)
    note = _provenance.conversion_note(field.system, system) + "; E(B-V) = 0.884 x Bayestar19"
    shape = (options.pixels, options.samples, len(DISTANCE_MODULI))
    outside = 0
    with replacing(Path(path), overwrite) as partial, new_hdf5(partial) as (file, disk):
        _provenance.write_attributes(file, "mag", system, provenance, note)
        samples = file.create_dataset("samples", shape, "f4")
        best = file.create_dataset("best_fit", (shape[0], shape[2]), "f4")
        info = file.create_dataset("pixel_info", shape[:1], _PIXEL)
        info.attrs["DM_bin_edges"] = DISTANCE_MODULI
        for part, rays in _places.pixel_blocks(options.nside, shape[1] * shape[2]):
            integrals = _places.cumulative(field, rays, _DISTANCES, request)
            samples[part] = integrals["samples"].transpose(1, 0, 2) * np.float32(factor)
            best[part] = integrals["mean"] * np.float32(factor)
            info[part] = _pixel_info(field, options, part, rays)
            disk.check()
            outside += int((_places.exits(field, rays)[:, None] < _DISTANCES).sum())
    per_distance = options.samples + 1
    return LayoutCounts(options.pixels * shape[2] * per_distance, outside * per_distance)


def _pixel_info(
    field: AbstractDensityField, options: BayestarOptions, part: slice, rays: Array
) -> NDArray[np.void]:
    rows = np.zeros(len(rays), _PIXEL)
    rows["nside"] = options.nside
    rows["healpix_index"] = np.arange(part.start, part.stop)
    rows["converged"] = 1
    rows["n_stars"] = -1 if options.n_stars is None else options.n_stars[part]
    places = rays[:, None] * _DISTANCES[:, None]
    coverage = _places.at_places(field, places, MapRequest((Quantity.COVERAGE,)))["coverage"]
    reliable = coverage >= _TRUSTED
    first = reliable.argmax(-1)
    # Beyond the box coverage is NaN, so every ray ends.
    ended = ~reliable & (np.arange(len(_DISTANCES)) > first[:, None])
    last = np.where(ended.any(-1), ended.argmax(-1), len(_DISTANCES)) - 1
    for name, index in (("DM_reliable_min", first), ("DM_reliable_max", last)):
        rows[name] = np.where(reliable.any(-1), DISTANCE_MODULI[index], np.nan)
    return rows
