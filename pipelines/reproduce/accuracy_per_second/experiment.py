"""Error against time: how accurate each method is for the seconds it takes.

All methods get the same data, the same prior and the same noise, fixed beforehand, so that it is
inference that is timed: everything from the data to mean and variance of what was held out. Two
tasks:

    points   land temperature in the plane, 20,000 values; also gpytorch's KISS-GP, whose kernel
             must be a product over the axes (the rows of the exact GP with that kernel show what
             this alone costs), and gpytorch's SVGP, one row per epoch of natural-gradient steps
    rays     line integrals through a simulated field, whose noise-free values are known

HIP-GP and Cholesky-SVGP are solved directly, the former with a block family, the latter with a
full q.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import final

from pipelines.reproduce._experiment import Goal, Outcome, Request, Row, number
from pipelines.reproduce.accuracy_per_second import _figure as figure
from pipelines.reproduce.accuracy_per_second import _gpytorch as peer
from pipelines.reproduce.accuracy_per_second import _methods as methods
from pipelines.reproduce.accuracy_per_second._task import Task, points, rays

_log = logging.getLogger(__name__)

Shape = tuple[int, ...]
#: RMSE within this factor of the best counts as reached.
CLOSE = 1.01


@final
@dataclass(frozen=True)
class Sizes:
    """The sizes of each method on one task.

    kiss: nodes per axis and Lanczos steps; svgp: nodes per axis of gpytorch's.
    """

    exact: tuple[int, ...]
    hip: tuple[Shape, ...]
    cholesky: tuple[Shape, ...]
    engine: tuple[Shape, ...]
    samples: int = 32
    kiss: tuple[tuple[int, int], ...] = ()
    svgp: tuple[int, ...] = ()
    epochs: int = 0


POINTS = Sizes(
    exact=(400, 800, 1600, 3200),
    hip=((25, 25), (50, 50), (75, 75)),
    cholesky=((15, 15), (25, 25), (35, 35), (50, 50)),
    engine=((25, 25), (50, 50), (75, 75), (100, 100), (150, 150), (200, 200)),
    kiss=((25, 100), (50, 100), (100, 100), (200, 100), (100, 400)),
    svgp=(15, 25),
    epochs=5,
)
RAYS = Sizes(
    exact=(400, 800, 1600, 3200),
    hip=((8, 8, 4), (15, 15, 5)),
    cholesky=((8, 8, 4), (12, 12, 5), (16, 16, 6)),
    engine=((8, 8, 4), (16, 16, 5), (24, 24, 6), (32, 32, 8), (48, 48, 10)),
)
QUICK_POINTS = Sizes(
    (200, 400), ((10, 10),), ((10, 10),), ((10, 10), (20, 20)), 8, ((20, 50),), (10,), 1
)
QUICK_RAYS = Sizes((200, 400), ((6, 6, 3),), ((6, 6, 3),), ((6, 6, 3), (8, 8, 4)), 8)


def run(request: Request) -> Outcome:
    """Both tasks; quick is 2,000 points and 480 rays on coarse grids."""
    plans = ((points(request), QUICK_POINTS), (rays(request), QUICK_RAYS))
    if not request.quick:
        plans = ((plans[0][0], POINTS), (plans[1][0], RAYS))
    rows: list[Row] = []
    for task, sizes in plans:
        for row in measured(task, sizes):
            _log.info("%s", row)
            rows.append(row)
    tasks = [task for task, _ in plans]
    goals = [goal(task.name, [row for row in rows if row["data"] == task.name]) for task in tasks]
    units = {task.name: task.unit for task in tasks}
    return Outcome(settings_of(tasks), rows, goals, figure.draw(rows, units))


def measured(task: Task, sizes: Sizes) -> Iterator[Row]:
    """One row per method and size."""
    for one in planned(task, sizes):
        yield one.measure(task)
    if peer.installed():
        for n in sizes.svgp:
            yield from peer.svgp(task, n, sizes.epochs)


def planned(task: Task, sizes: Sizes) -> Iterator[methods.Run]:
    """All that is measured but gpytorch's SVGP, whose epochs are rows of one run."""
    yield from (methods.exact(task, n) for n in sizes.exact)
    yield from (methods.hip(task, shape) for shape in sizes.hip)
    yield from (methods.cholesky(task, shape) for shape in sizes.cholesky)
    yield from (methods.engine(task, shape, sizes.samples) for shape in sizes.engine)
    if peer.installed():
        yield from (peer.kiss(task, n, rank) for n, rank in sizes.kiss)
        if sizes.kiss:
            yield from (peer.product_exact(task, n) for n in sizes.exact)


def settings_of(tasks: Sequence[Task]) -> Row:
    """Everything that defines the experiment."""
    return {
        "hip": {"pcg_rtol": methods.ROWS_RTOL, "pcg_max_steps": methods.ROWS_STEPS},
        "mean_rtol": methods.MEAN_RTOL,
        "cholesky_nugget": methods.CHOLESKY_NUGGET,
        "svgp": {"batch": peer.BATCH, "natural_gradient_step": peer.STEP},
        "kiss": {"cg_rtol": peer.CG_RTOL},
        "repeats": f"median of {methods.REPEATS} below {methods.BRIEF:g} s, else one",
        "data": {task.name: task.as_row() for task in tasks},
    }


def goal(name: str, rows: Sequence[Row]) -> Goal:
    """Seconds of the global engine over the fastest other's, both at the best RMSE of all others.

    Not measured where the engine does not come that close.
    """
    others = [row for row in rows if row["method"] != "global"]
    limit = CLOSE * min(number(row, "rmse") for row in others)
    theirs = fastest(others, limit)
    ours = fastest([row for row in rows if row["method"] == "global"], limit)
    reached = None if ours is None or theirs is None else ours / theirs
    return Goal.at_most(f"{name}: time to the others' best RMSE, over the fastest's", 1.0, reached)


def fastest(rows: Sequence[Row], limit: float) -> float | None:
    """Seconds of the fastest row of RMSE at most `limit`."""
    close = [number(row, "seconds") for row in rows if number(row, "rmse") <= limit]
    return min(close, default=None)
