"""Stars as data of a Gaussian process, all at once or shared by ranks.

y_n = ∫ρ(s) sf_n(s) ds + noise, with what is expected beyond the box taken from y, and the variance
of distances and of that dust added to the noise.

Pixels of the sky, in HEALPix, are beams through which rays are seen, and patches of stars that are
held out together: a star beside another is predicted by it whatever the dust between the stars is
like, so that what tells of the prior is a patch larger than the correlation length.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dustmap.errors import UserError
from dustmap.gp import AbstractPosterior, Batch, Prediction, RegularGrid
from dustmap.gp.features import AbstractBeams
from dustmap.gp.functionals import (
    Counts,
    LineIntegrals,
    OutsidePolicy,
    Sharded,
    by_rows,
    gathered,
    local_of,
    mapped,
    own_rays,
)
from dustmap.inference import LogNormalPosterior
from dustmap.linalg import AbstractWorld, Progress, unwatched
from dustmap.sky._coordinates import pixel_directions, refuse_bad_nside
from dustmap.sky.observations import _sight_lines
from dustmap.sky.observations._column import FarColumn
from dustmap.sky.observations._segments import DistanceSpread, Moments, Stops
from dustmap.sky.observations._sight_lines import BeyondBox, PriorDust, SightLines
from dustmap.sky.stars import AbstractDistances, StarTable
from dustmap.sky.stars._priors import Array


@final
@dataclass(frozen=True, eq=False)
class Observations:
    """Data of stars on the density: y_n = ∫ρ(s) sf_n(s) ds + noise.

    Where ranks share the rays, spread and beyond are those of this rank's, and all else is of all.

    Attributes
    ----------
    batch : N weighted rays with extinction and the variance of its noise
    rows : (N,), the stars they come from
    counts : rays that leave the box, and those left out
    spread : what uncertain distances add to the noise; None where all are known
    measured, error_variance : (N,), extinctions and the variance of their errors alone
    cut : stars of which more than 1e-3 of the expected distance lies beyond their last edge
    beyond : parts of the rays outside the box whose dust the prior expects; None if it expects none
    shared : (N,), variance that a fit takes on top: stars behind the same dust are not independent
    column : all of the dust in the directions of a map of the sky; None where there is none
    stars_beyond : stars whose median distance is outside the box
    """

    batch: Batch
    rows: NDArray[np.int64]
    counts: Counts
    spread: DistanceSpread | None
    measured: Tensor
    error_variance: Tensor
    cut: int = 0
    beyond: BeyondBox | None = None
    shared: Tensor | None = None
    column: FarColumn | None = None
    stars_beyond: int = 0

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def exact(self) -> bool:
        """Whether the rays in the box are all that the extinctions have, but for their errors."""
        return self.spread is None and (self.beyond is None or self.counts.truncated == 0)

    @property
    def expected_beyond(self) -> Tensor:
        """Extinction (N,) taken from the measured ones for the dust beyond the box."""
        return self.measured - self.batch.y

    @property
    def added_variance(self) -> Tensor:
        """The variance (N,) that distances and dust beyond the box have added to the errors."""
        assert self.batch.noise_variance is not None
        return self.batch.noise_variance - self.error_variance

    def counts_at_the_box(self) -> dict[str, int]:
        """Return how many rays leave the box, how many stars are beyond it, and how many of them
        were left out."""
        left = "rays_truncated_at_the_box" if self.beyond is None else "rays_that_leave_the_box"
        return {
            left: self.counts.truncated,
            "stars_beyond_the_box": self.stars_beyond,
            "stars_dropped_outside_the_box": self.counts.dropped,
        }

    def counts_of_the_column(self) -> dict[str, int]:
        """Return how many pixels the column has, if there is one."""
        return {} if self.column is None else {"pixels_of_the_far_column": len(self.column)}

    def expected(self, dust: PriorDust) -> Tensor:
        """Return expected extinction beyond the box (N,), where the policy expects any."""
        mean = self._none() if self.beyond is None else self.beyond.expected(dust)
        return gathered(self.batch.functional, mean)

    def parts_beyond(self, dust: PriorDust) -> tuple[Tensor, Tensor, Tensor]:
        """Return the same, and the variance (N,): of the covariance of ρ, and of the distances."""
        rays, none = self.batch.functional, self._none()
        parts = (none, none, none) if self.beyond is None else self.beyond.parts(dust)
        mean, prior, distances = (gathered(rays, part) for part in parts)
        return mean, prior, distances

    @torch.no_grad()
    def extinctions_at(
        self, stops: Stops, index: Tensor, posterior: LogNormalPosterior
    ) -> tuple[Prediction, Tensor]:
        """Predict A (n, K) of stars at an index before each place where they may be, with the
        variance (n, K) that draws of the nodes lack before the data.

        What is expected beyond the box, which should be little, is the same at every place.
        """
        rays = self.batch.functional[index]
        moments = by_rows(rays, lambda own: stops.extinctions(own, posterior))
        mean, variance, lacking = moments.unbind(1)
        return Prediction(mean + self.expected_beyond[index, None].to(mean), variance), lacking

    def uniform(self, density: float, dust: PriorDust) -> Moments:
        """Return what distances and dust beyond the box add, with one density all over it."""
        return self._added(dust, partial(DistanceSpread.uniform, density=density))

    def added(
        self, posterior: AbstractPosterior, dust: PriorDust, progress: Progress = unwatched
    ) -> Moments:
        """Return the same with the posterior density in the box: the mean over its draws."""
        drawn = partial(DistanceSpread.added_variance, posterior=posterior, progress=progress)
        return self._added(dust, drawn)

    def _added(self, dust: PriorDust, variance: Callable[..., Tensor]) -> Moments:
        """Gather mean and variance beyond the box and the variance of distances of all ranks."""
        mean, apart = self._moments_beyond(dust)
        own = torch.zeros_like(mean)
        if self.spread is not None:
            outside = None if self.beyond is None else self.beyond.outside(dust)
            own = variance(self.spread, outside=outside)
        rays = self.batch.functional
        mean, apart, own = (gathered(rays, values) for values in (mean, apart, own))
        if self.beyond is None:
            return Moments(mean, own, none := torch.zeros_like(mean), none)
        alike = _sight_lines.crowding(gathered(rays, self.beyond.tracks()), dust)
        return Moments(mean, apart + own, (alike - 1.0) * apart, apart)

    def _moments_beyond(self, dust: PriorDust) -> tuple[Tensor, Tensor]:
        """Return expectation and variance beyond the box, of this rank's rays."""
        if self.beyond is not None:
            return self.beyond.moments(dust)
        return self._none(), self._none()

    def _none(self) -> Tensor:
        rays = self.batch.functional
        return torch.zeros(len(local_of(rays)), dtype=torch.float64, device=rays.device)

    def with_added(self, added: Moments) -> "Observations":
        """Return the measured extinctions less what is expected beyond the box, with the noise of
        error_variance + added.variance, whatever was added before."""
        mean, variance, shared = (
            values.to(self.measured) for values in (added.mean, added.variance, added.shared)
        )
        noise = self.error_variance + variance
        batch = Batch(self.batch.functional, self.measured - mean, noise, added_variance=variance)
        if self.beyond is not None:
            batch = replace(batch, offset=mean)
        return replace(self, batch=batch, shared=shared)

    def with_distances(
        self, l: Array, b: Array, distances: AbstractDistances, grid: RegularGrid
    ) -> "Observations":
        """Return the same data with other distributions of the distances, and nothing added.

        Rays that leave the box are truncated now under every policy, or go on through the dust of
        the prior, so that all are left.

        Parameters
        ----------
        l, b, distances : of the stars of this rank's rays, in their order
        grid : whose box they are seen through
        """
        rays = self.batch.functional
        own = own_rays(rays)
        outside = OutsidePolicy.TRUNCATE if self.beyond is None else OutsidePolicy.PRIOR
        lines = _sight_lines.sight_lines(
            l, b, distances, grid, outside, own.device, may_be_none=True
        )
        if len(lines) < len(own) or lines.spread is None:
            raise UserError(
                f"{len(own) - len(lines)} of {len(own)} stars are outside the box at distances "
                "that have changed: move or enlarge it (grid.center, grid.size)"
            )
        again = replace(lines.rays, keys=own.keys, groups=own.groups)
        return replace(
            self,
            batch=Batch(mapped(rays, again), self.measured, self.error_variance),
            spread=replace(lines.spread, rays=replace(lines.spread.rays, keys=own.keys)),
            beyond=lines.beyond,
            shared=None,
        )

    def training(self, index: Tensor) -> Batch:
        """Return the data of a fit, which takes the shared variance on top, after those of the
        column, so that the stars of a fit and of one to more of them come in the same places."""
        data = self.batch[index]
        if self.shared is not None and data.noise_variance is not None:
            assert data.added_variance is not None
            more = self.shared[index]
            noise, added = data.noise_variance + more, data.added_variance + more
            data = replace(data, noise_variance=noise, added_variance=added)
        return data if self.column is None else self.column.before(data)

    def planned(self, index: Tensor) -> Batch:
        """Return as many data as a fit may take: after those of all pixels of the column."""
        if self.column is None:
            return self.batch[index]
        column = self.column.with_data(self.column.value, self.column.std.square())
        return replace(self, column=column).training(index)

    def shared_part(self, index: Tensor) -> float:
        """Return the mean part of the noise of a fit that the shared variance is."""
        if self.shared is None or len(index) == 0:
            return 0.0
        assert self.batch.noise_variance is not None
        more = self.shared[index]
        return float((more / (more + self.batch.noise_variance[index])).mean())


