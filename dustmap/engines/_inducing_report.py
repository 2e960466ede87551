"""What a fit with inducing points says of its grid, its rows and how it was solved."""

from dataclasses import asdict, astuple
from functools import reduce
from typing import Any

import torch

from dustmap import inference
from dustmap.engines._engine import Problem
from dustmap.engines._grids import coarse_advice
from dustmap.engines._inducing_grid import ExtrapolatingFeatures, InducingPlan
from dustmap.gp import features
from dustmap.gp.features import AbstractFeatureMap, HIPFeatures, SolveSummary
from dustmap.gp.functionals import by_rows, world_of
from dustmap.inference import VariationalModel
from dustmap.linalg import AbstractWorld

#: Data whose residual variance stands for that of all.
_SAMPLE = 2000
#: Error of the posterior mean, in its standard deviations, that is worth a word.
_LARGE_ERROR = 0.1
#: Errors of variances that rows of contour integrals leave, in tolerances and in variances of the
#: kernel, at most; advice where they are more than the noise.
_CIQ_ERROR = 16.0
_ROUGH = (
    'rows by whitening="ciq" leave more than the noise variance of a typical datum unexplained, on '
    'any grid: take whitening="cholesky" or "hip"'
)
_EARLY = (
    "steps on minibatches ended before they came to rest: take epochs = 0, which needs no steps, "
    "more epochs or larger batches"
)
#: Gradient that steps may leave, in standard deviations of q over all directions.
MOST_GRADIENT = 1.0


@torch.no_grad()
def rows_report(
    problem: Problem, model: VariationalModel, plan: InducingPlan, source: inference.RowSource
) -> tuple[dict[str, Any], list[str]]:
    """The solves behind the rows of some data, and what these leave unexplained over the noise of
    a typical one; and advice."""
    data = problem.data
    some = slice(0, len(data), max(1, len(data) // _SAMPLE))
    rows, noise = source.select(some), model.likelihood.noise_variance(data)[some]
    left = by_rows(data.functional[some], lambda _: rows.residual_variance)
    ratio, variance = float((left / noise).median()), float(problem.model.kernel.variance())
    solves = _of_all_ranks(rows.solves, world_of(data.functional))
    is_rough = plan.whitening == "ciq" and _CIQ_ERROR * plan.rtol * variance > noise.median()
    advice = [_ROUGH] if is_rough else coarse_advice(ratio)
    if solves.unconverged:
        advice.append(
            f"{solves.unconverged} of {solves.columns} rows of features stopped at a relative "
            f'residual of up to {solves.residual:.1e}: use dtype="float64", more padding, or '
            f'whitening="torus"'
        )
    return {"rows": asdict(solves), "residual_ratio": ratio}, advice


def steps_advice(gradient: float) -> list[str]:
    """Return advice where steps on minibatches have left a gradient (`inference.unsettled`)."""
    return [] if gradient < MOST_GRADIENT else [f"{_EARLY} (gradient {gradient:.2g}, expected 1)"]


def _of_all_ranks(solves: SolveSummary, world: AbstractWorld) -> SolveSummary:
    """The summary of the solves of all ranks."""
    numbers = torch.tensor(astuple(solves), dtype=torch.float64)[:, None]
    parts = [
        SolveSummary(int(columns), int(unconverged), int(steps), residual)
        for columns, unconverged, steps, residual in world.gathered(numbers).mT.tolist()
    ]
    return reduce(SolveSummary.merged, parts)


def error_advice(error: float, dtype: torch.dtype) -> list[str]:
    """Return advice where rounding keeps the posterior mean from its solution."""
    if error <= _LARGE_ERROR:
        return []
    what_to_do = ': use dtype="float64"' if dtype == torch.float32 else ""
    return [
        f"the posterior mean is off by some {error:.2g} standard deviations, by rounding"
        f"{what_to_do}"
    ]


def sizes(plan: InducingPlan, phi: AbstractFeatureMap) -> dict[str, Any]:
    """Plain values of the plan and of the construction of the prior."""
    return {
        **plan.report(),
        "whitening": plan.whitening,
        "family": plan.family,
        "block": None if plan.block is None else list(plan.block),
        "rank": plan.rank,
        "bytes_rows": plan.bytes_rows,
        "prior": _prior_report(phi),
    }


def _prior_report(phi: AbstractFeatureMap) -> dict[str, float | int]:
    """Errors and repairs of the prior."""
    if isinstance(phi, ExtrapolatingFeatures):
        phi = phi.outer
    if isinstance(phi, features.CholeskyFeatures | features.CIQFeatures):
        return {"nugget": phi.nugget * float(phi.kernel.variance().detach())}
    assert isinstance(phi, HIPFeatures | features.TorusFeatures)
    names = ("wrap_error", "wrap_inflation", "smallest_eigenvalue", "clamped", "nugget")
    return {name: getattr(phi.prior.report, name) for name in names}
