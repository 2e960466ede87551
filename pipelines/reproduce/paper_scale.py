"""The size of the HIP-GP paper's largest map, on a laptop: 500,000 stars, 62,500 grid points.

Simulated stars uniform in 4 × 4 × 2 kpc around the Sun, extinctions with errors of 5 %, float32.
Every fit is measured in a process of its own, from loaded data to predictions of held-out stars:

    known          mean and 32 samples at the hyperparameters of the truth
    learned        length, std and mean of the density from a poor start, then the same solve
    growth in N    10⁵ to 2·10⁶ stars at M = 62,500, a fixed number of block steps
    growth in M    62,500 to 4·10⁶ grid points at N = 5·10⁵, the same
"""

import logging
import math
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from pipelines.reproduce import _paper_scale_figure as figure
from pipelines.reproduce._experiment import Goal, Outcome, Request, Row, number
from pipelines.reproduce._paper_scale_engine import Plan
from pipelines.reproduce._paper_scale_measure import (
    Found,
    Maps,
    Task,
    draw_to_file,
    in_fresh_process,
    measure,
)
from pipelines.reproduce._paper_scale_sky import SkySettings

_log = logging.getLogger(__name__)

STARS = 500_000
GROWTH_STARS = (100_000, 200_000, 500_000, 1_000_000, 2_000_000)
GROWTH_SHAPES = ((50, 50, 25), (100, 100, 50), (200, 200, 100))
SAMPLES, GROWTH_SAMPLES, GROWTH_STEPS = 32, 8, 20
#: Where learning starts: length and std as multiples of the truth's.
POOR = (3.0, 0.2)
KNOWN_S, LEARNED_S, PEAK_GIB, SLOPE, CHI2 = 300.0, 900.0, 8.0, 1.2, 1.2
_QUICK = SkySettings((8, 8, 5), stars=1000, held_out=200, length=1.2)


def run(request: Request) -> Outcome:
    """All parts; quick is 1,000 stars on 320 points in this process."""
    sky = _QUICK if request.quick else SkySettings(stars=max(GROWTH_STARS))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "sky.npz"
        draw_to_file(sky, path, fresh=not request.quick)
        rows, maps = measured(tasks(sky, path, request.quick), fresh=not request.quick)
    return Outcome(settings(sky), rows, goals(rows, request.quick), figure.draw(maps, rows))


def tasks(sky: SkySettings, path: Path, quick: bool) -> list[tuple[str, Task]]:
    """Every part's fits, in order."""
    stars = sky.stars if quick else STARS
    samples = 8 if quick else SAMPLES
    known = Plan(sky.length, sky.std, sky.mean, samples)
    poor = Plan(POOR[0] * sky.length, POOR[1] * sky.std, 0.0, samples, learn=True)
    poor = replace(poor, start_rows=40, learn_steps=3) if quick else poor
    fixed = Plan(sky.length, sky.std, sky.mean, 4 if quick else GROWTH_SAMPLES, steps=GROWTH_STEPS)
    first = Task(path, sky, sky.shape, stars, known, torch.get_num_threads())
    found = []
    for count in (stars // 2, stars) if quick else GROWTH_STARS:
        found.append(("growth in N", replace(first, stars=count, plan=fixed)))
    for shape in (sky.shape, (10, 10, 6)) if quick else GROWTH_SHAPES:
        found.append(("growth in M", replace(first, shape=shape, plan=fixed)))
    return [*found, ("known", first), ("learned", replace(first, plan=poor, with_maps=True))]


def measured(every: Sequence[tuple[str, Task]], fresh: bool) -> tuple[list[Row], Maps]:
    """The table, and the maps of the fit that made them."""
    rows: list[Row] = []
    pictures: list[Maps] = []
    for part, task in every:
        row, maps = _found(task, fresh)
        rows.append({"part": part, **row})
        pictures += [] if maps is None else [maps]
        _log.info("%s", rows[-1])
    return rows, pictures[-1]


def _found(task: Task, fresh: bool) -> Found:
    return in_fresh_process(task) if fresh else measure(task)


def settings(sky: SkySettings) -> Row:
    """Everything that defines the experiment."""
    return {
        **sky.as_row(),
        "dtype": "float32",
        "poor_start": {"length": POOR[0], "std": POOR[1], "mean": 0.0, "unit": "of the truth"},
        "growth": f"{GROWTH_SAMPLES} samples, {GROWTH_STEPS} block steps, known hyperparameters",
        "memory": "peak resident memory of a process that loads the stars and fits",
        "threads": torch.get_num_threads(),
    }


def goals(rows: Sequence[Row], quick: bool) -> list[Goal]:
    """Seconds, memory, calibration, and near-linear growth."""
    one = {str(row["part"]): row for row in rows}
    found = []
    for part, limit in (("known", KNOWN_S), ("learned", LEARNED_S)):
        name = f"{part} hyperparameters: "
        found.append(Goal.at_most(name + "seconds", limit, number(one[part], "seconds")))
        found.append(Goal.at_most(name + "peak GiB", PEAK_GIB, number(one[part], "peak_gib")))
    chi2 = number(one["learned"], "held_out_chi2")
    found.append(Goal.at_most("χ² of noise-free held-out extinctions, learned", CHI2, chi2))
    for key in ("N", "M"):
        mine = [row for row in rows if row["part"] == f"growth in {key}"]
        for column, name in (("seconds", "seconds"), ("peak_gib", "peak memory")):
            reached = None if quick else slope(mine, key, column)
            found.append(Goal.at_most(f"log-log slope of {name} against {key}", SLOPE, reached))
    return found


def slope(rows: Sequence[Row], key: str, column: str) -> float:
    """Of log column against log key, by least squares."""
    x, y = ([math.log(number(row, name)) for row in rows] for name in (key, column))
    return float(np.polyfit(x, y, 1)[0])
