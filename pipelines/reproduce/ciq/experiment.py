"""SVGP whitened by Cholesky, by contour integral quadrature, and on a grid.

Pleiss et al. (2020), figures 2 and 3 and that of the likelihood parameters: three data sets with
Gaussian, Student-t and Bernoulli observations; natural steps for q, Adam for kernel, mean, noise
and inducing points; gpytorch's SVGP with the same points, rates and nugget in the same run.

    3droad, precipitation, covertype   seconds per step and epoch, held-out NLL and error, and the
                                       learned likelihood against M
    crossover                          rows of one minibatch by Cholesky and by CIQ, dense
                                       products to M = 5,000, Toeplitz ones to M = 10⁵
    natural                            a natural step of q by factors and by solves, M to 6,000

`--only PART,..` repeats some and keeps the rows of the others; `--full` are the paper's settings.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import final

import torch

from pipelines.reproduce._experiment import Goal, Outcome, Request, Row, number
from pipelines.reproduce.ciq import _crossover as crossover
from pipelines.reproduce.ciq import _figure as figure
from pipelines.reproduce.ciq import _gpytorch as peer
from pipelines.reproduce.ciq import _models as models
from pipelines.reproduce.ciq import _natural as natural
from pipelines.reproduce.ciq._problem import NAMES, STUDENT_T, Problem, load
from pipelines.reproduce.ciq._training import (
    MOST_STEPS,
    NODES,
    NUGGET,
    QUICK,
    RTOL,
    SHORT,
    Training,
)

_log = logging.getLogger(__name__)

PARTS = (*NAMES, "crossover", "natural")
#: Dimensions up to which there is a grid.
_GRIDDED = 3
SPEEDUP, NLL_SLACK = 5.0, 0.02

DENSE, TOEPLITZ = (500, 1000, 2000, 5000), (1024, 10_000, 40_000, 100_000)
CROSSOVER = crossover.Sizes(DENSE, TOEPLITZ, 10_000)
CROSSOVER_QUICK = crossover.Sizes((50,), (144,), 144)
#: M from which CIQ is to win with Toeplitz products.
_FROM = 10_000


def run(request: Request) -> Outcome:
    """The parts that are asked for, after the rows of an earlier run for the others."""
    wanted = request.wanted(PARTS)
    rows = [row for row in request.earlier if row["part"] not in wanted]
    training = QUICK if request.quick else SHORT
    shown = [name for name in NAMES if name in wanted or any(r["part"] == name for r in rows)]
    problems = {n: load(request, n, training.most, training.lengthscale) for n in shown}
    for part in wanted:
        for row in _part(request, part, problems, training):
            _log.info("%s", row)
            rows.append(row)
    picture = figure.draw(rows, NAMES, STUDENT_T)
    return Outcome(settings_of(training, list(problems.values())), rows, goals(rows), picture)


def _part(
    request: Request, part: str, problems: Mapping[str, Problem], training: Training
) -> Iterator[Row]:
    if part == "crossover":
        sizes = CROSSOVER_QUICK if request.quick else CROSSOVER
        yield from crossover.measure(sizes, torch.device("cpu"))
    elif part == "natural":
        yield from _natural(request.quick)
    else:
        peer.require()
        yield from measured(problems[part], training)


def _natural(quick: bool) -> Iterator[Row]:
    if quick:
        return natural.measure(natural.QUICK_SIZES, natural.QUICK_BATCHES)
    return natural.measure(natural.SIZES, natural.BATCHES)


def measured(problem: Problem, training: Training) -> Iterator[Row]:
    """One row per method and M."""
    for m in training.sizes:
        for name in models.METHODS:
            if problem.dim <= _GRIDDED or name != models.GRIDDED:
                yield models.measure(problem, name, m, training)
        for name in peer.METHODS:
            if m <= peer.MOST.get(name, m):
                yield peer.measure(problem, name, m, training)


def settings_of(training: Training, problems: Sequence[Problem]) -> Row:
    """Everything that defines the experiment."""
    return {
        "training": training.as_row(),
        "kernel": "Matérn-5/2",
        "ciq": {"nodes": NODES, "rtol": RTOL, "max_steps": MOST_STEPS},
        "nugget": NUGGET,
        "dtype": "float64",
        "crossover": {
            "rows": crossover.BATCH,
            "lengthscale": crossover.LENGTHSCALE,
            "cells_per_lengthscale": crossover.CELLS,
        },
        "data": {problem.name: problem.as_row() for problem in problems},
    }


@final
class _Table:
    """Rows by part, method and the M that was asked for."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self._rows = {
            (str(r["part"]), str(r["method"]), int(number(r, "asked_M"))): r
            for r in rows
            if r["part"] in NAMES
        }
        self.sizes = sorted({m for _, _, m in self._rows})

    def pairs(self, one: str, other: str, key: str) -> list[tuple[int, float, float]]:
        """(M, value of one method, of the other) where both have that number."""
        found = []
        for (part, method, m), row in self._rows.items():
            second = self._rows.get((part, other, m), {})
            if method == one and row[key] is not None and second.get(key) is not None:
                found.append((m, number(row, key), number(second, key)))
        return found


def goals(rows: Sequence[Row]) -> list[Goal]:
    """As fast and as accurate as gpytorch, CIQ as accurate as Cholesky, and faster on grids."""
    table = _Table(rows)
    return [*_speed_goals(table), *_accuracy_goals(table), *_crossover_goals(rows)]


def _speed_goals(table: _Table) -> Iterator[Goal]:
    steps = table.pairs("Cholesky", "Cholesky (gpytorch)", "step_s")
    ratio = max((ours / theirs for _, ours, theirs in steps), default=None)
    yield Goal.at_most("seconds per step, Cholesky, over gpytorch's: worst M and data", 1.0, ratio)
    m = 500 if 500 in table.sizes else min(table.sizes, default=500)
    steps = table.pairs("CIQ", "CIQ (gpytorch)", "step_s")
    faster = min((theirs / ours for at, ours, theirs in steps if at == m), default=None)
    yield Goal.at_least(f"CIQ's step at M = {m}, times faster than gpytorch's", SPEEDUP, faster)


def _accuracy_goals(table: _Table) -> Iterator[Goal]:
    for name in ("Cholesky", "CIQ"):
        scores = table.pairs(name, f"{name} (gpytorch)", "nll")
        worse = max((ours - theirs for _, ours, theirs in scores), default=None)
        yield Goal.at_most(f"NLL of {name} above gpytorch's, at worst", NLL_SLACK, worse)
    scores = table.pairs("CIQ", "Cholesky", "nll")
    apart = max((abs(one - other) for _, one, other in scores), default=None)
    yield Goal.at_most("NLL of CIQ and of Cholesky, apart at most", NLL_SLACK, apart)


def _crossover_goals(rows: Sequence[Row]) -> Iterator[Goal]:
    grids = [r for r in rows if r["part"] == "crossover" and r["products"] == "toeplitz"]
    seconds = {(str(r["method"]), int(number(r, "M"))): number(r, "rows_s") for r in grids}
    faster = None
    for (method, m), spent in seconds.items():
        ours = min((s for (name, n), s in seconds.items() if n == m and name != "Cholesky"))
        if method == "Cholesky" and m >= _FROM:
            faster = spent / ours
    yield Goal.at_least("rows at M = 10⁴ on a grid, CIQ times faster than Cholesky", 1.0, faster)
