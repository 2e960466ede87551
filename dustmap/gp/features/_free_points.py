"""Where free inducing points start: the centres of clusters of the data."""

import torch
from torch import Tensor

#: Rows the clusters are sought among, per centre, and at least and at most in all.
_ROWS_PER_CENTRE, _FEWEST_ROWS, _MOST_ROWS = 20, 5_000, 100_000
#: Of the distances held at a time.
_BYTES = 2**26


def clustered_points(
    x: Tensor, count: int, generator: torch.Generator, *, steps: int = 10
) -> Tensor:
    """`count` centres (count, D) of the rows of x (N, D) by K-means, float64; fewer where fewer
    rows differ.

    Among a random part of the rows, of bounded size: starts drawn with probability ∝ squared
    distance to those before (Arthur & Vassilvitskii 2007), then `steps` of Lloyd's iteration.
    Centres differ from each other; x is to have axes of comparable units. generator: on the CPU,
    so that a seed means the same on every device.
    """
    if not 1 <= count <= len(x):
        raise ValueError(
            f"{count:,} inducing points asked of {len(x):,} rows: take at least 1 and no more than "
            "there are rows"
        )
    size = min(max(_ROWS_PER_CENTRE * count, _FEWEST_ROWS), max(_MOST_ROWS, count), len(x))
    picked = torch.randperm(len(x), generator=generator)[:size]
    rows = x[picked.to(x.device)].double()
    centres = _spread_starts(rows, count, generator)
    for _ in range(steps):
        centres = _moved(rows, centres)
    return centres


def _spread_starts(rows: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """`count` different rows, or all there are, by squared distance to the nearest one before."""
    uniform = torch.rand(count, generator=generator, dtype=torch.float64).tolist()
    chosen = [int(uniform[0] * len(rows))]
    nearest = (rows - rows[chosen[0]]).square().sum(-1)
    for share in uniform[1:]:
        mass = nearest.cumsum(0)
        if not float(mass[-1]) > 0.0:
            break
        # Right of all rows that have the sum, so that one of no mass is never drawn.
        drawn = torch.searchsorted(mass, share * mass[-1], right=True)
        chosen.append(min(int(drawn), int(nearest.nonzero()[-1])))
        nearest = torch.minimum(nearest, (rows - rows[chosen[-1]]).square().sum(-1))
    return rows[torch.tensor(chosen, device=rows.device)].clone()


def _moved(rows: Tensor, centres: Tensor) -> Tensor:
    """Every centre at the mean of the rows nearest to it; one without rows stays."""
    norms = centres.square().sum(-1)
    chunk = max(1, _BYTES // (8 * len(centres)))
    nearest = torch.cat(
        [(norms - 2.0 * part @ centres.mT).argmin(-1) for part in torch.split(rows, chunk)]
    )
    counts = torch.zeros_like(norms).index_add_(0, nearest, torch.ones_like(rows[:, 0]))
    sums = torch.zeros_like(centres).index_add_(0, nearest, rows)
    return torch.where(counts[:, None] > 0, sums / counts[:, None].clamp_min(1.0), centres)