def observe(
    stars: StarTable,
    grid: RegularGrid,
    outside: OutsidePolicy,
    dtype: torch.dtype = torch.float64,
    device: torch.device | None = None,
) -> Observations:
    """Make data of stars: rays from the Sun, within the box that the grid's nodes span.

    The noise is that of the measurements; `with_added` brings in the spread of the distances and
    the dust beyond the box.
    Every random rule knows a ray by its row in `stars`, so that batches do not change it.

    Examples
    --------
    >>> from dustmap.sky.stars import ExactDistances
    >>> from dustmap.sky.systems import system_named
    >>> l, b, distance, extinction, error = np.array([[90.0], [0.0], [100.0], [0.2], [0.01]])
    >>> where, system = ExactDistances(distance), system_named("A_V")
    >>> stars = StarTable(np.array([1]), l, b, where, extinction, error, system)
    >>> grid = RegularGrid((-200.0,) * 3, (20.0,) * 3, (21,) * 3)
    >>> data = observe(stars, grid, OutsidePolicy.ERROR).batch
    >>> data.functional.moments()[:, 0], data.y
    (tensor([100.], dtype=torch.float64), tensor([0.2000], dtype=torch.float64))
    """
    lines = _sight_lines.sight_lines(stars.l, stars.b, stars.distances, grid, outside, device)
    data = _observed(lines, _grouped(lines, stars), stars, dtype)
    return replace(data, stars_beyond=lines.outside)


