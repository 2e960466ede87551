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
from dustmap.runs._machine import ALONE
from dustmap.runs.checkpoints import RunDirectory
from dustmap.runs.reports import Progress, WatchedField
from dustmap.runs.stars._field import request_of
from dustmap.sky import Provenance
from dustmap.sky.maps import (
    AbstractDensityField,
    DustMap,
    MapRequest,
    Quantity,
    Slabs,
    slab_memory,
    write_map,
)

log = logging.getLogger(__name__)

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
    """Write map.*, each by all ranks together; return the names of what was written."""
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
        slabs = Slabs.of_field(watched, grid, request)
        write_in_slabs(path, slabs, provenance, False, config.compute, name, world)
    outputs["samples_in_the_map"] = request.samples
    return outputs


def write_in_slabs(
    path: Path,
    slabs: Slabs,
    provenance: Provenance,
    overwrite: bool,
    compute: ComputeConfig,
    form: str,
    world: AbstractWorld = ALONE,
) -> None:
    """Write a map in slabs that the memory holds; anew in smaller ones where it runs out.

    world: ranks that write together, and begin anew together.
    """
    mebibytes = max(1, slab_memory(compute.memory_bytes) // MIB)
    sizes = AdaptiveBatch(f"MiB of slabs of {path.name}", mebibytes, _ADVICE)
    sizes.attempt(
        lambda size: write_map(path, slabs, provenance, overwrite, size * MIB, world, form)
    )


def drawn_map(
    directory: RunDirectory, config: Config, field: AbstractDensityField, grid: RegularGrid
) -> DustMap:
    """Return a map with mean and standard deviation: one that was written, or one in memory."""
    wanted = (Quantity.MEAN, Quantity.STD)
    if config.export.formats:
        written = DustMap.open(directory.path / f"map.{config.export.formats[0]}")
        if set(wanted) <= set(written.available):
            return written
    return DustMap.from_field(field, grid, MapRequest(wanted))


def provenance_of(config: Config, fitted: int, tile: Mapping[str, Any]) -> Provenance:
    """Describe where the maps of a run come from; tile: of a part of a sky."""
    part = (f"tile {tile['pixel']} (NESTED), margin {tile['margin_pc']:g} pc",) if tile else ()
    return Provenance(
        configuration.sha256(config),
        (f"engine {config.fit.engine}, density {config.density}", f"{fitted} stars fitted", *part),
        catalog=tuple(str(name) for name in config.data.catalog),
        seed=config.fit.seed,
        tile=tile,
    )
