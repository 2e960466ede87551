"""Peak memory of runs beside what their plans had said: each run in a process of its own."""

import math
import tempfile
from collections.abc import Sequence
from pathlib import Path

from dustmap.sky.simulation import SkyModel, simulate, write_sky
from pipelines.reproduce._experiment import Goal, Outcome, Request, Row, number
from pipelines.reproduce.memory._figure import draw
from pipelines.reproduce.memory._measure import Case, in_fresh_process

#: Wanted: planned within this factor of the peak, either way.
WITHIN = 1.25
STARS, SEED = 4000, 1
#: Hyperparameters stay and solves stop early, which changes no array; the last case learns.
_QUICK = ("fit.max_steps=60", "model.learn=[]")
_FINE = ("grid.spacing=10", "fit.samples=16")
_GAUSSIAN = "model.density=gaussian"
CASES = (
    Case("log-normal, 42,025 nodes, 16 samples", (*_QUICK, *_FINE)),
    Case("log-normal, 80,631 nodes, 8 samples", (*_QUICK, "grid.spacing=8", "fit.samples=8")),
    Case("log-normal, 321,489 nodes, 4 samples", (*_QUICK, "grid.spacing=5", "fit.samples=4")),
    Case("Gaussian, 5,733 nodes, 16 samples", (*_QUICK, "fit.samples=16", _GAUSSIAN)),
    Case("Gaussian, 42,025 nodes, 16 samples", (*_QUICK, *_FINE, _GAUSSIAN)),
    Case("Gaussian, the same within 1 GiB", (*_QUICK, *_FINE, _GAUSSIAN, "compute.memory=1GiB")),
    Case(
        "hip, 1,800 stars",
        (*_QUICK[:1], "model.learn=['mean']", "fit.engine=hip", "data.holdout=0.5"),
    ),
    Case("exact, 3,600 stars", (*_QUICK, "fit.engine=exact")),
    Case("exact, 2,000 stars", (*_QUICK, "fit.engine=exact", "data.holdout=0.5")),
    Case("log-normal, 42,025 nodes, learning", ("fit.max_steps=60", *_FINE), learns=True),
)
_FIGURES_OFF = ("export.figures=[]", "export.formats=[]")


def run(request: Request) -> Outcome:
    """All cases, or the two smallest without figures."""
    cases = [CASES[3], CASES[8]] if request.quick else CASES
    stars = 400 if request.quick else STARS
    with tempfile.TemporaryDirectory() as folder:
        catalog = Path(folder) / "sky.fits"
        write_sky(catalog, simulate(SkyModel(), stars, SEED), True)
        less = _FIGURES_OFF if request.quick else ()
        rows = [in_fresh_process(case, catalog, less) for case in cases]
    settings: Row = {"stars": stars, "seed": SEED, "box_pc": [400, 400, 240], "within": WITHIN}
    return Outcome(settings, rows, goals_of(rows), draw(rows))


def goals_of(rows: Sequence[Row]) -> list[Goal]:
    """Worst of the plans with given hyperparameters; of learning, where only its start is known."""
    fixed = [factor(row) for row in rows if not row["learns"]]
    learned = [factor(row) for row in rows if row["learns"]]
    found = [Goal.at_most("planned and measured peak, worst factor", WITHIN, max(fixed))]
    if learned:
        found.append(Goal.at_most("the same where the length is learned", WITHIN, max(learned)))
    return found


def factor(row: Row) -> float:
    """How far apart planned and measured are, ≥ 1."""
    return math.exp(abs(math.log(number(row, "planned_mib") / number(row, "measured_mib"))))
