"""The layouts by name, as a command line asks for them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias, final

from dustmap.gp import RegularGrid
from dustmap.sky._provenance import Provenance
from dustmap.sky.layouts import _shells
from dustmap.sky.layouts._places import LayoutCounts, RadialBins, Shells
from dustmap.sky.layouts._voxels import GTomoOptions, LeikeOptions, write_gtomo, write_leike2020
from dustmap.sky.maps import AbstractDensityField, MapRequest, Quantity

#: Bayestar files have five, where the density has as many.
_BAYESTAR_SAMPLES = 5


@final
@dataclass(frozen=True)
class LayoutRequest:
    """Quantities, voxels, pixels and bins for a layout; each takes what it has a place for.

    request: quantities and samples; grid: the voxels of a cube; nside, bins: of shells and pixels,
    None for 64 and for 516 bins out to the farthest face of the box; shells: in place of bins.
    """

    request: MapRequest
    grid: RegularGrid
    nside: int | None = None
    bins: RadialBins | None = None
    shells: Shells | None = None

    @property
    def pixels(self) -> int:
        """nside, 64 by default."""
        return 64 if self.nside is None else self.nside


#: Writes what is requested of a field; returns the counts of numbers.
Writer: TypeAlias = Callable[
    [Path, AbstractDensityField, LayoutRequest, Provenance, bool], LayoutCounts
]


def _writer(
    write: Callable[[Path, AbstractDensityField, Any, Provenance, bool], LayoutCounts],
    options: Callable[[AbstractDensityField, LayoutRequest], Any],
) -> Writer:
    """Join a writer with how its options follow from a field and a request."""
    return lambda path, field, asked, provenance, overwrite: write(
        path, field, options(field, asked), provenance, overwrite
    )


def _healpix(field: AbstractDensityField, asked: LayoutRequest) -> _shells.HealpixOptions:
    """Add A(<d), and its standard deviation where the density has samples."""
    integrated = (Quantity.MEAN, Quantity.STD) if field.n_samples > 1 else (Quantity.MEAN,)
    return _shells.HealpixOptions(
        asked.shells or asked.bins, asked.pixels, asked.request, integrated
    )


def _edenhofer2023(_: AbstractDensityField, asked: LayoutRequest) -> _shells.EdenhoferOptions:
    """Choose the file of samples if only these are asked for, else that of mean and std."""
    samples = 0 if asked.request.cubes else asked.request.samples
    return _shells.EdenhoferOptions(asked.bins, asked.pixels, samples)


def _bayestar(field: AbstractDensityField, asked: LayoutRequest) -> _shells.BayestarOptions:
    samples = asked.request.samples or min(_BAYESTAR_SAMPLES, max(1, field.n_samples))
    return _shells.BayestarOptions(asked.pixels, samples)


def _gtomo(_: AbstractDensityField, asked: LayoutRequest) -> GTomoOptions:
    """Choose the one cube that is requested, or the mean where there are several."""
    cubes = asked.request.cubes
    return GTomoOptions(asked.grid, cubes[0] if len(cubes) == 1 else Quantity.MEAN)


#: Writers of the layouts by the names that `dustmap export --format` takes.
LAYOUTS: Mapping[str, Writer] = MappingProxyType(
    {
        "healpix": _writer(_shells.write_healpix, _healpix),
        "edenhofer2023": _writer(_shells.write_edenhofer2023, _edenhofer2023),
        "leike2020": _writer(write_leike2020, lambda field, asked: LeikeOptions()),
        "bayestar": _writer(_shells.write_bayestar, _bayestar),
        "gtomo": _writer(write_gtomo, _gtomo),
    }
)
