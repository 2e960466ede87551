"""A whole sky from a seed: dust, stars behind it, a survey's measurements, and the file of them.

True extinctions are ∫ ρ ds along rays, exact for the trilinear interpolant of the density.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import final

import numpy as np
from astropy import units as u
from astropy.table import QTable
from numpy.typing import NDArray
from scipy.ndimage import map_coordinates

from dustmap.gp import RegularGrid
from dustmap.sky._coordinates import galactic
from dustmap.sky._provenance import Provenance
from dustmap.sky.maps import DustMap
from dustmap.sky.simulation._dust import AbstractDust, Stream, StructuredDust, check_positive
from dustmap.sky.simulation._stars import Measured, Measurements, Population
from dustmap.sky.stars import ExactDistances, FlatParallax, ParallaxDistances, StarTable
from dustmap.sky.systems import ExtinctionSystem, conversion, system_named
from dustmap.tables import write_table

#: Rays at once: some 100 MB of crossings for a grid of 200 nodes an axis.
RAYS_AT_ONCE = 10_000
#: Places that are tried at once for a star. Part of what a seed means.
BLOCK = 8192
#: Blocks without a single new star after which there is none to be expected.
PATIENCE = 100
#: The band of `Population.limit`.
BAND = "A_G"
DISTANCE_MAX = 10_000.0


def column_density(
    grid: RegularGrid, density: NDArray[np.float64], positions: NDArray[np.float64]
) -> NDArray[np.float64]:
    """∫ ρ ds from the Sun to `positions` (N, 3) through `density` (x, y, z), in mag (N,).

    Between two planes of nodes ρ is a cubic along the ray, which two Gauss points integrate
    exactly. The Sun and the positions must lie in the grid's box.
    """
    _check_inside(grid, positions)
    parts = np.split(positions, range(RAYS_AT_ONCE, len(positions), RAYS_AT_ONCE))
    return np.concatenate([_column_density(grid, density, part) for part in parts])


def _check_inside(grid: RegularGrid, positions: NDArray[np.float64]) -> None:
    lower, upper = np.array(grid.lower), np.array(grid.upper)
    slack = 1e-6 * np.array(grid.spacing)
    if not ((lower <= 0) & (upper >= 0)).all():
        raise ValueError(f"the Sun is outside the box {grid.lower} to {grid.upper} pc: move it")
    outside = ((positions < lower - slack) | (positions > upper + slack)).any(axis=-1)
    if outside.any():
        raise ValueError(
            f"{outside.sum()} of {len(positions)} positions are outside the box {grid.lower} to "
            f"{grid.upper} pc"
        )


def _column_density(
    grid: RegularGrid, density: NDArray[np.float64], positions: NDArray[np.float64]
) -> NDArray[np.float64]:
    ends = _crossings(grid, positions)
    step = np.diff(ends, axis=1)
    ray, segment = np.nonzero(step > 0)
    width, middle = step[ray, segment], ends[ray, segment] + step[ray, segment] / 2
    total = np.zeros(len(positions))
    for sign in (-1.0, 1.0):
        at = middle + sign * width / (2 * math.sqrt(3.0))
        index = (at[:, None] * positions[ray] - np.array(grid.lower)) / np.array(grid.spacing)
        along = map_coordinates(density, index.T, order=1, mode="nearest")
        total += np.bincount(ray, weights=along * width / 2, minlength=len(positions))
    return np.asarray(total * np.linalg.norm(positions, axis=-1))


def _crossings(grid: RegularGrid, positions: NDArray[np.float64]) -> NDArray[np.float64]:
    """Where rays cross planes of nodes, as fractions of their length: (N, K), ascending, 0 to 1."""
    fractions = [np.zeros((len(positions), 1)), np.ones((len(positions), 1))]
    for axis, planes in enumerate(grid.axes()):
        along = positions[:, axis, None]
        # A ray that hardly moves along an axis crosses none of its planes, or all at the Sun.
        with np.errstate(divide="ignore", invalid="ignore"):
            t = planes.numpy()[None, :] / along
        fractions.append(np.clip(np.nan_to_num(t, nan=0.0, posinf=1.0, neginf=0.0), 0.0, 1.0))
    return np.sort(np.concatenate(fractions, axis=1), axis=1)


@final
@dataclass(frozen=True)
class SkyModel:
    """A box in pc around `center`, its dust, its stars, their measurements.

    Extinctions are of `system`; one that converts to A_G dims stars by that, a custom one as it is.
    """

    size: tuple[float, float, float] = (400.0, 400.0, 240.0)
    spacing: float = 10.0
    center: tuple[float, float, float] = (0.0, 0.0, 0.0)
    dust: AbstractDust = field(default_factory=StructuredDust)
    population: Population = field(default_factory=Population)
    measurements: Measurements = field(default_factory=Measurements)
    system: ExtinctionSystem = field(default_factory=lambda: system_named("A_V"))

    def __post_init__(self) -> None:
        check_positive(self, "spacing")
        if not all(self.spacing <= size < np.inf for size in self.size):
            raise ValueError(f"size must be at least spacing = {self.spacing:g}, got {self.size}")
        if not all(abs(c) <= size / 2 for c, size in zip(self.center, self.size, strict=True)):
            raise ValueError(
                f"the Sun must be in the box: center {self.center} is more than half of size "
                f"{self.size} away"
            )

    def grid(self) -> RegularGrid:
        """Nodes `spacing` apart, or a little less to end on the faces of the box."""
        shape = [int(np.ceil(size / self.spacing - 1e-9)) + 1 for size in self.size]
        faces = list(zip(self.center, self.size, strict=True))
        return RegularGrid.from_bounds(
            [c - size / 2 for c, size in faces], [c + size / 2 for c, size in faces], shape
        )

    def dimming(self) -> float:
        """A_G over the extinction."""
        if self.system.per_a_v is None:
            return 1.0
        return conversion(self.system, system_named(BAND))


@final
@dataclass(frozen=True, eq=False)
class SimulatedSky:
    """N stars as a survey gives them, and the truth.

    stars: with parallaxes; truth: the density at the nodes; true_distance (N,) in pc,
    true_extinction (N,) in mag without noise, magnitude (N,) apparent and dimmed by the dust,
    outlier (N,) whether the extinction is one.
    """

    stars: StarTable
    truth: DustMap
    true_distance: NDArray[np.float64]
    true_extinction: NDArray[np.float64]
    magnitude: NDArray[np.float64]
    outlier: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.stars)

    def at_true_distances(self) -> StarTable:
        """The stars with the distances they have, in place of parallaxes."""
        return replace(self.stars, distances=ExactDistances(self.true_distance))


@final
@dataclass(frozen=True, eq=False)
class _Block:
    """Stars of one block of candidates that are bright enough."""

    positions: NDArray[np.float64]
    extinction: NDArray[np.float64]
    magnitude: NDArray[np.float64]
    measured: Measured


def simulate(model: SkyModel, stars: int, seed: int) -> SimulatedSky:
    """Draw a sky; the same seed gives the same sky, and more stars are those of fewer and more."""
    if stars < 1:
        raise ValueError(f"stars must be at least 1, got {stars}")
    if seed < 0:
        raise ValueError(f"seed must not be negative, got {seed}")
    grid = model.grid()
    density = model.dust.density(grid, seed)
    blocks: list[_Block] = []
    for block in _blocks(model, grid, density, seed):
        blocks.append(block)
        if sum(len(part.extinction) for part in blocks) >= stars:
            break
    truth = DustMap.from_nodes(grid, density.ravel(), None, model.system)
    return _assemble(model, blocks, stars, truth)


def _blocks(
    model: SkyModel, grid: RegularGrid, density: NDArray[np.float64], seed: int
) -> Iterator[_Block]:
    """Stars, some at a time, without end."""
    index = barren = 0
    while True:
        candidates = model.population.candidates(grid, Stream.STARS.generator(seed, index), BLOCK)
        extinction = column_density(grid, density, candidates.positions)
        magnitude = candidates.magnitude + model.dimming() * extinction
        # All candidates are measured, so that the selection of one does not move another's noise.
        measured = model.measurements.measure(
            np.linalg.norm(candidates.positions, axis=-1),
            extinction,
            magnitude,
            Stream.NOISE.generator(seed, index),
        )
        seen = magnitude <= model.population.limit
        barren = 0 if seen.any() else barren + 1
        if barren == PATIENCE:
            raise ValueError(
                f"none of {BLOCK * PATIENCE:,} places in the box holds a star brighter than the "
                f"limit {model.population.limit:g}: raise it, or take less dust"
            )
        yield _Block(candidates.positions[seen], extinction[seen], magnitude[seen], measured[seen])
        index += 1


def _assemble(model: SkyModel, blocks: list[_Block], stars: int, truth: DustMap) -> SimulatedSky:
    def column(values: list[NDArray[np.float64]]) -> NDArray[np.float64]:
        return np.concatenate(values)[:stars]

    l, b, distance = galactic(column([part.positions for part in blocks]))
    measured = [part.measured for part in blocks]
    parallaxes = ParallaxDistances(
        column([part.parallax for part in measured]),
        column([part.parallax_error for part in measured]),
        FlatParallax(DISTANCE_MAX),
    )
    table = StarTable(
        source_id=np.arange(1, stars + 1),
        l=l,
        b=b,
        distances=parallaxes,
        extinction=column([part.extinction for part in measured]),
        extinction_error=column([part.extinction_error for part in measured]),
        system=model.system,
    )
    return SimulatedSky(
        stars=table,
        truth=truth,
        true_distance=distance,
        true_extinction=column([part.extinction for part in blocks]),
        magnitude=column([part.magnitude for part in blocks]),
        outlier=np.concatenate([part.outlier for part in measured])[:stars],
    )


def sky_table(sky: SimulatedSky, exact_distances: bool = False) -> QTable:
    """Make one row a star: what a survey measures, then the truth; units on every column.

    source_id, l, b (deg), parallax and parallax_error (mas), or distance_pc (pc) where the
    distances are to be exact, g_mag, extinction, extinction_error (mag); true_distance_pc,
    true_extinction, outlier. The header names the extinction's system under EXTSYS.
    """
    stars = sky.stars
    columns = {"source_id": stars.source_id, "l": stars.l * u.deg, "b": stars.b * u.deg}
    if exact_distances or not isinstance(stars.distances, ParallaxDistances):
        columns["distance_pc"] = sky.true_distance * u.pc
    else:
        columns["parallax"] = stars.distances.parallax * u.mas
        columns["parallax_error"] = stars.distances.error * u.mas
    columns["g_mag"] = sky.magnitude.astype(np.float32) * u.mag
    columns["extinction"] = stars.extinction * u.mag
    columns["extinction_error"] = stars.extinction_error * u.mag
    columns["true_distance_pc"] = sky.true_distance * u.pc
    columns["true_extinction"] = sky.true_extinction * u.mag
    columns["outlier"] = sky.outlier
    return QTable(columns, meta={"EXTSYS": stars.system.name})


def write_sky(
    path: str | Path,
    sky: SimulatedSky,
    exact_distances: bool = False,
    overwrite: bool = False,
    provenance: Provenance | None = None,
) -> None:
    """Write the table of `sky_table` in the format that the name's ending says.

    provenance: goes into the header, of formats that have one.
    """
    table = sky_table(sky, exact_distances)
    table.meta |= {} if provenance is None else provenance.metadata()
    write_table(path, table, overwrite)
