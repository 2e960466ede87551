"""`ciq --full`: the paper's own settings, for a GPU.

M = 1,000 to 10,000, length scales from 0.01, 20 epochs, rates of 0.01 (0.005 with Student-t noise)
that fall tenfold at epochs 1, 5, 10 and 15; all training data of the files.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from dustmap.inference import StepDecay
from pipelines.reproduce._experiment import Goal, Outcome, Request, Row, number
from pipelines.reproduce.ciq import _figure as figure
from pipelines.reproduce.ciq import _models as models
from pipelines.reproduce.ciq._problem import NAMES, STUDENT_T, load
from pipelines.reproduce.ciq._training import QUICK, Training

_log = logging.getLogger(__name__)

METHODS = ("Cholesky", "CIQ")
#: Times that CIQ is faster, and the M of which the paper says it.
SPEEDUP, SAID_OF = 4.0, 5000
PAPER = Training(
    sizes=(1000, 5000, 10_000),
    epochs=20,
    natural=0.01,
    adam=0.01,
    decay=StepDecay(0.1, (0.05, 0.25, 0.5, 0.75)),
    limit=7200.0,
    student_t=0.5,
    lengthscale=0.01,
)


def run(request: Request) -> Outcome:
    """All data sets, or those of `--only`, on the GPU where there is one."""
    wanted = request.wanted(NAMES)
    rows = [row for row in request.earlier if row["part"] not in wanted]
    training = QUICK if request.quick else PAPER
    training = training if request.limit is None else replace(training, limit=request.limit)
    for name in wanted:
        for row in _measured(request, name, training):
            _log.info("%s", row)
            rows.append(row)
    picture = figure.draw(rows, NAMES, STUDENT_T)
    return Outcome({"training": training.as_row()}, rows, goals(rows), picture)


def _measured(request: Request, name: str, training: Training) -> Iterator[Row]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    problem = load(request, name, training.most, training.lengthscale).on(device)
    for m in training.sizes:
        if m <= len(problem.y):
            for method in METHODS:
                yield {**models.measure(problem, method, m, training), "device": device.type}


def goals(rows: Sequence[Row]) -> list[Goal]:
    """CIQ's step at M = 5,000, or the next smaller M that a data set has points for."""
    found = []
    for name in dict.fromkeys(str(row["part"]) for row in rows):
        mine = [row for row in rows if row["part"] == name]
        sizes = {number(row, "asked_M") for row in mine}
        m = max((m for m in sizes if m <= SAID_OF), default=min(sizes))
        step = {str(r["method"]): number(r, "step_s") for r in mine if r["asked_M"] == m}
        title = f"{name}, {mine[0]['device']}: step at M = {m:,.0f}, CIQ times faster than Cholesky"
        found.append(Goal.at_least(title, SPEEDUP, step["Cholesky"] / step["CIQ"]))
    return found
