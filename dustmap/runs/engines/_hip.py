"""The hip engine: inducing points on a grid over the box, one direct solve (Wu et al. 2021)."""

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch

from dustmap.config import Config
from dustmap.gp import Batch, GridPrior, RegularGrid
from dustmap.gp.covariances import AbstractEstimator, MonteCarlo
from dustmap.gp.families import AbstractGaussian
from dustmap.gp.features import (
    AbstractFeatureMap,
    CholeskyFeatures,
    CIQFeatures,
    HIPFeatures,
    TorusFeatures,
)
from dustmap.gp.functionals import PointValues
from dustmap.gp.kernels import AbstractKernel
from dustmap.inference import (
    NO_JOURNAL,
    AbstractJournal,
    GriddedDraws,
    RowSource,
    SVISettings,
    SVIState,
    VariationalModel,
    VariationalPosterior,
    fit_svi,
    full_elbo,
)
from dustmap.linalg import Progress, unwatched
from dustmap.regression import HipPlan, HipSettings, fit_posterior, make_family, plan_fit
from dustmap.runs.engines._exact import estimator_of, learn_exact
from dustmap.runs.engines._hip_posterior import PlacesAndRays, draws_at_inducing_points
from dustmap.runs.engines._mean_rays import at_mean_distances
from dustmap.runs.models import (
    Arrays,
    Hyperparameters,
    Parts,
    StarFit,
    Tell,
    coarse_grid,
    dtype_of,
    grid_of,
    silent,
)

log = logging.getLogger(__name__)

MOST_ROWS = 10_000_000
#: Inducing points per length scale. More explain little more of an integral along a ray; the map
#: itself is read off at the nodes of the configuration, however many they are.
POINTS_PER_LENGTH = 2.5
#: Of the field, from which the variance that distances add is computed.
DRAWS = 8
#: Stratified random points of a ray. Rays of some 5 length scales have covariances with the nodes
#: that are within 0.5 %, as with twice the points within 0.2 %: little beside what inducing points
#: leave unexplained.
RAY_POINTS = 32
#: Of the largest eigenvalue, for kernels so smooth that K_uu is singular without.
NUGGET = 1e-6


def fit_hip(
    config: Config,
    data: Batch,
    start: Hyperparameters | None,
    journal: AbstractJournal = NO_JOURNAL,
    tell: Tell = silent,
    progress: Progress = unwatched,
) -> StarFit:
    """Learns by the exact evidence of fit.learn_rows stars; then the posterior of all stars."""
    part = journal.within("learn")
    learned, learning = learn_exact(config, at_mean_distances(data), start, part, tell)
    at, told = _within_the_box(config, learned)
    fit = _conditioned(config, data, at, journal.within("condition"), tell, progress)
    return replace(fit, summary=fit.summary | told, learning=learning)


def _within_the_box(
    config: Config, at: Hyperparameters
) -> tuple[Hyperparameters, dict[str, float]]:
    """A length scale beyond the longest side is as good as that side, which a torus can hold."""
    longest = max(config.grid.size)
    if at.length <= longest:
        return at, {}
    log.info("length scale %.4g pc, beyond the box: %.4g pc taken", at.length, longest)
    return replace(at, length=longest), {"length_learned_beyond_the_box": at.length}


def reopen_hip(config: Config, data: Batch, at: Hyperparameters, arrays: Arrays) -> StarFit:
    """The posterior at hyperparameters that an earlier fit has learned, computed again."""
    del arrays
    return _conditioned(config, data, at)


def _conditioned(
    config: Config,
    data: Batch,
    at: Hyperparameters,
    journal: AbstractJournal = NO_JOURNAL,
    tell: Tell = silent,
    progress: Progress = unwatched,
) -> StarFit:
    """The posterior of the family at given hyperparameters: in closed form, or by epochs."""
    parts = Parts.of(config, at, data).fixed()
    grid = coarse_grid(config.grid, at.length / POINTS_PER_LENGTH)
    plan = plan_fit(parts.kernel, grid, len(data), hip_settings(config))
    plan.check()
    model = VariationalModel(
        _features(config, parts.kernel, plan), parts.mean, parts.likelihood, make_family(plan)
    )
    if config.fit.epochs:
        state, solved = _stochastic(config, model, data, plan, journal, tell)
    else:
        state, solved = _direct(model, data, plan, progress)
    summary = {
        "whitening": plan.whitening,
        "family": plan.family,
        "inducing_points": list(grid.shape),
        "whitened_variables": plan.n_features,
        **solved,
    }
    found = VariationalPosterior(model, state)
    posterior = PlacesAndRays.of(found)
    nodes = PointValues(grid_of(config.grid).points(device=data.y.device))
    return StarFit(
        posterior,
        at,
        summary,
        None,
        # Scores, maps and figures ask for the same nodes.
        at_nodes=cache(partial(posterior.predict, nodes)),
        on_grid=partial(_draws, found, grid, config.fit.seed),
    )


