"""One pass over stars, a chunk at a time: what they pull the field towards."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeAlias, final

import torch
from torch import Tensor

from dustmap.gp import Batch, RegularGrid
from dustmap.gp.features import Taps, chunks
from dustmap.gp.functionals import LineIntegrals, OutsidePolicy
from dustmap.sky.observations._observe import observe
from dustmap.sky.observations._sight_lines import NothingSeen
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
    progress: Callable[[int], None] | None = None,
) -> StreamedPass:
    """Wᵀ Σ⁻¹ (y − W u) for u = field (M,), rows of W made, used in both products and forgotten.

    stars: such as `StarStore.chunks(STARS)`. rows: for a log-normal density `interpolation_taps`
    and ρ at the nodes, or the taps of a `BeamTable` and its expansion of ρ; for a Gaussian one
    `LocalFeatures.taps` and u = C^½ ε, so that C^½ of the force is Φᵀ Σ⁻¹ (y − Φ ε). target: y
    where left out, or y − H β. variance: the diagonal of Σ, that of the measurements where left
    out.

    Memory is that of a chunk and a few fields, whatever the store; sums are in float64.
    """
    found = field.double()[:, None]
    force, misfit, rays, done = torch.zeros_like(found), 0.0, 0, 0
    for table in stars:
        done += len(table)
        try:
            batch = observe(table, grid, outside, device=field.device).batch
        except NothingSeen:
            continue
        finally:
            if progress is not None:
                progress(done)
        assert isinstance(batch.functional, LineIntegrals)
        assert batch.noise_variance is not None
        y = (batch.y if target is None else target(batch)).double()
        sigma = (batch.noise_variance if variance is None else variance(batch)).double()
        for part in chunks(len(batch), RAYS):
            taps = rows(batch.functional[part]).to(torch.float64)
            left = y[part, None] - taps.matmul(found)
            weighted = left / sigma[part, None]
            taps.add_adjoint(weighted, force)
            misfit += float((left * weighted).sum())
        rays += len(batch)
    return StreamedPass(force[:, 0], misfit, rays)
