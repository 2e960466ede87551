"""Kernel and first hyperparameters of `heaton`: exact evidence of a part of the data."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import final

import torch

from dustmap.gp import Batch, ConstantMean, ExactGP, fit_hyperparameters
from dustmap.gp.functionals import PointValues
from dustmap.gp.kernels import Matern12, Matern32, StationaryKernel
from dustmap.gp.likelihoods import GaussianLikelihood
from pipelines.reproduce._experiment import Row
from pipelines.reproduce._heaton_problem import SEED, Scene

#: Data that the start is learned from: half at random, half the nearest to the centre.
COUNT = 1500
#: Where learning starts: length in km, std of the noise in °C, and the width of the log-normal
#: prior around it, which keeps a noise that the data do not show from going to zero.
LENGTH, NOISE, WIDTH = 30.0, 0.3, 1.0
#: Stationary kernels tried; length scales differ per axis.
KERNELS: Mapping[str, Callable[..., StationaryKernel]] = {
    "matern12": Matern12,
    "matern32": Matern32,
}


@final
@dataclass(frozen=True, eq=False)
class Start:
    """A kernel at its learned parameters; mean of the data's process; sigma of the noise."""

    name: str
    kernel: StationaryKernel
    mean: float
    sigma: float
    log_evidence: float

    def as_row(self) -> Row:
        """For the table."""
        north, east = self.kernel.lengthscale.detach().tolist()
        return {
            "kernel": self.name,
            "length_north_km": north,
            "length_east_km": east,
            "std": float(self.kernel.variance().detach().sqrt()),
            "noise_std": self.sigma,
            "mean": self.mean,
            "log_evidence_of_part": self.log_evidence,
        }


def starts(scene: Scene, count: int = COUNT) -> list[Start]:
    """Every kernel at its optimum on the same part of the data, the best first."""
    found = [start(scene, name, count) for name in KERNELS]
    return sorted(found, key=lambda s: -s.log_evidence)


def start(scene: Scene, name: str, count: int = COUNT) -> Start:
    """One kernel at its optimum."""
    y, batch = scene.y, part_of(scene, count)
    kernel = KERNELS[name]((LENGTH, LENGTH), float(y.var()), dim=2)
    mean, likelihood = ConstantMean(float(y.mean())), GaussianLikelihood(jitter=NOISE)
    gp = ExactGP(kernel, mean)
    fit = fit_hyperparameters(gp, likelihood, batch, max_steps=40, prior_std=WIDTH)
    assert likelihood.log_jitter is not None
    sigma = float(likelihood.log_jitter.detach().exp())
    return Start(name, kernel, float(mean.value.detach()), sigma, fit.log_evidence)


def part_of(scene: Scene, count: int) -> Batch:
    """At most `count` data, half at random and half nearest to the centre.

    Data chosen at random are too far apart to show the small scales.
    """
    x, y = scene.x, scene.y
    middle = 0.5 * torch.tensor(scene.grid.upper, dtype=torch.float64)
    chosen = torch.zeros(len(y), dtype=torch.bool)
    generator = torch.Generator().manual_seed(SEED)
    chosen[torch.randperm(len(y), generator=generator)[: count // 2]] = True
    chosen[(x - middle).square().sum(-1).argsort()[: count // 2]] = True
    return Batch(PointValues(x[chosen]), y[chosen])
