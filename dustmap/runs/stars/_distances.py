"""Distances of stars as a map of the dust and their extinctions leave them.

The noise is that of the run: its factor on the errors, its scatter, its degrees of freedom. A map
that has seen a star has used its extinction already, which is then counted twice; the report of
`predict` says of how many.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias, final

import numpy as np
import torch
from numpy.typing import NDArray

from dustmap.errors import UserError
from dustmap.gp import Prediction, RegularGrid
from dustmap.gp.functionals import OutsidePolicy
from dustmap.inference import LogNormalPosterior
from dustmap.linalg import Progress, chunks, unwatched
from dustmap.runs._machine import TOGETHER
from dustmap.runs.stars._engines import StarFit
from dustmap.sky import observations
from dustmap.sky.catalogs import Extinctions
from dustmap.sky.observations import (
    DistancePosterior,
    PriorDust,
    distance_nodes,
    distance_posterior,
    smoothed,
)
from dustmap.sky.stars import AbstractDistances, ExactDistances
from dustmap.sky.systems import ExtinctionSystem, conversion

Array: TypeAlias = NDArray[np.float64]

#: Draws of a log-normal map that take part, at most.
_DRAWS = 16
#: Columns of percentiles -> their probabilities, and all that are added.
_PERCENTILES = {f"distance_percentile{q}": q / 100.0 for q in (16, 50, 84)}
COLUMNS = ("distance_mean", "distance_std", *_PERCENTILES)


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
        found = {name: np.full(len(l), np.nan) for name in COLUMNS}
        rows = np.flatnonzero(np.isfinite(measured.value))
        factor = conversion(measured.system, self.system)
        for part in chunks(len(rows), max(1, TOGETHER // len(observations.SCORES))):
            progress("distances", part.start, len(rows))
            at = rows[part]
            y, error = factor * measured.value[at], factor * measured.error[at]
            own = None if groups is None else groups[at]
            posterior = self.posterior(l[at], b[at], distances[at], y, error, own)
            found["distance_mean"][at] = posterior.mean
            found["distance_std"][at] = posterior.std
            levels = posterior.quantile(np.array(list(_PERCENTILES.values())))
            for name, values in zip(_PERCENTILES, levels.T, strict=True):
                found[name][at] = values
        progress("distances", len(rows), len(rows))
        return found

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
        along = observations.predict_extinction(self.fit.posterior, lines, self.dust)
        moments = np.zeros((2, nodes.size))
        for row, values in zip(moments, (along.mean, along.variance), strict=True):
            row[lines.rows] = values.cpu().double().numpy()
        mean, variance = moments.reshape(2, *nodes.shape)
        draws = mean[None]
        if isinstance(self.fit.posterior, LogNormalPosterior):
            count = min(_DRAWS, self.fit.posterior.n_samples)
            drawn = self.fit.posterior.sample(lines.rays, count, torch.Generator())
            flat = np.zeros((count, nodes.size))
            flat[:, lines.rows] = drawn.cpu().double().numpy()
            draws, variance = smoothed(flat.reshape(count, *nodes.shape), mean, variance)
        numbers = torch.from_numpy(y), torch.from_numpy(error**2)

        def log_density(mean: Array, variance: Array) -> Array:
            some = [each[:, None].expand(mean.shape).reshape(-1) for each in numbers]
            flat = torch.from_numpy(mean.ravel()), torch.from_numpy(variance.ravel())
            expected, none = Prediction(*flat), torch.zeros_like(flat[1])
            at = self.fit.hyperparameters
            density = at.log_density(some[0], some[1], expected, none)
            return density.numpy().reshape(mean.shape)

        return distance_posterior(nodes, draws, variance, log_density)
