"""Held-out NLL against seconds of training, hyperparameters learned inside the clock.

Two data sets of `ciq` in which a grid is possible: altitudes of roads (D = 2, Gaussian noise) and
precipitation (D = 3, Student-t noise). All methods get the same data, the same kernel (Matérn-5/2
of one length scale), the same start and one thread; seconds hold clusters, building, learning and
solving, and of what is trained step by step not the scoring in between.

    SVGP        whitened by Cholesky and by CIQ, ours and gpytorch's: curves
    SGPR, exact GP   where the noise is Gaussian and the data few
    HIP-GP, global   on grids, a point per grid or a curve per turn of learning
"""

import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import final

from dustmap.inference import StepDecay
from pipelines.reproduce._experiment import Goal, Outcome, Request, Row, number
from pipelines.reproduce.ciq import _gpytorch as peer
from pipelines.reproduce.ciq._problem import Observation, Problem, load
from pipelines.reproduce.ciq._training import Training
from pipelines.reproduce.nll_per_second import _curves as curves
from pipelines.reproduce.nll_per_second import _figure as figure
from pipelines.reproduce.nll_per_second import _grids as grids

_log = logging.getLogger(__name__)

NAMES = ("3droad", "precipitation")
#: The methods that are to be ahead.
OURS = ("HIP-GP", "global")
EXACT = "exact GP"
#: Training data, and held-out ones: CIQ takes seconds to predict some thousands.
MOST_ROWS, MOST_HELD_OUT = 20_000, 3000


@final
@dataclass(frozen=True)
class Sizes:
    """What is measured.

    svgp: whitening and M of SVGP's curves, ours or, where the whitening is one of its, gpytorch's.
    sgpr: M and steps. hip: nodes. grids: of the global engine, nodes per length scale and draws,
    where the data have no lattice of their own. turns, samples: of Student-t noise, and draws.
    """

    svgp: tuple[tuple[str, int], ...]
    limit: float
    sgpr: tuple[tuple[int, int], ...]
    exact_steps: int
    hip: tuple[int, ...]
    hip_student_t: int
    grids: tuple[tuple[float, int], ...]
    turns: int
    samples: int

    @property
    def training(self) -> Training:
        """Of SVGP: the natural steps and Adam's rate of `ciq`, without an end."""
        return Training((), 100_000, 0.1, 0.03, StepDecay(1.0, ()), self.limit, student_t=0.2)


FULL = Sizes(
    svgp=(
        ("Cholesky", 500),
        ("Cholesky", 1000),
        ("CIQ", 500),
        ("Cholesky (gpytorch)", 500),
        ("CIQ (gpytorch)", 250),
    ),
    limit=20.0,
    sgpr=((512, 10), (512, 40)),
    exact_steps=100,
    hip=(10_000, 40_000, 90_000),
    hip_student_t=3000,
    grids=((1.0, 8), (2.0, 8), (4.0, 16), (6.0, 24)),
    turns=3,
    samples=32,
)
QUICK = Sizes(
    (("Cholesky", 20), ("CIQ", 20), ("Cholesky (gpytorch)", 20), ("CIQ (gpytorch)", 20)),
    1.0,
    ((20, 3),),
    3,
    (400,),
    300,
    ((0.5, 8), (1.0, 8)),
    1,
    8,
)


def run(request: Request) -> Outcome:
    """Both data sets; quick is 600 data of each."""
    peer.require()
    sizes = QUICK if request.quick else FULL
    problems = [_problem(request, name) for name in NAMES]
    rows: list[Row] = []
    for problem in problems:
        for row in measured(problem, sizes):
            _log.info("%s", row)
            rows.append(row)
    return Outcome(settings_of(problems, sizes), rows, goals(rows), figure.draw(rows, NAMES))


def _problem(request: Request, name: str) -> Problem:
    whole = load(request, name, MOST_ROWS, None)
    x, y = whole.x_test[:MOST_HELD_OUT], whole.y_test[:MOST_HELD_OUT]
    return replace(whole, x_test=x, y_test=y)


def measured(problem: Problem, sizes: Sizes) -> Iterator[Row]:
    """The table of one data set."""
    for name, m in sizes.svgp:
        curve = curves.gpytorch_svgp if name in peer.METHODS else curves.svgp
        yield from curve(problem, name, m, sizes.training)
    if problem.observation is Observation.GAUSSIAN:
        yield from _gaussian(problem, sizes)
    else:
        yield from _student_t(problem, sizes)


