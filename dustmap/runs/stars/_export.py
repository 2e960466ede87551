"""The files of a run on stars: maps in the formats asked for, and the figures."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dustmap import config as configuration
from dustmap.config import ComputeConfig, Config
from dustmap.engines import MIB
from dustmap.gp import RegularGrid
from dustmap.linalg import AbstractWorld, AdaptiveBatch
from dustmap.runs._ranks import ALONE
from dustmap.runs.kept import RunDirectory
from dustmap.runs.reports import Progress, WatchedField
from dustmap.runs.stars._field import request_of
from dustmap.sky import Provenance
from dustmap.sky.maps import (
    AbstractDensityField,
    DustMap,
    MapRequest,
    Quantity,
    slab_memory,
    write_fits,
    write_zarr,
)

log = logging.getLogger(__name__)

WRITERS = {"zarr": write_zarr, "fits": write_fits}
#: What helps where even thin slabs are too large.
_ADVICE = "set a smaller --memory, export.samples or fewer export.quantities"


def export_run(
    directory: RunDirectory,
    config: Config,
    field: AbstractDensityField,
    grid: RegularGrid,
    provenance: Provenance,
    progress: Progress,
    world: AbstractWorld,
) -> dict[str, Any]:
    """Writes map.*, each by all ranks together; what was written."""
    request = request_of(config, field)
    outputs: dict[str, Any] = {}
    for name in config.export.formats:
        path = directory.path / f"map.{name}"
        outputs[name] = path.name
        # The first rank looks for all: others may not see at once what it has written.
        if world.texts("there" if path.exists() else "")[0]:
            log.info("%s was written before the run was interrupted", path.name)
            continue
        watched = WatchedField(field, f"writing map.{name}", progress)
        write_in_slabs(name, path, watched, grid, request, provenance, False, config.compute, world)
    outputs["samples_in_the_map"] = request.samples
    return outputs


def write_in_slabs(
    kind: str,
    path: Path,
    field: AbstractDensityField,
    grid: RegularGrid,
    request: MapRequest,
    provenance: Provenance,
    overwrite: bool,
    compute: ComputeConfig,
    world: AbstractWorld = ALONE,
) -> None:
    """Writes cubes in slabs that the memory holds; anew in smaller ones where it runs out.

    world: ranks that write together, and begin anew together.
    """
    mebibytes = max(1, slab_memory(compute.memory_bytes) // MIB)
    slabs = AdaptiveBatch(f"MiB of slabs of {path.name}", mebibytes, _ADVICE)
    slabs.attempt(
        lambda size: WRITERS[kind](
            path, field, grid, request, provenance, overwrite, size * MIB, world
        )
    )


def drawn_map(
    directory: RunDirectory, config: Config, field: AbstractDensityField, grid: RegularGrid
) -> DustMap:
    """A map with mean and standard deviation: one that was written, or one in memory."""
    wanted = (Quantity.MEAN, Quantity.STD)
    if config.export.formats:
        written = DustMap.open(directory.path / f"map.{config.export.formats[0]}")
        if set(wanted) <= set(written.available):
            return written
    return DustMap.from_field(field, grid, MapRequest(wanted))


def provenance_of(config: Config, fitted: int, tile: Mapping[str, Any]) -> Provenance:
    """What the maps of a run say of where they come from; tile: of a part of a sky."""
    part = (f"tile {tile['pixel']} (NESTED), margin {tile['margin_pc']:g} pc",) if tile else ()
    return Provenance(
        configuration.sha256(config),
        (f"engine {config.fit.engine}, density {config.density}", f"{fitted} stars fitted", *part),
        catalog=tuple(str(name) for name in config.data.catalog),
        seed=config.fit.seed,
        tile=tile,
    )
