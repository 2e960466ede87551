"""A whole sky from a seed: dust, stars behind it, and what a survey would say of them."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import final

import numpy as np
from numpy.typing import NDArray

from dustmap.gp import RegularGrid
from dustmap.sky._coordinates import galactic
from dustmap.sky.maps import DustMap
from dustmap.sky.simulation._checks import check_positive
from dustmap.sky.simulation._columns import column_density
from dustmap.sky.simulation._dust import AbstractDust, StructuredDust
from dustmap.sky.simulation._measurements import Measured, Measurements
from dustmap.sky.simulation._population import Population
from dustmap.sky.simulation._streams import Stream
from dustmap.sky.stars import ExactDistances, FlatParallax, ParallaxDistances, StarTable
from dustmap.sky.systems import ExtinctionSystem, conversion, system_named

#: Places that are tried at once for a star. Part of what a seed means.
BLOCK = 8192
#: Blocks without a single new star after which there is none to be expected.
PATIENCE = 100
#: The band of `Population.limit`.
BAND = "A_G"
DISTANCE_MAX = 10_000.0


@final
@dataclass(frozen=True)
class SkyModel:
    """What is simulated: a box in pc around `center`, its dust, its stars, their measurements.

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
    """Draws a sky; the same seed gives the same sky, and more stars are those of fewer and more."""
    if stars < 1:
        raise ValueError(f"stars must be at least 1, got {stars}")
    if seed < 0:
        raise ValueError(f"seed must not be negative, got {seed}")
    grid = model.grid()
    density = model.dust.density(grid, seed)
    found: list[_Block] = []
    for block in _blocks(model, grid, density, seed):
        found.append(block)
        if sum(len(part.extinction) for part in found) >= stars:
            break
    truth = DustMap.from_nodes(grid, density.ravel(), None, model.system)
    return _assemble(model, found, stars, truth)


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


def _assemble(model: SkyModel, found: list[_Block], stars: int, truth: DustMap) -> SimulatedSky:
    def column(values: list[NDArray[np.float64]]) -> NDArray[np.float64]:
        return np.concatenate(values)[:stars]

    l, b, distance = galactic(column([part.positions for part in found]))
    measured = [part.measured for part in found]
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
        true_extinction=column([part.extinction for part in found]),
        magnitude=column([part.magnitude for part in found]),
        outlier=np.concatenate([part.outlier for part in measured])[:stars],
    )
