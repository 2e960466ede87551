"""One simulated sky, fitted in one piece and in the 12 tiles of nside 1, which are merged."""

import dataclasses
import logging
import time
from dataclasses import dataclass
from pathlib import Path
from typing import final

import numpy as np
from numpy.typing import NDArray

from dustmap import config as configuration
from dustmap.config import Config
from dustmap.runs import LogProgress, execute_run, prepare, prior_sky, sky_of_tiles
from dustmap.sky import Provenance, write_map
from dustmap.sky.maps import DustMap
from dustmap.sky.simulation import Measurements, simulate, write_sky
from dustmap.sky.tiles import SkyPixel, Tile

_log = logging.getLogger(__name__)

Array = NDArray[np.float64]
NSIDE = 1
#: Samples in the maps: as many as the fits keep, or fewer.
EXPORTED = 64
#: Standard deviation of the density, of its logarithm where that is normal.
STD = {"gaussian": 1.5e-3, "lognormal": 1.0}


@final
@dataclass(frozen=True)
class Case:
    """density: its distribution."""

    name: str
    density: str


@final
@dataclass(frozen=True)
class Scale:
    """Box, nodes and correlation length in pc; stars, and draws of each fit."""

    size: tuple[float, float, float]
    spacing: float
    length: float
    stars: int
    samples: int

    @property
    def margin(self) -> float:
        """The least that tiles may have."""
        return 2.0 * self.length


@final
@dataclass(frozen=True, eq=False)
class Found:
    """Maps [z, y, x] as vectors, and seconds of one fit and of the tiles, the longest apart."""

    single: DustMap
    merged: DustMap
    truth: DustMap
    seconds_single: float
    seconds_tiles: tuple[float, ...]
    seconds_merge: float
    stars_of_tiles: tuple[int, ...]


def fit(case: Case, scale: Scale, seed: int, folder: Path) -> Found:
    """All fits of a sky drawn from the prior that they have, hyperparameters held."""
    whole = config_of(case, scale, seed, folder)
    # On the run's own nodes: what is compared are seams, not what lies between nodes.
    drawn = prior_sky(whole, whole.grid.spacing)
    model = dataclasses.replace(drawn, measurements=Measurements(outliers=0.0))
    sky = simulate(model, scale.stars, seed)
    write_sky(folder / "sky.fits", sky, exact_distances=True)
    write_map(folder / "truth.zarr", sky.truth, Provenance(""))
    single, _ = _run(whole, folder / "single")
    seconds, stars, paths = [], [], []
    for pixel in range(12 * NSIDE**2):
        path = folder / f"{NSIDE}-{pixel}"
        data = dataclasses.replace(whole.data, tile=f"{NSIDE}/{pixel}")
        took, count = _run(dataclasses.replace(whole, data=data), path)
        seconds.append(took)
        stars.append(count)
        paths.append(path)
    start = time.perf_counter()
    sky_of_tiles(paths, partial=False).write(
        folder / "map.zarr", "zarr", False, 2**31, LogProgress()
    )
    merging = time.perf_counter() - start
    return Found(
        DustMap.open(folder / "single" / "map.zarr"),
        DustMap.open(folder / "map.zarr"),
        DustMap.open(folder / "truth.zarr"),
        single,
        tuple(seconds),
        merging,
        tuple(stars),
    )


def config_of(case: Case, scale: Scale, seed: int, folder: Path) -> Config:
    """Of the whole sky, with hyperparameters that are the truth's."""
    return configuration.from_mapping(
        {
            "data": {"catalog": str(folder / "sky.fits"), "holdout": 0.0},
            "grid": {"size": list(scale.size), "spacing": scale.spacing},
            "model": {
                "density": case.density,
                "noise": "gaussian",
                "length": scale.length,
                "std": STD[case.density],
                "mean_density": 2e-3,
                "learn": [],
            },
            "fit": {"samples": scale.samples, "seed": seed},
            "export": {"formats": ["zarr"], "figures": [], "samples": min(scale.samples, EXPORTED)},
        }
    )


def _run(config: Config, path: Path) -> tuple[float, int]:
    """Seconds of a run, and the stars of its fit."""
    start = time.perf_counter()
    run = prepare(config)
    report = execute_run(run, path, config, overwrite=False)
    seconds = time.perf_counter() - start
    if not report.passed:
        failed = [check.name for check in report.checks if not check.passed]
        raise RuntimeError(f"{path.name}: failed {failed}")
    stars = int(report.sections["counts"]["stars"])
    _log.info("%s: %d stars, %.1f s", path.name, stars, seconds)
    return seconds, stars


def weights(scale: Scale, found: Found) -> Array:
    """The largest weight of a tile at every voxel (N,), in the order [z, y, x]."""
    points = places(found)
    influence = [
        Tile(SkyPixel(NSIDE, pixel), scale.margin).influence(points)[1]
        for pixel in range(12 * NSIDE**2)
    ]
    return np.asarray(np.max(influence, axis=0) / np.sum(influence, axis=0))


def places(found: Found) -> Array:
    """X, Y, Z (N, 3) of the voxels in the order [z, y, x]."""
    x, y, z = found.merged.axes()
    mesh = np.stack(np.meshgrid(z, y, x, indexing="ij"), axis=-1)
    return mesh.reshape(-1, 3)[:, ::-1].copy()
