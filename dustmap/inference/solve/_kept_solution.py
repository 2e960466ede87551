"""A global solution as arrays, and back at a model of the same parameters."""

import torch
from torch import Tensor

from dustmap.gp import Batch
from dustmap.inference._coefficients import CoefficientSpread
from dustmap.inference._journal import (
    Kept,
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
    spread = posterior.spread
    return state(
        SOLVE,
        {
            "antithetic": posterior.antithetic,
            "rtol": solve.rtol,
            "quadratic_form": solution.quadratic_form,
            "scale": solution.scale,
            "rounding": solution.rounding,
            "spread_error": 0.0 if spread is None else spread.error,
        },
        {
            "x": solve.x,
            "status": solve.status,
            "steps": solve.steps,
            "residuals": solve.residuals,
            "coefficients": posterior.coefficients,
            "sigma": solution.sigma,
            **({} if spread is None else spread.tensors()),
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
    spread = _spread(reading, beta, solve.x, len(deviations))
    return GlobalSolution(
        PathwisePosterior(model, coefficients, solve.x[0], deviations, antithetic, spread=spread),
        reading.real("sigma", y, len(y)),
        solve,
        restored_preconditioner(reading, "preconditioner", width, like),
        reading.number("quadratic_form"),
        reading.number("scale"),
        reading.number("rounding"),
    )


def _spread(reading: Reading, beta: Tensor, fields: Tensor, count: int) -> CoefficientSpread | None:
    """None where there is none: of coefficients that were given, or of an earlier version."""
    if not reading.has("spread_fields"):
        return None
    return CoefficientSpread(
        reading.array("spread_directions", beta, len(beta), None),
        reading.array("spread_fields", fields, None, fields.shape[1]),
        reading.array("spread_draws", beta, count, None),
        reading.number("spread_error"),
    )
