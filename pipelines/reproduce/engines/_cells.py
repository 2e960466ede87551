"""Cells of `engines`: one engine on so many rows, in a process that its seconds limit."""

import multiprocessing
import resource
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import final

import torch

from dustmap import engines
from dustmap.engines import Problem, Watch
from dustmap.gp import Batch, ConstantMean, GPModel
from dustmap.gp.kernels import Matern32
from dustmap.gp.likelihoods import GaussianLikelihood
from dustmap.inference import scores
from pipelines.reproduce._experiment import Row
from pipelines.reproduce.engines._problems import Table

#: What `HIPGPRegressor` has by default.
LEARNING = engines.EvidenceSettings(rows=2_000, search_start=True)
_START_ROWS, _SAMPLES, _PADDING, _MEMORY = 500, 64, 4.0, 4 * 2**30
#: Standard deviation of the noise where learning starts.
_NOISE = 0.3
GRIDDED = ("hip", "global")
#: Engines that learn by the exact evidence of a random part, and so share what it takes.
SHARED = ("exact", *GRIDDED)
NAMES = (*SHARED, "svgp", "sgpr")


@final
@dataclass(frozen=True)
class Limits:
    """CPU seconds of a cell, those of kernel and evidence included."""

    seconds: float


def automatic(dim: int) -> engines.AutomaticEngine:
    """The engines that `HIPGPRegressor` has for so many columns, at its defaults."""
    points = engines.PointSettings(_SAMPLES, _PADDING, torch.float64, _MEMORY)
    return engines.AutomaticEngine(
        engines.ExactEngine(engines.ExactSettings(LEARNING, _MEMORY)),
        engines.InducingEngine(engines.InducingSettings(LEARNING)),
        engines.PathwiseEngine(engines.PathwiseSettings(points, LEARNING)),
        _free(dim, collapsed=False),
    )


def _free(dim: int, collapsed: bool) -> engines.FreePointsEngine:
    rows = _START_ROWS if dim <= engines.MAX_GRID_DIM else 0
    start = replace(LEARNING, rows=rows)
    return engines.FreePointsEngine(engines.FreePointSettings(), collapsed, start)


def engine(name: str, dim: int) -> engines.AbstractEngine:
    """The engine of that name."""
    own = automatic(dim)
    named = {"exact": own.exact, "hip": own.inducing, "global": own.pathwise, "svgp": own.free}
    return _free(dim, collapsed=True) if name == "sgpr" else named[name]


def takes(name: str, dim: int, n: int) -> bool:
    """Whether the engine is for n rows in so many columns."""
    if name in GRIDDED:
        return dim <= engines.MAX_GRID_DIM
    return name != "exact" or n <= engines.MOST_DENSE


def measure(table: Table, n: int, names: Sequence[str], limits: Limits) -> Iterator[Row]:
    """A row for each engine; those with a share in kernel and evidence count its seconds."""
    data, dim = table.first(n), table.x.shape[1]
    start = GPModel(Matern32([1.0] * dim), ConstantMean(), GaussianLikelihood(jitter=_NOISE))
    begun = time.process_time()
    choice = engines.choose_kernel(start, data)
    problem = Problem(choice.model or start, data)
    kernel_s = time.process_time() - begun
    learned = engines.learn_from_start(problem, LEARNING, _MEMORY, Watch())
    learn_s = time.process_time() - begun - kernel_s
    chosen = automatic(dim).choose(replace(problem, model=learned.model)).name
    for name in names:
        spent = kernel_s + (learn_s if name in SHARED else 0.0)
        row: Row = {
            **{"table": table.name, "D": dim, "n": n, "engine": name, "kernel": choice.name},
            "is_automatic": name == chosen,
        }
        cell = _Cell(problem, learned, table.held_out, name)
        found = within(limits.seconds - spent, cell)
        if found is None:
            yield {**row, "ended": f"more than {limits.seconds:g} CPU s"}
        else:
            fit_s = spent + found["finish_s"]
            scored = {key: found[key] for key in ("rmse", "nlpd", "coverage95")}
            yield {**row, **scored, "fit_s": fit_s, "predict_s": found["predict_s"]}


@final
@dataclass(frozen=True, eq=False)
class _Cell:
    """One engine at the start of its own work."""

    problem: Problem
    learned: engines.Learned
    held_out: Batch
    name: str

    def scored(self) -> dict[str, float]:
        """Fit, predict, and score noisy values of the rows held out."""
        dim, begun = self.problem.model.kernel.dim, time.process_time()
        made = engine(self.name, dim)
        if isinstance(made, engines.ExactEngine | engines.InducingEngine | engines.PathwiseEngine):
            fit = made.finish(self.problem, self.learned, Watch())
        else:
            fit = made.fit(self.problem, Watch())
        fitted = time.process_time()
        held, predicted = self.held_out, fit.posterior.predict(self.held_out.functional)
        with torch.no_grad():
            variance = predicted.variance.double() + fit.model.likelihood.noise_variance(held)
        ended = time.process_time()
        found = scores(held.y, predicted.mean.double(), variance)
        return {
            "rmse": found.rmse,
            "nlpd": -found.loglike,
            "coverage95": found.coverage95,
            "finish_s": fitted - begun,
            "predict_s": ended - fitted,
        }


def within(seconds: float, cell: _Cell) -> Mapping[str, float] | None:
    """The scores of a cell from a process of its own; None where it takes longer."""
    if seconds < 1:
        return None
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_limited, args=(seconds, cell, theirs))
    process.start()
    theirs.close()
    try:
        found: Mapping[str, float] | None = ours.recv()
    except EOFError:
        found = None
    process.join()
    return found


def _limited(seconds: float, cell: _Cell, pipe: Connection) -> None:
    """Send the scores, unless the CPU seconds of this process run out."""
    limit = int(seconds) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (limit, limit))
    torch.set_num_threads(1)
    pipe.send(cell.scored())
