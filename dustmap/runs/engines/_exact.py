"""The exact engine: a dense Gaussian process, its hyperparameters learned by its evidence."""

from dataclasses import replace
from functools import cache

import torch

from dustmap.config import Config
from dustmap.gp import Batch, ExactGP, RegularGrid, fit_hyperparameters, whole_batch
from dustmap.gp.covariances import AbstractEstimator, ClosedForm, MonteCarlo, Quadrature
from dustmap.inference import NO_JOURNAL, AbstractJournal, GriddedDraws, Kept
from dustmap.linalg import Progress, unwatched
from dustmap.runs.engines._mean_rays import at_mean_distances
from dustmap.runs.kept import hyperparameters_of, learning_of, plain_learning
from dustmap.runs.models import (
    Arrays,
    Hyperparameters,
    Learning,
    Parts,
    StarFit,
    Tell,
    coarse_grid,
    silent,
    start_of,
)

MOST_ROWS = 10_000  # beyond, the dense covariance is too much to factor
#: Stars of uncertain distances beyond which rays end at the mean distance: J² = 256 covariances
#: a pair of rays that are weighted by survival functions take 8 s for so many, by the square.
WEIGHTED_ROWS = 300
QUADRATURE_ORDER = 32  # Gauss-Legendre points on a panel of a ray
MONTE_CARLO_POINTS = 64  # seeded stratified points a ray
#: Nodes of the grid for what distances add: per length scale at most, and in all, since joint
#: draws take the root of a dense covariance.
POINTS_PER_LENGTH = 2.5
MOST_NODES = 3_000
DRAWS = 8


def fit_exact(
    config: Config,
    data: Batch,
    start: Hyperparameters | None,
    journal: AbstractJournal = NO_JOURNAL,
    tell: Tell = silent,
    progress: Progress = unwatched,
) -> StarFit:
    """Learns what model.learn names, from start (None: the configuration's values), and conditions
    on all data.

    Hyperparameters are learned with rays to the mean distance. So is the posterior found of more
    than WEIGHTED_ROWS stars whose distances are uncertain: the noise has what they add, and the
    summary's `rays` says which rays there were.
    """
    del progress  # a dense fit is small
    at, learning = learn_exact(
        config, at_mean_distances(data), start, journal.within("learn"), tell
    )
    return replace(_conditioned(config, data, at), learning=learning)


def learn_exact(
    config: Config,
    data: Batch,
    start: Hyperparameters | None,
    journal: AbstractJournal = NO_JOURNAL,
    tell: Tell = silent,
) -> tuple[Hyperparameters, Learning | None]:
    """Maximises the evidence of fit.learn_rows stars from start, or the configuration's values."""
    kept = journal.latest()
    if kept is not None:
        return hyperparameters_of(kept), learning_of(kept)
    parts = Parts.of(config, start or start_of(config.model), data)
    found = None
    if parts.model.is_learned:
        found = fit_hyperparameters(
            parts.model,
            data,
            # All estimators have the same covariances in mind, and the table is the quickest.
            estimator=ClosedForm(),
            max_steps=config.fit.max_steps,
            tolerance=config.fit.tolerance,
            max_data=config.fit.learn_rows,
            seed=config.fit.seed,
        )
        parts = Parts.fitted(found.model)
    at, learning = parts.hyperparameters(), Learning.of_evidence(found)
    for step in () if learning is None else learning.trace:
        tell(step)
    told = None if learning is None else plain_learning(learning)
    journal.finish(Kept({"hyperparameters": at.as_dict(), "learning": told}))
    return at, learning


def reopen_exact(config: Config, data: Batch, at: Hyperparameters, arrays: Arrays) -> StarFit:
    """The posterior at hyperparameters that an earlier fit has learned."""
    del arrays  # the dense solve takes seconds
    return _conditioned(config, data, at)


def estimator_of(config: Config) -> AbstractEstimator:
    """How model.line_integral has the covariances of rays computed."""
    if config.model.line_integral == "quadrature":
        return Quadrature(QUADRATURE_ORDER)
    if config.model.line_integral == "monte-carlo":
        return MonteCarlo(MONTE_CARLO_POINTS, config.fit.seed)
    return ClosedForm()


@torch.no_grad()
def _conditioned(config: Config, data: Batch, at: Hyperparameters) -> StarFit:
    """The posterior of all data at given hyperparameters."""
    parts = Parts.of(config, at, data)
    gp = ExactGP(parts.kernel, parts.mean, estimator_of(config))
    # Ranks do not share a dense solve: each does the same.
    seen, told = _rays(whole_batch(data))
    noise_variance = parts.likelihood.noise_variance(seen)
    fitted = parts.mean.is_learned
    posterior = gp.condition(seen.functional, seen.y, noise_variance, mean_is_fitted=fitted)

    @cache
    def on_grid() -> GriddedDraws:
        grid = draw_grid(config, at.length)
        return GriddedDraws.of(posterior, grid, DRAWS, config.fit.seed)

    summary = {"log_evidence": float(posterior.log_evidence(seen.y)), **told}
    return StarFit(posterior, at, summary, None, on_grid=on_grid)


def _rays(data: Batch) -> tuple[Batch, dict[str, str]]:
    """The data as they are conditioned on, and what the report says of rays that are weighted."""
    plain = at_mean_distances(data)
    if plain is data:
        return data, {}
    if len(data) <= WEIGHTED_ROWS:
        return data, {"rays": "weighted"}
    return plain, {"rays": "to the mean distance"}


def draw_grid(config: Config, length: float) -> RegularGrid:
    """Over the box of the configuration, no finer than it, than length / 2.5 pc or MOST_NODES."""
    spacing = max(config.grid.spacing, length / POINTS_PER_LENGTH)
    while (grid := coarse_grid(config.grid, spacing)).size > MOST_NODES:
        spacing *= 1.05
    return grid
