"""The methods of `accuracy_per_second` that take data of any kind, at given hyperparameters."""

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import torch

from dustmap.gp import AbstractPosterior, ExactGP, GPModel, GridPrior, Prediction
from dustmap.gp.families import AbstractFamily, BlockFamily, FullRankFamily
from dustmap.gp.features import AbstractFeatureMap, CholeskyFeatures, HIPFeatures
from dustmap.gp.likelihoods import GaussianLikelihood
from dustmap.inference import (
    GlobalSettings,
    RowSource,
    VariationalModel,
    VariationalPosterior,
    fit_global,
    solve_direct,
)
from dustmap.linalg import TilePartition
from pipelines.reproduce._experiment import Row
from pipelines.reproduce._timing import stopwatch
from pipelines.reproduce.accuracy_per_second._task import Task

#: Of HIP-GP's PCG, and of CG for the mean of both families.
ROWS_RTOL, ROWS_STEPS, MEAN_RTOL = 1e-4, 500, 1e-3
#: Relative to the kernel's variance, so that K_uu factorises in float64.
CHOLESKY_NUGGET = 1e-6
#: Bytes for stored rows.
MEMORY = 2**32
#: Runs shorter than this many seconds are repeated, and the median is kept.
BRIEF, REPEATS = 5.0, 3


@final
@dataclass(frozen=True, eq=False)
class Run:
    """A method at one size: from the data to the prediction of what was held out."""

    method: str
    size: str
    predict: Callable[[], Prediction]

    def measure(self, task: Task) -> Row:
        """Seconds of everything, and scores."""
        prediction, first = stopwatch(self.predict)
        again = REPEATS - 1 if first < BRIEF else 0
        seconds = [first, *(stopwatch(self.predict)[1] for _ in range(again))]
        name: Row = {"data": task.name, "method": self.method, "size": self.size}
        timed: Row = {"seconds": statistics.median(seconds), "repeats": len(seconds)}
        return {**name, **timed, **task.scores(prediction)}


def exact(task: Task, n: int) -> Run:
    """The dense process on the first n data, which are in random order."""

    def fit() -> AbstractPosterior:
        part = task.train[:n]
        assert part.noise_variance is not None
        return ExactGP(task.kernel, task.mean).condition(
            part.functional, part.y, part.noise_variance
        )

    return _run("exact GP, subset", f"N = {n}", task, fit)


def hip(task: Task, shape: tuple[int, ...]) -> Run:
    """HIP-GP, blocks of neighbouring whitened variables, solved directly."""

    def fit() -> AbstractPosterior:
        prior = GridPrior.padded(task.kernel, task.grid(shape), dtype=torch.float32)
        features = HIPFeatures(prior, rtol=ROWS_RTOL, max_steps=ROWS_STEPS)
        return _direct(task, features, BlockFamily(TilePartition(prior.torus_shape, task.tile)))

    return _run("HIP-GP", _grid(shape), task, fit)


def cholesky(task: Task, shape: tuple[int, ...]) -> Run:
    """SVGP with Cholesky whitening and a full q, solved directly: the collapsed optimum."""

    def fit() -> AbstractPosterior:
        grid = task.grid(shape)
        features = CholeskyFeatures(
            task.kernel, grid, nugget=CHOLESKY_NUGGET, rows_dtype=torch.float32
        )
        return _direct(task, features, FullRankFamily(math.prod(shape)))

    return _run("Cholesky-SVGP", _grid(shape), task, fit)


def engine(task: Task, shape: tuple[int, ...], samples: int) -> Run:
    """The global engine: one solve for the mean and `samples` pathwise draws."""
    size = f"{_grid(shape)}, {samples} draws"
    return _run("global", size, task, lambda: _global_fit(task, shape, samples))


def _global_fit(task: Task, shape: tuple[int, ...], samples: int) -> AbstractPosterior:
    settings = GlobalSettings(samples=samples)
    model = GPModel(task.kernel, task.mean, GaussianLikelihood())
    return fit_global(model, task.train, task.grid(shape), settings).posterior


def _direct(
    task: Task, features: AbstractFeatureMap, family: AbstractFamily
) -> VariationalPosterior:
    model = VariationalModel(features, task.mean, GaussianLikelihood(), family)
    source = RowSource(features, task.train.functional, MEMORY)
    solution = solve_direct(model, task.train, source, rtol=MEAN_RTOL)
    return VariationalPosterior(model, solution.state)


def _run(method: str, size: str, task: Task, fit: Callable[[], AbstractPosterior]) -> Run:
    return Run(method, size, lambda: fit().predict(task.test))


def _grid(shape: tuple[int, ...]) -> str:
    return "×".join(str(m) for m in shape)
