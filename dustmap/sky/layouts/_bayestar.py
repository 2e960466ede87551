"""The layout of Bayestar (Green et al. 2015, 2018, 2019): cumulative reddening by pixel, HDF5.

`dustmaps.bayestar.BayestarQuery(map_fname=...)` reads the file. It interpolates linearly in the
distance modulus and, below the first, scales the first value with distance.

- Units are the native ones of Bayestar19, E(B-V) = 0.884 of it, so that the coefficients published
  for that map hold; the attributes of the file state the factor.
- samples (pixels, samples, distances) are integrals of each sample from the Sun, best_fit those
  of the mean.
- Beyond the face of the box nothing is added: such distances are never reliable.
- DM_reliable_min, DM_reliable_max: the distance moduli of the table from the first at which the
  data reach (coverage of at least `trusted`) to the last before they first do not; NaN where none.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import final

import numpy as np
from numpy.typing import NDArray

from dustmap.errors import UserError
from dustmap.sky._provenance import Provenance, conversion_note, write_attributes
from dustmap.sky.layouts import _places
from dustmap.sky.layouts._places import LayoutCounts
from dustmap.sky.maps import AbstractDensityField, MapRequest, Quantity
from dustmap.sky.systems import conversion, system_named
from dustmap.tables import new_hdf5, replacing

#: What readers of this map take for granted: 63 pc to 60 kpc.
DISTANCE_MODULI = np.linspace(4.0, 18.875, 120)
SYSTEM = "Bayestar19"
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
    """nside: of all pixels, a power of two; samples: how many.

    trusted: the least coverage of a reliable distance, as in `DustMap.reliable_distances`; n_stars
    (12 nside²,): stars by NESTED pixel, None for -1, unknown.
    """

    nside: int = 64
    samples: int = 5
    trusted: float = 0.25
    n_stars: NDArray[np.int64] | None = None

    def __post_init__(self) -> None:
        _places.refuse_bad_nside(self.nside)
        if self.samples < 1:
            raise UserError(f"samples: expected at least 1, got {self.samples}")
        if not 0 <= self.trusted <= 1:
            raise UserError(f"trusted: expected a coverage, 0 to 1, got {self.trusted:g}")
        if self.n_stars is not None and self.n_stars.shape != (self.pixels,):
            raise UserError(
                f"n_stars: expected one number for each of {self.pixels} pixels, got shape "
                f"{self.n_stars.shape}"
            )

    @property
    def pixels(self) -> int:
        """12 nside²."""
        return int(12 * self.nside**2)


def write_bayestar(
    path: str | Path,
    field: AbstractDensityField,
    options: BayestarOptions,
    provenance: Provenance,
    overwrite: bool = False,
) -> LayoutCounts:
    """Write pixel_info, samples and best_fit; `outside` counts numbers beyond the box."""
    _places.refuse_sun_outside(field)
    system = system_named(SYSTEM)
    factor = conversion(field.system, system)
    request = MapRequest((Quantity.MEAN, Quantity.SAMPLES), options.samples)
    field.check(request)
    note = conversion_note(field.system, system, factor) + "; E(B-V) = 0.884 x Bayestar19"
    shape = (options.pixels, options.samples, len(DISTANCE_MODULI))
    outside = 0
    with replacing(Path(path), overwrite) as partial, new_hdf5(partial) as (file, disk):
        write_attributes(file, "mag", system, provenance, note)
        samples = file.create_dataset("samples", shape, "f4")
        best = file.create_dataset("best_fit", (shape[0], shape[2]), "f4")
        info = file.create_dataset("pixel_info", shape[:1], _PIXEL)
        info.attrs["DM_bin_edges"] = DISTANCE_MODULI
        for start, stop in _places.pixel_blocks(options.nside, shape[1] * shape[2]):
            rays = _places.directions(options.nside, start, stop)
            integrals = _places.cumulative(field, rays, _distances(), request)
            samples[start:stop] = integrals["samples"].transpose(1, 0, 2) * np.float32(factor)
            best[start:stop] = integrals["mean"] * np.float32(factor)
            info[start:stop] = _pixel_info(field, options, start, rays)
            disk.check()
            outside += int((_distances() > _places.exits(field, rays)[:, None]).sum())
    per_distance = options.samples + 1
    return LayoutCounts(options.pixels * shape[2] * per_distance, outside * per_distance)


def _distances() -> NDArray[np.float64]:
    return 10.0 ** (DISTANCE_MODULI / 5 + 1)


def _pixel_info(
    field: AbstractDensityField, options: BayestarOptions, start: int, rays: NDArray[np.float64]
) -> NDArray[np.void]:
    rows = np.zeros(len(rays), _PIXEL)
    pixels = np.arange(start, start + len(rays))
    low, high = _reliable(field, rays, options.trusted)
    rows["nside"] = options.nside
    rows["healpix_index"] = pixels
    rows["converged"] = 1
    rows["DM_reliable_min"], rows["DM_reliable_max"] = low, high
    rows["n_stars"] = -1 if options.n_stars is None else options.n_stars[pixels]
    return rows


def _reliable(
    field: AbstractDensityField, rays: NDArray[np.float64], trusted: float
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Distance moduli (P,) of the table between which coverage is at least `trusted`."""
    places = rays[:, None] * _distances()[:, None]
    covered = (
        _places.at_places(field, places, MapRequest((Quantity.COVERAGE,)))["coverage"] >= trusted
    )
    some = covered.any(-1)
    first = covered.argmax(-1)
    # Beyond the box coverage is NaN, so every ray ends.
    ended = ~covered & (np.arange(covered.shape[-1]) > first[:, None])
    last = np.where(ended.any(-1), ended.argmax(-1), covered.shape[-1]) - 1
    return (
        np.where(some, DISTANCE_MODULI[first], np.nan),
        np.where(some, DISTANCE_MODULI[last], np.nan),
    )
