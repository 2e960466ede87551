"""Plans of commands beside `run`: exports of a finished map, and simulated skies."""

import dataclasses
import math
import shutil
from pathlib import Path

import torch

from dustmap.config import ComputeConfig
from dustmap.engines import MIB, Component, During, MemoryPlan, shown
from dustmap.errors import UserError
from dustmap.gp import RegularGrid, torus_for
from dustmap.runs._run import Plan
from dustmap.runs.stars import StarMap, export_components, star_components
from dustmap.sky.maps import MapRequest, slab_memory
from dustmap.sky.simulation import GaussianDust, LogNormalDust, SkyModel

#: Arrays over the nodes while a sky is made: the field, its factors, and the places of the nodes.
_ARRAYS = 12
#: Bytes of a torus' tables and spectra, a point; of a star; and of what drawing stars takes.
_SPECTRA, _STAR, _WORKING = 64, 200, 30 * MIB
_PADDING = 4.0
#: How much smaller than its numbers a smooth map may be on disk.
_COMPRESSED = 10


def export_plan(finished: StarMap, grid: RegularGrid, request: MapRequest) -> Plan:
    """Of writing cubes of `grid`; slabs follow the memory that is allowed."""
    compute, posterior = finished.run.config.compute, finished.fit.posterior
    held = {f.name: getattr(posterior, f.name) for f in dataclasses.fields(posterior)}  # type: ignore[arg-type]
    tensors = sum(v.nbytes for v in held.values() if isinstance(v, torch.Tensor))
    samples = max((len(v) for v in held.values() if isinstance(v, torch.Tensor)), default=1)
    slabs, depth = export_components(
        grid, request, min(samples, finished.field().n_samples), slab_memory(compute.memory_bytes)
    )
    parts = (
        *star_components(finished.run.stars, finished.run.observed),
        Component("posterior", 2 * tensors, During.WHOLE, "what the run has kept, and densities"),
        *slabs,
    )
    counts = {
        "voxels": list(grid.shape),
        "quantities": [quantity.value for quantity in request.quantities],
        "samples": request.samples,
        "GiB on disk, at most": round(4 * request.values_per_place * grid.size / 2**30, 3),
    }
    chunks = {"planes of the map written at once": f"{depth} of {grid.shape[2]}"}
    remedies = ("a larger --step", "a smaller --box")
    return Plan(counts, MemoryPlan(parts, chunks), compute.memory_bytes, remedies)


def check_export(plan: Plan, grid: RegularGrid, request: MapRequest, output: Path) -> None:
    """Refuses cubes that neither memory nor the disk of `output` holds."""
    plan.check()
    folder = next(path for path in output.absolute().parents if path.exists())
    free, size = shutil.disk_usage(folder).free, 4 * request.values_per_place * grid.size
    if size > _COMPRESSED * free:
        raise UserError(
            f"{output}: {' x '.join(map(str, grid.shape))} voxels take up to {shown(size)} and "
            f"{shown(free)} are free there; take a larger --step or a smaller --box"
        )


def sky_plan(model: SkyModel, stars: int, compute: ComputeConfig) -> Plan:
    """Of `dustmap simulate`."""
    grid, dust = model.grid(), model.dust
    parts = [
        Component("density", 8 * _ARRAYS * grid.size, During.WHOLE, "field and places of nodes"),
        Component("stars", _STAR * stars, During.WHOLE, f"{stars:,} stars with their truth"),
        Component("working space", _WORKING, During.WHOLE, "stars that are tried"),
    ]
    if isinstance(dust, GaussianDust | LogNormalDust):
        torus = math.prod(torus_for(dust.kernel, grid, _PADDING))
        what = f"of a torus of {torus:,} points"
        parts.append(Component("spectra", _SPECTRA * torus, During.WHOLE, what))
    counts = {"stars": stars, "nodes": list(grid.shape)}
    remedies = ("a larger --step", "a smaller --size", "fewer --stars")
    return Plan(counts, MemoryPlan(tuple(parts)), compute.memory_bytes, remedies)
