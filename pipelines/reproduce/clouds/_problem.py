"""Skies with clouds at known places, and their maps by a run as users start it."""

import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias, final

import numpy as np
from numpy.typing import NDArray

from dustmap import config as configuration
from dustmap.gp import RegularGrid
from dustmap.runs import Stage, execute_run, open_star_map, prepare
from dustmap.sky import galactic
from dustmap.sky.clouds import NamedPlaces
from dustmap.sky.maps import DustMap, MapRequest, Quantity
from dustmap.sky.simulation import AbstractDust, SkyModel, StructuredDust, simulate
from dustmap.sky.simulation._sky import sky_table
from dustmap.tables import write_table
from pipelines.reproduce._timing import stopwatch

Array: TypeAlias = NDArray[np.float64]

#: pc from the Sun to which there are stars, and between which there are clouds.
REACH, NEAREST, FARTHEST = 400.0, 100.0, 350.0
#: Radii σ in pc and peak densities in mag/pc, even in their logarithm; pc between clouds, at least.
RADII, PEAKS, APART = (8.0, 20.0), (0.015, 0.06), 60.0
#: Heights from the plane in pc.
HEIGHT = 90.0
#: Nodes of the truth, in pc.
FINE = 5.0
_CONFIG = """
[data]
catalog = "{catalog}"
system = "A_V"
holdout = 0.1
[grid]
size = {size}
spacing = {spacing}
[model]
kernel = "matern12"
length = "60pc"
mean = "disc"
noise = "auto"
learn = ["length", "std", "mean", "noise"]
[fit]
samples = {samples}
seed = {seed}
[compute]
threads = 1
"""


@final
@dataclass(frozen=True)
class Size:
    """The box in pc and the distance of the map's nodes, clouds, stars and draws."""

    size: tuple[float, float, float]
    spacing: float
    clouds: int
    stars: int
    samples: int


@final
@dataclass(frozen=True, eq=False)
class Blobs:
    """Balls of dust, peak exp(−r²/2σ²): centres (K, 3) and radii σ (K,) in pc, peaks (K,) in
    mag/pc."""

    centres: Array
    radii: Array
    peaks: Array

    @classmethod
    def draw(cls, size: Size, seed: int) -> "Blobs":
        """Place them in all directions and distances, no two nearer than APART."""
        rng = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(7,)))
        half = np.array(size.size) / 2 - 2 * RADII[1]
        centres: list[Array] = []
        while len(centres) < size.clouds:
            place = rng.uniform(-half, half) * (1.0, 1.0, min(1.0, HEIGHT / half[2]))
            near = NEAREST <= float(np.linalg.norm(place)) <= min(FARTHEST, half[0])
            if near and all(np.linalg.norm(place - other) >= APART for other in centres):
                centres.append(place)
        radii, peaks = (
            low * (high / low) ** rng.uniform(size=size.clouds) for low, high in (RADII, PEAKS)
        )
        return cls(np.array(centres), radii, peaks)

    def density(self, points: Array) -> Array:
        """Return the density (...) in mag/pc at points (..., 3)."""
        total = np.zeros(points.shape[:-1])
        for centre, radius, peak in zip(self.centres, self.radii, self.peaks, strict=True):
            total += peak * np.exp(-0.5 * ((points - centre) ** 2).sum(-1) / radius**2)
        return total

    @property
    def places(self) -> NamedPlaces:
        """Lines of sight through them, without their distances."""
        l, b, _ = galactic(self.centres)
        names = tuple(str(k) for k in range(len(l)))
        return NamedPlaces(names, l, b, np.full(len(l), np.nan))

    @property
    def distance(self) -> Array:
        """Distances (K,) from the Sun in pc."""
        return np.asarray(np.linalg.norm(self.centres, axis=-1))


@final
@dataclass(frozen=True, eq=False)
class CloudyDust(AbstractDust):
    """Turbulence, disc and bubbles, with clouds in them."""

    blobs: Blobs
    medium: StructuredDust = field(default_factory=StructuredDust)

    def density(self, grid: RegularGrid, seed: int) -> Array:
        points = grid.points().numpy().reshape(*grid.shape, 3)
        return self.medium.density(grid, seed) + self.blobs.density(points)


@final
@dataclass(frozen=True, eq=False)
class Mapped:
    """One sky: its clouds, the truth at the nodes of the map, the map, and seconds of the run."""

    blobs: Blobs
    truth: DustMap
    map: DustMap
    seconds: float


def mapped(size: Size, seed: int) -> Mapped:
    """Draw a sky, and map it in a directory that goes again."""
    blobs = Blobs.draw(size, seed)
    model = SkyModel(size=size.size, spacing=FINE, dust=CloudyDust(blobs))
    # The corners of the box are farther than stars go.
    sky = simulate(model, 2 * size.stars, seed)
    near = np.flatnonzero(sky.true_distance <= REACH)[: size.stars]
    assert len(near) == size.stars
    with tempfile.TemporaryDirectory() as folder:
        catalog, run = Path(folder) / "sky.fits", Path(folder) / "run"
        write_table(catalog, sky_table(sky)[near])
        text = _CONFIG.format(
            catalog=catalog,
            size=list(size.size),
            spacing=size.spacing,
            samples=size.samples,
            seed=seed,
        )
        path = Path(folder) / "run.toml"
        path.write_text(text, encoding="utf-8")
        config = configuration.load(path)
        _, seconds = stopwatch(
            lambda: execute_run(prepare(config), run, config, False, Stage.EVALUATE)
        )
        finished = open_star_map(run)
        request = MapRequest(
            (Quantity.MEAN, Quantity.STD, Quantity.COVERAGE, Quantity.SAMPLES), size.samples
        )
        density = DustMap.from_field(finished.field(), finished.run.grid, request)
    return Mapped(blobs, _thinned(sky.truth, density.grid), density, seconds)


def _thinned(truth: DustMap, grid: RegularGrid) -> DustMap:
    """Average the truth over the voxels of a grid."""
    values = truth.mean.astype(np.float64)
    for axis in range(3):
        every = round(grid.spacing[2 - axis] / truth.grid.spacing[2 - axis])
        values = _averaged(values, every, axis)
    nodes = values.transpose(2, 1, 0).ravel()
    return DustMap.from_nodes(grid, nodes, None, truth.system)


def _averaged(values: Array, every: int, axis: int) -> Array:
    """Average over a voxel of `every` nodes about each that stays; half weights at its faces."""
    moved = np.moveaxis(values, axis, 0)
    half = every // 2
    padded = np.concatenate([moved[half:0:-1], moved, moved[-2 : -2 - half : -1]])
    weights = np.ones(2 * half + 1)
    if every % 2 == 0:
        weights[[0, -1]] = 0.5
    count = (len(moved) - 1) // every + 1
    parts = [w * padded[k : k + every * (count - 1) + 1 : every] for k, w in enumerate(weights)]
    return np.asarray(np.moveaxis(sum(parts) / weights.sum(), 0, axis))
