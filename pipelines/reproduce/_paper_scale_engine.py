"""The global engine on the stars of `paper_scale`."""

from dataclasses import dataclass
from typing import final

import torch

from dustmap.gp import AbstractPosterior, Batch, ConstantMean, GridPrior, RegularGrid
from dustmap.gp.features import LocalFeatures
from dustmap.gp.kernels import Matern32
from dustmap.gp.likelihoods import GaussianLikelihood
from dustmap.inference import GridModel, SolveSettings, solve_global
from pipelines.reproduce._experiment import Row
from pipelines.reproduce._timing import stopwatch

#: Nodes per axis of the stencil: rays average what the cheap one leaves out.
ORDER = 2
RTOL, MAX_STEPS = 1e-3, 200


@final
@dataclass(frozen=True)
class Plan:
    """Where the hyperparameters are or start (kpc, mag/kpc), and what to do with them.

    steps: a fixed number of block steps, whatever the residual, instead of a tolerance.
    """

    length: float
    std: float
    mean: float
    samples: int
    learn: bool = False
    steps: int | None = None


@final
@dataclass(frozen=True, eq=False)
class Fitted:
    """The posterior and what the engine reports."""

    posterior: AbstractPosterior
    report: Row


def fit(data: Batch, grid: RegularGrid, plan: Plan) -> Fitted:
    """Weights, learning where wanted, and the final solve."""
    kernel = Matern32(plan.length, plan.std**2, dim=3)
    prior = GridPrior.padded(kernel, grid, dtype=torch.float32)
    mean = ConstantMean(plan.mean, learn=plan.learn)
    model = GridModel(LocalFeatures(prior, order=ORDER), mean, GaussianLikelihood())
    rtol, steps = (RTOL, MAX_STEPS) if plan.steps is None else (1e-12, plan.steps)
    settings = SolveSettings(rtol, steps, plan.samples, fit_mean=plan.learn)
    solution, solve_s = stopwatch(lambda: solve_global(model, data, settings))
    report: Row = {
        "solve_s": solve_s,
        "build_s": 0.0,
        "steps_wanted": plan.steps,
        "length": float(kernel.lengthscale[0].detach()),
        "std": float(kernel.variance().detach().sqrt()),
        "mean": float(solution.mean_coefficients[0]),
        "M_w": prior.n_white,
        "block_steps": solution.block_steps,
        "worst_residual": solution.worst_residual,
        "converged": solution.converged,
        "median_residual_variance": float((solution.sigma / data.noise_variance - 1.0).median())
        if data.noise_variance is not None
        else None,
    }
    return Fitted(solution.posterior, report)
