"""The collapsed bound with free inducing points: all data at once, by L-BFGS, in any dimension."""

from dataclasses import dataclass, replace
from typing import Any, final

import torch
from torch import Tensor

from dustmap.gp import AbstractMean, Batch, FitStatus
from dustmap.gp.kernels import AbstractKernel
from dustmap.gp.likelihoods import GaussianLikelihood
from dustmap.inference import (
    CollapsedFit,
    RowSource,
    VariationalPosterior,
    fit_collapsed,
    mean_spread,
    solve_collapsed,
)
from dustmap.regression._learning import TOLERANCE
from dustmap.regression._svgp import (
    SVGPPlan,
    SVGPSettings,
    SVGPState,
    build_model,
    starting_points,
)


@final
@dataclass(frozen=True, eq=False)
class SGPRState:
    """The engine of the collapsed bound: what it fits is a model of free inducing points."""

    fitted: SVGPState

    @property
    def posterior(self) -> VariationalPosterior:
        return self.fitted.posterior

    @property
    def plan(self) -> SVGPPlan:
        return self.fitted.plan

    @property
    def inducing(self) -> Tensor:
        """(M, D), in standardised units."""
        return self.fitted.inducing


@final
@dataclass(frozen=True, eq=False)
class SGPRFit:
    """The fitted state with its bound and plain values on how it came about."""

    state: SGPRState
    elbo: float
    report: dict[str, Any]


def fit_sgpr(
    kernel: AbstractKernel,
    mean: AbstractMean,
    likelihood: GaussianLikelihood,
    batch: Batch,
    settings: SVGPSettings,
    max_steps: int,
) -> SGPRFit:
    """Learns hyperparameters and inducing points along Titsias' bound; q has a closed form.

    Each evaluation goes over all rows, O(N M²) at the memory of a chunk of them, in float64: the
    bound's gradient is exact, so that L-BFGS needs no rate and no batches. max_steps: of L-BFGS.
    """
    settings = replace(settings, dtype=torch.float64)
    generator = torch.Generator().manual_seed(settings.seed)
    points = starting_points(kernel, batch, settings, generator)
    plan = SVGPPlan(len(points), len(batch), settings.dtype, settings.max_memory)
    plan.check()
    model = build_model(kernel, mean, likelihood, plan, points, settings.learn_points)
    learned = None
    if model.is_learned:
        learned = fit_collapsed(model, batch, max_steps=max_steps, tolerance=TOLERANCE)
        model = learned.model
    source = RowSource(model.features, batch.functional, plan.max_memory // 2)
    solution = solve_collapsed(model, batch, source)
    spread = mean_spread(model, solution.state, batch, source)
    state = SGPRState(SVGPState(VariationalPosterior(model, solution.state, spread), plan))
    return SGPRFit(state, solution.value, _report(plan, learned))


def _report(plan: SVGPPlan, learned: CollapsedFit | None) -> dict[str, Any]:
    found: dict[str, Any] = {"evaluations": 0, "refused": 0}
    advice = []
    if learned is not None:
        found = {
            "status": learned.status.value,
            "evaluations": len(learned.objective),
            "refused": learned.refused,
            "largest_gradient": learned.largest_gradient,
        }
        if learned.status is not FitStatus.CONVERGED:
            advice.append(f"the bound {_ENDED[learned.status]}: {learned.status.remedy}")
    return {
        "n_inducing": plan.n_inducing,
        "dtype": str(plan.dtype).removeprefix("torch."),
        "bytes_needed": plan.bytes_needed,
        "climb": found,
        "advice": advice,
    }


_ENDED = {
    FitStatus.MAX_STEPS: "still rose after max_steps of L-BFGS",
    FitStatus.AT_BOUND: "drove a parameter to the end of its range",
    FitStatus.STAGNATED: "rose no more though its gradient is not small",
}
