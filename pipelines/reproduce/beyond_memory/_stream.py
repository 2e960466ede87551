"""A pass over a star store of any size: the product of a fit, a chunk of rows at a time."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeAlias, final

import numpy as np
import torch
from torch import Tensor

from dustmap.gp import Batch, RegularGrid
from dustmap.gp.features import Taps
from dustmap.gp.functionals import LineIntegrals, OutsidePolicy
from dustmap.linalg import chunks
from dustmap.sky.observations import sight_lines
from dustmap.sky.stars import StarTable

#: Stars to read at once, and rays whose rows are made at once.
STARS, RAYS = 2**16, 2**11
#: Rows of few rays on the columns of a field.
RowsOf: TypeAlias = Callable[[LineIntegrals], Taps]
#: A number (N,) for each datum.
PerDatum: TypeAlias = Callable[[Batch], Tensor]


@final
@dataclass(frozen=True, eq=False)
class StreamedPass:
    """Sums over all stars of a store that are seen through the box.

    force (M,) = Wᵀ Σ⁻¹ (y − W u), float64; misfit: Σ_n (y_n − (W u)_n)² / Σ_nn; rays: how many.
    """

    force: Tensor
    misfit: float
    rays: int


@torch.no_grad()
def stream(
    stars: Iterable[StarTable],
    grid: RegularGrid,
    outside: OutsidePolicy,
    rows: RowsOf,
    field: Tensor,
    *,
    target: PerDatum | None = None,
    variance: PerDatum | None = None,
) -> StreamedPass:
    """Sum Wᵀ Σ⁻¹ (y − W u) over all stars of a store, in float64.

    Rows of W serve both products and are forgotten: memory is that of a chunk and a few fields.

    stars: such as `StarStore.chunks(STARS)`; field: u (M,); target, variance: y, or y − H β, and
    the diagonal of Σ; those of the measurements by default. rows: for a log-normal density
    `interpolation_taps` and ρ at the nodes, or the taps of a `BeamTable` and its expansion of ρ;
    for a Gaussian one `LocalFeatures.taps` and u = C^½ ε, so that C^½ of the force is
    Φᵀ Σ⁻¹ (y − Φ ε).
    """
    u = field.double()[:, None]
    force, misfit, rays = torch.zeros_like(u), 0.0, 0
    for table in stars:
        where = table.l, table.b, table.distances
        lines = sight_lines(*where, grid, outside, field.device, may_be_none=True)
        if not len(lines):
            continue
        columns = table.extinction[lines.rows], np.square(table.extinction_error[lines.rows])
        batch = Batch(lines.rays, *(torch.from_numpy(each).to(u) for each in columns))
        assert batch.noise_variance is not None
        y = (batch.y if target is None else target(batch)).double()
        sigma = (batch.noise_variance if variance is None else variance(batch)).double()
        for part in chunks(len(batch), RAYS):
            taps = rows(lines.rays[part]).to(torch.float64)
            left = y[part, None] - taps.matmul(u)
            weighted = left / sigma[part, None]
            taps.add_adjoint(weighted, force)
            misfit += float((left * weighted).sum())
        rays += len(batch)
    return StreamedPass(force[:, 0], misfit, rays)
