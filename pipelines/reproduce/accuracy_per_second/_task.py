"""The two tasks of `accuracy_per_second`, with the hyperparameters that all methods share."""

import math
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from dustmap.gp import AbstractMean, Batch, ConstantMean, Prediction, RegularGrid
from dustmap.gp.functionals import AbstractFunctional
from dustmap.gp.kernels import Matern32, StationaryKernel
from dustmap.inference import scores
from pipelines.reproduce._experiment import Request, Row, Value
from pipelines.reproduce.ananke._exact import Correlations
from pipelines.reproduce.ananke._sky import SIMULATED, load, simulated
from pipelines.reproduce.dust._problem import BOX
from pipelines.reproduce.spatial._problem import Problem, land_temperature


@final
@dataclass(frozen=True, eq=False)
class Task:
    """Training data, and y (N,) to predict.

    spread (N,): variance that y has beside that of f: the noise, or zero where y is a truth.
    tile: block of neighbouring whitened variables of HIP-GP's family.
    box: lower and upper corner of all grids.
    """

    name: str
    unit: str
    kernel: StationaryKernel
    mean: AbstractMean
    train: Batch
    test: AbstractFunctional
    y: Tensor
    spread: Tensor
    tile: tuple[int, ...]
    box: tuple[tuple[float, ...], tuple[float, ...]]

    def grid(self, shape: tuple[int, ...]) -> RegularGrid:
        """Nodes over the whole box."""
        return RegularGrid.from_bounds(*self.box, shape)

    def scores(self, prediction: Prediction) -> dict[str, Value]:
        """RMSE, mean log-likelihood, χ² and coverage of what was held out."""
        total = prediction.variance.double() + self.spread
        found = scores(self.y, prediction.mean.double(), total).as_dict()
        return {key: found[key] for key in ("rmse", "loglike", "chi2", "coverage68")}

    def as_row(self) -> Row:
        """The task's entries in the settings."""
        noise = self.train.noise_variance
        assert noise is not None
        return {
            "kernel": self.kernel.profile.name,
            "length": float(self.kernel.lengthscale[0]),
            "std": math.sqrt(float(self.kernel.variance())),
            "mean_noise_std": float(noise.sqrt().mean()),
            "train": len(self.train),
            "held_out": len(self.y),
            "held_out_values": "noisy" if bool(self.spread.any()) else "noise-free",
        }


def points(request: Request) -> Task:
    """Land temperatures of `spatial`: 20,000 cells for training and 5,000 held out."""
    problem = land_temperature(request)
    noise = torch.full_like(problem.y_test, problem.sigma**2).double()
    return Task(
        problem.name,
        "°C",
        problem.kernel,
        problem.mean,
        problem.train,
        problem.test,
        problem.y_test.double(),
        noise,
        (10, 10),
        _box(problem),
    )


def rays(request: Request) -> Task:
    """Noise-free extinctions of held-out stars on a simulated sky of the Ananke sample."""
    catalog = load(request)
    sky = simulated(catalog, Correlations(catalog.rays).at(SIMULATED[0]), seed=0)
    assert sky.truth is not None
    kernel = Matern32(*SIMULATED, dim=3).fixed()
    truth = sky.truth[sky.test]
    return Task(
        "simulated Ananke rays",
        "extinction",
        kernel,
        ConstantMean(0.0, learn=False),
        sky.batch,
        sky.held_out,
        truth,
        torch.zeros_like(truth),
        (2, 2, 2),
        BOX,
    )


def _box(problem: Problem) -> tuple[tuple[float, ...], tuple[float, ...]]:
    grid = problem.grid(2)
    return grid.lower, grid.upper
