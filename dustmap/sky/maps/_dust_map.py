"""The map that users load and ask, in the coordinates that they have."""

import logging
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, final

import numpy as np
from astropy import units as u
from astropy.coordinates import SkyCoord
from numpy.typing import ArrayLike, NDArray

from dustmap.errors import UserError
from dustmap.gp import RegularGrid
from dustmap.sky._coordinates import coordinates_of, directions_of, positions_of
from dustmap.sky.maps._answers import Answers, probabilities
from dustmap.sky.maps._between import CellVariance
from dustmap.sky.maps._cubes import AbstractCubes, Cube, Layout, MemoryCubes, ZarrCubes
from dustmap.sky.maps._datasets import cubes_of, profile_of, sky_of
from dustmap.sky.maps._fits_cubes import FitsCubes
from dustmap.sky.maps._one_grid import VOXELS, OneGridCubes, finest_grid
from dustmap.sky.maps._quantities import (
    DATA_DOMINATED,
    MapRequest,
    Mode,
    Outside,
    Quantity,
)
from dustmap.sky.maps._trilinear import over_voxels, within_box
from dustmap.sky.systems import ExtinctionSystem, system_named

if TYPE_CHECKING:
    import xarray as xr

    from dustmap.sky.maps._field import AbstractDensityField
    from dustmap.sky.view import MapView

log = logging.getLogger(__name__)

_MEMORY = 4 * 2**30
_EQUATORIAL = ("icrs", "fk4", "fk5", "fk4noeterms")
_EXPECTED = "expected a run directory, a map.zarr or a map.fits"


