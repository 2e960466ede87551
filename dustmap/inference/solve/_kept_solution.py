"""A global solution as arrays, and back at a model of the same parameters."""

import torch

from dustmap.gp import Batch
from dustmap.inference._journal import Kept
from dustmap.inference._kept import (
    Reading,
    kept_preconditioner,
    restored_preconditioner,
    state,
)
from dustmap.inference.solve._blocks import SOLVE, restored_result
from dustmap.inference.solve._grid_model import GridModel
from dustmap.inference.solve._pathwise import PathwisePosterior
from dustmap.inference.solve._solution import GlobalSolution, paired


def kept_solution(solution: GlobalSolution) -> Kept:
    """All of it but the model."""
    solve, posterior = solution.solve, solution.posterior
    return state(
        SOLVE,
        {
            "antithetic": posterior.antithetic,
            "rtol": solve.rtol,
            "quadratic_form": solution.quadratic_form,
            "scale": solution.scale,
            "rounding": solution.rounding,
        },
        {
            "x": solve.x,
            "status": solve.status,
            "steps": solve.steps,
            "residuals": solve.residuals,
            "coefficients": posterior.coefficients,
            "sigma": solution.sigma,
        },
        {"preconditioner": kept_preconditioner(solution.preconditioner)},
        finished=True,
    )


def restored_solution(model: GridModel, data: Batch, reading: Reading) -> GlobalSolution:
    """The solution of these data that was found with this model.

    An error if model or data have another size.
    """
    width, y = model.features.n_features, data.y
    like = torch.zeros(0, dtype=model.features.dtype, device=y.device)
    solve = restored_result(reading, width, like, reading.number("rtol"))
    beta = model.mean.coefficients().detach()
    coefficients = reading.array("coefficients", beta, len(beta))
    antithetic = reading.flag("antithetic")
    deviations = paired(solve.x[1:], antithetic)
    return GlobalSolution(
        PathwisePosterior(model, coefficients, solve.x[0], deviations, antithetic),
        reading.real("sigma", y, len(y)),
        solve,
        restored_preconditioner(reading, "preconditioner", width, like),
        reading.number("quadratic_form"),
        reading.number("scale"),
        reading.number("rounding"),
    )
