"""The density of a fit as the field that maps, queries and exports ask."""

import logging

import torch

from dustmap.config import Config
from dustmap.gp import RegularGrid
from dustmap.inference import LogNormalPosterior, PathwisePosterior
from dustmap.runs.stars._hyperparameters import StarFit
from dustmap.sky.maps import (
    AbstractDensityField,
    MapRequest,
    NodeField,
    OwnNodes,
    PosteriorField,
    sure_coverage,
)
from dustmap.sky.systems import ExtinctionSystem

log = logging.getLogger(__name__)


def field_of(
    config: Config, fit: StarFit, grid: RegularGrid, system: ExtinctionSystem, device: torch.device
) -> AbstractDensityField:
    """grid: the run's own, whose nodes span the box."""
    posterior, prior_std = fit.posterior, fit.hyperparameters.std
    if isinstance(posterior, LogNormalPosterior):
        return NodeField(posterior, grid, system, prior_std)
    # Every other posterior draws anew for each set of places.
    stored = config.fit.samples if isinstance(posterior, PathwisePosterior) else 0
    covered = None
    if isinstance(posterior, PathwisePosterior) and posterior.explained is not None:
        covered = sure_coverage(posterior.explained, len(posterior.deviations))
    own = None if fit.at_nodes is None else OwnNodes(grid, fit.at_nodes, covered)
    return PosteriorField(
        posterior,
        system,
        grid.lower,
        grid.upper,
        prior_std,
        stored_samples=stored,
        own=own,
        device=device,
        seed=config.fit.seed,
    )


def request_of(config: Config, field: AbstractDensityField) -> MapRequest:
    """What [export] asks for; no more samples than the posterior keeps."""
    samples = min(config.export.samples, field.n_samples)
    if samples < config.export.samples:
        log.info(
            "export.samples = %d: the posterior keeps %d, which is what the map gets",
            config.export.samples,
            samples,
        )
    names = (*config.export.quantities, *(("samples",) if samples else ()))
    return MapRequest.named(names, samples)
