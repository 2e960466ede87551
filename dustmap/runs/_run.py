"""Runs of every kind: how commands prepare, execute and reopen them, and the plans of exports and
skies.
"""

import dataclasses
import logging
import math
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch

from dustmap.config import ComputeConfig, Config, idle_keys
from dustmap.engines import MIB, Component, During, MemoryPlan, shown
from dustmap.errors import UserError
from dustmap.gp import RegularGrid, torus_for
from dustmap.linalg import AbstractWorld, Progress, unwatched
from dustmap.runs import checkpoints, regression, stars
from dustmap.runs._interface import AbstractFinishedRun, AbstractRun, Plan
from dustmap.runs._machine import ALONE, ThreadChoice
from dustmap.runs.checkpoints import RunDirectory
from dustmap.runs.reports import LogProgress, Report, Stage, page
from dustmap.sky.maps import MapRequest, slab_memory
from dustmap.sky.simulation import GaussianDust, LogNormalDust, SkyModel

log = logging.getLogger(__name__)

#: Arrays over the nodes while a sky is made: the field, its factors, and the places of the nodes.
_ARRAYS = 12
#: Bytes of a torus' tables and spectra, a point; of a star; and of what drawing stars takes.
_SPECTRA, _STAR, _WORKING = 64, 200, 30 * MIB
_PADDING = 4.0
#: How much smaller than its numbers a smooth map may be on disk.
_COMPRESSED = 10


def prepare(
    config: Config, earlier: Path | None = None, world: AbstractWorld = ALONE
) -> AbstractRun:
    """Read and check the input of a run; a UserError or OSError says what is wrong with it.

    earlier: the directory of the same run, which is to be resumed; world: the ranks of the run.
    """
    for words in idle_keys(config) if world.rank == 0 else ():
        log.warning("%s", words)
    of_stars = config.data.kind == "stars"
    start = stars.prepare_stars if of_stars else regression.prepare_regression
    run = start(config, earlier, world)
    run.plan().check()
    return run


def open_run(path: str | Path, compute: Sequence[str] = ()) -> AbstractFinishedRun:
    """Open a finished run with its posterior; what its directory lacks is an OSError.

    compute: overrides such as `compute.threads=4` of where and how it is computed now.
    """
    return _reopened(checkpoints.finished_run(Path(path)), compute)


def open_star_map(path: str | Path, compute: Sequence[str] = ()) -> stars.StarMap:
    """Open a finished map of the dust; a run of another kind is a UserError."""
    finished = open_run(path, compute)
    if not isinstance(finished, stars.StarMap):
        raise UserError(f'{path}: expected a run with data.kind = "stars", a map of the dust')
    return finished


def regression_at(path: Path, compute: Sequence[str] = ()) -> "regression.RegressionResult | None":
    """Open the finished regression at a path; None where there is something else."""
    if not (path / checkpoints.CONFIG).is_file():
        return None
    directory = checkpoints.finished_run(path)
    if directory.config().data.kind != "regression":
        return None
    finished = _reopened(directory, compute)
    assert isinstance(finished, regression.RegressionResult)
    return finished


def _reopened(directory: RunDirectory, compute: Sequence[str]) -> AbstractFinishedRun:
    config = directory.reopened_config(compute)
    of_stars = config.data.kind == "stars"
    reopen = stars.reopen_star_map if of_stars else regression.open_regression
    with checkpoints.translating_damage(directory.path):
        return reopen(directory, config)


def execute_run(
    run: AbstractRun,
    path: Path,
    config: Config,
    overwrite: bool,
    until: Stage = Stage.EXPORT,
    progress: Progress | None = None,
    *,
    resume: bool = False,
    notice: checkpoints.Notice | None = None,
    world: AbstractWorld = ALONE,
    threads: ThreadChoice | None = None,
) -> Report:
    """Execute into a new directory and write report.json, report.md and report.html last.

    What fails, on a full disk or for want of memory, leaves no directory behind, unless a state
    was saved to be resumed from.

    Parameters
    ----------
    run, path, config
    overwrite : replace a run that is there
    until : the last stage
    progress : is called with the counts of work done
    resume : go on in the directory of the same run, if there is one
    notice : who may ask the run to end
    world : all ranks execute; the first writes
    threads : with how many threads, for log and report
    """
    notice = notice or checkpoints.Undisturbed()
    if world.rank > 0:
        world.texts("")  # until the first rank has made the directory
        return run.execute(checkpoints.joined_run(path, config, notice, world), until, unwatched)
    if resume and (path / checkpoints.CONFIG).is_file():
        work = checkpoints.resumed_run(path, config, notice, world)
    else:
        work = checkpoints.new_run(path, config, overwrite, notice, world)
    with work as directory:
        world.texts("")
        if threads is not None:
            log.info("threads: %s", threads)
        report = run.execute(directory, until, progress or LogProgress())
        if threads is not None:
            report = report.with_values("compute", threads.as_dict())
        directory.write_text("report.md", report.as_markdown())
        if directory.rank == 0:
            directory.write_text("report.html", page(report, directory.path))
        directory.write_json(checkpoints.REPORT, report.as_dict())
        checkpoints.finish(directory, until)
    return report


def export_plan(finished: stars.StarMap, grid: RegularGrid, request: MapRequest) -> Plan:
    """Plan to write cubes of `grid`; slabs follow the memory that is allowed."""
    compute, posterior = finished.run.config.compute, finished.fit.posterior
    values = (getattr(posterior, f.name) for f in dataclasses.fields(posterior))  # type: ignore[arg-type]
    held = 2 * sum(value.nbytes for value in values if isinstance(value, torch.Tensor))
    slabs, depth = stars.export_components(
        grid, request, finished.field().n_samples, slab_memory(compute.memory_bytes)
    )
    parts = (
        *stars.star_components(finished.run.stars, finished.run.observed),
        Component("posterior", held, During.WHOLE, "what the run has kept, and densities"),
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
    """Refuse cubes that neither memory nor the disk of `output` holds."""
    plan.check()
    folder = next(path for path in output.absolute().parents if path.exists())
    free, size = shutil.disk_usage(folder).free, 4 * request.values_per_place * grid.size
    if size > _COMPRESSED * free:
        raise UserError(
            f"{output}: {' x '.join(map(str, grid.shape))} voxels take up to {shown(size)} and "
            f"{shown(free)} are free there; take a larger --step or a smaller --box"
        )


def sky_plan(model: SkyModel, n_stars: int, compute: ComputeConfig) -> Plan:
    """Plan `dustmap simulate`."""
    grid, dust = model.grid(), model.dust
    parts = [
        Component("density", 8 * _ARRAYS * grid.size, During.WHOLE, "field and places of nodes"),
        Component("stars", _STAR * n_stars, During.WHOLE, f"{n_stars:,} stars with their truth"),
        Component("working space", _WORKING, During.WHOLE, "stars that are tried"),
    ]
    if isinstance(dust, GaussianDust | LogNormalDust):
        torus = math.prod(torus_for(dust.kernel, grid, _PADDING))
        what = f"of a torus of {torus:,} points"
        parts.append(Component("spectra", _SPECTRA * torus, During.WHOLE, what))
    counts = {"stars": n_stars, "nodes": list(grid.shape)}
    remedies = ("a larger --step", "a smaller --size", "fewer --stars")
    return Plan(counts, MemoryPlan(tuple(parts)), compute.memory_bytes, remedies)
