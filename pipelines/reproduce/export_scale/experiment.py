"""A map of 296 million voxels from 12 samples, to zarr and FITS, in bounded memory.

The box of Leike et al. (2020), 740 × 740 × 540 voxels of 1 pc. ln ρ is a Matérn-3/2 field (ℓ = 20
pc, std 1) at nodes 5 pc apart, ρ multilinear between: what a run with a log-normal density leaves.
Mean and standard deviation over the samples are exported in a process of its own, then read back:

    zarr, fits     seconds and bytes of each file, checked against the posterior at random voxels
    query          random places and rays a second, of the map in the zarr file
"""

import logging
import tempfile
from collections.abc import Sequence
from pathlib import Path

from pipelines.reproduce._experiment import Goal, Outcome, Request, Row, number
from pipelines.reproduce.export_scale import _figure as figure
from pipelines.reproduce.export_scale._measure import Scale, in_fresh_process, measure

_log = logging.getLogger(__name__)

FULL = Scale((740, 740, 540), spacing=1.0, node_spacing=5.0)
QUICK = Scale((40, 36, 20), spacing=2.0, node_spacing=10.0, places=1000, rays=50)
MINUTES, PEAK_GIB, PLACES_PER_S, ERROR = 30.0, 4.0, 1e6, 1e-4


def run(request: Request) -> Outcome:
    """Both exports and the queries; quick is 29,000 voxels in this process."""
    scale = QUICK if request.quick else FULL
    with tempfile.TemporaryDirectory() as folder:
        work = measure if request.quick else in_fresh_process
        rows, plane = work(scale, Path(folder))
    for row in rows:
        _log.info("%s", row)
    return Outcome(settings(scale), rows, goals(rows), figure.draw(plane, scale))


def settings(scale: Scale) -> Row:
    """What defines the experiment."""
    return {
        "voxels": list(scale.shape),
        "spacing_pc": scale.spacing,
        "nodes": list(scale.nodes().shape),
        "samples": scale.samples,
        "quantities": ["mean", "std"],
    }


def goals(rows: Sequence[Row]) -> list[Goal]:
    """Time, memory, agreement and speed of queries."""
    by_part = {str(row["part"]): row for row in rows}
    written = [by_part["zarr"], by_part["fits"]]
    minutes = sum(number(row, "seconds") for row in written) / 60.0
    peak = max(number(row, "peak_gib") for row in written)
    error = max(number(row, "error") for row in written)
    places = number(by_part["query"], "places_per_s")
    return [
        Goal.at_most("minutes of both exports", MINUTES, minutes),
        Goal.at_most("peak memory, GiB", PEAK_GIB, peak),
        Goal.at_most("relative difference from the posterior", ERROR, error),
        Goal.at_least("places a second", PLACES_PER_S, places),
    ]
