"""The exports of `export_scale`, timed, and their peak memory in a process of its own."""

import functools
import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias, final

import numpy as np
import torch
from astropy import units as u
from astropy.coordinates import SkyCoord
from numpy.typing import NDArray

from dustmap.gp import GridPrior, RegularGrid
from dustmap.gp.features import interpolation
from dustmap.gp.functionals import PointValues
from dustmap.gp.kernels import Matern32
from dustmap.inference import LogNormalPosterior
from dustmap.sky import Provenance
from dustmap.sky.maps import DustMap, MapRequest, NodeField, Quantity, Slabs, write_map
from dustmap.sky.systems import system_named
from pipelines.reproduce._experiment import Row
from pipelines.reproduce._timing import stopwatch
from pipelines.reproduce.paper_scale._measure import peak_gib

REQUEST = MapRequest((Quantity.MEAN, Quantity.STD))
LENGTH, LOG_STD, LOG_MEDIAN = 20.0, 1.0, -7.0
_CHECKED = 2000


@final
@dataclass(frozen=True)
class Scale:
    """Voxels around the Sun, `spacing` pc apart; nodes of the posterior `node_spacing` apart."""

    shape: tuple[int, int, int]
    spacing: float
    node_spacing: float
    samples: int = 12
    places: int = 1_000_000
    rays: int = 10_000

    def voxels(self) -> RegularGrid:
        """Their centres."""
        lower = [-0.5 * self.spacing * (n - 1) for n in self.shape]
        return RegularGrid(tuple(lower), (self.spacing,) * 3, self.shape)

    def nodes(self) -> RegularGrid:
        """Of the posterior, around all voxels."""
        extent = [self.spacing * (n - 1) for n in self.shape]
        cells = [int(np.ceil(length / self.node_spacing)) for length in extent]
        lower = [-0.5 * self.node_spacing * n for n in cells]
        shape = tuple(n + 1 for n in cells)
        return RegularGrid(tuple(lower), (self.node_spacing,) * 3, shape)


#: The table, and the plane nearest to the Sun of mean and std.
Found: TypeAlias = tuple[list[Row], tuple[NDArray[np.float32], NDArray[np.float32]]]


def in_fresh_process(scale: Scale, folder: Path) -> Found:
    """`measure` in a new process, so that nothing else counts in its peak memory."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        threads = torch.get_num_threads()
        return pool.submit(_on_threads, scale, folder, threads).result()


def _on_threads(scale: Scale, folder: Path, threads: int) -> Found:
    torch.set_num_threads(threads)
    return measure(scale, folder)


def measure(scale: Scale, folder: Path) -> Found:
    """Both exports, their check, and queries of the first."""
    field = field_of(scale)
    rows: list[Row] = []
    slabs = Slabs.of_field(field, scale.voxels(), REQUEST)
    for name in ("zarr", "fits"):
        path = folder / f"map.{name}"
        provenance = Provenance("", ("made up",), seed=0)
        job = functools.partial(write_map, path, slabs, provenance)
        _, seconds = stopwatch(job)
        rows.append(
            {
                "part": name,
                "seconds": seconds,
                "megavoxels_per_s": np.prod(scale.shape).item() / seconds / 1e6,
                "peak_gib": peak_gib(),
                "gib": _bytes(path) / 2**30,
                "error": error_of(DustMap.open(path), field, scale),
            }
        )
    density = DustMap.open(folder / "map.zarr")
    rows.append({"part": "query", **speeds(density, scale)})
    k = density.nearest_slice(0.0)
    std = density.std
    assert std is not None
    return rows, (density.mean[k].copy(), std[k].copy())


def field_of(scale: Scale) -> NodeField:
    """Samples of ln ρ drawn from the prior."""
    nodes = scale.nodes()
    kernel = Matern32(LENGTH, LOG_STD**2, dim=3)
    prior = GridPrior.padded(kernel, nodes, dtype=torch.float32)
    root = prior.root()
    generator = torch.Generator().manual_seed(0)
    logs = torch.empty(scale.samples, nodes.size)
    with torch.no_grad():
        for row in logs:
            row.copy_(LOG_MEDIAN + root.matmul(torch.randn(root.shape[1], generator=generator)))
    rows = functools.partial(interpolation, grid=nodes)
    posterior = LogNormalPosterior(rows, logs.mean(0), logs)
    return NodeField(posterior, nodes, system_named("A_V"), LOG_STD)


def error_of(density: DustMap, field: NodeField, scale: Scale) -> float:
    """Largest relative difference of the file from the posterior's rows, at random voxels."""
    rng = np.random.default_rng(1)
    index = np.stack([rng.integers(n, size=_CHECKED) for n in scale.shape], axis=-1)
    # A slab of the file, so that no cube is read as a whole while memory is measured.
    index[:, 2] = index[0, 2]
    grid = scale.voxels()
    places = np.array(grid.lower) + index * np.array(grid.spacing)
    predicted = field.posterior.predict(PointValues(torch.from_numpy(places)))
    plane = slice(int(index[0, 2]), int(index[0, 2]) + 1)
    found = [
        density.cubes.read(cube, (plane, slice(None), slice(None)))[0][index[:, 1], index[:, 0]]
        for cube in density.layout.cubes
    ]
    wanted = (predicted.mean.numpy(), predicted.std.numpy())
    return max(float(np.abs(a / b - 1.0).max()) for a, b in zip(found, wanted, strict=True))


def speeds(density: DustMap, scale: Scale) -> Row:
    """Answers a second, coordinates in Galactic and ICRS frames, the cube being in memory."""
    rng = np.random.default_rng(2)
    places = _coordinates(density, rng, scale.places)
    icrs = places.icrs
    density.query(places)
    _, galactic_s = _best(lambda: density.query(places))
    _, icrs_s = _best(lambda: density.query(icrs))
    rays = _coordinates(density, rng, scale.rays)
    _, rays_s = _best(lambda: density.query(rays, integrated=True))
    return {
        "places_per_s": scale.places / galactic_s,
        "icrs_places_per_s": scale.places / icrs_s,
        "rays_per_s": scale.rays / rays_s,
    }


def _best(call: Callable[[], object]) -> tuple[object, float]:
    """The fastest of three."""
    return min((stopwatch(call) for _ in range(3)), key=lambda found: found[1])


def _coordinates(density: DustMap, rng: np.random.Generator, count: int) -> SkyCoord:
    x, y, z = rng.uniform(density.grid.lower, density.grid.upper, (count, 3)).T * u.pc
    cartesian = SkyCoord(u=x, v=y, w=z, representation_type="cartesian", frame="galactic")
    sphere = cartesian.spherical
    return SkyCoord(sphere.lon, sphere.lat, sphere.distance, frame="galactic")


def _bytes(path: Path) -> int:
    files = [path] if path.is_file() else [p for p in path.rglob("*") if p.is_file()]
    return sum(file.stat().st_size for file in files)
