"""Skies of any size: files of stars behind a log-normal density, made a part at a time."""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray

from dustmap.gp import GridPrior, RegularGrid
from dustmap.gp.kernels import Matern32
from dustmap.sky import column_density
from pipelines.reproduce._experiment import Row

#: Stars drawn at once, and a row group of a file.
_AT_ONCE = 2**17
#: One star in so many has a `quality` that the cut removes.
BAD = 20

CARD = """
title = "Stars of the experiment beyond_memory"
reference = ""
system = "A_V"
invalid = "drop"
identifiers = "column"
positions = ["galactic"]
distances = ["exact"]
extinctions = ["error"]

[columns]
source_id = {names = ["source_id"]}
l = {names = ["l"]}
b = {names = ["b"]}
distance = {names = ["distance_pc"]}
extinction = {names = ["extinction"]}
extinction_error = {names = ["extinction_error"]}
quality = {names = ["quality"]}

[cuts]
default = [{column = "quality", below = 1}]
"""

#: A fit of such stars, hyperparameters known, and no other to all of them, lest two are timed;
#: `[compute]` may be gone on with.
RUN = """
[data]
catalog = "{store}"
holdout = 0.05
refit = false
[grid]
size = [{size}]
spacing = {spacing}
[model]
density = "lognormal"
noise = "gaussian"
length = {length}
std = {std}
mean_density = {median}
learn = []
[fit]
samples = {samples}
[compute]
memory = "8GiB"
"""


@final
@dataclass(frozen=True)
class Sky:
    """Stars uniform in a box around the Sun, and the density in it.

    size and spacing (pc) of the box and of the nodes of density and fit; length (pc) and std of
    ln ρ (Matérn-3/2), median density (mag/pc); error (mag) of an extinction, or 5 % of it where
    that is more; margin: how far beyond the box stars are, as a part of its size; nside: of
    beams whose pixels are about a cell wide at the faces.
    """

    stars: int
    size: tuple[float, float, float] = (1000.0, 1000.0, 400.0)
    spacing: float = 12.5
    length: float = 60.0
    std: float = 1.0
    median: float = 1e-3
    error: float = 0.1
    margin: float = 0.0
    files: int = 1
    seed: int = 0
    nside: int = 64

    def grid(self) -> RegularGrid:
        """The nodes."""
        lower = tuple(-0.5 * length for length in self.size)
        shape = tuple(round(length / self.spacing) + 1 for length in self.size)
        return RegularGrid(lower, (self.spacing,) * 3, shape)

    def density(self) -> torch.Tensor:
        """ρ (M,) at the nodes, float32."""
        kernel = Matern32(self.length, self.std**2, dim=3)
        with torch.no_grad():
            prior = GridPrior.padded(kernel, self.grid(), dtype=torch.float32)
            random = torch.Generator().manual_seed(self.seed)
            eps = torch.randn(prior.n_white, generator=random)
            rho: torch.Tensor = (np.log(self.median) + prior.root().matmul(eps)).exp()
        return rho

    def as_row(self) -> Row:
        """For the settings of the experiment."""
        return {
            "stars": self.stars,
            "box_pc": list(self.size),
            "nodes": list(self.grid().shape),
            "M": self.grid().size,
            "length_pc": self.length,
            "std_of_log_density": self.std,
            "median_mag_per_pc": self.median,
            "error": f"{self.error:g} mag, or 5 % where that is more",
            "seed": self.seed,
            "nside_of_beams": self.nside,
        }


def write(sky: Sky, folder: Path, processes: int) -> list[Path]:
    """The files of a sky, those that are there kept."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "card.toml").write_text(CARD, encoding="utf-8")
    np.save(folder / "density.npy", sky.density().reshape(sky.grid().shape).numpy())
    paths = [folder / f"stars{i:03d}.parquet" for i in range(sky.files)]
    jobs = [(sky, folder, i, path) for i, path in enumerate(paths) if not path.exists()]
    if processes == 1:
        for job in jobs:
            _write_file(*job)
        return paths
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context) as pool:
        list(pool.map(_write_file, *zip(*jobs, strict=True))) if jobs else None
    return paths


def _write_file(sky: Sky, folder: Path, number: int, path: Path) -> None:
    density = np.load(folder / "density.npy").astype(np.float64)
    first, stop = (k * sky.stars // sky.files for k in (number, number + 1))
    rng = np.random.default_rng((sky.seed, number))
    partial, writer = path.with_suffix(".partial"), None
    for start in range(first, stop, _AT_ONCE):
        table = _part(sky, density, start, min(_AT_ONCE, stop - start), rng)
        writer = writer or pq.ParquetWriter(partial, table.schema)
        writer.write_table(table)
    assert writer is not None
    writer.close()
    partial.rename(path)


def _part(
    sky: Sky, density: NDArray[np.float64], first: int, count: int, rng: np.random.Generator
) -> pa.Table:
    half = 0.5 * np.array(sky.size)
    places = rng.uniform(-half, half, (count, 3)) * (1.0 + sky.margin)
    inside = places / np.maximum(1.0, np.abs(places / half).max(axis=1))[:, None]
    extinction = column_density(sky.grid(), density, inside)
    error = np.maximum(sky.error, 0.05 * extinction)
    distance = np.linalg.norm(places, axis=1)
    identifiers = (np.arange(first, first + count) * 2654435761) % 2**61
    return pa.table(
        {
            "source_id": identifiers,
            "l": np.degrees(np.arctan2(places[:, 1], places[:, 0])) % 360.0,
            "b": np.degrees(np.arcsin(places[:, 2] / distance)),
            "distance_pc": distance,
            "extinction": extinction + error * rng.standard_normal(count),
            "extinction_error": error,
            "quality": rng.integers(0, BAD, count) // (BAD - 1),
        }
    )
