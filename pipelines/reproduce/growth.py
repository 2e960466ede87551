"""How time and memory of the global engine grow with stars and with grid points.

The simulated sky of `paper_scale`, 8 samples at the hyperparameters of the truth, a fixed number of
block steps without a preconditioner; every fit in a process of its own.

    in N    10⁵ to 2·10⁶ stars at M = 62,500
    in M    62,500 to 4·10⁶ grid points at N = 5·10⁵
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from pipelines.reproduce._experiment import Goal, Outcome, Request, Row, number
from pipelines.reproduce.paper_scale import _figure as figure
from pipelines.reproduce.paper_scale._engine import Plan
from pipelines.reproduce.paper_scale._measure import Task
from pipelines.reproduce.paper_scale._sky import SkySettings
from pipelines.reproduce.paper_scale.experiment import QUICK, STARS, on_sky, settings

MANY_STARS = (100_000, 200_000, 500_000, 1_000_000, 2_000_000)
SHAPES = ((50, 50, 25), (100, 100, 50), (200, 200, 100))
SAMPLES, STEPS, SLOPE = 8, 20, 1.2
#: Enough to store the rows of all stars; recomputed in every product, 2·10⁶ took minutes a step.
MEMORY = 12 * 2**30
#: Stars of the reduced series, too many on its grids to be solved for by a matrix.
FEW = 4_000


def run(request: Request) -> Outcome:
    """Both series; quick is up to 4,000 stars on 320 and 600 points in this process."""
    sky = replace(QUICK, stars=FEW) if request.quick else SkySettings(stars=max(MANY_STARS))
    rows, _ = on_sky(sky, lambda path: tasks(sky, path, request.quick), fresh=not request.quick)
    told: Row = {"samples": SAMPLES, "block_steps": STEPS, "preconditioner": "none"}
    return Outcome({**settings(sky), **told}, rows, goals(rows, request.quick), figure.growth(rows))


def tasks(sky: SkySettings, path: Path, quick: bool) -> list[tuple[str, Task]]:
    """Every fit, in order."""
    samples = 4 if quick else SAMPLES
    plan = Plan(sky.length, sky.std, sky.mean, samples, steps=STEPS, rank=0, memory=MEMORY)
    stars = sky.stars if quick else STARS
    first = Task(path, sky, sky.shape, stars, plan, torch.get_num_threads())
    counts = (stars // 2, stars) if quick else MANY_STARS
    shapes = (sky.shape, (10, 10, 6)) if quick else SHAPES
    in_stars = [("in N", replace(first, stars=count)) for count in counts]
    return [*in_stars, *(("in M", replace(first, shape=shape)) for shape in shapes)]


def goals(rows: Sequence[Row], quick: bool) -> list[Goal]:
    """Near-linear growth."""
    found = []
    for key in ("N", "M"):
        mine = [row for row in rows if row["part"] == f"in {key}"]
        for column, name in (("seconds", "seconds"), ("peak_gib", "peak memory")):
            reached = None if quick else slope(mine, key, column)
            found.append(Goal.at_most(f"log-log slope of {name} against {key}", SLOPE, reached))
    return found


def slope(rows: Sequence[Row], key: str, column: str) -> float:
    """Of log column against log key, by least squares."""
    x, y = ([math.log(number(row, name)) for row in rows] for name in (key, column))
    return float(np.polyfit(x, y, 1)[0])