def _grouped(lines: SightLines, stars: StarTable) -> LineIntegrals:
    """Return the rays with the groups of their stars, if these have any."""
    if stars.groups is None:
        return lines.rays
    groups = torch.from_numpy(stars.groups[lines.rows]).to(lines.rays.device)
    return replace(lines.rays, groups=groups)


def _observed(
    lines: SightLines, rays: LineIntegrals | Sharded, stars: StarTable, dtype: torch.dtype
) -> Observations:
    """Make data of the stars along these sight lines; of all ranks where they share the rays."""
    columns = stars.extinction[lines.rows], np.square(stars.extinction_error[lines.rows])
    measured, noise = (
        gathered(rays, torch.from_numpy(values).to(lines.rays.device, dtype)) for values in columns
    )
    batch, spread, beyond = Batch(rays, measured, noise), lines.spread, lines.beyond
    if stars.multiplicity is not None:
        many = torch.from_numpy(stars.multiplicity[lines.rows]).to(lines.rays.device)
        if spread is not None:
            spread = replace(spread, multiplicity=many)
        if beyond is not None:
            outside = replace(beyond.spread, multiplicity=many[beyond.rows])
            beyond = replace(beyond, spread=outside)
    return Observations(batch, lines.rows, lines.counts, spread, measured, noise, lines.cut, beyond)


def observe_share(
    stars: StarTable,
    first: int,
    grid: RegularGrid,
    outside: OutsidePolicy,
    dtype: torch.dtype,
    device: torch.device | None,
    world: AbstractWorld,
) -> Observations:
    """Observe all stars, of which this rank has those from row `first` on.

    Only the rays are shared: extinctions, errors and counts of all are on every rank.

    Parameters
    ----------
    stars, first : those of this rank, and the row of the first of them among all
    grid, outside, dtype, device : see `observe`
    world : the ranks
    """
    where = stars.l, stars.b, stars.distances
    lines = _sight_lines.sight_lines(*where, grid, outside, device, may_be_none=True)
    rays = Sharded.of(_counted_from(first, _grouped(lines, stars)), world)
    _sight_lines.refuse_nothing(len(rays), int(world.total(torch.tensor(len(stars)))), grid)
    counts = lines.counts
    tally = [counts.truncated, counts.dropped, lines.cut, lines.outside]
    truncated, dropped, cut, far = world.total(torch.tensor(tally)).tolist()
    counts = replace(counts, truncated=truncated, dropped=dropped)
    rows = rays.gathered(torch.from_numpy(lines.rows + first)).numpy()
    data = _observed(lines, rays, stars, dtype)
    spread = data.spread
    if spread is not None:
        spread = replace(spread, rays=_counted_from(first, spread.rays))
    return replace(data, rows=rows, counts=counts, spread=spread, cut=cut, stars_beyond=far)


def _counted_from(first: int, rays: LineIntegrals) -> LineIntegrals:
    return replace(rays, keys=rays.keys + first)


@final
class HealpixBeams(AbstractBeams):
    """A beam for each pixel of `nside`, bilinear between the four nearest on two rings."""

    def __init__(self, nside: int) -> None:
        refuse_bad_nside(nside, "nside of beams")
        self.nside = nside

    @cached_property
    def directions(self) -> Tensor:
        return torch.from_numpy(pixel_directions(self.nside, np.arange(12 * self.nside**2)))

    def around(self, direction: Tensor) -> tuple[Tensor, Tensor]:
        import healpy

        theta, phi = healpy.vec2ang(direction.cpu().numpy())
        pixel, weight = healpy.get_interp_weights(self.nside, theta, phi, nest=True)
        return (
            torch.from_numpy(np.ascontiguousarray(pixel.T)).to(direction.device, torch.int64),
            torch.from_numpy(np.ascontiguousarray(weight.T)).to(direction.device),
        )
