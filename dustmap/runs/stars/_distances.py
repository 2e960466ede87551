"""Distances of stars as the map of a fit leaves them: by extinctions, and under a magnitude limit.

By extinctions the noise is that of the run: its factor on the errors, its scatter, its degrees of
freedom. A map that has seen a star has used its extinction already, which is then counted twice;
the report of `predict` says of how many.

Of a catalog with a magnitude limit, stars behind the map's dust are missing, so that those that are
there are in front of it, more likely than their parallaxes say. Every round of distances weights
them anew, always those of the catalog, by `dustmap.sky.observations.SelectionWeights`.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dustmap.config import Config
from dustmap.errors import UserError
from dustmap.gp import AbstractPosterior, Prediction, RegularGrid
from dustmap.gp.functionals import OutsidePolicy, gathered, own_rays, own_rows
from dustmap.inference import (
    DatumScores,
    LogNormalPosterior,
    scores_of_mixture,
)
from dustmap.linalg import Progress, unwatched, watched_chunks
from dustmap.runs._machine import TOGETHER
from dustmap.runs.reports import Predictions
from dustmap.runs.stars._engines import StarFit
from dustmap.runs.stars._parts import StarShare
from dustmap.sky import observations
from dustmap.sky.catalogs import Extinctions
from dustmap.sky.observations import (
    DistancePosterior,
    DustAlong,
    Observations,
    PriorDust,
    SelectionWeights,
    Stops,
    classes_of,
    common_distances,
    distance_nodes,
    distance_posterior,
    smoothed,
)
from dustmap.sky.stars import (
    LEAST,
    WEIGHT_SCORES,
    AbstractDistances,
    ExactDistances,
    LuminosityFunction,
    SeenPart,
    StarTable,
    WeightedDistances,
    distance_modulus,
    thinned,
    weight_nodes,
    well_known,
)
from dustmap.sky.systems import ExtinctionSystem, conversion, system_named

log = logging.getLogger(__name__)

Array: TypeAlias = NDArray[np.float64]

#: Draws of a log-normal map that take part, at most.
_DRAWS = 16
#: Columns of percentiles -> their probabilities, and all that are added.
_PERCENTILES = {f"distance_percentile{q}": q / 100.0 for q in (16, 50, 84)}
COLUMNS = ("distance_mean", "distance_std", *_PERCENTILES)
#: Stars of the luminosity function, and directions of the mean over the sky, at most.
_ABSOLUTE, _DIRECTIONS = 2000, 1500
#: Little of an error's variance.
_LITTLE = 0.05
#: Stars whose weights or scores are computed at once.
_STARS = 2**12
#: Least ln w, beside which nothing is left.
_DEEPEST = -50.0


@final
@dataclass(frozen=True, eq=False)
class DistanceFinder:
    """Posteriors of distances behind the map of a fit, in whose box the Sun is.

    dust: beyond the box, where the policy `outside` expects any; system: of the map.
    """

    fit: StarFit
    grid: RegularGrid
    dust: PriorDust
    outside: OutsidePolicy
    system: ExtinctionSystem
    device: torch.device

    def __post_init__(self) -> None:
        if not bool(self.grid.contains(torch.zeros(1, 3, dtype=torch.float64)).item()):
            raise UserError(
                "--distances: the Sun is outside the box of this run, and extinctions along a ray "
                "start there; leave it out"
            )

    def columns(
        self,
        l: Array,
        b: Array,
        distances: AbstractDistances,
        measured: Extinctions,
        groups: NDArray[np.int64] | None = None,
        progress: Progress = unwatched,
    ) -> Mapping[str, Array]:
        """Return COLUMNS of N stars in pc (N,), NaN where there is no extinction.

            p(d | ϖ, y) ∝ p(d | ϖ) Σ_s p(y | A_s(<d), v(d), σ)

        groups (N,): the run's numbers of the groups of measurements, whose zero points these have.
        """
        columns = {name: np.full(len(l), np.nan) for name in COLUMNS}
        rows = np.flatnonzero(np.isfinite(measured.value))
        factor = conversion(measured.system, self.system)
        most = max(1, TOGETHER // len(observations.SCORES))
        for part in watched_chunks(len(rows), most, "distances", progress):
            at = rows[part]
            y, error = factor * measured.value[at], factor * measured.error[at]
            own = None if groups is None else groups[at]
            posterior = self.posterior(l[at], b[at], distances[at], y, error, own)
            columns["distance_mean"][at] = posterior.mean
            columns["distance_std"][at] = posterior.std
            levels = posterior.quantile(np.array(list(_PERCENTILES.values())))
            for name, values in zip(_PERCENTILES, levels.T, strict=True):
                columns[name][at] = values
        return columns

    def posterior(
        self,
        l: Array,
        b: Array,
        distances: AbstractDistances,
        y: Array,
        error: Array,
        groups: NDArray[np.int64] | None = None,
    ) -> DistancePosterior:
        """Return the posteriors of few stars at once, of extinctions in the system of the map."""
        nodes = distance_nodes(distances)
        count = nodes.shape[1]
        where = np.repeat(l, count), np.repeat(b, count), ExactDistances(nodes.ravel())
        lines = observations.sight_lines(*where, self.grid, self.outside, self.device)
        if groups is not None:
            own = torch.from_numpy(np.repeat(groups, count)[lines.rows]).to(self.device)
            lines = replace(lines, rays=replace(lines.rays, groups=own))
        gains = None if groups is None else self.fit.gains(lines.rays)
        along = observations.predict_extinction(self.fit.posterior, lines, self.dust, gains=gains)

        def at_nodes(values: Tensor) -> Array:
            flat = np.zeros((len(values), nodes.size))
            flat[:, lines.rows] = values.cpu().numpy()
            return flat.reshape(-1, *nodes.shape)

        mean, variance = at_nodes(torch.stack([along.mean.double(), along.variance.double()]))
        draws = mean[None]
        if isinstance(self.fit.posterior, LogNormalPosterior):
            count = min(_DRAWS, self.fit.posterior.n_samples)
            drawn = self.fit.posterior.sample(lines.rays, count, torch.Generator())
            draws, variance = smoothed(at_nodes(drawn.double()), mean, variance)
        numbers = torch.from_numpy(y[:, None]), torch.from_numpy(error[:, None] ** 2)

        def log_density(mean: Array, variance: Array) -> Array:
            expected = Prediction(torch.from_numpy(mean), torch.from_numpy(variance))
            at, none = self.fit.hyperparameters, torch.zeros(1, dtype=torch.float64)
            return at.log_density(*numbers, expected, none).numpy()

        return distance_posterior(nodes, draws, variance, log_density)


@final
@dataclass(frozen=True, eq=False)
class MagnitudeLimit:
    """The limit of a catalog, and its stars.

    stars: those of this rank that are observed, in the order of their rays; sample: some of all,
    the same on every rank; limit: the faintest magnitude; dimming: magnitudes that one of the
    stars' extinction takes; grid: whose box the map is in; seed: of draws behind it.
    """

    stars: StarTable
    sample: StarTable
    limit: float
    dimming: float
    grid: RegularGrid
    seed: int

    @staticmethod
    def of(
        config: Config, share: StarShare, observed: Observations, grid: RegularGrid
    ) -> "MagnitudeLimit | None":
        """Return the limit of the catalog; None where there is none, where data.magnitude_weights
        says so, or where distances are exact."""
        data, own = config.data, share.own.stars
        if not data.weights_distances or own.distances.exact:
            return None
        mine = own_rows(observed.batch.functional)
        rows = torch.from_numpy(observed.rows)[mine].numpy() - share.first
        dimming = conversion(own.system, system_named(data.magnitude_band))
        return MagnitudeLimit(
            own[rows], share.sample, data.magnitude_limit, dimming, grid, config.fit.seed
        )

    def weights(
        self,
        observed: Observations,
        posterior: AbstractPosterior,
        dust: PriorDust,
        progress: Progress = unwatched,
    ) -> tuple[Tensor | None, int]:
        """Return ln w (N, K) of all observed stars, float32, at the nodes of `WeightedDistances`,
        behind a posterior and the dust expected beyond the box, and the number of stars whose
        luminosity function they go by; no weights without enough of these."""
        beyond = None if observed.beyond is None else dust
        along = DustAlong(posterior, self.grid, beyond, observed.measured.device, self.seed)
        selection, used = self._learned(along)
        if selection is None:
            return None, used
        rays, stars = observed.batch.functional, self.stars
        keys = own_rays(rays).keys.cpu().numpy()
        parts = [np.empty((0, len(WEIGHT_SCORES)), np.float32)]
        for rows in watched_chunks(len(stars), _STARS, "distances behind the map", progress):
            some = stars[rows]
            nodes, kind = weight_nodes(some.distances), classes_of(some.distances)[0]
            draws = along.draws(some.l, some.b, nodes, keys[rows])
            log_weight = selection.log_weights(nodes, draws, kind)
            parts.append(np.maximum(log_weight, _DEEPEST).astype(np.float32))
        own = torch.from_numpy(np.concatenate(parts))
        return gathered(rays, own), used

    def _learned(self, along: DustAlong) -> tuple[SelectionWeights | None, int]:
        """Learn what is seen behind how much dust, and its mean over the sky, from how many stars;
        None, with a warning, from too few."""
        sample = self.sample
        assert sample.magnitude is not None
        near = thinned(sample[well_known(sample.distances)], _ABSOLUTE)
        assert near.magnitude is not None
        numbers, distance = np.arange(len(near)), near.distance
        ahead = along.draws(near.l, near.b, distance[:, None], numbers).mean(0)[:, 0]
        behind = distance_modulus(distance) + self.dimming * ahead
        absolute, faintest = near.magnitude - behind, self.limit - behind
        used = int((absolute <= faintest).sum())
        if used < LEAST:
            log.warning(
                "magnitude limit: %d stars of known distance and magnitude within it, %d are "
                "needed: distances are not weighted by it",
                used,
                LEAST,
            )
            return None, used
        luminosity = LuminosityFunction.of(absolute, faintest)
        kind, kinds = classes_of(sample.distances)
        seen = SeenPart.of(luminosity, self.limit, sample.magnitude, kind, kinds)
        some = thinned(sample, _DIRECTIONS)
        places = common_distances(some.distances)
        every = np.repeat(places[None, :], len(some), axis=0)
        draws = along.draws(some.l, some.b, every, np.arange(len(some)))
        return SelectionWeights.of(seen, self.dimming, some.distances, places, draws), used

    def applied(self, observed: Observations, log_weight: Tensor | None) -> Observations:
        """Return observations of the catalog with weighted distances, and nothing added."""
        if log_weight is None:
            return observed
        mine, stars = own_rows(observed.batch.functional), self.stars
        distances = WeightedDistances(stars.distances, log_weight[mine].double().numpy())
        return observed.with_distances(stars.l, stars.b, distances, self.grid)


@final
@dataclass(frozen=True, eq=False)
class PlacedStars:
    """Extinctions of n stars of uncertain distances before each of K places where they may be.

    resolved: by the nodes of a log-normal map; more: variance that lies between these, at the map's
    factor (n, K); probability: of the places (K,).
    """

    resolved: Prediction
    more: Tensor
    probability: Tensor

    @staticmethod
    @torch.no_grad()
    def of(fit: StarFit, observed: Observations, index: Tensor) -> "PlacedStars":
        """Predict those of stars at an index, for which `are_placed`."""
        posterior = fit.posterior
        assert isinstance(posterior, LogNormalPosterior)
        stops = Stops.of_segments().to(observed.measured.device)
        nodes, lacking = observed.extinctions_at(stops, index, posterior)
        more = torch.zeros_like(lacking)
        if posterior.unresolved is not None:
            more = posterior.unresolved.of_integrals(nodes.variance, lacking)
        return PlacedStars(nodes, more, stops.probability)


def are_known(observed: Observations, index: Tensor) -> Tensor:
    """Say of stars at an index whether what is added to their errors is little (n,)."""
    little = _LITTLE * observed.error_variance[index]
    return (observed.added_variance[index] < little).to(index.device)


def are_placed(fit: StarFit, observed: Observations, index: Tensor) -> Tensor:
    """Say of stars at an index whether they are predicted at places (n,).

    Those whose distances add more than little to their errors, and the dust beyond the box little:
    that is the prior's, the same for many stars. Zero points go with the average over distances,
    and so do means of stars, which are at no one place.
    """
    posterior = fit.posterior
    has_places = isinstance(posterior, LogNormalPosterior) and posterior.groups is None
    if not has_places or observed.spread is None:
        return torch.zeros_like(index, dtype=torch.bool)
    little = _LITTLE * observed.error_variance[index]
    inside = observed.expected_beyond[index].square() < little
    single = torch.ones_like(index, dtype=torch.bool)
    if observed.spread.multiplicity is not None:
        many = gathered(observed.batch.functional, observed.spread.multiplicity)
        single = many[index].to(index.device) < 2.0
    return inside.to(index.device) & ~are_known(observed, index) & single


@torch.no_grad()
def predictions(
    fit: StarFit, observed: Observations, index: Tensor, progress: Progress = unwatched
) -> Predictions:
    """Predict and score measurements at an index, at places where `are_placed`."""
    normal = fit.predictions(observed, index, progress)
    rows = are_placed(fit, observed, index).nonzero().squeeze(-1)
    data, mean = normal.data, normal.mean
    for part in watched_chunks(len(rows), _STARS, "scores by distance", progress):
        scored = _scored(fit, observed, index[rows[part]])
        own = rows[part].to(mean.device)
        data = data.with_rows(own, scored)
        mean = mean.index_copy(0, own, (normal.y[own] - scored.residual).to(mean))
    return replace(normal, data=data, mean=mean)


def _scored(fit: StarFit, observed: Observations, index: Tensor) -> DatumScores:
    """Score stars at an index, each of which is at one of a few places."""
    at, placed = fit.hyperparameters, PlacedStars.of(fit, observed, index)
    shape = placed.more.shape
    expected = Prediction(
        placed.resolved.mean.flatten(), (placed.resolved.variance + placed.more).flatten()
    )
    y, errors = (
        values[index].repeat_interleave(shape[1])
        for values in (observed.measured, observed.error_variance)
    )
    each, width2 = at.scored(y, errors, expected), at.squared_width(errors, expected)
    mean, variance, width2 = (
        values.view(shape) for values in (expected.mean, expected.variance, width2)
    )
    return scores_of_mixture(each, mean, variance, width2, placed.probability, at.nu)
