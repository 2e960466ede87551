"""What a grid cannot resolve: the variance of exp(s) between the nodes that interpolate it.

The model has ρ = exp(s) at the nodes and Σ_i w_i(x) ρ_i between them. What it lacks there,

    d(x) = ρ(x) − Σ_i w_i(x) ρ_i = Σ_j a_j(x) ρ(p_j),

has the covariance E[d(x) d(x')] = E[ρ²] Σ_jl a_j(x) a_l(x') exp(k(p_j − p_l') − k(0)) for a normal
s of covariance k, and is correlated over a cell or two. So an extinction ∫ w ρ dt along a ray, of
which neither direction nor place in the cells matters much, lacks

    Var ∫ w d dt ≈ Λ ∫ w² E[ρ²] dt,    Λ = E_x ∫ E[d(x) d(x + t u)] dt / E[ρ²],

the mean over places x in a cell and directions u.
"""

import itertools
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from dustmap.gp import RegularGrid
from dustmap.gp.kernels import AbstractKernel

#: Lines through a cell, their half length in cells, and places on a cell's length of each.
_LINES, _REACH, _PER_CELL = 48, 3, 6


@final
@dataclass(frozen=True)
class Unresolved:
    """The share of E[ρ²] that is between the nodes.

    variance: E[d²] / E[ρ²], the mean over places; length: Λ, in the units of the grid.
    """

    variance: float
    length: float


@torch.no_grad()
def unresolved(kernel: AbstractKernel, grid: RegularGrid) -> Unresolved:
    """Return the mean over 48 lines through cells of a grid, the same for the same arguments.

    >>> from dustmap.gp.kernels import Matern32
    >>> grid = RegularGrid.from_bounds((0.0,), (10.0,), (11,))
    >>> coarse, fine = (unresolved(Matern32(ell, 1.0, dim=1), grid) for ell in (1.0, 10.0))
    >>> fine.variance < 0.01 < coarse.variance
    True
    """
    dim = grid.dim
    generator = torch.Generator().manual_seed(0)
    start = torch.rand(_LINES, dim, dtype=torch.float64, generator=generator)
    u = torch.randn(_LINES, dim, dtype=torch.float64, generator=generator)
    u /= u.norm(dim=1, keepdim=True)
    spacing = torch.tensor(grid.spacing, dtype=torch.float64)
    step = min(grid.spacing) / _PER_CELL
    t = step * torch.arange(-_REACH * _PER_CELL, _REACH * _PER_CELL + 1, dtype=torch.float64)
    x = (start * spacing)[:, None] + t[:, None] * u[:, None]
    places, weights = _differences(x / spacing)
    places = places * spacing
    middle = len(t) // 2
    variance = along = 0.0
    zero = kernel.variance()
    for p, a in zip(places, weights, strict=True):
        dx = p[middle][:, None, None] - p[None]
        density = (kernel(dx) - zero).exp()
        covariance = torch.einsum("i,iml,ml->m", a[middle], density, a)
        variance += float(covariance[middle]) / _LINES
        along += step * float(covariance.sum()) / _LINES
    return Unresolved(variance, max(along, 0.0))


def _differences(x: Tensor) -> tuple[Tensor, Tensor]:
    """Places p_j (..., 1 + 2^D, D) and weights a_j (..., 1 + 2^D) of d(x), at x in cells."""
    low = x.floor()
    part = x - low
    places, weights = [x], [torch.ones_like(x[..., 0])]
    for corner in itertools.product((0.0, 1.0), repeat=x.shape[-1]):
        c = torch.tensor(corner, dtype=x.dtype)
        places.append(low + c)
        weights.append(-(c * part + (1.0 - c) * (1.0 - part)).prod(-1))
    return torch.stack(places, -2), torch.stack(weights, -1)