def _gaussian(problem: Problem, sizes: Sizes) -> Iterator[Row]:
    for m, steps in sizes.sgpr:
        yield curves.sgpr(problem, m, steps)
    yield curves.exact(problem, sizes.exact_steps)
    for m in sizes.hip:
        yield curves.timed(problem, "HIP-GP", f"M = {m}", lambda m=m: grids.hip(problem, m))  # type: ignore[misc]
    for cells, samples in sizes.grids:
        yield curves.timed(
            problem,
            "global",
            f"{cells:g} nodes per ℓ, {samples} draws",
            lambda c=cells, s=samples: grids.whole(problem, c, s),  # type: ignore[misc]
        )


def _student_t(problem: Problem, sizes: Sizes) -> Iterator[Row]:
    states = grids.hip_student_t(problem, sizes.hip_student_t, sizes.training.adam)
    setting = f"M = {sizes.hip_student_t}"
    limit = 2.0 * sizes.limit
    for seconds, fitted in curves.clocked(states, lambda s: grids.of_state(problem, s), limit):
        yield curves.row(problem, "HIP-GP", setting, seconds, fitted)
    cells = sizes.grids[-1][0]
    turns = grids.whole_student_t(problem, cells, sizes.samples, sizes.turns)
    for turn, (seconds, fitted) in enumerate(_each(turns), start=1):
        yield curves.row(problem, "global", f"turn {turn}", seconds, fitted)


def _each(turns: Iterator[curves.Fitted]) -> Iterator[tuple[float, curves.Fitted]]:
    return curves.clocked(turns, lambda fitted: fitted, math.inf, growth=1.0)


def settings_of(problems: Sequence[Problem], sizes: Sizes) -> Row:
    """Everything that defines the experiment."""
    return {
        "kernel": "Matérn-5/2, one length scale",
        "svgp": [{"whitening": name, "M": m} for name, m in sizes.svgp],
        "training": sizes.training.as_row(),
        "sgpr": [{"M": m, "steps": steps} for m, steps in sizes.sgpr],
        "hip": {"M": sizes.hip, "M_student_t": sizes.hip_student_t, "rows_of_evidence": grids.ROWS},
        "global": {
            "grids": [{"nodes_per_length": c, "samples": s} for c, s in sizes.grids],
            "student_t": {"turns": sizes.turns, "samples": sizes.samples},
            "conditionals": grids.CONDITIONALS,
            "rtol": grids.RTOL,
        },
        "data": {problem.name: problem.as_row() for problem in problems},
    }


def goals(rows: Sequence[Row]) -> list[Goal]:
    """Ahead at every second from the first of ours on, and in the end."""
    found = []
    for name in NAMES:
        mine = [row for row in rows if row["data"] == name]
        found.append(
            Goal.at_most(f"{name}: NLL so far above the best other's, at worst", 0.0, margin(mine))
        )
        ours, others = (best(part, math.inf) for part in sides(mine))
        found.append(Goal.at_most(f"{name}: lowest NLL above the others'", 0.0, ours - others))
        sparse = [row for row in mine if row["method"] != EXACT]
        if len(sparse) < len(mine):
            text = f"{name}: NLL so far above the best inducing points', at worst"
            found.append(Goal.at_most(text, 0.0, margin(sparse)))
    return found


def margin(rows: Sequence[Row]) -> float | None:
    """Largest excess of our best NLL so far over the others', at any second from our first on."""
    ours, others = sides(rows)
    first = min((number(row, "seconds") for row in ours), default=math.inf)
    times = [number(row, "seconds") for row in rows if number(row, "seconds") >= first]
    excess = [best(ours, t) - best(others, t) for t in times if best(others, t) < math.inf]
    return max(excess, default=None)


def sides(rows: Sequence[Row]) -> tuple[list[Row], list[Row]]:
    """Ours, and those of all others."""
    ours = [row for row in rows if row["method"] in OURS]
    return ours, [row for row in rows if row["method"] not in OURS]


def best(rows: Sequence[Row], seconds: float) -> float:
    """Lowest NLL of any row that was there by then; ∞ where there was none."""
    there = (number(r, "nll") for r in rows if number(r, "seconds") <= seconds)
    return min(there, default=math.inf)