@final
class DustMap:
    """A dust density ρ in mag/pc on voxels whose centres are the nodes of `grid`.

    Between centres ρ is their trilinear interpolant; beyond the outermost it is unknown. Integrals
    A(<d) = ∫ρ ds from the Sun are exact for that interpolant. `query` has the arguments of the
    dustmaps package, and `open` reads what `dustmap run` and `dustmap export` write; numbers are
    read when a question needs them.

    Examples
    --------
    >>> from astropy import units as u
    >>> grid = RegularGrid((-100.0,) * 3, (50.0,) * 3, (5,) * 3)
    >>> one = np.ones((5, 5, 5), np.float32)
    >>> density = DustMap.from_arrays(grid, {Quantity.MEAN: 0.002 * one}, "A_V")
    >>> l, b, distance = [30, 40] * u.deg, [0, 5] * u.deg, [50, 80] * u.pc
    >>> stars = SkyCoord(l, b, distance, frame="galactic")
    >>> density.query(stars), density.query(stars, integrated=True).round(3)
    (array([0.002, 0.002]), array([0.1 , 0.16]))
    """

    def __init__(self, cubes: AbstractCubes, seed: int | None = None, memory: int = _MEMORY):
        """seed: of random_sample; memory: bytes of whole cubes that are kept."""
        self._answers = Answers(cubes, seed, memory, cubes.finer)
        self._memory = memory

    @classmethod
    def open(cls, path: str | Path, seed: int | None = None, memory: int = _MEMORY) -> Self:
        """Open a run's directory, a map.zarr or a map.fits."""
        return cls(_cubes_at(Path(path)), seed, memory)

    @classmethod
    def from_arrays(
        cls,
        grid: RegularGrid,
        arrays: Mapping[Quantity, NDArray[np.float32]],
        system: ExtinctionSystem | str,
        positive: bool = False,
        between: tuple[CellVariance, ...] = (),
    ) -> Self:
        """Build from arrays (z, y, x), samples (S, z, y, x), and `Layout.between`."""
        named = system_named(system) if isinstance(system, str) else system
        samples = len(arrays[Quantity.SAMPLES]) if Quantity.SAMPLES in arrays else 0
        layout = Layout(grid, named, tuple(arrays), samples, positive, between)
        return cls(MemoryCubes(layout, arrays))

    @classmethod
    def from_nodes(
        cls,
        grid: RegularGrid,
        mean: NDArray[np.float64],
        std: NDArray[np.float64] | None,
        system: ExtinctionSystem | str,
        positive: bool = False,
    ) -> Self:
        """Build from values mean, std (M,) at the nodes, flattened in the C order of (x, y, z)."""
        nodes = {Quantity.MEAN: mean} | ({} if std is None else {Quantity.STD: std})
        arrays = {
            quantity: np.ascontiguousarray(np.reshape(values, grid.shape).transpose(), np.float32)
            for quantity, values in nodes.items()
        }
        return cls.from_arrays(grid, arrays, system, positive)

    @classmethod
    def from_field(
        cls, field: "AbstractDensityField", grid: RegularGrid, request: MapRequest
    ) -> Self:
        """Evaluate a request of a field on the nodes of `grid`, in memory."""
        slabs = [slab.arrays for slab in field.planes(grid, request)]
        arrays = {
            q: np.concatenate([slab[q.value] for slab in slabs], axis=-3)
            for q in request.quantities
        }
        rest = field.positive, field.traits.between
        return cls.from_arrays(grid, arrays, field.system, *rest)

    def on_one_grid(self) -> "DustMap":
        """Return the map itself, or where it has finer levels that of `finest_grid`, whose voxels
        are interpolated as they are read; levels that are too fine for it are left out, and named.

        Levels do not go over into each other: within a voxel of the face of one, where the density
        jumps, that of the map is between both.
        """
        if not self.cubes.finer:
            return self
        spacings = [cubes.layout.grid.spacing for cubes in self.cubes.finer]
        grid = finest_grid(self.grid, spacings)
        if grid.spacing != spacings[-1]:
            log.warning(
                "the finest levels are left out, down to voxels of %s pc: one grid with all levels "
                "has at most %d voxels; `query` and exports have them",
                *(" x ".join(f"{h:g}" for h in grid.spacing), VOXELS),
            )
        layouts = [cubes.layout for cubes in (self.cubes, *self.cubes.finer)]
        # Every level has those of all grids, but in files of before.
        between = {rest.nodes: rest for layout in layouts for rest in layout.between}
        described = replace(self.layout, grid=grid, between=tuple(between.values()))
        return DustMap(OneGridCubes(described, self._answers), memory=self._memory)

    @property
    def finest_spacing(self) -> float:
        """Least distance of voxels in pc, of all levels."""
        return self._answers.finest_spacing

    def over_voxels(self) -> "DustMap":
        """Return means over voxels, of the finest level, with std and others of samples alone."""
        whole, positive = self.on_one_grid(), self.layout.positive
        means = over_voxels(whole._answers.reader)
        return DustMap.from_arrays(whole.grid, means, self.system, positive)

    def __repr__(self) -> str:
        """Box, spacing, system, quantities and samples."""
        grid = self.grid
        faces = zip("XYZ", grid.lower, grid.upper, strict=True)
        box = ", ".join(f"{axis} {low:g} to {high:g}" for axis, low, high in faces)
        steps = grid.spacing if len(set(grid.spacing)) > 1 else grid.spacing[:1]
        spacing = " x ".join(f"{step:g}" for step in steps)
        held = [q.value for q in self.available if q is not Quantity.SAMPLES]
        voxels = " x ".join(map(str, grid.shape))
        finer = [f"{min(cubes.layout.grid.spacing):g}" for cubes in self.cubes.finer]
        levels = f"finer levels of {', '.join(finer)} pc; " if finer else ""
        return (
            f"DustMap({self.system.name}; {box} pc; {voxels} voxels of {spacing} pc; {levels}"
            f"{', '.join([*held, f'{self.n_samples} samples'])})"
        )

    @property
    def cubes(self) -> AbstractCubes:
        """The arrays, wherever they are."""
        return self._answers.reader.cubes

    @property
    def layout(self) -> Layout:
        """Voxels, system and quantities."""
        return self._answers.reader.cubes.layout

    @property
    def grid(self) -> RegularGrid:
        """Grid whose nodes are the voxels' centres."""
        return self.layout.grid

    @property
    def finer(self) -> "tuple[DustMap, ...]":
        """Maps of finer levels, each within the box of the one before; questions have the finest
        that contains a place, cubes are those of each level."""
        return tuple(DustMap(cubes, memory=self._memory) for cubes in self.cubes.finer)

    @property
    def system(self) -> ExtinctionSystem:
        """Extinction system of the densities."""
        return self.layout.system

    @property
    def available(self) -> tuple[Quantity, ...]:
        """Quantities of the map."""
        return self.layout.quantities

    @property
    def n_samples(self) -> int:
        """Samples that the map holds; 0 for none."""
        return self.layout.samples

    @property
    def monte_carlo_error(self) -> float:
        """Relative standard error 1/√S of a standard deviation from the S samples; of a positive
        density with a standard deviation τ of its logarithm (1 + 1/(1 − e^{−τ²})) τ² times that:
        1.7 and 2.6 times for τ of 0.7 and 1."""
        return 1.0 / math.sqrt(self.n_samples) if self.n_samples else math.nan

    @property
    def unit(self) -> u.UnitBase:
        """Unit of densities; that of integrals is mag."""
        return u.mag / u.pc

    @property
    def bounds(self) -> u.Quantity:
        """Lower and upper corner of the box of voxel centres, (2, 3)."""
        return np.array([self.grid.lower, self.grid.upper]) * u.pc

    @property
    def distance_bounds(self) -> u.Quantity:
        """Distance of the box from the Sun, of its nearest and of its farthest point, (2,)."""
        low, high = np.array(self.grid.lower), np.array(self.grid.upper)
        nearest = np.linalg.norm(np.clip(0.0, low, high))
        return np.array([nearest, np.linalg.norm(np.maximum(abs(low), abs(high)))]) * u.pc

    @property
    def distances(self) -> u.Quantity:
        """Distances from the nearest to the farthest point of the box, at most a voxel apart."""
        near, far = self.distance_bounds.to_value(u.pc)
        count = math.ceil((far - near) / self.finest_spacing) + 1
        return np.linspace(near, far, count) * u.pc

    @property
    def mean(self) -> NDArray[np.float32]:
        """The whole cube of the mean (z, y, x)."""
        return self.cube(Quantity.MEAN)

    @property
    def std(self) -> NDArray[np.float32] | None:
        """The whole cube of the standard deviation (z, y, x), if there is one."""
        return self.cube(Quantity.STD) if Quantity.STD in self.available else None

    def cube(self, quantity: Quantity, sample: int = 0) -> NDArray[np.float32]:
        """Return a whole cube (z, y, x)."""
        self._answers.require(quantity)
        return self._answers.reader.whole(Cube(quantity, sample))

    def quantities(self) -> dict[str, NDArray[np.float32]]:
        """Return whole cubes (z, y, x) by name, all but the samples."""
        return {q.value: self.cube(q) for q in self.available if q is not Quantity.SAMPLES}

    def axes(self) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
        """Return voxel centres x, y, z in pc."""
        return self.layout.axes

    def nearest_slice(self, z: float) -> int:
        """Find the slice whose centre is nearest to z in pc; z must lie inside the map."""
        return self.layout.nearest_slice(2, z)

    def __call__(self, coords: SkyCoord, **options: Any) -> NDArray[np.float64]:
        """Return `query(coords, ...)`."""
        return self.query(coords, **options)

    def query_gal(
        self, l: ArrayLike, b: ArrayLike, d: ArrayLike | None = None, **options: Any
    ) -> NDArray[np.float64]:
        """Query at Galactic coordinates.

        Bare numbers are degrees and kpc, as in the dustmaps package: give `d` a unit.
        """
        return self(coordinates_of({"l": l, "b": b}, d, "galactic"), **options)

    def query_equ(
        self,
        ra: ArrayLike,
        dec: ArrayLike,
        d: ArrayLike | None = None,
        frame: str = "icrs",
        **options: Any,
    ) -> NDArray[np.float64]:
        """Query at equatorial coordinates.

        Bare numbers are degrees and kpc, as in the dustmaps package: give `d` a unit.
        """
        if frame not in _EQUATORIAL:
            raise UserError(f"frame: expected one of {', '.join(_EQUATORIAL)}, got {frame!r}")
        return self(coordinates_of({"ra": ra, "dec": dec}, d, frame), **options)

    def query(
        self,
        coords: SkyCoord,
        mode: str = "mean",
        pct: ArrayLike | None = None,
        integrated: bool = False,
        outside: str = "nan",
    ) -> NDArray[np.float64]:
        """Return density in mag/pc, or its integral A(<d) in mag from the Sun, at `coords`.

        mode: "mean", "std", "median", "percentile" (of `pct`, in percent), "samples",
        "random_sample" (one sample for all coordinates). The result has the shape of `coords`;
        samples, and percentiles if `pct` is a sequence, are along one more, last axis, as in the
        dustmaps package.

        outside: beyond the outermost voxel centres, and for rays that run there, "nan", "error",
        or "truncate": nothing is there, and A(<d) counts what is inside. Their number is logged.

        Density: std, median and percentiles are the map's cubes at voxel centres. Between them
        those of a positive density, which is the interpolant of its samples, follow the samples;
        without samples, or with a density of any sign, they are the interpolated cubes (of a
        positive density at least its std). Percentiles that have no cube follow from those that
        have, by their log-normal distribution, or where the density has any sign from mean and
        std; what else has none comes from the samples. Integrals: the mean is that of the mean
        cube; std and percentiles come from the S stored samples, with a relative error of
        `monte_carlo_error`.
        """
        asked, policy = Mode.named(mode), Outside.named(outside)
        levels = probabilities(asked, pct)
        positions = positions_of(coords)
        answer = self._answers.integrals if integrated else self._answers.densities
        values = answer(positions, asked, levels, policy)
        several = asked is Mode.SAMPLES or (pct is not None and np.ndim(pct) > 0)
        values = values.T if several else values[0]
        shaped: NDArray[np.float64] = values.reshape((*coords.shape, *values.shape[1:]))
        return shaped[()]  # a number, not an array, of scalar coordinates

    def mean_at(self, points: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the mean at X, Y, Z in pc (N, 3); NaN outside the box of voxel centres."""
        positions = np.asarray(points, np.float64)
        return np.asarray(self._answers.densities(positions, Mode.MEAN, (), Outside.NAN)[0])

    def contains(self, coords: SkyCoord) -> NDArray[np.bool_]:
        """Return which coordinates lie in the box of voxel centres."""
        return within_box(self.grid, positions_of(coords)).reshape(coords.shape)

    def coverage(self, coords: SkyCoord) -> NDArray[np.float64]:
        """Return 1 − posterior variance / prior variance, 0 (prior) to 1 (data); NaN outside.

        Variances of ln ρ where the density is positive.
        """
        self._answers.require(Quantity.COVERAGE)
        positions = positions_of(coords)
        values = self._answers.interpolated((Cube(Quantity.COVERAGE),), positions, Outside.NAN)[0]
        covered: NDArray[np.float64] = values.reshape(coords.shape)
        return covered[()]

    def data_dominated(self, coords: SkyCoord) -> NDArray[np.bool_]:
        """Return whether coverage exceeds 0.5: the data say what the density is; False outside."""
        return np.asarray(self.coverage(coords) > DATA_DOMINATED)

    def reliable_distances(self, coords: SkyCoord, least: float = 0.25) -> u.Quantity:
        """Return distances [from, to] (..., 2) within which the data reach along each direction.

        `from` is where coverage along the ray from the Sun first is at least `least`, `to` where
        it first falls below again, or the face of the box. NaN where it never is. The distances
        of `coords` do not matter. Coverage c from S samples has a standard error of (1 − c) √(2/S)
        (√(4/S) where they come in pairs), so that it is averaged over four of the finest voxels
        along the ray: gaps of one or two do not end it, ends are a voxel too far or too near, and
        where it is about `least` over a long way, `to` is uncertain by as much.
        """
        self._answers.require(Quantity.COVERAGE)
        ranges = self._answers.reliable_range(directions_of(coords), least)
        return ranges.reshape(*coords.shape, 2) * u.pc

    def profile(self, coords: SkyCoord, distances: u.Quantity | None = None) -> "xr.Dataset":
        """Follow one direction: density and extinction A(<d), with their errors.

        Parameters
        ----------
        coords : one direction, with or without distance
        distances : (K,)
            From the Sun; half a voxel apart to the face of the map if they are left out.

        Returns
        -------
        xarray.Dataset
            density_mean, extinction_mean (distance), and as far as the map has them _std, _p16 and
            _p84 of both and coverage. NaN where the map does not reach.

        Examples
        --------
        >>> from astropy import units as u
        >>> grid = RegularGrid((-100.0,) * 3, (50.0,) * 3, (5,) * 3)
        >>> one = np.ones((5, 5, 5), np.float32)
        >>> density = DustMap.from_arrays(grid, {Quantity.MEAN: 0.002 * one}, "A_V")
        >>> towards = SkyCoord(l=30 * u.deg, b=5 * u.deg, frame="galactic")
        >>> density.profile(towards, [50, 80] * u.pc).extinction_mean.values.round(3)
        array([0.1 , 0.16])
        """
        return profile_of(self, coords, distances)

    def to_xarray(self) -> "xr.Dataset":
        """Return all cubes, in memory: density_mean and its like (z, y, x), axes in pc.

        Variables have the names of map.zarr; density_samples have one more axis, `sample`. Of a map
        with levels they are the coarsest's: `on_one_grid` has the finest everywhere.
        """
        return cubes_of(self)

    def to_healpix(
        self, nside: int, distances: u.Quantity, integrated: bool = True, nest: bool = False
    ) -> "xr.Dataset":
        """Return the sky at distances (K,) from the Sun, in HEALPix pixels of Galactic l, b.

        extinction_mean (distance, pixel), the extinction A(<d) towards pixel centres, or, not
        `integrated`, density_mean there; their _std if the map has it. NaN where the map does not
        reach. Pixels are in ring order, or `nest`.
        """
        return sky_of(self, nside, distances, integrated, nest)

    def view(
        self, points: Mapping[str, SkyCoord] | None = None, samples: int = 8, **options: Any
    ) -> "MapView":
        """Make a page to turn, to cut and to ask, which Jupyter shows: `dustmap.sky.view_of`."""
        from dustmap.sky.view import view_of

        return view_of(self, points, samples, **options)


def _cubes_at(path: Path) -> AbstractCubes:
    """Open the cubes of a run's directory, a map.zarr or a map.fits."""
    if any((path / name).is_file() for name in ("zarr.json", ".zgroup")):
        return ZarrCubes(path)
    if path.is_file():
        if path.suffix.lower() in {".fits", ".fit"}:
            return FitsCubes(path)
        raise UserError(f"{path}: {_EXPECTED}")
    for name in ("map.zarr", "map.fits"):
        if (path / name).exists():
            return _cubes_at(path / name)
    if (path / "config.toml").is_file():
        raise FileNotFoundError(f"{path}: the run has no map; write one with dustmap export")
    raise FileNotFoundError(f"{path}: {_EXPECTED}")
