"""The size of the HIP-GP paper's largest map, on a laptop: 500,000 stars, 62,500 grid points.

Simulated stars uniform in 4 × 4 × 2 kpc around the Sun, extinctions with errors of 5 %, float32.
Every fit is measured in a process of its own, from loaded data to predictions of held-out stars:

    known      mean and 32 samples at the hyperparameters of the truth
    learned    length, std and mean of the density from a poor start, then the same solve

How time and memory grow with stars and grid points is the experiment `growth`.
"""

import logging
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from pipelines.reproduce._experiment import Goal, Outcome, Request, Row, number
from pipelines.reproduce.paper_scale import _figure as figure
from pipelines.reproduce.paper_scale._engine import Plan
from pipelines.reproduce.paper_scale._measure import (
    Found,
    Maps,
    Task,
    draw_to_file,
    in_fresh_process,
    measure,
)
from pipelines.reproduce.paper_scale._sky import SkySettings

_log = logging.getLogger(__name__)

STARS = 500_000
SAMPLES = 32
#: Where learning starts: length and std as multiples of the truth's.
POOR = (3.0, 0.2)
KNOWN_S, LEARNED_S, PEAK_GIB, CHI2 = 300.0, 900.0, 8.0, 1.2
QUICK = SkySettings((8, 8, 5), stars=1000, held_out=200, length=1.2)


def run(request: Request) -> Outcome:
    """Both fits; quick is 1,000 stars on 320 points in this process."""
    sky = QUICK if request.quick else SkySettings(stars=STARS)
    rows, maps = on_sky(sky, lambda path: tasks(sky, path, request.quick), fresh=not request.quick)
    return Outcome(settings(sky), rows, goals(rows), figure.draw(maps[-1]))


def on_sky(
    sky: SkySettings, tasks: Callable[[Path], Sequence[tuple[str, Task]]], *, fresh: bool
) -> tuple[list[Row], list[Maps]]:
    """The sky drawn to a file, and what was found of all tasks on it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "sky.npz"
        draw_to_file(sky, path, fresh=fresh)
        return measured(tasks(path), fresh)


def tasks(sky: SkySettings, path: Path, quick: bool) -> list[tuple[str, Task]]:
    """Both fits, in order."""
    samples = 8 if quick else SAMPLES
    known = Plan(sky.length, sky.std, sky.mean, samples)
    poor = Plan(POOR[0] * sky.length, POOR[1] * sky.std, 0.0, samples, learn=True)
    poor = replace(poor, start_rows=40, learn_steps=3) if quick else poor
    first = Task(path, sky, sky.shape, sky.stars, known, torch.get_num_threads())
    return [("known", first), ("learned", replace(first, plan=poor, with_maps=True))]


def measured(every: Sequence[tuple[str, Task]], fresh: bool) -> tuple[list[Row], list[Maps]]:
    """The table, and the maps of the fits that made them."""
    rows: list[Row] = []
    pictures: list[Maps] = []
    for part, task in every:
        row, maps = _found(task, fresh)
        rows.append({"part": part, **row})
        pictures += [] if maps is None else [maps]
        _log.info("%s", rows[-1])
    return rows, pictures


def _found(task: Task, fresh: bool) -> Found:
    return in_fresh_process(task) if fresh else measure(task)


def settings(sky: SkySettings) -> Row:
    """Everything that defines the experiment."""
    return {
        **sky.as_row(),
        "dtype": "float32",
        "poor_start": {"length": POOR[0], "std": POOR[1], "mean": 0.0, "unit": "of the truth"},
        "memory": "peak resident memory of a process that loads the stars and fits",
        "threads": torch.get_num_threads(),
    }


def goals(rows: Sequence[Row]) -> list[Goal]:
    """Seconds, memory and calibration."""
    one = {str(row["part"]): row for row in rows}
    found = []
    for part, limit in (("known", KNOWN_S), ("learned", LEARNED_S)):
        name = f"{part} hyperparameters: "
        found.append(Goal.at_most(name + "seconds", limit, number(one[part], "seconds")))
        found.append(Goal.at_most(name + "peak GiB", PEAK_GIB, number(one[part], "peak_gib")))
    chi2 = number(one["learned"], "held_out_chi2")
    found.append(Goal.at_most("χ² of noise-free held-out extinctions, learned", CHI2, chi2))
    return found
