"""The global engine on one scene of `heaton`: grid points are the cells."""

from dataclasses import dataclass
from typing import final

import torch

from dustmap.gp import AbstractPosterior, Batch, ConstantMean, GridPrior
from dustmap.gp.features import LocalFeatures
from dustmap.gp.functionals import PointValues
from dustmap.gp.likelihoods import GaussianLikelihood
from dustmap.inference import GridModel, SolveSettings, solve_global
from pipelines.reproduce._experiment import Row
from pipelines.reproduce._heaton_problem import Scene
from pipelines.reproduce._heaton_start import Start

#: Padding of the torus in length scales: opposite edges correlate by e⁻².
PADDING = 2.0
#: Of the stencil: any will do, since data on the nodes have exact weights.
ORDER = 2
SAMPLES, RTOL, MAX_STEPS = 32, 1e-3, 300


@final
@dataclass(frozen=True, eq=False)
class Fitted:
    """The posterior, the learned hyperparameters, and what the engine reports."""

    posterior: AbstractPosterior
    learned: Start
    report: Row


def fit(scene: Scene, start: Start, quick: bool) -> Fitted:
    """Learning and the final solve, from the hyperparameters of a part of the data."""
    data = Batch(PointValues(scene.x), scene.y.float())
    prior = GridPrior.padded(start.kernel, scene.grid, padding=PADDING, dtype=torch.float32)
    mean, likelihood = ConstantMean(start.mean), GaussianLikelihood(jitter=start.sigma)
    model = GridModel(LocalFeatures(prior, order=ORDER), mean, likelihood)
    settings = SolveSettings(RTOL, MAX_STEPS, 8 if quick else SAMPLES, fit_mean=True)
    solution = solve_global(model, data, settings)
    assert likelihood.log_jitter is not None
    learned = Start(
        start.name,
        start.kernel,
        float(solution.mean_coefficients[0]),
        float(likelihood.log_jitter.detach().exp()),
        start.log_evidence,
    )
    report: Row = {
        "torus": list(prior.torus_shape),
        "wrap_error": prior.report.wrap_error,
        "block_steps": solution.block_steps,
        "worst_residual": solution.worst_residual,
        "converged": solution.converged,
    }
    return Fitted(solution.posterior, learned, report)


def settings(quick: bool) -> Row:
    """For the settings of the experiment."""
    return {
        "features": f"local kriging weights, order {ORDER}",
        "padding": PADDING,
        "samples": 8 if quick else SAMPLES,
        "rtol": RTOL,
        "max_steps": MAX_STEPS,
        "dtype": "float32",
    }
