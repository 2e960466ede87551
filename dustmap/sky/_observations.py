"""The one bridge from the sky to the Gaussian process: stars become line integrals."""

from dataclasses import dataclass
from typing import final

import numpy as np
import torch
from numpy.typing import NDArray

from dustmap.gp import Batch, RegularGrid
from dustmap.gp.functionals import Counts, LineIntegrals, OutsidePolicy
from dustmap.sky._catalog import StarTable


@final
@dataclass(frozen=True, eq=False)
class Observations:
    """What the stars say of the density: y_n = ∫₀^{d_n} ρ ds + noise.

    batch: N rays with extinction and its variance; rows (N,): the stars they come from; counts:
    rays that were truncated at the box, and those left out.
    """

    batch: Batch
    rows: NDArray[np.int64]
    counts: Counts

    def __len__(self) -> int:
        return len(self.rows)


def observe(
    stars: StarTable,
    grid: RegularGrid,
    outside: OutsidePolicy,
    dtype: torch.dtype = torch.float64,
    device: torch.device | None = None,
) -> Observations:
    """Rays from the Sun to the stars, within the box that the grid's nodes span.

    Every random rule knows a ray by its row in `stars`, so that batches do not change it.
    """
    positions = torch.from_numpy(stars.positions()).to(device)
    rays, kept, counts = LineIntegrals.from_observer(positions).clipped(
        grid.lower, grid.upper, outside
    )
    if len(rays) == 0:
        raise ValueError(
            f"none of the {len(stars)} stars is seen through the box {grid.lower} to "
            f"{grid.upper} pc; move or enlarge it (grid.center, grid.size)"
        )
    rows = kept.cpu().numpy()
    y, sigma = stars.extinction[rows], stars.extinction_error[rows]
    to_torch = [torch.from_numpy(values).to(device, dtype) for values in (y, sigma**2)]
    return Observations(Batch(rays, *to_torch), rows, counts)
