"""A whole sky from a seed: dust, stars behind it, a survey's measurements, and the file of them.

True extinctions are ∫ ρ ds along rays, exact for the trilinear interpolant of the density.
A disc of stars seen to a limiting magnitude, with extinctions and parallaxes whose errors grow as
those of a survey do.
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias, final

import numpy as np
from astropy import units as u
from astropy.table import QTable
from numpy.typing import NDArray
from scipy.ndimage import map_coordinates

from dustmap.errors import UserError
from dustmap.gp import RegularGrid
from dustmap.sky._coordinates import galactic
from dustmap.sky._provenance import Provenance
from dustmap.sky.maps import DustMap
from dustmap.sky.maps._trilinear import Rays, quadrature, within_box
from dustmap.sky.simulation import _dust
from dustmap.sky.simulation._dust import SUN_RADIUS, Stream, check_between, check_positive
from dustmap.sky.stars import ExactDistances, FlatParallax, ParallaxDistances, StarTable
from dustmap.sky.systems import ExtinctionSystem, conversion, system_named
from dustmap.tables import write_table

#: Columns (N, ...) of stars by name.
Columns: TypeAlias = dict[str, NDArray[Any]]
#: Half of the variance of an extinction's error comes from photons at this magnitude.
TYPICAL_MAGNITUDE = 15.0
#: Behind so much dust no survey sees a star, and errors need not overflow.
UNSEEN = 40.0


@final
@dataclass(frozen=True)
class Candidates:
    """Stars that would be seen were there no dust: positions (N, 3) in pc, magnitude (N,)."""

    positions: NDArray[np.float64]
    magnitude: NDArray[np.float64]


@final
@dataclass(frozen=True)
class Population:
    """Stars of number density ∝ exp(−|z − z₀|/height − R/length), z₀ = −sun_height, in pc.

    Attributes
    ----------
    limit : apparent magnitude, extinction included, of the faintest star in the catalog
    brightest, faintest, slope : absolute magnitudes M, of density ∝ 10^(slope · M)
    height, length, sun_height : of the disc, in pc
    """

    limit: float = 17.5
    brightest: float = -1.0
    faintest: float = 12.0
    slope: float = 0.15
    height: float = 300.0
    length: float = 2600.0
    sun_height: float = 20.8

    def __post_init__(self) -> None:
        check_positive(self, "slope", "height", "length")
        check_between(self, -1000.0, 1000.0, "sun_height")
        check_between(self, self.brightest, math.inf, "faintest")
        check_between(self, self.brightest, math.inf, "limit")

    def candidates(self, grid: RegularGrid, rng: np.random.Generator, tries: int) -> Candidates:
        """Draw `tries` places, uniform in the grid's box; keep those with a star bright enough."""
        positions = rng.uniform(grid.lower, grid.upper, (tries, 3))
        keep, shine = rng.uniform(size=(2, tries))
        distance = np.linalg.norm(positions, axis=-1)
        # The faintest absolute magnitude that is seen from there, if nothing is in between.
        modulus = 5 * np.log10(np.maximum(distance, 1e-3) / 10)
        reach = np.clip(self.limit - modulus, self.brightest, self.faintest)
        seen = self._below(reach) / self._below(np.array(self.faintest))
        # Relative to the largest possible number density in the box.
        inner = max(0.0, SUN_RADIUS - grid.upper[0])
        disc = _dust.Disc(self.height, self.length, self.sun_height)
        kept = keep < disc.factor(positions, inner) * seen
        # The inverse of the distribution of M, cut at what is seen.
        low = 10 ** (self.slope * self.brightest)
        absolute = np.log10(low + shine * self._below(reach)) / self.slope
        return Candidates(positions[kept], (absolute + modulus)[kept])

    def _below(self, magnitude: NDArray[np.float64]) -> NDArray[np.float64]:
        """Count stars brighter than an absolute magnitude, in units of slope · ln 10 of them."""
        return np.asarray(10 ** (self.slope * magnitude) - 10 ** (self.slope * self.brightest))