def _draws(posterior: VariationalPosterior, grid: RegularGrid, seed: int) -> GriddedDraws:
    if isinstance(posterior.model.features, CholeskyFeatures | CIQFeatures):
        return GriddedDraws.of(posterior, grid, DRAWS, seed)
    return draws_at_inducing_points(posterior, DRAWS, seed)


def _direct(
    model: VariationalModel, data: Batch, plan: HipPlan, progress: Progress
) -> tuple[AbstractGaussian, dict[str, Any]]:
    """S by one pass and the mean by CG."""
    fit = fit_posterior(model, data, plan.max_memory, progress)
    return fit.solution.state, {
        "elbo": fit.solution.elbo,
        "rows_unconverged": fit.rows.unconverged,
        "cg_steps": int(fit.solution.solve.steps),
        "cg_residual": float(fit.solution.solve.residuals),
        "residual_variance_over_noise": fit.residual_ratio,
    }


def _stochastic(
    config: Config,
    model: VariationalModel,
    data: Batch,
    plan: HipPlan,
    journal: AbstractJournal,
    tell: Tell,
) -> tuple[AbstractGaussian, dict[str, Any]]:
    """Natural-gradient steps on minibatches, in the order that fit.seed gives."""
    source = RowSource(model.features, data.functional, plan.max_memory // 2)
    settings = SVISettings(batch_size=config.fit.batch, epochs=config.fit.epochs)
    generator = torch.Generator().manual_seed(config.fit.seed)
    heard = _telling(len(data), tell)
    last = fit_svi(model, data, source, settings, generator, progress=heard, journal=journal)
    elbo = full_elbo(model, last.posterior, data, source)
    return last.posterior, {"elbo": elbo, "steps": last.step, "epochs": last.epoch}


def _telling(n: int, tell: Tell) -> Callable[[SVIState], None]:
    """Logs an epoch, and tells its numbers."""
    seen = [0]

    def told(state: SVIState) -> None:
        if state.epoch > seen[0]:
            seen[0] = state.epoch
            elbo = state.taken.elbo / n
            log.info("epoch %d: log-evidence per star at least %.4g", state.epoch, elbo)
            tell({"part": "epochs", "epoch": state.epoch, "elbo_per_star": elbo})

    return told


def hip_settings(config: Config) -> HipSettings:
    """What the configuration leaves to choose."""
    return HipSettings(
        family=config.fit.family,
        whitening="hip" if config.fit.whitening == "auto" else config.fit.whitening,
        block=config.fit.block or None,
        rank=config.fit.rank,
        padding=4.0,
        dtype=dtype_of(config.compute),
        max_memory=config.compute.memory_bytes,
    )


def _estimator(config: Config) -> AbstractEstimator:
    """That of every engine, but with the random points that inducing points call for."""
    if config.model.line_integral == "monte-carlo":
        return MonteCarlo(RAY_POINTS, config.fit.seed)
    return estimator_of(config)


def _features(config: Config, kernel: AbstractKernel, plan: HipPlan) -> AbstractFeatureMap:
    smooth = config.model.kernel == "squared-exponential"
    estimator = _estimator(config)
    nugget = NUGGET if smooth else 0.0
    if plan.whitening == "cholesky":
        return CholeskyFeatures(kernel, plan.grid, estimator, nugget=nugget, rows_dtype=plan.dtype)
    if plan.whitening == "ciq":
        return CIQFeatures(
            kernel, plan.grid, estimator, nugget=nugget, rows_dtype=plan.dtype, rtol=plan.rtol
        )
    prior = GridPrior.padded(
        kernel, plan.grid, nugget=nugget, dtype=plan.dtype, torus_shape=plan.torus_shape
    )
    if plan.whitening == "torus":
        return TorusFeatures(prior, estimator)
    return HIPFeatures(prior, estimator, rtol=plan.rtol, max_steps=config.fit.pcg_steps)
