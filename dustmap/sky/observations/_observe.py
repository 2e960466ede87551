"""Stars become data of the Gaussian process."""

from dataclasses import dataclass, replace
from typing import final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dustmap.gp import AbstractPosterior, Batch, RegularGrid
from dustmap.gp.functionals import Counts, OutsidePolicy, Sharded
from dustmap.sky.observations._sight_lines import sight_lines
from dustmap.sky.observations._spread import DistanceSpread
from dustmap.sky.stars import StarTable


@final
@dataclass(frozen=True, eq=False)
class Observations:
    """What the stars say of the density: y_n = ∫ρ(s) sf_n(s) ds + noise.

    batch: N weighted rays with extinction and the variance of its noise; rows (N,): the stars they
    come from; counts: rays that were truncated at the box, and those left out; spread: how
    uncertain distances add to the noise, None where all are known; error_variance (N,): of the
    measurements alone; cut: stars of which more than 1e-3 of the expected distance lies beyond
    their last edge.

    Where ranks share the rays, the spread is that of this rank's, and all else is of all.
    """

    batch: Batch
    rows: NDArray[np.int64]
    counts: Counts
    spread: DistanceSpread | None
    error_variance: Tensor
    cut: int = 0

    def __len__(self) -> int:
        return len(self.rows)

    def uniform_spread(self, density: float | Tensor) -> Tensor:
        """ρ² Var d (N,) of the uncertain distances, in a density that is the same everywhere."""
        return self._of_all(self._spread.uniform(density))

    def added_variance(self, posterior: AbstractPosterior) -> Tensor:
        """V_n (N,) of the uncertain distances, the mean over draws of the posterior density."""
        return self._of_all(self._spread.added_variance(posterior))

    @property
    def _spread(self) -> DistanceSpread:
        if self.spread is None:
            raise ValueError("all distances are known: they add nothing to the noise")
        return self.spread

    def _of_all(self, values: Tensor) -> Tensor:
        rays = self.batch.functional
        return rays.gathered(values) if isinstance(rays, Sharded) else values

    def with_added(self, variance: Tensor) -> "Observations":
        """The same data with noise of error_variance + variance (N,), whatever was added before."""
        added = variance.to(self.error_variance)
        noise = self.error_variance + added
        return replace(self, batch=Batch(self.batch.functional, self.batch.y, noise))


def observe(
    stars: StarTable,
    grid: RegularGrid,
    outside: OutsidePolicy,
    dtype: torch.dtype = torch.float64,
    device: torch.device | None = None,
) -> Observations:
    """Rays from the Sun to the stars, within the box that the grid's nodes span.

    The noise is that of the measurements; `with_added` brings in the spread of the distances.
    Every random rule knows a ray by its row in `stars`, so that batches do not change it.
    """
    lines = sight_lines(stars.l, stars.b, stars.distances, grid, outside, device)
    y, sigma = stars.extinction[lines.rows], stars.extinction_error[lines.rows]
    measured, noise = (
        torch.from_numpy(values).to(device, dtype) for values in (y, np.square(sigma))
    )
    batch = Batch(lines.rays, measured, noise)
    return Observations(batch, lines.rows, lines.counts, lines.spread, noise, lines.cut)