@final
@dataclass(frozen=True)
class Measurements:
    """Errors that grow with magnitude, and outliers among the extinctions.

    The error of an extinction is error · √((1 + 10^(0.4 (G − 15)))/2) mag, times a factor from star
    to star of which `scatter` is the standard deviation of the logarithm. The error of a parallax
    is parallax_scale · √(40 + 800 z + 30 z²) µas with z = 10^(0.4 (max(G, 13) − 15)), Gaia's of
    its third release for a scale of 1. A fraction `outliers` of the extinctions is off by
    `outlier_size` of its errors more, normally distributed.

    Examples
    --------
    >>> Measurements().parallax_error(np.array([13.0, 18.0])).round(3)  # Gaia's, in mas
    array([0.013, 0.142])
    """

    error: float = 0.03
    scatter: float = 0.3
    parallax_scale: float = 1.0
    outliers: float = 0.01
    outlier_size: float = 10.0

    def __post_init__(self) -> None:
        check_positive(self, "error", "parallax_scale", "outlier_size")
        check_between(self, 0.0, 3.0, "scatter")
        check_between(self, 0.0, 0.5, "outliers")

    def parallax_error(self, magnitude: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return errors in mas (N,)."""
        z = 10 ** (0.4 * (np.clip(magnitude, 13.0, UNSEEN) - 15.0))
        return np.asarray(1e-3 * self.parallax_scale * np.sqrt(40 + 800 * z + 30 * z**2))

    def extinction_error(self, magnitude: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return errors in mag (N,), those of the typical star of a magnitude."""
        photons = 10 ** (0.4 * (np.minimum(magnitude, UNSEEN) - TYPICAL_MAGNITUDE))
        return np.asarray(self.error * np.sqrt((1 + photons) / 2))

    def measure(
        self,
        distance: NDArray[np.float64],
        extinction: NDArray[np.float64],
        magnitude: NDArray[np.float64],
        rng: np.random.Generator,
    ) -> Columns:
        """Measure stars at `distance` in pc behind `extinction` in mag, of apparent magnitudes.

        parallax and its error (N,) in mas, extinction and its error (N,) in mag, outlier (N,).
        """
        normal = rng.standard_normal((4, len(distance)))
        outlier = rng.uniform(size=len(distance)) < self.outliers
        parallax_error = self.parallax_error(magnitude)
        error = self.extinction_error(magnitude) * np.exp(self.scatter * normal[2])
        off = normal[1] + np.where(outlier, self.outlier_size * normal[3], 0.0)
        return {
            "parallax": 1000.0 / distance + parallax_error * normal[0],
            "parallax_error": parallax_error,
            "extinction": extinction + error * off,
            "extinction_error": error,
            "outlier": outlier,
        }


#: Places that are tried at once for a star. Part of what a seed means.
BLOCK = 8192
#: Blocks without a single new star after which there is none to be expected.
PATIENCE = 100
#: The band of `Population.limit`.
LIMIT_BAND = "A_G"
DISTANCE_MAX = 10_000.0


def column_density(
    grid: RegularGrid, density: NDArray[np.float64], positions: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Integrate ρ from the Sun to `positions` (N, 3) through `density` (x, y, z), in mag (N,).

    The Sun and the positions must lie in the grid's box.

    Examples
    --------
    >>> grid = RegularGrid((-100.0,) * 3, (100.0,) * 3, (3,) * 3)
    >>> column_density(grid, np.full((3, 3, 3), 0.002), np.array([[50.0, 0.0, 0.0]]))
    array([0.1])
    """
    lower, upper, spacing = map(np.array, (grid.lower, grid.upper, grid.spacing))
    if not ((lower <= 0) & (upper >= 0)).all():
        raise UserError(f"the Sun is outside the box {grid.lower} to {grid.upper} pc: move it")
    outside = ~within_box(grid, positions)
    if outside.any():
        raise UserError(
            f"{outside.sum()} of {len(positions)} positions are outside the box {grid.lower} to "
            f"{grid.upper} pc"
        )
    distance = np.linalg.norm(positions, axis=-1)
    direction = positions / np.where(distance > 0.0, distance, 1.0)[:, None]
    total = np.zeros(len(positions))
    for rows, points, weight, row in quadrature(grid, Rays(direction, 0.0 * distance, distance)):
        index = (points - lower) / spacing
        values = map_coordinates(density, index.T, order=1, mode="nearest")
        total[rows] = np.bincount(row, values * weight, len(rows))
    return total


@final
@dataclass(frozen=True)
class SkyModel:
    """A box, its dust, its stars and their measurements.

    Attributes
    ----------
    size, spacing, center : of the box, in pc
    dust, population, measurements
    system : of extinctions; one that converts to A_G dims stars by that, a custom one as it is
    """

    size: tuple[float, float, float] = (400.0, 400.0, 240.0)
    spacing: float = 10.0
    center: tuple[float, float, float] = (0.0, 0.0, 0.0)
    dust: _dust.AbstractDust = field(default_factory=_dust.StructuredDust)
    population: Population = field(default_factory=Population)
    measurements: Measurements = field(default_factory=Measurements)
    system: ExtinctionSystem = field(default_factory=lambda: system_named("A_V"))

    def __post_init__(self) -> None:
        check_positive(self, "spacing")
        if not all(self.spacing <= size < np.inf for size in self.size):
            raise UserError(f"size must be at least spacing = {self.spacing:g}, got {self.size}")
        if not all(abs(c) <= size / 2 for c, size in zip(self.center, self.size, strict=True)):
            raise UserError(
                f"the Sun must be in the box: center {self.center} is more than half of size "
                f"{self.size} away"
            )

    def grid(self) -> RegularGrid:
        """Return nodes `spacing` apart, or a little less to end on the faces of the box."""
        shape = [int(np.ceil(size / self.spacing - 1e-9)) + 1 for size in self.size]
        center, half = np.array(self.center), np.array(self.size) / 2
        return RegularGrid.from_bounds((center - half).tolist(), (center + half).tolist(), shape)

    def dimming(self) -> float:
        """Return A_G over the extinction."""
        if self.system.per_a_v is None:
            return 1.0
        return conversion(self.system, system_named(LIMIT_BAND))


@final
@dataclass(frozen=True, eq=False)
class SimulatedSky:
    """N stars as a survey gives them, and the truth.

    Attributes
    ----------
    stars : with parallaxes
    truth : the density at the nodes
    true_distance, true_extinction : (N,)
        In pc and, without noise, in mag.
    magnitude : (N,)
        Apparent, dimmed by the dust.
    outlier : (N,)
        Whether the extinction is one.
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
        """Return the stars with the distances they have, in place of parallaxes."""
        return replace(self.stars, distances=ExactDistances(self.true_distance))


def simulate(model: SkyModel, stars: int, seed: int) -> SimulatedSky:
    """Draw a sky; the same seed gives the same sky, and more stars are those of fewer and more.

    Examples
    --------
    >>> small = SkyModel(size=(200.0, 200.0, 100.0), spacing=20.0)
    >>> sky = simulate(small, stars=20, seed=1)
    >>> len(sky.stars), sky.truth.grid.shape
    (20, (11, 11, 6))
    >>> write_sky("sky.fits", sky)
    """
    if stars < 1:
        raise UserError(f"stars must be at least 1, got {stars}")
    if seed < 0:
        raise UserError(f"seed must not be negative, got {seed}")
    grid = model.grid()
    density = model.dust.density(grid, seed)
    blocks: list[Columns] = []
    for block in _blocks(model, grid, density, seed):
        blocks.append(block)
        if sum(len(part["magnitude"]) for part in blocks) >= stars:
            break
    columns = {
        name: np.concatenate([block[name] for block in blocks])[:stars] for name in blocks[0]
    }
    truth = DustMap.from_nodes(grid, density.ravel(), None, model.system)
    l, b, distance = galactic(columns["positions"])
    table = StarTable(
        source_id=np.arange(1, stars + 1),
        l=l,
        b=b,
        distances=ParallaxDistances(
            columns["parallax"], columns["parallax_error"], FlatParallax(DISTANCE_MAX)
        ),
        extinction=columns["extinction"],
        extinction_error=columns["extinction_error"],
        system=model.system,
    )
    return SimulatedSky(
        stars=table,
        truth=truth,
        true_distance=distance,
        true_extinction=columns["true_extinction"],
        magnitude=columns["magnitude"],
        outlier=columns["outlier"],
    )


def _blocks(
    model: SkyModel, grid: RegularGrid, density: NDArray[np.float64], seed: int
) -> Iterator[Columns]:
    """Yield the stars bright enough of one block of candidates after the other, without end."""
    barren = 0
    for index in itertools.count():
        candidates = model.population.candidates(grid, Stream.STARS.generator(seed, index), BLOCK)
        extinction = column_density(grid, density, candidates.positions)
        magnitude = candidates.magnitude + model.dimming() * extinction
        # All candidates are measured, so that the selection of one does not move another's noise.
        distance = np.linalg.norm(candidates.positions, axis=-1)
        noise = Stream.NOISE.generator(seed, index)
        measured = model.measurements.measure(distance, extinction, magnitude, noise)
        seen = magnitude <= model.population.limit
        barren = 0 if seen.any() else barren + 1
        if barren == PATIENCE:
            raise UserError(
                f"none of {BLOCK * PATIENCE:,} places in the box holds a star brighter than the "
                f"limit {model.population.limit:g}: raise it, or take less dust"
            )
        columns = {
            "positions": candidates.positions,
            "true_extinction": extinction,
            "magnitude": magnitude,
            **measured,
        }
        yield {name: values[seen] for name, values in columns.items()}


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
