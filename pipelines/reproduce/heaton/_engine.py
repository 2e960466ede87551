"""The global engine on one scene of `heaton`: grid points are the cells."""

from dataclasses import dataclass, replace
from typing import final

import torch

from dustmap.gp import Batch, ConstantMean, GridPrior, Prediction
from dustmap.gp.features import LocalFeatures
from dustmap.gp.functionals import PointValues
from dustmap.gp.likelihoods import GaussianLikelihood
from dustmap.inference import GridModel, PathwisePosterior, SolveSettings, solve_in_data_space
from pipelines.reproduce._experiment import Row
from pipelines.reproduce.heaton._problem import Scene
from pipelines.reproduce.heaton._start import Learned

#: Padding of the torus in length scales: opposite edges of the box correlate by e⁻².
PADDING = 2.0
#: Of the stencil: any will do, since data on the nodes have exact weights.
ORDER = 2
SAMPLES, RTOL, MAX_STEPS = 32, 1e-3, 200


@final
@dataclass(frozen=True, eq=False)
class Fitted:
    """The posterior, the hyperparameters with the fitted mean, and what the engine reports."""

    posterior: PathwisePosterior
    learned: Learned
    report: Row

    def cells(self) -> Prediction:
        """Mean and variance of the field at every cell."""
        return self.posterior.at_nodes()


def fit(scene: Scene, learned: Learned, quick: bool) -> Fitted:
    """Mean and draws at the learned hyperparameters, with the mean's coefficient fitted."""
    data = Batch(PointValues(scene.x), scene.y.float())
    prior = GridPrior.padded(learned.kernel, scene.grid, padding=PADDING, dtype=torch.float32)
    likelihood = GaussianLikelihood(jitter=learned.sigma, learn=False)
    model = GridModel(LocalFeatures(prior, order=ORDER), ConstantMean(learned.mean), likelihood)
    plan = SolveSettings(RTOL, MAX_STEPS, 8 if quick else SAMPLES, fit_mean=True)
    solution = solve_in_data_space(model, data, plan)
    report: Row = {
        "torus": list(prior.torus_shape),
        "wrap_error": prior.report.wrap_error,
        "cg_steps": solution.block_steps,
        "worst_residual": solution.worst_residual,
        "converged": solution.converged,
    }
    fitted = replace(learned, mean=float(solution.mean_coefficients[0]))
    return Fitted(solution.posterior, fitted, report)


def settings(quick: bool) -> Row:
    """For the settings of the experiment."""
    return {
        "solve": "data space, preconditioned by 30 neighbours",
        "padding": PADDING,
        "samples": 8 if quick else SAMPLES,
        "rtol": RTOL,
        "max_steps": MAX_STEPS,
        "dtype": "float32",
    }
