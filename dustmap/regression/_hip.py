"""The gridded engine: features of a padded torus, one direct solve."""

from dataclasses import dataclass, replace
from typing import final

import torch

from dustmap.gp import Batch, GridPrior
from dustmap.gp.families import (
    AbstractFamily,
    BlockFamily,
    FullRankFamily,
    LowRankDiagonalFamily,
    MeanFieldFamily,
)
from dustmap.gp.features import (
    AbstractFeatureMap,
    CholeskyFeatures,
    CIQFeatures,
    HIPFeatures,
    SolveSummary,
    TorusFeatures,
)
from dustmap.gp.kernels import AbstractKernel
from dustmap.inference import (
    CoefficientSpread,
    DirectSolution,
    RowSource,
    VariationalModel,
    fit_mean,
    full_elbo,
    mean_spread,
    nugget_for,
    solve_direct,
)
from dustmap.linalg import Progress, TilePartition, unwatched
from dustmap.regression._features import ExtrapolatingFeatures
from dustmap.regression._learning import Prior
from dustmap.regression._plan import HipPlan

#: Data whose residual variance stands for that of all.
_SAMPLE = 2000
# Data on which the rounding of rows is measured.
_ROUNDED = 64
# Of the solves behind the rows and of the one for the mean: tens to hundreds are the rule.
_MAX_STEPS = 3000


@final
@dataclass(frozen=True, eq=False)
class HipFit:
    """The fitted model with q. rows: how the solves behind the rows ended, of all or of a part.

    spread: of the coefficients of the mean where they were fitted.
    """

    model: VariationalModel
    solution: DirectSolution
    spread: CoefficientSpread | None
    rows: SolveSummary
    residual_ratio: float


def build_model(prior: Prior, plan: HipPlan) -> VariationalModel:
    """Features and family of the plan, at the present hyperparameters."""
    features = make_features(prior.kernel, plan)
    return VariationalModel(features, prior.mean, prior.likelihood, make_family(plan))


def rounding_share(prior: Prior, plan: HipPlan, batch: Batch) -> float:
    """Variance that rounding to the plan's precision adds to f, over the noise variance.

    Var δφᵀε = ‖δφ‖² for the error δφ of a row: the median of some rows, beside float64.
    """
    some = batch[slice(0, len(batch), max(1, len(batch) // _ROUNDED))]
    with torch.no_grad():
        noise = prior.likelihood.noise_variance(some)
        exact, rounded = (
            make_features(prior.kernel, replace(plan, dtype=dtype)).rows(some.functional).phi
            for dtype in (torch.float64, plan.dtype)
        )
        return float(((rounded - exact).square().sum(-1) / noise).median())


def fit_posterior(
    model: VariationalModel, batch: Batch, max_memory: int, progress: Progress = unwatched
) -> HipFit:
    """The direct solution; rows are kept where half of the memory holds them.

    A learned mean gets the coefficients that fit all data best.
    """
    source = RowSource(model.features, batch.functional, max_memory // 2)
    rtol = 1e-6 if model.features.dtype == torch.float64 else 1e-4
    solution = solve_direct(
        model, batch, source, rtol=rtol, max_steps=_MAX_STEPS, progress=progress
    )
    spread = mean_spread(model, solution.state, batch, source, max_steps=_MAX_STEPS)
    if spread is not None:
        fitted = fit_mean(model, solution.state, batch, source, spread)
        model, state = fitted.model, fitted.state
        solution = replace(solution, state=state, elbo=full_elbo(model, state, batch, source))
    with torch.no_grad():
        noise = model.likelihood.noise_variance(batch)
        # Of the median datum: a part of the data is enough.
        some = slice(0, len(batch), max(1, len(batch) // _SAMPLE))
        rows = source.select(some)
        ratio = float((rows.residual_variance / noise[some]).median())
    return HipFit(model, solution, spread, rows.solves, ratio)


def make_features(kernel: AbstractKernel, plan: HipPlan) -> AbstractFeatureMap:
    """Rows of Φ for points inside the grid and beyond it."""
    grid, nugget = plan.grid, nugget_for(kernel, plan.dtype)
    if plan.whitening == "cholesky":
        return CholeskyFeatures(kernel, grid, nugget=max(nugget, 1e-10), rows_dtype=plan.dtype)
    if plan.whitening == "ciq":
        return CIQFeatures(kernel, grid, nugget=nugget, rows_dtype=plan.dtype, rtol=plan.rtol)
    prior = GridPrior.padded(
        kernel, grid, nugget=nugget, dtype=plan.dtype, torus_shape=plan.torus_shape
    )
    # Beyond the box the images of the wrapped kernel would repeat the opposite face: there the
    # plain kernel says how a point depends on the nodes.
    plain = HIPFeatures(replace(prior, wrapping=None), rtol=plan.rtol, max_steps=_MAX_STEPS)
    if plan.whitening == "torus":
        return ExtrapolatingFeatures(TorusFeatures(prior), plain, grid)
    inner = HIPFeatures(prior, rtol=plan.rtol, max_steps=_MAX_STEPS)
    return ExtrapolatingFeatures(inner, plain, grid)


def prior_report(features: AbstractFeatureMap) -> dict[str, float | int]:
    """What the construction of the prior on the grid did."""
    if isinstance(features, CholeskyFeatures | CIQFeatures):
        return {"nugget": features.nugget * float(features.kernel.variance().detach())}
    assert isinstance(features, ExtrapolatingFeatures)
    report = features.outer.prior.report
    return {
        "wrap_error": report.wrap_error,
        "wrap_inflation": report.wrap_inflation,
        "smallest_eigenvalue": report.smallest_eigenvalue,
        "clamped": report.clamped,
        "nugget": report.nugget,
    }


def make_family(plan: HipPlan) -> AbstractFamily:
    """The family of the plan."""
    if plan.family == "mean-field":
        return MeanFieldFamily(plan.n_features)
    if plan.family == "low-rank":
        return LowRankDiagonalFamily(plan.n_features, plan.rank, max_bytes=plan.max_memory)
    if plan.family == "full":
        return FullRankFamily(plan.n_features, max_bytes=plan.max_memory)
    assert plan.block is not None
    partition = TilePartition(plan.torus_shape, plan.block)
    return BlockFamily(partition, max_bytes=plan.max_memory)
